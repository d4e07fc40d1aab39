"""A running engine: its schedule, its steps, and the rates that it writes to the monitor.

DeepSpeed writes the rate of the first group alone to the monitor, which is Muon's; that of embeddings, heads and
vectors would be seen nowhere.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_muon.checkpoint import restore
from deepspeed_muon.checkpoint.parameters import bound_engine_of
from deepspeed_muon.engine import muon_of
from deepspeed_muon.engine.patching import Original
from deepspeed_muon.engine.views import Memory, view_of
from deepspeed_muon.errors import CheckpointError, RoutingError
from deepspeed_muon.logs import listed, warn
from deepspeed_muon.monitoring.recorder import monitor_events
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.param_groups import CALLER_GROUP
from deepspeed_muon.transport.ranks import phase

_RATE_KEYS = {"muon": "muon_lr", "adamw": "adam_lr"}


def configure_lr_scheduler(
    original: Original, engine: DeepSpeedEngine, *args: object, **kwargs: object
) -> object:
    """Let DeepSpeed make the scheduler, restore the ratio between the groups' rates in it, load ``restore_from``."""
    optimizer = muon_of(engine)
    if optimizer is None:
        return original(engine, *args, **kwargs)
    configured = rates(optimizer)  # before the schedule writes its first rates
    try:
        result = original(engine, *args, **kwargs)
    except ValueError as error:
        shown = ", ".join(f"{g['algorithm']} of group {g[CALLER_GROUP]}" for g in optimizer.param_groups)
        raise RoutingError(
            f"lr_scheduler: {error}. Each group of the program is divided into one of Muon and one of AdamW, so that "
            f"the optimizer has {len(optimizer.param_groups)}: {shown}. Choose functions and numbers by "
            f"group['{CALLER_GROUP}']"
        ) from error
    from_config = engine.client_lr_scheduler is None
    given = dict(engine.scheduler_params() or {}) if from_config else {}
    is_warmup = isinstance(engine.lr_scheduler, lr_schedules.WarmupLR)
    if from_config and is_warmup and "warmup_max_lr" not in given:
        # The default; None stands for the rates of the groups.
        peak = inspect.signature(type(engine.lr_scheduler)).parameters["warmup_max_lr"].default
        given["warmup_max_lr"] = peak
        if peak is not None:
            _warn_of_default_peak(engine.lr_scheduler, peak, configured, optimizer.config.reference_lr)
    _keep_rate_ratios(engine.lr_scheduler, optimizer, given=given)
    # Optimizer, wrapper and schedule, which a restore changes, exist only now.
    if source := optimizer.config.restore_from:
        try:
            restore(engine, source.path, progress=source.progress, hyperparameters=source.progress)
        except CheckpointError as error:
            raise CheckpointError(f"optimizer.params.restore_from: {error}") from error
    return result


def _warn_of_default_peak(
    scheduler: Any, peak: float, configured: Mapping[str, float], reference: float
) -> None:
    """Warn if the rates rise to a number that DeepSpeed chose, and not to the configured ones."""
    if reference in (0.0, peak):
        return
    # The ratios are kept (_keep_rate_ratios): a group at half of the reference rate reaches half of the peak.
    reached = [
        f"{key} {rate * peak / reference:.3g} instead of {rate:.3g}" for key, rate in configured.items()
    ]
    warn(
        "deepspeed_muon: scheduler.params has no warmup_max_lr, so %s takes the rates to its default %g: %s. Set "
        "warmup_max_lr to %g",
        type(scheduler).__name__,
        peak,
        ", ".join(reached),
        reference,
    )


def take_model_step(original: Original, engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
    """Take the step, record its health, and write its rates, and what was sampled, to the monitor.

    The plain engine and the pipeline engine call it once a step, on all ranks, also when the gradients overflow.
    """
    optimizer, view = engine.basic_optimizer, view_of(engine.optimizer)
    bound_engine = bound_engine_of(optimizer)
    bound_engine.require_restored()
    bound_engine.step_thread = threading.get_ident()
    optimizer._check_settings()
    _warn_of_unfrozen(view.memory)
    optimizer._record_norms({})
    number, recorder = engine.global_steps + 1, optimizer.recorder
    skipped_before = engine.skipped_steps
    with (
        recorder.step(number, ranks=optimizer.ranks) as sample,
        contextlib.ExitStack() as waiting,
    ):
        for group in optimizer._bound_steps.process_groups:
            # DeepSpeed's own collectives of the step are part of it: at stages 1 and 2 it gathers the weights.
            waiting.enter_context(phase(f"step {number}", group))
        result = original(*args, **kwargs)
        if sample is not None:
            sample.grad_norms = _grad_norms(optimizer)
        norm = engine.get_global_grad_norm()
        limit = engine.gradient_clipping() if view.loaded_clipping is None else view.loaded_clipping
        if engine.skipped_steps == skipped_before and norm is not None and limit > 0:
            recorder.record_clipping(norm, limit)
    if engine.monitor.enabled:
        current = {**rates(optimizer), **_grad_norms(optimizer)}
        events = [(f"Train/Samples/{key}", value, engine.global_samples) for key, value in current.items()]
        if recorder.due(number):
            events += monitor_events(optimizer.health(), engine.global_samples)
        engine.monitor.write_events(events)
    return result


def _warn_of_unfrozen(memory: Memory) -> None:
    """Warn once of each parameter that was frozen when the engine was made and has a gradient now."""
    names = [name for name, param in memory.frozen if param.requires_grad and param.grad is not None]
    if names:
        memory.frozen = [(name, param) for name, param in memory.frozen if name not in names]
        warn(
            "deepspeed_muon: parameters were unfrozen after deepspeed.initialize and do not train: %s. Unfreeze them "
            "before deepspeed.initialize, or make a new engine",
            listed(names, 5),
        )


def _grad_norms(optimizer: Muon) -> dict[str, float]:
    """Return the norms of Muon's and of AdamW's raw gradients in the last step, as far as they were measured."""
    norms = optimizer.norms_by_algorithm or {}
    return {f"grad_norm_{algorithm}": float(norm) for algorithm, norm in norms.items()}


def _keep_rate_ratios(scheduler: Any, optimizer: torch.optim.Optimizer, *, given: Mapping[str, Any]) -> None:
    """Keep the ratio of the groups' rates in DeepSpeed's schedulers that write one number into all groups.

    The number in ``warmup_max_lr``, ``cycle_max_lr`` or ``lr_range_test_min_lr`` is the rate of a group with ``lr``
    (with ``muon_lr`` if ``lr`` is absent). A group whose own rate is a tenth of that gets a tenth of the number. Lists
    with one value per group are not changed.

    Args:
        scheduler: The scheduler that DeepSpeed made or the client passed. Mutated.
        optimizer: Our optimizer, whose groups (with their ``lr_ratio``) it writes.
        given: The scheduler's section of the configuration, which shows whether equal rates were given as one number.
    """
    # Scheduler to its attributes with one value per group, and the configuration keys that fill them. The first
    # attribute has the rates of the first iteration.
    kinds: list[tuple[type, dict[str, str]]] = [
        (lr_schedules.LRRangeTest, {"min_lr": "lr_range_test_min_lr"}),
        (lr_schedules.OneCycle, {"min_lrs": "cycle_min_lr", "max_lrs": "cycle_max_lr"}),
        (lr_schedules.WarmupLR, {"min_lrs": "warmup_min_lr", "max_lrs": "warmup_max_lr"}),
    ]
    keys = next((keys for kind, keys in kinds if isinstance(scheduler, kind)), None)
    if keys is None:
        return
    ratios = [float(group["lr_ratio"]) for group in optimizer.param_groups]
    for attribute, key in keys.items():
        values = getattr(scheduler, attribute)
        # With warmup_max_lr null the scheduler has made a list of the groups' own rates.
        if len(set(values)) == 1 and not isinstance(given.get(key, 0.0), (list, tuple, type(None))):
            setattr(scheduler, attribute, [float(v) * ratio for v, ratio in zip(values, ratios, strict=True)])
    if isinstance(scheduler, lr_schedules.WarmupLR):  # computed once from the two
        scheduler.delta_lrs = [
            high - low for high, low in zip(scheduler.max_lrs, scheduler.min_lrs, strict=True)
        ]
    # As the scheduler did when it was made, write its lower bounds, or the rates of the iteration that it starts from.
    started = scheduler.last_batch_iteration >= 0
    current = scheduler.get_lr() if started else getattr(scheduler, next(iter(keys)))
    for group, rate in zip(optimizer.param_groups, current, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(current)


def rates(optimizer: Muon) -> dict[str, float]:
    """Return ``muon_lr`` and ``adam_lr``; where several groups have one algorithm, the first one's."""
    rate_of: dict[str, float] = {}
    for group in optimizer.param_groups:
        rate_of.setdefault(_RATE_KEYS[group["algorithm"]], float(group["lr"]))
    return rate_of
