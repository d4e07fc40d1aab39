"""Loss scale, norm and clipping: defects of DeepSpeed, and steps that only our optimizer knows to skip.

**A scale that grows.** ZeRO updates the scale first and unscales afterwards. In a step after which the scale doubles,
gradients are therefore divided by twice what the loss was multiplied with, at stage 0 in half precision too. Here the
scale grows after the step.

**``torch_autocast`` in fp16.** ZeRO multiplies the loss by the scale of a ``torch.amp.GradScaler`` and leaves it to
the scaler to unscale inside of ``optimizer.step()``. Three things go wrong:

- The reported norm, with which ``gradient_clipping`` compares, is that of scaled gradients.
- A step whose norm is not finite returns before the scaler hears of it, so the scale never falls and every later step
  is skipped too.
- With several partitions the scale is updated once for each of them.

DeepSpeed's own ``DynamicLossScaler`` does all of this right, so it takes the place of the ``GradScaler``. ZeRO decides
by a flag of the process whether it uses one: an engine made after one with ``torch_autocast`` gets a ``GradScaler``
too, which then hides its own loss scale.

**The norm at ZeRO 0.** The plain engine throws it away, and counts parameters that the optimizer was not given; that of
a pipeline or of experts counts only a part of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import clip_grad_norm_, is_model_parallel_parameter
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor

from deepspeed_muon.engine.tensor_parallel import tensor_parallel_group
from deepspeed_muon.engine.zero.views import Bf16View, HalfView, Original, View
from deepspeed_muon.errors import NumericalError
from deepspeed_muon.routing.param_groups import expert_group_name
from deepspeed_muon.routing.parameters import is_divided


def shrink_scale(original: Original, view: View, *args: Any, **kwargs: Any) -> None:
    """Lower the scale at once after an overflow; :func:`grow_after_step` raises it."""
    if view.wrapper.overflow:
        original(*args, **kwargs)


def grow_after_step(original: Original, view: View, *args: Any, **kwargs: Any) -> Any:
    """Update the scale after a step whose gradients carry the old one."""
    result = original(*args, **kwargs)
    if not view.wrapper.overflow:
        view.grow_scale()
    return result


def report_skipped_step(original: Original, view: View, *args: Any, **kwargs: Any) -> Any:
    """Set ``overflow`` of a wrapper after a step that our optimizer inside it skipped."""
    before = view.optimizer.skipped_steps
    view.wrapper.overflow = False  # DeepSpeed 0.19.2 forgets it in fp16 only
    result = original(*args, **kwargs)
    if view.optimizer.skipped_steps > before:
        view.wrapper.overflow = True
    return result


def overflow_is_error(view: View) -> bool:
    """Return whether the configuration makes a step that ZeRO skips by itself an error.

    A dynamic loss scale must skip steps until it fits.
    """
    wanted = view.optimizer.config.nonfinite_grad == "error" and not view.dynamic_scaler()
    return wanted and hasattr(view.wrapper, "overflow")


def raise_on_overflow(original: Original, view: View, *args: Any, **kwargs: Any) -> Any:
    """Turn a step that ZeRO skipped into an error; all ranks agree on ``overflow``."""
    result = original(*args, **kwargs)
    if view.wrapper.overflow:
        raise NumericalError(
            "a gradient or the global gradient norm is not finite and optimizer.params.nonfinite_grad is 'error'; "
            "DeepSpeed left weights and optimizer state unchanged"
        )
    return result


def loss_is_not_scaled(view: View) -> bool:
    """Return whether ``FP16_UnfusedOptimizer`` divides by a loss scale that the engine does not multiply with.

    Engines scale the loss only for wrappers that are a ``ZeROOptimizer``.
    """
    return isinstance(view, HalfView) and view.divides and not isinstance(view.wrapper, ZeROOptimizer)


def backward(original: Original, engine: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Scale the loss, and return it unscaled."""
    scale = float(engine.optimizer.loss_scale)
    unscaled = original(loss.float() * scale, *args, **kwargs)
    return unscaled / scale if isinstance(unscaled, Tensor) else unscaled


def scale(original: Original, engine: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Scale the loss for a program that calls ``backward`` of the loss itself."""
    return original(loss.float() * float(engine.optimizer.loss_scale), *args, **kwargs)


def clip_fp32_gradients(original: Original, engine: Any) -> None:
    """Clip the gradients of the optimizer's parameters and keep their norm, which DeepSpeed discards.

    DeepSpeed would count all parameters of the model, also those that the optimizer was not given.
    """
    limit = engine.gradient_clipping()
    norm = _exact_norm(engine)
    if norm is None:
        norm = clip_grad_norm_(parameters=_params(engine), max_norm=limit, mpu=engine.mpu)
    else:
        torch._foreach_mul_(_gradients(engine), (limit / (norm + 1e-6)).clamp_(max=1.0))
    engine.basic_optimizer._global_grad_norm = norm


def grads_for_norm(original: Original, view: Bf16View, *args: Any, **kwargs: Any) -> Any:
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
    measured: Tensor = clip_grad_norm_(_params(engine), max_norm=float("inf"), mpu=engine.mpu)
    return measured


def _params(engine: Any) -> list[Tensor]:
    return [param for group in engine.basic_optimizer.param_groups for param in group["params"]]


def _gradients(engine: Any) -> list[Tensor]:
    return [param.grad for param in _params(engine) if param.grad is not None]


def _exact_norm(engine: Any) -> Tensor | None:
    """Return the norm of the gradients of all stages or of all experts, ``None`` if DeepSpeed's own is right."""
    if is_divided(engine.module):
        pairs = ((param, param.grad) for param in _params(engine))
        return _norm_over(engine, pairs, engine.mpu.get_model_parallel_group())
    if engine.has_moe_layers:
        return _norm_of_all_experts([(param, param.grad) for param in _params(engine)])
    return None


def _norm_over(
    engine: Any, pairs: Iterable[tuple[Tensor, Tensor | None]], group: dist.ProcessGroup
) -> Tensor:
    """Return the norm of the gradients of all pipeline stages or tensor-parallel ranks, fp32.

    DeepSpeed counts the first stage only, and at stage 0 in half precision the first rank's shards only.

    Args:
        engine: The engine.
        pairs: Model parameter and its reduced gradient.
        group: The ranks that have the other parts of the model, all of which must call this.
    """
    # All stages with a copy of a tied layer hold the same gradient. It counts on the stage where it is not marked. What
    # tensor parallelism does not cut is on all its ranks and counts on the first.
    first = bwc_tensor_model_parallel_rank(engine.mpu) == 0
    counted = [
        grad
        for p, grad in pairs
        if grad is not None
        and not getattr(p, "ds_pipe_replicated", False)
        and (first or is_model_parallel_parameter(p))
    ]
    squared = torch.zeros((), dtype=torch.float64, device=engine.device)
    for norm in torch._foreach_norm(counted) if counted else []:
        squared += norm.double() ** 2
    dist.all_reduce(squared, group=group)
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
    original: Original, view: HalfView, total_norm: Any, apply_scale: bool = True
) -> float:
    """Divide by the scale that was applied; clip by, and report, the unscaled norm of all experts and shards."""
    applied = divisor = float(view.wrapper.loss_scale) if view.divides else 1.0
    engine: Any = view.memory.engine()
    pairs = [(model, master.grad) for (model,), master in zip(view.params, view.masters, strict=True)]
    if engine.has_moe_layers:
        total_norm = _norm_of_all_experts(pairs)
    elif (group := tensor_parallel_group(engine)) is not None:
        total_norm = _norm_over(engine, pairs, group)
    view.report_norm(total_norm / applied)
    if view.max_norm > 0.0:
        divisor *= max(1.0, (float(total_norm) / applied + 1e-6) / view.max_norm)
    if apply_scale and divisor != 1.0:
        torch._foreach_mul_([p.grad for p in view.masters if p.grad is not None], 1.0 / divisor)
    return divisor
