"""The status of every gradient: all zero, finite, or inf or NaN. Ranks exchange it before a step changes anything.

A parameter has a gradient in a step if any element of it is not zero on any rank. A step is skipped if any element is
inf or NaN on any rank. So one uint8 per parameter is max-reduced over the ranks, and beside it one that says whether
the previous step left the matrix without an update, which its owner finds out too late for the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from deepspeed_muon.errors import BindingError
from deepspeed_muon.ops.dispatch import largest_magnitudes
from deepspeed_muon.step.passes import COLUMNS
from deepspeed_muon.step.runner import StepRunner
from deepspeed_muon.transport.ranks import reduce_tensor

Gradients = Mapping[int, Sequence[Tensor]]
"""Partition index to this rank's gradient of it: flat tensors that are consecutive in the partition."""

# Status of a gradient: 0 all zero, 1 finite, 2 inf or NaN. torch.bucketize gives it for the largest magnitude by these
# upper bounds, since it takes NaN for larger than everything.
_NOT_FINITE = 2
_UPPER_BOUNDS = (0.0, torch.finfo(torch.float32).max)


@dataclass(frozen=True, slots=True)
class GradientReport:
    """What all ranks of a step set know about the gradients of a step.

    Attributes:
        active: Status of each parameter's gradient, matrices first; 0 if it is zero on all ranks.
        nonfinite: Names of the parameters whose gradient has an inf or NaN on some rank.
        failed: Names of the matrices that got no update in the previous step, because it was wrong in fp32 too.
    """

    active: Sequence[int]
    nonfinite: tuple[str, ...]
    failed: tuple[str, ...]


class GradientStatus:
    """Exchanges the status of the gradients of one step set.

    Attributes:
        groups: The process groups over which it is max-reduced, one after the other.
        exchanged: What the exchange of this step gave, on the CPU; ``None`` before it. ``(2, parameters)`` uint8: the
            status, and whether the previous step left the matrix without an update.
    """

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._step_set = step_set = runner.step_set
        self._device = runner.context.device
        self._fragments = step_set.local_fragments()
        self._names = [layout.name for layout in step_set.layouts]
        self._upper_bounds = torch.tensor(_UPPER_BOUNDS, device=self._device)
        self.exchanged: Tensor | None = None
        self.groups = [step_set.group] if step_set.world_size > 1 else []
        # A shard without a gradient must take part if other shards of its matrix have one, and so must the experts of a
        # stack that is divided between ranks: what a step does may not depend on where it is cut.
        self.groups += [group for group in (step_set.tensor_group, step_set.stack_group) if group is not None]
        # Numels of the gradient tensors for which the table was made; see _table_for.
        self._numels: list[list[int]] | None = None
        self._table = torch.empty(0, COLUMNS, dtype=torch.int64)
        self._parameter_of_row = torch.empty(0, dtype=torch.int64)

    @property
    def parameters(self) -> int:
        """The number of parameters of the step set."""
        return len(self._names)

    @property
    def is_nonfinite(self) -> bool:
        """Whether any gradient is inf or NaN on any rank, after the exchange."""
        assert self.exchanged is not None
        return bool((self.exchanged[0].numpy() == _NOT_FINITE).any())

    @property
    def failed(self) -> set[int]:
        """The numbers of the matrices that got no update in the previous step, after the exchange."""
        assert self.exchanged is not None
        return _flagged(self.exchanged[1].tolist())

    @staticmethod
    def exchange(statuses: Sequence[GradientStatus], grads: Gradients) -> Tensor:
        """Exchange the flags of several step sets of the same process groups in one message.

        Must be called by all ranks of the groups.

        Args:
            statuses: Of the step sets.
            grads: Partition index to its gradient; a missing one counts as zero.

        Returns:
            ``(2, parameters of all sets)`` uint8 on the device.
        """
        local = [status._local_flags(grads) for status in statuses]
        flags = torch.cat(local, dim=1) if len(local) > 1 else local[0]
        for group in statuses[0].groups if flags.numel() else ():
            flags = reduce_tensor(flags, group, what="exchange of gradient flags", how="max")
        return flags

    def report(self, grads: Mapping[int, Tensor]) -> GradientReport:
        """Return what all ranks know, and forget which matrices were left without an update.

        Must be called by all ranks of the group.

        Args:
            grads: Partition index to its gradient, flat and contiguous; a missing one counts as zero.
        """
        if self.exchanged is None:
            self.exchanged = self.exchange([self], {index: [grad] for index, grad in grads.items()}).cpu()
        exchanged, self.exchanged = self.exchanged, None
        status, left_out = exchanged.tolist()
        nonfinite: tuple[str, ...] = ()
        if _NOT_FINITE in status:
            nonfinite = tuple(
                name for name, value in zip(self._names, status, strict=True) if value == _NOT_FINITE
            )
        failed = tuple(self._runner.check.learn(_flagged(left_out)))
        if self._step_set.wider_group is not None:
            # Ranks with other experts or stages skip the same steps.
            local = torch.tensor([bool(nonfinite), bool(failed)], dtype=torch.uint8, device=self._device)
            group = self._step_set.wider_group
            anywhere = reduce_tensor(local, group, what="exchange of gradient flags", how="max").tolist()
            nonfinite = nonfinite or ("a parameter of other ranks",) * anywhere[0]
            failed = failed or ("a matrix of other ranks",) * anywhere[1]
        return GradientReport(status, nonfinite, failed)

    def _local_flags(self, grads: Gradients) -> Tensor:
        """Return this rank's flags, ``(2, parameters)`` uint8 on the device.

        On a CPU one call reads all gradients. On a GPU it is torch's multi-tensor norm, which takes 320 blocks of
        65,536 elements in a launch; a few small kernels follow it.
        """
        flags = torch.zeros((2, len(self._names)), dtype=torch.uint8, device=self._device)
        if left_out := self._runner.check.left_out:
            matrices = torch.tensor(
                [number for numbers, _ in left_out for number in numbers], device=self._device
            )
            wrong = torch.cat([verdicts.to(self._device) for _, verdicts in left_out])
            flags[1].scatter_reduce_(0, matrices, wrong.view(torch.uint8), "amax")
        tensors_of = [grads.get(partition.index, ()) for partition in self._step_set.partitions]
        table = self._table_for([[tensor.numel() for tensor in tensors] for tensors in tensors_of])
        if len(table):
            flat = [tensor for tensors in tensors_of for tensor in tensors]
            largest = largest_magnitudes(flat, table).to(self._device)  # (rows of the table,) fp32
            status = torch.bucketize(largest, self._upper_bounds, out_int32=True)
            flags[0].scatter_reduce_(0, self._parameter_of_row, status.to(torch.uint8), "amax")
        return flags

    def _table_for(self, numels: list[list[int]]) -> Tensor:
        """Return which elements of the gradient tensors are whose: a row for each fragment and tensor that it is in.

        Columns: tensor, offset in it, both once more, number of elements, number of the parameter.

        Args:
            numels: The numels of the gradient tensors of each partition.
        """
        if numels == self._numels:
            return self._table
        rows: list[tuple[int, ...]] = []
        tensors_before = 0
        for sizes, fragments in zip(numels, self._fragments, strict=True):
            starts = list(accumulate(sizes, initial=0))
            for parameter, fragment in fragments if sizes else ():
                start, stop = fragment.partition_offset, fragment.partition_offset + fragment.numel
                while start < stop:
                    tensor = bisect_right(starts, start) - 1
                    offset, end = start - starts[tensor], min(stop, starts[tensor + 1])
                    number = tensors_before + tensor
                    rows.append((number, offset, number, offset, end - start, parameter))
                    start = end
            tensors_before += len(sizes)
        self._numels, self._table = numels, torch.tensor(rows, dtype=torch.int64).view(-1, COLUMNS)
        self._parameter_of_row = self._table[:, -1].to(self._device)
        return self._table


def _flagged(flags: Sequence[int]) -> set[int]:
    """Return the numbers whose flag is set."""
    return {number for number, flag in enumerate(flags) if flag} if any(flags) else set()


def flat_gradients(runner: StepRunner, scale: Tensor | None) -> dict[int, Tensor]:
    """Return the flat, contiguous gradients of a step set by partition.

    Args:
        runner: The runner of the set.
        scale: The loss scale of a torch ``GradScaler``, by which the gradients are divided.

    Raises:
        BindingError: If a gradient is sparse.
    """
    grads = {}
    for partition in runner.step_set.partitions:
        grad = partition.tensor.grad
        if grad is not None:
            if grad.is_sparse:
                raise BindingError("sparse gradients are not supported; use sparse=False in the embedding")
            # Kernels need a contiguous gradient; that of a strided view need not be.
            grads[partition.index] = grad.reshape(-1).contiguous()
    if scale is not None:
        inverse = 1.0 / scale.double()
        grads = {index: grad * inverse.to(grad.device, grad.dtype) for index, grad in grads.items()}
    return grads
