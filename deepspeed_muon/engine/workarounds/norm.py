"""The norm of the gradients, and clipping by it: at ZeRO 0, and in ``BF16_Optimizer``.

The plain engine discards the norm, and counts parameters that the optimizer was not given; in a pipeline or with
experts it counts only the gradients of one stage or of one rank's experts. ``FP16_UnfusedOptimizer`` has the norm of
scaled gradients, without experts and tensor-parallel shards of other ranks. ``BF16_Optimizer`` leaves out parameters
that this rank did not use and others did.

DeepSpeed knows one norm, that of all gradients. Here Muon's and AdamW's are measured one by one, in sampled steps only,
since that reads all gradients again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor

from deepspeed_muon.engine.patching import Hook, Original, Workaround
from deepspeed_muon.engine.topology import tensor_parallel_group
from deepspeed_muon.engine.views import Bf16View, HalfView, PlainView, View, norms_of, view_of
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.param_groups import expert_group_name
from deepspeed_muon.routing.parameters import is_divided

_Pairs: TypeAlias = Sequence[tuple[Tensor, Tensor | None]]
"""Model parameters, each with its reduced gradient."""


# ZeRO 0 in fp32


def clip_fp32_gradients(original: Original, engine: DeepSpeedEngine) -> None:
    """Clip the gradients of the optimizer's parameters and keep their norm, which DeepSpeed discards.

    DeepSpeed would count all parameters of the model, also those that the optimizer was not given.
    """
    optimizer = engine.basic_optimizer
    limit = engine.gradient_clipping()
    optimizer._record_norms(measure_by_algorithm(engine))
    optimizer._global_grad_norm = norm = _norm(engine)
    if gradients := [grad for _, grad in _pairs(engine) if grad is not None]:
        torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp_(max=1.0))


def measure_without_clipping(engine: DeepSpeedEngine, view: View) -> None:
    """Let the optimizer of a plain engine measure the norm where nothing is clipped by it."""
    if isinstance(view, PlainView) and engine.gradient_clipping() <= 0.0:
        view.optimizer.measure_norms = functools.partial(measure_norms, weakref.ref(engine))


def measure_norms(reference: weakref.ref[Any]) -> dict[str, Tensor]:
    """Return the norm of the raw gradients of a plain engine, which DeepSpeed computes only to clip.

    Must be called by all ranks.

    Args:
        reference: The engine.

    Returns:
        The norm of all gradients as ``all``; behind it, in a sampled step, those by algorithm.
    """
    engine: DeepSpeedEngine = reference()
    return {"all": _norm(engine), **measure_by_algorithm(engine)}


def _pairs(engine: DeepSpeedEngine) -> _Pairs:
    return [(param, param.grad) for group in engine.basic_optimizer.param_groups for param in group["params"]]


def _norm(engine: DeepSpeedEngine) -> Tensor:
    """Return the norm of the gradients of all stages, shards and experts."""
    return _norms(engine, [_pairs(engine)])[0]


# ZeRO 0 in half precision


def unscale_and_clip_grads(
    original: Original, view: HalfView, total_norm: Any, apply_scale: bool = True
) -> Any:
    """Divide by the scale that was applied; clip by, and report, the unscaled norm of all experts and shards.

    Returns:
        What the gradients were divided by.
    """
    engine: DeepSpeedEngine = view.memory.engine()
    applied = float(view.wrapper.loss_scale) if view.divides else 1.0
    norms = measure_by_algorithm(engine)
    view.optimizer._record_norms({algorithm: norm / applied for algorithm, norm in norms.items()})
    # 1. The norm of all gradients.
    if engine.has_moe_layers or tensor_parallel_group(engine) is not None:
        pairs = [(model, master.grad) for (model,), master in zip(view.params, view.masters, strict=True)]
        (total_norm,) = _norms(engine, [pairs])
    view.report_norm(total_norm / applied)
    # 2. Unscale and clip in one multiplication.
    divisor = applied
    if view.max_norm:
        # as torch.nn.utils.clip_grad_norm_: multiply by max_norm / (norm + 1e-6) if that is below 1
        divisor *= max(1.0, (float(total_norm) / applied + 1e-6) / view.max_norm)
    grads = [master.grad for master in view.masters if master.grad is not None]
    if apply_scale and grads and divisor != 1.0:
        torch._foreach_mul_(grads, 1.0 / divisor)
    return divisor


# BF16_Optimizer


def grads_for_norm(
    original: Original, view: Bf16View, for_clipping: bool = False, *args: object, **kwargs: object
) -> object:
    """Return the gradients of the norm or of clipping, also of parameters that only other ranks used."""
    view.count_all_gradients()
    if for_clipping:
        return original(for_clipping, *args, **kwargs)
    view.optimizer._record_norms(measure_by_algorithm(view.memory.engine()))
    # In their place DeepSpeed gets the vector of their norms, which has the same norm: it reads one after another.
    others, experts = original(for_clipping, *args, **kwargs)
    return [norms_of(others)], {name: [norms_of(grads)] for name, grads in experts.items()}


# Norms by algorithm


def measure_by_algorithm(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Return the norms of Muon's and of AdamW's gradients on the device, in a sampled step.

    Must be called by all ranks. Nothing but model parallelism and experts communicates.
    """
    optimizer: Muon = engine.basic_optimizer
    if not optimizer.recorder.sampling:
        return {}
    pairs = view_of(engine.optimizer).gradients_by_algorithm()
    return dict(zip(pairs, _norms(engine, list(pairs.values())).unbind(), strict=True))


def _norms(engine: DeepSpeedEngine, lists: Sequence[_Pairs]) -> Tensor:
    """Return the norm of each list of gradients over all stages, tensor-parallel shards and experts, fp32.

    Must be called by all ranks, which communicate once, however many lists there are.
    """
    if is_divided(engine.module):
        return _norms_over(engine, lists, engine.mpu.get_model_parallel_group())
    if engine.has_moe_layers:
        return _norms_of_all_experts(engine, lists)
    if (group := tensor_parallel_group(engine)) is not None:
        return _norms_over(engine, lists, group)
    grads_of = [[grad for _, grad in pairs if grad is not None] for pairs in lists]
    zero = torch.zeros((), dtype=torch.float64, device=engine.device)
    norms = [torch.linalg.vector_norm(norms_of(grads)) if grads else zero for grads in grads_of]
    return torch.stack(norms).float()


def _norms_over(engine: DeepSpeedEngine, lists: Sequence[_Pairs], group: dist.ProcessGroup) -> Tensor:
    """Return the norm of the gradients in each list of all pipeline stages or tensor-parallel ranks, fp32.

    DeepSpeed counts the first stage only, and at stage 0 in half precision the first rank's shards only.

    Args:
        engine: The engine.
        lists: The gradients of this rank's stage or shards.
        group: The ranks that have the other stages or shards of the model, all of which must call this.
    """
    # All stages with a copy of a tied layer have the same gradient, which counts on the stage where it is not marked.
    # What tensor parallelism does not cut is on all of its ranks, and counts on the first.
    first = bwc_tensor_model_parallel_rank(engine.mpu) == 0
    squared = torch.zeros(len(lists), dtype=torch.float64, device=engine.device)
    for number, pairs in enumerate(lists):
        counted = [
            grad
            for p, grad in pairs
            if grad is not None
            and not getattr(p, "ds_pipe_replicated", False)
            and (first or is_model_parallel_parameter(p))
        ]
        if counted:
            squared[number] = norms_of(counted).square().sum()
    dist.all_reduce(squared, group=group)
    return squared.sqrt().float()


def _norms_of_all_experts(engine: DeepSpeedEngine, lists: Sequence[_Pairs]) -> Tensor:
    """Return the norm of the gradients in each list, every expert counted once, fp32.

    DeepSpeed averages the norms of the ranks, each of which has its own experts, or leaves experts out. Must be called
    by all ranks.
    """
    grads_of: dict[tuple[int, str | None], list[Tensor]] = {}
    names: set[str] = set()
    for number, pairs in enumerate(lists):
        for param, grad in pairs:
            name = expert_group_name(param)
            names |= set() if name is None else {name}
            if grad is not None:
                grads_of.setdefault((number, name), []).append(grad.detach())
    squares = {key: norms_of(grads).square().sum().float() for key, grads in grads_of.items()}
    zero = torch.zeros((), dtype=torch.float32, device=engine.device)

    # (lists,): the sum of squares of each list over the experts of one group of ranks, or over everything else
    def sums(name: str | None) -> Tensor:
        return torch.stack([squares.get((number, name), zero) for number in range(len(lists))])

    total = sums(None)  # (lists,)
    for name in sorted(names):  # in one order on all ranks
        experts = sums(name)
        dist.all_reduce(experts, group=groups._get_expert_parallel_group(name))
        total = total + experts
    return total.sqrt()


PLAIN_NORM = Workaround(
    defect="the plain engine discards the norm that it clips by, and counts one stage of a pipeline, one rank's "
    "experts, and parameters that the optimizer was not given",
    test="tests/distributed/test_experts.py::test_matches_the_reference[moe-0-4-2-1-0.5]",
    prepare=measure_without_clipping,
    hooks=(
        Hook(
            DeepSpeedEngine,
            "clip_fp32_gradients",
            clip_fp32_gradients,
            lambda view: isinstance(view, PlainView),
        ),
    ),
)

NORM_OF_SCALED_GRADIENTS = Workaround(
    defect="stage 0 in half precision divides by a scale that was not applied; its norm is that of scaled gradients, "
    "and leaves experts and shards out",
    test="tests/distributed/test_experts.py::test_half_precision[moe-0-fp16-extra2]",
    hooks=(Hook((HalfView,), "unscale_and_clip_grads", unscale_and_clip_grads),),
)

NORM_OF_USED_PARAMETERS = Workaround(
    defect="BF16_Optimizer leaves parameters out of norm and clipping that this rank did not use and others did",
    test="tests/distributed/test_idle_parameters.py::test_a_parameter_counts_that_one_rank_used",
    hooks=(Hook((Bf16View,), "get_grads_for_norm", grads_for_norm),),
)
