"""ZeRO stage 0: norm, clipping and loss scale of the gradients, where DeepSpeed gets them wrong or discards them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import clip_grad_norm_, is_model_parallel_parameter
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor

from deepspeed_muon.engine.layouts import half_pairs
from deepspeed_muon.engine.memory import memory_of
from deepspeed_muon.engine.ranks import has_experts
from deepspeed_muon.engine.tensor_parallel import tensor_parallel_group
from deepspeed_muon.routing.param_groups import expert_group_name
from deepspeed_muon.routing.parameters import is_divided

__all__ = [
    "backward",
    "clip_fp32_gradients",
    "is_half",
    "is_plain",
    "keep_applied_scale",
    "loss_is_not_scaled",
    "scale",
    "total_norm",
    "unscale_and_clip_grads",
]


def is_plain(engine: Any) -> bool:
    """Return whether the engine calls our optimizer itself, with no wrapper around it."""
    return engine.optimizer is engine.basic_optimizer


def is_half(engine: Any) -> bool:
    """Return whether the engine keeps half-precision weights beside whole fp32 copies."""
    return isinstance(engine.optimizer, FP16_UnfusedOptimizer)


def clip_fp32_gradients(original: Callable[..., Any], engine: Any) -> None:
    """Clip the plain engine's gradients and keep their norm, which DeepSpeed discards."""
    limit = engine.gradient_clipping()
    norm = _exact_norm(engine)
    if norm is None:
        norm = clip_grad_norm_(parameters=engine.module.parameters(), max_norm=limit, mpu=engine.mpu)
    else:
        torch._foreach_mul_(_gradients(engine), (limit / (norm + 1e-6)).clamp_(max=1.0))
    engine.basic_optimizer._global_grad_norm = norm


def total_norm(reference: weakref.ref[Any]) -> Tensor:
    """Return the norm of the raw gradients of a plain engine, which DeepSpeed computes only to clip.

    Must be called by all ranks.

    Args:
        reference: The engine.
    """
    engine: Any = reference()
    norm = _exact_norm(engine)
    if norm is not None:
        return norm
    if tensor_parallel_group(engine) is None:
        return torch.nn.utils.get_total_norm(_gradients(engine))
    # DeepSpeed's clipping counts shards on every rank and copies once; clipping to infinity changes no gradient.
    measured: Tensor = clip_grad_norm_(engine.module.parameters(), max_norm=float("inf"), mpu=engine.mpu)
    return measured


def _params(engine: Any) -> list[Tensor]:
    return [param for group in engine.basic_optimizer.param_groups for param in group["params"]]


def _gradients(engine: Any) -> list[Tensor]:
    return [param.grad for param in _params(engine) if param.grad is not None]


def _exact_norm(engine: Any) -> Tensor | None:
    """Return the norm of the gradients of all stages or of all experts, ``None`` if DeepSpeed's own is right."""
    if is_divided(engine.module):
        return _norm_of_all_stages(engine)
    if has_experts(engine):
        return _norm_of_all_experts([(param, param.grad) for param in _params(engine)])
    return None


def _norm_of_all_stages(engine: Any) -> Tensor:
    """Return the norm of a pipeline's gradients over all stages, where DeepSpeed counts the first stage only."""
    # All stages with a copy of a tied layer hold the same gradient. It counts on the stage where it is not marked. What
    # tensor parallelism does not cut is on all its ranks and counts on the first.
    first = bwc_tensor_model_parallel_rank(engine.mpu) == 0
    counted = [
        p.grad
        for p in engine.module.parameters()
        if p.grad is not None
        and not getattr(p, "ds_pipe_replicated", False)
        and (first or is_model_parallel_parameter(p))
    ]
    squared = torch.zeros((), dtype=torch.float64, device=engine.device)
    for norm in torch._foreach_norm(counted) if counted else []:
        squared += norm.double() ** 2
    dist.all_reduce(squared, group=engine.mpu.get_model_parallel_group())
    return squared.sqrt().float()


def _norm_of_all_experts(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Return the norm of the gradients of all parameters, every expert counted once, fp32.

    DeepSpeed averages the norms of the ranks, each of which has its own experts, or leaves experts out. Must be called
    by all ranks.

    Args:
        pairs: Model parameter and its reduced gradient.
    """
    squares: dict[str | None, list[Tensor]] = {None: []}
    for param, grad in pairs:
        own = squares.setdefault(expert_group_name(param), [])
        if grad is not None:
            own.append(torch.linalg.vector_norm(grad.detach(), dtype=torch.float32).square())
    device = pairs[0][0].device
    total = torch.stack(squares.pop(None) or [torch.zeros((), device=device)]).sum()
    for name in sorted(str(key) for key in squares):
        experts = torch.stack(squares[name] or [torch.zeros((), device=device)]).sum()
        dist.all_reduce(experts, group=groups._get_expert_parallel_group(name))
        total = total + experts
    return total.sqrt()


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
    """Remember the loss scale that is in this step's gradients, and report their unscaled norm.

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
    if has_experts(memory_of(wrapper).engine()):
        pairs = [(model, master.grad) for model, master in half_pairs(wrapper)]
        total_norm = wrapper._global_grad_norm = _norm_of_all_experts(pairs)
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
