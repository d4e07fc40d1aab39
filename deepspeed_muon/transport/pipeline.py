"""Gather, orthogonalise, scatter: one Muon step of all matrices of one exchange plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.plan.exchange import Chunk, ExchangePlan
from deepspeed_muon.plan.layout import Fragment

__all__ = ["MuonPipeline", "Orthogonalize", "StepStats"]

# Matrices whose short side is at least this long are orthogonalised one by one: on a CPU bmm is slower than mm there,
# on a GPU one of them fills the chip (two waves of 128 x 128 tiles on 132 multiprocessors).
_CPU_BATCH_BELOW = 256
_GPU_BATCH_BELOW = 2048
# Elements that a batch may stack at most: stacking copies, and the iteration needs three times as much again.
_BATCH_NUMEL = 1 << 25

# (batch, rows, cols) -> the same in the settings' dtype; called as ``orthogonalize(x, settings=...)``.
Orthogonalize = Callable[..., Tensor]
DirectionOf = Callable[[int, Fragment], Tensor]
ApplyUpdate = Callable[[int, Fragment, Tensor], None]


@dataclass(slots=True)
class StepStats:
    """What this rank did since the counters were last reset.

    Attributes:
        bytes_sent: Bytes that left this rank in the two all-to-alls (own fragments are not sent).
        matrices_orthogonalized: Matrices that went through Newton-Schulz on this rank.
        exchanges: All-to-alls that this rank took part in.
    """

    bytes_sent: int = 0
    matrices_orthogonalized: int = 0
    exchanges: int = 0

    def reset(self) -> None:
        """Set all counters to zero."""
        self.bytes_sent = self.matrices_orthogonalized = self.exchanges = 0


class MuonPipeline:
    """Runs one :class:`ExchangePlan` in every step.

    The direction is exchanged and the update returned in the wire dtype, also for fragments that stay on their
    rank: so the result does not depend on the number of ranks.
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
    ) -> None:
        """Keep the plan and its settings; nothing is allocated or sent.

        Args:
            plan: This rank's view of the exchange.
            group: Data-parallel process group, ``None`` for the default one.
            device: Where the exchange and the products run.
            wire_dtype: Dtype of what is sent.
            ns_settings: The iteration.
            orthogonalize: What runs it, with the contract of ``math.newton_schulz.orthogonalize``.
            stats: Counters to increase.
        """
        self.plan = plan
        self.stats = stats
        self._group = group
        self._device = device
        self._wire_dtype = wire_dtype
        self._ns_settings = ns_settings
        self._orthogonalize = orthogonalize

    def run(self, *, active: Sequence[bool], direction: DirectionOf, apply: ApplyUpdate) -> None:
        """Exchange and orthogonalise all active matrices and hand every local fragment of the update to ``apply``.

        Must be called by all ranks of the group with the same ``active``.

        Args:
            active: One flag per matrix of the plan: whether any rank has a gradient for it.
            direction: Returns the local fragment of the direction as a contiguous one-dimensional tensor in the
                wire dtype (on any device).
            apply: Receives matrix index, local fragment and the orthogonalised fragment (one-dimensional, wire dtype).
        """
        for chunk in self.plan.chunks:
            if any(active[index] for index in chunk.matrices):
                self._run_chunk(chunk, active, direction, apply)

    def _run_chunk(
        self, chunk: Chunk, active: Sequence[bool], direction: DirectionOf, apply: ApplyUpdate
    ) -> None:
        received = self._gather(chunk, direction)
        updates_out = self._buffer(sum(chunk.scatter_send_splits))
        outgoing: dict[int, list[tuple[Fragment, int]]] = {}
        for segment in chunk.updates_out:
            outgoing.setdefault(segment.matrix, []).append((segment.fragment, segment.buffer_offset))
        owned = [index for index in chunk.owned if active[index]]
        for index, update in self._orthogonalized(owned, chunk, received, direction):
            for fragment in self._local(index):
                apply(index, fragment, update.narrow(0, fragment.matrix_offset, fragment.numel))
            for fragment, offset in outgoing.get(index, ()):
                updates_out.narrow(0, offset, fragment.numel).copy_(
                    update.narrow(0, fragment.matrix_offset, fragment.numel)
                )
        del received
        if not chunk.scatters:
            return
        updates_in = self._buffer(sum(chunk.scatter_recv_splits))
        self._all_to_all(updates_in, updates_out, chunk.scatter_recv_splits, chunk.scatter_send_splits)
        for segment in chunk.updates_in:
            if active[segment.matrix]:
                update = updates_in.narrow(0, segment.buffer_offset, segment.fragment.numel)
                apply(segment.matrix, segment.fragment, update)

    def _gather(self, chunk: Chunk, direction: DirectionOf) -> Tensor | None:
        """Send this rank's fragments to their owners; return the buffer with the fragments that it owns."""
        if not chunk.gathers:
            return None
        send = self._buffer(sum(chunk.gather_send_splits))
        for segment in chunk.outgoing:
            send.narrow(0, segment.buffer_offset, segment.fragment.numel).copy_(
                direction(segment.matrix, segment.fragment)
            )
        received = self._buffer(sum(chunk.gather_recv_splits))
        self._all_to_all(received, send, chunk.gather_recv_splits, chunk.gather_send_splits)
        return received

    def _orthogonalized(
        self, owned: Sequence[int], chunk: Chunk, received: Tensor | None, direction: DirectionOf
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(matrix index, flat update in the wire dtype)`` of every owned matrix, batched by shape."""
        incoming: dict[int, list[tuple[Fragment, int]]] = {}
        for segment in chunk.incoming:
            incoming.setdefault(segment.matrix, []).append((segment.fragment, segment.buffer_offset))
        for batch in self._batches(owned):
            blocks = self._assemble(batch, incoming, received, direction)
            result = self._orthogonalize(blocks, settings=self._ns_settings).to(self._wire_dtype)
            self.stats.matrices_orthogonalized += len(batch)
            heads = self.plan.matrices[batch[0]].heads
            for position, index in enumerate(batch):
                yield index, result.narrow(0, position * heads, heads).reshape(-1)

    def _batches(self, owned: Sequence[int]) -> list[list[int]]:
        """Group small matrices of equal block shape; large ones stay alone."""
        by_shape: dict[tuple[int, int, int], list[int]] = {}
        for index in owned:
            matrix = self.plan.matrices[index]
            by_shape.setdefault((*matrix.block_shape, matrix.heads), []).append(index)
        small = _CPU_BATCH_BELOW if self._device.type == "cpu" else _GPU_BATCH_BELOW
        batches: list[list[int]] = []
        for (rows, cols, heads), indices in by_shape.items():
            size = max(1, _BATCH_NUMEL // (rows * cols * heads)) if min(rows, cols) < small else 1
            batches.extend(indices[start : start + size] for start in range(0, len(indices), size))
        return batches

    def _assemble(
        self,
        batch: Sequence[int],
        incoming: dict[int, list[tuple[Fragment, int]]],
        received: Tensor | None,
        direction: DirectionOf,
    ) -> Tensor:
        """Return ``(matrices * heads, rows, cols)``. One matrix that lies whole on this rank is used in place."""
        first = self.plan.matrices[batch[0]]
        shape = (len(batch) * first.heads, *first.block_shape)
        if len(batch) == 1 and batch[0] not in incoming:
            local = self._local(batch[0])
            return direction(batch[0], local[0]).to(self._device).view(shape)
        full = self._buffer(len(batch) * first.numel)
        for position, index in enumerate(batch):
            matrix = full.narrow(0, position * first.numel, first.numel)
            for fragment in self._local(index):
                matrix.narrow(0, fragment.matrix_offset, fragment.numel).copy_(direction(index, fragment))
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
    ) -> None:
        """Exchange as bytes: gloo does not know every half format, and no backend computes on this data."""
        size = send.element_size()
        dist.all_to_all_single(
            out.view(torch.uint8),
            send.view(torch.uint8),
            [count * size for count in out_splits],
            [count * size for count in send_splits],
            group=self._group,
        )
        self.stats.bytes_sent += sum(send_splits) * size
        self.stats.exchanges += 1
