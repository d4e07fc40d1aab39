"""The two elementwise passes of a step. One call packs all fragments of a chunk, another applies what came back.

They read the tables of :mod:`deepspeed_muon.step.tables`, which stay. What changes from step to step is in
:class:`Rates`, a row a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.step.tables import COLUMNS, ChunkTable
from deepspeed_muon.transport.exchange import Codec
from deepspeed_muon.transport.row_state import RowsAtOwner
from deepspeed_muon.variants import Variant


@dataclass(frozen=True, slots=True)
class Rates:
    """How each matrix of a plan is updated in this step.

    Attributes:
        momentum: ``(matrices, 2)``, float64: decay of the moving average, and whether Nesterov's blend follows.
        apply: ``(matrices, 2)``, float64: the rate times the scale of the first block, relative to which an update is
            scaled; and the factor of the weights, or with cautious decay the share that those lose that decay.
        cautious: Matrices of which only those weights decay that have the sign of their update.
        scales: Factor of the scale rule for each block of a matrix.
        settings: Values of the variant's settings for each matrix.
    """

    momentum: Tensor
    apply: Tensor
    cautious: frozenset[int]
    scales: Sequence[tuple[float, ...]]
    settings: Sequence[Mapping[str, float]]


class RateTable:
    """The :class:`Rates` of a plan, made anew when a param group has changed."""

    def __init__(self, matrices: Sequence[MatrixLayout], variant: Variant) -> None:
        self._matrices = matrices
        self._keys = [each.name for each in variant.settings]
        self._known: dict[tuple[int, AdjustLrName], tuple[float, ...]] = {}
        self._read: dict[int, tuple[Any, ...]] = {}
        self._rates: Rates | None = None

    def of(self, groups: Mapping[int, Mapping[str, Any]]) -> Rates:
        """Return the rates for the param groups, which are given by partition index."""
        read = {partition: self._numbers(group) for partition, group in groups.items()}
        if read != self._read or self._rates is None:
            self._read = read
            self._rates = self._made(read)
        return self._rates

    def _numbers(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what the rates depend on."""
        return (
            float(group["lr"]),
            float(group["weight_decay"]),
            group["weight_decay_mode"],
            group["adjust_lr_fn"],
            float(group["momentum"]),
            bool(group["nesterov"]),
            *(float(group[key]) for key in self._keys),
        )

    def _made(self, read: Mapping[int, tuple[Any, ...]]) -> Rates:
        of_matrix = [read[matrix.partition] for matrix in self._matrices]
        scales = [self._scales(number, each[3]) for number, each in enumerate(of_matrix)]
        apply = [
            (lr * own[0], _decay(mode, lr, decay))
            for own, (lr, decay, mode, *_) in zip(scales, of_matrix, strict=True)
        ]
        settings = {values: dict(zip(self._keys, values[6:], strict=True)) for values in read.values()}
        return Rates(
            torch.tensor([each[4:6] for each in of_matrix], dtype=torch.float64).view(-1, 2),
            torch.tensor(apply, dtype=torch.float64).view(-1, 2),
            frozenset(number for number, each in enumerate(of_matrix) if each[2] == "cautious"),
            scales,
            [settings[each] for each in of_matrix],
        )

    def _scales(self, index: int, rule: AdjustLrName) -> tuple[float, ...]:
        scales = self._known.get((index, rule))
        if scales is None:
            matrix = self._matrices[index]
            shapes = [matrix.scale_shape]
            if not matrix.is_cut:
                shapes = [matrix.layer_shape(block.rows, block.cols) for block in matrix.blocks()]
            scales = self._known[index, rule] = tuple(update_scale(rule, *shape) for shape in shapes)
        return scales


def _decay(mode: WeightDecayMode, lr: float, weight_decay: float) -> float:
    return lr * weight_decay if mode == "cautious" else decay_factor(mode, lr=lr, weight_decay=weight_decay)


@dataclass(frozen=True, slots=True)
class Weights:
    """Where the updates of one step go.

    Attributes:
        active: Whether any rank has a gradient, one flag for each matrix of the plan.
        mask: The same as a tensor; ``None`` if all are active.
        rates: Of each matrix of the plan.
        flat: This rank's flat weights, by position of the partition; mutated.
        passes: Native or torch passes.
        variant: Its functions on fragments.
    """

    active: Sequence[bool]
    mask: Tensor | None
    rates: Rates
    flat: Sequence[Tensor]
    passes: FlatPasses
    variant: Variant

    def active_rows(self, table: Tensor) -> Tensor:
        """Return the rows of a table whose matrix is active."""
        return table if self.mask is None else table[self.mask[table[:, COLUMNS - 1]]]


@dataclass(frozen=True, slots=True)
class Step:
    """The tensors of one step of one set; flat ones by position of the partition.

    Attributes:
        weights: Where the updates go.
        momentum: This rank's momentum; mutated.
        grads: The gradients that enter it.
        finish: The variant's ``finish`` with the row state of owned matrices; ``None`` if it has none.
    """

    weights: Weights
    momentum: Sequence[Tensor]
    grads: Sequence[Tensor]
    finish: RowsAtOwner | None


def gradients_for(
    momentum: Sequence[Tensor], grads: Sequence[Tensor | None], weights: Weights
) -> list[Tensor]:
    """Return the gradients that enter the momentum: zeros for a missing one, and as the variant changes them."""
    found = [
        torch.zeros_like(buf) if grad is None else grad for buf, grad in zip(momentum, grads, strict=True)
    ]
    change = weights.variant.before_momentum
    return found if change is None else [change(g, w) for g, w in zip(found, weights.flat, strict=True)]


def pack(table: ChunkTable, step: Step, directions: Tensor, send: Tensor) -> None:
    """Update the momentum of a chunk's active fragments; write their directions.

    Args:
        table: Of the chunk.
        step: The momentum is mutated.
        directions: Receives those that do not travel, :attr:`ChunkTable.room` elements in the communication dtype.
        send: Receives those that travel. Both lie on the device of the momentum.
    """
    weights, rows = step.weights, step.weights.active_rows(table.packed)
    weights.passes.momentum_pack(step.momentum, step.grads, [directions, send], rows, weights.rates.momentum)


def apply(table: Tensor, weights: Weights, updates: Sequence[Tensor]) -> None:
    """Decay and update the fragments of the weights in a table.

    Args:
        table: Of active fragments.
        weights: Mutated.
        updates: The table's other tensors: flat, in the communication dtype, on any device.
    """
    if not len(table):
        return
    device, change, cautious = weights.flat[0].device, weights.variant.before_apply, weights.rates.cautious
    if any(each.device != device for each in updates):
        table, updates = _moved(table, updates, device)
    if change is None and not cautious:
        weights.passes.unpack_apply(weights.flat, updates, table, weights.rates.apply)
        return
    left: list[tuple[int, ...]] = []
    changed: list[Tensor] = []
    for partition, offset, other, place, numel, matrix in table.tolist():
        target = weights.flat[partition].narrow(0, offset, numel)
        update = updates[other].narrow(0, place, numel)
        if change is not None:
            update = change(update, target)
        if matrix in cautious:
            _apply_cautiously(target, update, *weights.rates.apply[matrix].tolist())
            continue
        left.append((partition, offset, len(changed), 0, numel, matrix))
        changed.append(update)
    rows = torch.tensor(left, dtype=torch.int64).view(-1, COLUMNS)
    weights.passes.unpack_apply(weights.flat, changed, rows, weights.rates.apply)


def _moved(table: Tensor, updates: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return updates that lie on ``device`` in the order of the table, and that table."""
    parts = [updates[row[2]].narrow(0, row[3], row[4]) for row in table.tolist()]
    table, lengths = table.clone(), table[:, 4]
    table[:, 2] = 0
    table[:, 3] = lengths.cumsum(0) - lengths
    return table, [torch.cat(parts).to(device)]


def _apply_cautiously(target: Tensor, update: Tensor, step: float, decay: float) -> None:
    """Update a fragment; only weights with the sign of their update decay."""

    def run(param: Tensor, update: Tensor) -> None:
        cautious_apply_(param, update, lr_scale=step, decay=decay)

    if target.dtype.itemsize < 4:
        in_fp32(run, [target], [update])
    else:
        run(target, update)


def write(place: Tensor, values: Tensor, codec: Codec, note: Callable[[Tensor, Tensor], None] | None) -> None:
    """Write what travels, ``(matrices, pieces, elements)``, to its place in a buffer.

    Args:
        place: ``(matrices, pieces, units)``. Mutated.
        values: In the communication dtype.
        codec: How it travels.
        note: Called with ``(pieces, elements)`` and what the receiver will read, if they may differ.
    """
    if codec.exact:
        place.copy_(values)
        return
    for room, pieces in zip(place, values, strict=True):
        codec.write(room, pieces)
        if note is not None:
            note(pieces, codec.read(room, pieces.shape[1]))


def read(target: Tensor, place: Tensor, codec: Codec) -> None:
    """Copy what travelled from its place in a buffer, as :func:`write` has it, to ``target``, which is mutated."""
    if codec.exact:
        target.copy_(place)
        return
    for pieces, room in zip(target, place, strict=True):
        pieces.copy_(codec.read(room, pieces.shape[1]))
