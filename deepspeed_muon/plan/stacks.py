"""Cuts stacks of equal blocks into runs of blocks, each with its own owner.

A stack of experts, or a projection cut into heads, is one parameter with many blocks. A single owner would receive all
of it and keep the other ranks waiting. So blocks that lie whole on one rank stay there, and only a few of the others
travel together.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, groupby

import numpy as np

from deepspeed_muon.plan.layout import MatrixLayout, TensorShards
from deepspeed_muon.plan.placement import Placement


def block_runs(
    blocks: int, numel: int, placement: Placement, *, cost: float, limit: float
) -> list[tuple[int, int]]:
    """Divide a stack of equal blocks into runs that get one owner each: first block and number of blocks.

    Args:
        blocks: Blocks in the stack.
        numel: Elements of a block.
        placement: Where the stack lies.
        cost: Operations of orthogonalising a block.
        limit: Operations of a run of several blocks that do not lie whole on one rank.
    """
    most = max(1, int(limit // cost)) if cost else blocks
    holders = [-1] * blocks
    if not placement.replicated:
        starts = np.arange(blocks) * numel
        first, last = placement.ranks_at(starts), placement.ranks_at(starts + numel - 1)
        holders = np.where(first == last, first, -1).tolist()
    runs: list[tuple[int, int]] = []
    for block, holder in enumerate(holders):
        if runs and holder == holders[block - 1] and (holder >= 0 or runs[-1][1] < most):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
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
    runs = block_runs(count, rows * cols, matrix.placement, cost=cost / count, limit=limit)
    if len(runs) == 1:
        return [matrix]
    return [matrix.run(first * rows, (rows,) * number) for first, number in runs]


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
    first_rows = list(accumulate(blocks, initial=0))
    return [
        replace(
            matrix.run(first_rows[run[0]], blocks[run[0] : run[-1] + 1]),
            shards=None if shards.whole[run[0]] else _shards_of_block(shards, blocks[run[0]]),
        )
        for run in runs
    ]


def _shards_of_block(shards: TensorShards, rows: int) -> TensorShards:
    """Return how a block of a cut matrix is cut, of which this rank has ``rows`` rows."""
    return TensorShards(shards.dim, (rows,) * len(shards.sizes) if shards.dim == 0 else shards.sizes)
