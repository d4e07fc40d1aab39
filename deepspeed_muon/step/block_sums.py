"""Applies updates whose size depends on sums over whole blocks, for variants with ``apply``.

Every rank sums over its fragments of the matrices of a chunk. One all-reduce of a few numbers a block, of data-parallel
ranks and then of tensor-parallel ones, completes the sums. The host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.errors import BindingError
from deepspeed_muon.plan.exchange import Chunk, ExchangePlan
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.rows import RowPlaces, row_places
from deepspeed_muon.step.passes import Step
from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.step.tables import ChunkTable
from deepspeed_muon.transport.exchange import StepContext
from deepspeed_muon.transport.ranks import phase
from deepspeed_muon.variants import Variant

RowState = Mapping[int, Mapping[str, Tensor]]
"""Partition index and key to what this rank keeps of a variant's row state, one-dimensional."""


class Piece(NamedTuple):
    """A rectangle of this rank's fragment of a matrix that lies in one block.

    Attributes:
        block: Number of the block among those of the matrix.
        start: Its first element, counted from that of the fragment.
        rows: Its rows.
        cols: Its columns.
        stride: Elements from one row to the next.
    """

    block: int
    start: int
    rows: int
    cols: int
    stride: int

    def of(self, flat: Tensor, offset: int) -> Tensor:
        """Return a view of the rectangle ``(rows, cols)``; the fragment lies at ``offset`` of a flat tensor."""
        place = flat.storage_offset() + offset + self.start
        return flat.as_strided((self.rows, self.cols), (self.stride, 1), place)


def _grid(matrix: MatrixLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return rows and columns of the blocks; a matrix that is cut over a group is one block."""
    return ((matrix.rows,), (matrix.cols,)) if matrix.is_cut else matrix.grid


def pieces_of(matrix: MatrixLayout, start: int, stop: int) -> Iterator[Piece]:
    """Yield the rectangles that elements ``[start, stop)`` of a stored matrix consist of; each lies in one block."""
    row_blocks, col_blocks = _grid(matrix)
    width = matrix.cols
    for stripe, (top, bottom) in enumerate(pairwise(accumulate(row_blocks, initial=0))):
        low, high = max(start, top * width), min(stop, bottom * width)
        if low >= high:
            continue
        if len(col_blocks) == 1:
            yield Piece(stripe, low - start, 1, high - low, high - low)
            continue
        # The end of a row, whole rows, the beginning of a row; not all of them need be there.
        first, last = -(-low // width), high // width
        runs = [
            (low // width, 1, low % width, width),
            (first, last - first, 0, width),
            (last, 1, 0, high % width),
        ]
        if first > last:
            runs = [(last, 1, low % width, high % width)]
        elif low == first * width:
            del runs[0]
        for row, count, begin, end in runs:
            for number, (left, right) in enumerate(pairwise(accumulate(col_blocks, initial=0))):
                left, right = max(left, begin), min(right, end)
                if count > 0 and left < right:
                    place = row * width + left - start
                    yield Piece(stripe * len(col_blocks) + number, place, count, right - left, width)


def _blocks_of_rows(matrix: MatrixLayout, rows: Tensor) -> Tensor:
    """Return the number of the block of each row of a matrix, numbered as in :mod:`deepspeed_muon.plan.rows`."""
    row_blocks, col_blocks = _grid(matrix)
    if matrix.transposed:
        of_col = torch.arange(len(col_blocks)).repeat_interleave(torch.tensor(col_blocks))
        return rows // matrix.cols * len(col_blocks) + of_col[rows % matrix.cols]
    of_row = torch.arange(len(row_blocks)).repeat_interleave(torch.tensor(row_blocks))
    return of_row[rows // len(col_blocks)] * len(col_blocks) + rows % len(col_blocks)


class BlockSums:
    """The sums over the blocks of one chunk, and the update that they decide about."""

    def __init__(
        self,
        plan: ExchangePlan,
        chunk: Chunk,
        table: Tensor,
        variant: Variant,
        context: StepContext,
        *,
        device: torch.device,
        places: Sequence[RowPlaces],
        tensor_group: dist.ProcessGroup | None,
    ) -> None:
        """Find out which blocks this rank's fragments lie in; nothing is sent.

        Args:
            plan: The exchange plan.
            chunk: One of its chunks.
            table: This rank's fragments of the chunk, :attr:`.ChunkTable.held`.
            variant: One with ``apply``.
            context: Of the step set.
            device: Of the partitions.
            places: Where the variant's row state of the plan's matrices lies.
            tensor_group: The tensor-parallel group; ``None`` without one.
        """
        self._matrices, self._variant, self._context = plan.matrices, variant, context
        self._indices, self._moves = chunk.matrices, chunk.scatters
        self._tensor_group = tensor_group
        self._keys = [each.key for each in variant.state]
        self._matrix_of: list[int] = []
        self._across: list[int] = []
        shares: list[list[float]] = []
        first: dict[int, int] = {}
        for index in chunk.matrices:
            first[index] = len(shares)
            shares += self._shares(plan.matrices[index])
            self._matrix_of += [index] * (len(shares) - first[index])
            if plan.matrices[index].shards is not None:
                self._across += range(first[index], len(shares))
        self._share = torch.tensor(shares, dtype=torch.float64, device=device).view(-1, 3 + len(self._keys))
        self._pieces: list[tuple[Piece, int, tuple[int, int], tuple[int, int]]] = []
        for partition, offset, other, place, numel, index in table.tolist():
            fragment = plan.matrices[index].placement.on(plan.rank)
            assert fragment is not None
            for piece in pieces_of(
                plan.matrices[index], fragment.matrix_offset, fragment.matrix_offset + numel
            ):
                numbered = piece._replace(block=first[index] + piece.block)
                self._pieces.append((numbered, index, (partition, offset), (other, place)))
        self._rows: list[tuple[int, int, int, Tensor]] = []
        for index in chunk.matrices if self._keys else ():
            if (kept := places[index].on(plan.rank)) is not None:
                rows = torch.arange(kept.matrix_offset, kept.matrix_offset + kept.numel)
                blocks = first[index] + _blocks_of_rows(plan.matrices[index], rows)
                self._rows.append((index, kept.partition_offset, kept.numel, blocks.to(device)))

    def _shares(self, matrix: MatrixLayout) -> list[list[float]]:
        """Return for each block what this rank's sums count: less than 1 where other ranks have the same elements.

        The numbers of the state are means over the rows of a block.
        """
        ranks = 1 if self._tensor_group is None else dist.get_world_size(self._tensor_group)
        copies = self._context.world_size if matrix.replicated else 1
        if matrix.shards is not None and not matrix.is_cut:
            copies *= ranks
        shapes = [matrix.logical_shape] if matrix.is_cut else matrix.block_shapes
        # Ranks that cut the inputs keep the numbers of all outputs each.
        holders = copies * (ranks if matrix.is_cut and not matrix.cuts_outputs else 1)
        rows = (matrix.layer_shape(*shape)[0] for shape in shapes)
        return [[1 / copies] * 3 + [1 / (holders * each)] * len(self._keys) for each in rows]

    def apply(self, step: Step, updates: Sequence[Tensor]) -> None:
        """Update this rank's fragments of the chunk's active matrices, and their row state.

        Must be called by all ranks of the data-parallel group, if the chunk scatters, and of the tensor-parallel one.

        Args:
            step: The weights and the row state are mutated.
            updates: The other tensors of the table: flat, in the communication dtype, on any device.
        """
        device, active = step.flat[0].device, set(step.active(self._indices))
        updates = [each.to(device) for each in updates]
        pairs = [
            (piece, piece.of(step.flat[at[0]], at[1]), piece.of(updates[update[0]], update[1]))
            for piece, index, at, update in self._pieces
            if index in active
        ]
        numbers = self._summed(
            [piece.block for piece, _, _ in pairs],
            [_products(_wide(target), _wide(update)) for _, target, update in pairs],
            step.kept,
            device,
            all_ranks=self._moves,
        )
        state = {key: numbers[:, 3 + number].clone() for number, key in enumerate(self._keys)}
        rates = step.rates.apply[self._matrix_of, 0].to(device)
        assert self._variant.apply is not None
        keep, move = self._variant.apply((numbers[:, 0], numbers[:, 1], numbers[:, 2]), state, rates)
        for piece, target, update in pairs:
            wide = _wide(target)
            part = _wide(update) * move[piece.block].to(wide.dtype)
            target.copy_(wide * keep[piece.block].to(wide.dtype) - part)
        for index, offset, numel, blocks in self._rows:
            if index in active:
                for key, values in state.items():
                    own = step.kept[self._matrices[index].partition][key].narrow(0, offset, numel)
                    own.copy_(values[blocks.to(device)])

    def zeros(self, flat: Sequence[Tensor]) -> list[str]:
        """Return the names of the matrices with a block of zeros, the same on all ranks; waits for the device.

        Must be called by all ranks of both groups, with this rank's flat weights by position of the partition.
        """
        own = [_wide(piece.of(flat[at[0]], at[1])) for piece, _, at, _ in self._pieces]
        blocks = [piece.block for piece, *_ in self._pieces]
        found = self._summed(
            blocks, [_products(each, each) for each in own], {}, flat[0].device, all_ranks=True
        )
        numbers = (found[:, 0] == 0).nonzero().view(-1).tolist()
        return list(dict.fromkeys(self._matrices[self._matrix_of[number]].name for number in numbers))

    def _summed(
        self,
        blocks: list[int],
        products: list[Tensor],
        kept: RowState,
        device: torch.device,
        *,
        all_ranks: bool,
    ) -> Tensor:
        """Return the three sums and the state of each block of the chunk, float64 ``(blocks, 3 + keys)``.

        Args:
            blocks: The block of each piece of this rank.
            products: Its sums ``(3,)``.
            kept: The row state; empty to leave it out.
            device: Of the result.
            all_ranks: Whether other data-parallel ranks have parts of the blocks, or other blocks.
        """
        numbers = torch.zeros(self._share.shape, dtype=torch.float64, device=device)
        if products:
            places = torch.tensor(blocks, device=device)
            numbers[:, :3].index_add_(0, places, torch.stack(products).double())
        for index, offset, numel, of_rows in self._rows if kept else ():
            for number, key in enumerate(self._keys):
                own = kept[self._matrices[index].partition][key].narrow(0, offset, numel)
                numbers[:, 3 + number].index_add_(0, of_rows.to(device), own.double())
        numbers = (numbers * self._share.to(device)).to(self._context.device)
        if all_ranks and self._context.world_size > 1:
            with phase("sums over blocks", self._context.group):
                dist.all_reduce(numbers, group=self._context.group)
        if self._tensor_group is not None and self._across:
            part = numbers[self._across]
            with phase("sums over blocks", self._tensor_group):
                dist.all_reduce(part, group=self._tensor_group)
            numbers[self._across] = part
        return numbers.to(device)


def block_sums(
    plan: ExchangePlan,
    tables: Sequence[ChunkTable],
    variant: Variant,
    context: StepContext,
    step_set: StepSet,
) -> list[BlockSums]:
    """Return the sums of each chunk, with the chunks' tables; none for a variant without ``apply``."""
    if variant.apply is None:
        return []
    places = row_places(plan.matrices)
    device, group = step_set.partitions[0].tensor.device, step_set.tensor_group
    return [
        BlockSums(plan, chunk, table.held, variant, context, device=device, places=places, tensor_group=group)
        for chunk, table in zip(plan.chunks, tables, strict=True)
    ]


def refuse_zeros(sums: Sequence[BlockSums], variant: Variant, flat: Sequence[Tensor]) -> None:
    """Raise on all ranks of a step set if the weights of a block are zero, of which no rate is a part.

    Raises:
        BindingError: Naming the matrices and the remedy.
    """
    names = dict.fromkeys(name for each in sums for name in each.zeros(flat))
    if names:
        raise BindingError(
            f"optimizer.params.variant: {variant.name!r} keeps the norm of the first weights, and that of "
            f"{', '.join(names)} is 0 in some block: initialise it with other weights, or send it to AdamW with "
            f"optimizer.params.exclude"
        )


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _products(weights: Tensor, updates: Tensor) -> Tensor:
    return torch.stack((weights.square().sum(), (weights * updates).sum(), updates.square().sum()))
