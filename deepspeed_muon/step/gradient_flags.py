"""Which gradients are zero on all ranks or not finite on any: what all ranks must know before a step changes anything.

The *flags* of a parameter are two bytes: the *status* of its gradient (below), and whether the previous step left its
update out (:mod:`.check`). They are max-reduced over the ranks that update it together, once for all step sets of an
optimizer, and the host waits for the device only there (:meth:`.BoundSteps.exchange_flags`). A parameter whose status
is not 0 is *active*: the step updates it.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from deepspeed_muon.ops.torch_operators import Column, largest_magnitudes
from deepspeed_muon.plan.layout import PartitionIndex, SetIndex
from deepspeed_muon.step.runner import StepRunner
from deepspeed_muon.transport.ranks import all_reduce_tensor

FLAGS_PURPOSE = "exchange of gradient flags"

# Gradient status, max-reduced over fragments and ranks: 0 all zero, 1 finite, 2 inf or NaN. The limits are for
# torch.bucketize, which sorts NaN above all numbers.
NOT_FINITE = 2
REFUSED = 3  # some rank refuses the step
_STATUS_LIMITS = (0.0, torch.finfo(torch.float32).max)

Gradients = Mapping[PartitionIndex, Sequence[Tensor]]
"""Partition index to a rank's gradient: flat tensors that follow each other in the partition."""


@dataclass(frozen=True, slots=True)
class GradientReport:
    """What all ranks of a group know about this step's gradients.

    Attributes:
        active: Whether any rank has a non-zero gradient, for each parameter, matrices first.
        nonfinite: Names of the parameters whose gradient holds an infinity or NaN on some rank.
        failed: Names of the matrices that got no update in the previous step, because it was wrong in fp32 too.
    """

    active: Sequence[bool]
    nonfinite: tuple[str, ...]
    failed: tuple[str, ...]


class GradientFlags:
    """The flags of one step set's parameters.

    Attributes:
        names: Names of the parameters, matrices first.
        groups: The process groups over which the flags are reduced, one after the other.
        flags: The reduced flags of this step on the CPU, ``(2, parameters)`` uint8; ``None`` until they are reduced.
        wider_group, stage_group: See :class:`.StepSet`.
        wider_flags: Whether on some rank of them a gradient is not finite, and whether a matrix got no update.
    """

    def __init__(self, runner: StepRunner) -> None:
        step_set = runner.step_set
        self._check, self._step_set, self._device = runner.check, step_set, runner.context.device
        self._local_fragments = step_set.local_fragments()
        self._status_limits = torch.tensor(_STATUS_LIMITS, dtype=torch.float32, device=self._device)
        # The gradients have the same lengths in almost every step.
        self._table_of = functools.lru_cache(maxsize=1)(self._make_table)
        self.names = [layout.name for layout in step_set.layouts]
        self.flags: Tensor | None = None
        self.wider_group, self.stage_group = step_set.wider_group, step_set.stage_group
        self.wider_flags = (False, False)
        self._positions = functools.lru_cache(maxsize=64)(
            functools.partial(torch.tensor, device=self._device)
        )
        group = step_set.group if step_set.world_size > 1 else None
        # A shard without a gradient must take part if other shards of its matrix have one, and so must the experts of a
        # stack that is stored on several ranks: what a step does may not depend on where ZeRO or a parallelism cuts.
        groups = group, step_set.tensor_group, step_set.stack_group
        self.groups = tuple(group for group in groups if group is not None)

    @staticmethod
    def reduce(
        members: Sequence[GradientFlags], grads: Gradients, *, refused: bool = False
    ) -> dict[GradientFlags, Tensor]:
        """Return the flags ``(2, parameters)`` of step sets of the same groups, reduced in one message.

        Must be called by all ranks of the groups. A missing gradient counts as zero. This rank may have ``refused`` the
        step.
        """
        local = [flags_of_set._local_flags(grads).view(-1) for flags_of_set in members]
        flags = torch.cat(local) if len(local) > 1 else local[0]
        if refused:
            flags.fill_(REFUSED)
        for group in members[0].groups if flags.numel() else ():
            flags = all_reduce_tensor(flags, group, purpose=FLAGS_PURPOSE, how="max")
        pairs = zip(members, flags.split([len(vector) for vector in local]), strict=True)
        return {flags_of_set: vector.view(2, len(flags_of_set.names)) for flags_of_set, vector in pairs}

    def any_wrong(self, flags: Tensor) -> Tensor:
        """Return the largest status of a gradient, and whether any matrix was wrong in fp32 too: ``(2,)`` uint8.

        ``flags`` are the reduced ones of this step set, on the device.
        """
        failed = flags[1] * self._check.failing(flags.shape[1], flags.device)  # (parameters,) uint8
        largest = flags[0].amax() if flags.shape[1] else torch.zeros_like(failed.any())
        return torch.stack((largest.to(torch.uint8), failed.any().to(torch.uint8)))

    def report(self) -> GradientReport:
        """Return what all ranks know of this step, and pass :attr:`.StepRunner.check` the matrices that were left out.

        Call it after :meth:`.BoundSteps.exchange_flags`, whose flags it drops; nothing is sent.
        """
        assert self.flags is not None
        (statuses, left_out), (is_nonfinite, is_failed) = self.flags.tolist(), self.wider_flags
        self.flags, self.wider_flags = None, (False, False)
        self._check.recorder.record_gradients(self.names, statuses)
        nonfinite: tuple[str, ...] = ()
        if NOT_FINITE in statuses:
            nonfinite = tuple(
                n for n, status in zip(self.names, statuses, strict=True) if status == NOT_FINITE
            )
        failed = tuple(self._check.read_verdicts(flagged(left_out)))
        nonfinite = nonfinite or ("a parameter of other ranks",) * is_nonfinite
        failed = failed or ("a matrix of other ranks",) * is_failed
        return GradientReport([status > 0 for status in statuses], nonfinite, failed)

    def _local_flags(self, grads: Gradients) -> Tensor:
        """Return this rank's flags, ``(2, parameters)`` uint8 on the device.

        One call reads all gradients. On a GPU it is torch's multi-tensor norm, which takes 320 blocks of 65,536
        elements a launch; a few small kernels follow it.
        """
        flags = torch.zeros((2, len(self.names)), dtype=torch.uint8, device=self._device)
        if left_out := self._check.left_out:
            # Almost always the same matrices as in the step before: the host would wait for a copy of their positions.
            matrices = self._positions(
                tuple(self._check.origin[index] for indices, _ in left_out for index in indices)
            )
            wrong = torch.cat([verdicts.to(self._device) for _, verdicts in left_out])
            flags[1].scatter_reduce_(0, matrices, wrong.view(torch.uint8), "amax")
        tensors = [grads.get(partition.index, ()) for partition in self._step_set.partitions]
        table, parameter_of_row = self._table_of(tuple(tuple(map(Tensor.numel, flat)) for flat in tensors))
        if len(table):
            # (fragments,) fp32 to a status, then the largest status of the fragments of each parameter.
            largest = largest_magnitudes([tensor for flat in tensors for tensor in flat], table)
            status = torch.bucketize(largest.to(self._device), self._status_limits, out_int32=True)
            flags[0].scatter_reduce_(0, parameter_of_row, status.to(torch.uint8), "amax")
        return flags

    def _make_table(self, lengths: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
        """Return the table of the fragments (:class:`.Column`) in gradients of some lengths, and their parameters.

        The lengths are those of the tensors of which the gradient of each partition consists.
        """
        rows: list[tuple[int, ...]] = []
        first_tensor = 0
        for numels, local_fragments in zip(lengths, self._local_fragments, strict=True):
            starts = list(accumulate(numels, initial=0))
            for number, fragment in local_fragments if numels else ():
                start, stop = fragment.partition_offset, fragment.partition_offset + fragment.numel
                # A fragment may reach over several tensors. Example: tensors of 6 and 4 elements, a fragment [4, 9):
                # elements 4 and 5 of the first one, elements 0 to 2 of the second one.
                while start < stop:
                    tensor = bisect_right(starts, start) - 1
                    offset, end = start - starts[tensor], min(stop, starts[tensor + 1])
                    # The pass reads one list of tensors, which is partition and buffer; the matrix is any parameter.
                    source = first_tensor + tensor
                    rows.append((source, offset, source, offset, end - start, number))
                    start = end
            first_tensor += len(numels)
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, len(Column))
        return table, table[:, Column.MATRIX].contiguous().to(self._device)


def flagged(flags: Sequence[int]) -> set[SetIndex]:
    """Return the parameters whose flag is set."""
    return {SetIndex(index) for index, flag in enumerate(flags) if flag} if any(flags) else set()


def read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one device on the CPU, copied as one; wider types must come first, for alignment."""
    in_bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    raw = (torch.cat(in_bytes) if len(in_bytes) > 1 else in_bytes[0]).cpu()  # the only wait for the device
    copies = raw.split([tensor.nbytes for tensor in tensors])
    return [copy.view(tensor.dtype).view(tensor.shape) for copy, tensor in zip(copies, tensors, strict=True)]
