"""Loss scales and skipped steps: defects of DeepSpeed, and steps that only our optimizer knows to skip.

**A scale that grows.** ZeRO updates the scale first and unscales afterwards. In a step after which the scale doubles,
gradients are therefore divided by twice what the loss was multiplied with. Here the scale grows after the step. At
stage 0 in half precision, where the scale has grown too early as well, gradients are divided by the one that was
applied.

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
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch import Tensor

from deepspeed_muon.engine.zero import HalfView, View, Zero12View, ZeroView, view_of
from deepspeed_muon.errors import NonFiniteGradientError


def use_deepspeed_scaler(engine: Any) -> None:
    """Replace the wrapper's GradScaler by a dynamic loss scale with the same start, growth and backoff.

    Where the engine does not use ``torch_autocast``, the scaler is left over from another engine of the process: it is
    removed and the loss scale stays the engine's own.
    """
    view = view_of(engine.optimizer)
    if not isinstance(view, ZeroView):
        return
    scaler = view.take_grad_scaler()
    if scaler is None or not engine.torch_autocast_enabled():
        return
    view.use_scaler(
        DynamicLossScaler(
            init_scale=scaler.get_scale(),
            scale_window=scaler.get_growth_interval(),
            min_scale=1.0,
            delayed_shift=1,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=False,
            dtype=torch.float16,
        )
    )


def look_for_overflow(engine: Any) -> None:
    """Let ZeRO 1 and 2 always look for gradients that are not finite, so that they skip a step as a whole."""
    view = view_of(engine.optimizer)
    if isinstance(view, Zero12View):
        view.look_for_overflow()


def scale_may_grow(engine: Any) -> bool:
    """Return whether the wrapper of ``engine`` has a dynamic loss scale that ZeRO updates."""
    view = view_of(engine.optimizer)
    return isinstance(view, ZeroView) and view.scale_may_grow


def shrink_scale(original: Callable[..., Any], view: View, has_overflow: bool = False) -> None:
    """Lower the scale at once after an overflow; :func:`grow_after_step` raises it."""
    if has_overflow:
        original(has_overflow)


@contextlib.contextmanager
def grow_after_step(view: ZeroView) -> Iterator[None]:
    """Update the scale after a step whose gradients carry the old one."""
    yield
    if not view.wrapper.overflow:
        view.grow_scale()


@contextlib.contextmanager
def report_skipped_step(view: View) -> Iterator[None]:
    """Set ``overflow`` of a wrapper after a step that our optimizer inside it skipped."""
    before = view.optimizer.skipped_steps
    yield
    if view.optimizer.skipped_steps > before:
        view.wrapper.overflow = True


def overflow_is_error(engine: Any) -> bool:
    """Return whether the configuration makes a step that ZeRO skips by itself an error."""
    wanted = engine.basic_optimizer.config.nonfinite_grad == "error" and not engine.fp16_enabled()
    return wanted and hasattr(engine.optimizer, "overflow")


@contextlib.contextmanager
def raise_on_overflow(view: View) -> Iterator[None]:
    """Turn a step that ZeRO skipped into an error; all ranks agree on ``overflow``."""
    yield
    if view.wrapper.overflow:
        raise NonFiniteGradientError(
            "the global gradient norm is not finite and optimizer.params.nonfinite_grad is 'error'; DeepSpeed left "
            "weights and optimizer state unchanged"
        )


def is_half(engine: Any) -> bool:
    """Return whether the engine keeps half-precision weights beside whole fp32 copies."""
    return isinstance(view_of(engine.optimizer), HalfView)


def loss_is_not_scaled(engine: Any) -> bool:
    """Return whether ``FP16_UnfusedOptimizer`` divides by a loss scale that the engine does not multiply with.

    Engines that know ``ZeROOptimizer.scale_if_loss`` scale the loss only for wrappers of that class.
    """
    view = view_of(engine.optimizer)
    return (
        isinstance(view, HalfView)
        and view.divides
        and not isinstance(engine.optimizer, ZeROOptimizer)
        and hasattr(ZeROOptimizer, "scale_if_loss")
    )


@contextlib.contextmanager
def keep_applied_scale(view: HalfView) -> Iterator[None]:
    """Remember the loss scale that is in this step's gradients, and report their unscaled norm.

    ``FP16_UnfusedOptimizer`` divides by the scale of the *next* step when the scale has just grown, and the norm that
    it reports is that of the scaled gradients.
    """
    applied = float(view.wrapper.loss_scale) if view.divides else 1.0
    view.memory.applied_scale = applied
    yield
    if not view.wrapper.overflow:
        view.norm = view.norm / applied


def backward(original: Callable[..., Any], engine: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Scale the loss, and return it unscaled."""
    scale = float(engine.optimizer.loss_scale)
    unscaled = original(loss.float() * scale, *args, **kwargs)
    return unscaled / scale if isinstance(unscaled, Tensor) else unscaled


def scale(original: Callable[..., Any], engine: Any, loss: Tensor) -> Any:
    """Scale the loss for a program that calls ``backward`` of the loss itself."""
    return original(loss.float() * float(engine.optimizer.loss_scale))
