"""Cuts stacks of equal blocks into runs of blocks, each with its own owner.

A stack of experts, or a projection cut into heads, is one parameter with many blocks. A single owner would receive all
of it and keep the other ranks waiting. So blocks that lie whole on one rank stay there, and only a few of the others
travel together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

from deepspeed_muon.plan.layout import MatrixLayout, TensorShards
from deepspeed_muon.plan.placement import Placement

# A run of several blocks that travels costs at most this part of a rank's average work.
_TRAVELLING_SHARE = 0.25

# First block, blocks.
BlockRun = tuple[int, int]


def travelling_cost(costs: Sequence[float], load: Sequence[float]) -> float:
    """Return the ``limit`` of :func:`block_runs`: what a travelling run of blocks may cost.

    Args:
        costs: Operations of every matrix of the step set.
        load: Operations that each rank already has from other step sets.
    """
    return _TRAVELLING_SHARE * (math.fsum(costs) + math.fsum(load)) / len(load)


def block_runs(
    blocks: int, numel: int, rank_at: Callable[[int], int] | None, *, cost: float, limit: float
) -> list[BlockRun]:
    """Divide a stack of equal blocks into runs that get one owner each: first block and number of blocks.

    Args:
        blocks: Blocks in the stack.
        numel: Elements of a block.
        rank_at: Returns the rank that holds an element; ``None`` if every rank holds the stack.
        cost: Operations of orthogonalising a block.
        limit: Operations of a run of several blocks that do not lie whole on one rank.
    """
    most = max(1, int(limit // cost)) if cost else blocks
    runs: list[BlockRun] = []
    before: int | None = None
    for block in range(blocks):
        holder = None
        if rank_at is not None:
            first = rank_at(block * numel)
            holder = first if first == rank_at((block + 1) * numel - 1) else None
        if runs and holder == before and (holder is not None or runs[-1][1] < most):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
        before = holder
    return runs


def cut_stack(matrix: MatrixLayout, *, cost: float, limit: float) -> list[MatrixLayout]:
    """Return the layouts of a stack's runs of blocks; the matrix itself if it is no stack or lies whole on a rank.

    Args:
        matrix: Any matrix; only stacks of equal blocks are cut.
        cost: Operations of orthogonalising all of it.
        limit: As for :func:`block_runs`.
    """
    count = matrix.equal_blocks or 1
    if count == 1 or matrix.shards is not None or matrix.placement.whole_on is not None:
        return [matrix]
    rows, cols = matrix.block_shape
    rank_at = None if matrix.replicated else matrix.placement.rank_at
    runs = block_runs(count, rows * cols, rank_at, cost=cost / count, limit=limit)
    if len(runs) == 1:
        return [matrix]
    placements = cut_rows(matrix, [number * rows for _, number in runs])
    return [
        replace(
            matrix,
            rows=number * rows,
            placement=placement,
            row_blocks=(rows,) * number if number > 1 else (),
            first_row=matrix.first_row + first * rows,
        )
        for (first, number), placement in zip(runs, placements, strict=True)
    ]


def shares_of_blocks(matrix: MatrixLayout) -> list[MatrixLayout]:
    """Divide the shard of a matrix in blocks: whole blocks need no other rank, and each share of a block is one matrix.

    Args:
        matrix: Any matrix; only one whose :attr:`TensorShards.whole` tells of blocks is divided.
    """
    shards = matrix.shards
    if shards is None or not shards.whole:
        return [matrix]
    if all(shards.whole):
        return [replace(matrix, shards=None)]
    blocks = matrix.grid[0]
    # Whole blocks that follow each other stay together; a share is alone.
    runs = [
        tuple(number for number, _ in run)
        for _, run in groupby(enumerate(shards.whole), lambda each: -1 if each[1] else each[0])
    ]
    sizes = [tuple(blocks[number] for number in run) for run in runs]
    placements = cut_rows(matrix, [sum(each) for each in sizes])
    first_rows = accumulate(map(sum, sizes), initial=0)
    return [
        replace(
            matrix,
            rows=sum(own),
            placement=placement,
            row_blocks=own if len(own) > 1 else (),
            first_row=first,
            shards=None if shards.whole[run[0]] else _shards_of_block(shards, own[0]),
        )
        for run, own, placement, first in zip(runs, sizes, placements, first_rows, strict=False)
    ]


def _shards_of_block(shards: TensorShards, rows: int) -> TensorShards:
    """Return how a block of a cut matrix is cut, of which this rank has ``rows`` rows."""
    return TensorShards(shards.dim, (rows,) * len(shards.sizes) if shards.dim == 0 else shards.sizes)


def cut_rows(matrix: MatrixLayout, sizes: Sequence[int]) -> list[Placement]:
    """Cut a matrix into ``sizes`` rows each; return where each part lies."""
    ends = list(accumulate(rows * matrix.cols for rows in sizes))
    return [matrix.placement.part(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True)]
