"""Replacements of methods that an engine calls after its optimizer is bound: its schedule, its steps, its saves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from deepspeed_muon.checkpoint import CONSOLIDATED_FOLDER, consolidate, restore
from deepspeed_muon.engine.accessors import muon_of
from deepspeed_muon.engine.schedulers import keep_rate_ratios
from deepspeed_muon.monitoring.summary import monitor_events
from deepspeed_muon.transport.waiting import phase

__all__ = ["configure_lr_scheduler", "save_checkpoint", "take_model_step"]


def configure_lr_scheduler(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Let DeepSpeed make the scheduler, restore the ratio between the groups' rates in it, load ``restore_from``."""
    result = original(engine, *args, **kwargs)
    optimizer = muon_of(engine)
    if optimizer is not None:
        from_config = engine.client_lr_scheduler is None
        given = (engine.scheduler_params() or {}) if from_config else {}
        keep_rate_ratios(engine.lr_scheduler, optimizer, given=given)
        if optimizer.config.restore_from is not None:
            arguments = optimizer.config.restore_from.model_dump()
            restore(engine, arguments.pop("path"), **arguments)
    return result


def take_model_step(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the step, record its health, and write a sampled step to the monitor.

    It is the boundary of a step in the plain engine and in the pipeline engine. All ranks reach it, also when the
    gradients overflow.
    """
    optimizer = muon_of(engine)
    if optimizer is None:
        return original(engine, *args, **kwargs)
    number = engine.global_steps + 1
    with (
        optimizer.health_log.step(number, members=optimizer.members),
        contextlib.ExitStack() as waiting,
    ):
        for group in optimizer.process_groups():
            # DeepSpeed's own collectives of the step are part of it: the norm of the gradients at stages 1 and 2.
            waiting.enter_context(phase(f"step {number}", group))
        result = original(engine, *args, **kwargs)
    optimizer.check_arrived()
    if optimizer.recorder.due(number) and engine.monitor.enabled:
        engine.monitor.write_events(monitor_events(optimizer.health(), engine.global_samples))
    return result


def save_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Let DeepSpeed save, then write the consolidated set beside its files if the configuration says so."""
    result = original(engine, *args, **kwargs)
    optimizer = muon_of(engine)
    if optimizer is not None and optimizer.config.consolidate_on_save:
        given = dict(zip(("save_dir", "tag"), args, strict=False)) | kwargs
        tag = given.get("tag")
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        consolidate(engine, os.path.join(given["save_dir"], name, CONSOLIDATED_FOLDER))
    return result
