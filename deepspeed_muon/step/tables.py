"""The tables of a step, the rates beside them, and the two passes over them: :func:`pack` and :func:`apply`.

A *table* says for each fragment of this rank where its elements are: a row of six integers (:data:`COLUMNS`) names its
range in a partition, its range in a second tensor, which has its directions or its updates, and its matrix, whose
learning rate, decay and momentum are a row of :class:`Rates`.

Tables are made once, when the optimizer is bound. A native pass reads one in a single call, and equal segments of a
batch's matrices are copied by one call, so that what Python does in a step grows with the batches, not the fragments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_muon.config.values import MomentumWarmupConfig
from deepspeed_muon.math.updates import (
    AdjustLrName,
    WeightDecayMode,
    decay_factor,
    momentum_in_warmup,
    shape_scale,
)
from deepspeed_muon.ops.dispatch import FlatPasses
from deepspeed_muon.ops.torch_operators import cautious_apply_
from deepspeed_muon.plan.chunks import Chunk, ExchangePlan, Segment
from deepspeed_muon.plan.layout import MatrixLayout, PartitionIndex, PlanIndex
from deepspeed_muon.step.int8 import Int8Blocks
from deepspeed_muon.step.row_state import OwnedRows
from deepspeed_muon.variants.variant import Variant

COLUMNS = 6
"""Columns of a table of ops/, one row for each fragment.

Position of the partition and offset in it; second tensor (:data:`LOCAL_BUFFER` or :data:`FRAGMENT_BUFFER`) and offset
in it; number of elements; index of the matrix.
"""
_ALIGNMENT = 32  # elements: 64 bytes in bf16, a cache line
LOCAL_BUFFER, FRAGMENT_BUFFER = 0, 1
"""The second tensors of a table; see :class:`.InFlight`."""


@dataclass(frozen=True, slots=True)
class BatchSegments:
    """The segments of matrices that are orthogonalised together, ``(matrices, numel)``, where this rank stores them.

    Directions are read from the owner buffer (``all_to_all``) or the local buffer, and updates written over them; those
    that are broadcast are written into the owner buffer, too.

    Attributes:
        local: Segments of the local buffer; none in an ``all_to_all`` chunk.
        owner: Segments of the owner buffer; none in a ``local`` chunk.
        is_single: Whether one segment, at an aligned offset, has all directions of the batch: it is read as a tensor,
            without a buffer for the batch. Joined segments of shards are strided and are copied then.
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
        segments_of: Returns the segments of owned matrices whose shards have one size; cached.
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
        starts = self.pack_table[:, :2].tolist() if int8_blocks else []
        rows = [int8_blocks[position].row(start) for position, start in starts]
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

    def _table(self, indices: Sequence[PlanIndex], target: int, offsets: Sequence[int]) -> Tensor:
        """Return the table of this rank's fragments of matrices, at some offsets in the second tensor ``target``."""
        rows = []
        for index, offset in zip(indices, offsets, strict=True):
            fragment, partition = self._fragments[index], self._matrices[index].partition
            position = self._list_position[partition]
            rows.append((position, fragment.partition_offset, target, offset, fragment.numel, index))
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, COLUMNS)


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


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rate, decay and momentum of each matrix of a plan in this step.

    Attributes:
        momentum: ``(matrices, 2)`` float64: ``momentum``, and 1 for Nesterov momentum, else 0.
        lr_and_decay: ``(matrices, 2)`` float64. Column 0 is the learning rate times the scale of the matrix's first
            block; the updates of its other blocks have been scaled relative to it. Column 1 is the factor that decays
            the weights; with cautious decay it is the fraction that the decayed weights lose.
        cautious: ``(partitions,)`` bool: where only weights decay whose sign is that of their update; ``None`` if there
            is no such partition.
        block_scales: ``update_scale`` times the factor of ``adjust_lr_fn``, for each block of each matrix.
        settings: Values of the variant's settings for each matrix; empty if it has none.
    """

    momentum: Tensor
    lr_and_decay: Tensor
    cautious: Tensor | None
    block_scales: Sequence[tuple[float, ...]]
    settings: Sequence[tuple[float, ...]]


class GroupRates(NamedTuple):
    """The values of a param group in one step on which :class:`Rates` depend; ``settings`` are the variant's."""

    lr: float
    weight_decay: float
    weight_decay_mode: WeightDecayMode
    adjust_lr_fn: AdjustLrName
    update_scale: float
    momentum: float
    nesterov: bool
    settings: tuple[float, ...]


class RateTable:
    """Computes the :class:`Rates` of a plan."""

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        variant: Variant,
        list_position: Mapping[PartitionIndex, int],
        warmup: MomentumWarmupConfig | None,
    ) -> None:
        """``list_position`` is that of :class:`ChunkTable`."""
        self._matrices = matrices
        self._warmup = warmup
        self._keys = [setting.name for setting in variant.settings]
        self._list_position = list_position
        self._positions = torch.tensor(
            [list_position[matrix.partition] for matrix in matrices], dtype=torch.int64, device="cpu"
        )  # (matrices,)
        # Rates change with a param group or in a warm-up; a schedule changes them in every step, but not block scales.
        self._block_scales = functools.lru_cache(maxsize=4)(self._make_block_scales)
        self._rates_of = functools.lru_cache(maxsize=1)(self._make_rates)

    def of(
        self, groups: Mapping[PartitionIndex, Mapping[str, Any]], steps: Mapping[PartitionIndex, int]
    ) -> Rates:
        """Return the rates of a step; ``steps`` are counted from 1 in the state of each partition."""
        # A group may own many partitions (sub-groups): it is read once for each step number among them.
        warmup_steps = 0 if self._warmup is None else self._warmup.steps
        read: dict[tuple[int, int], GroupRates] = {}
        of_partitions = []
        for index in self._list_position:
            # After the warm-up momentum does not depend on the step, so that rates are not computed again.
            step = min(steps[index], warmup_steps + 1)
            key = (id(groups[index]), step)
            if key not in read:
                read[key] = self._read(groups[index], step)
            of_partitions.append(read[key])
        return self._rates_of(tuple(of_partitions))

    def _read(self, group: Mapping[str, Any], step: int) -> GroupRates:
        momentum, warmup = float(group["momentum"]), self._warmup
        if warmup is not None:
            momentum = momentum_in_warmup(momentum, start=warmup.start, steps=warmup.steps, step=step)
        return GroupRates(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            weight_decay_mode=group["weight_decay_mode"],
            adjust_lr_fn=group["adjust_lr_fn"],
            update_scale=float(group["update_scale"]),
            momentum=momentum,
            nesterov=bool(group["nesterov"]),
            settings=tuple(float(group[key]) for key in self._keys),
        )

    def _make_rates(self, of_partitions: Sequence[GroupRates]) -> Rates:
        block_scales, first = self._block_scales(
            tuple((r.adjust_lr_fn, r.update_scale) for r in of_partitions)
        )
        lr_and_decay, cautious = [], []
        for rates in of_partitions:
            # Cautious decay has no common factor: the pass gets the fraction that decayed weights lose.
            cautious.append(rates.weight_decay_mode == "cautious")
            decay = rates.lr * rates.weight_decay
            if not cautious[-1]:
                decay = decay_factor(rates.weight_decay_mode, lr=rates.lr, weight_decay=rates.weight_decay)
            lr_and_decay.append((rates.lr, decay))
        momentum = [(rates.momentum, rates.nesterov) for rates in of_partitions]
        # (partitions, 2) -> (matrices, 2)
        of_matrices = torch.tensor(lr_and_decay, dtype=torch.float64, device="cpu").view(-1, 2)[
            self._positions
        ]
        of_matrices[:, 0] *= first
        return Rates(
            torch.tensor(momentum, dtype=torch.float64, device="cpu").view(-1, 2)[self._positions],
            of_matrices,
            torch.tensor(cautious, dtype=torch.bool, device="cpu") if any(cautious) else None,
            block_scales,
            [of_partitions[position].settings for position in self._positions.tolist()] if self._keys else (),
        )

    def _make_block_scales(
        self, rules: Sequence[tuple[AdjustLrName, float]]
    ) -> tuple[list[tuple[float, ...]], Tensor]:
        """Return the scales of each matrix's blocks, and those of the first blocks.

        ``rules`` are ``adjust_lr_fn`` and ``update_scale`` of each partition.
        """
        block_scales: list[tuple[float, ...]] = []
        for matrix, position in zip(self._matrices, self._positions.tolist(), strict=True):
            # (outputs, inputs) of each block, however the weight is stored
            rule, factor = rules[position]
            shapes = [shape[::-1] if matrix.transposed else shape for shape in matrix.block_shapes]
            block_scales.append(tuple(factor * shape_scale(rule, *shape) for shape in shapes))
        return block_scales, torch.tensor(
            [scales[0] for scales in block_scales], dtype=torch.float64, device="cpu"
        )


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The tensors and rates of one step of one step set.

    The lists have one flat tensor of this rank for each of Muon's partitions.

    Attributes:
        mask: Whether any rank has a gradient, ``(matrices,)`` bool on the CPU; ``None`` if every matrix has one.
        flat: The weights; mutated.
        momentum: The momentum, or its int8 codes; mutated.
        row_state: The variant's ``row_factors`` with the row state of owned matrices; ``None`` if it has none, or no
            matrix has a gradient.
        momentum_scales: The scales of int8 momentum, mutated; ``None`` for other dtypes.
    """

    mask: Tensor | None
    rates: Rates
    flat: Sequence[Tensor]
    momentum: Sequence[Tensor]
    grads: Sequence[Tensor]
    row_state: OwnedRows | None
    passes: FlatPasses
    momentum_scales: Sequence[Tensor] | None = None

    def active(self, indices: Sequence[PlanIndex]) -> Sequence[PlanIndex]:
        """Return those of the matrices ``indices`` that are active: any rank has a gradient of them."""
        if self.mask is None:
            return indices
        return [index for index, flag in zip(indices, self.mask[list(indices)].tolist(), strict=True) if flag]

    def active_fragments(self, table: Tensor) -> Tensor:
        """Return the fragments in a table whose matrix is active, ``(active fragments, 6)``."""
        return table if self.mask is None else table[self.mask[table[:, COLUMNS - 1]]]


def pack(table: ChunkTable, step: StepTensors, local_buffer: Tensor, fragment_buffer: Tensor) -> None:
    """Update the momentum of a chunk's active fragments, and write their directions.

    In an ``all_to_all`` chunk all go to the fragment buffer, else all to the local one; both are on the device of the
    momentum.
    """
    fragments, rates = step.active_fragments(table.pack_table), step.rates.momentum
    outputs = [local_buffer, fragment_buffer]
    if step.momentum_scales is None:
        step.passes.momentum_pack(step.momentum, step.grads, outputs, fragments, rates)
        return
    int8_blocks = table.int8_blocks
    if step.mask is not None:
        int8_blocks = int8_blocks[step.mask[table.pack_table[:, COLUMNS - 1]]]
    step.passes.momentum_pack_int8(
        step.momentum, step.momentum_scales, step.grads, outputs, fragments, rates, int8_blocks
    )


def apply(table: Tensor, step: StepTensors, updates: Sequence[Tensor]) -> None:
    """Decay the weights of some fragments and subtract their updates, by :func:`.unpack_apply_` or its native twin.

    It is :meth:`deepspeed_muon.reference.ReferenceMuon.apply`::

        W <- W (1 - lr wd) - lr scale O

    ``W`` and ``O`` are ``(numel,)``, a fragment of a matrix and of its orthogonalised direction. :class:`Rates` has
    ``lr scale`` and the decay factor (``1 - wd`` if independent) of each matrix. Cautious decay shrinks only the
    elements of ``W`` with the sign of ``O``.

    ``table`` has the rows of :attr:`ChunkTable.apply_table` whose matrix is active, and ``updates`` its second tensors:
    flat, in the wire dtype, on any device.
    """
    if not len(table):
        return
    device, rates = step.flat[0].device, step.rates
    if any(tensor.device != device for tensor in updates):
        table, updates = _moved(table, updates, device)
    cautious = None if rates.cautious is None else rates.cautious[table[:, 0]]
    if cautious is not None:
        cautious_apply_(step.flat, updates, table[cautious], rates.lr_and_decay)
        table = table[~cautious]
    step.passes.unpack_apply(step.flat, updates, table, rates.lr_and_decay)


def _moved(table: Tensor, updates: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
    """Copy the updates of all fragments to a device at once; return the table for the copies, and these."""
    fragments = [
        updates[source].narrow(0, offset, numel) for _, _, source, offset, numel, _ in table.tolist()
    ]
    moved = torch.cat(fragments).to(device).split(table[:, 4].tolist())
    table = table.clone()
    table[:, 2] = torch.arange(len(table), dtype=torch.int64, device="cpu")
    table[:, 3] = 0  # fragment i is the i-th tensor, from its start
    return table, moved
