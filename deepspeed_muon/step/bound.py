"""Holds the runners of all step sets of an optimizer, and selects those that one call of ``step()`` updates."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.errors import BindingError
from deepspeed_muon.plan.layout import PartitionIndex
from deepspeed_muon.plan.placement import Floats
from deepspeed_muon.step.gradient_flags import GradientFlags, SetFlags
from deepspeed_muon.step.runner import StepRunner
from deepspeed_muon.step.step_set import StepContext
from deepspeed_muon.transport.agreement import RankFacts, Scope
from deepspeed_muon.transport.all_to_all import exchange_tensors
from deepspeed_muon.transport.ranks import all_reduce_tensor


class BoundSteps:
    """The runners of an optimizer's step sets, in an order that all ranks share.

    Attributes:
        gradient_flags: What the ranks know of the gradients of a step.
        process_groups: The process groups over which the step sets communicate, without duplicates.
    """

    def __init__(self, contexts: Sequence[StepContext]) -> None:
        """Make the exchange plans of step sets in an order that all ranks share; nothing is sent."""
        # By ranks, the work of the step sets so far: the next set of the same ranks goes where there is less.
        loads: dict[Scope, Floats] = {}
        self.runners: list[StepRunner] = []
        for context in contexts:
            step_set = context.step_set
            load = loads.setdefault(Scope.of(step_set.group), np.zeros(step_set.world_size))
            self.runners.append(StepRunner(context, load=load))
        self.gradient_flags = GradientFlags((runner, SetFlags(runner)) for runner in self.runners)
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
        self, param_groups: Sequence[dict[str, Any]], *, frozen: Sequence[Tensor] = ()
    ) -> list[tuple[StepRunner, dict[PartitionIndex, dict[str, Any]]]]:
        """Return the runners of one call of ``step()``, each with its param groups by partition index.

        ZeRO removes the tensors that the call does not update from the groups. Tensors that are ``frozen`` are in no
        step set.

        Raises:
            BindingError: If the groups have an unknown tensor, or the dtype of a tensor changed.
        """
        group_of: dict[int, dict[str, Any]] = {
            id(p): group for group in param_groups for p in group["params"]
        }
        # 1. every tensor must be known
        unknown = group_of.keys() - self._dtype_of.keys() - {id(param) for param in frozen}
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
