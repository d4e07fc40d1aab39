"""Where matrices lie in flat partitions, as lists of fragments.

Every ZeRO stage, sub-group, padding rule and offload device can be described by such lists, so that plan and transport
exist once. All offsets and sizes are in elements, never in bytes.

Example: a flat buffer has ten elements on each of two ranks. A 4 x 3 matrix that starts at its element 5 is
``Fragment(rank=0, matrix_offset=0, partition_offset=5, numel=5)`` and
``Fragment(rank=1, matrix_offset=5, partition_offset=0, numel=7)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

__all__ = [
    "Block",
    "Fragment",
    "MatrixLayout",
    "ParameterLayout",
    "TensorShards",
    "flat_fragments",
    "replicated_fragments",
    "sharded_fragments",
]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous run of one matrix inside one rank's partition.

    Attributes:
        rank: Rank inside the data-parallel group.
        matrix_offset: Where the run starts in the row-major matrix.
        partition_offset: Where it starts in that rank's flat partition.
        numel: Its length.
    """

    rank: int
    matrix_offset: int
    partition_offset: int
    numel: int

    def __post_init__(self) -> None:
        if self.rank < 0 or self.matrix_offset < 0 or self.partition_offset < 0 or self.numel < 1:
            raise ValueError(f"not a fragment: {self}")


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a stored matrix, from ``row`` and ``col`` on, that is orthogonalised and scaled by itself."""

    row: int
    col: int
    rows: int
    cols: int

    @property
    def area(self) -> tuple[slice, slice]:
        """The index of the block in a tensor of the stored matrix."""
        return slice(self.row, self.row + self.rows), slice(self.col, self.col + self.cols)


@dataclass(frozen=True, slots=True)
class TensorShards:
    """How a matrix is spread over a group: the tensor-parallel group, or ranks that share it.

    Attributes:
        dim: The dimension that is cut: 0 for rows (column-parallel layers), 1 for columns (row-parallel layers),
            ``None`` if every rank of the group holds a copy.
        sizes: Length along ``dim`` of every rank's shard, in the order of the group; empty for copies.
    """

    dim: Literal[0, 1] | None
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """A matrix, or the part of it that one rank of a group orthogonalises, and where all of it lies.

    Attributes:
        name: Dotted parameter name.
        rows: Rows as stored.
        cols: Columns as stored.
        partition: Index of the flat partition, unique within the optimizer and equal on all ranks.
        fragments: The fragments of all ranks, ordered by rank, then by matrix offset.
        replicated: Whether every rank holds the whole matrix (ZeRO stage 0).
        row_blocks: Rows of each block (attention head, expert, part of a fused projection), from the top; empty for
            one block with all rows.
        col_blocks: The same for columns. With both, every cell of the grid is a block.
        transposed: Whether it is stored as input x output, so that its scale is that of the transposed matrix.
        shards: How the whole matrix is spread over its group, if this is one shard or copy; ``None`` without a group.
        sharers: Ranks of the data-parallel group that orthogonalise the whole matrix together, if this is the part of
            one of them; empty for a matrix with one owner.
        first_row: For a run of blocks with its own owner, its first row in the parameter.
    """

    name: str
    rows: int
    cols: int
    partition: int
    fragments: tuple[Fragment, ...]
    replicated: bool = False
    row_blocks: tuple[int, ...] = ()
    col_blocks: tuple[int, ...] = ()
    transposed: bool = False
    shards: TensorShards | None = None
    sharers: tuple[int, ...] = ()
    first_row: int = 0
    _blocks: tuple[Block, ...] = field(init=False, repr=False, compare=False)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.rows * self.cols

    @property
    def is_cut(self) -> bool:
        """Whether this is one part of a matrix that several ranks orthogonalise together."""
        return self.shards is not None and self.shards.dim is not None

    @property
    def logical_shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix, also if this is one shard of it."""
        if self.shards is None or self.shards.dim is None:
            return self.rows, self.cols
        total = sum(self.shards.sizes)
        return (total, self.cols) if self.shards.dim == 0 else (self.rows, total)

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Output and input size of the first block of the whole matrix, which determine the scale of the update."""
        return self.layer_shape(*(self.logical_shape if self.is_cut else self.block_shape))

    @property
    def grid(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows and columns of the grid of blocks; one cell for a matrix that is not divided."""
        return self.row_blocks or (self.rows,), self.col_blocks or (self.cols,)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Rows and columns of the first block; the scales of the other blocks are relative to its scale."""
        rows, cols = self.grid
        return rows[0], cols[0]

    @property
    def equal_blocks(self) -> int | None:
        """The number of blocks if they are equal and stack without a copy, else ``None``."""
        rows, cols = self.grid
        return len(rows) if len(cols) == 1 and len(set(rows)) == 1 else None

    def blocks(self) -> tuple[Block, ...]:
        """Return all blocks, row by row of the grid."""
        return self._blocks

    def layer_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Return output and input size of a stored ``rows x cols`` block."""
        return (cols, rows) if self.transposed else (rows, cols)

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise ValueError(f"{self.name}: {self.rows} x {self.cols} is not a matrix")
        for what, sizes, whole in zip(("row", "column"), self.grid, (self.rows, self.cols), strict=True):
            if min(sizes) < 1 or sum(sizes) != whole:
                raise ValueError(f"{self.name}: {what} blocks {sizes} do not add up to {whole}")
        rows, cols = ([*zip(accumulate(sizes, initial=0), sizes, strict=False)] for sizes in self.grid)
        blocks = tuple(Block(row, col, height, width) for row, height in rows for col, width in cols)
        object.__setattr__(self, "_blocks", blocks)
        if self.replicated:
            complete = all(f.matrix_offset == 0 and f.numel == self.numel for f in self.fragments)
        else:
            runs = sorted((f.matrix_offset, f.numel) for f in self.fragments)
            ends = [0] + [offset + numel for offset, numel in runs]
            complete = [offset for offset, _ in runs] == ends[:-1] and ends[-1] == self.numel
        if not complete:
            raise ValueError(
                f"{self.name}: the fragments do not cover {self.rows} x {self.cols} exactly: {self.fragments}"
            )

    def held_by(self, rank: int) -> int:
        """Return how many elements ``rank`` holds."""
        return sum(fragment.numel for fragment in self.fragments if fragment.rank == rank)

    def whole_on(self) -> int | None:
        """Return the only rank that holds elements, or ``None`` if several do."""
        ranks = {fragment.rank for fragment in self.fragments}
        return next(iter(ranks)) if len(ranks) == 1 else None


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """A parameter of AdamW and where all of it lies, as in :class:`MatrixLayout`."""

    name: str
    numel: int
    partition: int
    fragments: tuple[Fragment, ...]


def flat_fragments(offset: int, numel: int, partition_numel: int) -> tuple[Fragment, ...]:
    """Return the fragments of a parameter in a flat buffer with equal partitions (stages 1, 2, ``BF16_Optimizer``).

    Args:
        offset: Where the parameter starts in the flat buffer of all ranks.
        numel: Elements of the parameter.
        partition_numel: Elements of a partition.
    """
    fragments = []
    done = 0
    while done < numel:
        rank, inside = divmod(offset + done, partition_numel)
        run = min(numel - done, partition_numel - inside)
        fragments.append(Fragment(rank, done, inside, run))
        done += run
    return tuple(fragments)


def sharded_fragments(partition_offset: int, numel: int, shard_numel: int) -> tuple[Fragment, ...]:
    """Return the fragments of a parameter of which every rank holds one (ZeRO stage 3).

    Args:
        partition_offset: Where the fragment lies in every rank's flat partition.
        numel: Elements of the parameter, without padding.
        shard_numel: Elements that each rank reserves for it; the last ranks may hold padding only.
    """
    count = -(-numel // shard_numel)
    return tuple(
        Fragment(rank, rank * shard_numel, partition_offset, min(shard_numel, numel - rank * shard_numel))
        for rank in range(count)
    )


def replicated_fragments(partition_offset: int, numel: int, world_size: int) -> tuple[Fragment, ...]:
    """Return the fragments of a parameter that every rank holds whole (stage 0)."""
    return tuple(Fragment(rank, 0, partition_offset, numel) for rank in range(world_size))
