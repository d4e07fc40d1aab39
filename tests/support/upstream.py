"""Muon on the interface of ``scripts/upstream.patch``: nothing of DeepSpeed is replaced, no private name is read."""

from __future__ import annotations

import ast
from itertools import count
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

import deepspeed_muon
from deepspeed_muon.engine.hooks import HOOKS, replaced_functions
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.placement import Placement, replicated_placement
from deepspeed_muon.step.step_set import read_step_set
from deepspeed_muon.transport.agreement import agree
from deepspeed_muon.transport.ranks import Ranks
from tests.support.contract import STEPS
from tests.support.models import build
from tests.support.training import ds_config, full_masters, full_states, train_steps

# What deepspeed_muon/engine would not need with the patch.
DELETED = {
    "zero/views.py": (
        "View.group", "View.placements", "View.group_numbers", "FlatView.group", "FlatView.placements",
        "FlatView.group_numbers",
    ),
    "zero/stages.py": (
        "ZeroView.gradients", "ZeroView.is_true_of_any", "ZeroView.norms", "ZeroView.norms_on_device",
        "Zero12View.norms_on_device", "Zero3View.norms_on_device", "Zero3View.group", "Zero3View.placements",
        "Zero3View.group_numbers",
    ),
    "topology.py": ("_read", "_step_set"),
    "step.py": ("has_overflow", "norm_groups", "global_norm"),
}  # fmt: skip


class InnerStep(Muon):
    """The optimizer, told by DeepSpeed where its matrices are. DeepSpeed goes by the word "muon" in a class's name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inner_steps = 0
        self.managed = True  # FP16_UnfusedOptimizer calls step() in its constructor
        for group in self.param_groups:
            group.pop("use_muon", None)  # asks BF16_Optimizer for DeepSpeed's own Muon

    def bind_partitions(self, calls: list[list[Any]]) -> None:
        """Make the plans for the partitions of every call of :meth:`step_partitions`. Must be called by all ranks."""
        numbers, sets = count(), []
        for call in calls:
            partitions = []
            for each in call:
                placements = _placements(each)
                params = [param for param, _ in placements]
                partitions.append((next(numbers), each.tensor, params, placements))
            sets.append(read_step_set(partitions, self._routed.by_id, call[0].process_group))
        ranks = Ranks.of([call[0].process_group for call in calls])
        self._bind(sets, device=torch.device(get_accelerator().current_device_name()), ranks=ranks)
        agree(self._plan_facts(), ranks=ranks)

    def step_partitions(self, partitions: list[Any]) -> None:
        """Update the partitions from their gradients. Must be called by all ranks that divide them."""
        self.inner_steps += 1
        groups = self.param_groups
        self.param_groups = [{**groups[each.param_group], "params": [each.tensor]} for each in partitions]
        try:
            self.step()
        finally:
            self.param_groups = groups


def _placements(partition: Any) -> list[tuple[Any, Placement]]:
    """Return the parameters of a partition, each with the rule that gives the fragments that DeepSpeed lists."""
    found: dict[int, list[tuple[int, Any]]] = {}
    for rank, fragments in enumerate(partition.fragments):
        for each in fragments:
            found.setdefault(id(each.param), []).append((rank, each))
    placements = []
    for held in found.values():
        (first, head), last, ranks = held[0], held[-1][1], len(held)
        if ranks > 1 and last.param_offset == 0:
            placement = replicated_placement(head.partition_offset, head.numel, ranks)
        else:
            body = held[1][1] if ranks > 1 else head
            numel = last.param_offset + last.numel
            placement = Placement(
                numel, first, head.numel, head.partition_offset, body.numel, body.partition_offset
            )
        for rank, each in held:
            own = placement.on(rank)
            assert own is not None
            assert (own.matrix_offset, own.numel, own.partition_offset) == each[1:]
        placements.append((head.param, placement))
    return placements


def train_on_patched(
    rank: int, world_size: int, *, folder: str, accumulation: int, exact: bool = True, **settings: Any
) -> dict[str, Any]:
    """Train with the DeepSpeed in ``folder`` and all hooks switched off; report masters and momentum."""
    assert deepspeed.__file__.startswith(folder), deepspeed.__file__
    functions = {(owner, name): getattr(owner, name) for owner, name, _ in replaced_functions()}
    deepspeed_muon.unregister()
    try:
        config = ds_config(accumulation=accumulation, **settings)
        params = config.pop("optimizer")["params"]
        config.update(zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False)
        model = build("toy", exact=exact)
        optimizer = InnerStep(model.named_parameters(), **params)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        assert engine.basic_optimizer is optimizer
        for (owner, name), before in functions.items():
            registered = any((hook.owner, hook.attribute) == (owner, name) for hook in HOOKS)
            assert (getattr(owner, name) is before) != registered, f"{owner.__name__}.{name}"
        for each in (engine, engine.optimizer):
            assert not {name for _, name in functions} & set(vars(each))
        norms = train_steps(engine, STEPS, rank, world_size, accumulation)
        if engine.optimizer is not optimizer:
            assert optimizer.inner_steps == STEPS * len(engine.optimizer.partitions_of_calls)
        report = {
            "params": full_masters(engine),
            "momentum": full_states(engine, "momentum_buffer"),
            "norms": norms,
            "wrapper": type(engine.optimizer).__name__,
        }
        engine.destroy()
    finally:
        deepspeed_muon.register()
    return report


def deleted_lines() -> int:
    """Return the lines of :data:`DELETED`, docstrings counted."""
    engine = Path(deepspeed_muon.__file__).parent / "engine"
    total = 0
    for file, names in DELETED.items():
        tree = ast.parse((engine / file).read_text())
        found = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        for scope in (each for each in tree.body if isinstance(each, ast.ClassDef)):
            found.update(
                {
                    f"{scope.name}.{each.name}": each
                    for each in scope.body
                    if isinstance(each, ast.FunctionDef)
                }
            )
        total += sum((found[name].end_lineno or 0) - found[name].lineno + 1 for name in names)
    return total


if __name__ == "__main__":
    print(deleted_lines())
