"""The messages of one chunk, and their buffers: fragments of directions to the owners, and of updates back.

Both are all-to-alls. Updates of replicated matrices are broadcast by their owners instead. Directions and updates are
sent uncompressed, or as int8: a signed byte for each element and a scale for every block of 256, half of bf16's bytes
and 2 % for the scales. What the receiver reads then differs from what was sent by up to half a step, 1/254 of the
largest element of its block.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.plan.exchange import PLAIN, BufferPlan, Chunk, ExchangePlan, WireFormat
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.transport.ranks import phase
from deepspeed_muon.variants.variant import Variant

SLOTS = 3
"""Chunks in the buffers with overlap: one arrives, one is orthogonalised, one returns."""

Way = Literal["gather", "scatter"]

_OVERLAP_BYTES = 1 << 30
_LARGEST = 127.0


@dataclass(frozen=True, slots=True)
class Codec:
    """Writes directions and updates into communication buffers, and reads them again.

    Attributes:
        values: Dtype of directions and updates.
        format: The room that a fragment takes in a buffer, uncompressed or as int8.
    """

    values: torch.dtype
    format: WireFormat = PLAIN

    @property
    def exact(self) -> bool:
        """Whether the receiver reads what was written."""
        return not self.format.block

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the buffers."""
        return self.values if self.exact else torch.uint8

    def write(
        self, place: Tensor, values: Tensor, note: Callable[[Tensor, Tensor], None] | None = None
    ) -> None:
        """Write fragments to their places in a buffer.

        Args:
            place: ``(..., units)``. Mutated.
            values: ``(..., elements)``.
            note: Called with ``values`` and what the receiver will read, unless it reads what was written.
        """
        if self.exact:
            place.copy_(values)
            return
        blocks = self._in_blocks(values)
        scales = blocks.abs().amax(dim=-1).div_(_LARGEST)
        # A block of zeros has no scale. One that is not finite keeps its own, so that the receiver sees it.
        codes = blocks.div_(scales.masked_fill(scales == 0, 1.0).unsqueeze(-1)).round_().to(torch.int8)
        numel = values.shape[-1]
        place[..., :numel].copy_(codes.flatten(-2)[..., :numel].view(torch.uint8))
        self._scales(place, numel).copy_(scales)
        if note is not None:
            note(values, self.read(place, numel))

    def read(self, place: Tensor, numel: int) -> Tensor:
        """Return the ``(..., numel)`` values in ``place``, ``(..., units)``; the caller must not change them."""
        if self.exact:
            return place
        blocks = self._in_blocks(place[..., :numel].view(torch.int8))
        blocks.mul_(self._scales(place, numel).unsqueeze(-1))
        return blocks.flatten(-2)[..., :numel].to(self.values)

    def _in_blocks(self, values: Tensor) -> Tensor:
        """Return values in fp32 as ``(..., blocks, elements)``, with zeros at the end; a copy."""
        block, (*fragments, numel) = self.format.block, values.shape
        padded = torch.zeros(*fragments, -(-numel // block) * block, device=values.device)
        padded[..., :numel] = values
        return padded.view(*fragments, -1, block)

    def _scales(self, place: Tensor, numel: int) -> Tensor:
        """Return the scales in ``place``, ``(..., blocks)``."""
        blocks = -(-numel // self.format.block)
        return place[..., place.shape[-1] - 4 * blocks :].view(torch.float32)


@dataclass(slots=True)
class StepStats:
    """What this rank did since the last reset of these counters.

    Attributes:
        bytes_sent: Bytes that this rank sent to others in all-to-alls.
        matrices_orthogonalized: Matrices that this rank orthogonalised. A stack with several owners counts once, at the
            owner of its first blocks.
        exchanges: All-to-alls that this rank took part in.
    """

    bytes_sent: int = 0
    matrices_orthogonalized: int = 0
    exchanges: int = 0

    def reset(self) -> None:
        """Set all counters to zero."""
        self.bytes_sent = self.matrices_orthogonalized = self.exchanges = 0

    def count_exchange(self, nbytes: int) -> None:
        """Count one all-to-all in which this rank sends ``nbytes`` to others."""
        self.bytes_sent += nbytes
        self.exchanges += 1


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every part of the step of one step set needs; made once, when the optimizer is bound.

    Attributes:
        number: The number of the step set, for errors.
        group: The data-parallel process group; ``None`` in a single process.
        rank: This rank inside the group.
        world_size: The size of the group.
        device: Where the exchange and the iteration run; the partitions may be elsewhere (offload).
        comm_dtype: Dtype of directions and updates, also of those that are not sent.
        codec: How they are sent.
        ns_settings: The Newton-Schulz iteration.
        stats: Counters of the optimizer; mutated.
        variant: The variant of Muon.
        tensor_group: The tensor-parallel process group; ``None`` without one.
    """

    number: int
    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    device: torch.device
    comm_dtype: torch.dtype
    codec: Codec
    ns_settings: NsSettings
    stats: StepStats
    variant: Variant
    tensor_group: dist.ProcessGroup | None

    @property
    def batch_below(self) -> int:
        """Blocks with a shorter short side than this are orthogonalised in batches.

        Above it a CPU multiplies matrices faster one at a time. A GPU takes all that may be stacked: of 2560 x 2560 one
        is 210 tiles of 128 x 128 on the 132 multiprocessors of an H100, two waves of which the second is 60 % full, and
        five are eight full ones.
        """
        return 256 if self.device.type == "cpu" else sys.maxsize


class ExchangeBuffers:
    """Named buffers on one device. Step sets share them, because their steps run one after the other.

    Every step set reserves at start what it needs. The first use of a name allocates the largest size that was reserved
    for it; so does the first use after :meth:`release`.

    Attributes:
        device: Of their memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._needed: dict[str, int] = {}
        self._memory: dict[str, Tensor] = {}
        self._views: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def reserve(self, name: str, nbytes: int) -> None:
        """Make sure that the buffer ``name`` will hold at least ``nbytes`` bytes."""
        self._needed[name] = max(nbytes, self._needed.get(name, 0))

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the first ``numel`` elements of the buffer ``name``; they keep what they held before."""
        view = self._views.get((name, numel, dtype))
        if view is None:
            if name not in self._memory:
                self._memory[name] = torch.empty(self._needed[name], dtype=torch.uint8, device=self.device)
            view = self._memory[name].narrow(0, 0, numel * dtype.itemsize).view(dtype)
            self._views[name, numel, dtype] = view
        return view

    def release(self) -> None:
        """Free the memory; no exchange may be in flight."""
        self._memory.clear()
        self._views.clear()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all buffers together, once each of them was used."""
        return sum(self._needed.values())


@dataclass(slots=True)
class InFlight:
    """A chunk between its pack and its apply.

    Attributes:
        chunk: The chunk.
        number: Its number in the plan.
        send_buffer: Fragments that this rank holds. Directions leave from here, and updates arrive here.
        receive_buffer: Fragments of this rank's matrices. Directions arrive here, and updates leave from here.
        directions: Directions of what does not move, flat, and then its updates.
        works: The messages that are under way.
    """

    chunk: Chunk
    number: int
    send_buffer: Tensor
    receive_buffer: Tensor
    directions: Tensor = field(init=False)
    works: list[dist.Work] = field(default_factory=list)


class ChunkExchange:
    """Starts and awaits the all-to-alls of one exchange plan.

    Scatter sends the fragments back that gather brought, so the updates take the place of the directions.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        context: StepContext,
        buffers: ExchangeBuffers,
        *,
        overlap: bool,
    ) -> None:
        """Reserve the buffers; nothing is allocated or sent.

        Args:
            plan: This rank's view of the exchange.
            context: Of the step set.
            buffers: Memory of the slots, shared with other step sets.
            overlap: Whether chunks are in flight while others are orthogonalised. Without it the rank waits for every
                all-to-all at once, and needs a third of the memory.
        """
        self._context = context
        self._plan = plan
        self._buffers = buffers
        self._overlap = overlap
        moving, size = [chunk for chunk in plan.chunks if chunk.scatters], context.codec.dtype.itemsize
        self._slots = min(SLOTS if overlap else 1, len(moving))
        for slot in range(self._slots):
            buffers.reserve(f"send {slot}", size * max(chunk.send_buffer.numel for chunk in moving))
            buffers.reserve(f"receive {slot}", size * max(chunk.receive_buffer.numel for chunk in moving))

    def open(self, number: int, slot: int | None) -> InFlight:
        """Give a chunk of the plan its slot, or none if nothing moves; the buffers keep what they held before."""
        chunk, dtype = self._plan.chunks[number], self._context.codec.dtype
        if slot is None:
            nothing = torch.empty(0, dtype=dtype, device=self._context.device)
            return InFlight(chunk, number, nothing, nothing)
        slot %= self._slots
        return InFlight(
            chunk,
            number,
            send_buffer=self._buffers.take(f"send {slot}", chunk.send_buffer.numel, dtype),
            receive_buffer=self._buffers.take(f"receive {slot}", chunk.receive_buffer.numel, dtype),
        )

    def gather(self, flight: InFlight) -> None:
        """Start to send the directions to the owners. Must be called by all ranks of the group."""
        if flight.chunk.gathers:
            self._start("gather", flight)

    def scatter(self, flight: InFlight) -> None:
        """Start to send the updates to the holders. Must be called by all ranks of the group."""
        self._start("scatter", flight)

    def _start(self, what: Way, flight: InFlight) -> None:
        """Start the messages of a chunk; without overlap wait for them."""
        with self._phase(what, flight):
            flight.works += start_messages(what, flight, self._context)
        if not self._overlap:
            self.wait(what, flight)

    def wait(self, what: Way, flight: InFlight) -> None:
        """Wait for the messages of a chunk; on a GPU the current stream waits, not the process."""
        if not flight.works:
            return
        with self._phase(what, flight):
            while flight.works:
                flight.works.pop(0).wait()

    def _phase(self, what: Way, flight: InFlight) -> AbstractContextManager[None]:
        return phase(
            f"{what} of chunk {flight.number} of step set {self._context.number}", self._context.group
        )


def overlap_fits(matrices: Iterable[MatrixLayout], wire_bytes: float) -> bool:
    """Return whether the buffers of overlap stay within 1 GiB if they hold the largest matrix, or block of a stack."""
    largest = max((matrix.numel // (matrix.equal_blocks or 1) for matrix in matrices), default=0)
    return 2 * SLOTS * wire_bytes * largest <= _OVERLAP_BYTES


def exchange_bytes(
    out: Tensor,
    send: Tensor,
    out_splits: Sequence[int],
    send_splits: Sequence[int],
    *,
    group: dist.ProcessGroup | None,
) -> dist.Work:
    """Start an all-to-all of flat tensors as bytes, because gloo does not know every half format.

    Must be called by all ranks of ``group``.

    Args:
        out: What is received, by rank. Mutated.
        send: What is sent, by rank, of the same dtype.
        out_splits: Elements from each rank.
        send_splits: Elements to each rank.
        group: The process group.
    """
    size = send.element_size()
    work: dist.Work = dist.all_to_all_single(
        out.view(torch.uint8),
        send.view(torch.uint8),
        [count * size for count in out_splits],
        [count * size for count in send_splits],
        group=group,
        async_op=True,
    )
    return work


def start_messages(what: Way, flight: InFlight, context: StepContext) -> list[dist.Work]:
    """Start the all-to-all of a chunk, or the broadcasts of its updates, and count it.

    Must be called by all ranks of the group. Owners broadcast what they have for replicated matrices to all other
    ranks, in the order of the owners.

    Args:
        what: Gather sends what the send buffer holds, scatter what the receive buffer holds.
        flight: The chunk. The other buffer is mutated.
        context: Of the step set. Its counters are mutated.
    """
    group, chunk = context.group, flight.chunk
    sent, received = chunk.send_buffer, chunk.receive_buffer
    send, out = flight.send_buffer, flight.receive_buffer
    if what == "scatter":
        sent, received, send, out = received, sent, out, send
    context.stats.count_exchange((chunk.copies or 1) * sent.others * send.element_size())
    if not chunk.copies:
        into, out_of = _splits(received, context.world_size), _splits(sent, context.world_size)
        return [exchange_bytes(out, send, into, out_of, group=group)]
    parts = dict(zip(received.peers.tolist(), out.split(received.counts.tolist()), strict=True))
    if send.numel():
        parts[context.rank] = send
    return [
        dist.broadcast(parts[owner].view(torch.uint8), group=group, group_src=owner, async_op=True)
        for owner in sorted(parts)
    ]


# A number for each rank, which does not change from step to step.
_splits = functools.lru_cache(maxsize=64)(BufferPlan.splits)
