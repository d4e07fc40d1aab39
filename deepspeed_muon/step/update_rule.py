"""How updates reach the weights: a table of rates, scales and decay with one row for each matrix, made once a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from deepspeed_muon.plan.spread import Fragment


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """How the update of one matrix is applied in this step.

    Attributes:
        lr: The rate.
        weight_decay: The decay.
        decay_mode: The kind of decay.
        block_scales: Factor of the scale rule for each block of the matrix. An update arrives scaled relative to its
            first block.
        unpack_apply: The native or torch pass, ``(weights, update, step size, decay factor)``.
    """

    lr: float
    weight_decay: float
    decay_mode: WeightDecayMode
    block_scales: tuple[float, ...]
    unpack_apply: Callable[[Tensor, Tensor, float, float], None]

    def relative_scale(self, block: int) -> float:
        """Return the scale of a block in units of the first block's."""
        return self.block_scales[block] / self.block_scales[0]

    def apply(self, target: Tensor, update: Tensor) -> None:
        """Decay and update a fragment of the master weights.

        Args:
            target: The fragment, flat. Mutated.
            update: Of the same length and device, in the wire dtype.
        """
        step = self.lr * self.block_scales[0]
        if self.decay_mode != "cautious":
            factor = decay_factor(self.decay_mode, lr=self.lr, weight_decay=self.weight_decay)
            self.unpack_apply(target, update, step, factor)
        elif target.dtype.itemsize < 4:
            in_fp32(self._apply_cautiously, [target], [update])
        else:
            self._apply_cautiously(target, update)

    def _apply_cautiously(self, target: Tensor, update: Tensor) -> None:
        cautious_apply_(
            target, update, lr_scale=self.lr * self.block_scales[0], decay=self.lr * self.weight_decay
        )


class BlockScales:
    """The factors of the scale rule for the blocks of each matrix, kept from step to step."""

    def __init__(self, matrices: Sequence[MatrixLayout]) -> None:
        self._matrices = matrices
        self._found: dict[tuple[int, AdjustLrName], tuple[float, ...]] = {}

    def of(self, index: int, rule: AdjustLrName) -> tuple[float, ...]:
        """Return the factor for each block of a matrix of the plan."""
        scales = self._found.get((index, rule))
        if scales is None:
            matrix = self._matrices[index]
            shapes = [matrix.scale_shape]
            if not matrix.is_cut:
                shapes = [matrix.layer_shape(block.rows, block.cols) for block in matrix.blocks()]
            scales = self._found[index, rule] = tuple(update_scale(rule, *shape) for shape in shapes)
        return scales


class UpdateTable:
    """The rules of one step, and the partitions that the updates are for."""

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        scales: BlockScales,
        groups: Mapping[int, Mapping[str, Any]],
        passes: Mapping[int, FlatPasses],
        flat: Mapping[int, Tensor],
    ) -> None:
        """Read the rates of this step.

        Args:
            matrices: The matrices of the exchange plan.
            scales: Their factors.
            groups: Partition index to the param group with its rates.
            passes: Partition index to its elementwise passes.
            flat: Partition index to this rank's flat weights; mutated by :meth:`apply`.
        """
        self._matrices = matrices
        self._flat = flat
        self.rules: list[UpdateRule] = []
        for index, matrix in enumerate(matrices):
            group = groups[matrix.partition]
            self.rules.append(
                UpdateRule(
                    float(group["lr"]),
                    float(group["weight_decay"]),
                    group["weight_decay_mode"],
                    scales.of(index, group["adjust_lr_fn"]),
                    passes[matrix.partition].unpack_apply,
                )
            )

    def apply(self, index: int, fragment: Fragment, update: Tensor) -> None:
        """Apply the update of a local fragment, one-dimensional and in the wire dtype, on any device."""
        partition = self._flat[self._matrices[index].partition]
        target = partition.narrow(0, fragment.partition_offset, fragment.numel)
        self.rules[index].apply(target, update.to(target.device))
