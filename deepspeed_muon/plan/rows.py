"""Where the rows of a matrix lie, when ZeRO cuts it anywhere, for variants that keep a number for each of them.

A variant may keep one number for each output of a matrix: for each row of each block, or for each column of a block if
the matrix is stored transposed. The rank that holds the first element of that row (or column) keeps the number. It
keeps all numbers of one flat partition in a compact tensor, in the order of its fragments in the partition. So the
layouts alone say where a number is. Inside a matrix the numbers are ordered by those first elements.

Example: rank 0 holds elements 0 to 4 of a 4 x 3 matrix, rank 1 the rest. Rows 0 and 1 begin on rank 0, rows 2 and 3 on
rank 1: ``Fragment(0, 0, 0, 2)`` and ``Fragment(1, 2, 0, 2)``, counted in rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import Fragment, Ints, Placement


def row_count(matrix: MatrixLayout) -> int:
    """Return how many outputs all blocks of a matrix have together."""
    rows, cols = matrix.grid
    return matrix.cols * len(rows) if matrix.transposed else matrix.rows * len(cols)


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where the row state of one matrix lies, as in :class:`~deepspeed_muon.plan.placement.Placement`, counted in rows.

    Attributes:
        matrix: The matrix.
        number: Its number among the matrices of its partition.
        siblings: The matrices of its partition.
    """

    matrix: MatrixLayout
    number: int
    siblings: _PartitionMatrices

    @property
    def numel(self) -> int:
        """The number of rows."""
        return row_count(self.matrix)

    @property
    def replicated(self) -> bool:
        """Whether every rank keeps all of them."""
        return self.matrix.replicated

    @property
    def ranks(self) -> range:
        """The ranks from the one with the first row to the one with the last; not all of them need keep rows."""
        placement = self.matrix.placement
        return (
            placement.ranks
            if placement.replicated
            else range(placement.first, self.rank_at(self.numel - 1) + 1)
        )

    def rank_at(self, element: int) -> int:
        """Return the rank that keeps a row: the one that holds its first element. Not for replicated matrices."""
        return self.matrix.placement.rank_at(int(first_elements(self.matrix, np.array(element))))

    def starts(self, ranks: Ints) -> Ints:
        """Return the first row that each of ``ranks`` or a later one keeps; not for replicated matrices."""
        return _begin_before(self.matrix, self.matrix.placement.starts(ranks))

    def alone(self) -> RowPlaces:
        """Return the places without the other matrices, as another rank can use them: not for :meth:`on`."""
        return RowPlaces(self.matrix, 0, _PartitionMatrices([self.matrix]))

    def on(self, rank: int) -> Fragment | None:
        """Return the rows that a rank keeps and where, ``None`` if it keeps none."""
        rows = rows_on(self.matrix, rank)
        if not rows:
            return None
        return Fragment(rank, rows.start, self.siblings.offsets(rank)[self.number], len(rows))


Places: TypeAlias = Placement | RowPlaces
"""Where the elements of a matrix, or its rows, lie: at most one fragment on each of some consecutive ranks."""


def runs_within(places: Places, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield rank, start and stop of each run of the elements ``[start, stop)`` that one rank holds, in their order."""
    while start < stop:
        rank = places.rank_at(start)
        end = min(stop, int(places.starts(np.array([rank + 1]))[0]))
        yield rank, start, end
        start = end


@dataclass(slots=True)
class _PartitionMatrices:
    """The matrices of one partition; offsets are kept for the rank that was asked for last."""

    matrices: list[MatrixLayout] = field(default_factory=list)
    _known: tuple[int, list[int]] = (-1, [])

    def offsets(self, rank: int) -> list[int]:
        """Return where a rank keeps the rows of each matrix: in the order of its fragments in the partition."""
        if self._known[0] != rank:
            held = [matrix.placement.on(rank) for matrix in self.matrices]
            offsets, offset = [0] * len(held), 0
            places = [(each.partition_offset, number) for number, each in enumerate(held) if each is not None]
            for _, number in sorted(places):
                offsets[number] = offset
                offset += len(rows_on(self.matrices[number], rank))
            self._known = rank, offsets
        return self._known[1]


def row_places(matrices: Sequence[MatrixLayout]) -> tuple[RowPlaces, ...]:
    """Return where the row state of each matrix lies.

    A stack and the runs of blocks that it is cut into keep the same numbers in the same places.

    Args:
        matrices: All of Muon's matrices in one or more partitions, as stacks or as runs of blocks.
    """
    partitions: dict[int, _PartitionMatrices] = {}
    found = []
    for matrix in matrices:
        siblings = partitions.setdefault(matrix.partition, _PartitionMatrices())
        found.append(RowPlaces(matrix, len(siblings.matrices), siblings))
        siblings.matrices.append(matrix)
    return tuple(found)


def rows_by_partition(matrices: Sequence[MatrixLayout], rank: int) -> dict[int, int]:
    """Return how many rows of each partition a rank keeps, of partitions that have matrices."""
    found: dict[int, int] = {}
    for matrix in matrices:
        found[matrix.partition] = found.get(matrix.partition, 0) + len(rows_on(matrix, rank))
    return found


def rows_on(matrix: MatrixLayout, rank: int) -> range:
    """Return the rows whose first element lies on a rank."""
    fragment = matrix.placement.on(rank)
    if fragment is None:
        return range(0)
    ends = np.array([fragment.matrix_offset, fragment.matrix_offset + fragment.numel])
    return range(*_begin_before(matrix, ends).tolist())


def _begin_before(matrix: MatrixLayout, offsets: Ints) -> Ints:
    """Return how many rows of blocks (columns, if transposed) begin before each of the elements at ``offsets``."""
    row_blocks, col_blocks = matrix.grid
    if matrix.transposed:
        first = np.cumsum([0, *row_blocks[:-1]]) * matrix.cols
        begun: Ints = np.clip(offsets - first[:, None], 0, matrix.cols).sum(axis=0)
        return begun
    rows, rest = np.divmod(offsets, matrix.cols)
    return rows * len(col_blocks) + np.searchsorted(matrix.first_cols, rest)


def first_elements(matrix: MatrixLayout, rows: Ints) -> Ints:
    """Return where some rows begin."""
    row_blocks, col_blocks = matrix.grid
    if matrix.transposed:
        first: Ints = np.cumsum([0, *row_blocks[:-1]])[rows // matrix.cols] * matrix.cols
        return first + rows % matrix.cols
    row, number = np.divmod(rows, len(col_blocks))
    place: Ints = row * matrix.cols + np.array(matrix.first_cols)[number]
    return place
