"""The rectangles of blocks that a range of a stored matrix consists of, for sums over blocks that a partition cuts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

from deepspeed_muon.plan.layout import MatrixLayout


class Rectangle(NamedTuple):
    """Elements of one block that are a rectangle of the stored matrix.

    Attributes:
        block: Number of the block, row by row of the grid. A matrix that is cut over a group is one block.
        start: The first element, counted from that of the range.
        rows: Its rows.
        cols: Its columns.
        stride: Elements from one row to the next.
    """

    block: int
    start: int
    rows: int
    cols: int
    stride: int


def rectangles_of(matrix: MatrixLayout, start: int, stop: int) -> Iterator[Rectangle]:
    """Yield the rectangles that elements ``[start, stop)`` of a stored matrix consist of."""
    row_blocks, col_blocks = ((matrix.rows,), (matrix.cols,)) if matrix.is_cut else matrix.grid
    width = matrix.cols
    for stripe, (top, bottom) in enumerate(pairwise(accumulate(row_blocks, initial=0))):
        low, high = max(start, top * width), min(stop, bottom * width)
        if low >= high:
            continue
        if len(col_blocks) == 1:  # all rows of the matrix: one piece of memory
            yield Rectangle(stripe, low - start, 1, high - low, high - low)
            continue
        for row, count, begin, end in _row_ranges(low, high, width):
            for number, (left, right) in enumerate(pairwise(accumulate(col_blocks, initial=0))):
                left, right = max(left, begin), min(right, end)
                if left < right:
                    block = stripe * len(col_blocks) + number
                    yield Rectangle(block, row * width + left - start, count, right - left, width)


def _row_ranges(low: int, high: int, width: int) -> list[tuple[int, int, int, int]]:
    """Return the end of a row, complete rows, and the beginning of a row, as far as ``[low, high)`` has them.

    Each is its first row, the number of rows, and its first column and the one after the last.
    """
    first, last = -(-low // width), high // width
    if first > last:
        return [(last, 1, low % width, high % width)]
    ranges = [(low // width, 1, low % width, width)] if low < first * width else []
    if last > first:
        ranges.append((first, last - first, 0, width))
    return [*ranges, (last, 1, 0, high % width)] if high > last * width else ranges
