"""Training in which parameters have a gradient in some steps only, and its float64 reference."""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import replace
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import training
from tests.support.comparisons import all_within, relative
from tests.support.contract import compare_norms, compare_paths
from tests.support.models import MATRICES, Branches, batch, build
from tests.support.oracle import Oracle, matrices_of
from tests.support.rounding import HALF_MODEL, USUAL, limits

MANNERS = (
    "by hand",  # the program sets the accumulation boundary and calls step() once a step
    "evaluating",  # forward passes that use all branches, before and after backward
    "plain backward",  # loss.backward()
    "zero_grad",  # of the wrapper, before each step
    "checkpointed",  # reentrant activation checkpointing: several phases in one backward pass
    "unmanaged",  # managed_gradient_accumulation: false
    "coalesced",  # engine.coalesce_grad_reduction()
)


def lead(
    rank: int,
    world_size: int,
    *,
    schedule: list[list[str]],
    manner: str = "",
    touch: str = "",
    **settings: Any,
) -> dict[str, Any]:
    """Train by a schedule; report the masters before and after each step, the momentum at the end, and the norms.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        schedule: The branches that each micro-batch of each step uses.
        manner: One of ``MANNERS``.
        touch: See :class:`tests.support.models.Branches`; ``leaf`` makes that module one of DeepSpeed's leaf modules.
        **settings: For :func:`tests.support.training.ds_config`, and ``zero_init``.
    """
    zero_init = settings.pop("zero_init", False)
    accumulation = 1 if manner == "coalesced" else len(schedule[0])
    if manner == "unmanaged":
        settings["extra"] = {"managed_gradient_accumulation": False}
    config = training.ds_config(settings.pop("stage"), accumulation=accumulation, clipping=0.5, **settings)
    model = make_model(config, zero_init, touch, manner)
    engine = training.initialize(model, config)
    paths, norms, skipped = [training.full_masters(engine)], [], []
    for step, micros in enumerate(schedule):
        before = total_skipped(engine)
        if manner == "zero_grad":
            engine.optimizer.zero_grad()
        with engine.coalesce_grad_reduction() if manner == "coalesced" else contextlib.nullcontext():
            for micro, used in enumerate(micros):
                model.used = branches_of_rank(used, rank)
                factor = float("inf") if "!" in used else 1.0
                tokens = batch(step, micro * world_size + rank)
                run_micro_batch(engine, tokens, factor, manner, micro, len(micros))
        if manner == "coalesced":
            engine.step()
        paths.append(training.full_masters(engine))
        norms.append(float(engine.get_global_grad_norm()))
        skipped.append(total_skipped(engine) > before)
    return {
        "paths": paths,
        "momentum": training.full_states(engine, "momentum_buffer"),
        "norms": norms,
        "skipped": skipped,
    }


def run_micro_batch(
    engine: Any, tokens: tuple[Tensor, Tensor], factor: float, manner: str, micro: int, micros: int
) -> None:
    """Run forward, backward and, where the manner calls it here, ``step()``."""
    last = micro == micros - 1
    if manner == "by hand":
        engine.set_gradient_accumulation_boundary(is_boundary=last)
    if manner == "evaluating":
        evaluate(engine, tokens)
    loss = engine(*tokens) * factor
    if manner == "plain backward":
        loss.backward()
    else:
        # Coalescing counts as one micro-batch: the program takes the mean.
        engine.backward(loss / micros if manner == "coalesced" else loss)
    if manner == "evaluating":
        evaluate(engine, tokens)
    if manner != "coalesced" and (last or manner not in ("by hand", "unmanaged")):
        engine.step()


def make_model(config: dict[str, Any], zero_init: bool, touch: str, manner: str) -> Any:
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero_init):
        model: Any = build("switched")
    if zero_init:
        training.load_unpartitioned(model, "switched", {})
    if touch == "leaf":
        set_z3_leaf_modules(model, [Branches])
    else:
        model.branches.touch = touch
    if manner == "checkpointed":
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=True)
    return model


def branches_of_rank(used: str, rank: int) -> str:
    """Return the branches that a rank uses in a micro-batch."""
    return (used.split("|")[rank] if "|" in used else used).strip("!")


def total_skipped(engine: Any) -> int:
    return int(engine.skipped_steps) + int(engine.basic_optimizer.skipped_steps)


def evaluate(engine: Any, tokens: tuple[Tensor, Tensor]) -> None:
    """Run a forward pass that uses all branches, without gradients."""
    used, engine.module.used = engine.module.used, "ab"
    engine.eval()
    with torch.no_grad():
        engine(*tokens)
    engine.train()
    engine.module.used = used


@functools.lru_cache(maxsize=32)
def reference(schedule_json: str, world: int) -> tuple[Any, Any, list[float], Any]:
    """Train in one process in float64; return masters before and after, norms and momentum."""
    schedule = json.loads(schedule_json)
    model = build("switched")
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    model = model.double()
    oracle = Oracle(matrices_of(MATRICES["switched"]), clipping=0.5)
    norms = []
    for step, micros in enumerate(schedule):
        model.zero_grad()
        overflows = any("!" in used for used in micros)
        for micro, used in enumerate(micros):
            for rank in range(world):
                model.used = branches_of_rank(used, rank)
                (model(*batch(step, micro * world + rank)) / world / len(micros)).backward()
        norms.append(float("inf") if overflows else oracle.update(model))
    end = {name: param.detach() for name, param in model.named_parameters()}
    momentum = {key[0]: buf for key, buf in oracle.state.items() if key[-1] == "momentum_buffer"}
    return start, end, norms, momentum


def compare(
    results: list[dict[str, Any]],
    schedule: list[list[str]],
    *,
    precision: str = "fp32",
    masters: torch.dtype = torch.float32,
) -> None:
    """Check every step: what is idle keeps its bits, all else follows the reference, norms included."""
    start, end, expected_norms, expected_momentum = reference(json.dumps(schedule), len(results))
    paths = results[0]["paths"]
    for step, (micros, before, after) in enumerate(zip(schedule, paths, paths[1:], strict=False)):
        overflows = any("!" in used for used in micros)
        assert results[0]["skipped"][step] == overflows, (step, results[0]["skipped"])
        for name, param in after.items():
            idle = overflows or (name.startswith("branches.") and name.split(".")[1] not in "".join(micros))
            stayed = torch.equal(param, before[name])
            assert stayed or not idle, f"{name} moved in step {step}, without a gradient"
    finite = [number for number, norm in enumerate(expected_norms) if norm != float("inf")]
    arithmetic = USUAL if precision == "fp32" else replace(HALF_MODEL[precision], masters=masters)
    allowed = limits(reference, json.dumps(schedule), len(results), arithmetic=arithmetic)
    norms = [expected_norms[number] for number in finite]
    for result in results:
        compare_norms([result["norms"][number] for number in finite], norms, allowed.norms)
    if precision != "fp32":
        matrices = {name: value for name, value in end.items() if name in MATRICES["switched"]}
        compare_paths(paths[-1], start, matrices, allowed)
        return
    compare_paths(paths[-1], start, end, allowed)
    momentum = results[0]["momentum"]
    errors = {name: relative(momentum[name], expected) for name, expected in expected_momentum.items()}
    all_within(errors, allowed.momentum, "momentum of")
