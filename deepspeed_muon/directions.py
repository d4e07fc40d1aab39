"""Momentum and directions, made for the matrices of one chunk at a time, so that no copy of a partition is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_muon.plan.layout import Fragment, MatrixLayout

__all__ = ["Directions", "MomentumSource"]


@dataclass(frozen=True, slots=True)
class MomentumSource:
    """What the directions of one partition are made from.

    Attributes:
        momentum_buffer: The partition's momentum, flat.
        grad: Its gradient, flat; ``None`` counts as zero.
        momentum: Decay of the moving average.
        nesterov: Whether the gradient is blended in once more.
        pack: ``(buf, grad, out, momentum, nesterov)``: updates ``buf`` and writes the direction.
    """

    momentum_buffer: Tensor
    grad: Tensor | None
    momentum: float
    nesterov: bool
    pack: Callable[[Tensor, Tensor, Tensor, float, bool], None]


class Directions:
    """The directions of the chunks that are under way in one step."""

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        sources: Mapping[int, MomentumSource],
        *,
        rank: int,
        wire_dtype: torch.dtype,
    ) -> None:
        """Keep the sources; nothing is computed.

        Args:
            matrices: All matrices of the step set.
            sources: Partition index to what its directions are made from.
            rank: This rank inside the group.
            wire_dtype: Dtype of the directions.
        """
        self._matrices = matrices
        self._sources = sources
        self._rank = rank
        self._wire_dtype = wire_dtype
        self._made: dict[int, dict[int, Tensor]] = {}

    def prepare(self, indices: Sequence[int]) -> None:
        """Update the momentum of these matrices' local fragments and make their directions.

        Args:
            indices: Matrices, each once in a step.
        """
        for index in indices:
            matrix = self._matrices[index]
            source = self._sources[matrix.partition]
            buf = source.momentum_buffer
            made = self._made[index] = {}
            for fragment in matrix.fragments:
                if fragment.rank != self._rank:
                    continue
                run = (0, fragment.partition_offset, fragment.numel)
                out = torch.empty(fragment.numel, dtype=self._wire_dtype, device=buf.device)
                local = buf.narrow(*run)
                grad = torch.zeros_like(local) if source.grad is None else source.grad.narrow(*run)
                source.pack(local, grad, out, source.momentum, source.nesterov)
                made[fragment.matrix_offset] = out

    def get(self, index: int, fragment: Fragment) -> Tensor:
        """Return the direction of a local fragment of a prepared matrix, one-dimensional, on the partition's device."""
        return self._made[index][fragment.matrix_offset]

    def release(self, indices: Sequence[int]) -> None:
        """Forget the directions of these matrices."""
        for index in indices:
            del self._made[index]
