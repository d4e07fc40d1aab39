"""How matrices become updates: in batches, each matrix whole on this rank. All results are checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_muon.monitoring.check import Member, Result, ResultCheck
from deepspeed_muon.ops.candidates import BATCH_NUMEL
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.step.passes import Step
from deepspeed_muon.transport.all_to_all import StepContext
from deepspeed_muon.transport.row_state import before_iteration

Orthogonalize = Callable[..., Tensor]
"""``(batch, rows, cols)`` to the same in the settings' dtype; called as ``orthogonalize(x, settings=...)``."""

Directions = Callable[[Sequence[int]], Tensor]
"""Indices of matrices of one shape to their directions, or to those of this rank's parts of them: ``(matrices, rows,
cols)`` in the communication dtype."""

Updates = Iterator[tuple[Sequence[int], Tensor]]
"""Indices of matrices of one shape, and their checked updates or those of this rank's parts: ``(matrices, elements)``
in the communication dtype."""


def batches(
    matrices: Sequence[MatrixLayout], context: StepContext, indices: Sequence[int], *, by_shards: bool = False
) -> list[list[int]]:
    """Group small matrices of equal blocks, with ``by_shards`` only those that are cut alike; large ones stay alone."""
    alike: dict[object, list[int]] = {}
    for index in indices:
        matrix = matrices[index]
        cut = matrix.shards if by_shards else matrix.is_sharded
        alike.setdefault((matrix.logical_shape, matrix.block_shapes, matrix.transposed, cut), []).append(
            index
        )
    found: list[list[int]] = []
    for members in alike.values():
        first = matrices[members[0]]
        rows, cols = first.logical_shape
        size = _batch_size(context, *first.block_shapes[0], numel=rows * cols)
        found.extend(members[start : start + size] for start in range(0, len(members), size))
    return found


def _batch_size(context: StepContext, rows: int, cols: int, *, numel: int = 0) -> int:
    """Return how many blocks of this shape run together, or how many matrices of ``numel`` elements made of them."""
    return max(1, BATCH_NUMEL // (numel or rows * cols)) if min(rows, cols) < context.batch_below else 1


@dataclass(frozen=True, slots=True)
class _Batch:
    """Matrices of equal blocks, and how they run.

    Attributes:
        indices: The matrices.
        shapes: Rows and columns of the blocks of each of them.
        equal: Whether those are equal and follow each other in the memory of the matrix.
        calls: The blocks of each call of the iteration: matrix by matrix if they are equal, else by shape and number.
        counted: How many of the matrices this rank counts: a stack with several owners counts once, at the first.
    """

    indices: list[int]
    shapes: tuple[tuple[int, int], ...]
    equal: bool
    calls: list[list[Member]]
    counted: int


class WholeAtOwner:
    """Orthogonalises matrices that are whole on this rank; small blocks of one shape run in one batch.

    Attributes:
        matrices: All matrices of the exchange plan.
        context: Of the step set.
        check: Of the results.
    """

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        context: StepContext,
        orthogonalize: Orthogonalize,
        check: ResultCheck,
    ) -> None:
        self.matrices = matrices
        self.context = context
        self._orthogonalize = orthogonalize
        self.check = check
        # Almost always a chunk has the same active matrices in every step.
        self._batches = functools.lru_cache(maxsize=64)(self._planned)

    def updates(self, owned: Sequence[int], directions: Directions, step: Step) -> Updates:
        """Yield indices and updates of matrices, each once; the iterator must be exhausted.

        Args:
            owned: Active matrices that this rank owns.
            directions: Their directions.
            step: The step.
        """
        for batch in self._batches(tuple(owned)):
            self.context.stats.matrices_orthogonalized += batch.counted
            matrices = directions(batch.indices)
            run = self._of_stack if batch.equal else self._of_blocks
            yield batch.indices, run(batch, matrices, step).view(len(batch.indices), -1)

    def inputs(self, owned: Sequence[int]) -> Iterator[Tensor]:
        """Yield empty tensors, on the meta device, like those that :meth:`updates` orthogonalises."""
        for batch in self._batches(tuple(owned)):
            for members in batch.calls:
                shape = (len(members), *batch.shapes[members[0][1]])
                yield torch.empty(shape, dtype=self.context.comm_dtype, device="meta")

    def _planned(self, owned: Sequence[int]) -> list[_Batch]:
        found = []
        for indices in batches(self.matrices, self.context, owned):
            first = self.matrices[indices[0]]
            shapes, equal = first.block_shapes, first.is_sharded or first.equal_blocks is not None
            alike: dict[tuple[int, int], list[Member]] = {}
            if equal:
                alike[shapes[0]] = [(index, number) for index in indices for number in range(len(shapes))]
            for number, shape in enumerate(() if equal else shapes):
                alike.setdefault(shape, []).extend((index, number) for index in indices)
            calls = []
            for shape, members in alike.items():
                size = _batch_size(self.context, *shape)
                calls += [members[start : start + size] for start in range(0, len(members), size)]
            counted = sum(self.matrices[index].first_row == 0 for index in indices)
            found.append(_Batch(indices, shapes, equal, calls, counted))
        return found

    def _of_stack(self, batch: _Batch, directions: Tensor, step: Step) -> Tensor:
        """Return the updates of ``(matrices, rows, cols)``, whose blocks follow each other in memory."""
        stack = directions.view(-1, *batch.shapes[0])
        if len(batch.calls) == 1:
            return self._checked(batch.calls[0], stack, step).to(directions.dtype).contiguous()
        update = torch.empty_like(stack)
        lengths = [len(members) for members in batch.calls]
        parts = zip(batch.calls, stack.split(lengths), update.split(lengths), strict=True)
        for members, inputs, target in parts:
            target.copy_(self._checked(members, inputs, step))
        return update

    def _of_blocks(self, batch: _Batch, directions: Tensor, step: Step) -> Tensor:
        """Return the updates of ``(matrices, rows, cols)``: the blocks are taken out of them, and put back together."""
        update, scales = torch.empty_like(directions), step.rates.scales
        grid = self.matrices[batch.indices[0]].grid
        position = {index: number for number, index in enumerate(batch.indices)}
        sources, targets = _views(directions, *grid), _views(update, *grid)
        for members in batch.calls:
            places = [(number, position[index]) for index, number in members]
            views = [sources[number][place] for number, place in places]
            inputs = views[0].unsqueeze(0) if len(views) == 1 else torch.stack(views)
            done = self._checked(members, inputs, step)
            for (index, number), (_, place), block in zip(members, places, done, strict=True):
                relative = scales[index][number] / scales[index][0]
                targets[number][place].copy_(block if relative == 1.0 else block.mul_(relative))
        return update

    def _checked(self, members: list[Member], inputs: Tensor, step: Step) -> Tensor:
        """Return the checked updates of blocks that run together, ``(blocks, rows, cols)``."""
        inputs = before_iteration(self.context.variant, inputs, self.matrices[members[0][0]])
        with self.check.recorder.span("newton_schulz"):
            blocks = self._orthogonalize(inputs, settings=self.context.ns_settings)
        result = Result(members, inputs, blocks, step.rates.scales, step.finish)
        self.check.settle(result)
        return result.updates


def _views(x: Tensor, row_blocks: tuple[int, ...], col_blocks: tuple[int, ...]) -> list[Tensor]:
    """Return views ``(..., rows, cols)`` of all blocks of a tensor of matrices, row by row of their grid."""
    return [view for rows in x.split(row_blocks, dim=-2) for view in rows.split(col_blocks, dim=-1)]
