"""The two elementwise passes of a step. One call packs all fragments of a chunk, another applies what came back.

They read the tables of :mod:`deepspeed_muon.step.tables`, which stay. What changes from step to step is in
:class:`Rates`, a row a matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.updates import AdjustLrName, WeightDecayMode, decay_factor, update_scale
from deepspeed_muon.ops import FlatPasses, cautious_apply_
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.step.quantized import QuantizedMomentum
from deepspeed_muon.step.tables import COLUMNS, ChunkTable
from deepspeed_muon.transport.row_state import RowsAtOwner, Settings
from deepspeed_muon.variants import Variant


@dataclass(frozen=True, slots=True)
class Rates:
    """How each matrix of a plan is updated in this step.

    Attributes:
        momentum: ``(matrices, 2)``, float64: decay of the moving average, and whether Nesterov's blend follows.
        apply: ``(matrices, 2)``, float64: the rate times the scale of the first block, relative to which an update is
            scaled; and the factor of the weights, or with cautious decay the share that those lose that decay.
        adam: ``(matrices, 4)``, float64: the rate, AdamW's two betas and its epsilon.
        cautious: ``(partitions,)``, bool: where only weights decay that have the sign of their update; ``None`` if
            nowhere.
        scales: Factor of the scale rule for each block of each matrix.
        settings: Partition index to the values of the variant's settings.
    """

    momentum: Tensor
    apply: Tensor
    adam: Tensor
    cautious: Tensor | None
    scales: Sequence[tuple[float, ...]]
    settings: Settings


class RateTable:
    """The :class:`Rates` of a plan, made anew when a param group has changed."""

    def __init__(
        self, matrices: Sequence[MatrixLayout], variant: Variant, partitions: Mapping[int, int]
    ) -> None:
        """Keep the arguments; ``partitions`` maps the index of a partition to its position."""
        self._matrices = matrices
        self._variant = variant
        self._keys = [each.name for each in variant.settings]
        self._position_of = partitions
        self._positions = torch.tensor([partitions[each.partition] for each in matrices], dtype=torch.int64)
        # A schedule changes the rates in every step, but not the rules.
        self._scales = functools.lru_cache(maxsize=4)(self._scales_by)
        self._read: list[tuple[Any, ...]] = []
        self._rates: Rates | None = None

    def of(self, groups: Mapping[int, Mapping[str, Any]]) -> Rates:
        """Return the rates for the param groups, which are given by partition index."""
        of_group = {id(group): self._numbers(group) for group in {id(g): g for g in groups.values()}.values()}
        read = [of_group[id(groups[index])] for index in self._position_of]
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
            *(float(each) for each in (*group["betas"], group["eps"])),
            *(float(group[key]) for key in self._keys),
        )

    def _made(self, read: Sequence[tuple[Any, ...]]) -> Rates:
        decays = {decay for _, decay, *_ in read} - {0.0}
        if decays and "weight_decay" in self._variant.refuses:  # from a schedule, or another run's settings
            raise ConfigError(
                f"weight_decay {decays.pop():g} in a param group of Muon with variant {self._variant.name!r}: "
                f"{self._variant.refuses['weight_decay']}. After another variant restore with hyperparameters=False"
            )
        scales, first = self._scales(tuple(rule for _, _, _, rule, *_ in read))
        numbers = [
            (lr, _decay(mode, lr, decay), momentum, nesterov, lr, *more[:3])
            for lr, decay, mode, _, momentum, nesterov, *more in read
        ]
        rows = torch.tensor(numbers, dtype=torch.float64).view(-1, 8)[self._positions]
        rows[:, 0] *= first
        cautious = torch.tensor([mode == "cautious" for _, _, mode, *_ in read])
        return Rates(
            rows[:, 2:4].contiguous(),
            rows[:, :2].contiguous(),
            rows[:, 4:],
            cautious if cautious.any() else None,
            scales,
            {
                index: dict(zip(self._keys, each[9:], strict=True))
                for index, each in zip(self._position_of, read, strict=True)
            },
        )

    def _scales_by(self, rules: Sequence[AdjustLrName]) -> tuple[list[tuple[float, ...]], Tensor]:
        """Return the scales of all blocks of each matrix, and of the first ones, for the rule of each partition."""
        found: list[tuple[float, ...]] = []
        for matrix, position in zip(self._matrices, self._positions.tolist(), strict=True):
            shapes = [matrix.scale_shape]
            if not matrix.is_cut:
                shapes = [matrix.layer_shape(*shape) for shape in matrix.block_shapes]
            if self._variant.relative_rate:
                found.append((1.0,) * len(shapes))
            else:
                found.append(tuple(update_scale(rules[position], *shape) for shape in shapes))
        return found, torch.tensor([each[0] for each in found], dtype=torch.float64)


def _decay(mode: WeightDecayMode, lr: float, weight_decay: float) -> float:
    return lr * weight_decay if mode == "cautious" else decay_factor(mode, lr=lr, weight_decay=weight_decay)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one set. Flat tensors are this rank's, by position of the partition.

    Attributes:
        mask: For each matrix of the plan, whether any rank has a gradient, bool on the CPU; ``None`` if all have one.
        rates: Of each matrix of the plan.
        flat: Flat weights; mutated.
        momentum: Mutated.
        grads: The gradients that enter the momentum.
        finish: The variant's ``finish`` with the row state of owned matrices; ``None`` if it has none.
        passes: Native or torch passes.
        variant: What becomes of the directions.
        kept: Partition index and key to the row state that this rank keeps; mutated.
        counts: The number of the step, from 1.
        quantized: The scales of a momentum in 8 bits, whose codes :attr:`momentum` then holds.
    """

    mask: Tensor | None
    rates: Rates
    flat: Sequence[Tensor]
    momentum: Sequence[Tensor]
    grads: Sequence[Tensor]
    finish: RowsAtOwner | None
    passes: FlatPasses
    variant: Variant
    kept: Mapping[int, Mapping[str, Tensor]]
    counts: Sequence[int]
    quantized: QuantizedMomentum | None = None

    def active(self, indices: Sequence[int]) -> Sequence[int]:
        """Return those of some matrices that are active."""
        if self.mask is None:
            return indices
        return [index for index, flag in zip(indices, self.mask[list(indices)].tolist(), strict=True) if flag]

    def active_rows(self, table: Tensor) -> Tensor:
        """Return the rows of a table whose matrix is active."""
        return table if self.mask is None else table[self.mask[table[:, COLUMNS - 1]]]


def pack(table: ChunkTable, step: Step, directions: Tensor, send: Tensor) -> None:
    """Update the momentum of a chunk's active fragments; write their directions.

    Args:
        table: Of the chunk.
        step: The momentum is mutated.
        directions: Receives those that do not travel, :attr:`ChunkTable.room` elements in the communication dtype.
        send: Receives those that travel. Both lie on the device of the momentum.
    """
    rows, outs, rates = step.active_rows(table.packed), [directions, send], step.rates.momentum
    if step.quantized is None:
        step.passes.momentum_pack(step.momentum, step.grads, outs, rows, rates)
        return
    scales, cut = step.quantized
    blocks = table.blocks if step.mask is None else table.blocks[step.mask[table.packed[:, COLUMNS - 1]]]
    step.passes.momentum_pack_int8(step.momentum, scales, step.grads, outs, rows, rates, blocks, cut)


def apply(table: Tensor, step: Step, updates: Sequence[Tensor]) -> None:
    """Decay and update the fragments of the weights in a table.

    Args:
        table: Of active fragments.
        step: The weights are mutated.
        updates: The table's other tensors: flat, in the communication dtype, on any device.
    """
    if not len(table):
        return
    device = step.flat[0].device
    if any(each.device != device for each in updates):
        table, updates = _moved(table, updates, device)
    cautious = None if step.rates.cautious is None else step.rates.cautious[table[:, 0]]
    if cautious is not None:
        cautious_apply_(step.flat, updates, table[cautious], step.rates.apply)
        table = table[~cautious]
    step.passes.unpack_apply(step.flat, updates, table, step.rates.apply)


def _moved(table: Tensor, updates: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the update of each fragment on the device of the weights, and their table."""
    parts = [updates[other].narrow(0, at, numel) for _, _, other, at, numel, _ in table.tolist()]
    moved = torch.cat(parts).to(device).split(table[:, 4].tolist())
    table = table.clone()
    table[:, 2], table[:, 3] = torch.arange(len(table)), 0
    return table, moved
