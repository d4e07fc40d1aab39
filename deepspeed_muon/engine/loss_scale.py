"""Loss scales and skipped steps under ZeRO: two defects of DeepSpeed, and steps that it does not know to be skipped.

**A scale that grows.** ZeRO updates the scale first and unscales afterwards. In a step after which the scale doubles,
gradients are therefore divided by twice what the loss was multiplied with. Here the scale grows after the step.

**``torch_autocast`` in fp16.** ZeRO multiplies the loss by the scale of a ``torch.amp.GradScaler`` and leaves it to
the scaler to unscale inside of ``optimizer.step()``. Everything before sees scaled gradients: the norm that is
reported and that ``gradient_clipping`` compares with is too large by the scale; a step whose norm is not finite
returns before the scaler hears of it, so that the scale never falls and no step succeeds again; and where there are
several partitions the scale is updated once for each of them. DeepSpeed's ``DynamicLossScaler`` has its place in all
of this already. The flag by which ZeRO decides on that scaler belongs to the process: an engine made after one with
``torch_autocast`` gets a ``GradScaler`` too, which then hides its own loss scale.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

__all__ = ["grow_after_step", "report_skipped_steps", "use_deepspeed_scaler"]


def use_deepspeed_scaler(engine: Any) -> bool:
    """Replace the wrapper's GradScaler by a dynamic loss scale with the same start, growth and backoff.

    Where the engine does not use ``torch_autocast``, the scaler is left over from another engine of the process: it is
    removed and the loss scale stays the engine's own.

    Args:
        engine: the DeepSpeed engine; its ZeRO wrapper is changed.

    Returns:
        Whether a GradScaler of this engine's was replaced.
    """
    wrapper = engine.optimizer
    scaler = getattr(wrapper, "torch_autocast_gradscaler", None)
    if scaler is None or not isinstance(wrapper, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        return False
    wrapper.torch_autocast_gradscaler = None
    if not engine.torch_autocast_enabled():
        return False
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
    return True


def grow_after_step(wrapper: Any) -> None:
    """Let a dynamic loss scale grow after the step whose gradients carry the old one. Overflows act at once.

    Args:
        wrapper: ``engine.optimizer``.
    """
    if not isinstance(wrapper, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        return
    if not wrapper.dynamic_loss_scale:
        return
    original_step, original_update = wrapper.step, wrapper._update_scale

    def update(has_overflow: bool = False) -> None:
        if has_overflow:
            original_update(has_overflow)

    def step(*args: Any, **kwargs: Any) -> Any:
        result = original_step(*args, **kwargs)
        if not wrapper.overflow:
            original_update(False)
        return result

    wrapper._update_scale = update
    wrapper.step = step


def report_skipped_steps(wrapper: Any, optimizer: Any) -> None:
    """Have a wrapper say ``overflow`` of a step that our optimizer skipped, and skip all of it or nothing.

    Args:
        wrapper: ``engine.optimizer``; left alone where it is our optimizer itself, which says so.
        optimizer: Our optimizer.
    """
    if wrapper is optimizer:
        return
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        looks = wrapper.dtype != torch.bfloat16 and getattr(wrapper, "compute_grad_norm", True)
        wrapper.check_grad_overflow = getattr(wrapper, "check_grad_overflow", False) or not looks
    original_step = wrapper.step

    def step(*args: Any, **kwargs: Any) -> Any:
        before = optimizer.skipped_steps
        result = original_step(*args, **kwargs)
        if optimizer.skipped_steps > before:
            wrapper.overflow = True
        return result

    wrapper.step = step
