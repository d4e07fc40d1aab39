"""Which gradients are zero on all ranks or not finite on any: what all ranks must know before a step changes anything.

The *flags* of a parameter are two bytes: the *status* of its gradient (below), and whether the previous step left its
update out (:mod:`.check`). They are max-reduced over the ranks that update it together, once for all step sets of an
optimizer, and the host waits for the device only there (:meth:`GradientFlags.exchange`). A parameter whose status is
not 0 is *active*: the step updates it.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.ops.torch_operators import Column, largest_magnitudes
from deepspeed_muon.plan.layout import PartitionIndex, SetIndex
from deepspeed_muon.step.runner import StepRunner
from deepspeed_muon.transport.ranks import all_reduce_tensor

_PURPOSE = "exchange of gradient flags"

# Gradient status, max-reduced over fragments and ranks: 0 all zero, 1 finite, 2 inf or NaN. The limits are for
# torch.bucketize, which sorts NaN above all numbers.
_NOT_FINITE = 2
_REFUSED = 3  # of all parameters, where a rank refuses the step (GradientFlags.refusal)
_STATUS_LIMITS = (0.0, torch.finfo(torch.float32).max)

Gradients = Mapping[PartitionIndex, Sequence[Tensor]]
"""Partition index to a rank's gradient: flat tensors that follow each other in the partition."""


@dataclass(frozen=True, slots=True)
class GradientReport:
    """What all ranks of a group know about this step's gradients.

    Attributes:
        active: Whether any rank has a non-zero gradient, for each parameter, matrices first.
        nonfinite: Names of the parameters whose gradient holds an infinity or NaN on some rank.
        unrecoverable: Names of the matrices whose update in the previous step was unrecoverable (:mod:`.check`).
    """

    active: Sequence[bool]
    nonfinite: tuple[str, ...]
    unrecoverable: tuple[str, ...]


class GradientFlags(dict[StepRunner, "SetFlags"]):
    """The flags of all step sets of an optimizer, by the runner of the set, in an order that all ranks share.

    Attributes:
        refusal: Why this rank refuses the step; all ranks raise in :meth:`exchange`.
    """

    refusal: ConfigError | None = None

    def exchange(
        self, grads: Gradients, norms: Sequence[Tensor] = (), runners: Sequence[StepRunner] | None = None
    ) -> list[Tensor]:
        """Set the flags of the runners' step sets (default: all), and return ``norms`` on the CPU.

        Must be called by all ranks of the engine, before the calls of ``step()`` that update the sets. One all-reduce
        for each group of each set of process groups; the host waits for the device once, for the flags and ``norms``.
        A missing gradient counts as zero.
        """
        # 1. Over the ranks that update a parameter together.
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[SetFlags]] = {}
        for runner in self if runners is None else runners:
            by_groups.setdefault(self[runner].groups, []).append(self[runner])
        reduced: dict[SetFlags, Tensor] = {}
        for members in by_groups.values():
            reduced |= self._reduce(members, grads)
        # 2. Over the ranks that must skip the same steps; none with data parallelism alone.
        wider = self._reduce_further(reduced)
        # 3. To the CPU.
        on_cpu = iter(_read_together([*norms, *reduced.values(), *wider.values()]))
        norms = [next(on_cpu) for _ in norms]
        is_refused = False
        for set_flags in reduced:
            set_flags.flags = next(on_cpu)
            is_refused |= _REFUSED in set_flags.flags[0].tolist()
        for set_flags in wider:
            largest, unrecoverable = next(on_cpu).tolist()
            set_flags.wider_flags = largest == _NOT_FINITE, bool(unrecoverable)
            is_refused |= largest == _REFUSED
        if is_refused:
            refusal, self.refusal = self.refusal, None
            self.forget()
            raise refusal or ConfigError("another rank refuses a setting in its param groups, and says which")
        return norms

    def _reduce(self, members: Sequence[SetFlags], grads: Gradients) -> dict[SetFlags, Tensor]:
        """Return the flags ``(2, parameters)`` of step sets of the same groups, reduced in one message."""
        local = [set_flags.local(grads).view(-1) for set_flags in members]
        flags = torch.cat(local) if len(local) > 1 else local[0]
        if self.refusal is not None:
            flags.fill_(_REFUSED)
        for group in members[0].groups if flags.numel() else ():
            flags = all_reduce_tensor(flags, group, purpose=_PURPOSE, how="max")
        pairs = zip(members, flags.split([len(vector) for vector in local]), strict=True)
        return {set_flags: vector.view(2, -1) for set_flags, vector in pairs}

    @staticmethod
    def _reduce_further(reduced: Mapping[SetFlags, Tensor]) -> dict[SetFlags, Tensor]:
        """Reduce over ranks with other experts or other stages of a pipeline, whose parameters are different ones.

        Returns :meth:`SetFlags.worst` for each step set that has such ranks.
        """
        wider = {
            set_flags: set_flags.worst(flags)
            for set_flags, flags in reduced.items()
            if set_flags.wider_group is not None or set_flags.stage_group is not None
        }
        # Over other experts: in one message the step sets of one group.
        for group in dict.fromkeys(set_flags.wider_group for set_flags in wider):
            if group is not None:
                members = [set_flags for set_flags in wider if set_flags.wider_group is group]
                flags = torch.cat([wider[set_flags] for set_flags in members])
                flags = all_reduce_tensor(flags, group, purpose=_PURPOSE, how="max")
                wider.update(zip(members, flags.view(-1, 2), strict=True))
        # Over the stages, which may have different step sets: two flags of all sets.
        for stage_group in {set_flags.stage_group for set_flags in wider} - {None}:
            flags = torch.stack(list(wider.values())).amax(0)
            flags = all_reduce_tensor(flags, stage_group, purpose=_PURPOSE, how="max")
            wider = dict.fromkeys(wider, flags)
        return wider

    def any_nonfinite(self, group: dist.ProcessGroup) -> bool | None:
        """Return whether any gradient is inf or NaN on a rank of ``group``, or ``None`` if the flags do not say so.

        They do after :meth:`exchange`, if every step set is exchanged over exactly the ranks of ``group``.
        """
        # At ZeRO 3 the sub-groups have a different group object than ZeRO's optimizer, with the same ranks.
        ranks_of = dist.get_process_group_ranks
        set_groups = {runner.step_set.group for runner in self} - {group}
        if any(ranks_of(set_group) != ranks_of(group) for set_group in set_groups):
            return None  # the flags say less, or more, than what the caller asks for
        all_flags = [set_flags.flags for set_flags in self.values()]
        if any(flags is None for flags in all_flags):
            return None
        return any(bool((flags[0].numpy() == _NOT_FINITE).any()) for flags in all_flags if flags is not None)

    def take_unrecoverable(self) -> list[str]:
        """Return the names of the matrices whose update in the previous step was unrecoverable (:mod:`.check`).

        Call it after :meth:`exchange`. If there are such matrices, all that was left out is acknowledged, since no step
        follows that would do so.
        """
        left_out = {
            runner: _flagged(set_flags.flags[1].tolist())
            for runner, set_flags in self.items()
            if set_flags.flags is not None
        }
        names = [name for runner, indices in left_out.items() for name in runner.check.unrecoverable(indices)]
        for runner, indices in left_out.items() if names else ():
            runner.check.acknowledge(indices)
        return names

    def forget(self) -> None:
        """Drop the flags of :meth:`exchange`, at the end of a step."""
        for set_flags in self.values():
            set_flags.flags, set_flags.wider_flags = None, (False, False)


class SetFlags:
    """The flags of one step set's parameters.

    Attributes:
        names: Names of the parameters, matrices first.
        groups: The process groups over which the flags are reduced, one after the other.
        flags: The reduced flags of this step on the CPU, ``(2, parameters)`` uint8; ``None`` until they are reduced.
        wider_group, stage_group: See :class:`.StepSet`.
        wider_flags: Whether on some rank of them a gradient is not finite, and whether an update was unrecoverable.
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

    def worst(self, flags: Tensor) -> Tensor:
        """Return the largest status of a gradient, and whether any update was unrecoverable: ``(2,)`` uint8.

        ``flags`` are the reduced ones of this step set, on the device.
        """
        mask = self._check.unrecoverable_mask(flags.shape[1], flags.device)
        is_unrecoverable = (flags[1] * mask).any()
        largest = flags[0].amax() if flags.shape[1] else torch.zeros_like(is_unrecoverable)
        return torch.stack((largest.to(torch.uint8), is_unrecoverable.to(torch.uint8)))

    def report(self) -> GradientReport:
        """Return what all ranks know of this step, and pass :attr:`.StepRunner.check` the matrices that were left out.

        Call it after :meth:`GradientFlags.exchange`, whose flags it drops; nothing is sent.
        """
        assert self.flags is not None
        (statuses, left_out), (is_nonfinite, is_unrecoverable) = self.flags.tolist(), self.wider_flags
        self.flags, self.wider_flags = None, (False, False)
        self._check.recorder.record_gradients(self.names, statuses)
        nonfinite: tuple[str, ...] = ()
        if _NOT_FINITE in statuses:
            pairs = zip(self.names, statuses, strict=True)
            nonfinite = tuple(name for name, status in pairs if status == _NOT_FINITE)
        unrecoverable = tuple(self._check.acknowledge(_flagged(left_out)))
        nonfinite = nonfinite or ("a parameter of other ranks",) * is_nonfinite
        unrecoverable = unrecoverable or ("a matrix of other ranks",) * is_unrecoverable
        return GradientReport([status > 0 for status in statuses], nonfinite, unrecoverable)

    def local(self, grads: Gradients) -> Tensor:
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
            wrong = torch.cat([flag.to(self._device) for _, flag in left_out])
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


def _flagged(flags: Sequence[int]) -> set[SetIndex]:
    """Return the parameters whose flag is set."""
    return {SetIndex(index) for index, flag in enumerate(flags) if flag} if any(flags) else set()


def _read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one device on the CPU, copied as one; wider types must come first, for alignment."""
    in_bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    raw = (torch.cat(in_bytes) if len(in_bytes) > 1 else in_bytes[0]).cpu()  # the only wait for the device
    copies = raw.split([tensor.nbytes for tensor in tensors])
    return [copy.view(tensor.dtype).view(tensor.shape) for copy, tensor in zip(copies, tensors, strict=True)]
