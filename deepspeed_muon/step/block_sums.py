"""Applies updates whose size depends on norms of the weights, for variants with ``apply`` (Hyperball).

1. Every rank computes ``|W|^2``, ``<W, X>`` and ``|X|^2`` of the weights ``W`` and the updates ``X`` over its fragments
   of each block.
2. One all-reduce adds up the three sums of the blocks that data-parallel ranks share. With tensor parallelism, a second
   one adds up those of the matrices that its ranks shard or copy.
3. From the sums of each block the variant computes two rates, equal on all ranks.
4. The flat pass of all variants decays the weights and adds the updates by these rates, which it reads on the device.
   Where blocks are side by side, as the heads of a weight that is stored as input x output, products with one rate for
   each column do it: the pass would need a fragment for every row of every block.

None of these steps makes the host wait for the device. Blocks without a norm are refused before the first step
(:meth:`BlockSums.zero_matrices`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.ops.torch_operators import to_device
from deepspeed_muon.plan.chunks import ExchangePlan
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import row_ranges
from deepspeed_muon.step.tables import COLUMNS, Step
from deepspeed_muon.transport.all_to_all import StepContext
from deepspeed_muon.transport.ranks import all_reduce_tensor
from deepspeed_muon.variants.variant import Apply

_CPU_STACK_NUMEL, _GPU_STACK_NUMEL = 1 << 22, 1 << 24
"""Elements in a stack of rectangles, at most; stacking copies them, a rectangle with more elements is not copied.

Each stack takes nine launches on a GPU.
"""


class _Span(NamedTuple):
    """Contiguous elements of a fragment, see :func:`spans_of`, and where they are stored.

    Attributes:
        in_weights: Index of the flat weights, and the offset of the first element in them.
        in_updates: The same for the updates.
        rows: Rows.
        cols: Columns, in all blocks.
        blocks: Index of each block, from the left, and the columns in it.
        matrix: Index of the matrix.
    """

    in_weights: tuple[int, int]
    in_updates: tuple[int, int]
    rows: int
    cols: int
    blocks: list[tuple[int, int]]
    matrix: int

    def view(self, flat: Sequence[Tensor], location: tuple[int, int]) -> Tensor:
        """Return a view ``(rows, cols)`` of flat tensors at ``in_weights`` or ``in_updates``."""
        index, offset = location
        return flat[index].narrow(0, offset, self.rows * self.cols).view(self.rows, self.cols)


class _Rectangles(NamedTuple):
    """Rectangles of one shape whose sums are computed in one call.

    Attributes:
        shape: Rows and columns.
        stride: Elements from one row to the next.
        in_weights: Index of the flat weights, and the offset of the first element in them, for each rectangle.
        in_updates: The same for the updates.
        blocks: Index of the block of each rectangle.
    """

    shape: tuple[int, int]
    stride: int
    in_weights: tuple[tuple[int, int], ...]
    in_updates: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]

    def stacked(self, flat: Sequence[Tensor], offsets: Sequence[tuple[int, int]]) -> Tensor:
        """Return the rectangles stacked, ``(rectangles, rows, cols)`` in fp32 or float64; read-only."""
        views = [
            flat[index].as_strided(self.shape, (self.stride, 1), flat[index].storage_offset() + start)
            for index, start in offsets
        ]
        stack = views[0].unsqueeze(0) if len(views) == 1 else torch.stack(views)
        return stack.to(torch.promote_types(stack.dtype, torch.float32))


class BlockSums:
    """Computes the sums over the blocks of one chunk's matrices, and updates the weights by a variant's rates."""

    def __init__(
        self,
        plan: ExchangePlan,
        indices: Sequence[int],
        table: Tensor,
        context: StepContext,
        device: torch.device,
    ) -> None:
        """Assign the fragments of this rank to blocks; nothing is sent.

        Args:
            plan: The exchange plan.
            indices: The matrices whose blocks are summed over.
            table: :attr:`.ChunkTable.apply_table`: this rank's fragments of them in the weights and in the updates.
            context: The context of the step set; its variant has ``apply``.
            device: The device of the weights.
        """
        matrices = [plan.matrices[index] for index in indices]
        counts = [1 if matrix.is_sharded else len(matrix.block_shapes) for matrix in matrices]
        self._first_block = dict(zip(indices, accumulate(counts, initial=0), strict=False))
        spans = [*self._local_spans(plan, table.tolist())]
        self._rectangles = [*_equal_rectangles(spans, device)]
        blocks = [block for group in self._rectangles for block in group.blocks]
        self._block_of = torch.tensor(blocks, dtype=torch.int64, device=device)  # (rectangles,)
        self._context, self._device = context, device
        self._matrix_of = torch.tensor([*indices], dtype=torch.int64).repeat_interleave(
            torch.tensor(counts)
        )  # (blocks,)
        # The fragments of the pass, with the index of the block in place of that of the matrix: it finds the rates
        # there. Blocks that are side by side do not go through the pass: they have a rate for each column.
        fragments = [
            (*span.in_weights, *span.in_updates, cols, block)
            for span in spans
            if len(span.blocks) == 1
            for block, cols in span.blocks
        ]
        self._apply_table = torch.tensor(fragments, dtype=torch.int64).view(-1, COLUMNS)
        self._side_by_side = [span for span in spans if len(span.blocks) > 1]
        block_of_column = [
            block for span in self._side_by_side for block, cols in span.blocks for _ in range(cols)
        ]
        self._block_of_column = torch.tensor(block_of_column, dtype=torch.int64, device=device)  # (columns,)

        def blocks_where(flags: Sequence[bool]) -> Tensor:
            return torch.tensor(flags).repeat_interleave(torch.tensor(counts)).nonzero().view(-1)

        # What is the same in every step is copied to the device once: the host waits for each such copy.
        group = context.tensor_group
        # Where all ranks of a tensor-parallel group have a copy of a matrix, the all-reduce counts its sums that often.
        copies = [
            1 if group is None or m.shards is None or m.is_sharded else dist.get_world_size(group)
            for m in matrices
        ]
        copies_of_blocks = torch.tensor(copies, dtype=torch.float64).repeat_interleave(torch.tensor(counts))
        self._copies = copies_of_blocks.view(-1, 1).to(context.device)
        self._over_data_ranks = blocks_where([_is_divided(m) for m in matrices]).to(context.device)
        over_tensor_ranks = [group is not None and m.shards is not None for m in matrices]
        self._over_tensor_ranks = blocks_where(over_tensor_ranks).to(context.device)
        # A matrix on a single data-parallel rank has its sums only there.
        complete = [_is_divided(m) or m.placement.fragment_on(plan.rank) is not None for m in matrices]
        self._complete = blocks_where(complete)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to data-parallel ranks in one step, by a ring all-reduce."""
        ranks = self._context.world_size
        return len(self._over_data_ranks) * 3 * torch.float64.itemsize * 2 * (ranks - 1) // ranks

    def _local_spans(self, plan: ExchangePlan, table: Sequence[Sequence[int]]) -> Iterator[_Span]:
        """Yield the spans of a table's fragments."""
        for position, offset, updates, updates_offset, numel, index in table:
            fragment = plan.matrices[index].placement.fragment_on(plan.rank)
            assert fragment is not None
            first = fragment.matrix_offset
            for start, rows, blocks in spans_of(plan.matrices[index], first, first + numel):
                yield _Span(
                    (position, offset + start),
                    (updates, updates_offset + start),
                    rows,
                    sum(cols for _, cols in blocks),
                    [(self._first_block[index] + block, cols) for block, cols in blocks],
                    index,
                )

    def zero_matrices(self, flat: Sequence[Tensor]) -> list[int]:
        """Return the matrices with a block of zeros, of those whose sums are complete on this rank.

        Must be called by all ranks of the data-parallel and of the tensor-parallel group; waits for the device.

        Args:
            flat: The flat weights of each of Muon's partitions, as :attr:`.Step.flat`, on any device.
        """
        flat = [weights.to(self._device) for weights in flat]
        # |W|^2 stands in all three columns, of which only the first is read.
        squares = [group.stacked(flat, group.in_weights).square().sum((1, 2)) for group in self._rectangles]
        is_zero = self._reduced(self._by_block([[values] * 3 for values in squares]))[:, 0].cpu() == 0
        zero_blocks = self._complete[is_zero[self._complete]]
        return sorted({int(index) for index in self._matrix_of[zero_blocks]})

    def apply(self, rates_of: Apply, step: Step, updates: Sequence[Tensor]) -> None:
        """Update this rank's fragments of the active matrices.

        Must be called by all ranks of the data-parallel and of the tensor-parallel group.

        Args:
            rates_of: The variant's ``apply``.
            step: The step, whose weights are mutated.
            updates: The tensors that the table reads updates from: flat, in the communication dtype, on any device.
        """
        updates = [tensor.to(self._device) for tensor in updates]
        # 1. sum over this rank's fragments
        sums = []
        for group in self._rectangles:
            weights = group.stacked(step.flat, group.in_weights)  # (rectangles, rows, cols)
            update = group.stacked(updates, group.in_updates)
            products = (weights * weights, weights * update, update * update)
            sums.append([product.sum((1, 2)) for product in products])  # (rectangles,) each
        # 2. sum over ranks
        complete = self._reduced(self._by_block(sums))  # (blocks, 3)
        # 3. rates of the pass
        weight_square, product, update_square = complete.unbind(1)
        lr = to_device(step.rates.apply[self._matrix_of, 0], complete.device)
        rates = torch.stack(rates_of((weight_square, product, update_square), lr), dim=1)  # (blocks, 2)
        # the dtypes in which the pass computes
        in_double = any(weights.dtype == torch.float64 for weights in step.flat)
        dtype = torch.float64 if in_double else torch.float32
        # 4. update this rank's fragments; the updates of inactive matrices are uninitialised memory
        rates, table = rates.to(self._device, dtype), self._apply_table
        if step.mask is not None:
            table = table[step.mask[self._matrix_of[table[:, COLUMNS - 1]]]]
        step.passes.unpack_apply(step.flat, updates, table, rates)
        if self._side_by_side:
            self._apply_by_column(step, updates, rates)

    def _apply_by_column(self, step: Step, updates: Sequence[Tensor], rates: Tensor) -> None:
        """Update the active matrices whose blocks are side by side; see :func:`.torch_operators.unpack_apply_`."""
        lengths = [span.cols for span in self._side_by_side]
        by_column = rates.T.index_select(1, self._block_of_column).split(lengths, dim=1)
        for span, (lr_scale, decay) in zip(self._side_by_side, by_column, strict=True):  # (cols,) each
            if step.mask is not None and not step.mask[span.matrix]:
                continue
            stored = span.view(step.flat, span.in_weights)
            weights = stored.to(torch.promote_types(stored.dtype, torch.float32))
            weights.mul_(decay).addcmul_(lr_scale, span.view(updates, span.in_updates), value=-1.0)
            if weights is not stored:
                stored.copy_(weights)

    def _by_block(self, sums: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the sums over this rank's fragments of each block, float64 ``(blocks, 3)``, where the groups are.

        Args:
            sums: Three for each group of rectangles, ``(rectangles,)`` each.
        """
        by_block = torch.zeros((len(self._matrix_of), 3), dtype=torch.float64, device=self._device)
        if sums:
            # (3 * rectangles,): |W|^2 of all of them, then <W, X>, then |X|^2
            of_rectangles = torch.cat([values for of_kind in zip(*sums, strict=True) for values in of_kind])
            by_block.index_add_(0, self._block_of, of_rectangles.view(3, -1).T.double())
        return by_block.to(self._context.device)

    def _reduced(self, sums: Tensor) -> Tensor:
        """Return the sums over entire blocks, ``(blocks, 3)``, from those over this rank's fragments."""
        context = self._context
        if len(self._over_data_ranks) and context.world_size > 1:
            purpose = "sums over blocks"
            if len(self._over_data_ranks) == len(sums):
                sums = all_reduce_tensor(sums, context.group, purpose=purpose)
            else:
                divided = sums[self._over_data_ranks]
                sums[self._over_data_ranks] = all_reduce_tensor(divided, context.group, purpose=purpose)
            context.stats.count_exchange(self.sent_bytes)
        if len(self._over_tensor_ranks):
            shared = (sums / self._copies)[self._over_tensor_ranks]
            purpose = "sums over blocks of tensor-parallel ranks"
            sums[self._over_tensor_ranks] = all_reduce_tensor(shared, context.tensor_group, purpose=purpose)
        return sums


def spans_of(matrix: MatrixLayout, start: int, stop: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield the contiguous spans that elements ``[start, stop)`` of a stored matrix consist of.

    Elements of one block are a span of one row, also where they are several rows of the matrix. Where blocks are side
    by side, the end of a row, full rows, and the start of a row are a span each.

    Each is given by its first element, counted from ``start``; its rows; and for each of its blocks, from the left, the
    number of the block, row by row of the grid (a matrix that is sharded over a group is one block), and the columns of
    the span in it.
    """
    row_blocks, col_blocks = ((matrix.rows,), (matrix.cols,)) if matrix.is_sharded else matrix.grid
    width = matrix.cols
    for block_row, (top, bottom) in enumerate(pairwise(accumulate(row_blocks, initial=0))):
        low, high = max(start, top * width), min(stop, bottom * width)
        if low >= high:
            continue
        if len(col_blocks) == 1:
            yield low - start, 1, [(block_row, high - low)]
            continue
        # Blocks side by side, as in a 4 x 6 matrix of the columns 0 to 2 and 3 to 5: elements [2, 14) are row 0 from
        # column 2 on, with one column of block 0 and three of block 1; row 1; and columns 0 and 1 of row 2 in block 0.
        for row, rows, first_col, end_col in row_ranges(low, high, width):
            blocks = []
            for number, (left, right) in enumerate(pairwise(accumulate(col_blocks, initial=0))):
                cols = min(right, end_col) - max(left, first_col)
                if cols > 0:
                    blocks.append((block_row * len(col_blocks) + number, cols))
            yield row * width + first_col - start, rows, blocks


def _equal_rectangles(spans: Sequence[_Span], device: torch.device) -> Iterator[_Rectangles]:
    """Yield the rectangles that the blocks of some spans are, grouped by shape and stride."""
    rectangles = []
    for span in spans:
        (position, offset), (updates, updates_offset) = span.in_weights, span.in_updates
        left = 0
        for block, cols in span.blocks:
            shape_and_stride = (span.rows, cols, span.cols if span.rows > 1 else cols)
            offsets = (position, offset + left), (updates, updates_offset + left)
            rectangles.append((shape_and_stride, offsets, block))
            left += cols
    # Equal shapes become adjacent for groupby, each with its offsets ascending.
    rectangles.sort()
    most = _CPU_STACK_NUMEL if device.type == "cpu" else _GPU_STACK_NUMEL
    for (rows, cols, stride), members in groupby(rectangles, key=lambda rectangle: rectangle[0]):
        equal, limit = [*members], max(1, most // (rows * cols))
        for batch in (equal[first : first + limit] for first in range(0, len(equal), limit)):
            in_weights, in_updates = zip(*(offsets for _, offsets, _ in batch), strict=True)
            yield _Rectangles(
                (rows, cols), stride, in_weights, in_updates, tuple(block for *_, block in batch)
            )


def _is_divided(matrix: MatrixLayout) -> bool:
    """Return whether several data-parallel ranks have different elements of a matrix."""
    return not matrix.replicated and matrix.placement.only_rank is None
