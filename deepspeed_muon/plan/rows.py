"""Which rank keeps NorMuon's number of a row, when ZeRO cuts the matrix anywhere.

NorMuon keeps one number for each output of a matrix: for each row of each block, or for each column of a block if the
matrix is stored transposed. The rank that holds the first element of that row (or column) keeps the number. It keeps
all numbers of one flat partition in a compact tensor, in the order of its fragments in the partition. So the layouts
alone say where a number is. Inside a matrix the numbers are ordered by those first elements.

Example: rank 0 holds elements 0 to 4 of a 4 x 3 matrix, rank 1 the rest. Rows 0 and 1 begin on rank 0, rows 2 and 3 on
rank 1: ``Fragment(0, 0, 0, 2)`` and ``Fragment(1, 2, 0, 2)``, counted in rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_muon.plan.layout import Fragment, MatrixLayout

__all__ = ["ROW_STATE_KEY", "row_count", "row_layouts"]

ROW_STATE_KEY = "row_second_moment"
"""NorMuon's entry of the optimizer state: one fp32 number for each row that this rank keeps."""


def row_count(matrix: MatrixLayout) -> int:
    """Return how many outputs all blocks of a matrix have together."""
    rows, cols = matrix.grid
    return matrix.cols * len(rows) if matrix.transposed else matrix.rows * len(cols)


def row_layouts(matrices: Sequence[MatrixLayout]) -> tuple[MatrixLayout, ...]:
    """Return, for each matrix, the layout of one number per output, as a matrix with a single column.

    A stack and the runs of blocks that it is cut into keep the same numbers in the same places.

    Args:
        matrices: All of Muon's matrices in one or more partitions, as stacks or as runs of blocks.
    """
    placed: list[tuple[int, int, int, int, int, int]] = []
    for index, matrix in enumerate(matrices):
        for fragment in matrix.fragments:
            first = _begin_before(matrix, fragment.matrix_offset)
            count = _begin_before(matrix, fragment.matrix_offset + fragment.numel) - first
            if count:
                where = (matrix.partition, fragment.rank, fragment.partition_offset)
                placed.append((*where, index, first, count))
    filled: dict[tuple[int, int], int] = {}
    found: list[list[Fragment]] = [[] for _ in matrices]
    for partition, rank, _, index, first, count in sorted(placed):
        offset = filled.get((partition, rank), 0)
        filled[partition, rank] = offset + count
        found[index].append(Fragment(rank, first, offset, count))
    return tuple(
        MatrixLayout(
            matrix.name,
            row_count(matrix),
            1,
            matrix.partition,
            tuple(sorted(fragments, key=lambda f: (f.rank, f.matrix_offset))),
            matrix.replicated,
        )
        for matrix, fragments in zip(matrices, found, strict=True)
    )


def _begin_before(matrix: MatrixLayout, offset: int) -> int:
    """Return how many rows of blocks (columns, if transposed) begin before the element at ``offset``."""
    if matrix.transposed:
        starts = {block.row * matrix.cols for block in matrix.blocks()}
        return sum(min(max(offset - start, 0), matrix.cols) for start in starts)
    starts = {block.col for block in matrix.blocks()}
    rows, rest = divmod(offset, matrix.cols)
    return rows * len(starts) + sum(start < rest for start in starts)
