"""Brings what a variant keeps for each row from the ranks that keep it to the owners of the matrices, and back.

It is sent in fp32, in two small all-to-alls a step for each entry of the state (of replicated matrices, in broadcasts
by the owners), and only if some matrix has rows that begin on another rank than its owner.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.plan.exchange import ExchangePlan, build_chunk
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.rows import row_places
from deepspeed_muon.transport.exchange import StepContext, Way, start_messages
from deepspeed_muon.transport.ranks import phase, reduce_tensor
from deepspeed_muon.variants import Sums, Variant

Settings = Mapping[int, Mapping[str, float]]
"""Partition index to the values of the variant's settings in this step."""


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
        settings: Settings,
        rows: dict[str, dict[int, Tensor]],
        *,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Keep the arguments; nothing is sent.

        Args:
            matrices: Of the exchange plan.
            variant: One with ``finish``.
            settings: Of the variant.
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
        own = [self._settings[self._matrices[index].partition] for index, _ in blocks]
        settings = {
            each.name: torch.tensor(
                [of_matrix[each.name] for of_matrix in own], device=results.device
            ).unsqueeze(-1)
            for each in self._variant.settings
        }
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
    """Exchanges the row state of the matrices of one plan.

    ``kept`` below is what this rank keeps: partition index and key to a one-dimensional tensor.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        context: StepContext,
        variant: Variant,
        tensor_group: dist.ProcessGroup | None,
    ) -> None:
        """Find out which rows this rank keeps; ``tensor_group`` has the other shards of cut matrices."""
        places = row_places(plan.matrices)
        self._matrices = plan.matrices
        self._held = [each.on(plan.rank) for each in places]
        self._chunk = build_chunk(places, plan.owners, range(len(places)), plan.rank)
        self._counts = [each.numel for each in places]
        self._context = context
        self._variant = variant
        self._tensor_group = tensor_group

    @property
    def sent_elements(self) -> int:
        """Elements that this rank sends to other ranks per step."""
        return self._chunk.sent_elements * len(self._variant.state)

    def gather(self, kept: Mapping[int, Mapping[str, Tensor]], settings: Settings) -> RowsAtOwner:
        """Bring the rows of every matrix to its owner. Must be called by all ranks of the group."""
        rows = {}
        for key in (each.key for each in self._variant.state):
            rows[key] = {index: self._buffer(self._counts[index]) for index in self._chunk.owned}
            self._move("gather", rows[key], kept, key)
        return RowsAtOwner(self._matrices, self._variant, settings, rows, group=self._tensor_group)

    def scatter(self, done: RowsAtOwner, kept: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Bring the rows back to the ranks that keep them; those of inactive matrices are unchanged.

        Must be called by all ranks of the group. The tensors in ``kept`` are mutated.
        """
        for key, whole in done.rows.items():
            self._move("scatter", whole, kept, key)

    def _move(
        self, what: Way, whole: Mapping[int, Tensor], kept: Mapping[int, Mapping[str, Tensor]], key: str
    ) -> None:
        """Copy the rows of owned matrices from where they are kept, or back to there."""
        chunk, at_owner = self._chunk, what == "gather"
        for index in chunk.owned:
            own = self._held[index]
            if own is not None:
                there, here = (
                    whole[index].narrow(0, own.matrix_offset, own.numel),
                    self._kept(kept, index, key),
                )
                (there if at_owner else here).copy_(here if at_owner else there)
        if not (chunk.gathers if at_owner else chunk.scatters):
            return
        away = [
            (each, self._kept(kept, index, key).view(each.shape))
            for index, each in chunk.send_buffer.segments
        ]
        owned = [(each, each.in_matrices(whole[index])) for index, each in chunk.receive_buffer.segments]
        sources, targets = (away, owned) if at_owner else (owned, away)
        buffers = [self._buffer(each.numel) for each in (chunk.send_buffer, chunk.receive_buffer)]
        send, received = buffers if at_owner else buffers[::-1]
        for segment, rows in sources:
            segment.in_buffer(send).copy_(rows)
        with phase("exchange of row state", self._context.group):
            for work in start_messages(what, chunk, self._context, received, send):
                work.wait()
        for segment, rows in targets:
            rows.copy_(segment.in_buffer(received))

    def _kept(self, kept: Mapping[int, Mapping[str, Tensor]], index: int, key: str) -> Tensor:
        own = self._held[index]
        assert own is not None
        return kept[self._matrices[index].partition][key].narrow(0, own.partition_offset, own.numel)

    def _buffer(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=torch.float32, device=self._context.device)
