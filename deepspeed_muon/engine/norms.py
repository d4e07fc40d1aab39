"""The norm of the gradients at ZeRO 0, and clipping by it, where DeepSpeed gets it wrong or discards it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_, is_model_parallel_parameter
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor

from deepspeed_muon.engine.tensor_parallel import tensor_parallel_group
from deepspeed_muon.engine.topology import has_experts
from deepspeed_muon.engine.zero import Bf16View, HalfView
from deepspeed_muon.routing.param_groups import expert_group_name
from deepspeed_muon.routing.parameters import is_divided


def clip_fp32_gradients(original: Callable[..., Any], engine: Any) -> None:
    """Clip the plain engine's gradients and keep their norm, which DeepSpeed discards."""
    limit = engine.gradient_clipping()
    norm = _exact_norm(engine)
    if norm is None:
        norm = clip_grad_norm_(parameters=engine.module.parameters(), max_norm=limit, mpu=engine.mpu)
    else:
        torch._foreach_mul_(_gradients(engine), (limit / (norm + 1e-6)).clamp_(max=1.0))
    engine.basic_optimizer._global_grad_norm = norm


def grads_for_norm(original: Callable[..., Any], view: Bf16View, *args: Any, **kwargs: Any) -> Any:
    """Return the gradients of the norm or of clipping, also of parameters that only other ranks used."""
    view.count_all_gradients()
    return original(*args, **kwargs)


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


def unscale_and_clip_grads(
    original: Callable[..., Any], view: HalfView, total_norm: Any, apply_scale: bool = True
) -> float:
    """Divide by the scale that was applied, and clip by a norm that counts every expert."""
    applied = divisor = view.memory.applied_scale
    if has_experts(view.memory.engine()):
        pairs = [(model, master.grad) for (model,), master in zip(view.params, view.masters, strict=True)]
        total_norm = view.norm = _norm_of_all_experts(pairs)
    if view.max_norm > 0.0:
        divisor *= max(1.0, (float(total_norm) / applied + 1e-6) / view.max_norm)
    if apply_scale and divisor != 1.0:
        torch._foreach_mul_([p.grad for p in view.masters if p.grad is not None], 1.0 / divisor)
    return divisor
