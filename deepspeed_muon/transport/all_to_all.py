"""The exchange of directions and updates: all-to-alls and broadcasts (:class:`.Chunk`), and their buffers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from deepspeed_muon.plan.chunks import BufferPlan, Chunk, ExchangePlan
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.transport.ranks import phase

SLOTS = 3
"""Chunks in the buffers with overlap: one is gathered, one is orthogonalised, one is scattered."""

Exchange = Literal["gather", "scatter"]

# Backends that join broadcasts: NCCL sends them by one kernel, torch's "fake" sends nothing.
_JOINING = ("nccl", "fake")

# Overlap needs up to three times the buffers. It is left out where the largest matrix alone would make them larger.
_OVERLAP_BYTES = 1 << 30


@dataclass(slots=True)
class SentCounts:
    """What this rank did since the last reset of these counters.

    Attributes:
        bytes_sent: Bytes that this rank sent to others in :attr:`exchanges`, without padding.
        matrices_orthogonalized: Matrices that this rank orthogonalised. A stack with several owners counts once, at the
            owner of its first blocks.
        exchanges: All-to-alls that this rank took part in, chunks that were broadcast, and all-reduces of row state.
    """

    bytes_sent: int = 0
    matrices_orthogonalized: int = 0
    exchanges: int = 0

    def reset(self) -> None:
        """Set all counters to zero."""
        self.bytes_sent = self.matrices_orthogonalized = self.exchanges = 0

    def count_exchange(self, nbytes: int) -> None:
        """Count one exchange in which this rank sends ``nbytes`` to others."""
        self.bytes_sent += nbytes
        self.exchanges += 1


class ExchangeBuffers:
    """Named buffers on one device. Step sets share them, because their steps run one after the other.

    Every step set reserves at start what it needs. The first use after :meth:`release` allocates again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._needed: dict[str, int] = {}
        self._memory: dict[str, Tensor] = {}
        self._views: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def reserve(self, name: str, nbytes: int) -> None:
        """Make sure that the buffer ``name`` will hold at least ``nbytes`` bytes."""
        self._needed[name] = max(nbytes, self._needed.get(name, 0))

    def allocate(self) -> None:
        """Allocate each buffer that has no memory, with the largest size that was reserved for it."""
        for name, nbytes in self._needed.items():
            if name not in self._memory:
                self._memory[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the first ``numel`` elements of the buffer ``name``; they have their old content."""
        # Every chunk of every step takes a view of the same few sizes.
        view = self._views.get((name, numel, dtype))
        if view is None:
            self.allocate()
            view = self._memory[name].narrow(0, 0, numel * dtype.itemsize).view(dtype)  # (numel,)
            self._views[name, numel, dtype] = view
        return view

    def release(self) -> None:
        """Free the memory; no exchange may be in flight."""
        self._memory.clear()
        self._views.clear()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all buffers together, once they are allocated."""
        return sum(self._needed.values())


@dataclass(slots=True)
class InFlight:
    """A chunk between its pack and its apply.

    Attributes:
        chunk: The chunk.
        number: Its number in the plan.
        fragment_buffer: Fragments that this rank holds: first the directions that gather sends, if it does, then the
            updates that scatter brings.
        owner_buffer: Fragments of the matrices that this rank owns: first the directions that gather brings, if it
            does, then the updates that scatter sends.
        local_buffer: Fragments whose directions are not sent: first the directions, then the updates.
        works: The messages that are under way.
    """

    chunk: Chunk
    number: int
    fragment_buffer: Tensor
    owner_buffer: Tensor
    local_buffer: Tensor = field(init=False)
    works: list[dist.Work] = field(default_factory=list)


class ChunkExchange:
    """Starts and awaits the all-to-alls and broadcasts of one exchange plan."""

    def __init__(
        self,
        plan: ExchangePlan,
        buffers: ExchangeBuffers,
        counts: SentCounts,
        group: dist.ProcessGroup | None,
        *,
        dtype: torch.dtype,
        number: int,
        overlap: bool,
    ) -> None:
        """Reserve the buffers; nothing is allocated or sent.

        ``number`` is that of the step set, for errors. Without overlap the rank waits for every exchange immediately,
        and needs a third of the memory.
        """
        self._plan, self._buffers, self._counts, self._group = plan, buffers, counts, group
        self._dtype, self._number, self._overlap = dtype, number, overlap
        # Of a buffer: a number for each rank, the same in every step.
        self._splits = functools.cache(BufferPlan.splits)
        sent, size = [chunk for chunk in plan.chunks if chunk.kind != "local"], dtype.itemsize
        self._slots = min(SLOTS if overlap else 1, len(sent))
        for slot in range(self._slots):
            buffers.reserve(f"fragments {slot}", size * max(chunk.fragment_buffer.numel for chunk in sent))
            buffers.reserve(f"owner {slot}", size * max(chunk.owner_buffer.numel for chunk in sent))

    def open(self, number: int, slot: int | None) -> InFlight:
        """Give a chunk of the plan its slot, or none if nothing is sent; the buffers have their old content."""
        chunk, dtype = self._plan.chunks[number], self._dtype
        if slot is None:  # both buffers are empty: the directions have a tensor of their own
            empty = torch.empty(0, dtype=dtype, device=self._buffers.device)
            return InFlight(chunk, number, empty, empty)
        slot %= self._slots  # the chunk that used it last was applied in the turn before
        return InFlight(
            chunk,
            number,
            fragment_buffer=self._buffers.take(f"fragments {slot}", chunk.fragment_buffer.numel, dtype),
            owner_buffer=self._buffers.take(f"owner {slot}", chunk.owner_buffer.numel, dtype),
        )

    def start(self, exchange: Exchange, flight: InFlight) -> None:
        """Start to send directions to the owners (gather), or updates to the holders (scatter).

        Must be called by all ranks of the group. Without overlap it waits for the messages.
        """
        if exchange == "gather" and flight.chunk.kind != "all_to_all":
            return
        with self._phase(exchange, flight):
            flight.works += self._messages(exchange, flight)
        if not self._overlap:
            self.wait(exchange, flight)

    def _messages(self, exchange: Exchange, flight: InFlight) -> list[dist.Work]:
        """Start the all-to-all of a chunk, or the broadcasts of its updates, and count it."""
        chunk, plan = flight.chunk, self._plan
        sent_plan, received_plan = chunk.fragment_buffer, chunk.owner_buffer
        sent, received = flight.fragment_buffer, flight.owner_buffer
        if exchange == "scatter":  # the same fragments in the other direction
            sent_plan, received_plan, sent, received = received_plan, sent_plan, received, sent
        self._counts.count_exchange(sent_plan.remote_numel * sent.element_size())
        if chunk.kind == "all_to_all":
            splits = [self._splits(buffer, plan.world_size) for buffer in (received_plan, sent_plan)]
            return [start_all_to_all(received, sent, *splits, group=self._group)]
        # Replicated matrices: each owner broadcasts its updates, in the order of the owners. The buffer that receives
        # has a slice for each; this rank is the source of its own updates.
        owners, counts = received_plan.peers.tolist(), received_plan.counts.tolist()
        updates_of = dict(zip(owners, received.split(counts), strict=True))
        if sent.numel():
            updates_of[plan.rank] = sent
        device = received.device
        joins = self._group is not None and self._group._get_backend(device).name() in _JOINING
        with c10d._coalescing_manager(self._group, device, True) if joins else nullcontext() as joined:
            works = [
                dist.broadcast(
                    updates_of[owner].view(torch.uint8), group=self._group, group_src=owner, async_op=True
                )
                for owner in sorted(updates_of)
            ]
        return works if joined is None else joined.works

    def wait(self, exchange: Exchange, flight: InFlight) -> None:
        """Wait for the messages of a chunk; on a GPU the current stream waits, not the process."""
        if not flight.works:
            return
        with self._phase(exchange, flight):
            while flight.works:  # removed one by one: after an error none is waited for twice
                flight.works.pop(0).wait()

    def _phase(self, exchange: Exchange, flight: InFlight) -> AbstractContextManager[None]:
        return phase(f"{exchange} of chunk {flight.number} of step set {self._number}", self._group)


def overlap_fits(matrices: Iterable[MatrixLayout], dtype: torch.dtype) -> bool:
    """Return whether the buffers of overlap take at most 1 GiB if they hold the largest matrix, or block of a stack."""
    largest = max((matrix.numel // (matrix.equal_blocks or 1) for matrix in matrices), default=0)
    return 2 * SLOTS * dtype.itemsize * largest <= _OVERLAP_BYTES


def start_all_to_all(
    received: Tensor,
    sent: Tensor,
    received_splits: Sequence[int],
    sent_splits: Sequence[int],
    *,
    group: dist.ProcessGroup | None,
) -> dist.Work:
    """Start an all-to-all of flat tensors as bytes, because gloo does not support every half-precision dtype.

    Must be called by all ranks of ``group``. The splits are the elements for and from each rank.
    """
    size = sent.element_size()
    work: dist.Work = dist.all_to_all_single(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [count * size for count in received_splits],
        [count * size for count in sent_splits],
        group=group,
        async_op=True,
    )
    return work


def exchange_tensors(
    tensors: Sequence[Sequence[Tensor]],
    numels: Sequence[Sequence[int]],
    *,
    like: Tensor,
    group: dist.ProcessGroup | None,
    purpose: str,
) -> list[Sequence[Tensor]]:
    """Send tensors to every rank of a group in one all-to-all; return what each rank sent, flat.

    Must be called by all ranks of ``group``. ``tensors`` are by receiver; ``numels`` are the elements of each tensor
    that each rank sends. ``like`` has the dtype in which they are sent, and the device to send from.
    """
    # 1. pack: one flat tensor, by rank
    vectors = [tensor.reshape(-1).to(like) for to_rank in tensors for tensor in to_rank]
    sent = torch.cat(vectors) if vectors else like.new_empty(0)
    sent_splits = [sum(tensor.numel() for tensor in to_rank) for to_rank in tensors]
    received_splits = [sum(from_rank) for from_rank in numels]
    received = like.new_empty(sum(received_splits))
    # 2. exchange
    with phase(purpose, group):
        start_all_to_all(received, sent, received_splits, sent_splits, group=group).wait()
    # 3. unpack: views of what each rank sent
    return [
        flat.split(list(from_rank)) if from_rank else ()
        for flat, from_rank in zip(received.split(received_splits), numels, strict=True)
    ]
