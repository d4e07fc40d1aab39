"""ZeRO stage 0: every rank holds every parameter whole, in fp32 itself or as an fp32 copy of half-precision weights.

The Newton-Schulz work is still shared: each matrix has one owner, which sends the update to all other ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import clip_grad_norm_
from torch import Tensor

from deepspeed_muon.engine.experts import by_group, exact_norm, holders, needs_exact_norm
from deepspeed_muon.engine.hooked import memory_of
from deepspeed_muon.engine.tensor_parallel import tensor_parallel_group
from deepspeed_muon.routing.pipeline_module import is_divided
from deepspeed_muon.routing.rules import Route
from deepspeed_muon.step.layout_reader import read_whole
from deepspeed_muon.step.step_set import StepSet

__all__ = [
    "backward",
    "clip_fp32_gradients",
    "is_half",
    "is_plain",
    "keep_applied_scale",
    "knows",
    "loss_is_not_scaled",
    "read",
    "scale",
    "total_norm",
    "unscale_and_clip_grads",
]


def knows(wrapper: Any, optimizer: Any) -> bool:
    """Return whether ``wrapper`` is one that this adapter reads."""
    if wrapper is optimizer:
        return True
    return isinstance(wrapper, FP16_UnfusedOptimizer) and wrapper.optimizer is optimizer


def read(engine: Any, wrapper: Any, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read the parameters of the plain engine or of ``FP16_UnfusedOptimizer``; the inner step is called once."""
    group = engine.seq_data_parallel_group
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        pairs = _half_pairs(wrapper)
    else:
        pairs = [(param, param) for group_ in wrapper.param_groups for param in group_["params"]]
    sets = []
    for holder, numbers in by_group(range(len(pairs)), lambda number: holders(pairs[number][0], group)):
        members = [pairs[number] for number in numbers]
        sets.append(read_whole(members, routes, holder, numbers=numbers, wider_group=group))
    return sets


def _half_pairs(wrapper: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the half-precision parameters of ``FP16_UnfusedOptimizer``, each with its fp32 copy."""
    return [
        (model, master)
        for models, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        for model, master in zip(models, masters, strict=True)
    ]


def is_plain(engine: Any) -> bool:
    """Return whether the engine calls our optimizer itself, with no wrapper around it."""
    return engine.optimizer is engine.basic_optimizer


def is_half(engine: Any) -> bool:
    """Return whether the engine keeps half-precision weights beside whole fp32 copies."""
    return isinstance(engine.optimizer, FP16_UnfusedOptimizer)


def clip_fp32_gradients(original: Callable[..., Any], engine: Any) -> None:
    """Clip the plain engine's gradients and keep their norm, which DeepSpeed throws away."""
    limit, optimizer = engine.gradient_clipping(), engine.basic_optimizer
    if is_divided(engine.module) or needs_exact_norm(engine):
        norm = _exact_norm(engine)
        torch._foreach_mul_(_gradients(engine), (limit / (norm + 1e-6)).clamp_(max=1.0))
    else:
        norm = clip_grad_norm_(parameters=engine.module.parameters(), max_norm=limit, mpu=engine.mpu)
    optimizer._global_grad_norm = norm


def total_norm(reference: weakref.ref[Any]) -> Tensor:
    """Return the norm of the raw gradients of a plain engine, which nobody computes without clipping.

    Must be called by all ranks.

    Args:
        reference: The engine.
    """
    engine = reference()
    assert engine is not None
    if is_divided(engine.module):
        return _exact_norm(engine)
    if tensor_parallel_group(engine) is not None:
        # Clipping to infinity is how DeepSpeed measures: it counts a shard everywhere and a copy once.
        norm: Tensor = clip_grad_norm_(
            parameters=engine.module.parameters(), max_norm=float("inf"), mpu=engine.mpu
        )
        return norm
    return (
        _exact_norm(engine) if needs_exact_norm(engine) else torch.nn.utils.get_total_norm(_gradients(engine))
    )


def _params(engine: Any) -> list[Tensor]:
    return [param for group in engine.basic_optimizer.param_groups for param in group["params"]]


def _gradients(engine: Any) -> list[Tensor]:
    return [param.grad for param in _params(engine) if param.grad is not None]


def _exact_norm(engine: Any) -> Tensor:
    """Return the norm of the gradients of all stages and of all experts."""
    if is_divided(engine.module):
        return _norm_of_all_stages(engine)
    return exact_norm([(param, param.grad) for param in _params(engine)])


def _norm_of_all_stages(engine: Any) -> Tensor:
    """Return the norm of a pipeline's gradients over all stages, where DeepSpeed counts the first stage only."""
    # A tied layer's gradient is the same on all stages that hold a copy and counts where it is not marked.
    counted = [p.grad for p in engine.module.parameters() if p.grad is not None and not p.ds_pipe_replicated]
    squared = torch.zeros((), dtype=torch.float64, device=engine.device)
    for norm in torch._foreach_norm(counted) if counted else []:
        squared += norm.double() ** 2
    dist.all_reduce(squared, group=engine.mpu.get_model_parallel_group())
    return squared.sqrt().float()


def loss_is_not_scaled(engine: Any) -> bool:
    """Return whether ``FP16_UnfusedOptimizer`` divides by a loss scale that the engine does not multiply with.

    Engines that know ``ZeROOptimizer.scale_if_loss`` scale the loss only for wrappers of that class.
    """
    return (
        is_half(engine)
        and _divides(engine.optimizer)
        and not isinstance(engine.optimizer, ZeROOptimizer)
        and hasattr(ZeROOptimizer, "scale_if_loss")
    )


def _divides(wrapper: Any) -> bool:
    config = getattr(wrapper, "loss_scale_config", None)
    return config is None or bool(config.use_grad_scaling)


@contextlib.contextmanager
def keep_applied_scale(wrapper: Any) -> Iterator[None]:
    """Hold the loss scale that this step's gradients carry, and report their unscaled norm.

    ``FP16_UnfusedOptimizer`` divides by the scale of the *next* step when the scale has just grown, and the norm that
    it reports is that of the scaled gradients.
    """
    applied = float(wrapper.loss_scale) if _divides(wrapper) else 1.0
    memory_of(wrapper).applied_scale = applied
    yield
    if not wrapper.overflow:
        wrapper._global_grad_norm = wrapper._global_grad_norm / applied


def unscale_and_clip_grads(
    original: Callable[..., Any], wrapper: Any, total_norm: Any, apply_scale: bool = True
) -> float:
    """Divide by the scale that was applied, and clip by a norm that counts every expert."""
    applied = divisor = memory_of(wrapper).applied_scale
    engine = memory_of(wrapper).engine()
    if needs_exact_norm(engine):
        pairs = _half_pairs(wrapper)
        total_norm = wrapper._global_grad_norm = exact_norm([(model, master.grad) for model, master in pairs])
    if wrapper.clip_grad > 0.0:
        divisor *= max(1.0, (float(total_norm) / applied + 1e-6) / wrapper.clip_grad)
    if apply_scale and divisor != 1.0:
        grads = [p.grad for group in wrapper.fp32_groups for p in group if p.grad is not None]
        torch._foreach_mul_(grads, 1.0 / divisor)
    return divisor


def backward(original: Callable[..., Any], engine: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Scale the loss, and return it unscaled."""
    scale = float(engine.optimizer.loss_scale)
    unscaled = original(loss.float() * scale, *args, **kwargs)
    return unscaled / scale if isinstance(unscaled, Tensor) else unscaled


def scale(original: Callable[..., Any], engine: Any, loss: Tensor) -> Any:
    """Scale the loss for a program that calls ``backward`` of the loss itself."""
    return original(loss.float() * float(engine.optimizer.loss_scale))
