"""The units over which a variant sums, rows or whole blocks, and the rectangles of a fragment that lie in them.

With rows there is a unit for each output of each block, numbered as in :mod:`deepspeed_muon.plan.rows`; otherwise one
for each block, and one for a matrix that is cut over a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import Ints
from deepspeed_muon.plan.rows import row_count


class Piece(NamedTuple):
    """A rectangle of a fragment: all of it lies in one unit, or every row or every column lies in its own.

    Attributes:
        unit: The unit of its first element.
        steps: From the unit of a row to that of the next one, and of a column; 0 where they are the same.
        start: Its first element, counted from that of the fragment.
        rows: Its rows.
        cols: Its columns.
        stride: Elements from one row to the next.
    """

    unit: int
    steps: tuple[int, int]
    start: int
    rows: int
    cols: int
    stride: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.cols

    @property
    def units(self) -> Ints:
        """The unit of each row, or of each column, or of all of it."""
        down, along = self.steps
        count = self.rows if down else self.cols if along else 1
        return self.unit + np.arange(count) * (down or along)


def unit_count(matrix: MatrixLayout, *, rows: bool) -> int:
    """Return how many units a matrix has."""
    return row_count(matrix) if rows else 1 if matrix.is_cut else len(matrix.block_shapes)


def pieces_of(matrix: MatrixLayout, start: int, stop: int, *, rows: bool = False) -> Iterator[Piece]:
    """Yield the rectangles that elements ``[start, stop)`` of a stored matrix consist of.

    Args:
        matrix: The matrix.
        start: First element.
        stop: The one after the last.
        rows: Whether the units are rows.
    """
    row_blocks, col_blocks = ((matrix.rows,), (matrix.cols,)) if matrix.is_cut else matrix.grid
    width, steps = matrix.cols, (0, 0)
    if rows and matrix.transposed:
        col_blocks, steps = (width,), (0, 1)
    elif rows:
        row_blocks, steps = (matrix.rows,), (len(col_blocks), 0)
    for stripe, (top, bottom) in enumerate(pairwise(accumulate(row_blocks, initial=0))):
        low, high = max(start, top * width), min(stop, bottom * width)
        if low >= high:
            continue
        if len(col_blocks) == 1 and not rows:
            yield Piece(stripe, steps, low - start, 1, high - low, high - low)
            continue
        for row, count, begin, end in _whole_rows(low, high, width):
            for number, (left, right) in enumerate(pairwise(accumulate(col_blocks, initial=0))):
                left, right = max(left, begin), min(right, end)
                if left >= right:
                    continue
                unit = stripe * len(col_blocks) + number
                if rows:
                    unit = stripe * width + left if matrix.transposed else row * len(col_blocks) + number
                yield Piece(unit, steps, row * width + left - start, count, right - left, width)


def _whole_rows(low: int, high: int, width: int) -> list[tuple[int, int, int, int]]:
    """Return the end of a row, whole rows, and the beginning of a row, as far as they are there.

    Each is its first row, the number of rows, and its first column and the one after the last.
    """
    first, last = -(-low // width), high // width
    if first > last:
        return [(last, 1, low % width, high % width)]
    found = [(low // width, 1, low % width, width)] if low < first * width else []
    if last > first:
        found.append((first, last - first, 0, width))
    return [*found, (last, 1, 0, high % width)] if high > last * width else found


def units_on(matrix: MatrixLayout, rank: int, *, rows: bool) -> Ints:
    """Return the units of which a rank holds elements, ascending."""
    fragment = matrix.placement.on(rank)
    if fragment is None:
        return np.empty(0, dtype=np.int64)
    ends = fragment.matrix_offset, fragment.matrix_offset + fragment.numel
    return np.unique(np.concatenate([piece.units for piece in pieces_of(matrix, *ends, rows=rows)]))


def first_elements(matrix: MatrixLayout, units: Ints) -> Ints:
    """Return where some units begin that are rows."""
    row_blocks, col_blocks = matrix.grid
    if matrix.transposed:
        first: Ints = np.cumsum([0, *row_blocks[:-1]])[units // matrix.cols] * matrix.cols
        return first + units % matrix.cols
    row, number = np.divmod(units, len(col_blocks))
    place: Ints = row * matrix.cols + np.array(matrix.first_cols)[number]
    return place


def blocks_of_rows(matrix: MatrixLayout, rows: Tensor) -> Tensor:
    """Return the unit of each row of a matrix where the units are blocks."""
    if matrix.is_cut:
        return torch.zeros_like(rows)
    row_blocks, col_blocks = matrix.grid
    if matrix.transposed:
        of_col = torch.arange(len(col_blocks)).repeat_interleave(torch.tensor(col_blocks))
        return rows // matrix.cols * len(col_blocks) + of_col[rows % matrix.cols]
    of_row = torch.arange(len(row_blocks)).repeat_interleave(torch.tensor(row_blocks))
    return of_row[rows // len(col_blocks)] * len(col_blocks) + rows % len(col_blocks)
