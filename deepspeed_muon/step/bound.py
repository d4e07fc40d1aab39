"""All step sets of an optimizer, bound to the tensors that ``step()`` receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.config.settings import GroupSettings, MuonConfig
from deepspeed_muon.errors import BindingError
from deepspeed_muon.plan.placement import Floats
from deepspeed_muon.step.gradient_status import Gradients, GradientStatus
from deepspeed_muon.step.runner import StepResources, StepRunner
from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.transport.agreement import RankFacts, Scope
from deepspeed_muon.transport.exchange import overlap_fits

GroupOfPartition: TypeAlias = dict[int, GroupSettings]
"""Partition index to the param group with its rates."""


class BoundSteps:
    """The runners of an optimizer's step sets, in an order that all ranks share.

    Attributes:
        runners: One for each step set.
        statuses: What exchanges the gradients' status of each set.
        process_groups: The process groups over which the step sets communicate.
    """

    def __init__(self, step_sets: Sequence[StepSet], config: MuonConfig, resources: StepResources) -> None:
        """Make the exchange plans; nothing is sent.

        Args:
            step_sets: What each call of ``step()`` will update.
            config: The optimizer's settings.
            resources: Shared by the sets.
        """
        self._config = config
        self._overlap = resources.overlap
        # Owners are chosen set after set: a rank with much work in one gets less in the next.
        loads: dict[Scope, Floats] = {}  # (ranks of the scope,) fp64
        self.runners: list[StepRunner] = []
        for number, step_set in enumerate(step_sets):
            load = loads.setdefault(Scope.of(step_set.group), np.zeros(step_set.world_size))
            self.runners.append(StepRunner(step_set, config, resources, load=load, number=number))
        self.statuses = {runner: GradientStatus(runner) for runner in self.runners}
        groups = (
            group
            for step_set in step_sets
            for group in (step_set.wider_group, step_set.tensor_group, step_set.stack_group, step_set.group)
        )
        self.process_groups = [group for group in dict.fromkeys(groups) if group is not None]
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
        """Take over which matrices the last step left without an update; the next step reports them to all ranks.

        Args:
            before: What the optimizer was bound to until now.
        """
        position_of = {
            matrix.name: (runner, number)
            for runner in self.runners
            for number, matrix in enumerate(runner.step_set.matrices)
        }
        for runner in before.runners:
            names = [matrix.name for matrix in runner.step_set.matrices]
            for numbers, flags in runner.check.left_out:
                for number, flag in zip(numbers, flags.split(1), strict=True):
                    # A matrix that was frozen since has no next step.
                    if (position := position_of.get(names[number])) is not None:
                        runner_now, number_now = position
                        runner_now.check.left_out.append(([number_now], flag))

    def current(
        self, param_groups: Sequence[GroupSettings], *, left_out: Sequence[Tensor] = ()
    ) -> list[tuple[StepRunner, GroupOfPartition]]:
        """Return the step sets of one call of ``step()``, with the param group of every partition.

        Args:
            param_groups: The optimizer's. ZeRO leaves only what the call shall update in them.
            left_out: Tensors of the groups that are in no step set.

        Raises:
            BindingError: If they hold an unknown tensor or only some tensors of a set, or if one was converted.
        """
        group_of = {id(param): group for group in param_groups for param in group["params"]}
        unknown = group_of.keys() - self._runner_of.keys() - {id(param) for param in left_out}
        if unknown:
            shapes = [tuple(p.shape) for group in param_groups for p in group["params"] if id(p) in unknown]
            raise BindingError(
                f"ZeRO passed tensors of shapes {shapes} that were not in its groups when the optimizer was bound; "
                f"were the optimizer's tensors replaced after deepspeed.initialize?"
            )
        current = []
        for runner in self.runners:
            partitions = runner.step_set.partitions
            present = [partition for partition in partitions if id(partition.tensor) in group_of]
            if not present:
                continue
            if len(present) < len(partitions):
                raise BindingError(
                    f"ZeRO passed {len(present)} of {len(partitions)} partitions that belong to one step"
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
        """Exchange the gradients' status of all step sets, one message for each process group.

        The host waits for the device once. Must be called by all ranks of the engine, before the calls of ``step()``
        that update the sets.

        Args:
            grads: Partition index to this rank's gradient; a missing one counts as zero.
            norms: What else is read from the device in the same copy.

        Returns:
            ``norms`` on the CPU.
        """
        statuses_of: dict[tuple[dist.ProcessGroup | None, ...], list[GradientStatus]] = {}
        for status in self.statuses.values():
            statuses_of.setdefault(tuple(status.groups), []).append(status)
        flags = [GradientStatus.exchange(statuses, grads) for statuses in statuses_of.values()]
        on_cpu = _to_cpu([*norms, *flags])
        for statuses, exchanged in zip(statuses_of.values(), on_cpu[len(norms) :], strict=True):
            counts = [status.parameters for status in statuses]
            for status, columns in zip(statuses, exchanged.split(counts, dim=1), strict=True):
                status.exchanged = columns
        return on_cpu[: len(norms)]

    def any_nonfinite(self, group: dist.ProcessGroup) -> bool | None:
        """Return whether any gradient is inf or NaN, after :meth:`exchange_flags`.

        Args:
            group: The ranks that ask; ``None`` is returned if some step set was not exchanged between all of them.
        """
        # At stage 3 ZeRO's sub-groups have another group object than its wrapper, of the same ranks.
        ranks_of = dist.get_process_group_ranks
        groups = {runner.step_set.group for runner in self.runners} - {group}
        if any(ranks_of(sharing) != ranks_of(group) for sharing in groups):
            return None
        if any(status.exchanged is None for status in self.statuses.values()):
            return None
        return any(status.is_nonfinite for status in self.statuses.values())

    def take_failed(self) -> list[str]:
        """Return the names of the matrices that got no update in the last step because it was wrong in fp32 too.

        Called after :meth:`exchange_flags`. If there are any, all are forgotten, because no step will report them.
        """
        failed_in = {
            runner: status.failed for runner, status in self.statuses.items() if status.exchanged is not None
        }
        names = [name for runner, numbers in failed_in.items() for name in runner.check.failed(numbers)]
        for runner, numbers in failed_in.items() if names else ():
            runner.check.learn(numbers)
        return names

    def forget_flags(self) -> None:
        """Forget what :meth:`exchange_flags` gave, at the end of a step."""
        for status in self.statuses.values():
            status.exchanged = None

    def facts(self) -> RankFacts:
        """Return what the ranks compare of their plans."""
        facts = RankFacts()
        scopes = [Scope.of(runner.step_set.group) for runner in self.runners]
        wider_groups = [runner.step_set.wider_group for runner in self.runners]
        wider_scopes = [None if group is None else Scope.of(group) for group in wider_groups]
        for number, (runner, ranks) in enumerate(zip(self.runners, scopes, strict=True)):
            step_set, plan = runner.step_set, runner.plan
            # In the order of the flags, which the ranks match by position.
            layouts = ", ".join(f"{layout.name} ({layout.numel})" for layout in step_set.layouts)
            same_ranks = [n for n, scope in enumerate(scopes) if scope == ranks]
            facts.tell(f"step sets of ranks {ranks.name}", same_ranks, ranks)
            facts.tell(f"plan of step set {number}", plan.digest(), ranks)
            # It decides about the order of the all-to-alls.
            facts.tell(f"overlap in step set {number}", self._overlap, ranks)
            facts.tell(f"parameters of step set {number}", layouts, ranks)
            if (wider := wider_scopes[number]) is not None:
                # The wider group exchanges flags once for each of these sets, in order.
                same_wider = [n for n, scope in enumerate(wider_scopes) if scope == wider]
                facts.tell(f"step sets that ranks {wider.name} skip together", same_wider, wider)
            if step_set.stack_group is not None:
                # These ranks exchange flags too, by position.
                stacks = Scope.of(step_set.stack_group)
                facts.tell(f"stacks of experts in step set {number}", layouts, stacks)
            if step_set.tensor_group is not None:
                # Tensor-parallel ranks call collectives in the order of the plan, and compute by the settings.
                tensor_ranks = Scope.of(step_set.tensor_group)
                shards = [matrix.shards for matrix in step_set.matrices]
                facts.tell(f"plan of step set {number}", (plan.digest(), shards, self._overlap), tensor_ranks)
                # Shards of AdamW's parameters may be unequal.
                names = [layout.name for layout in step_set.layouts]
                fact = (
                    f"parameters of step set {number} (at ZeRO 3 one sub-group must hold all: sub_group_size)"
                )
                facts.tell(fact, names, tensor_ranks)
                settings = self._config.model_dump_json()
                facts.tell(f"optimizer.params for step set {number}", settings, tensor_ranks)
        return facts


def _to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one device on the CPU, copied as one; wider dtypes must come first, for alignment."""
    raw = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]).cpu()
    slices = raw.split([tensor.nbytes for tensor in tensors])
    return [
        piece.view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(slices, tensors, strict=True)
    ]


def overlaps(step_sets: Sequence[StepSet], config: MuonConfig) -> bool:
    """Return whether chunks are exchanged while others are orthogonalised: the same on all ranks of a group."""
    return config.exchange_overlap and all(
        overlap_fits(
            step_set.matrices,
            config.wire_format.bytes_per_element(config.resolved_wire_dtype(step_set.model_dtype).itemsize),
        )
        for step_set in step_sets
    )
