"""Turns directions into updates, for matrices complete on this rank: Newton-Schulz in batches, then the check."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

import torch
from torch import Tensor

from deepspeed_muon.ops.dispatch import BATCH_NUMEL
from deepspeed_muon.plan.layout import MatrixLayout, PlanIndex
from deepspeed_muon.step.check import Member, Result, ResultCheck
from deepspeed_muon.step.step_set import StepContext
from deepspeed_muon.step.tensors import StepTensors
from deepspeed_muon.variants.variant import Variant

BatchIndex = NewType("BatchIndex", int)
"""Of a matrix among those that are orthogonalised together."""

DirectionsOf = Callable[[tuple[PlanIndex, ...]], Tensor]
"""Matrices of one shape to their directions (of this rank's shards), ``(matrices, rows, cols)`` in the wire dtype."""

Updates = Iterator[tuple[tuple[PlanIndex, ...], Tensor]]
"""Matrices of one shape, and their checked updates (of this rank's shards), ``(matrices, elements)``.
Whoever stores or sends them rounds them to the wire dtype."""


def batches(
    matrices: Sequence[MatrixLayout], context: StepContext, indices: Sequence[PlanIndex]
) -> list[list[PlanIndex]]:
    """Group matrices of equal blocks into batches of bounded size; those stored alike follow each other.

    Blocks that do not run in batches (:attr:`.StepContext.batch_below`) make their matrix a batch of its own.
    """
    # 1. which may run together: the polar factor of a transpose is the transpose, unless a variant looks at the rows
    members_of: dict[object, list[PlanIndex]] = {}
    for index in indices:
        matrix = matrices[index]
        joins = not context.variant.transpose_changes_update and len(matrix.block_shapes) == 1
        key = tuple(sorted(matrix.logical_shape)) if joins else matrix.batch_key
        members_of.setdefault(key, []).append(index)
    # 2. as many as a batch may have
    grouped: list[list[PlanIndex]] = []
    for members in members_of.values():
        members.sort(key=lambda index: matrices[index].logical_shape)  # wide matrices before their transposes
        first = matrices[members[0]]
        rows, cols = first.logical_shape
        size = _batch_size(context, *first.block_shapes[0], numel=rows * cols)
        grouped.extend(members[start : start + size] for start in range(0, len(members), size))
    return grouped


def _batch_size(context: StepContext, rows: int, cols: int, *, numel: int = 0) -> int:
    """Return how many blocks of this shape run together, or how many matrices of ``numel`` elements made of them."""
    return max(1, BATCH_NUMEL // (numel or rows * cols)) if min(rows, cols) < context.batch_below else 1


@dataclass(frozen=True, slots=True)
class _BatchPlan:
    """Matrices of equal blocks, and how they run.

    Attributes:
        orientations: The matrices; in a second tuple those that are stored as transposes of those in the first.
        shapes: Rows and columns of each block of a matrix.
        is_stack: Whether the blocks of a matrix are equal and follow each other in its memory.
        calls: The blocks of each call of the iteration: of a stack matrix by matrix, else by shape and number.
        counted: How many of the matrices this rank counts: a stack with several owners counts once, at the first.
    """

    orientations: list[tuple[PlanIndex, ...]]
    shapes: tuple[tuple[int, int], ...]
    is_stack: bool
    calls: list[list[Member]]
    counted: int


class LocalOrthogonalizer:
    """Orthogonalises matrices that are complete on this rank; small blocks of one shape run in one batch."""

    def __init__(self, matrices: Sequence[MatrixLayout], context: StepContext, check: ResultCheck) -> None:
        self.matrices = matrices
        self.context = context
        self.newton_schulz: Callable[..., Tensor] = context.orthogonalizer
        self.check = check
        # Almost always a chunk has the same active matrices in every step.
        self._batch_plans = functools.lru_cache(maxsize=1024)(self._make_batch_plans)

    def orthogonalized(
        self, owned: Sequence[PlanIndex], directions_of: DirectionsOf, step: StepTensors
    ) -> Updates:
        """Yield indices and updates of active owned matrices, each once; the iterator must be exhausted."""
        for batch in self._batch_plans(tuple(owned)):
            self.context.counts.matrices_orthogonalized += batch.counted
            stored = [directions_of(indices) for indices in batch.orientations]
            # (matrices, rows, cols) in the wire dtype; a view unless transposes are joined
            matrices = stored[0] if len(stored) == 1 else torch.cat((stored[0], stored[1].mT))
            run = self._stacks if batch.is_stack else self._grids
            updates = run(batch, matrices, step).view(matrices.shape).split([*map(len, stored)])
            for number, (indices, update) in enumerate(zip(batch.orientations, updates, strict=True)):
                # the second ones are stored as transposes
                yield indices, (update.mT if number else update).flatten(1)

    def inputs(self, owned: Sequence[PlanIndex]) -> Iterator[Tensor]:
        """Yield empty tensors, on the meta device, like the inputs of the iteration in :meth:`orthogonalized`."""
        for batch in self._batch_plans(tuple(owned)):
            for members in batch.calls:
                shape = (len(members), *batch.shapes[members[0][1]])
                directions = torch.empty(shape, dtype=self.context.wire_dtype, device="meta")
                yield _iteration_inputs(self.context.variant, directions, self.matrices[members[0][0]])

    def _make_batch_plans(self, owned: Sequence[PlanIndex]) -> list[_BatchPlan]:
        # 1. matrices of equal blocks, as many as run together
        planned = []
        for indices in batches(self.matrices, self.context, owned):
            first = self.matrices[indices[0]]
            shapes, is_stack = first.block_shapes, first.is_tp_shard or first.equal_blocks is not None
            # 2. their blocks by shape: of a stack in the order of its memory, so that a call reads a view of it, of a
            # grid the first block of each matrix, then the second one of each
            members_of: dict[tuple[int, int], list[Member]] = {}
            blocks = [(index, number) for index in indices for number in range(len(shapes))]
            for index, number in blocks if is_stack else sorted(blocks, key=lambda block: block[1]):
                members_of.setdefault(shapes[number], []).append((index, number))
            # 3. the calls of the iteration
            calls = []
            for shape, members in members_of.items():
                size = _batch_size(self.context, *shape)
                calls += [members[start : start + size] for start in range(0, len(members), size)]
            # A slice of a stack that starts further down belongs to a matrix that the owner of row 0 counts.
            counted = sum(self.matrices[index].first_row == 0 for index in indices)
            by_shape = itertools.groupby(indices, lambda index: self.matrices[index].logical_shape)
            planned.append(
                _BatchPlan([tuple(equal) for _, equal in by_shape], shapes, is_stack, calls, counted)
            )
        return planned

    def _stacks(self, batch: _BatchPlan, directions: Tensor, step: StepTensors) -> Tensor:
        """Return the updates of ``(matrices, rows, cols)`` whose blocks follow each other in memory."""
        stack = directions.view(-1, *batch.shapes[0])  # (blocks of all matrices, block rows, block cols)
        if len(batch.calls) == 1:  # the usual case needs no copy
            return self._checked(batch.calls[0], stack, step, directions.dtype).contiguous()
        update = torch.empty_like(stack)
        lengths = [len(members) for members in batch.calls]
        slices = zip(batch.calls, stack.split(lengths), update.split(lengths), strict=True)
        for members, inputs, target in slices:
            target.copy_(self._checked(members, inputs, step, target.dtype))
        return update

    def _grids(self, batch: _BatchPlan, directions: Tensor, step: StepTensors) -> Tensor:
        """Return the updates of ``(matrices, rows, cols)`` that are grids of blocks, which are copied out and back."""
        # Example: a fused 12 x 4 weight split into 8, 2 and 2 rows has three row blocks and one column block. The
        # blocks of 2 x 4 of all matrices run in one call, those of 8 x 4 in another one.
        update, block_scales = torch.empty_like(directions), step.rates.block_scales
        (indices,) = batch.orientations
        grid = self.matrices[indices[0]].grid
        in_batch = {index: BatchIndex(number) for number, index in enumerate(indices)}
        sources, targets = _block_views(directions, *grid), _block_views(update, *grid)
        for members in batch.calls:
            # Blocks that are side by side are strided views, and the iteration reads contiguous batches.
            views = [sources[number][in_batch[index]] for index, number in members]
            inputs = views[0].unsqueeze(0) if len(views) == 1 else torch.stack(views)
            blocks = self._checked(members, inputs, step, torch.float32)  # (blocks, block rows, block cols)
            for (index, number), block in zip(members, blocks, strict=True):
                # The rate that is applied has the scale of the first block already.
                relative = block_scales[index][number] / block_scales[index][0]
                target = targets[number][in_batch[index]]
                target.copy_(block if relative == 1.0 else block.mul_(relative))
        return update

    def _checked(
        self, members: list[Member], inputs: Tensor, step: StepTensors, dtype: torch.dtype
    ) -> Tensor:
        """Return the checked updates of blocks that run together, ``(blocks, rows, cols)``.

        They are in ``dtype`` if row state scales them, else in that of the iteration; in fp32 if one was redone. They
        are not scaled: the rate that :func:`.runner.apply` multiplies by has the scale.
        """
        inputs = _iteration_inputs(self.context.variant, inputs, self.matrices[members[0][0]])
        with self.check.recorder.span("newton_schulz"):
            blocks = self.newton_schulz(inputs, settings=self.context.ns_settings)
        result = Result(members, inputs, blocks, step.rates.block_scales, step.row_state, dtype)
        self.check.settle(result)
        return result.updates


def _iteration_inputs(variant: Variant, directions: Tensor, matrix: MatrixLayout) -> Tensor:
    """Return what is orthogonalised, ``(batch, rows, cols)``: the directions, or what the variant makes of them.

    All their matrices are stored as ``matrix`` is.
    """
    if variant.before_iteration is None:
        return directions
    oriented = directions.mT if matrix.transposed else directions  # a row for each output, as variants expect
    changed = variant.before_iteration(oriented)
    return changed.mT if matrix.transposed else changed


def _block_views(x: Tensor, row_blocks: tuple[int, ...], col_blocks: tuple[int, ...]) -> list[Tensor]:
    """Return a view ``(matrices, block rows, block cols)`` of each block of ``(matrices, rows, cols)``, row by row."""
    return [view for rows in x.split(row_blocks, dim=-2) for view in rows.split(col_blocks, dim=-1)]
