"""Cuts stacks of equal blocks into runs of blocks, each with its own owner.

A stack of experts, or a projection cut into heads, is one parameter with many blocks. A single owner would receive all
of it and keep the other ranks waiting. So blocks that lie whole on one rank stay there, and only a few of the others
travel together.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from deepspeed_muon.plan.layout import Fragment, MatrixLayout

__all__ = ["block_runs", "cut_rows", "cut_stack", "travelling_cost"]

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
    blocks: int, numel: int, starts: Sequence[int] | None, *, cost: float, limit: float
) -> list[BlockRun]:
    """Divide a stack of equal blocks into runs that get one owner each: first block and number of blocks.

    Args:
        blocks: Blocks in the stack.
        numel: Elements of a block.
        starts: The first element of each holder, ascending from zero; ``None`` if every rank holds the stack.
        cost: Operations of orthogonalising a block.
        limit: Operations of a run of several blocks that do not lie whole on one rank.
    """
    most = max(1, int(limit // cost)) if cost else blocks
    runs: list[BlockRun] = []
    before: int | None = None
    for block in range(blocks):
        holder = None
        if starts is not None:
            first = bisect_right(starts, block * numel)
            holder = first if first == bisect_right(starts, (block + 1) * numel - 1) else None
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
    if count == 1 or matrix.shards is not None or matrix.whole_on() is not None:
        return [matrix]
    rows, cols = matrix.block_shape
    starts = None if matrix.replicated else sorted(fragment.matrix_offset for fragment in matrix.fragments)
    runs = block_runs(count, rows * cols, starts, cost=cost / count, limit=limit)
    if len(runs) == 1:
        return [matrix]
    fragments = cut_rows(matrix, [number * rows for _, number in runs])
    return [
        replace(
            matrix,
            rows=number * rows,
            fragments=held,
            row_blocks=(rows,) * number if number > 1 else (),
            first_row=first * rows,
        )
        for (first, number), held in zip(runs, fragments, strict=True)
    ]


def cut_rows(matrix: MatrixLayout, sizes: Sequence[int]) -> list[tuple[Fragment, ...]]:
    """Cut a matrix into ``sizes`` rows each and return the fragments of each part, with offsets inside the part."""
    found: list[list[Fragment]] = [[] for _ in sizes]
    ends = [rows * matrix.cols for rows in accumulate(sizes)]
    for fragment in matrix.fragments:
        begin, stop = fragment.matrix_offset, fragment.matrix_offset + fragment.numel
        number = bisect_right(ends, begin)
        while begin < stop:
            until = min(stop, ends[number])
            start = ends[number] - sizes[number] * matrix.cols
            inside = fragment.partition_offset + begin - fragment.matrix_offset
            found[number].append(Fragment(fragment.rank, begin - start, inside, until - begin))
            begin = until
            number += 1
    return [tuple(fragments) for fragments in found]
