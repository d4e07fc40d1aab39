"""The settings of a run in a checkpoint: param groups, counters, schedule, loss scale; checked before they are used.

Settings of param groups pass the checks of ``optimizer.params``, and a schedule must fit the scheduler.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_muon.checkpoint.index import COUNTERS, CheckpointIndex, Progress
from deepspeed_muon.checkpoint.parameters import LiveState, host_of, optimizer_of
from deepspeed_muon.config.settings import GroupSettings, checked_group_settings
from deepspeed_muon.errors import CheckpointError, ConfigError
from deepspeed_muon.logs import logger, warn
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.variants import SETTINGS as VARIANT_SETTINGS
from deepspeed_muon.variants import VARIANTS

# Counters of schedulers, of torch and of DeepSpeed; -1 before the first step.
_SCHEDULER_COUNTERS = ("last_epoch", "_step_count", "last_batch_iteration")
# Schedulers of torch that compute their rates from the count of steps, without the method _get_closed_form_lr.
_CLOSED_FORM = (
    torch.optim.lr_scheduler.LambdaLR,
    torch.optim.lr_scheduler.OneCycleLR,
    torch.optim.lr_scheduler.CyclicLR,
)


# ---- param groups ------------------------------------------------------------------------------------------


def checked_settings(groups: Sequence[Mapping[str, object]], where: str) -> list[GroupSettings]:
    """Return the settings of every saved param group that a run takes over, checked as ``optimizer.params`` would be.

    Raises:
        CheckpointError: Naming the checkpoint ``where`` and every group and key that cannot be used.
    """
    settings: list[GroupSettings] = []
    problems: list[str] = []
    for number, group in enumerate(groups):
        try:
            settings.append(checked_group_settings(group, f"param group {number}"))
        except ConfigError as error:
            problems += str(error).splitlines()
    if problems:
        raise CheckpointError(
            f"{where}: settings of param groups cannot be used:\n"
            + "\n".join(problems[:20])
            + "\npass hyperparameters=False to keep those of the configuration"
        )
    return settings


def group_settings(state: LiveState, index: CheckpointIndex, where: str) -> dict[int, dict[str, Any]]:
    """Return the saved settings for each live param group: those on which all its parameters agree.

    Args:
        state: Of the engine.
        index: Of the checkpoint.
        where: The checkpoint, for errors.
    """
    checked_groups = checked_settings(index.groups, where)
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
        # These betas may be AdamW's, which a momentum schedule of torch would write into Muon's momentum.
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


def write_progress(optimizer: Muon, progress: Progress, where: str, *, scheduler: bool, rates: bool) -> None:
    """Set the engine's counters, schedule and loss scale.

    Args:
        optimizer: The engine's optimizer. Mutated, and so is the engine, also if this raises.
        progress: Checked by :func:`check_schedule`.
        where: The checkpoint, for messages.
        scheduler: Whether to set the schedule too.
        rates: Whether to take the schedule's rates. Otherwise it continues from the saved count with its own rates,
            which are set in the param groups.

    Raises:
        CheckpointError: If the scheduler does not take its state.
    """
    host = host_of(optimizer)
    host.set_counters({key: getattr(progress, key) for key in COUNTERS})
    live_scheduler = host.engine.lr_scheduler
    if scheduler and live_scheduler is not None and progress.lr_scheduler is not None:
        try:
            live_scheduler.load_state_dict(_state_to_load(live_scheduler, progress.lr_scheduler, rates))
            if not rates:
                _set_rates_from_count(live_scheduler, optimizer)
        except Exception as error:
            raise _unfit(live_scheduler, progress, where, f"{type(error).__name__}: {error}") from error
    elif scheduler and live_scheduler is not None:
        warn("deepspeed_muon: the checkpoint holds no state for the scheduler, which starts afresh")
    if progress.loss_scale is not None:
        host.set_loss_scale(progress.loss_scale)


def _state_to_load(scheduler: Any, saved: Mapping[str, Any], rates: bool) -> dict[str, Any]:
    """Return a scheduler's own state, updated with the saved one, or with the saved count alone."""
    live = scheduler.state_dict()
    count = {key: saved[key] for key in _SCHEDULER_COUNTERS if key in saved}
    state = {**live, **(saved if rates else count)}
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


def check_schedule(scheduler: Any, progress: Progress, where: str, *, rates: bool) -> None:
    """Raise if the saved schedule does not fit a scheduler, or has a value with which a later step would fail.

    Args:
        scheduler: The scheduler of this run, or ``None``. Not changed.
        progress: With the state of the saved one, if there is any.
        where: The checkpoint, for the message.
        rates: Whether its rates would be taken, not the count alone.

    Raises:
        CheckpointError: Naming what cannot be used, and the argument that leaves it out.
    """
    if scheduler is None or progress.lr_scheduler is None:
        return
    problem = _schedule_problem(scheduler, progress.lr_scheduler, rates)
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


def _schedule_problem(scheduler: Any, saved: Mapping[str, Any], rates: bool) -> str | None:
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
    if not (rates or by_count or isinstance(scheduler, _CLOSED_FORM)):
        return "rates stay those of the configuration, and it cannot compute them from a count of steps"
    state = _state_to_load(scheduler, saved, rates)
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
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float)):
        return "number"
    return "list" if isinstance(value, tuple) else type(value).__name__


# ---- before and after a load -------------------------------------------------------------------------------


class SettingsSnapshot:
    """The counters, schedule and param group settings of an engine as they were before a load."""

    def __init__(self, engine: Any) -> None:
        """Copy them."""
        self._optimizer = optimizer_of(engine)
        self._host = host_of(self._optimizer)
        self._counters = self._host.counters()
        self._scheduler = engine.lr_scheduler
        # Both: the attributes include what a state_dict() leaves out, the state copies what the attributes refer to.
        self._scheduler_attributes = dict(getattr(self._scheduler, "__dict__", {}))
        self._scheduler_state: Any = None
        if self._scheduler is not None and hasattr(self._scheduler, "state_dict"):
            self._scheduler_state = copy.deepcopy(self._scheduler.state_dict())
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
        """Set the engine's counters, schedule and param group settings to what they were."""
        self._host.set_counters(self._counters)
        if hasattr(self._scheduler, "__dict__"):
            self._scheduler.__dict__.clear()
            self._scheduler.__dict__.update(self._scheduler_attributes)
        if self._scheduler_state is not None:
            # What the attributes refer to, such as the schedulers inside a SequentialLR, may have been changed too.
            self._scheduler.load_state_dict(copy.deepcopy(self._scheduler_state))
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            # Keys that the load has added.
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            group.update(settings)


def _as_json(value: object) -> Any:
    """Return a setting as JSON would hold it, for comparison and display."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
