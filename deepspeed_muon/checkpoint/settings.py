"""What a checkpoint holds of the run: settings of groups, counters, loss scale, schedule; checked before use.

Settings must pass the checks of ``optimizer.params``, and a schedule must fit the scheduler.
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
from deepspeed_muon.checkpoint.live import LiveState, host_of, optimizer_of
from deepspeed_muon.config.settings import GroupSettings, checked_group_settings
from deepspeed_muon.errors import CheckpointError, ConfigError
from deepspeed_muon.logs import logger, warn
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.variants import SETTINGS as VARIANT_SETTINGS
from deepspeed_muon.variants import VARIANTS

# Counters of schedulers, of torch and of DeepSpeed; -1 before the first step.
_COUNTERS = ("last_epoch", "_step_count", "last_batch_iteration")
# Schedulers of torch without a closed form whose rates follow from the count nevertheless.
_BY_COUNT = (
    torch.optim.lr_scheduler.LambdaLR,
    torch.optim.lr_scheduler.OneCycleLR,
    torch.optim.lr_scheduler.CyclicLR,
)


def checked_settings(groups: Sequence[Mapping[str, object]], where: str) -> list[GroupSettings]:
    """Return what a run takes over from every saved param group, checked as ``optimizer.params`` would be.

    Raises:
        CheckpointError: Naming the checkpoint ``where`` and every group and key that cannot be used.
    """
    checked: list[GroupSettings] = []
    problems: list[str] = []
    for number, group in enumerate(groups):
        try:
            checked.append(checked_group_settings(group, f"param group {number}"))
        except ConfigError as error:
            problems += str(error).splitlines()
    if problems:
        raise CheckpointError(
            f"{where}: settings of param groups cannot be used:\n"
            + "\n".join(problems[:20])
            + "\npass hyperparameters=False to keep those of the configuration"
        )
    return checked


def group_settings(state: LiveState, index: CheckpointIndex, where: str) -> dict[int, dict[str, Any]]:
    """Return, by number of the param group, the settings on which the checkpoint agrees for all its parameters."""
    groups = checked_settings(index.groups, where)
    saved: dict[int, set[int]] = {}
    for parameter in state.parameters.values():
        saved.setdefault(parameter.record.group, set()).add(index.parameters[parameter.name].group)
    found: dict[int, dict[str, Any]] = {}
    for number, origins in saved.items():
        group = state.optimizer.param_groups[number]
        # The stages of a pipeline may number their groups differently, and one stage's are saved.
        algorithm = group["algorithm"]
        fitting = [n for n in sorted(origins) if index.groups[n].get("algorithm", algorithm) == algorithm]
        settings = [groups[origin] for origin in fitting]
        found[number] = {}
        keys = group.keys() & (set.intersection(*map(set, settings)) if settings else set())
        # Perhaps those of AdamW, which a momentum schedule of torch would write into Muon's momentum.
        if algorithm == "muon" and any("algorithm" not in index.groups[origin] for origin in fitting):
            keys.discard("betas")
        for key in sorted(keys):
            values = [entry[key] for entry in settings]
            if any(value != values[0] for value in values):
                warn(
                    "deepspeed_muon: param group %d joins parameters that had %s = %s; the configuration's value stays",
                    number,
                    key,
                    values,
                )
            else:
                found[number][key] = values[0]
    return found


def write_progress(optimizer: Muon, progress: Progress, where: str, *, scheduler: bool, rates: bool) -> None:
    """Set the engine's counters, schedule and loss scale.

    Args:
        optimizer: The engine's optimizer. Mutated, and so is the engine, also where this raises.
        progress: What :func:`check_schedule` found to be usable.
        where: The checkpoint, for messages.
        scheduler: Whether to set the schedule too.
        rates: Whether to take its rates; else it goes on from the saved count with its own, and sets those of the
            param groups.

    Raises:
        CheckpointError: If the scheduler does not take its state.
    """
    host = host_of(optimizer)
    host.set_counters({key: getattr(progress, key) for key in COUNTERS})
    own = host.engine.lr_scheduler
    if scheduler and own is not None and progress.lr_scheduler is not None:
        try:
            own.load_state_dict(_schedule(own, progress.lr_scheduler, rates))
            if not rates:
                _follow_count(own, optimizer)
        except Exception as error:
            raise _unfit(own, progress, where, f"{type(error).__name__}: {error}") from error
    elif scheduler and own is not None:
        warn("deepspeed_muon: the checkpoint holds no state for the scheduler, which starts afresh")
    if progress.loss_scale is not None:
        host.set_loss_scale(progress.loss_scale)


def _schedule(own: Any, saved: Mapping[str, Any], rates: bool) -> dict[str, Any]:
    """Return the state to load into a scheduler: its own with what was saved, or with the saved count alone."""
    live = own.state_dict()
    found = {**live, **(saved if rates else {key: saved[key] for key in _COUNTERS if key in saved})}
    for key, value in live.items():  # see saved_schedule
        if isinstance(value, Counter):
            found[key] = Counter(found[key])
        elif isinstance(value, float) and found[key] is None:
            found[key] = value
    return copy.deepcopy(found)


def _follow_count(own: Any, optimizer: Muon) -> None:
    """Set the rates of the param groups to those of a scheduler whose count was set."""
    if all(getattr(own, key, -1) < 0 for key in _COUNTERS):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants get_last_lr(), which the count did not change
        rates = [float(rate) for rate in getattr(own, "_get_closed_form_lr", own.get_lr)()]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    own._last_lr = rates


def check_schedule(own: Any, progress: Progress, where: str, *, rates: bool) -> None:
    """Raise if the saved schedule does not fit a scheduler, or would set a value on which a later step fails.

    Args:
        own: The scheduler of this run, or ``None``; not changed.
        progress: With the state of the saved one, if there is any.
        where: The checkpoint, for the message.
        rates: Whether its rates would be taken, not the count alone.

    Raises:
        CheckpointError: Naming what cannot be used, and the argument that leaves it out.
    """
    if own is None or progress.lr_scheduler is None:
        return
    if (problem := _problem(own, progress.lr_scheduler, rates)) is not None:
        raise _unfit(own, progress, where, problem)
    if progress.lr_scheduler_class not in (None, type(own).__name__):
        warn(
            "deepspeed_muon: the saved run's scheduler was %s, this run's is %s and goes on from the same count",
            progress.lr_scheduler_class,
            type(own).__name__,
        )


def _unfit(own: Any, progress: Progress, where: str, problem: str) -> CheckpointError:
    saved_class = progress.lr_scheduler_class
    was = f"was {saved_class}" if saved_class else "is not named in the checkpoint"
    return CheckpointError(
        f"{where}: the saved schedule does not fit the scheduler {type(own).__name__} of this run (the saved run's "
        f"{was}): {problem}; to go on with this run's own schedule, call deepspeed_muon.restore(..., scheduler=False) "
        f"and leave out restore_from"
    )


def _problem(own: Any, saved: Mapping[str, Any], rates: bool) -> str | None:
    """Return why a scheduler cannot go on from a saved state, with or without its rates."""
    if not hasattr(own, "state_dict") or not hasattr(own, "load_state_dict"):
        return "it takes no saved state"
    live = own.state_dict()
    # Attributes that begin with _ come and go with torch's versions.
    differing = {
        key for key in live.keys() ^ saved.keys() if not str(key).startswith("_") and key != "verbose"
    }
    if differing:
        return f"their states differ in {', '.join(sorted(map(str, differing)))}"
    by_count = hasattr(own, "last_batch_iteration") or hasattr(own, "_get_closed_form_lr")
    if not (rates or by_count or isinstance(own, _BY_COUNT)):
        return "rates stay those of the configuration, and it cannot compute them from a count of steps"
    saved = _schedule(own, saved, rates)
    for key in sorted(live.keys() & saved.keys()):
        mine, other = live[key], saved[key]
        if mine is None or other is None:
            continue
        if _kind(mine) != _kind(other):
            return f"{key} is {other!r}, this run's {mine!r}"
        if isinstance(other, (list, tuple)) and key.lstrip("_").endswith(("lrs", "lr")):
            if len(mine) != len(other):
                return f"{key} has {len(other)} values for {len(mine)} param groups"
            if any(_kind(rate) != "number" or not 0 <= rate < math.inf for rate in other):
                return f"{key} is {other!r}"
        if key in _COUNTERS and not (isinstance(other, int) and -1 <= other <= 1 << 40):
            return f"{key} is {other!r}"
    return None


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it, to compare and to show it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float)):
        return "number"
    return "list" if isinstance(value, tuple) else type(value).__name__


class Before:
    """The counters, the schedule and the param groups' settings of an engine, as they were before a load."""

    def __init__(self, engine: Any) -> None:
        """Copy them."""
        self._optimizer = optimizer_of(engine)
        self._host = host_of(self._optimizer)
        self._counters = self._host.counters()
        self._scheduler = engine.lr_scheduler
        self._attributes = dict(getattr(self._scheduler, "__dict__", {}))
        self._state: Any = None
        if self._scheduler is not None and hasattr(self._scheduler, "state_dict"):
            self._state = copy.deepcopy(self._scheduler.state_dict())
        self._groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def warn_of_replaced(self, what: str, way: str, others: Sequence[str] = ()) -> None:
        """Name the configured settings of the param groups that are others now, each key once with both values.

        Rates that a scheduler computes from its own settings are left out: it sets them again. So is a momentum that it
        cycles.

        Args:
            what: What replaced them.
            way: How to have the configured ones.
            others: Replaced settings that are not of param groups, in words.
        """
        config, scheduler = self._optimizer.config, self._scheduler
        rates = getattr(scheduler, "base_lrs", None)
        found = dict.fromkeys(others)
        for number, (group, was) in enumerate(zip(self._optimizer.param_groups, self._groups, strict=True)):
            muon = group["algorithm"] == "muon"
            keys = set(config.muon_defaults() if muon else config.adam_defaults())
            if getattr(scheduler, "cycle_momentum", False):
                keys -= {"momentum", "betas"}
            keys -= VARIANT_SETTINGS.keys() - {each.name for each in VARIANTS[config.variant].settings}
            for key in sorted(keys):
                before, now = was[key], group[key]
                if key == "lr" and rates is not None:
                    before, now = self._attributes["base_lrs"][number], rates[number]
                elif key == "lr" and (scheduler is not None or "initial_lr" in was):
                    continue
                if _plain(before) != _plain(now):
                    half = f"{'muon' if muon else 'adam'}_{key}"
                    name = key if getattr(config, half, None) is None else half
                    found[f"{name} is {_plain(now)!r}, configured {_plain(before)!r}"] = None
        if found and self._optimizer.ranks.position == 0:
            logger.warning(
                "deepspeed_muon: %s replaced configured settings by the checkpoint's: %s. To have the configured ones, "
                "%s",
                what,
                "; ".join(found),
                way,
            )

    def put_back(self) -> None:
        """Set them to what they were."""
        self._host.set_counters(self._counters)
        if hasattr(self._scheduler, "__dict__"):
            self._scheduler.__dict__.clear()
            self._scheduler.__dict__.update(self._attributes)
        if self._state is not None:
            # What the attributes refer to, such as the schedulers inside a SequentialLR, may have been changed too.
            self._scheduler.load_state_dict(copy.deepcopy(self._state))
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            group.update(settings)
