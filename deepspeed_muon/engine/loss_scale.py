"""Loss scales and skipped steps under ZeRO: two defects of DeepSpeed, and steps that only our optimizer knows to skip.

**A scale that grows.** ZeRO updates the scale first and unscales afterwards. In a step after which the scale doubles,
gradients are therefore divided by twice what the loss was multiplied with. Here the scale grows after the step.

**``torch_autocast`` in fp16.** ZeRO multiplies the loss by the scale of a ``torch.amp.GradScaler`` and leaves it to
the scaler to unscale inside of ``optimizer.step()``. Three things go wrong:

- The reported norm, with which ``gradient_clipping`` compares, is that of scaled gradients.
- A step whose norm is not finite returns before the scaler hears of it, so the scale never falls and every later step
  is skipped too.
- With several partitions the scale is updated once for each of them.

DeepSpeed's own ``DynamicLossScaler`` does all of this right, so it takes the place of the ``GradScaler``. ZeRO decides
by a flag of the process whether it uses one: an engine made after one with ``torch_autocast`` gets a ``GradScaler``
too, which then hides its own loss scale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_muon.errors import NonFiniteGradientError

__all__ = [
    "grow_after_step",
    "look_for_overflow",
    "overflow_is_error",
    "raise_on_overflow",
    "report_skipped_step",
    "scale_may_grow",
    "shrink_scale",
    "use_deepspeed_scaler",
]


def use_deepspeed_scaler(engine: Any) -> None:
    """Replace the wrapper's GradScaler by a dynamic loss scale with the same start, growth and backoff.

    Where the engine does not use ``torch_autocast``, the scaler is left over from another engine of the process: it is
    removed and the loss scale stays the engine's own.
    """
    wrapper = engine.optimizer
    scaler = getattr(wrapper, "torch_autocast_gradscaler", None)
    if scaler is None or not isinstance(wrapper, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        return
    wrapper.torch_autocast_gradscaler = None
    if not engine.torch_autocast_enabled():
        return
    wrapper.loss_scaler = DynamicLossScaler(
        init_scale=scaler.get_scale(),
        scale_window=scaler.get_growth_interval(),
        min_scale=1.0,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
        dtype=torch.float16,
    )
    wrapper.dynamic_loss_scale = True
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        wrapper.check_grad_overflow = True


def scale_may_grow(engine: Any) -> bool:
    """Return whether the wrapper of ``engine`` has a dynamic loss scale that ZeRO updates."""
    wrapper = engine.optimizer
    known = isinstance(wrapper, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3))
    return known and bool(wrapper.dynamic_loss_scale)


def shrink_scale(original: Callable[..., Any], wrapper: Any, has_overflow: bool = False) -> None:
    """Lower the scale at once after an overflow; :func:`grow_after_step` raises it."""
    if has_overflow:
        original(has_overflow)


@contextlib.contextmanager
def grow_after_step(wrapper: Any) -> Iterator[None]:
    """Update the scale after a step whose gradients carry the old one."""
    yield
    if not wrapper.overflow:
        type(wrapper)._update_scale(wrapper, False)


def look_for_overflow(wrapper: Any) -> None:
    """Let ZeRO 1 and 2 always look for gradients that are not finite, so that they skip a step as a whole."""
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        looks = wrapper.dtype != torch.bfloat16 and getattr(wrapper, "compute_grad_norm", True)
        wrapper.check_grad_overflow = getattr(wrapper, "check_grad_overflow", False) or not looks


@contextlib.contextmanager
def report_skipped_step(wrapper: Any) -> Iterator[None]:
    """Set ``overflow`` of a wrapper after a step that our optimizer inside it skipped."""
    before = wrapper.optimizer.skipped_steps
    yield
    if wrapper.optimizer.skipped_steps > before:
        wrapper.overflow = True


def overflow_is_error(engine: Any) -> bool:
    """Return whether the configuration makes a step that ZeRO skips by itself an error."""
    wanted = engine.basic_optimizer.config.nonfinite_grad == "error" and not engine.fp16_enabled()
    return wanted and hasattr(engine.optimizer, "overflow")


@contextlib.contextmanager
def raise_on_overflow(wrapper: Any) -> Iterator[None]:
    """Turn a step that ZeRO skipped into an error; all ranks agree on ``overflow``."""
    yield
    if wrapper.overflow:
        raise NonFiniteGradientError(
            "the global gradient norm is not finite and optimizer.params.nonfinite_grad is 'error'; DeepSpeed left "
            "weights and optimizer state unchanged"
        )
