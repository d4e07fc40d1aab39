"""Where the elements of a chunk are: the tables of the passes over it, and the segments that are copied at once.

A *table* says for each fragment of this rank where its elements are: a row of six integers (:class:`.Column`) names its
range in a partition, its range in a buffer, which has its directions or its updates, and its matrix, whose learning
rate, decay and momentum are a row of :class:`.Rates`.

Tables are made once, when the optimizer is bound. A native pass reads one in a single call, and equal segments of a
batch's matrices are copied by one call, so that what Python does in a step grows with the batches, not the fragments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from deepspeed_muon.ops.torch_operators import Column
from deepspeed_muon.plan.chunks import Chunk, ExchangePlan, Segment
from deepspeed_muon.plan.layout import PartitionIndex, PlanIndex
from deepspeed_muon.step.int8 import Int8Blocks

_ALIGNMENT = 32  # elements: 64 bytes in bf16, a cache line
LOCAL_BUFFER, FRAGMENT_BUFFER = 0, 1
"""The buffers of a table: positions of those of :class:`.InFlight` in the list that a pass gets."""


@dataclass(frozen=True, slots=True)
class BatchSegments:
    """The segments of matrices that are orthogonalised together, ``(matrices, numel)``, where this rank stores them.

    Directions are read from the owner buffer (``all_to_all``) or the local buffer, and updates written over them; those
    that are broadcast are written into the owner buffer, too.

    Attributes:
        local: Segments of the local buffer; none in an ``all_to_all`` chunk.
        owner: Segments of the owner buffer; none in a ``local`` chunk.
        is_single: Whether one segment, at an aligned offset, has all directions of the batch: they are a view of the
            buffer, and are copied only where its fragments are strided.
    """

    local: tuple[Segment, ...]
    owner: tuple[Segment, ...]
    is_single: bool


class ChunkTable:
    """The fragments that this rank packs, copies and applies in one chunk.

    Attributes:
        local_numel: Elements of the local buffer, with each fragment at a multiple of 32 elements: the owned matrices
            in the order of the batches, so that a batch is a view, then the replicated matrices of other owners, whose
            directions are only a by-product of the momentum. 0 in an ``all_to_all`` chunk.
        pack_table: Fragments of the momentum and the offsets of their directions, ``(fragments, 6)`` int64.
        int8_blocks: :meth:`.Int8Blocks.row` of each row of :attr:`pack_table`, ``(fragments, 2)`` int64; empty unless
            the momentum is int8.
        apply_table: Fragments of the weights and the offsets of their updates, which replace the directions,
            ``(fragments, 6)`` int64.
        segments_of: Returns the segments of owned matrices with equally many elements; cached.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        chunk: Chunk,
        batches: Sequence[Sequence[PlanIndex]],
        list_position: Mapping[PartitionIndex, int],
        int8_blocks: Sequence[Int8Blocks] = (),
    ) -> None:
        """Make the tables of one chunk of a plan.

        ``batches`` are the chunk's owned matrices, as they are orthogonalised together. ``list_position`` maps the
        index of a partition to its position in the lists of tensors that a pass takes; ``int8_blocks`` is such a list.
        """
        self._matrices, self._list_position = plan.matrices, list_position
        fragments = {index: plan.matrices[index].placement.fragment_on(plan.rank) for index in chunk.matrices}
        self._fragments = {index: fragment for index, fragment in fragments.items() if fragment is not None}
        self._owner_segments: dict[PlanIndex, list[Segment]] = {}
        for index, segment in chunk.owner_buffer.segments:
            self._owner_segments.setdefault(index, []).append(segment)
        # 1. the local buffer, and the fragments of which it gets the directions
        is_gathered = chunk.kind == "all_to_all"
        local_fragments = {} if is_gathered else self._fragments
        owned = [index for batch in batches for index in batch if index in local_fragments]
        local = owned + [index for index in local_fragments if plan.owners[index] != plan.rank]
        offsets, self.local_numel = self._aligned_offsets(local)
        self._local_offset = dict(zip(local, offsets, strict=True))
        # 2. the fragment buffer
        sent = [index for index, _ in chunk.fragment_buffer.segments]
        sent_offsets = [segment.buffer_offset for _, segment in chunk.fragment_buffer.segments]
        # 3. tables of the passes
        sent_table = self._table(sent, FRAGMENT_BUFFER, sent_offsets)
        self.pack_table = sent_table if is_gathered else self._table(local, LOCAL_BUFFER, offsets)
        self.apply_table = torch.cat((self._table(owned, LOCAL_BUFFER, offsets[: len(owned)]), sent_table))
        # (fragments, 2): position of the partition, and offset in it
        starts = self.pack_table[:, [Column.PARTITION, Column.PARTITION_OFFSET]].tolist()
        rows = [int8_blocks[position].row(start) for position, start in starts if int8_blocks]
        self.int8_blocks = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 2)
        # The active matrices of a chunk are almost always the same, or one of a few subsets.
        self.segments_of = functools.lru_cache(maxsize=len(batches) + 64)(self._make_segments)

    def _make_segments(self, indices: tuple[PlanIndex, ...]) -> BatchSegments:
        # 1. the segments of every matrix, as if the matrices followed each other in one tensor
        numel = self._matrices[indices[0]].numel
        local: list[Segment] = []
        owner: list[list[Segment]] = []  # [i]: the i-th segment of each matrix
        for number, index in enumerate(indices):
            start = number * numel  # of this matrix in the batch, (matrices, numel)
            if index in self._local_offset:
                local.append(Segment(start, numel, self._local_offset[index]))
            for position, segment in enumerate(self._owner_segments.get(index, ())):
                if position == len(owner):
                    owner.append([])
                owner[position].append(segment._replace(matrix_offset=start + segment.matrix_offset))
        # 2. joined where they are at equal distances: one strided copy each. The shards of twelve equal matrices at
        # ZeRO 3 are one copy of (12, ranks, elements of a shard).
        local_joined = tuple(_join_matrices(local, numel))
        owner_joined = tuple(joined for segments in owner for joined in _join_matrices(segments, numel))
        # 3. whether a single segment is all of the batch
        sources = local_joined or owner_joined  # directions are in the owner buffer only after a gather
        is_single = False
        if sources and math.prod(sources[0].shape) == len(indices) * numel:
            is_single = sources[0].buffer_offset % _ALIGNMENT == 0
        return BatchSegments(local_joined, owner_joined, is_single)

    def _aligned_offsets(self, indices: Sequence[PlanIndex]) -> tuple[list[int], int]:
        """Return offsets of consecutive fragments at multiples of 32 elements, and the padded numel of all."""
        # 40 and 30 elements: offsets 0 and 64, 96 elements in all
        lengths = (-(-self._fragments[index].numel // _ALIGNMENT) * _ALIGNMENT for index in indices)
        ends = list(accumulate(lengths, initial=0))
        return ends[:-1], ends[-1]

    def _table(self, indices: Sequence[PlanIndex], buffer: int, offsets: Sequence[int]) -> Tensor:
        """Return the table of this rank's fragments of some matrices, at these offsets in a buffer."""
        rows = []
        for index, offset in zip(indices, offsets, strict=True):
            fragment, partition = self._fragments[index], self._matrices[index].partition
            position = self._list_position[partition]
            rows.append((position, fragment.partition_offset, buffer, offset, fragment.numel, index))
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, len(Column))


def _join_matrices(segments: Sequence[Segment], distance: int) -> Iterator[Segment]:
    """Yield the segments, with those of consecutive matrices at equal distances joined into one."""
    last: Segment | None = None
    for segment in segments:
        joined = None if last is None else last.joined(segment, distance)
        if last is not None and joined is None:
            yield last
        last = joined or segment
    if last is not None:
        yield last
