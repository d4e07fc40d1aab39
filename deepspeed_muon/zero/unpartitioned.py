"""ZeRO stage 0: every rank holds every parameter whole, in fp32 itself or as an fp32 copy of half-precision weights.

The Newton-Schulz work is still shared: each matrix has one owner, which sends the update to all other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor

from deepspeed_muon.routing import Route
from deepspeed_muon.zero.binding import StepSet, read_whole

__all__ = ["knows", "read"]


def knows(wrapper: Any, optimizer: Any) -> bool:
    """Return whether ``wrapper`` is one that this adapter reads."""
    if wrapper is optimizer:
        return True
    return isinstance(wrapper, FP16_UnfusedOptimizer) and wrapper.optimizer is optimizer


def read(engine: Any, wrapper: Any, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read the parameters of the plain engine or of ``FP16_UnfusedOptimizer``; the inner step is called once."""
    group = engine.seq_data_parallel_group
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        _scale_the_loss(engine, wrapper)
        pairs = [
            (model, master)
            for models, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
            for model, master in zip(models, masters, strict=True)
        ]
    else:
        _record_global_norm(engine, wrapper)
        pairs = [(param, param) for group_ in wrapper.param_groups for param in group_["params"]]
    return [read_whole(pairs, routes, group)]


def _record_global_norm(engine: Any, optimizer: Any) -> None:
    """Keep the norm of the raw gradients, which the plain engine computes for clipping and throws away."""
    from deepspeed.runtime.utils import clip_grad_norm_

    def clip_fp32_gradients() -> None:
        optimizer._global_grad_norm = clip_grad_norm_(
            parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
        )

    engine.clip_fp32_gradients = clip_fp32_gradients
    optimizer.records_global_norm = engine.gradient_clipping() <= 0.0


def _scale_the_loss(engine: Any, wrapper: Any) -> None:
    """Make stage 0 in half precision divide by the loss scale that was applied, and report the unscaled norm.

    Three defects of DeepSpeed meet here. Engines that know ``ZeROOptimizer.scale_if_loss`` scale the loss only for
    wrappers of that class, while ``FP16_UnfusedOptimizer`` divides by the scale in any case. It divides by the scale
    of the *next* step when the scale has just grown. And the norm that it reports is that of the scaled gradients.
    """
    config = getattr(wrapper, "loss_scale_config", None)
    scaling = config is None or config.use_grad_scaling
    applied = [1.0]
    original_step = wrapper.step

    def step(*args: Any, **kwargs: Any) -> Any:
        applied[0] = float(wrapper.loss_scale) if scaling else 1.0
        result = original_step(*args, **kwargs)
        if not wrapper.overflow:
            wrapper._global_grad_norm = wrapper._global_grad_norm / applied[0]
        return result

    def unscale_and_clip_grads(total_norm: Any, apply_scale: bool = True) -> float:
        divisor = applied[0]
        if wrapper.clip_grad > 0.0:
            divisor *= max(1.0, (float(total_norm) / applied[0] + 1e-6) / wrapper.clip_grad)
        if apply_scale and divisor != 1.0:
            grads = [p.grad for group in wrapper.fp32_groups for p in group if p.grad is not None]
            torch._foreach_mul_(grads, 1.0 / divisor)
        return divisor

    wrapper.step = step
    wrapper.unscale_and_clip_grads = unscale_and_clip_grads
    if not scaling or isinstance(wrapper, ZeROOptimizer) or not hasattr(ZeROOptimizer, "scale_if_loss"):
        return
    original_backward, original_scale = engine.backward, engine.scale

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        scale = float(wrapper.loss_scale)
        unscaled = original_backward(loss.float() * scale, *args, **kwargs)
        return unscaled / scale if isinstance(unscaled, Tensor) else unscaled

    def scale(loss: Tensor) -> Tensor:
        return original_scale(loss.float() * float(wrapper.loss_scale))

    engine.backward = backward
    engine.scale = scale
