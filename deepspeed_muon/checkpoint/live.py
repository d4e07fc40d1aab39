"""What a running engine holds: every parameter's master and optimizer state, and which rank has which run of it."""

from __future__ import annotations

import bisect
import copy
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.checkpoint.index import STATE_KEYS, Progress
from deepspeed_muon.engine.checkpointing import (
    loss_scale_state,
    param_group_numbers,
    set_loss_scale_state,
)
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import warn
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.layout import Fragment, MatrixLayout, ParameterLayout
from deepspeed_muon.plan.rows import ROW_STATE_KEY
from deepspeed_muon.routing.rules import Route
from deepspeed_muon.step.step_set import BoundPartition

__all__ = [
    "LiveParameter",
    "LiveState",
    "collect",
    "hyperparameters",
    "is_json",
    "read_progress",
    "software_versions",
    "write_progress",
]


@dataclass(frozen=True, slots=True)
class LiveParameter:
    """One parameter of a running engine.

    Attributes:
        route: Name, true shape and algorithm.
        numel: Elements.
        fragments: Every rank's runs, ordered by where they start in the parameter.
        replicated: Whether every rank holds all of it.
        partition: The partition that holds this rank's runs.
        group: Number of its param group.
        rows: Where NorMuon's row moments lie, ordered alike; empty without NorMuon.
    """

    route: Route
    numel: int
    fragments: tuple[Fragment, ...]
    replicated: bool
    partition: BoundPartition
    group: int
    rows: tuple[Fragment, ...] = ()

    @property
    def row_count(self) -> int:
        """How many row moments there are."""
        return max((run.matrix_offset + run.numel for run in self.rows), default=0)

    def fragments_of(self, key: str) -> tuple[Fragment, ...]:
        """Return where the master or an entry of the state lies."""
        return self.rows if key == ROW_STATE_KEY else self.fragments

    def shape_of(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole master or of an entry of the state."""
        return (self.row_count,) if key == ROW_STATE_KEY else self.route.shape

    def runs(self, key: str, start: int, stop: int) -> Iterator[Fragment]:
        """Yield the fragments of ``[start, stop)`` of a parameter that is divided, cut to that interval."""
        fragments = self.fragments_of(key)
        first = bisect.bisect_right(fragments, start, key=lambda f: f.matrix_offset) - 1
        for fragment in fragments[max(first, 0) :]:
            if fragment.matrix_offset >= stop:
                return
            begin = max(start, fragment.matrix_offset)
            end = min(stop, fragment.matrix_offset + fragment.numel)
            if begin < end:
                shift = begin - fragment.matrix_offset
                yield Fragment(fragment.rank, begin, fragment.partition_offset + shift, end - begin)


@dataclass(frozen=True, slots=True)
class LiveState:
    """Everything of an engine that a checkpoint holds.

    Attributes:
        engine: The ``DeepSpeedEngine``.
        optimizer: Our optimizer inside it.
        parameters: In an order that all ranks of the group share.
        group: The data-parallel group that divides or replicates them.
        rank: This rank inside the group.
        world_size: Its size.
        device: Where the group's backend can send from.
    """

    engine: Any
    optimizer: Muon
    parameters: tuple[LiveParameter, ...]
    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    device: torch.device

    @property
    def by_name(self) -> dict[str, LiveParameter]:
        """The parameters by name."""
        return {parameter.route.name: parameter for parameter in self.parameters}

    def step(self, partition: BoundPartition) -> int:
        """Return the optimizer steps that a partition has taken."""
        return int(self.optimizer.state.get(partition.tensor, {}).get("step", 0))

    def tensor(self, partition: BoundPartition, key: str) -> Tensor:
        """Return the master (``fp32``) or an entry of the state of this rank's partition, flat, sharing memory."""
        own = partition.tensor if key == "fp32" else self.optimizer.state[partition.tensor][key]
        return own.detach().view(-1)

    def keys(self, parameter: LiveParameter) -> tuple[str, ...]:
        """Return what there is to save of a parameter: ``fp32``, and the state once a step was taken."""
        if not self.step(parameter.partition):
            return ("fp32",)
        own = self.optimizer.state[parameter.partition.tensor]
        rows = (ROW_STATE_KEY,) if parameter.rows and ROW_STATE_KEY in own else ()
        return ("fp32", *STATE_KEYS[parameter.route.algorithm], *rows)


def collect(engine: Any) -> LiveState:
    """Describe what this rank knows of the engine's state; nothing is copied or sent.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours.

    Raises:
        CheckpointError: If the engine runs another optimizer, or its parameters cannot be told apart by name.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, Muon):
        raise CheckpointError(
            f"this engine's optimizer is {type(optimizer).__name__}, not deepspeed_muon.Muon: use DeepSpeed's own "
            f"checkpoints for it"
        )
    routes: dict[str, Route] = {}
    for route in optimizer.routes:
        if route.name in routes:
            raise CheckpointError(f"two parameters are called {route.name}: pass model.named_parameters()")
        routes[route.name] = route
    groups = param_group_numbers(engine.optimizer)
    parameters = []
    sets = [runner.step_set for runner in optimizer.runners]
    for runner, step_set in zip(optimizer.runners, sets, strict=True):
        rows = {layout.name: layout.fragments for layout in runner.row_layouts}
        if step_set.tensor_group is not None:
            raise CheckpointError(
                "this project's checkpoints do not know tensor parallelism yet: use engine.save_checkpoint and "
                "load_checkpoint with the same number of ranks and the same tensor-parallel size"
            )
        if _ranks(step_set.group) != _ranks(sets[0].group):
            raise CheckpointError("param groups of different data-parallel groups cannot be consolidated yet")
        partitions = {partition.index: partition for partition in step_set.partitions}
        layouts: tuple[MatrixLayout | ParameterLayout, ...] = (*step_set.matrices, *step_set.others)
        for layout in layouts:
            held = sum(fragment.numel for fragment in layout.fragments)
            parameters.append(
                LiveParameter(
                    routes[layout.name],
                    layout.numel,
                    tuple(sorted(layout.fragments, key=lambda f: f.matrix_offset)),
                    held == layout.numel * step_set.world_size and step_set.world_size > 1,
                    partitions[layout.partition],
                    groups[layout.partition],
                    tuple(sorted(rows.get(layout.name, ()), key=lambda f: f.matrix_offset)),
                )
            )
    if not parameters:
        raise CheckpointError("the engine's optimizer holds no parameters")
    first = optimizer.runners[0]
    return LiveState(
        engine,
        optimizer,
        tuple(parameters),
        sets[0].group,
        sets[0].rank,
        sets[0].world_size,
        first.context.device,
    )


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of every param group as JSON can hold them."""
    groups = []
    for group in optimizer.param_groups:
        settings = {}
        for key, value in group.items():
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if key != "params" and is_json(value):
                settings[str(key)] = value
        groups.append(settings)
    return groups


def is_json(value: Any) -> bool:
    """Return whether JSON can hold ``value`` without loss; a tuple may come back as a list."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return _has_text_keys(value)


def _has_text_keys(value: Any) -> bool:
    """Return whether all keys are text: JSON turns a number into text, and torch's MultiStepLR then finds none."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(entry) for key, entry in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_has_text_keys, value))


def read_progress(engine: Any) -> Progress:
    """Return the engine's counters, schedule and loss scale."""
    schedule = None
    scheduler = getattr(engine, "lr_scheduler", None)
    if scheduler is not None and hasattr(scheduler, "state_dict"):
        schedule = scheduler.state_dict()
        if not is_json(schedule):
            warn(
                "deepspeed_muon: the state of the scheduler %s is not JSON and is left out of the consolidated "
                "checkpoint; step the scheduler to progress.global_steps after restoring",
                type(scheduler).__name__,
            )
            schedule = None
    return Progress(
        global_steps=int(engine.global_steps),
        global_samples=int(engine.global_samples),
        skipped_steps=int(engine.skipped_steps),
        lr_scheduler=schedule,
        lr_scheduler_class=None if scheduler is None else type(scheduler).__name__,
        loss_scale=loss_scale_state(engine.optimizer),
    )


def write_progress(engine: Any, progress: Progress, *, scheduler: bool = True) -> None:
    """Set the engine's counters, schedule and loss scale.

    Args:
        engine: A ``DeepSpeedEngine`` with our optimizer.
        progress: What :func:`deepspeed_muon.checkpoint.settings.check_progress` found to be usable.
        scheduler: Whether to set the schedule too.
    """
    engine.global_steps = progress.global_steps
    engine.global_samples = progress.global_samples
    engine.skipped_steps = progress.skipped_steps
    own = getattr(engine, "lr_scheduler", None)
    if scheduler and own is not None and progress.lr_scheduler is not None:
        own.load_state_dict(copy.deepcopy(progress.lr_scheduler))
    elif scheduler and own is not None:
        warn("deepspeed_muon: the checkpoint holds no state for the scheduler, which starts afresh")
    if progress.loss_scale is not None:
        set_loss_scale_state(engine.optimizer, dict(progress.loss_scale))


def software_versions() -> dict[str, str]:
    """Return the versions that a checkpoint records."""
    import deepspeed

    import deepspeed_muon

    return {
        "deepspeed_muon": deepspeed_muon.__version__,
        "deepspeed": str(deepspeed.__version__),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
