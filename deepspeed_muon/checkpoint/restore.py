"""Load full parameters and optimizer state into a running engine, at any ZeRO stage and on any number of ranks.

First all ranks check together everything that can be wrong. Only then do they change anything: the settings, which are
put back if one rank cannot set them, and then the partitions, in which each rank fills its own fragments.

The settings are those of the param groups, which must pass the checks of ``optimizer.params``; the counters; the loss
scale; and the schedule, which must fit the engine's scheduler.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.deepspeed_files import identify_tag
from deepspeed_muon.checkpoint.files import (
    folder_of,
    is_inside,
    latest_tag,
    refusing,
    regular_size,
    require_folder,
)
from deepspeed_muon.checkpoint.index import (
    CONSOLIDATED_FOLDER,
    COUNTERS,
    INDEX_NAME,
    OURS,
    STATE_KEYS,
    WINDOW_NUMEL,
    CheckpointIndex,
    ConsolidatedSource,
    Progress,
    load_index,
)
from deepspeed_muon.checkpoint.parameters import (
    LiveParameter,
    LiveState,
    TensorSlice,
    bound_engine_of,
    collect,
    optimizer_of,
    require_checkpointable,
)
from deepspeed_muon.config.settings import GroupSettings, MuonConfig, checked_group_settings
from deepspeed_muon.config.values import plain
from deepspeed_muon.errors import CheckpointError, ConfigError, MuonError
from deepspeed_muon.logs import listed, logger, warn
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.placement import Fragment
from deepspeed_muon.step.int8 import SCALE_KEY
from deepspeed_muon.transport.agreement import raise_on_all_ranks
from deepspeed_muon.transport.ranks import all_ranks
from deepspeed_muon.variants import ROW_STATE, VARIANTS
from deepspeed_muon.variants import SETTINGS as VARIANT_SETTINGS

# The counters of torch's and DeepSpeed's schedulers; -1 before the first step.
_SCHEDULER_COUNTERS = ("last_epoch", "_step_count", "last_batch_iteration")
# Schedulers of torch whose get_lr() computes the rates from the count of steps, and that have no _get_closed_form_lr.
_CLOSED_FORM = (
    torch.optim.lr_scheduler.LambdaLR,
    torch.optim.lr_scheduler.OneCycleLR,
    torch.optim.lr_scheduler.CyclicLR,
)


def restore(
    engine: Any,
    folder: str | os.PathLike[str],
    *,
    hyperparameters: bool = True,
    progress: bool = True,
    scheduler: bool = True,
    allow_nonfinite: bool = False,
) -> Path:
    """Continue from a consolidated checkpoint, at any ZeRO stage and on any number of ranks.

    Must be called by all ranks, before or between steps. Masters, momentum and moments become exactly what was saved,
    and the weights of the forward pass their rounding; from a set of AdamW, Muon's momentum becomes AdamW's first
    moment. Everything is checked before anything is changed.

    Args:
        engine: A ``DeepSpeedEngine`` with our optimizer. Mutated.
        folder: A consolidated checkpoint, or a DeepSpeed checkpoint (its folder or its tag's folder) that was saved
            with ``consolidate_on_save``.
        hyperparameters: Take rates and other settings of the param groups from the checkpoint, as
            ``engine.load_checkpoint`` does. If unset, those of the configuration are kept, and the schedule continues
            with them from the saved count. They are always kept if the set was converted from another optimizer.
        progress: Restore step counters, scheduler and loss scale too.
        scheduler: With ``progress``, restore the scheduler as well. Unset it to continue with another schedule.
        allow_nonfinite: Also restore a state that holds infinities or NaN.

    Returns:
        The folder that was read.

    Raises:
        CheckpointError: On every rank, naming file and parameter, if the checkpoint is damaged, incomplete, refused
            or of another model, or its schedule is of another kind. The engine is unchanged then.
    """
    source, before = restore_from_source(
        engine,
        lambda: ConsolidatedSource(find_consolidated(folder_of("folder", folder))),
        repr(folder),
        hyperparameters=hyperparameters,
        progress=progress,
        scheduler=scheduler,
        allow_nonfinite=allow_nonfinite,
    )
    before.warn_of_replaced(source.where, "call deepspeed_muon.restore with hyperparameters=False")
    return Path(source.where)


def restore_from_source(
    engine: Any,
    open_source: Callable[[], ConsolidatedSource],
    where: str,
    *,
    hyperparameters: bool = True,
    progress: bool = True,
    scheduler: bool = True,
    with_state: bool = True,
    allow_nonfinite: bool = False,
) -> tuple[ConsolidatedSource, SettingsSnapshot]:
    """Check a source against the engine on all ranks, then fill the engine from it. Must be called by all ranks.

    Args:
        engine: A ``DeepSpeedEngine`` with our optimizer. Mutated.
        open_source: Opens the source, or raises; every rank opens the same one.
        where: What it opens, for errors.
        hyperparameters: See :func:`restore`.
        progress: See :func:`restore`.
        scheduler: See :func:`restore`.
        with_state: Load momentum and moments, not the masters alone.
        allow_nonfinite: See :func:`restore`.

    Returns:
        The source, closed, and the settings of the engine as they were before.

    Raises:
        CheckpointError: See :func:`restore`.
    """
    require_checkpointable(engine)
    nonfinite: list[str] = []
    with contextlib.ExitStack() as stack:
        # 1. Check, and allocate what is missing. All ranks raise if one does, or if they read different checkpoints.
        with raise_on_all_ranks(CheckpointError) as facts, refusing(where):
            source = open_source()
            stack.callback(source.close)
            before, state = SettingsSnapshot(engine), collect(engine)
            state.bound_engine.view.require_reloaded()
            # Raised below, together with the parameters that no rank has.
            problems = _compare_parameters(state, source, with_state)
            if not problems:
                plan = _RestorePlan(
                    state,
                    source,
                    # The settings of another optimizer do not apply to this run.
                    take_rates=hyperparameters and source.index.source.get("optimizer") == OURS,
                    progress=source.index.progress if progress else None,
                    scheduler=scheduler,
                    with_state=with_state,
                )
                nonfinite = source.verify(all_ranks().position, all_ranks().size)
            # A folder on a local disk may hold another checkpoint on each machine.
            facts.record("checkpoint", source.index.sha256)
        _refuse_another_model(state, source, problems)
        _refuse_nonfinite(nonfinite, source, allow_nonfinite)
        # 2. Change the engine: settings, then partitions.
        _write_settings(plan, before)
        _write_state(plan)
        state.bound_engine.end_restore()
    return source, before


# ---- the checks --------------------------------------------------------------------------------------------


def _compare_parameters(state: LiveState, source: ConsolidatedSource, with_state: bool) -> list[str]:
    """Return in words how the parameters of this rank differ from the checkpoint's."""
    records = source.parameters
    is_foreign = source.index.source.get("optimizer") != OURS
    problems: list[str] = []
    unmatched = [name for name in records if name not in state.parameters]
    for name, parameter in state.parameters.items():
        live = parameter.record
        # 1. A parameter that the checkpoint does not have.
        if name not in records:
            shape = parameter.tensor_slice.shape
            same_shape = next((saved for saved in unmatched if records[saved].shape == shape), None)
            hint = f"renamed? it has {same_shape} of the same shape" if same_shape else None
            problems.append(
                f"parameter {name} is not in the checkpoint ({hint or 'it was frozen, or not in the model'})"
            )
            continue
        # 2. One with another shape, another algorithm, or other blocks.
        saved = records[name]
        file = saved.tensors["fp32"]
        if saved.shape != live.shape:
            problems.append(
                f"parameter {name} has shape {list(live.shape)}, in the checkpoint {list(saved.shape)} ({file})"
            )
        # Another optimizer's AdamW state becomes Muon's: its first moment is a moving average of the gradient as well.
        elif (
            with_state and saved.algorithm != live.algorithm and (live.algorithm == "adamw" or not is_foreign)
        ):
            problems.append(
                f"parameter {name} goes to {live.algorithm} ({parameter.route_reason}), in the checkpoint to "
                f"{saved.algorithm} ({file}); set include / exclude in optimizer.params so that it goes there"
            )
        elif with_state and saved.rows and parameter.row_fragments:
            rows = parameter.slice_of(saved.row_keys[0]).length
            if saved.rows != rows:
                problems.append(
                    f"parameter {name} has {rows} numbers in {saved.row_keys[0]}, in the checkpoint {saved.rows} "
                    f"({file}): it was divided into other blocks"
                )
    return problems


def _refuse_another_model(state: LiveState, source: ConsolidatedSource, problems: Sequence[str]) -> None:
    """Raise on every rank if one has ``problems``, or if no rank has some parameter of the checkpoint.

    Must be called by all ranks.
    """
    names = sorted(source.parameters)
    # With pipeline or expert parallelism no rank has all parameters, but every parameter must be on some rank.
    is_live = [float(name in state.parameters) for name in names]
    is_live = all_ranks().all_reduce(is_live, "max", purpose="check of a checkpoint")
    reason = "is in the checkpoint, but not in the optimizer (it is frozen, or not in the model)"
    problems = [
        *problems,
        *(f"parameter {name} {reason}" for name, live in zip(names, is_live, strict=True) if not live),
    ]
    with raise_on_all_ranks(CheckpointError):
        if problems:
            raise CheckpointError(
                f"{source.where} is not a checkpoint of this model:\n{first_lines(problems)}\n"
                f"Make the model as the saved run did, or load the weights alone (fp32/NAME in the files of a set) "
                f"into the model before deepspeed.initialize"
            )


def first_lines(lines: Collection[str]) -> str:
    """Return the first lines of an error, sorted, and how many more there are."""
    return "\n".join(sorted(lines)[:20]) + (f"\nand {len(lines) - 20} more" if len(lines) > 20 else "")


def _refuse_nonfinite(nonfinite: Sequence[str], source: ConsolidatedSource, allow: bool) -> None:
    """Raise on every rank, or warn if it is allowed, if tensors that any rank verified hold infinities or NaN."""
    names_by_rank = all_ranks().all_gather(nonfinite, purpose="check of a checkpoint")
    names = sorted(chain.from_iterable(names_by_rank.values()))
    if not names:
        return
    text = f"{source.where}: {nonfinite_text(names)}"
    # All ranks have the same names, so all of them raise or none does.
    if not allow:
        raise CheckpointError(
            f"{text}. Restore an earlier checkpoint; or, to look into this one, consolidate it and call "
            f"restore(..., allow_nonfinite=True)"
        )
    warn("deepspeed_muon: %s", text)


def nonfinite_text(names: Sequence[str]) -> str:
    """Return the message about tensors that hold an infinity or NaN."""
    return f"{len(names)} tensors hold an infinity or NaN: {listed(names, 10)}: the run had diverged when it was saved"


# ---- the plan ----------------------------------------------------------------------------------------------


class _RestorePlan:
    """What a restore will write. All that can fail is done: checks, look-ups and allocations.

    Attributes:
        state: The state of the engine.
        source: Where the tensors are read from.
        take_rates: Whether param groups and schedule take the saved rates.
        progress: Counters, schedule and loss scale to set; ``None`` leaves them as they are.
        scheduler: Whether the schedule is one of them.
        steps: Step count by partition; empty if only masters are restored.
        new_tensors: By partition and key: tensors that the optimizer's state does not have yet.
        writes: Parameter, key and the flat tensor of this rank's partition to write to.
        settings: New settings by param group.
    """

    def __init__(
        self,
        state: LiveState,
        source: ConsolidatedSource,
        *,
        take_rates: bool,
        progress: Progress | None,
        scheduler: bool,
        with_state: bool,
    ) -> None:
        """Make the plan; the engine is not changed. Without ``with_state`` it is one for the masters alone."""
        self.state, self.source = state, source
        self.take_rates, self.progress, self.scheduler = take_rates, progress, scheduler
        # 1. The tensors.
        self.steps = _steps_by_partition(state, source) if with_state else {}
        if with_state:
            _warn_of_another_variant(state, source)
        self.new_tensors: dict[int, dict[str, Tensor]] = {}
        self.writes: list[tuple[LiveParameter, str, Tensor]] = []
        for parameter in state.parameters.values():
            keys: tuple[str, ...] = ("fp32",)
            if self.steps.get(parameter.partition):
                keys += STATE_KEYS[parameter.record.algorithm]
                keys += _row_keys(state) if parameter.row_fragments else ()
            self.writes += [(parameter, key, self._flat_tensor(parameter, key)) for key in keys]
        # 2. The settings.
        self.settings = group_settings(state, source.index, source.where) if take_rates else {}
        if progress is not None and scheduler:
            _check_schedule(state.bound_engine.engine.lr_scheduler, progress, source.where, take_rates)

    def _flat_tensor(self, parameter: LiveParameter, key: str) -> Tensor:
        """Return the flat tensor to write to, ``(partition_numel,)``: the engine's, or a new one that it will get."""
        partition, policy = parameter.local_partition, self.state.optimizer.state_policy
        dtype = policy.dtype(key, partition.tensor.dtype)
        if key == "momentum_buffer" and (parameter.int8_blocks or dtype == torch.int8):
            dtype = torch.float32  # quantized once all of it has been read
        elif key == "fp32" or key in self.state.optimizer.state.get(partition.tensor, {}):
            return self.state.flat_tensor(partition, key)
        new_tensors = self.new_tensors.setdefault(partition.index, {})
        if key not in new_tensors and key in ROW_STATE:
            # One tensor for all matrices of the partition: (rows that this rank stores,).
            parameters = (p for p in self.state.parameters.values() if p.partition == partition.index)
            numel = sum(rows.numel for p in parameters for rows in p.local_fragments(key))
            new_tensors[key] = torch.empty(numel, dtype=torch.float32, device=partition.tensor.device)
        elif key not in new_tensors:
            new_tensors[key] = policy.make(key, partition.tensor).to(dtype)
        return new_tensors[key].view(-1)


def _steps_by_partition(state: LiveState, source: ConsolidatedSource) -> dict[int, int]:
    """Return the step count of every partition. Its parameters share one, which Adam's bias correction uses."""
    saved_steps: dict[int, set[int]] = {}
    for parameter in state.parameters.values():
        saved_steps.setdefault(parameter.partition, set()).add(source.parameters[parameter.name].step)
    for partition, steps in saved_steps.items():
        if len(steps) > 1:
            warn(
                "deepspeed_muon: parameters that share partition %d now had taken %s steps; %d is used for all of them",
                partition,
                sorted(steps),
                max(steps),
            )
    return {partition: max(steps) for partition, steps in saved_steps.items()}


def _row_keys(state: LiveState) -> tuple[str, ...]:
    """Return the keys of the per-row state of this run's variant."""
    row_state = VARIANTS[state.optimizer.config.variant].state
    return () if row_state is None else (row_state.key,)


def _warn_of_another_variant(state: LiveState, source: ConsolidatedSource) -> None:
    """Warn if per-row state is reset or dropped because the saved run had another variant."""
    keys, changes = set(_row_keys(state)), set()
    for parameter in state.parameters.values():
        saved = source.parameters[parameter.name]
        saved_keys = set(saved.row_keys)
        if parameter.row_fragments and saved.step:
            changes |= {f"{ROW_STATE[key].label} start anew" for key in keys - saved_keys}
        changes |= {f"{ROW_STATE[key].label} are dropped" for key in saved_keys - keys}
    if changes:
        warn(
            "deepspeed_muon: %s was saved with another variant than %r: %s",
            source.where,
            state.optimizer.config.variant,
            "; ".join(sorted(changes)),
        )


# ---- settings of param groups ------------------------------------------------------------------------------


def checked_settings(
    groups: Sequence[GroupSettings], where: str, config: MuonConfig | None = None
) -> list[GroupSettings]:
    """Return the settings of every saved param group that a run takes over, checked as ``optimizer.params`` would be.

    Args:
        groups: The saved param groups.
        where: The checkpoint, for errors.
        config: The settings with which they have to be compatible; ``None`` for the defaults.

    Raises:
        CheckpointError: Naming every group and key that cannot be used.
    """
    settings: list[GroupSettings] = []
    problems: list[str] = []
    for number, group in enumerate(groups):
        try:
            settings.append(checked_group_settings(group, f"param group {number}", config))
        except ConfigError as error:
            problems += str(error).splitlines()
    if problems:
        raise CheckpointError(
            f"{where}: settings of param groups cannot be used:\n{first_lines(problems)}\n"
            f"pass hyperparameters=False to keep those of the configuration"
        )
    return settings


def group_settings(state: LiveState, index: CheckpointIndex, where: str) -> dict[int, dict[str, Any]]:
    """Return the saved settings for each live param group: those on which all its parameters agree.

    Args:
        state: The state of the engine.
        index: The index of the checkpoint.
        where: The checkpoint, for errors.

    Raises:
        CheckpointError: If the configuration of this run refuses one.
    """
    config = state.optimizer.config
    checked_groups = checked_settings(index.groups, where, config)
    # 1. The saved groups that the parameters of each live group come from.
    saved_groups: dict[int, set[int]] = {}
    for parameter in state.parameters.values():
        saved_group = index.parameters[parameter.name].group
        saved_groups.setdefault(parameter.record.group, set()).add(saved_group)
    # 2. Take over each setting that these saved groups have in common.
    settings: dict[int, dict[str, Any]] = {}
    for number, origins in saved_groups.items():
        group = state.optimizer.param_groups[number]
        # The stages of a pipeline may number their groups differently, and one stage's are saved.
        algorithm = group["algorithm"]
        matching = [n for n in sorted(origins) if index.groups[n].get("algorithm", algorithm) == algorithm]
        candidates = [checked_groups[origin] for origin in matching]
        keys = group.keys() & (set.intersection(*map(set, candidates)) if candidates else set())
        # These betas may be AdamW's, and a schedule of torch that cycles betas would write them into Muon's momentum.
        if algorithm == "muon" and any("algorithm" not in index.groups[origin] for origin in matching):
            keys.discard("betas")
        settings[number] = {}
        for key in sorted(keys):
            values = [candidate[key] for candidate in candidates]
            if all(value == values[0] for value in values):
                settings[number][key] = values[0]
                continue
            warn(
                "deepspeed_muon: param group %d joins parameters that had %s = %s; the configuration's value is kept",
                number,
                key,
                values,
            )
    return settings


# ---- counters, schedule and loss scale ---------------------------------------------------------------------


def _write_progress(plan: _RestorePlan, progress: Progress) -> None:
    """Set the counters, the schedule and the loss scale of the engine, which is mutated, also if this raises.

    Without ``take_rates`` the schedule continues from the saved count with its own rates, which are set in the param
    groups.

    Raises:
        CheckpointError: If the scheduler does not take its state.
    """
    bound_engine, where = plan.state.bound_engine, plan.source.where
    bound_engine.set_counters({key: getattr(progress, key) for key in COUNTERS})
    scheduler = bound_engine.engine.lr_scheduler if plan.scheduler else None
    if scheduler is not None and progress.lr_scheduler is not None:
        try:
            scheduler.load_state_dict(_state_to_load(scheduler, progress.lr_scheduler, plan.take_rates))
            if not plan.take_rates:
                _set_rates_from_count(scheduler, plan.state.optimizer)
        except Exception as error:
            raise _unfit(scheduler, progress, where, f"{type(error).__name__}: {error}") from error
    elif scheduler is not None:
        warn("deepspeed_muon: the checkpoint holds no state for the scheduler, which starts afresh")
    if progress.loss_scale is not None:
        bound_engine.set_loss_scale(progress.loss_scale)


def _state_to_load(scheduler: Any, saved: Mapping[str, Any], take_rates: bool) -> dict[str, Any]:
    """Return a scheduler's own state, updated with the saved one, or with the saved count alone."""
    live = scheduler.state_dict()
    count = {key: saved[key] for key in _SCHEDULER_COUNTERS if key in saved}
    state = {**live, **(saved if take_rates else count)}
    for key, value in live.items():  # undo the replacements of saved_schedule
        if isinstance(value, Counter):
            state[key] = Counter(state[key])
        elif isinstance(value, float) and state[key] is None:
            state[key] = value
    return copy.deepcopy(state)


def _set_rates_from_count(scheduler: Any, optimizer: Muon) -> None:
    """Set the rates of the param groups to those of a scheduler whose count was set."""
    if all(getattr(scheduler, key, -1) < 0 for key in _SCHEDULER_COUNTERS):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends get_last_lr(), which the count did not change
        rates = [float(rate) for rate in getattr(scheduler, "_get_closed_form_lr", scheduler.get_lr)()]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def _check_schedule(scheduler: Any, progress: Progress, where: str, take_rates: bool) -> None:
    """Raise if the saved schedule does not fit a scheduler, or has a value with which a later step would fail.

    Args:
        scheduler: The scheduler of this run, or ``None``. Not changed.
        progress: With the state of the saved one, if there is any.
        where: The checkpoint, for the message.
        take_rates: Whether its rates would be taken, not the count alone.

    Raises:
        CheckpointError: Naming what cannot be used, and the argument that leaves it out.
    """
    if scheduler is None or progress.lr_scheduler is None:
        return
    problem = _schedule_problem(scheduler, progress.lr_scheduler, take_rates)
    if problem is not None:
        raise _unfit(scheduler, progress, where, problem)
    if progress.lr_scheduler_class not in (None, type(scheduler).__name__):
        warn(
            "deepspeed_muon: the saved run's scheduler was %s, this run's is %s and continues from the same count",
            progress.lr_scheduler_class,
            type(scheduler).__name__,
        )


def _unfit(scheduler: Any, progress: Progress, where: str, problem: str) -> CheckpointError:
    saved_class = progress.lr_scheduler_class
    saved_run = f"was {saved_class}" if saved_class else "is not named in the checkpoint"
    return CheckpointError(
        f"{where}: the saved schedule does not fit the scheduler {type(scheduler).__name__} of this run (the saved "
        f"run's {saved_run}): {problem}; to go on with this run's own schedule, call "
        f"deepspeed_muon.restore(..., scheduler=False) and leave out restore_from"
    )


def _schedule_problem(scheduler: Any, saved: Mapping[str, Any], take_rates: bool) -> str | None:
    """Return why a scheduler cannot continue from a saved state, with or without its rates; ``None`` if it can."""
    if not hasattr(scheduler, "state_dict") or not hasattr(scheduler, "load_state_dict"):
        return "it takes no saved state"
    live = scheduler.state_dict()
    # Attributes that begin with _ come and go with torch's versions.
    differing = {
        key for key in live.keys() ^ saved.keys() if not str(key).startswith("_") and key != "verbose"
    }
    if differing:
        return f"their states differ in {', '.join(sorted(map(str, differing)))}"
    by_count = hasattr(scheduler, "last_batch_iteration") or hasattr(scheduler, "_get_closed_form_lr")
    if not (take_rates or by_count or isinstance(scheduler, _CLOSED_FORM)):
        return "rates stay those of the configuration, and it cannot compute them from a count of steps"
    state = _state_to_load(scheduler, saved, take_rates)
    for key in sorted(live.keys() & state.keys()):
        live_value, value = live[key], state[key]
        if live_value is None or value is None:
            continue
        if _json_type(live_value) != _json_type(value):
            return f"{key} is {value!r}, this run's {live_value!r}"
        if isinstance(value, (list, tuple)) and key.lstrip("_").endswith(("lrs", "lr")):
            # One rate for each param group: load_state_dict would take another number, and a later step would fail.
            if len(live_value) != len(value):
                return f"{key} has {len(value)} values for {len(live_value)} param groups"
            if any(_json_type(rate) != "number" or not 0 <= rate < math.inf for rate in value):
                return f"{key} is {value!r}"
        if key in _SCHEDULER_COUNTERS and not (isinstance(value, int) and -1 <= value <= 1 << 40):
            return f"{key} is {value!r}"
    return None


def _json_type(value: object) -> str:
    """Return the type of a value as JSON distinguishes types, by which saved and live values are compared."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number"
    return "list" if isinstance(value, tuple) else type(value).__name__


# ---- the settings before a load ----------------------------------------------------------------------------


class SettingsSnapshot:
    """The counters, loss scale, schedule and param group settings of an engine as they were before a load."""

    def __init__(self, engine: Any) -> None:
        """Copy them."""
        self._optimizer = optimizer = optimizer_of(engine)
        self._bound_engine = bound_engine_of(optimizer)
        self._counters, self._loss_scale = self._bound_engine.counters(), self._bound_engine.loss_scale()
        self._scheduler = engine.lr_scheduler
        # Both are needed: the attributes have what a state_dict() leaves out, the state copies what they refer to.
        self._scheduler_attributes = dict(getattr(self._scheduler, "__dict__", {}))
        self._scheduler_state: Any = None
        if self._scheduler is not None and hasattr(self._scheduler, "state_dict"):
            # A schedule that is part of another one refers to the optimizer, which is not copied.
            self._scheduler_state = copy.deepcopy(self._scheduler.state_dict(), {id(optimizer): optimizer})
        self._groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def warn_of_replaced(self, cause: str, remedy: str, further: Sequence[str] = ()) -> None:
        """Warn of configured param group settings that have other values now: each key once, with both values.

        Rates that a scheduler computes from its own settings are left out, since it sets them again. So is a momentum
        that it cycles.

        Args:
            cause: What replaced them.
            remedy: How to keep the configured ones.
            further: Sentences about replaced settings that are not of param groups.
        """
        config, scheduler = self._optimizer.config, self._scheduler
        base_rates = getattr(scheduler, "base_lrs", None)
        replaced = dict.fromkeys(further)
        for number, (group, before) in enumerate(
            zip(self._optimizer.param_groups, self._groups, strict=True)
        ):
            is_muon = group["algorithm"] == "muon"
            keys = set(config.muon_defaults() if is_muon else config.adam_defaults())
            if getattr(scheduler, "cycle_momentum", False):
                keys -= {"momentum", "betas"}
            keys -= VARIANT_SETTINGS.keys() - {setting.name for setting in VARIANTS[config.variant].settings}
            for key in sorted(keys):
                configured, now = before[key], group[key]
                # The present rate is that of the schedule, so the rates that it starts from are compared.
                if key == "lr" and base_rates is not None:
                    configured = self._scheduler_attributes["base_lrs"][number]
                    now = base_rates[number]
                elif key == "lr" and (scheduler is not None or "initial_lr" in before):
                    continue
                if _as_json(configured) != _as_json(now):
                    specific_key = f"{'muon' if is_muon else 'adam'}_{key}"
                    name = key if getattr(config, specific_key, None) is None else specific_key
                    replaced[f"{name} is {_as_json(now)!r}, configured {_as_json(configured)!r}"] = None
        if replaced and self._optimizer.ranks.position == 0:
            logger.warning(
                "deepspeed_muon: %s replaced configured settings by the checkpoint's: %s. To have the configured ones, "
                "%s",
                cause,
                "; ".join(replaced),
                remedy,
            )

    def put_back(self) -> None:
        """Set the engine's counters, loss scale, schedule and param group settings to what they were."""
        self._bound_engine.set_counters(self._counters)
        self._bound_engine.set_loss_scale(self._loss_scale)
        if hasattr(self._scheduler, "__dict__"):
            self._scheduler.__dict__.clear()
            self._scheduler.__dict__.update(self._scheduler_attributes)
        if self._scheduler_state is not None:
            # What the attributes refer to, such as the schedulers in a SequentialLR, may have changed as well.
            self._scheduler.load_state_dict(self._scheduler_state)
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in group.keys() - settings.keys() - {"params"}:  # the load has added them
                del group[key]
            group.update(settings)


def _as_json(value: object) -> Any:
    """Return a setting as JSON would hold it, for comparison and display."""
    value = plain(value)
    return list(value) if isinstance(value, tuple) else value


# ---- the writes --------------------------------------------------------------------------------------------


def _write_settings(plan: _RestorePlan, before: SettingsSnapshot) -> None:
    """Set progress and param groups, or nothing: all ranks raise if one cannot. Must be called by all ranks."""
    try:
        with raise_on_all_ranks(CheckpointError):
            if plan.progress is not None:
                _write_progress(plan, plan.progress)
            for number, settings in plan.settings.items():
                plan.state.optimizer.param_groups[number].update(settings)
    except MuonError:
        before.put_back()
        raise
    except BaseException:
        plan.state.bound_engine.begin_restore(plan.source.where)  # interrupted: the settings mix two states
        raise


@torch.no_grad()
def _write_state(plan: _RestorePlan) -> None:
    """Fill this rank's partitions from the source. Must be called by all ranks.

    After the checks only the disk can fail, or an interrupt happen. Every rank raises then, and the engine refuses to
    continue until a restore has ended.
    """
    state, source = plan.state, plan.source
    interrupt: BaseException | None = None
    state.bound_engine.begin_restore(source.where)
    # 1. Masters and state, into the engine's tensors or new ones.
    try:
        with raise_on_all_ranks(CheckpointError):
            try:
                _write_partitions(plan)
            except BaseException as caught:
                interrupt = None if isinstance(caught, Exception) else caught
                raise CheckpointError(
                    f"{source.where} passed all checks, but could not be read to the end: {caught!r}. The engine is "
                    f"partly restored: call restore again, or initialize a new engine"
                ) from caught
    except CheckpointError:
        if interrupt is not None:
            raise interrupt from None  # on this rank; the other ranks raise the CheckpointError
        raise
    # 2. New tensors and step counts, into the optimizer's state.
    tensors = {p.partition: p.local_partition.tensor for p in state.parameters.values()}
    for partition, steps in plan.steps.items():
        partition_state = state.optimizer.state[tensors[partition]]
        new_tensors = plan.new_tensors.get(partition, {})
        if "momentum_buffer" in new_tensors:
            # The new momentum is fp32 until step 3 quantizes it, so the scales of the old one do not apply.
            partition_state.pop(SCALE_KEY, None)
        partition_state.update(new_tensors, step=steps)
        # As in a new engine, whose optimizer has no state before its first step.
        if not steps:
            partition_state.clear()
    # 3. int8 momentum, and the weights of the forward pass.
    if state.optimizer.state_policy.quantizes_momentum:
        for runner in state.optimizer.runners:
            runner.convert_momentum(state.optimizer.state)
    state.bound_engine.view.refresh_weights()


def _write_partitions(plan: _RestorePlan) -> None:
    for parameter, key, flat in plan.writes:
        for fragment in parameter.local_fragments(key):
            saved = plan.source.parameters[parameter.name]
            saved_key = "exp_avg" if key == "momentum_buffer" and saved.algorithm == "adamw" else key
            if saved_key in saved.tensor_keys:
                read_fragment(plan.source, parameter.slice_of(key), saved_key, fragment, flat)
            else:
                # The saved run did not have this state: it had another variant, or the parameter had taken no step.
                flat.narrow(0, fragment.partition_offset, fragment.numel).zero_()
        if key not in plan.new_tensors.get(parameter.partition, ()):
            plan.state.write_back(parameter.local_partition, key, flat)


def read_fragment(
    source: ConsolidatedSource, tensor_slice: TensorSlice, key: str, fragment: Fragment, flat: Tensor
) -> None:
    """Read a rank's fragment of a slice into its flat partition, some megabytes at a time.

    Args:
        source: The set.
        tensor_slice: Which slice of the full tensor the data-parallel group holds.
        key: ``fp32`` or a key of the state.
        fragment: Which elements of the slice the rank holds.
        flat: The rank's flat partition. Mutated.
    """
    target, offset = flat.narrow(0, fragment.partition_offset, fragment.numel), fragment.matrix_offset
    # 1. The range of the full tensor around the fragment; with a slice of columns it includes other slices.
    full_start, full_last = (
        next(tensor_slice.strided_ranges(element, element + 1)).full_offset
        for element in (offset, offset + fragment.numel - 1)
    )
    # 2. Read it in windows, and copy the fragment's elements out of each.
    for window_start in range(full_start, full_last + 1, WINDOW_NUMEL):
        window_stop = min(window_start + WINDOW_NUMEL, full_last + 1)
        # The elements of the fragment inside this window of the full tensor.
        start = max(tensor_slice.local_elements_before(window_start), offset)
        stop = tensor_slice.local_elements_before(window_stop)
        if start < stop:
            # (window_stop - window_start,) fp32
            window = source.read(tensor_slice.name, key, window_start, window_stop - window_start)
            for elements, values in tensor_slice.views(start, stop, target, offset, window, window_start):
                elements.copy_(values)


# ---- the set that a folder stands for ----------------------------------------------------------------------


def universal_set(folder: Path) -> Path:
    """Return the folder of the set in a universal checkpoint; raise a CheckpointError for one that has none."""
    if (folder / "zero").is_dir() and not _exists(folder / "zero" / INDEX_NAME):
        raise CheckpointError(
            f"{folder}: a universal checkpoint of DeepSpeed's converter, which this Muon does not read: convert the "
            f"checkpoint that it was made from with 'python -m deepspeed_muon checkpoint universal'"
        )
    return folder / "zero"


def find_consolidated(folder: Path) -> Path:
    """Return the folder with the index: ``folder`` itself, or one inside a DeepSpeed checkpoint.

    If the tag that ``latest`` names has no set, the newest complete set of any tag is taken.
    """
    with refusing(f"{str(folder)!r}"):
        require_folder(folder)
        # 1. The folder itself, its set, and the set of the latest tag.
        tag = latest_tag(folder)
        tag_folder = folder / tag if tag is not None and is_inside(tag) else folder
        sets_inside = dict.fromkeys(parent / CONSOLIDATED_FOLDER for parent in (folder, tag_folder))
        for candidate in (folder, *sets_inside):
            if _exists(candidate / INDEX_NAME):
                return candidate
        # 2. The newest complete set of any tag.
        complete = []
        for path in folder.glob(f"*/{CONSOLIDATED_FOLDER}/{INDEX_NAME}"):
            with contextlib.suppress(CheckpointError, OSError):
                index = load_index(path.parent)
                if all(regular_size(path.parent / name) == file.bytes for name, file in index.files.items()):
                    complete.append((index.progress.global_steps, path.stat().st_mtime, path.parent))
        if complete:
            steps, _, newest = max(complete)
            latest = "no file 'latest'" if tag is None else f"'latest' names {tag!r}, which has no set"
            warn(
                "deepspeed_muon: %s: %s; %s, of step %d, is the newest complete one",
                folder,
                latest,
                newest,
                steps,
            )
            return newest
    # 3. None: say what the folder is instead.
    saved = identify_tag(tag_folder)
    if saved is not None:
        saved.refuse_universal()
        raise CheckpointError(f"{saved}, and not consolidated: {saved.remedy()}")
    raise CheckpointError(
        f"{folder}: no {INDEX_NAME} there, nor in {', '.join(map(str, sets_inside))}: not a consolidated checkpoint, "
        f"or its save did not finish"
    )


def _exists(path: Path) -> bool:
    """Return whether a path exists, also as a broken link; raise if that cannot be determined."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
