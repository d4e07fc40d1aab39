"""What one step of one step set reads and writes: the rates of its matrices, and flat tensors of its partitions."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_muon.config.values import MomentumWarmupConfig, StatePolicy
from deepspeed_muon.math.updates import (
    AdjustLrName,
    WeightDecayMode,
    decay_factor,
    momentum_in_warmup,
    shape_scale,
)
from deepspeed_muon.ops.dispatch import FlatPasses
from deepspeed_muon.ops.torch_operators import Column
from deepspeed_muon.plan.layout import MatrixLayout, PartitionIndex, PlanIndex
from deepspeed_muon.step.row_state import OwnedRows
from deepspeed_muon.step.step_set import Partition, State
from deepspeed_muon.variants.variant import Variant


def state_of(partition: Partition, state: State, policy: StatePolicy) -> dict[str, Any]:
    """Return the state of a partition for the next step: create missing tensors, and increment ``step``."""
    entry = state[partition.tensor]
    for key in ("momentum_buffer",) if partition.muon else ("exp_avg", "exp_avg_sq"):
        if key not in entry:
            entry[key] = policy.make(key, partition.tensor)
            entry.setdefault("step", 0)
        elif not entry[key].is_contiguous():  # loaded state may have the strides of a parameter
            entry[key] = entry[key].contiguous()
    entry["step"] += 1
    return entry


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rate, decay and momentum of each matrix of a plan in this step.

    A weight is updated fragment by fragment, whatever blocks it has, so a matrix has one rate: with the scale of its
    first block. Blocks of another shape are multiplied by the ratio of their scale to it when they are orthogonalised
    (``_grids`` in step/orthogonalize.py). Example: blocks of 8 x 4 and 2 x 4 have the scales 1.4 and 1 under
    ``original``: the rate is 1.4 ``lr``, and updates of the second block are multiplied by 1 / 1.4.

    Attributes:
        momentum: ``(matrices, 2)`` float64: ``momentum``, and 1 for Nesterov momentum, else 0.
        lr_and_decay: ``(matrices, 2)`` float64. Column 0 is the learning rate times the scale of the first block,
            column 1 the factor that decays the weights; with cautious decay it is the fraction that the decayed weights
            lose.
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
    """Computes the :class:`Rates` of a plan from the param groups."""

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        variant: Variant,
        list_position: Mapping[PartitionIndex, int],
        warmup: MomentumWarmupConfig | None,
    ) -> None:
        """``list_position`` is that of :class:`.ChunkTable`."""
        self._matrices = matrices
        self._warmup = warmup
        self._keys = [setting.name for setting in variant.settings]
        self._positions = torch.tensor(
            [list_position[matrix.partition] for matrix in matrices], dtype=torch.int64, device="cpu"
        )  # (matrices,)
        # Rates change with a param group or in a warm-up; a schedule changes them in every step, but not block scales.
        self._block_scales = functools.lru_cache(maxsize=4)(self._make_block_scales)
        self._rates_of = functools.lru_cache(maxsize=1)(self._make_rates)

    def of(self, groups: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> Rates:
        """Return the rates of a step, given the param group of each partition, and the step's number there, from 1."""
        # A group may have many partitions (sub-groups): it is read once for each step number among them.
        warmup_steps = 0 if self._warmup is None else self._warmup.steps
        read: dict[tuple[int, int], GroupRates] = {}
        of_partitions = []
        for group, step in zip(groups, steps, strict=True):
            # After the warm-up momentum does not depend on the step, so that rates are not computed again.
            key = id(group), min(step, warmup_steps + 1)
            if key not in read:
                read[key] = self._read(group, key[1])
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

    The lists have one flat tensor of this rank for each of Muon's partitions, at the positions in ``Column.PARTITION``.

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
        return table if self.mask is None else table[self.mask[table[:, Column.MATRIX]]]
