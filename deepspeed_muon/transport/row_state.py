"""Brings what a variant keeps for each row from the ranks that keep it to the owners of the matrices, and back.

It is sent in fp32, in two small all-to-alls a step (of replicated matrices in one, from the owners), and only if some
rank holds elements of another one's matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.plan.exchange import ExchangePlan
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.transport.exchange import StepContext
from deepspeed_muon.transport.ranks import reduce_tensor
from deepspeed_muon.transport.row_exchange import RowExchange, RowStates
from deepspeed_muon.variants.variant import Sums, Variant


def sums_of(matrix: MatrixLayout, group: dist.ProcessGroup | None) -> Sums:
    """Return what adds up over rows and over a matrix.

    Args:
        matrix: A whole matrix, or this rank's shard of a cut one.
        group: The tensor-parallel group that has the other shards of cut matrices; ``None`` if they are whole here.
    """
    if group is None or not matrix.is_cut:
        return Sums()
    assert matrix.shards is not None

    add_up = functools.partial(reduce_tensor, group=group, what="sums of rows")
    if matrix.cuts_outputs:
        return Sums(add_rows=add_up)
    return Sums(cols=sum(matrix.shards.sizes), add_columns=add_up)


def before_iteration(
    variant: Variant, directions: Tensor, matrix: MatrixLayout, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return what is orthogonalised, ``(batch, rows, cols)``: the directions, or what the variant makes of them.

    For shards of cut matrices it must be called by all ranks of ``group``.

    Args:
        variant: The variant.
        directions: Of blocks that are stored and cut as those of ``matrix`` are.
        matrix: One of their matrices.
        group: As for :func:`sums_of`.
    """
    if variant.before_iteration is None:
        return directions
    oriented = directions.mT if matrix.transposed else directions
    changed = variant.before_iteration(oriented, sums_of(matrix, group))
    return changed.mT if matrix.transposed else changed


class RowsAtOwner:
    """A variant's ``finish`` with the row state of matrices on this rank: whole matrices, or its shards of cut ones.

    Attributes:
        rows: Key of the state and index of the matrix to one number for each row, one-dimensional fp32.
    """

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        variant: Variant,
        settings: Tensor,
        rows: dict[str, dict[int, Tensor]],
        *,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Keep the arguments; nothing is sent.

        Args:
            matrices: Of the exchange plan.
            variant: One with ``finish``.
            settings: As :attr:`.Rates.settings`.
            rows: See the class. Mutated.
            group: The tensor-parallel group that has the other shards of cut matrices; ``None`` if they are whole here.
        """
        self.rows = rows
        self._matrices = matrices
        self._variant = variant
        self._settings = settings
        self._group = group
        self._before: dict[tuple[int, int], dict[str, Tensor]] = {}

    def with_whole(self, rows: dict[str, dict[int, Tensor]]) -> RowsAtOwner:
        """Return the same for matrices whose shards were gathered here."""
        return RowsAtOwner(self._matrices, self._variant, self._settings, rows, group=None)

    def finish(self, blocks: Sequence[tuple[int, int]], results: Tensor) -> Tensor:
        """Turn orthogonalised blocks into updates and advance their state.

        For shards of cut matrices it must be called by all ranks of the tensor-parallel group.

        Args:
            blocks: The block of each result: index of the matrix and number of the block. All are transposed, or none.
            results: ``(blocks, rows, cols)``.

        Returns:
            A new tensor of the same shape.
        """
        assert self._variant.finish is not None
        kept = {key: [self._of_block(each, *block) for block in blocks] for key, each in self.rows.items()}
        state = {key: torch.stack(views) for key, views in kept.items()}
        copies = {key: values.clone() for key, values in state.items()}
        for number, block in enumerate(blocks):
            self._before.setdefault(block, {key: values[number] for key, values in copies.items()})
        own = self._settings[[index for index, _ in blocks]].to(results.device, torch.float32)
        names = [each.name for each in self._variant.settings]
        settings = dict(zip(names, own.split(1, dim=1), strict=True))
        first = self._matrices[blocks[0][0]]
        oriented = results.mT if first.transposed else results
        updates = self._variant.finish(oriented, state, settings, sums_of(first, self._group))
        for key, views in kept.items():
            for view, new in zip(views, state[key], strict=True):
                view.copy_(new)
        return updates.mT if first.transposed else updates

    def take_back(self, block: tuple[int, int]) -> None:
        """Restore the state that a block had before this step."""
        for key, rows in self.rows.items():
            self._of_block(rows, *block).copy_(self._before[block][key])

    def keep(self, blocks: Sequence[tuple[int, int]], right: Tensor) -> None:
        """Restore the state of the blocks whose flag in ``right`` is not set, without waiting for the device."""
        for number, block in enumerate(blocks):
            for key, rows in self.rows.items():
                own = self._of_block(rows, *block)
                own.copy_(torch.where(right[number], own, self._before[block][key]))

    def start_anew(self, block: tuple[int, int]) -> None:
        """Give a block the state that it has before the first step."""
        for each in self._variant.state:
            self._of_block(self.rows[each.key], *block).fill_(each.start)

    def _of_block(self, rows: Mapping[int, Tensor], index: int, number: int) -> Tensor:
        """Return a view of the rows of one block of a matrix."""
        matrix = self._matrices[index]
        if matrix.is_cut:
            return rows[index]
        row_blocks, col_blocks = matrix.grid
        row, col = divmod(number, len(col_blocks))
        if matrix.transposed:
            return rows[index].view(-1, matrix.cols)[row].narrow(0, matrix.first_cols[col], col_blocks[col])
        return rows[index].view(matrix.rows, -1)[:, col].narrow(0, sum(row_blocks[:row]), row_blocks[row])


class RowStateExchange:
    """Exchanges the row state of the matrices of one plan."""

    def __init__(self, plan: ExchangePlan, context: StepContext, device: torch.device) -> None:
        """Find out which rows this rank keeps.

        Args:
            plan: The exchange plan.
            context: Of the step set; its variant has ``finish``.
            device: Of what is kept.
        """
        self._matrices, self._context = plan.matrices, context
        self._rows = RowExchange(plan, context, device)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to data-parallel ranks per step."""
        return sum(self._rows.sent_numbers) * len(self._context.variant.state) * torch.float32.itemsize

    def gather(self, kept: RowStates, settings: Tensor) -> RowsAtOwner:
        """Bring the rows of every matrix to its owner. Must be called by all ranks of the group."""
        owned = self._rows.gather(self._rows.state(kept))
        counts = [len(rows) for _, rows in self._rows.owned.values()]
        rows = {
            entry.key: dict(zip(self._rows.owned, owned[:, number].contiguous().split(counts), strict=True))
            for number, entry in enumerate(self._context.variant.state)
        }
        context = self._context
        return RowsAtOwner(self._matrices, context.variant, settings, rows, group=context.tensor_group)

    def scatter(self, done: RowsAtOwner, kept: RowStates) -> None:
        """Bring the rows back to the ranks that keep them; those of inactive matrices are unchanged.

        Must be called by all ranks of the group. The tensors in ``kept`` are mutated.
        """
        whole = torch.stack([torch.cat([*rows.values()]) for rows in done.rows.values()], 1)
        self._rows.keep(kept, self._rows.scatter(whole))
