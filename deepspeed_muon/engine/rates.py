"""Names both rates where a program logs one: DeepSpeed's monitor and ``transformers.Trainer`` log the first group's.

That is Muon's group, so the rate of embeddings, heads and vectors would be seen nowhere.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from deepspeed_muon.optimizer import Muon

__all__ = ["forget_trainer", "monitor_rates", "name_rates_in_trainer", "rates"]

_KEYS = {"muon": "muon_lr", "adamw": "adam_lr"}

_TRAINER: list[tuple[Any, Any, Any]] = []
"""The class of transformers whose ``on_log`` is replaced, the original and the replacement; empty while none is."""


def rates(optimizer: Muon, *, of_step: bool = False) -> dict[str, float]:
    """Return ``muon_lr`` and ``adam_lr``; where several groups have one algorithm, the first one's.

    Args:
        optimizer: The optimizer.
        of_step: Whether to return those of the last step, which a schedule may have changed since.
    """
    found: dict[str, float] = {}
    for group in optimizer.param_groups:
        rate = float(group["lr"])
        found.setdefault(
            _KEYS[group["algorithm"]], optimizer.rates_of_step.get(id(group), rate) if of_step else rate
        )
    return found


def monitor_rates(optimizer: Muon, samples: int) -> list[tuple[str, float, int]]:
    """Return the rates as events of DeepSpeed's monitor, beside its ``Train/Samples/lr``."""
    return [(f"Train/Samples/{key}", rate, samples) for key, rate in rates(optimizer).items()]


def name_rates_in_trainer() -> None:
    """Add both rates to what the Trainer logs, if the program has imported it. Calling it again does nothing."""
    handler = getattr(sys.modules.get("transformers.trainer_callback"), "CallbackHandler", None)
    if handler is None or _TRAINER:
        return
    original = handler.on_log

    @functools.wraps(original)
    def on_log(self: Any, args: Any, state: Any, control: Any, logs: Any, *more: Any, **kwargs: Any) -> Any:
        optimizer = _muon_in(getattr(self, "optimizer", None))
        if optimizer is not None and "learning_rate" in logs:
            # The Trainer logs the rate before or after its schedule's step, as the schedule is its own or DeepSpeed's.
            of_step = logs["learning_rate"] != float(optimizer.param_groups[0]["lr"])
            for log in (logs, *state.log_history[-1:]):
                log.update(rates(optimizer, of_step=of_step))
        return original(self, args, state, control, logs, *more, **kwargs)

    handler.on_log = on_log
    _TRAINER.append((handler, original, on_log))


def forget_trainer() -> None:
    """Put the Trainer's own function back, unless another library has replaced it since."""
    while _TRAINER:
        handler, original, ours = _TRAINER.pop()
        if handler.on_log is ours:
            handler.on_log = original


def _muon_in(optimizer: Any) -> Muon | None:
    """Return our optimizer inside the wrappers of Accelerate and of ZeRO; ``None`` for another one."""
    while optimizer is not None and not isinstance(optimizer, Muon):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer
