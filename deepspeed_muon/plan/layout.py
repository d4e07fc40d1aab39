"""Matrices and other parameters of a step set: their shapes, their blocks, and which rank holds which elements."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal, NewType

from deepspeed_muon.plan.placement import Placement

PartitionIndex = NewType("PartitionIndex", int)
"""Of a flat partition, unique within the optimizer and equal on all ranks."""

SetIndex = NewType("SetIndex", int)
"""Of a parameter in a step set, matrices first: the order of the gradient flags."""

PlanIndex = NewType("PlanIndex", int)
"""Of a matrix in an exchange plan, where a stack of blocks may be several."""


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """A matrix, or the tensor-parallel shard of one, and which rank holds which of its elements.

    Attributes:
        name: Dotted parameter name.
        rows: Rows as stored.
        cols: Columns as stored.
        partition: Index of the flat partition, unique within the optimizer and equal on all ranks.
        placement: Which rank holds which elements.
        row_blocks: Rows of each block (attention head, expert, one of several fused projections), from the top; empty
            for one block with all rows.
        col_blocks: The same for columns. With both, every cell of the grid is a block.
        transposed: Whether it is stored as input x output, so that its scale is that of the transposed matrix.
        tp_shards: How the full matrix is spread over its tensor-parallel group; ``None`` if no other rank of it has
            anything of the matrix.
        first_row: For a slice of blocks with an owner of its own, its first row in the parameter.
    """

    name: str
    rows: int
    cols: int
    partition: PartitionIndex
    placement: Placement
    row_blocks: tuple[int, ...] = ()
    col_blocks: tuple[int, ...] = ()
    transposed: bool = False
    tp_shards: TensorShards | None = None
    first_row: int = 0

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.rows * self.cols

    @property
    def is_tp_shard(self) -> bool:
        """Whether this is one shard of a matrix, which one of the ranks that have the others gathers."""
        return self.tp_shards is not None and self.tp_shards.dim is not None

    @property
    def logical_shape(self) -> tuple[int, int]:
        """Rows and columns of the full matrix, also if this is one shard of it."""
        if self.tp_shards is None or self.tp_shards.dim is None:
            return self.rows, self.cols
        total = sum(self.tp_shards.sizes)
        return (total, self.cols) if self.tp_shards.dim == 0 else (self.rows, total)

    @property
    def grid(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows and columns of the grid of blocks; one cell for a matrix that is not divided."""
        return self.row_blocks or (self.rows,), self.col_blocks or (self.cols,)

    @property
    def output_count(self) -> int:
        """The number of outputs of the layer, over all blocks: a variant stores one number for each of them.

        They are numbered row by row: where blocks are side by side, the first row of each block, then the second one.
        Those of a transposed matrix are its columns, and are numbered block row by block row.
        """
        row_blocks, col_blocks = self.grid
        return self.cols * len(row_blocks) if self.transposed else self.rows * len(col_blocks)

    @property
    def batch_key(self) -> Hashable:
        """Equal for matrices that may be orthogonalised in one batch."""
        return self.logical_shape, self.block_shapes, self.transposed, self.is_tp_shard

    @property
    def equal_blocks(self) -> int | None:
        """The number of blocks if they are equal and stack without a copy, else ``None``."""
        rows, cols = self.grid
        return len(rows) if len(cols) == 1 and len(set(rows)) == 1 else None

    @property
    def block_shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of all blocks, row by row of the grid; each is orthogonalised and scaled by itself.

        A matrix that is sharded over a group is one block, the full matrix.
        """
        return (self.logical_shape,) if self.is_tp_shard else tuple(itertools.product(*self.grid))

    def slice_blocks(self, first: int, row_blocks: tuple[int, ...]) -> MatrixLayout:
        """Return blocks that follow each other, from row ``first`` on, as a matrix of their own."""
        rows = sum(row_blocks)
        return replace(
            self,
            rows=rows,
            placement=self.placement.narrow(first * self.cols, rows * self.cols),
            row_blocks=row_blocks if len(row_blocks) > 1 else (),
            first_row=self.first_row + first,
        )

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise ValueError(f"{self.name}: {self.rows} x {self.cols} is not a matrix")
        rows, cols = self.grid
        if min(rows) < 1 or min(cols) < 1 or sum(rows) != self.rows or sum(cols) != self.cols:
            raise ValueError(
                f"{self.name}: blocks {rows} x {cols} do not add up to {self.rows} x {self.cols}"
            )
        if self.placement.numel != self.numel:
            raise ValueError(
                f"{self.name}: {self.rows} x {self.cols} elements are not the {self.placement.numel} of its placement"
            )


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """A parameter of AdamW and which rank holds which of its elements, as in :class:`MatrixLayout`."""

    name: str
    partition: PartitionIndex
    placement: Placement

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.placement.numel


@dataclass(frozen=True, slots=True)
class TensorShards:
    """How a matrix is spread over a tensor-parallel group.

    Attributes:
        dim: The sharded dimension: 0 for rows (column-parallel layers), 1 for columns (row-parallel layers), ``None``
            if every rank of the group holds a replica.
        sizes: Length along ``dim`` of every rank's shard, in the order of the group; empty for replicas.
        fused: Lengths along ``dim`` of the fused matrices (query, key and value), each of which is sharded over all
            ranks; one length if there is one matrix, empty if that is unknown.
        complete: For a matrix that is orthogonalised in blocks, whether each block of the shard is a complete block of
            the matrix and not one rank's shard of it; empty for any other matrix.
    """

    dim: Literal[0, 1] | None
    sizes: tuple[int, ...]
    fused: tuple[int, ...] = ()
    complete: tuple[bool, ...] = ()
