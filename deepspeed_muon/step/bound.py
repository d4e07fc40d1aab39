"""Holds the runners of all step sets of an optimizer, and selects those that one call of ``step()`` updates."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.errors import BindingError, ConfigError
from deepspeed_muon.plan.layout import PartitionIndex
from deepspeed_muon.plan.placement import Floats
from deepspeed_muon.step.gradient_flags import (
    FLAGS_PURPOSE,
    NOT_FINITE,
    REFUSED,
    GradientFlags,
    Gradients,
    flagged,
    read_together,
)
from deepspeed_muon.step.runner import StepRunner
from deepspeed_muon.step.step_set import StepContext
from deepspeed_muon.transport.agreement import RankFacts, Scope
from deepspeed_muon.transport.all_to_all import exchange_tensors
from deepspeed_muon.transport.ranks import all_reduce_tensor


class BoundSteps:
    """The runners of an optimizer's step sets, in an order that all ranks share.

    Attributes:
        gradient_flags: The gradient flags of each runner's step set.
        process_groups: The process groups over which the step sets communicate, without duplicates.
        refusal: Why this rank refuses the step; all ranks raise when they exchange their flags.
    """

    refusal: ConfigError | None = None

    def __init__(self, contexts: Sequence[StepContext]) -> None:
        """Make the exchange plans of step sets in an order that all ranks share; nothing is sent."""
        # By ranks, the work of the step sets so far: the next set of the same ranks goes where there is less.
        loads: dict[Scope, Floats] = {}
        self.runners: list[StepRunner] = []
        for context in contexts:
            step_set = context.step_set
            load = loads.setdefault(Scope.of(step_set.group), np.zeros(step_set.world_size))
            self.runners.append(StepRunner(context, load=load))
        self.gradient_flags = {runner: GradientFlags(runner) for runner in self.runners}
        sets = [context.step_set for context in contexts]
        groups = [(s.wider_group, s.stage_group, s.tensor_group, s.stack_group, s.group) for s in sets]
        distinct = dict.fromkeys(itertools.chain(*groups))
        self.process_groups = [group for group in distinct if group is not None]
        # By id, the dtype of each tensor.
        self._dtype_of = {id(p.tensor): p.tensor.dtype for s in sets for p in s.partitions}

    def connect(self) -> None:
        """Have NCCL connect this rank with those that it exchanges with, by messages whose content nobody reads.

        The first message to a rank takes GPU memory that torch's allocator does not free for it: better now than in
        step 1, beside activations. Must be called by all ranks of the engine, once their plans agree.
        """
        if not self.runners:
            return
        purpose = "first exchange"
        flag = torch.zeros(1, dtype=torch.uint8, device=self.runners[0].context.device)
        for group in self.process_groups:
            if dist.get_world_size(group) > 1:
                all_reduce_tensor(flag, group, purpose=purpose, how="max")
        for runner in self.runners:
            runner.connect()
            # Each tensor-parallel rank may send to each other one.
            if (tensor_group := runner.step_set.tensor_group) is not None:
                size = dist.get_world_size(tensor_group)
                exchange_tensors(
                    [[flag]] * size, [[1]] * size, like=flag, group=tensor_group, purpose=purpose
                )
            runner.context.counts.reset()

    def current(
        self, param_groups: Sequence[dict[str, Any]], *, left_out: Sequence[Tensor] = ()
    ) -> list[tuple[StepRunner, dict[PartitionIndex, dict[str, Any]]]]:
        """Return the runners of one call of ``step()``, each with its param groups by partition index.

        ZeRO removes the tensors that the call does not update from the groups. Tensors that are ``left_out`` are in no
        step set.

        Raises:
            BindingError: If the groups have an unknown tensor, or the dtype of a tensor changed.
        """
        group_of: dict[int, dict[str, Any]] = {
            id(p): group for group in param_groups for p in group["params"]
        }
        # 1. every tensor must be known
        unknown = group_of.keys() - self._dtype_of.keys() - {id(param) for param in left_out}
        if unknown:
            shapes = [tuple(p.shape) for group in param_groups for p in group["params"] if id(p) in unknown]
            raise BindingError(
                f"ZeRO handed over tensors of shapes {shapes} that were not in its groups when the optimizer was "
                f"bound; were the optimizer's tensors replaced after deepspeed.initialize?"
            )
        # 2. of each step set the call has all partitions, or none
        current = []
        for runner in self.runners:
            partitions = runner.step_set.partitions
            if not any(id(partition.tensor) in group_of for partition in partitions):
                continue
            for partition in partitions:
                dtype = self._dtype_of[id(partition.tensor)]
                if partition.tensor.dtype != dtype:
                    raise BindingError(
                        f"a tensor of shape {list(partition.tensor.shape)} was {dtype} in deepspeed.initialize and is "
                        f"{partition.tensor.dtype} now: convert the model before deepspeed.initialize, not after it"
                    )
            current.append((runner, {p.index: group_of[id(p.tensor)] for p in partitions}))
        return current

    def exchange_flags(
        self, grads: Gradients, norms: Sequence[Tensor] = (), runners: Sequence[StepRunner] | None = None
    ) -> list[Tensor]:
        """Set the flags of the runners' step sets (default: all), and return ``norms`` on the CPU.

        Must be called by all ranks of the engine, before the calls of ``step()`` that update the sets. One all-reduce
        for each group of each set of process groups; the host waits for the device once, for the flags and ``norms``.
        A missing gradient counts as zero.
        """
        # 1. Over the ranks that update a parameter together.
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[GradientFlags]] = {}
        for runner in self.runners if runners is None else runners:
            flags_of_set = self.gradient_flags[runner]
            by_groups.setdefault(flags_of_set.groups, []).append(flags_of_set)
        flags_of: dict[GradientFlags, Tensor] = {}
        for members in by_groups.values():
            flags_of |= GradientFlags.reduce(members, grads, refused=self.refusal is not None)
        # 2. Over the ranks that must skip the same steps; none with data parallelism alone.
        wider_of = self._reduce_further(flags_of)
        # 3. To the CPU.
        on_cpu = iter(read_together([*norms, *flags_of.values(), *wider_of.values()]))
        norms = [next(on_cpu) for _ in norms]
        refused = False
        for flags_of_set in flags_of:
            flags_of_set.flags = next(on_cpu)
            refused |= REFUSED in flags_of_set.flags[0].tolist()
        for flags_of_set in wider_of:
            largest, failed = next(on_cpu).tolist()
            flags_of_set.wider_flags = largest == NOT_FINITE, bool(failed)
            refused |= largest == REFUSED
        if refused:
            refusal, self.refusal = self.refusal, None
            self.forget_flags()
            raise refusal or ConfigError("another rank refuses a setting in its param groups, and says which")
        return norms

    @staticmethod
    def _reduce_further(flags_of: Mapping[GradientFlags, Tensor]) -> dict[GradientFlags, Tensor]:
        """Reduce over ranks with other experts or other stages of a pipeline, whose parameters are different ones.

        Returns :meth:`.GradientFlags.any_wrong` for each step set that has such ranks.
        """
        wider_of = {
            flags_of_set: flags_of_set.any_wrong(flags)
            for flags_of_set, flags in flags_of.items()
            if flags_of_set.wider_group is not None or flags_of_set.stage_group is not None
        }
        # Over other experts: in one message the step sets of one group.
        for group in dict.fromkeys(flags_of_set.wider_group for flags_of_set in wider_of):
            if group is not None:
                members = [flags_of_set for flags_of_set in wider_of if flags_of_set.wider_group is group]
                flags = torch.cat([wider_of[flags_of_set] for flags_of_set in members])
                flags = all_reduce_tensor(flags, group, purpose=FLAGS_PURPOSE, how="max")
                wider_of.update(zip(members, flags.view(-1, 2), strict=True))
        # Over the stages, which may have different step sets: two flags of all sets.
        for stage_group in {flags_of_set.stage_group for flags_of_set in wider_of} - {None}:
            flags = torch.stack(list(wider_of.values())).amax(0)
            flags = all_reduce_tensor(flags, stage_group, purpose=FLAGS_PURPOSE, how="max")
            wider_of = dict.fromkeys(wider_of, flags)
        return wider_of

    def any_nonfinite(self, group: dist.ProcessGroup) -> bool | None:
        """Return whether any gradient is inf or NaN on a rank of ``group``, or ``None`` if the flags do not say so.

        They do after :meth:`exchange_flags`, if every step set is exchanged over exactly the ranks of ``group``.
        """
        # At ZeRO 3 the sub-groups have a different group object than ZeRO's optimizer, with the same ranks.
        ranks_of = dist.get_process_group_ranks
        set_groups = {runner.step_set.group for runner in self.runners} - {group}
        if any(ranks_of(set_group) != ranks_of(group) for set_group in set_groups):
            return None  # the flags say less, or more, than what the caller asks for
        all_flags = [flags_of_set.flags for flags_of_set in self.gradient_flags.values()]
        if any(flags is None for flags in all_flags):
            return None
        return any(bool((flags[0].numpy() == NOT_FINITE).any()) for flags in all_flags if flags is not None)

    def take_failures_of_last_step(self) -> list[str]:
        """Return the names of the matrices that got no update in the last step because it was wrong in fp32 too.

        Call it after :meth:`exchange_flags`. If there are such matrices, all verdicts are read and dropped, since no
        step follows that would report them.
        """
        left_out = {
            runner: flagged(flags_of_set.flags[1].tolist())
            for runner, flags_of_set in self.gradient_flags.items()
            if flags_of_set.flags is not None
        }
        failed = [name for runner, positions in left_out.items() for name in runner.check.failed(positions)]
        for runner, positions in left_out.items() if failed else ():
            runner.check.read_verdicts(positions)
        return failed

    def forget_flags(self) -> None:
        """Drop the flags of :meth:`exchange_flags`, at the end of a step."""
        for flags_of_set in self.gradient_flags.values():
            flags_of_set.flags, flags_of_set.wider_flags = None, (False, False)

    def facts(self) -> RankFacts:
        """Return the facts about the plans that must be equal on all ranks."""
        facts = RankFacts()
        data_scopes = [Scope.of(runner.step_set.group) for runner in self.runners]
        groups = [runner.step_set.wider_group for runner in self.runners]
        skip_scopes = [None if group is None else Scope.of(group) for group in groups]
        for number, (runner, ranks) in enumerate(zip(self.runners, data_scopes, strict=True)):
            step_set, plan, overlap = runner.step_set, runner.plan, runner.context.overlap
            # In the order of the gradient flags, which are reduced by position.
            layouts = ", ".join(f"{layout.name} ({layout.numel})" for layout in step_set.layouts)
            same_ranks = [n for n, scope in enumerate(data_scopes) if scope == ranks]
            facts.record(f"step sets of ranks {ranks.name}", same_ranks, ranks)
            facts.record(f"plan of step set {number}", plan.digest(), ranks)
            # Overlap changes the order of the all-to-alls.
            facts.record(f"overlap in step set {number}", overlap, ranks)
            facts.record(f"parameters of step set {number}", layouts, ranks)
            if (skipping := skip_scopes[number]) is not None:
                # The wider group reduces flags once for each of these sets, in order.
                same_ranks = [n for n, scope in enumerate(skip_scopes) if scope == skipping]
                facts.record(f"step sets that ranks {skipping.name} skip together", same_ranks, skipping)
            if step_set.stage_group is not None:
                facts.record(
                    "exchange of gradient flags between stages", True, Scope.of(step_set.stage_group)
                )
            if step_set.stack_group is not None:
                # These ranks reduce flags too, by position.
                stacks = Scope.of(step_set.stack_group)
                facts.record(f"stacks of experts in step set {number}", layouts, stacks)
            if step_set.tensor_group is not None:
                # Tensor-parallel ranks call collectives in the order of the plan, and iterate with the same settings.
                tensor_ranks = Scope.of(step_set.tensor_group)
                shards = [matrix.tp_shards for matrix in step_set.matrices]
                facts.record(f"plan of step set {number}", (plan.digest(), shards, overlap), tensor_ranks)
                # Only the names, because the shards of AdamW's parameters may have unequal sizes.
                names = [layout.name for layout in step_set.layouts]
                fact = (
                    f"parameters of step set {number} (at ZeRO 3 one sub-group must hold all: sub_group_size)"
                )
                facts.record(fact, names, tensor_ranks)
                settings = runner.context.config.model_dump_json()
                facts.record(f"optimizer.params for step set {number}", settings, tensor_ranks)
        return facts


def flat_gradients(runner: StepRunner, loss_scale: Tensor | None) -> Mapping[PartitionIndex, Tensor]:
    """Return the gradients in ``grad`` of a step set's tensors, flat and contiguous, by partition index.

    They are divided in fp32 by ``loss_scale``, of a torch ``GradScaler``. Raises BindingError if one is sparse.
    """
    grads = {}
    for partition in runner.step_set.partitions:
        grad = partition.tensor.grad
        if grad is not None:
            if grad.is_sparse:
                raise BindingError("sparse gradients are not supported; use sparse=False in the embedding")
            # The native operators read a contiguous tensor; the gradient of a strided view need not be one.
            grads[partition.index] = grad.reshape(-1).contiguous()
    if loss_scale is not None:
        inverse = 1.0 / loss_scale.double()
        for index, grad in grads.items():  # in fp16 small elements would lose bits, or all of them
            unscaled = grad.to(torch.promote_types(grad.dtype, torch.float32))
            grads[index] = unscaled * inverse.to(unscaled.device, unscaled.dtype)
    return grads
