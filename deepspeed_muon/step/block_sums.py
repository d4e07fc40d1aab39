"""Updates weights by factors that depend on sums over blocks, for variants with ``apply``.

1. Every rank sums over its fragments of each block: ``|W|^2``, ``<W, X>`` and ``|X|^2`` of the weights ``W`` and the
   updates ``X``.
2. One all-reduce adds up those of blocks that a partition cuts, three numbers each; another one, where there is tensor
   parallelism, those of matrices that its ranks hold together.
3. The variant makes two factors of the sums of each block, the same on all ranks, and a second pass applies them.

The host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.plan.chunks import ExchangePlan
from deepspeed_muon.plan.layout import MatrixLayout, rectangles_of
from deepspeed_muon.step.tables import Step
from deepspeed_muon.transport.all_to_all import StepContext
from deepspeed_muon.transport.ranks import reduce_tensor
from deepspeed_muon.variants.variant import Apply

_MOST_NUMEL = 1 << 22
"""Elements of equal rectangles that run together, which copies them."""


class _Rectangles(NamedTuple):
    """Rectangles of one shape that run together.

    Attributes:
        shape: Rows and columns.
        stride: Elements from one row to the next.
        in_weights: Where each is in the weights: number of the flat tensor, and first element.
        in_updates: The same in the updates.
        blocks: Number of each one's block among those of all matrices.
    """

    shape: tuple[int, int]
    stride: int
    in_weights: tuple[tuple[int, int], ...]
    in_updates: tuple[tuple[int, int], ...]
    blocks: Tensor

    def views(self, flat: Sequence[Tensor], offsets: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return a view ``(rows, cols)`` of each rectangle."""
        return [
            flat[number].as_strided(self.shape, (self.stride, 1), flat[number].storage_offset() + start)
            for number, start in offsets
        ]

    def stacked(self, flat: Sequence[Tensor], offsets: Sequence[tuple[int, int]]) -> Tensor:
        """Return all rectangles ``(count, rows, cols)`` in fp32 (float64 of float64), not to be written to."""
        views = self.views(flat, offsets)
        stack = views[0].unsqueeze(0) if len(views) == 1 else torch.stack(views)
        return stack.to(torch.promote_types(stack.dtype, torch.float32))


class BlockSums:
    """The sums over the blocks of some matrices of a plan, and the update by what a variant makes of them."""

    def __init__(
        self,
        plan: ExchangePlan,
        indices: Sequence[int],
        table: Tensor,
        context: StepContext,
        device: torch.device,
    ) -> None:
        """Find out which blocks the fragments are in; nothing is sent.

        Args:
            plan: The exchange plan.
            indices: The matrices.
            table: Of this rank's fragments of them, in the weights and in the updates.
            context: Of the step set; its variant has ``apply``.
            device: Of the weights.
        """
        matrices = [plan.matrices[index] for index in indices]
        counts = [1 if matrix.is_sharded else len(matrix.block_shapes) for matrix in matrices]
        self._first_block = dict(zip(indices, accumulate(counts, initial=0), strict=False))
        self._rectangles = [*self._equal_rectangles(plan, table.tolist(), device)]
        self._context, self._device = context, device
        self._matrix_of = torch.tensor([*indices], dtype=torch.int64).repeat_interleave(
            torch.tensor(counts)
        )  # (blocks,)

        def blocks_where(flags: Sequence[bool]) -> Tensor:
            return torch.tensor(flags).repeat_interleave(torch.tensor(counts)).nonzero().view(-1)

        group = context.tensor_group
        # Ranks of a tensor-parallel group with copies of a matrix all bring its sums.
        copies = [
            1 if group is None or m.shards is None or m.is_sharded else dist.get_world_size(group)
            for m in matrices
        ]
        self._copies = (
            torch.tensor(copies, dtype=torch.float64).repeat_interleave(torch.tensor(counts)).view(-1, 1)
        )
        self._over_data_ranks = blocks_where([_is_divided(matrix) for matrix in matrices])
        self._over_tensor_ranks = blocks_where([group is not None and m.shards is not None for m in matrices])
        # Of the other matrices another data-parallel rank has the sums.
        complete = [_is_divided(m) or m.placement.fragment_on(plan.rank) is not None for m in matrices]
        self._complete = blocks_where(complete)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to data-parallel ranks each time, in a ring of them."""
        ranks = self._context.world_size
        return len(self._over_data_ranks) * 3 * torch.float64.itemsize * 2 * (ranks - 1) // ranks

    def _equal_rectangles(
        self, plan: ExchangePlan, table: Sequence[Sequence[int]], device: torch.device
    ) -> Iterator[_Rectangles]:
        """Yield the rectangles of a table's fragments, together where that can be."""
        rectangles = []
        for partition, offset, updates, updates_offset, numel, index in table:
            fragment = plan.matrices[index].placement.fragment_on(plan.rank)
            assert fragment is not None
            first = fragment.matrix_offset
            for block, start, rows, cols, stride in rectangles_of(plan.matrices[index], first, first + numel):
                offsets = (partition, offset + start), (updates, updates_offset + start)
                rectangles.append(((rows, cols, stride), offsets, self._first_block[index] + block))
        rectangles.sort()
        for (rows, cols, stride), members in groupby(rectangles, key=lambda rectangle: rectangle[0]):
            equal, most = [*members], max(1, _MOST_NUMEL // (rows * cols))
            for together in (equal[first : first + most] for first in range(0, len(equal), most)):
                in_weights, in_updates = zip(*(offsets for _, offsets, _ in together), strict=True)
                blocks = torch.tensor([block for *_, block in together], device=device)
                yield _Rectangles((rows, cols), stride, in_weights, in_updates, blocks)

    def apply(self, factors_of: Apply, step: Step, updates: Sequence[Tensor]) -> tuple[list[int], Tensor]:
        """Update this rank's fragments of the active matrices.

        Must be called by all ranks of the data-parallel and of the tensor-parallel group.

        Args:
            factors_of: The variant's ``apply``.
            step: The weights are mutated.
            updates: The other tensors of the table: flat, in the communication dtype, on any device.

        Returns:
            The matrix of each block whose sums this rank has, and whether all its weights are zero, on the device.
        """
        updates = [tensor.to(self._device) for tensor in updates]
        # 1. sums over this rank's fragments: (blocks, 3)
        sums = torch.zeros((len(self._matrix_of), 3), dtype=torch.float64, device=self._device)
        for group in self._rectangles:
            weights, update = (
                group.stacked(step.flat, group.in_weights),
                group.stacked(updates, group.in_updates),
            )
            products = (weights * weights, weights * update, update * update)
            sums.index_add_(0, group.blocks, torch.stack([p.sum((1, 2)) for p in products], 1).double())
        # 2. sums over ranks
        sums = self._reduced(sums.to(self._context.device))
        # 3. factors of weights and updates: (blocks,)
        rates = step.rates.apply[self._matrix_of, 0].to(sums.device)
        square, along, length = sums.unbind(1)
        keep, move = (factor.to(self._device) for factor in factors_of((square, along, length), rates))
        is_active = None if step.mask is None else step.mask[self._matrix_of]
        for group in self._rectangles:
            weights, update = (
                group.stacked(step.flat, group.in_weights),
                group.stacked(updates, group.in_updates),
            )
            by_block = (len(group.blocks), 1, 1)
            factors = [factor[group.blocks].view(by_block).to(weights.dtype) for factor in (keep, move)]
            new = weights * factors[0] + update * factors[1]
            if is_active is not None:  # the others have no update
                new = torch.where(is_active.to(self._device)[group.blocks].view(by_block), new, weights)
            torch._foreach_copy_(group.views(step.flat, group.in_weights), new.unbind())
        known = self._complete if is_active is None else self._complete[is_active[self._complete]]
        return self._matrix_of[known].tolist(), (square == 0)[known.to(square.device)]

    def _reduced(self, sums: Tensor) -> Tensor:
        """Return the sums over whole blocks from those over this rank's fragments."""
        context = self._context
        if len(self._over_data_ranks) and context.world_size > 1:
            divided = sums[self._over_data_ranks]
            sums[self._over_data_ranks] = reduce_tensor(divided, context.group, purpose="sums over blocks")
            context.stats.count_exchange(self.sent_bytes)
        if len(self._over_tensor_ranks):
            shared = (sums / self._copies.to(sums.device))[self._over_tensor_ranks]
            what = "sums over blocks of tensor-parallel ranks"
            sums[self._over_tensor_ranks] = reduce_tensor(shared, context.tensor_group, purpose=what)
        return sums


def _is_divided(matrix: MatrixLayout) -> bool:
    """Return whether several data-parallel ranks hold different elements of a matrix."""
    return not matrix.replicated and matrix.placement.only_rank is None
