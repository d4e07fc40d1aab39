"""The reference run that every training run is compared with: one process, float64, no ZeRO."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.support.comparisons import all_within, relative, within
from tests.support.models import GRIDS, MATRICES, batch, build
from tests.support.oracle import Oracle, matrices_of
from tests.support.rounding import USUAL, Arithmetic, Limits, limits

STEPS = 3
"""Of a run that is compared: the first step begins without momentum, the others with that of the steps before."""


def backward(model: nn.Module, step: int, micro_batches: int, share: float | None = None) -> None:
    """Leave in ``.grad`` the sum of a step's micro-batches, times ``share``; by default their mean."""
    model.zero_grad()
    for micro in range(micro_batches):
        loss = model(*batch(step, micro))
        (loss / micro_batches if share is None else loss * share).backward()


def train_reference(
    model: nn.Module,
    oracle: Oracle,
    micro_batches: int,
    steps: int = STEPS,
    *,
    share: float | None = None,
    gradients: Callable[[int], object] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Train a model in float64, in place; return its parameters before and after, and the norms before clipping.

    ``gradients`` computes the gradients of a step, by default those of :func:`backward`.
    """
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.double()
    norms = []
    for step in range(steps):
        gradients(step) if gradients else backward(model, step, micro_batches, share)
        norms.append(oracle.update(model))
    return start, {name: param.detach() for name, param in model.named_parameters()}, norms


@functools.lru_cache(maxsize=64)
def reference(
    kind: str,
    micro_batches: int,
    clipping: float,
    steps: int = STEPS,
    variant: str = "muon",
    decay_mode: str = "decoupled",
    grids: str = "",
    warmup: tuple[float, int] | None = None,
    update_scale: float = 1.0,
) -> tuple[Any, Any, list[float], Any]:
    """Train in one process in float64 on all micro-batches; return start, end, raw norms and momentum.

    ``warmup`` has the values of ``momentum_warmup``.
    """
    model = build(kind)
    heads = {"self_attn.q_proj.weight": 4, "self_attn.k_proj.weight": 2} if kind == "heads" else {}
    matrices = matrices_of(
        MATRICES[kind], heads=heads, experts={"experts.up_proj"}, grids=GRIDS.get(grids or kind, {})
    )
    oracle = Oracle(matrices, clipping=clipping, variant=variant, weight_decay_mode=decay_mode)
    oracle.update_scale = update_scale
    if warmup is not None:
        oracle.momentum_warmup = {"from": warmup[0], "steps": warmup[1]}
    start, end, norms = train_reference(model, oracle, micro_batches, steps)
    end = {name: value for name, value in end.items() if model.get_parameter(name).requires_grad}
    momentum = {name: oracle.state[name, "momentum_buffer"] for name in MATRICES[kind]}
    return start, end, norms, momentum


def compare_paths(
    params: dict[str, Tensor], start: dict[str, Tensor], end: dict[str, Tensor], limits: Limits
) -> None:
    """Check how far the paths of the parameters are from the reference's."""
    errors = {name: relative(params[name], end[name], start[name]) for name in end}
    all_within(errors, limits.paths, "path of")


def compare(
    results: list[dict[str, Any]],
    kind: str,
    micro_batches: int,
    clipping: float,
    *,
    arithmetic: Arithmetic = USUAL,
    **variant: Any,
) -> None:
    """Check the first rank's assembled parameters and every rank's gradient norms against the reference."""
    start, end, norms, momentum = reference(kind, micro_batches, clipping, **variant)
    allowed = limits(reference, kind, micro_batches, clipping, arithmetic=arithmetic, **variant)
    params: dict[str, Tensor] = results[0]["params"]
    assert params.keys() == end.keys()
    compare_paths(params, start, end, allowed)
    errors = {name: relative(results[0]["momentum"][name], expected) for name, expected in momentum.items()}
    all_within(errors, allowed.momentum, "momentum of")
    for result in results:
        compare_norms(result["norms"], norms, allowed.norms)


def compare_matrices(
    results: list[dict[str, Any]],
    kind: str,
    micro_batches: int,
    clipping: float,
    arithmetic: Arithmetic,
    **variant: str,
) -> None:
    """Check only the matrices, and every rank's norms: where a model rounds, tiny gradients of Adam may be anything."""
    start, end, norms, _ = reference(kind, micro_batches, clipping, **variant)
    allowed = limits(reference, kind, micro_batches, clipping, arithmetic=arithmetic, **variant)
    params = results[0]["params"]
    errors = {name: relative(params[name], end[name], start[name]) for name in MATRICES[kind]}
    all_within(errors, allowed.paths, "path of")
    for result in results:
        compare_norms(result["norms"], norms, allowed.norms)


def compare_norms(actual: list[float], expected: list[float], limit: float) -> None:
    """Check gradient norms, relative to the expected ones."""
    for step, (norm, reference_norm) in enumerate(zip(actual, expected, strict=True)):
        within(abs(norm - reference_norm) / reference_norm, limit, f"gradient norm of step {step}")
