"""The two elementwise passes of a step, and the tables that they read.

A chunk has its table from the time when the optimizer is bound: for each of this rank's fragments the offsets in the
partition, in the send buffer and in the matrix. What changes from step to step is in :class:`Rate`, a row a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_muon.math.updates import (
    AdjustLrName,
    WeightDecayMode,
    cautious_apply_,
    decay_factor,
    update_scale,
)
from deepspeed_muon.ops import FlatPasses, in_fp32
from deepspeed_muon.plan.exchange import Chunk, ExchangePlan, Segment
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.transport.exchange import aligned
from deepspeed_muon.transport.row_state import RowsAtOwner
from deepspeed_muon.variants import Variant


class Row(NamedTuple):
    """This rank's fragment of one matrix.

    Attributes:
        matrix: Index of the matrix in the plan.
        partition: Index of the flat partition.
        offset: Where the fragment starts in the partition.
        matrix_offset: Where it starts in the matrix.
        numel: Its length.
        segment: Its place in the send buffer; ``None`` if it does not travel.
    """

    matrix: int
    partition: int
    offset: int
    matrix_offset: int
    numel: int
    segment: Segment | None = None


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """What this rank does in one chunk.

    Attributes:
        own: Fragments of the matrices that this rank owns, by matrix, in the order in which they run in batches.
        copies: Fragments of others' matrices in a chunk without a gather: only their momentum is updated here.
        sent: Fragments of others' matrices: the update arrives where the direction left from.
        segments: For each owned matrix, where other ranks' fragments lie in the receive buffer.
    """

    own: dict[int, Row]
    copies: tuple[Row, ...]
    sent: tuple[Row, ...]
    segments: dict[int, list[Segment]]


def tables_of(
    plan: ExchangePlan, in_batches: Callable[[Sequence[int]], Iterable[Sequence[int]]]
) -> list[ChunkTable]:
    """Return the table of each chunk; ``in_batches`` groups owned matrices as they are orthogonalised."""
    return [
        _table(plan, chunk, [i for batch in in_batches(chunk.owned) for i in batch]) for chunk in plan.chunks
    ]


def _table(plan: ExchangePlan, chunk: Chunk, owned: Sequence[int]) -> ChunkTable:
    def row(index: int, segment: Segment | None = None) -> list[Row]:
        matrix = plan.matrices[index]
        held = matrix.placement.on(plan.rank)
        if held is None:
            return []
        where = (held.partition_offset, held.matrix_offset, held.numel)
        return [Row(index, matrix.partition, *where, segment)]

    segments: dict[int, list[Segment]] = {}
    for segment in chunk.receive_buffer.segments:
        segments.setdefault(segment.matrix, []).append(segment)
    others = () if chunk.gathers else [i for i in chunk.matrices if plan.owners[i] != plan.rank]
    return ChunkTable(
        {index: found for index in owned for found in row(index)},
        tuple(found for index in others for found in row(index)),
        tuple(found for each in chunk.send_buffer.segments for found in row(each.matrix, each)),
        segments,
    )


class Rate(NamedTuple):
    """How a matrix is updated in this step.

    Attributes:
        momentum: Decay of the moving average.
        nesterov: Whether the gradient is blended in once more.
        step: The rate times the scale of the first block. An update arrives scaled relative to that block.
        decay: The factor of the weights, or with ``cautious`` the share that those lose that decay.
        cautious: Whether only weights with the sign of their update decay.
        scales: Factor of the scale rule for each block of the matrix.
    """

    momentum: float
    nesterov: bool
    step: float
    decay: float
    cautious: bool
    scales: tuple[float, ...]


class RateTable:
    """A :class:`Rate` for each matrix of a plan, made anew when a param group has changed."""

    def __init__(self, matrices: Sequence[MatrixLayout]) -> None:
        self._matrices = matrices
        self._scales: dict[tuple[int, AdjustLrName], tuple[float, ...]] = {}
        self._read: dict[int, tuple[Any, ...]] = {}
        self._rates: list[Rate] = []

    def of(self, groups: Mapping[int, Mapping[str, Any]]) -> list[Rate]:
        """Return the rows for the param groups, which are given by partition index."""
        read = {partition: _numbers(group) for partition, group in groups.items()}
        if read != self._read or not self._rates:
            self._read = read
            self._rates = [self._rate(i, *read[matrix.partition]) for i, matrix in enumerate(self._matrices)]
        return self._rates

    def _rate(
        self,
        index: int,
        lr: float,
        weight_decay: float,
        mode: WeightDecayMode,
        rule: AdjustLrName,
        momentum: float,
        nesterov: bool,
    ) -> Rate:
        scales = self._scales.get((index, rule))
        if scales is None:
            matrix = self._matrices[index]
            shapes = [matrix.scale_shape]
            if not matrix.is_cut:
                shapes = [matrix.layer_shape(block.rows, block.cols) for block in matrix.blocks()]
            scales = self._scales[index, rule] = tuple(update_scale(rule, *shape) for shape in shapes)
        cautious = mode == "cautious"
        decay = lr * weight_decay if cautious else decay_factor(mode, lr=lr, weight_decay=weight_decay)
        return Rate(momentum, nesterov, lr * scales[0], decay, cautious, scales)


def _numbers(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the rates depend on."""
    return (
        float(group["lr"]),
        float(group["weight_decay"]),
        group["weight_decay_mode"],
        group["adjust_lr_fn"],
        float(group["momentum"]),
        bool(group["nesterov"]),
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """Where the updates of one step go.

    Attributes:
        active: Whether any rank has a gradient, one flag for each matrix of the plan.
        rates: A row for each matrix of the plan.
        flat: Partition index to this rank's flat weights; mutated.
        passes: Partition index to its native or torch passes.
        variant: Its functions on fragments.
    """

    active: Sequence[bool]
    rates: Sequence[Rate]
    flat: Mapping[int, Tensor]
    passes: Mapping[int, FlatPasses]
    variant: Variant


@dataclass(frozen=True, slots=True)
class Step:
    """The tensors of one step of one set.

    Attributes:
        weights: Where the updates go.
        momentum: Partition index to this rank's momentum, flat; mutated.
        grads: Partition index to its gradient, flat; a missing one counts as zero.
        finish: The variant's ``finish`` with the row state of owned matrices; ``None`` if it has none.
    """

    weights: Weights
    momentum: Mapping[int, Tensor]
    grads: Mapping[int, Tensor]
    finish: RowsAtOwner | None


def pack(rows: Iterable[Row], step: Step, dtype: torch.dtype) -> dict[int, Tensor]:
    """Update the momentum of the active fragments in ``rows``; return their directions by matrix, flat.

    The directions of one device lie in memory in the order of ``rows``, each at a multiple of 32 elements. So small
    matrices that lie whole here and run in one batch need no copy if their sizes are such multiples.
    """
    active = [row for row in rows if step.weights.active[row.matrix]]
    sizes: dict[torch.device, int] = {}
    for row in active:
        device = step.momentum[row.partition].device
        sizes[device] = sizes.get(device, 0) + aligned(row.numel)
    memory = {device: torch.empty(numel, dtype=dtype, device=device) for device, numel in sizes.items()}
    used = dict.fromkeys(memory, 0)
    made: dict[int, Tensor] = {}
    for row in active:
        device = step.momentum[row.partition].device
        made[row.matrix] = memory[device].narrow(0, used[device], row.numel)
        used[device] += aligned(row.numel)
        pack_into(made[row.matrix], row, step)
    return made


def pack_into(out: Tensor, row: Row, step: Step) -> None:
    """Update the momentum of a fragment and write its direction to ``out``, flat, on any device."""
    buf = step.momentum[row.partition].narrow(0, row.offset, row.numel)
    grad = step.grads.get(row.partition)
    grad = torch.zeros_like(buf) if grad is None else grad.narrow(0, row.offset, row.numel)
    weights = step.weights
    if weights.variant.before_momentum is not None:
        held = weights.flat[row.partition].narrow(0, row.offset, row.numel)
        grad = weights.variant.before_momentum(grad, held)
    rate = weights.rates[row.matrix]
    made = out if out.device == buf.device else torch.empty(row.numel, dtype=out.dtype, device=buf.device)
    weights.passes[row.partition].momentum_pack(buf, grad, made, rate.momentum, rate.nesterov)
    if made is not out:
        out.copy_(made, non_blocking=True)


def apply(row: Row, weights: Weights, update: Tensor) -> None:
    """Decay and update a fragment of the weights by ``update``: flat, in the communication dtype, on any device."""
    target = weights.flat[row.partition].narrow(0, row.offset, row.numel)
    update, rate = update.to(target.device), weights.rates[row.matrix]
    if weights.variant.before_apply is not None:
        update = weights.variant.before_apply(update, target)
    if not rate.cautious:
        weights.passes[row.partition].unpack_apply(target, update, rate.step, rate.decay)
        return

    def decay_cautiously(param: Tensor, update: Tensor) -> None:
        cautious_apply_(param, update, lr_scale=rate.step, decay=rate.decay)

    if target.dtype.itemsize < 4:
        in_fp32(decay_cautiously, [target], [update])
    else:
        decay_cautiously(target, update)
