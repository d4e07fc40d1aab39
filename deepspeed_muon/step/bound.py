"""All step sets of an optimizer, bound to the tensors that ZeRO hands over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import BindingError
from deepspeed_muon.plan.placement import Floats
from deepspeed_muon.step.gradient_status import (
    NOT_FINITE,
    Gradients,
    GradientStatus,
    read_together,
    set_positions,
)
from deepspeed_muon.step.runner import StepResources, StepRunner
from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.transport.agreement import RankFacts, Scope
from deepspeed_muon.transport.all_to_all import overlap_fits


class BoundSteps:
    """The runners of an optimizer's step sets, in an order that all ranks share.

    Attributes:
        runners: One for each step set.
        gradient_status: What exchanges the status of the gradients of each runner's step set.
        process_groups: The process groups over which the step sets communicate.
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
        self.gradient_status = {runner: GradientStatus(runner) for runner in self.runners}
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
        """Reduce the gradient flags of all step sets over their ranks, in one message for each process group.

        The host waits for the device once. Must be called by all ranks of the engine, before the calls of ``step()``
        that update the sets.

        Args:
            grads: Partition index to this rank's gradient; a missing one counts as zero.
            norms: What else shall be read from the device at once.

        Returns:
            ``norms`` on the CPU.
        """
        by_groups: dict[tuple[dist.ProcessGroup | None, ...], list[GradientStatus]] = {}
        for status in self.gradient_status.values():
            by_groups.setdefault(tuple(status.groups), []).append(status)
        reduced = [GradientStatus.reduce(statuses, grads) for statuses in by_groups.values()]
        on_cpu = read_together([*norms, *reduced])
        for statuses, joint in zip(by_groups.values(), on_cpu[len(norms) :], strict=True):
            parameters = [len(status.names) for status in statuses]
            for status, flags in zip(statuses, joint.split(parameters, dim=1), strict=True):
                status.flags = flags
        return on_cpu[: len(norms)]

    def any_nonfinite(self, group: dist.ProcessGroup) -> bool | None:
        """Return whether any gradient is not finite; ``None`` if the ranks of ``group`` do not have the flags of all.

        They have them after :meth:`exchange_flags`, if all step sets belong to the ranks of ``group``.
        """
        # At stage 3 ZeRO's sub-groups have another group object than its wrapper, of the same ranks.
        ranks_of = dist.get_process_group_ranks
        if any(
            ranks_of(own) != ranks_of(group) for own in {r.step_set.group for r in self.runners} - {group}
        ):
            return None
        flags = [status.flags for status in self.gradient_status.values()]
        if any(own is None for own in flags):
            return None
        return any(bool((own[0].numpy() == NOT_FINITE).any()) for own in flags if own is not None)

    def take_failed(self) -> list[str]:
        """Return the names of the matrices that got no update in the last step because it was wrong in fp32 too.

        They are known after :meth:`exchange_flags`. If there are any, all verdicts are dropped, since no step follows
        that would report them.
        """
        left_out = {
            runner: set_positions(status.flags[1].tolist())
            for runner, status in self.gradient_status.items()
            if status.flags is not None
        }
        failed = [name for runner, numbers in left_out.items() for name in runner.check.failed(numbers)]
        for runner, numbers in left_out.items() if failed else ():
            runner.check.read_verdicts(numbers)
        return failed

    def forget_flags(self) -> None:
        """Drop the flags of :meth:`exchange_flags` at the end of a step."""
        for status in self.gradient_status.values():
            status.flags = None

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
