"""ZeRO stage 0: every rank holds every parameter whole, in fp32 itself or as an fp32 copy of half-precision weights.

The Newton-Schulz work is still shared: each matrix has one owner, which sends the update to all other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor

from deepspeed_muon.engine.experts import by_group, exact_norm, holders, needs_exact_norm
from deepspeed_muon.engine.tensor_parallel import tensor_parallel_group
from deepspeed_muon.routing.pipeline_module import is_divided
from deepspeed_muon.routing.rules import Route
from deepspeed_muon.step.layout_reader import read_whole
from deepspeed_muon.step.step_set import StepSet

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
        pairs = [
            (model, master)
            for models, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
            for model, master in zip(models, masters, strict=True)
        ]
        _scale_the_loss(engine, wrapper, pairs)
    else:
        pairs = [(param, param) for group_ in wrapper.param_groups for param in group_["params"]]
        _record_global_norm(engine, wrapper, [param for param, _ in pairs])
    sets = []
    for holder, numbers in by_group(range(len(pairs)), lambda number: holders(pairs[number][0], group)):
        members = [pairs[number] for number in numbers]
        sets.append(read_whole(members, routes, holder, numbers=numbers, wider_group=group))
    return sets


def _record_global_norm(engine: Any, optimizer: Any, params: list[Tensor]) -> None:
    """Keep the norm of the raw gradients, which the plain engine computes for clipping and throws away."""
    from deepspeed.runtime.utils import clip_grad_norm_

    def exact() -> Tensor:
        return exact_norm([(param, param.grad) for param in params])

    def clip_fp32_gradients() -> None:
        limit = engine.gradient_clipping()
        divided = is_divided(engine.module)
        if divided or needs_exact_norm(engine):
            norm = _norm_of_all_stages(engine) if divided else exact()
            optimizer._global_grad_norm = norm
            grads = [param.grad for param in params if param.grad is not None]
            torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp_(max=1.0))
        else:
            optimizer._global_grad_norm = clip_grad_norm_(
                parameters=engine.module.parameters(), max_norm=limit, mpu=engine.mpu
            )

    def total() -> Tensor:
        if is_divided(engine.module):
            return _norm_of_all_stages(engine)
        if tensor_parallel_group(engine) is not None:
            # Clipping to infinity is how DeepSpeed measures: it counts a shard everywhere and a copy once.
            norm: Tensor = clip_grad_norm_(
                parameters=engine.module.parameters(), max_norm=float("inf"), mpu=engine.mpu
            )
            return norm
        grads = [param.grad for param in params if param.grad is not None]
        return exact() if needs_exact_norm(engine) else torch.nn.utils.get_total_norm(grads)

    engine.clip_fp32_gradients = clip_fp32_gradients
    optimizer.measure_norm = total if engine.gradient_clipping() <= 0.0 else None


def _norm_of_all_stages(engine: Any) -> Tensor:
    """Return the norm of a pipeline's gradients over all stages, where DeepSpeed counts the first stage only."""
    # A tied layer's gradient is the same on all stages that hold a copy and counts where it is not marked.
    counted = [p.grad for p in engine.module.parameters() if p.grad is not None and not p.ds_pipe_replicated]
    squared = torch.zeros((), dtype=torch.float64, device=engine.device)
    for norm in torch._foreach_norm(counted) if counted else []:
        squared += norm.double() ** 2
    dist.all_reduce(squared, group=engine.mpu.get_model_parallel_group())
    return squared.sqrt().float()


def _scale_the_loss(engine: Any, wrapper: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Make stage 0 in half precision divide by the loss scale that was applied, and report the unscaled norm.

    Three defects of DeepSpeed meet here. Engines that know ``ZeROOptimizer.scale_if_loss`` scale the loss only for
    wrappers of that class, while ``FP16_UnfusedOptimizer`` divides by the scale in any case. It divides by the scale
    of the *next* step when the scale has just grown. And the norm that it reports is that of the scaled gradients,
    without those of experts.
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
        if needs_exact_norm(engine):
            total_norm = wrapper._global_grad_norm = exact_norm(
                [(model, master.grad) for model, master in pairs]
            )
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
        scaled: Tensor = original_scale(loss.float() * float(wrapper.loss_scale))
        return scaled

    engine.backward = backward
    engine.scale = scale
