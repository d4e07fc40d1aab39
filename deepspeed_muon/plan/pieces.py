"""Cutting stacks of blocks into pieces with owners of their own.

A stack of experts, or a projection in heads, is one parameter and many matrices. With one owner it would travel whole,
and the owner of a stack of 384 experts would keep all ranks waiting. So blocks that lie whole on one rank stay there,
and of the others only a few go together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from deepspeed_muon.plan.layout import Fragment, MatrixLayout

__all__ = ["PIECE_SHARE", "block_runs", "cut_rows", "pieces"]

# A piece that has to travel costs at most this part of what a rank has to do on average, unless it is one block.
PIECE_SHARE = 0.25

# First block, blocks.
BlockRun = tuple[int, int]


def block_runs(
    blocks: int, numel: int, starts: Sequence[int] | None, *, cost: float, limit: float
) -> list[BlockRun]:
    """Divide equal blocks that follow each other into the runs that are exchanged together.

    Args:
        blocks: How many.
        numel: Elements of each.
        starts: Where the part of each holder begins, ascending from zero; ``None`` where every rank has all of it.
        cost: Operations of orthogonalising one.
        limit: Operations of a run that is not whole on one rank, unless it is one block.
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


def pieces(matrix: MatrixLayout, *, cost: float, limit: float) -> list[MatrixLayout]:
    """Return the layouts of a matrix's pieces, itself alone if it is not worth cutting.

    Args:
        matrix: Any matrix; only stacks of equal blocks are cut.
        cost: Operations of orthogonalising all of it.
        limit: As for :func:`block_runs`.
    """
    count = matrix.equal_blocks or 1
    if count == 1 or matrix.shards is not None or (matrix.whole_on() is not None and not matrix.replicated):
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
    """Return where consecutive parts of a matrix lie, each in terms of itself.

    Args:
        matrix: The matrix.
        sizes: Rows of each part.
    """
    parts: list[list[Fragment]] = [[] for _ in sizes]
    ends = []
    end = 0
    for rows in sizes:
        end += rows * matrix.cols
        ends.append(end)
    for fragment in matrix.fragments:
        begin, stop = fragment.matrix_offset, fragment.matrix_offset + fragment.numel
        number = bisect_right(ends, begin)
        while begin < stop:
            until = min(stop, ends[number])
            start = ends[number] - sizes[number] * matrix.cols
            inside = fragment.partition_offset + begin - fragment.matrix_offset
            parts[number].append(Fragment(fragment.rank, begin - start, inside, until - begin))
            begin = until
            number += 1
    return [tuple(part) for part in parts]
