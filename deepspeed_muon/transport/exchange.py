"""The messages of one chunk: fragments of directions to the owners, and fragments of updates back.

Both are all-to-alls, but for updates that are relayed; see :mod:`deepspeed_muon.plan.relay`.
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
from deepspeed_muon.plan.memory import SLOTS
from deepspeed_muon.plan.relay import Relay
from deepspeed_muon.transport.buffers import ExchangeBuffers, aligned
from deepspeed_muon.transport.context import StepContext
from deepspeed_muon.transport.subgroups import Subgroups, global_ranks
from deepspeed_muon.transport.waiting import phase

__all__ = ["ChunkExchange", "Travel", "cut", "exchange_bytes", "part_of"]


@dataclass(slots=True)
class Travel:
    """A chunk that travels, in one slot of the buffers.

    Attributes:
        chunk: What travels.
        number: Its number in the plan.
        held: Fragments that this rank holds of other ranks' matrices: directions leave from here, updates arrive here.
        owned: Fragments that other ranks hold of this rank's matrices: directions arrive here, updates leave from here.
        idle: Without overlap, what was sent from before the matrices are orthogonalised: room for them. It is the
            memory of ``held``.
        work: The all-to-all that is under way.
    """

    chunk: Chunk
    number: int
    held: Tensor
    owned: Tensor
    idle: Tensor | None
    work: dist.Work | None = field(default=None)


class ChunkExchange:
    """Starts and awaits the all-to-alls of one exchange plan.

    Scatter sends the fragments back that gather brought, so the updates take the place of the directions.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        context: StepContext,
        buffers: ExchangeBuffers,
        subgroups: Subgroups,
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
            subgroups: Where the groups of relayed updates are, once they were made.
            overlap: Whether chunks travel while others are orthogonalised. Without it the rank waits for every
                all-to-all at once, and needs a third of the memory.
            leaves_pending: Whether the last updates may still be in flight while the next set is updated.
            follows_pending: Whether updates of the previous set may still be in flight when this one begins.
        """
        self._context = context
        self._plan = plan
        self._buffers = buffers
        self._subgroups = subgroups
        self._overlap = overlap
        machines = plan.machines
        across, inside = (machines.across(plan.rank), machines.inside(plan.rank)) if machines else ((), ())
        self._across, self._inside = (global_ranks(ranks, context.group) for ranks in (across, inside))
        self._number_of = {id(chunk): number for number, chunk in enumerate(plan.chunks)}
        moving = [chunk for chunk in plan.chunks if chunk.scatters]
        most = SLOTS if overlap else 1
        # Step sets with pending updates between them must have the same number of slots.
        self.slots = most if leaves_pending or follows_pending else max(1, min(most, len(moving)))
        for slot in range(most if follows_pending and moving else min(most, len(moving))):
            room = max(self._idle_numel(chunk) for chunk in moving) * context.wire_dtype.itemsize
            held = max(room, max(chunk.held_buffer.numel for chunk in moving) * context.wire.dtype.itemsize)
            owned = max(chunk.owned_buffer.numel for chunk in moving) * context.wire.dtype.itemsize
            buffers.reserve(f"held {slot}", held)
            buffers.reserve(f"owned {slot}", owned)

    def open(self, chunk: Chunk, slot: int) -> Travel:
        """Give a chunk its slot; the buffers keep what they held before."""
        slot %= self.slots
        dtype = self._context.wire.dtype
        room = self._idle_numel(chunk)
        return Travel(
            chunk,
            self._number_of[id(chunk)],
            held=self._buffers.take(f"held {slot}", chunk.held_buffer.numel, dtype),
            owned=self._buffers.take(f"owned {slot}", chunk.owned_buffer.numel, dtype),
            idle=self._buffers.take(f"held {slot}", room, self._context.wire_dtype) if room else None,
        )

    def _idle_numel(self, chunk: Chunk) -> int:
        """Return the elements of a chunk's own matrices if they may lie in ``held`` after the gather, else 0."""
        if self._overlap or not chunk.gathers:
            return 0
        return sum(aligned(self._plan.matrices[index].numel) for index in chunk.owned)

    def gather(self, travel: Travel) -> None:
        """Start to send what is in ``held`` to the owners. Must be called by all ranks of the group."""
        chunk = travel.chunk
        if chunk.gathers:
            with self._phase("gather", travel):
                travel.work = self._all_to_all(
                    travel.owned, travel.held, chunk.owned_buffer, chunk.held_buffer
                )

    def scatter(self, travel: Travel) -> None:
        """Start to send what is in ``owned`` to the holders. Must be called by all ranks of the group."""
        chunk = travel.chunk
        with self._phase("scatter", travel):
            if chunk.relay is not None:
                travel.work = self._relay_across(travel, chunk.relay)
            else:
                travel.work = self._all_to_all(
                    travel.held, travel.owned, chunk.held_buffer, chunk.owned_buffer
                )

    def wait(self, what: Literal["gather", "scatter"], travel: Travel) -> None:
        """Wait for the messages of a chunk; on a GPU the current stream waits, not the process.

        Updates that are relayed take their second turn here, so all ranks of the group must call it for a scatter.
        """
        with self._phase(what, travel):
            if travel.work is not None:
                travel.work.wait()
                travel.work = None
            if what == "scatter" and travel.chunk.relay is not None:
                self._relay_inside(travel, travel.chunk.relay)

    def _relay_across(self, travel: Travel, relay: Relay) -> dist.Work | None:
        """Start to exchange updates with the ranks that have this rank's place on other machines."""
        arriving = travel.held.split(list(relay.parts))[relay.position]
        send = [relay.own_units] * len(relay.across)
        work = exchange_bytes(
            arriving, travel.owned, relay.received, send, group=self._subgroups.get(self._across)
        )
        return self._started(work, relay.sent_units[0] * travel.held.element_size())

    def _relay_inside(self, travel: Travel, relay: Relay) -> None:
        """Let every rank of this machine send what it received across machines to the others."""
        group = self._subgroups.get(self._inside)
        started = [
            dist.broadcast(part.view(torch.uint8), source, group=group, async_op=True)
            for part, source in zip(travel.held.split(list(relay.parts)), self._inside, strict=True)
            if part.numel()
        ]
        for work in started:
            work.wait()
        self._context.stats.count_exchange(relay.sent_units[1] * travel.held.element_size())

    def _phase(self, what: str, travel: Travel) -> AbstractContextManager[None]:
        return phase(
            f"{what} of chunk {travel.number} of step set {self._context.number}", self._context.group
        )

    def _all_to_all(
        self, out: Tensor, send: Tensor, received: BufferPlan, sent: BufferPlan
    ) -> dist.Work | None:
        ranks = self._context.world_size
        work = exchange_bytes(
            out, send, received.splits(ranks), sent.splits(ranks), group=self._context.group
        )
        return self._started(work, sent.numel * send.element_size())

    def _started(self, work: dist.Work, nbytes: int) -> dist.Work | None:
        """Count an all-to-all that was started; without overlap wait for it."""
        self._context.stats.count_exchange(nbytes)
        if self._overlap:
            return work
        work.wait()
        return None


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


def cut(buffer: Tensor, segment: Segment) -> Tensor:
    """Return a segment's part of a buffer, ``(fragments, units)``."""
    start = buffer.storage_offset() + segment.buffer_offset
    return buffer.as_strided((segment.count, segment.units), (segment.stride, 1), start)


def part_of(matrix: Tensor, segment: Segment) -> Tensor:
    """Return the elements of a flat matrix that a segment stands for, ``(fragments, elements)``; copies once."""
    parts = 1 if segment.copies else segment.count
    return matrix.narrow(0, segment.matrix_offset, parts * segment.numel).view(parts, segment.numel)
