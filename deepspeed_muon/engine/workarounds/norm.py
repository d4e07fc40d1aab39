"""The norm of the gradients, and clipping by it: at ZeRO 0, and in ``BF16_Optimizer``.

The plain engine discards the norm, and counts parameters that the optimizer was not given; in a pipeline or with
experts it counts only the gradients of one stage or of one rank's experts. ``FP16_UnfusedOptimizer`` has the norm of
scaled gradients, without experts and tensor-parallel shards of other ranks. ``BF16_Optimizer`` leaves out parameters
that this rank did not use and others did.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import clip_grad_norm_, is_model_parallel_parameter
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor

from deepspeed_muon.engine.patching import Hook, Original, Workaround
from deepspeed_muon.engine.tensor_parallel import tensor_parallel_group
from deepspeed_muon.engine.zero.views import Bf16View, HalfView, PlainView
from deepspeed_muon.routing.param_groups import expert_group_name
from deepspeed_muon.routing.parameters import is_divided


def clip_fp32_gradients(original: Original, engine: DeepSpeedEngine) -> None:
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


def grads_for_norm(original: Original, view: Bf16View, *args: object, **kwargs: object) -> object:
    """Return the gradients of the norm or of clipping, also of parameters that only other ranks used."""
    view.count_all_gradients()
    return original(*args, **kwargs)


def total_norm(reference: weakref.ref[Any]) -> Tensor:
    """Return the norm of the raw gradients of a plain engine, which DeepSpeed computes only to clip.

    Must be called by all ranks.

    Args:
        reference: The engine.
    """
    engine: DeepSpeedEngine = reference()
    norm = _exact_norm(engine)
    if norm is not None:
        return norm
    if tensor_parallel_group(engine) is None:
        return torch.nn.utils.get_total_norm(_gradients(engine))
    # DeepSpeed's clipping counts shards on every rank and copies once; clipping to infinity changes no gradient.
    measured: Tensor = clip_grad_norm_(_params(engine), max_norm=float("inf"), mpu=engine.mpu)
    return measured


def _params(engine: DeepSpeedEngine) -> list[Tensor]:
    return [param for group in engine.basic_optimizer.param_groups for param in group["params"]]


def _gradients(engine: DeepSpeedEngine) -> list[Tensor]:
    return [param.grad for param in _params(engine) if param.grad is not None]


def _exact_norm(engine: DeepSpeedEngine) -> Tensor | None:
    """Return the norm of the gradients of all stages or of all experts, ``None`` if DeepSpeed's own is right."""
    if is_divided(engine.module):
        pairs = ((param, param.grad) for param in _params(engine))
        return _norm_over(engine, pairs, engine.mpu.get_model_parallel_group())
    if engine.has_moe_layers:
        return _norm_of_all_experts([(param, param.grad) for param in _params(engine)])
    return None


def _norm_over(
    engine: DeepSpeedEngine, pairs: Iterable[tuple[Tensor, Tensor | None]], group: dist.ProcessGroup
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
        squares_of_group = squares.setdefault(expert_group_name(param), [])
        if grad is not None:
            squares_of_group.append(torch.linalg.vector_norm(grad.detach(), dtype=torch.float32).square())
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
    engine: DeepSpeedEngine = view.memory.engine()
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


PLAIN_NORM = Workaround(
    defect="the plain engine discards the norm that it clips by, and counts one stage of a pipeline, one rank's "
    "experts, and parameters that the optimizer was not given",
    first="0.19.2",
    last="0.19.8",
    test="tests/distributed/test_moe.py::test_matches_the_reference[0-4-2-1-0.5]",
    hooks=(
        Hook(DeepSpeedEngine, "clip_fp32_gradients", clip_fp32_gradients, lambda view: isinstance(view, PlainView)),
    ),
)  # fmt: skip

NORM_OF_SCALED_GRADIENTS = Workaround(
    defect="stage 0 in half precision divides by a scale that was not applied; its norm is that of scaled gradients, "
    "and leaves experts and shards out",
    first="0.19.2",
    last="0.19.8",
    test="tests/distributed/test_moe.py::test_half_precision[0-fp16-extra2]",
    hooks=(Hook((HalfView,), "unscale_and_clip_grads", unscale_and_clip_grads),),
)

NORM_OF_USED_PARAMETERS = Workaround(
    defect="BF16_Optimizer leaves parameters out of norm and clipping that this rank did not use and others did",
    first="0.19.2",
    last="0.19.8",
    test="tests/distributed/test_idle_parameters.py::test_a_parameter_counts_that_only_the_other_rank_used",
    hooks=(Hook((Bf16View,), "get_grads_for_norm", grads_for_norm),),
)
