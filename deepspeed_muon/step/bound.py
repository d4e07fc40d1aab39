"""All step sets of an optimizer, bound to the tensors that ZeRO hands over, and the flags of their gradients.

Before a step changes anything, the ranks tell each other which parameters have a gradient and whether all are finite.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import BindingError
from deepspeed_muon.ops.dispatch import largest_magnitudes
from deepspeed_muon.plan.placement import Floats
from deepspeed_muon.step.passes import COLUMNS
from deepspeed_muon.step.runner import StepResources, StepRunner
from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.transport.agreement import RankFacts, Scope
from deepspeed_muon.transport.all_to_all import overlap_fits
from deepspeed_muon.transport.ranks import reduce_tensor


@dataclass(frozen=True, slots=True)
class GradientReport:
    """What all ranks of a group know about this step's gradients.

    Attributes:
        active: Whether any rank has a non-zero gradient, 0 if not: flags of all matrices, then of all other parameters.
        nonfinite: Names of the parameters whose gradient holds an infinity or NaN on some rank.
        failed: Names of the matrices that got no update in the previous step, because it was wrong in fp32 too.
    """

    active: Sequence[int]
    nonfinite: tuple[str, ...]
    failed: tuple[str, ...]


# What is told of a parameter's gradient: 0 for nothing but zeros, 1 for a finite one, 2 for any other. As limits for
# torch.bucketize, which takes NaN for larger than all. The largest of what its fragments and ranks say holds for it.
_NOT_FINITE = 2
_LIMITS = (0.0, torch.finfo(torch.float32).max)

Gradients = Mapping[int, Sequence[Tensor]]
"""Partition index to a rank's gradient: flat tensors that follow each other in the partition."""


class GradientInspection:
    """Finds out, together with the group, which parameters have a gradient and whether all are finite.

    Attributes:
        groups: The process groups that exchange the flags, one after the other.
        rows: The flags of this step on the CPU once the ranks have told them, as of :meth:`_own_flags`.
    """

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._step_set = step_set = runner.step_set
        self._device = runner.context.device
        self._local = step_set.local_fragments()
        self._lengths: list[list[int]] | None = None
        self._table = torch.empty(0, COLUMNS, dtype=torch.int64)
        self._numbers = torch.empty(0, dtype=torch.int64)
        self._limits = torch.tensor(_LIMITS, device=self._device)
        self.rows: Tensor | None = None
        self._names = [layout.name for layout in step_set.layouts]
        self.groups = [step_set.group] if step_set.world_size > 1 else []
        # A shard without a gradient must take part if other shards of its matrix have one, and so must the experts of a
        # stack that lies on several ranks: what a step does may not depend on where it is cut.
        self.groups += [each for each in (step_set.tensor_group, step_set.stack_group) if each is not None]

    @staticmethod
    def exchange(inspections: Sequence[GradientInspection], grads: Gradients) -> Tensor:
        """Let the ranks tell each other their flags of several step sets of the same groups, in one message.

        Must be called by all ranks of the groups.

        Args:
            inspections: Of the step sets.
            grads: Partition index to its gradient; a missing one counts as zero.

        Returns:
            The flags on the device, those of all sets beside each other.
        """
        own = [each._own_flags(grads) for each in inspections]
        flags = torch.cat(own, dim=1) if len(own) > 1 else own[0]
        for group in inspections[0].groups if flags.numel() else ():
            flags = reduce_tensor(flags, group, purpose="exchange of gradient flags", how="max")
        return flags

    def report(self, grads: Mapping[int, Tensor]) -> GradientReport:
        """Return what all ranks know, and forget which matrices were left out.

        Must be called by all ranks of the group.

        Args:
            grads: Partition index to its gradient, flat and contiguous; a missing one counts as zero.
        """
        if self.rows is None:
            self.rows = self.exchange([self], {index: [grad] for index, grad in grads.items()}).cpu()
        rows, self.rows = self.rows, None
        states, left_out = rows.tolist()
        nonfinite: tuple[str, ...] = ()
        if _NOT_FINITE in states:
            nonfinite = tuple(self._names[n] for n, state in enumerate(states) if state == _NOT_FINITE)
        failed = tuple(self._runner.check.learn(_numbers_of(left_out)))
        if self._step_set.wider_group is not None:
            bad = torch.tensor([bool(nonfinite), bool(failed)], dtype=torch.uint8, device=self._device)
            group = self._step_set.wider_group
            others = reduce_tensor(bad, group, purpose="exchange of gradient flags", how="max").tolist()
            nonfinite = nonfinite or ("a parameter of other ranks",) * others[0]
            failed = failed or ("a matrix of other ranks",) * others[1]
        return GradientReport(states, nonfinite, failed)

    def _own_flags(self, grads: Gradients) -> Tensor:
        """Return uint8 flags, a column for each parameter: what its gradient is, and whether it was left out last.

        One call reads all gradients on a CPU. On a GPU that is torch's multi-tensor norm, which takes 320 blocks of
        65,536 elements a launch; a few small kernels follow it.
        """
        flags = torch.zeros((2, len(self._names)), dtype=torch.uint8, device=self._device)
        if left_out := self._runner.check.left_out:
            matrices = torch.tensor([n for indices, _ in left_out for n in indices], device=self._device)
            wrong = torch.cat([each.to(self._device) for _, each in left_out])
            flags[1].scatter_reduce_(0, matrices, wrong.view(torch.uint8), "amax")
        pieces = [grads.get(partition.index, ()) for partition in self._step_set.partitions]
        table = self._table_of([[each.numel() for each in own] for own in pieces])
        if len(table):
            largest = largest_magnitudes([each for own in pieces for each in own], table).to(self._device)
            states = torch.bucketize(largest, self._limits, out_int32=True)
            flags[0].scatter_reduce_(0, self._numbers, states.to(torch.uint8), "amax")
        return flags

    def _table_of(self, lengths: list[list[int]]) -> Tensor:
        """Return where the parameters' fragments lie in tensors of some lengths for each partition; made once for each.

        The last column is the number of the parameter.
        """
        if lengths == self._lengths:
            return self._table
        rows: list[tuple[int, ...]] = []
        first = 0
        for own, local in zip(lengths, self._local, strict=True):
            starts = list(accumulate(own, initial=0))
            for number, fragment in local if own else ():
                start, stop = fragment.partition_offset, fragment.partition_offset + fragment.numel
                while start < stop:
                    piece = bisect_right(starts, start) - 1
                    place, end = start - starts[piece], min(stop, starts[piece + 1])
                    rows.append((first + piece, place, first + piece, place, end - start, number))
                    start = end
            first += len(own)
        self._lengths, self._table = lengths, torch.tensor(rows, dtype=torch.int64).view(-1, COLUMNS)
        self._numbers = self._table[:, -1].to(self._device)
        return self._table


class BoundSteps:
    """The runners of an optimizer's step sets, in an order that all ranks share.

    Attributes:
        runners: One for each step set.
        inspections: What finds out about the gradients of each.
        process_groups: The process groups that the step sets communicate in.
    """

    def __init__(
        self,
        step_sets: Sequence[StepSet],
        config: MuonConfig,
        resources: StepResources,
    ) -> None:
        """Make the exchange plans; nothing is sent.

        Args:
            step_sets: What each call of ``step()`` will update, from a reader.
            config: The optimizer's settings.
            resources: Shared by the sets.
        """
        self._config = config
        self._resources = resources
        loads: dict[Scope, Floats] = {}
        self.runners: list[StepRunner] = []
        for number, step_set in enumerate(step_sets):
            load = loads.setdefault(Scope.of(step_set.group), np.zeros(step_set.world_size))
            self.runners.append(StepRunner(step_set, config, resources, load=load, number=number))
        self.inspections = {runner: GradientInspection(runner) for runner in self.runners}
        found = (
            group
            for each in step_sets
            for group in (each.wider_group, each.tensor_group, each.stack_group, each.group)
        )
        self.process_groups = [group for group in dict.fromkeys(found) if group is not None]
        self._dtypes = {
            runner: [partition.tensor.dtype for partition in runner.step_set.partitions]
            for runner in self.runners
        }
        self._runner_of = {
            id(partition.tensor): runner
            for runner in self.runners
            for partition in runner.step_set.partitions
        }

    def take_over(self, before: BoundSteps) -> None:
        """Take over which matrices got no update in the last step, which the next one tells the other ranks."""
        position_of = {
            matrix.name: (runner, number)
            for runner in self.runners
            for number, matrix in enumerate(runner.step_set.matrices)
        }
        for runner in before.runners:
            names = [matrix.name for matrix in runner.step_set.matrices]
            for numbers, flags in runner.check.left_out:
                for number, flag in zip(numbers, flags.split(1), strict=True):
                    # Frozen since, it has no next step.
                    if (matrix := position_of.get(names[number])) is not None:
                        runner_now, position = matrix
                        runner_now.check.left_out.append(([position], flag))

    def current(
        self, param_groups: Sequence[dict[str, Any]], *, left_out: Sequence[Tensor] = ()
    ) -> list[tuple[StepRunner, dict[int, dict[str, Any]]]]:
        """Return the step sets of one call of ``step()``, each with the param group of every partition.

        Args:
            param_groups: The optimizer's; ZeRO leaves only what the call shall update in them.
            left_out: Tensors of the groups that no step set has.

        Raises:
            BindingError: If they hold an unknown tensor, or only a part of a set, or if a tensor was converted.
        """
        group_of: dict[int, dict[str, Any]] = {
            id(p): group for group in param_groups for p in group["params"]
        }
        unknown = group_of.keys() - self._runner_of.keys() - {id(param) for param in left_out}
        if unknown:
            shapes = [tuple(p.shape) for group in param_groups for p in group["params"] if id(p) in unknown]
            raise BindingError(
                f"ZeRO handed over tensors of shapes {shapes} that were not in its groups when the optimizer was "
                f"bound; were the optimizer's tensors replaced after deepspeed.initialize?"
            )
        current = []
        for runner in self.runners:
            partitions = runner.step_set.partitions
            present = [partition for partition in partitions if id(partition.tensor) in group_of]
            if not present:
                continue
            if len(present) < len(partitions):
                raise BindingError(
                    f"ZeRO handed over {len(present)} of {len(partitions)} partitions that belong to one step"
                )
            for partition, dtype in zip(partitions, self._dtypes[runner], strict=True):
                if partition.tensor.dtype != dtype:
                    raise BindingError(
                        f"a tensor of shape {list(partition.tensor.shape)} was {dtype} in deepspeed.initialize and is "
                        f"{partition.tensor.dtype} now: convert the model before deepspeed.initialize, not after it"
                    )
            current.append((runner, {p.index: group_of[id(p.tensor)] for p in partitions}))
        return current

    def exchange_flags(self, grads: Gradients, norms: Sequence[Tensor]) -> list[Tensor]:
        """Let the ranks tell each other the gradient flags of all step sets, one message for each process group.

        The host waits for the device once. Must be called by all ranks of the engine, before the calls of ``step()``
        that update the sets.

        Args:
            grads: Partition index to this rank's gradient; a missing one counts as zero.
            norms: What else shall be read from the device at once.

        Returns:
            ``norms`` on the CPU.
        """
        together: dict[tuple[dist.ProcessGroup | None, ...], list[GradientInspection]] = {}
        for each in self.inspections.values():
            together.setdefault(tuple(each.groups), []).append(each)
        flags = [GradientInspection.exchange(each, grads) for each in together.values()]
        on_cpu = _read_together([*norms, *flags])
        for inspections, rows in zip(together.values(), on_cpu[len(norms) :], strict=True):
            numbers = [len(each._names) for each in inspections]
            for each, part in zip(inspections, rows.split(numbers, dim=1), strict=True):
                each.rows = part
        return on_cpu[: len(norms)]

    def found_nonfinite(self, group: dist.ProcessGroup) -> bool | None:
        """Return whether any gradient is not finite, ``None`` if the ranks of ``group`` were not told of all.

        They are after :meth:`exchange_flags`, if all step sets belong to the ranks of ``group``.
        """
        # At stage 3 ZeRO's sub-groups have another group object than its wrapper, of the same ranks.
        ranks_of = dist.get_process_group_ranks
        others = {runner.step_set.group for runner in self.runners} - {group}
        rows = [each.rows for each in self.inspections.values() if each.rows is not None]
        if len(rows) < len(self.runners) or any(ranks_of(each) != ranks_of(group) for each in others):
            return None
        return any(bool((each[0].numpy() == _NOT_FINITE).any()) for each in rows)

    def take_failed(self) -> list[str]:
        """Return the names of the matrices that got no update in the last step because it was wrong in fp32 too.

        They are known after :meth:`exchange_flags`. If there are any, all are forgotten, as no step will hear of them.
        """
        rows = ((runner, each.rows) for runner, each in self.inspections.items())
        told = {runner: _numbers_of(own[1].tolist()) for runner, own in rows if own is not None}
        failed = [name for runner, numbers in told.items() for name in runner.check.failed(numbers)]
        for runner, numbers in told.items() if failed else ():
            runner.check.learn(numbers)
        return failed

    def forget_flags(self) -> None:
        """Forget what :meth:`exchange_flags` told, at the end of a step."""
        for each in self.inspections.values():
            each.rows = None

    def facts(self) -> RankFacts:
        """Return what the ranks compare of their plans."""
        facts = RankFacts()
        shared = [Scope.of(runner.step_set.group) for runner in self.runners]
        groups = [runner.step_set.wider_group for runner in self.runners]
        wider = [None if group is None else Scope.of(group) for group in groups]
        overlap = self._resources.overlap
        for number, (runner, ranks) in enumerate(zip(self.runners, shared, strict=True)):
            step_set, plan = runner.step_set, runner.plan
            # In the order of the flags, which the ranks match by position.
            layouts = ", ".join(f"{layout.name} ({layout.numel})" for layout in step_set.layouts)
            alike = [n for n, each in enumerate(shared) if each == ranks]
            facts.record(f"step sets of ranks {ranks.name}", alike, ranks)
            facts.record(f"plan of step set {number}", plan.digest(), ranks)
            # It decides about the order of the all-to-alls.
            facts.record(f"overlap in step set {number}", overlap, ranks)
            facts.record(f"parameters of step set {number}", layouts, ranks)
            if (skips := wider[number]) is not None:
                # The wider group exchanges flags once for each of these sets, in order.
                same = [n for n, each in enumerate(wider) if each == skips]
                facts.record(f"step sets that ranks {skips.name} skip together", same, skips)
            if step_set.stack_group is not None:
                # These ranks exchange flags too, by position.
                stacks = Scope.of(step_set.stack_group)
                facts.record(f"stacks of experts in step set {number}", layouts, stacks)
            if step_set.tensor_group is not None:
                # Tensor-parallel ranks call collectives in the order of the plan, and compute by the settings.
                across = Scope.of(step_set.tensor_group)
                shards = [matrix.shards for matrix in step_set.matrices]
                facts.record(f"plan of step set {number}", (plan.digest(), shards, overlap), across)
                # Shards of AdamW's parameters may be unequal.
                names = [layout.name for layout in step_set.layouts]
                fact = (
                    f"parameters of step set {number} (at ZeRO 3 one sub-group must hold all: sub_group_size)"
                )
                facts.record(fact, names, across)
                own = self._config.model_dump_json()
                facts.record(f"optimizer.params for step set {number}", own, across)
        return facts


def _numbers_of(flags: Sequence[int]) -> set[int]:
    """Return the numbers of the parameters whose flag is set."""
    return {number for number, flag in enumerate(flags) if flag} if any(flags) else set()


def _read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one device on the CPU, copied as one; wider types must come first, for alignment."""
    raw = torch.cat([each.reshape(-1).view(torch.uint8) for each in tensors]).cpu()
    pieces = raw.split([each.nbytes for each in tensors])
    return [piece.view(each.dtype).view(each.shape) for piece, each in zip(pieces, tensors, strict=True)]


def overlaps(step_sets: Sequence[StepSet], config: MuonConfig) -> bool:
    """Return whether chunks are exchanged while others are orthogonalised: the same on all ranks of a group."""
    return config.exchange_overlap and all(
        overlap_fits(
            each.matrices,
            config.wire_format.bytes_per_element(config.resolved_wire_dtype(each.model_dtype).itemsize),
        )
        for each in step_sets
    )


def flat_gradients(runner: StepRunner, scale: Tensor | None) -> Mapping[int, Tensor]:
    """Return the flat gradients of a step set, by partition.

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
