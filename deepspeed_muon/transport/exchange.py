"""The messages of one chunk, and their buffers: fragments of directions to the owners, and of updates back.

Both are all-to-alls. Updates of replicated matrices are broadcast by their owners instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.plan.exchange import BufferPlan, Chunk, ExchangePlan, Segment
from deepspeed_muon.transport.context import StepContext
from deepspeed_muon.transport.waiting import phase

SLOTS = 3
"""Chunks in the buffers with overlap: one arrives, one is orthogonalised, one returns."""

_OVERLAP_BYTES = 1 << 30
_ALIGNMENT = 32


class ExchangeBuffers:
    """Named buffers on one device. Step sets share them, because their steps run one after the other.

    Every step set reserves at start what it needs. The first use of a name allocates the largest size that was reserved
    for it; so does the first use after :meth:`release`.

    Attributes:
        device: Where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._needed: dict[str, int] = {}
        self._memory: dict[str, Tensor] = {}

    def reserve(self, name: str, nbytes: int) -> None:
        """Make sure that the buffer ``name`` will hold at least ``nbytes`` bytes."""
        self._needed[name] = max(nbytes, self._needed.get(name, 0))

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the first ``numel`` elements of the buffer ``name``; they keep what they held before."""
        memory = self._memory.get(name)
        if memory is None:
            memory = torch.empty(self._needed[name], dtype=torch.uint8, device=self.device)
            self._memory[name] = memory
        return memory.narrow(0, 0, numel * dtype.itemsize).view(dtype)

    def release(self) -> None:
        """Free the memory; no exchange may be in flight."""
        self._memory.clear()

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the buffers hold now."""
        return sum(memory.numel() for memory in self._memory.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all buffers together, once each of them was used."""
        return sum(self._needed.values())


def aligned(numel: int) -> int:
    """Return the next multiple of 32 elements, at which a tensor in a shared piece of memory may start."""
    return -(-numel // _ALIGNMENT) * _ALIGNMENT


@dataclass(slots=True)
class InFlight:
    """A chunk between its pack and its apply.

    Attributes:
        chunk: The chunk.
        number: Its number in the plan.
        send_buffer: Fragments that this rank holds of other ranks' matrices. Directions leave from here, and updates
            arrive here.
        receive_buffer: Fragments that other ranks hold of this rank's matrices. Directions arrive here, and updates
            leave from here.
        idle: Without overlap, what was sent from before the matrices are orthogonalised: room for them. It is the
            memory of ``send_buffer``.
        directions: Directions of fragments that this rank needs itself, by matrix.
        works: The messages that are under way.
    """

    chunk: Chunk
    number: int
    send_buffer: Tensor
    receive_buffer: Tensor
    idle: Tensor | None
    directions: dict[int, Tensor] = field(default_factory=dict)
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
        leaves_pending: bool = False,
        follows_pending: bool = False,
    ) -> None:
        """Reserve the buffers; nothing is allocated or sent.

        Args:
            plan: This rank's view of the exchange.
            context: Of the step set.
            buffers: Memory of the slots, shared with other step sets.
            overlap: Whether chunks travel while others are orthogonalised. Without it the rank waits for every
                all-to-all at once, and needs a third of the memory.
            leaves_pending: Whether the last updates may still be in flight while the next set is updated.
            follows_pending: Whether updates of the previous set may still be in flight when this one begins.
        """
        self._context = context
        self._plan = plan
        self._buffers = buffers
        self._overlap = overlap
        moving = [chunk for chunk in plan.chunks if chunk.scatters]
        most = SLOTS if overlap else 1
        # Step sets with pending updates between them must have the same number of slots.
        self.slots = most if leaves_pending or follows_pending else max(1, min(most, len(moving)))
        for slot in range(most if follows_pending and moving else min(most, len(moving))):
            room = max(self._idle_numel(chunk) for chunk in moving) * context.comm_dtype.itemsize
            held = max(room, max(chunk.send_buffer.numel for chunk in moving) * context.codec.dtype.itemsize)
            owned = max(chunk.receive_buffer.numel for chunk in moving) * context.codec.dtype.itemsize
            buffers.reserve(f"send {slot}", held)
            buffers.reserve(f"receive {slot}", owned)

    def open(self, number: int, slot: int | None) -> InFlight:
        """Give a chunk of the plan its slot, or none if nothing moves; the buffers keep what they held before."""
        chunk, dtype = self._plan.chunks[number], self._context.codec.dtype
        if slot is None:
            nothing = torch.empty(0, dtype=dtype, device=self._context.device)
            return InFlight(chunk, number, nothing, nothing, None)
        slot %= self.slots
        room = self._idle_numel(chunk)
        return InFlight(
            chunk,
            number,
            send_buffer=self._buffers.take(f"send {slot}", chunk.send_buffer.numel, dtype),
            receive_buffer=self._buffers.take(f"receive {slot}", chunk.receive_buffer.numel, dtype),
            idle=self._buffers.take(f"send {slot}", room, self._context.comm_dtype) if room else None,
        )

    def _idle_numel(self, chunk: Chunk) -> int:
        """Return the elements of a chunk's own matrices if they may lie in the send buffer after the gather, else 0."""
        if self._overlap or not chunk.gathers:
            return 0
        return sum(aligned(self._plan.matrices[index].numel) for index in chunk.owned)

    def gather(self, flight: InFlight) -> None:
        """Start to send the directions to the owners. Must be called by all ranks of the group."""
        chunk, out, send = flight.chunk, flight.receive_buffer, flight.send_buffer
        if chunk.gathers:
            with self._phase("gather", flight):
                self._all_to_all(flight, out, send, chunk.receive_buffer, chunk.send_buffer)

    def scatter(self, flight: InFlight) -> None:
        """Start to send the updates to the holders. Must be called by all ranks of the group."""
        chunk, out, send = flight.chunk, flight.send_buffer, flight.receive_buffer
        with self._phase("scatter", flight):
            if chunk.copies:
                self._broadcast(flight)
            else:
                self._all_to_all(flight, out, send, chunk.send_buffer, chunk.receive_buffer)

    def wait(self, what: Literal["gather", "scatter"], flight: InFlight) -> None:
        """Wait for the messages of a chunk; on a GPU the current stream waits, not the process."""
        with self._phase(what, flight):
            while flight.works:
                flight.works.pop(0).wait()

    def _phase(self, what: str, flight: InFlight) -> AbstractContextManager[None]:
        return phase(
            f"{what} of chunk {flight.number} of step set {self._context.number}", self._context.group
        )

    def _all_to_all(
        self, flight: InFlight, out: Tensor, send: Tensor, received: BufferPlan, sent: BufferPlan
    ) -> None:
        ranks = self._context.world_size
        work = exchange_bytes(
            out, send, received.splits(ranks), sent.splits(ranks), group=self._context.group
        )
        self._started(flight, [work], sent.numel * send.element_size())

    def _broadcast(self, flight: InFlight) -> None:
        """Start to send each owner's updates to all other ranks."""
        chunk, own = flight.chunk, flight.receive_buffer
        works = broadcast_bytes(chunk, self._plan.rank, flight.send_buffer, own, group=self._context.group)
        self._started(flight, works, chunk.copies * own.numel() * own.element_size())

    def _started(self, flight: InFlight, works: list[dist.Work], nbytes: int) -> None:
        """Count messages that were started; without overlap wait for them."""
        self._context.stats.count_exchange(nbytes)
        flight.works += works
        while flight.works and not self._overlap:
            flight.works.pop(0).wait()


def overlap_fits(numel: int, wire_bytes: float) -> bool:
    """Return whether the buffers of overlap stay within 1 GiB if the largest matrix has so many elements."""
    return 2 * SLOTS * wire_bytes * numel <= _OVERLAP_BYTES


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


def broadcast_bytes(
    chunk: Chunk, rank: int, held: Tensor, owned: Tensor, *, group: dist.ProcessGroup | None
) -> list[dist.Work]:
    """Start to send what each owner has for replicated matrices to all other ranks, in the order of the owners.

    Must be called by all ranks of ``group``.

    Args:
        chunk: A chunk with ``copies``.
        rank: This rank.
        held: Receives what others own, by owner. Mutated.
        owned: What this rank owns.
        group: The process group.
    """
    buffer = chunk.send_buffer
    parts = dict(zip(buffer.peers.tolist(), held.split(buffer.counts.tolist()), strict=True))
    if owned.numel():
        parts[rank] = owned
    return [
        dist.broadcast(parts[owner].view(torch.uint8), group=group, group_src=owner, async_op=True)
        for owner in sorted(parts)
    ]


def cut(buffer: Tensor, segment: Segment) -> Tensor:
    """Return a segment's part of a buffer, ``(fragments, units)``."""
    start = buffer.storage_offset() + segment.buffer_offset
    return buffer.as_strided((segment.count, segment.units), (segment.stride, 1), start)


def part_of(matrix: Tensor, segment: Segment) -> Tensor:
    """Return the elements of a flat matrix that a segment stands for, ``(fragments, elements)``; copies once."""
    whole = matrix.narrow(0, segment.matrix_offset, segment.count * segment.numel)
    return whole.view(segment.count, segment.numel)
