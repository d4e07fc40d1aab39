"""Gather, orthogonalise, scatter: one Muon step of all matrices of one exchange plan."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.monitoring.check import PipelineWatch
from deepspeed_muon.monitoring.results import Finish, Result
from deepspeed_muon.plan.exchange import Chunk, ExchangePlan
from deepspeed_muon.plan.layout import Fragment
from deepspeed_muon.transport.buffers import ExchangeBuffers
from deepspeed_muon.transport.waiting import phase

if TYPE_CHECKING:
    from deepspeed_muon.transport.shared import SharedMatrices
    from deepspeed_muon.transport.tensor_parallel import TensorParallelExchange

__all__ = ["Arrival", "MuonPipeline", "Orthogonalize", "StepCalls", "StepStats"]

# Matrices whose short side is at least this long are orthogonalised one by one: on a CPU bmm is slower than mm there,
# on a GPU one of them fills the chip (two waves of 128 x 128 tiles on 132 multiprocessors).
_CPU_BATCH_BELOW = 256
_GPU_BATCH_BELOW = 2048
# Elements that a batch may stack at most: stacking copies, and the iteration needs three times as much again.
_BATCH_NUMEL = 1 << 25
# Chunks that have a place in memory: one arrives, one is orthogonalised, one returns.
_SLOTS = 3

# (batch, rows, cols) -> the same in the settings' dtype; called as ``orthogonalize(x, settings=...)``.
Orthogonalize = Callable[..., Tensor]
Apply = Callable[[int, Fragment, Tensor], None]


class DirectionSource(Protocol):
    """What makes directions; :class:`deepspeed_muon.step.momentum.Directions`."""

    def prepare(self, indices: Sequence[int], /) -> None:
        """Update momentum and make the directions of these matrices, in that order in memory; each once in a step."""

    def get(self, index: int, fragment: Fragment, /) -> Tensor:
        """Return a local fragment's direction: contiguous, one-dimensional, in the wire dtype, on any device."""

    def release(self, indices: Sequence[int], /) -> None:
        """Forget these directions."""


@dataclass(frozen=True, slots=True)
class StepCalls:
    """What the pipeline asks its caller for in one step.

    Attributes:
        directions: Makes the directions of a chunk's active matrices and hands out the local fragments.
        apply: Receives matrix index, local fragment and the orthogonalised fragment (one-dimensional, wire dtype, only
            valid during the call).
        relative_scales: Returns, for a matrix of unequal blocks, the scale of each block relative to the first one's;
            the owner multiplies by it.
        finish: Turns orthogonalised blocks into updates.
    """

    directions: DirectionSource
    apply: Apply
    relative_scales: Callable[[int], Sequence[float]]
    finish: Finish | None = None


@dataclass(slots=True)
class StepStats:
    """What this rank did since the counters were last reset.

    Attributes:
        bytes_sent: Bytes that left this rank in the two all-to-alls (own fragments are not sent).
        matrices_orthogonalized: Matrices that went through Newton-Schulz on this rank; a stack in pieces counts once,
            where its first blocks are.
        exchanges: All-to-alls that this rank took part in.
    """

    bytes_sent: int = 0
    matrices_orthogonalized: int = 0
    exchanges: int = 0

    def reset(self) -> None:
        """Set all counters to zero."""
        self.bytes_sent = self.matrices_orthogonalized = self.exchanges = 0


@dataclass(slots=True)
class _Flight:
    """One chunk on its way.

    Attributes:
        chunk: What travels.
        held: Fragments that this rank holds of other ranks' matrices: directions leave from here, and their updates
            arrive here.
        owned: Fragments that other ranks hold of this rank's matrices: directions arrive, and updates leave.
        number: Of the chunk in its plan.
        work: The all-to-all that is under way.
    """

    chunk: Chunk
    held: Tensor
    owned: Tensor
    number: int
    work: dist.Work | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """Updates of a step that are still on their way.

    Attributes:
        land: Waits for them and applies them; communicates nothing.
        next_slot: The first place in memory that they leave free.
    """

    land: Callable[[], None]
    next_slot: int


class MuonPipeline:
    """Runs one :class:`ExchangePlan` in every step.

    The direction is exchanged and the update returned in the wire dtype, also for fragments that stay on their
    rank: so the result does not depend on the number of ranks.

    While one chunk is orthogonalised, the directions of the next one and the updates of the one before it travel. All
    ranks issue the all-to-alls in one order: gather 0, gather 1, scatter 0, gather 2, scatter 1, and so on. NCCL runs
    them on a stream of its own and gloo on threads of its own, so nothing else is needed for them to overlap. What
    the caller wants done meanwhile and one half of the matrices that never move come behind the first gather, the other
    half behind the last scatter.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        wire_dtype: torch.dtype,
        ns_settings: NsSettings,
        orthogonalize: Orthogonalize,
        stats: StepStats,
        watch: PipelineWatch,
        buffers: ExchangeBuffers,
        overlap: bool = True,
        tensor_parallel: TensorParallelExchange | None = None,
        shared: SharedMatrices | None = None,
        leaves_late: bool = False,
        meets_others: bool = False,
        number: int = 0,
    ) -> None:
        """Keep the plan and its settings and reserve the buffers; nothing is allocated or sent.

        Args:
            plan: This rank's view of the exchange.
            group: Data-parallel process group, ``None`` for the default one.
            device: Where the exchange and the products run.
            wire_dtype: Dtype of what is sent.
            ns_settings: The iteration.
            orthogonalize: What runs it, with the contract of ``math.newton_schulz.orthogonalize``.
            stats: Counters to increase.
            watch: Checks and measures the results.
            buffers: Where chunks lie while they travel; other pipelines may share it.
            overlap: Whether chunks travel while others are orthogonalised. Without it every all-to-all is waited for
                at once, in a third of the memory; the results are equal to the last bit.
            tensor_parallel: Orthogonalises what this rank holds a tensor-parallel shard or copy of.
            shared: Orthogonalises what this rank shares with others; needed if the plan has slabs.
            leaves_late: Whether the last updates may be left to the caller.
            meets_others: Whether those of the pipeline before may be on their way when this one starts.
            number: Of the step set, for errors.
        """
        self.plan = plan
        self.stats = stats
        self._watch = watch
        self._group = group
        self._device = device
        self._wire_dtype = wire_dtype
        self._ns_settings = ns_settings
        self._orthogonalize = orthogonalize
        self._tensor_parallel = tensor_parallel
        self._shared = shared
        self._buffers = buffers
        self._overlap = overlap
        self._number = number
        self._number_of = {id(chunk): position for position, chunk in enumerate(plan.chunks)}
        moving = [chunk for chunk in plan.chunks if chunk.scatters]
        most = _SLOTS if overlap else 1
        # Pipelines that follow each other must count their places alike.
        self._slots = most if leaves_late or meets_others else max(1, min(most, len(moving)))
        for slot in range(most if meets_others and moving else min(most, len(moving))):
            held = max(sum(chunk.scatter_recv_splits) for chunk in moving)
            owned = max(sum(chunk.scatter_send_splits) for chunk in moving)
            buffers.reserve(f"held {slot}", held * wire_dtype.itemsize)
            buffers.reserve(f"owned {slot}", owned * wire_dtype.itemsize)

    def run(
        self,
        *,
        active: Sequence[bool],
        calls: StepCalls,
        meanwhile: Callable[[], None] | None = None,
        first_slot: int = 0,
        refresh: Callable[[int, int], None] | None = None,
    ) -> Arrival | None:
        """Exchange and orthogonalise all active matrices and apply every local fragment of the updates.

        Must be called by all ranks of the group with the same ``active``.

        Args:
            active: One flag per matrix of the plan: whether any rank has a gradient for it.
            calls: Where directions come from and updates go.
            meanwhile: Called once, behind the first gather. It must not communicate.
            first_slot: Place in memory of the first chunk.
            refresh: If given, the last updates may be left to the caller, who lands them before it runs the next but
                one pipeline; called with the place in the partition, offset and elements, of each of those.

        Returns:
            What is still on its way, or ``None``.
        """
        chunks = [chunk for chunk in self.plan.chunks if any(active[index] for index in chunk.matrices)]
        waiting = deque(enumerate(chunk for chunk in chunks if chunk.scatters))
        staying = deque(chunk for chunk in chunks if not chunk.scatters)
        coming: deque[_Flight] = deque()
        returning: deque[_Flight] = deque()

        def depart() -> None:
            if waiting:
                number, chunk = waiting.popleft()
                coming.append(self._depart(chunk, (first_slot + number) % self._slots, active, calls))

        def stay(kept: int) -> None:
            while len(staying) > kept:
                chunk = staying.popleft()
                calls.directions.prepare(self._in_batches(chunk, active))
                self._compute(chunk, None, active, calls)

        depart()
        if meanwhile is not None:
            meanwhile()
        # Half of them behind the first gather, half behind the last scatter.
        stay(len(staying) // 2 if self._overlap and coming else 0)
        while coming:
            flight = coming.popleft()
            if self._overlap:
                depart()
            self._wait("gather", flight)
            self._compute(flight.chunk, flight.owned, active, calls)
            self._send_back(flight)
            returning.append(flight)
            if not coming and not waiting:
                stay(0)
            # The chunk before has returned while this one was orthogonalised; its place is the next one's.
            kept = int(self._overlap and (bool(coming) or refresh is not None))
            while len(returning) > kept:
                self._land(returning.popleft(), active, calls.apply)
            if not self._overlap:
                depart()
        if not returning:
            return None
        moved = sum(chunk.scatters for chunk in chunks)
        # Without the directions, which would keep the gradients alive.
        land = functools.partial(self._land, returning.popleft(), active, calls.apply, refresh)
        return Arrival(land, (first_slot + moved) % self._slots)

    def _depart(self, chunk: Chunk, slot: int, active: Sequence[bool], calls: StepCalls) -> _Flight:
        """Start the gather of a chunk: this rank's fragments go to their owners."""
        # The same fragments travel in both directions, so the updates come back to where the directions left from.
        flight = _Flight(
            chunk,
            held=self._buffers.take(f"held {slot}", sum(chunk.scatter_recv_splits), self._wire_dtype),
            owned=self._buffers.take(f"owned {slot}", sum(chunk.scatter_send_splits), self._wire_dtype),
            number=self._number_of[id(chunk)],
        )
        calls.directions.prepare(self._in_batches(chunk, active))
        if chunk.gathers:
            for segment in chunk.outgoing:
                # The place of a matrix without a gradient keeps what it held: nobody reads it.
                if active[segment.matrix]:
                    flight.held.narrow(0, segment.buffer_offset, segment.fragment.numel).copy_(
                        calls.directions.get(segment.matrix, segment.fragment), non_blocking=True
                    )
            with self._phase("gather", flight):
                flight.work = self._all_to_all(
                    flight.owned, flight.held, chunk.gather_recv_splits, chunk.gather_send_splits
                )
        return flight

    def _phase(self, what: str, flight: _Flight) -> contextlib.AbstractContextManager[None]:
        return phase(f"{what} of chunk {flight.number} of step set {self._number}", self._group)

    def _wait(self, what: Literal["gather", "scatter"], flight: _Flight) -> None:
        """Wait until a flight's all-to-all is done; on a GPU the current stream waits, not the process."""
        with self._watch.span(what), self._phase(what, flight):
            if flight.work is not None:
                flight.work.wait()
                flight.work = None

    def _compute(
        self,
        chunk: Chunk,
        owned_buffer: Tensor | None,
        active: Sequence[bool],
        calls: StepCalls,
    ) -> None:
        """Orthogonalise this rank's matrices of a chunk; put the updates over the directions in ``owned_buffer``."""
        outgoing: dict[int, list[tuple[Fragment, int]]] = {}
        for segment in chunk.updates_out:
            outgoing.setdefault(segment.matrix, []).append((segment.fragment, segment.buffer_offset))
        owned = [index for index in chunk.owned if active[index]]
        for index, update in self._updates(owned, chunk, owned_buffer, calls):
            for fragment in self._local(index):
                calls.apply(index, fragment, update.narrow(0, fragment.matrix_offset, fragment.numel))
            for fragment, offset in outgoing.get(index, ()):
                assert owned_buffer is not None
                owned_buffer.narrow(0, offset, fragment.numel).copy_(
                    update.narrow(0, fragment.matrix_offset, fragment.numel)
                )
        calls.directions.release(chunk.active(active))

    def _send_back(self, flight: _Flight) -> None:
        """Start the scatter of a chunk: the updates go to the ranks that hold the fragments."""
        chunk = flight.chunk
        with self._phase("scatter", flight):
            flight.work = self._all_to_all(
                flight.held, flight.owned, chunk.scatter_recv_splits, chunk.scatter_send_splits
            )

    def _land(
        self,
        flight: _Flight,
        active: Sequence[bool],
        apply: Apply,
        refresh: Callable[[int, int], None] | None = None,
    ) -> None:
        """Apply what came back."""
        self._wait("scatter", flight)
        for segment in flight.chunk.updates_in:
            if active[segment.matrix]:
                update = flight.held.narrow(0, segment.buffer_offset, segment.fragment.numel)
                apply(segment.matrix, segment.fragment, update)
                if refresh is not None:
                    refresh(segment.fragment.partition_offset, segment.fragment.numel)

    def _updates(
        self,
        owned: Sequence[int],
        chunk: Chunk,
        received: Tensor | None,
        calls: StepCalls,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(matrix index, flat update in the wire dtype)`` of every owned matrix, or of its shard here."""
        incoming = self._incoming(chunk)

        def whole(indices: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
            return self._orthogonalized(indices, incoming, received, calls)

        def local(index: int) -> Tensor:
            return self._assemble([index], incoming, received, calls)[0]

        if owned and self.plan.matrices[owned[0]].sharers:
            assert self._shared is not None
            self.stats.matrices_orthogonalized += sum(self._shared.counts_for(index) for index in owned)
            return self._shared.run(owned, local=local)
        if self._tensor_parallel is None:
            return whole(owned)
        return self._tensor_parallel.run(owned, local=lambda index: local(index).reshape(-1), whole=whole)

    @staticmethod
    def _incoming(chunk: Chunk) -> dict[int, list[tuple[Fragment, int]]]:
        incoming: dict[int, list[tuple[Fragment, int]]] = {}
        for segment in chunk.incoming:
            incoming.setdefault(segment.matrix, []).append((segment.fragment, segment.buffer_offset))
        return incoming

    def _orthogonalized(
        self,
        owned: Sequence[int],
        incoming: dict[int, list[tuple[Fragment, int]]],
        received: Tensor | None,
        calls: StepCalls,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(matrix index, flat update in the wire dtype)`` of every owned matrix, batched by shape."""

        def direction_of(index: int) -> Tensor:
            return self._assemble([index], incoming, received, calls)[0]

        def results() -> Iterator[Result]:
            for batch in self._batches(owned):
                full = self._assemble(batch, incoming, received, calls)
                # A matrix in pieces counts where its first one is.
                self.stats.matrices_orthogonalized += sum(
                    self.plan.matrices[index].first_row == 0 for index in batch
                )
                if self.plan.matrices[batch[0]].equal_blocks is not None:
                    yield self._equal_blocks(full, batch, calls)
                else:
                    yield from self._unequal_blocks(full, batch, calls)

        for result in self._watch.settled(results(), direction_of):
            yield from result.completed()

    def _iterate(self, blocks: Tensor) -> Tensor:
        with self._watch.span("newton_schulz"):
            return self._orthogonalize(blocks, settings=self._ns_settings)

    def _equal_blocks(self, full: Tensor, batch: Sequence[int], calls: StepCalls) -> Result:
        """Orthogonalise ``(matrices, rows, cols)`` whole or in equal blocks."""
        first = self.plan.matrices[batch[0]]
        members = [(index, block) for index in batch for block in range(first.equal_blocks or 1)]

        def complete(blocks: Tensor) -> Iterable[tuple[int, Tensor]]:
            return zip(batch, blocks.to(self._wire_dtype).reshape(len(batch), -1), strict=True)

        return Result(
            members, self._iterate(full.view(len(members), *first.block_shape)), complete, calls.finish
        )

    def _unequal_blocks(self, full: Tensor, batch: Sequence[int], calls: StepCalls) -> Iterator[Result]:
        """Orthogonalise ``(matrices, rows, cols)`` in unequal blocks, those of one shape together if they are small."""
        update = torch.empty_like(full)
        scales = [calls.relative_scales(index) for index in batch]
        pieces: dict[tuple[int, int], list[tuple[Tensor, Tensor, float, tuple[int, int]]]] = {}
        for number, block in enumerate(self.plan.matrices[batch[0]].blocks()):
            for position, index in enumerate(batch):
                views = (full[position][block.area], update[position][block.area])
                piece = (*views, scales[position][number], (index, number))
                pieces.setdefault((block.rows, block.cols), []).append(piece)
        groups = [
            members[start : start + size]
            for shape, members in pieces.items()
            for size in (self._batch_size(*shape),)
            for start in range(0, len(members), size)
        ]
        for together in groups:
            first = together[0][0].unsqueeze(0)
            blocks = first if len(together) == 1 else torch.stack([source for source, *_ in together])
            members = [member for *_, member in together]

            def complete(blocks: Tensor, together: Any = together) -> Iterable[tuple[int, Tensor]]:
                for done, (_, target, scale, _) in zip(blocks, together, strict=True):
                    target.copy_(done if scale == 1.0 else done.mul_(scale))
                # The last blocks complete the matrices.
                last = together is groups[-1]
                return zip(batch, update.reshape(len(batch), -1), strict=True) if last else ()

            yield Result(members, self._iterate(blocks), complete, calls.finish)

    def _in_batches(self, chunk: Chunk, active: Sequence[bool]) -> list[int]:
        """Return the active matrices of a chunk, those of this rank first and in the order of its batches."""
        owned = [index for index in chunk.owned if active[index]]
        others = [index for index in chunk.active(active) if self.plan.owners[index] != self.plan.rank]
        return [index for batch in self._batches(owned) for index in batch] + others

    def _batches(self, owned: Sequence[int]) -> list[list[int]]:
        """Group small matrices of equal blocks; large ones stay alone."""
        by_shape: dict[object, list[int]] = {}
        for index in owned:
            matrix = self.plan.matrices[index]
            by_shape.setdefault((matrix.grid, matrix.transposed), []).append(index)
        batches: list[list[int]] = []
        for indices in by_shape.values():
            first = self.plan.matrices[indices[0]]
            size = self._batch_size(*first.block_shape, numel=first.numel)
            batches.extend(indices[start : start + size] for start in range(0, len(indices), size))
        return batches

    def _batch_size(self, rows: int, cols: int, *, numel: int = 0) -> int:
        """Return how many blocks of this shape, or matrices of ``numel`` made of them, run together."""
        small = _CPU_BATCH_BELOW if self._device.type == "cpu" else _GPU_BATCH_BELOW
        return max(1, _BATCH_NUMEL // (numel or rows * cols)) if min(rows, cols) < small else 1

    def _assemble(
        self,
        batch: Sequence[int],
        incoming: dict[int, list[tuple[Fragment, int]]],
        received: Tensor | None,
        calls: StepCalls,
    ) -> Tensor:
        """Return ``(matrices, rows, cols)``. Matrices that lie whole on this rank are used in place."""
        first = self.plan.matrices[batch[0]]
        shape = (len(batch), first.rows, first.cols)
        if all(index not in incoming for index in batch):
            whole = _together([calls.directions.get(index, self._local(index)[0]) for index in batch])
            if whole is not None:
                return whole.to(self._device).view(shape)
        full = self._buffer(len(batch) * first.numel)
        for position, index in enumerate(batch):
            matrix = full.narrow(0, position * first.numel, first.numel)
            for fragment in self._local(index):
                matrix.narrow(0, fragment.matrix_offset, fragment.numel).copy_(
                    calls.directions.get(index, fragment)
                )
            for fragment, offset in incoming.get(index, ()):
                assert received is not None
                matrix.narrow(0, fragment.matrix_offset, fragment.numel).copy_(
                    received.narrow(0, offset, fragment.numel)
                )
        return full.view(shape)

    def _local(self, index: int) -> list[Fragment]:
        return [
            fragment for fragment in self.plan.matrices[index].fragments if fragment.rank == self.plan.rank
        ]

    def _buffer(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._wire_dtype, device=self._device)

    def _all_to_all(
        self, out: Tensor, send: Tensor, out_splits: Sequence[int], send_splits: Sequence[int]
    ) -> dist.Work | None:
        """Start an exchange, as bytes: gloo does not know every half format, and no backend computes on this data."""
        size = send.element_size()
        work: dist.Work = dist.all_to_all_single(
            out.view(torch.uint8),
            send.view(torch.uint8),
            [count * size for count in out_splits],
            [count * size for count in send_splits],
            group=self._group,
            async_op=True,
        )
        self.stats.bytes_sent += sum(send_splits) * size
        self.stats.exchanges += 1
        if not self._overlap:
            work.wait()
            return None
        return work


def _together(parts: Sequence[Tensor]) -> Tensor | None:
    """Return one view of tensors of equal length that follow each other in memory, ``None`` if they do not."""
    first, step = parts[0], parts[0].numel() * parts[0].element_size()
    if any(part.data_ptr() != first.data_ptr() + number * step for number, part in enumerate(parts)):
        return None
    if any(part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for part in parts):
        return None
    return first.as_strided((len(parts) * first.numel(),), (1,))
