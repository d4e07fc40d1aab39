"""The loss scale: when it grows, who applies it, who unscales.

**A scale that grows.** ZeRO, and stage 0 in half precision, update the scale first and unscale afterwards. In a step
that doubles the scale, gradients are therefore divided by twice what the loss was multiplied by. With the workaround
the scale grows after the step.

**``torch_autocast`` in fp16.** ZeRO multiplies the loss by the scale of a ``torch.amp.GradScaler`` and leaves it to
the scaler to unscale inside of ``optimizer.step()``. Three things go wrong:

- The reported norm, with which ``gradient_clipping`` compares, is that of scaled gradients.
- A step whose norm is not finite returns before the scaler is called, so the scale never falls and every later step
  is skipped too.
- With several partitions the scale is updated once for each of them.

DeepSpeed's own ``DynamicLossScaler`` does all of this right, so it takes the place of the ``GradScaler``. ZeRO decides
by a flag of the process whether it uses one: an engine made after one with ``torch_autocast`` gets a ``GradScaler``
too, which then hides its own loss scale.

At stage 0 the ``GradScaler`` stays. It looks for overflow on its own rank only, and other ranks may have other experts,
pipeline stages or shards. All ranks skip the step (:meth:`.GradientFlags.exchange`), so all must lower the scale:
otherwise gradients that were scaled differently would be averaged from then on.

**Half precision at stage 0.** ``FP16_UnfusedOptimizer`` divides by a loss scale, and the engine scales the loss only
for wrappers that are a ``ZeROOptimizer``.
"""

from __future__ import annotations

from operator import methodcaller

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_muon.engine.patching import Hook, Original, Workaround
from deepspeed_muon.engine.views import HalfView, PlainView, View, Zero3View, ZeroView


def lower_scale(original: Original, view: View, *args: object, **kwargs: object) -> None:
    """Lower the scale at once after an overflow; :func:`grow_scale` raises it."""
    if view.wrapper.overflow:
        original(*args, **kwargs)


def grow_scale(original: Original, view: View, *args: object, **kwargs: object) -> object:
    """Raise a dynamic loss scale after the step."""
    result = original(*args, **kwargs)
    if not view.wrapper.overflow:
        view.grow_scale()
    return result


def look_for_overflow(original: Original, view: Zero3View, *args: object, **kwargs: object) -> object:
    """Decide about overflow before the first sub-group is updated."""
    view.look_for_overflow()
    return original(*args, **kwargs)


def loss_is_not_scaled(view: View) -> bool:
    """Return whether ``FP16_UnfusedOptimizer`` divides by a loss scale that the engine does not multiply by."""
    return isinstance(view, HalfView) and view.divides and not isinstance(view.wrapper, ZeROOptimizer)


def backward(
    original: Original, engine: DeepSpeedEngine, loss: Tensor, *args: object, **kwargs: object
) -> object:
    """Multiply the loss by the scale that the wrapper divides by; return the unscaled loss."""
    scale = float(engine.optimizer.loss_scale)
    unscaled = original(loss.float() * scale, *args, **kwargs)
    return unscaled / scale if isinstance(unscaled, Tensor) else unscaled


def scale(
    original: Original, engine: DeepSpeedEngine, loss: Tensor, *args: object, **kwargs: object
) -> object:
    """Scale the loss for a program that calls ``backward`` of the loss itself."""
    return original(loss.float() * float(engine.optimizer.loss_scale), *args, **kwargs)


def take_step(original: Original, engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
    """Take a step, and lower the scale of a ``GradScaler`` on all ranks if they skip it."""
    scaler = engine.torch_autocast_z0_gradscaler
    if scaler is None:
        return original(*args, **kwargs)
    # a copy; the host does not wait for it
    before = scaler.scale(torch.ones((), dtype=torch.float32, device=engine.device))
    result = original(*args, **kwargs)
    if engine.basic_optimizer.overflow:
        lowered = {"scale": float(before) * scaler.get_backoff_factor(), "_growth_tracker": 0}
        scaler.load_state_dict({**scaler.state_dict(), **lowered})
    return result


def replace_grad_scaler(engine: DeepSpeedEngine, view: View) -> None:
    """Give ZeRO a dynamic loss scale of DeepSpeed's."""
    if isinstance(view, ZeroView):
        view.replace_grad_scaler(autocast=engine.torch_autocast_enabled())


SCALE_GROWS_EARLY = Workaround(
    defect="a dynamic loss scale grows before the step, which then unscales by the new one",
    test="tests/distributed/test_precision.py::test_a_growing_loss_scale_changes_nothing[3]",
    hooks=(
        Hook((ZeroView, HalfView), "_update_scale", lower_scale, methodcaller("dynamic_scaler")),
        Hook((ZeroView, HalfView), "step", grow_scale, methodcaller("dynamic_scaler")),
    ),
)

GRAD_SCALER = Workaround(
    defect="with torch_autocast in fp16 the norm is that of scaled gradients, and once it is not finite every later "
    "step is skipped; later engines of the process get a GradScaler too",
    test="tests/distributed/test_precision.py::test_autocast_recovers_from_an_overflow[1-error]",
    prepare=replace_grad_scaler,
)

ONE_RANK_LOWERS_SCALE = Workaround(
    defect="with torch_autocast in fp16 at stage 0, ranks with other experts, stages or shards lower their loss scales "
    "each by its own gradients",
    test="tests/distributed/test_experts.py::test_all_ranks_lower_the_loss_scale",
    hooks=(Hook(DeepSpeedEngine, "_take_model_step", take_step, lambda view: isinstance(view, PlainView)),),
)

UNSCALED_LOSS = Workaround(
    defect="stage 0 in half precision divides by a loss scale that nothing multiplied the loss with",
    test="tests/distributed/test_experts.py::test_half_precision[moe-0-fp16-extra2]",
    hooks=(
        Hook(DeepSpeedEngine, "backward", backward, loss_is_not_scaled),
        Hook(DeepSpeedEngine, "scale", scale, loss_is_not_scaled),
    ),
)

OVERFLOW_IN_FP16_ONLY = Workaround(
    defect="ZeRO 3 looks for overflow in fp16 only, so that sub-groups with finite gradients are updated in a step "
    "that is skipped",
    test="tests/distributed/test_failures.py::test_nonfinite_gradient_is_an_error_if_asked[3-bf16]",
    fixed_in="0.19.8",
    hooks=(Hook((Zero3View,), "step", look_for_overflow),),
)
