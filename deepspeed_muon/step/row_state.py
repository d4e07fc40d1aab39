"""The row state of a variant in a step: one number for each output of a matrix, where the matrix is orthogonalised.

The owner of a matrix stores the rows of all of it (:func:`row_fragments`), so that data-parallel ranks send nothing for
them. Only replicated matrices have their rows on every rank; one all-reduce copies them from the owners
after a step. The rows of a matrix that tensor parallelism cuts are stored by the owners of its shards, which send them
with the shards (:mod:`.tensor_parallel`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.logs import logger
from deepspeed_muon.plan.chunks import ExchangePlan
from deepspeed_muon.plan.layout import MatrixLayout, PartitionIndex, PlanIndex
from deepspeed_muon.plan.owners import Assignment
from deepspeed_muon.plan.placement import Fragment
from deepspeed_muon.step.step_set import Partition, StepContext
from deepspeed_muon.transport.ranks import all_reduce_tensor
from deepspeed_muon.variants import ROW_STATE
from deepspeed_muon.variants.variant import Variant


def row_fragments(assignment: Assignment) -> tuple[Fragment, ...]:
    """Return where the rows of each layout are stored: the numbers that a variant has for each output of a matrix.

    They are stored where they are used, at the owner of the layout; those of replicated matrices on every rank. Each
    rank has one vector for each partition. In it layouts that run in one batch follow each other, so that the rows of a
    batch are a view; replicated ones are in the order of the matrices, which no owner changes.

    Example: rank 1 owns a 4 x 3 and a 2 x 5 matrix of one partition. Their fragments are ``Fragment(1, 0, 0, 4)`` and
    ``Fragment(1, 0, 4, 2)``. All numbers are in outputs, not elements: the first one in the matrix, the first one in
    the vector, and how many.
    """
    matrices, owners = assignment.matrices, assignment.owners
    # 1. the first row of each slice in its matrix: the slices of a matrix follow each other in the plan
    first_rows: list[int] = []
    end_of: dict[int, int] = {}
    for matrix, number in zip(matrices, assignment.origin, strict=True):
        first_rows.append(end_of.get(number, 0))
        end_of[number] = first_rows[-1] + matrix.output_count
    # 2. the order in a vector: by batch, named for the first matrix in it
    batches: dict[Hashable, int] = {}

    def order(index: int) -> tuple[int, int]:
        matrix = matrices[index]
        # Matrices that are sent and matrices that are not are never in one chunk.
        batch = matrix.batch_key, matrix.placement.only_rank is None
        return (0 if matrix.placement.replicated else batches.setdefault(batch, index)), index

    # 3. the offset in the vector: one for each partition and owner, or for each partition of replicated matrices
    offsets: dict[tuple[int, int], int] = {}
    fragments: dict[int, Fragment] = {}
    for index in sorted(range(len(matrices)), key=order):
        matrix, owner = matrices[index], owners[index]
        vector = (matrix.partition, -1 if matrix.placement.replicated else owner)
        offset = offsets.get(vector, 0)
        fragments[index] = Fragment(owner, first_rows[index], offset, matrix.output_count)
        offsets[vector] = offset + matrix.output_count
    return tuple(fragments[index] for index in range(len(matrices)))


def remove_unused_rows(entry: dict[str, Any], variant: Variant) -> None:
    """Remove from the state of a partition the row state of other variants, which a state dict may have brought."""
    for key in ROW_STATE.keys() - {variant.state and variant.state.key}:
        entry.pop(key, None)


class RowStorage:
    """Where this rank stores the row state of the matrices of one plan: in a vector for each partition.

    Attributes:
        counts: Index of each partition with matrices to the rows that this rank stores.
        sent_bytes: Bytes that this rank sends in one step, by a ring all-reduce: 0 but at ZeRO 0.
    """

    def __init__(self, plan: ExchangePlan, fragments: Sequence[Fragment], context: StepContext) -> None:
        """Find the rows that this rank stores, by :func:`row_fragments`; nothing is sent."""
        self.counts = {matrix.partition: 0 for matrix in plan.matrices}
        self._matrices, self._context = plan.matrices, context
        self._local: list[tuple[PlanIndex, PartitionIndex, Fragment]] = []  # of each matrix here, its rows
        for index, (matrix, fragment) in enumerate(zip(plan.matrices, fragments, strict=True)):
            if matrix.placement.replicated or fragment.rank == plan.rank:
                self._local.append((PlanIndex(index), matrix.partition, fragment))
                self.counts[matrix.partition] += fragment.numel
        # Of replicated matrices, the rows that other ranks own.
        self._not_owned = [(index, f) for index, _, f in self._local if f.rank != plan.rank]
        ranks = context.step_set.world_size
        replicated = sum(f.numel for index, _, f in self._local if plan.matrices[index].placement.replicated)
        self.sent_bytes = replicated * torch.float32.itemsize * 2 * (ranks - 1) // ranks

    def vector_of(self, partition: Partition, entry: dict[str, Any]) -> Tensor:
        """Return the row state in the state of a partition, ``(rows,)``; create it if it is missing.

        Raises BindingError if it was saved with another layout.
        """
        row_state, rows = self._context.variant.state, self.counts.get(partition.index, 0)
        assert row_state is not None
        if row_state.key not in entry:
            # While momentum is zero no matrix has had a gradient, and missing row state is no loss.
            if entry["step"] > 1 and rows and entry["momentum_buffer"].any():
                logger.warning(
                    "deepspeed_muon: the state of partition %d has no %s after %d steps (saved with another variant?); "
                    "variant %r starts it anew",
                    partition.index,
                    row_state.key,
                    entry["step"] - 1,
                    self._context.variant.name,
                )
            entry[row_state.key] = torch.zeros(rows, dtype=torch.float32, device=partition.tensor.device)
        vector: Tensor = entry[row_state.key]
        partition.check_numel(vector, rows, row_state.label)
        return vector

    @contextlib.contextmanager
    def opened(
        self, vectors: Mapping[PartitionIndex, Tensor], settings: Sequence[tuple[float, ...]]
    ) -> Iterator[OwnedRows]:
        """Yield the rows for one step; those of offloaded partitions are copied to the device of the iteration.

        Must be called by all ranks of the step set's group. ``vectors`` are this rank's, by index of the partition, and
        are mutated; for ``settings`` see :attr:`.Rates.settings`.
        """
        context = self._context
        # 1. in fp32 on the device of the iteration; a vector that is both already is not copied
        device_vectors = {
            index: vector.to(context.device, torch.float32) for index, vector in vectors.items()
        }
        # 2. a view of each matrix's rows, (outputs,)
        rows = {
            index: device_vectors[partition].narrow(0, fragment.partition_offset, fragment.numel)
            for index, partition, fragment in self._local
        }
        yield OwnedRows(self._matrices, context.variant, settings, rows)
        # 3. replicated rows from their owners: the others add zeros
        if self.sent_bytes:
            for index, _ in self._not_owned:
                rows[index].zero_()
            joint = all_reduce_tensor(
                torch.cat([*device_vectors.values()]),
                context.step_set.group,
                purpose="row state of the variant",
            )
            context.counts.count_exchange(self.sent_bytes)
            lengths = [len(vector) for vector in device_vectors.values()]
            for vector, reduced in zip(device_vectors.values(), joint.split(lengths), strict=True):
                vector.copy_(reduced)
        # 4. back into optimizer.state
        for partition, vector in vectors.items():
            if device_vectors[partition] is not vector:
                vector.copy_(device_vectors[partition])


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """A variant's ``row_factors`` with the row state of the matrices, or shards of matrices, that this rank owns.

    Attributes:
        matrices: All matrices of the exchange plan.
        settings: The variant's settings for each matrix; see :attr:`.Rates.settings`.
        rows: Index of the matrix to one number for each row, one-dimensional fp32. :meth:`write` mutates them.
    """

    matrices: Sequence[MatrixLayout]
    variant: Variant
    settings: Sequence[tuple[float, ...]]
    rows: dict[PlanIndex, Tensor]

    def scale_rows(
        self,
        members: Sequence[tuple[PlanIndex, int]],
        blocks: Tensor,
        dtype: torch.dtype,
        *,
        anew: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return updates in ``dtype``, orthogonalised ``blocks`` with scaled rows, and the new state for :meth:`write`.

        ``members`` are matrix and number of each of the blocks, which all are transposed, or none. ``anew`` starts from
        the state of a first step instead of the stored one, which does not change.
        """
        assert self.variant.row_factors is not None
        # 1. state and settings of the blocks: (blocks, outputs), and (blocks, 1) for each setting
        state = self.stored(members)
        if anew:
            state = torch.zeros_like(state)
        settings = {
            setting.name: _on_device(
                tuple(self.settings[index][position] for index, _ in members), blocks.device
            )
            for position, setting in enumerate(self.variant.settings)
        }
        # 2. a factor for each row, (blocks, outputs), of blocks that have a row for each output
        first = self.matrices[members[0][0]]
        oriented = blocks.mT if first.transposed else blocks
        factors, state = self.variant.row_factors(oriented, state, settings)
        # 3. the updates, in the memory order of the blocks
        updates = torch.empty_like(oriented, dtype=dtype)
        torch.mul(oriented, factors.unsqueeze(-1), out=updates)
        return updates.mT if first.transposed else updates, state

    def stored(self, members: Sequence[tuple[PlanIndex, int]]) -> Tensor:
        """Return the stored state of some blocks, ``(blocks, outputs)``; not to be written to."""
        views = self._views(members)
        joint = _stacked_view(views)  # (blocks, outputs), or None where the vectors are not adjacent
        return torch.stack(views) if joint is None else joint

    def write(
        self, members: Sequence[tuple[PlanIndex, int]], new: Tensor, wrong: Tensor | None = None
    ) -> None:
        """Store the ``new`` state of some blocks, without waiting for the device.

        Blocks that are ``wrong``, ``(blocks,)`` bool on the device, keep their stored state.
        """
        views = self._views(members)
        joint = _stacked_view(views)
        if joint is not None and wrong is not None:  # the usual case takes one launch
            torch.where(wrong.unsqueeze(1), joint, new, out=joint)
            return
        if wrong is not None:
            new = torch.where(wrong.unsqueeze(1), torch.stack(views), new)
        torch._foreach_copy_(views, list(new.unbind()))

    def _views(self, members: Sequence[tuple[PlanIndex, int]]) -> list[Tensor]:
        """Return a view of the rows of each block."""
        # Example: a stored 6 x 4 matrix of two experts, each input x output (3 x 4) with a gate and an up half, has the
        # grid ((3, 3), (2, 2)). Its outputs are columns, so it has 4 numbers for each expert, 8 in all. Block 3, the up
        # half of the second expert, is row 1, column 1 of the grid: the numbers 6 and 7.
        views = []
        for index, number in members:
            matrix, rows = self.matrices[index], self.rows[index]
            if not matrix.is_tp_shard:  # a shard is a single block
                row_blocks, col_blocks = matrix.grid
                row, col = divmod(number, len(col_blocks))
                if matrix.transposed:
                    rows = rows.view(-1, matrix.cols)[row].narrow(0, sum(col_blocks[:col]), col_blocks[col])
                else:
                    rows = rows.view(matrix.rows, -1)[:, col].narrow(
                        0, sum(row_blocks[:row]), row_blocks[row]
                    )
            views.append(rows)
        return views


def _stacked_view(views: Sequence[Tensor]) -> Tensor | None:
    """Return vectors of one length that follow each other in memory as a view ``(views, length)``, else ``None``."""
    first, length = views[0], len(views[0])
    start, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for number, view in enumerate(views):
        follows = view.storage_offset() == start + number * length and view.is_contiguous()
        if not follows or view.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((len(views), length), (length, 1))


@functools.lru_cache(maxsize=256)
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as fp32 ``(values, 1)``; the same ones every step, so that the host need not wait for a copy."""
    return torch.tensor(values, dtype=torch.float64, device="cpu").to(device, torch.float32).unsqueeze(1)
