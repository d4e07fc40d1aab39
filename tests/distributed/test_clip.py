"""Clipping by the norm of all gradients, and the norms that are reported, against float64."""

from __future__ import annotations

import functools
import importlib
import math
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import deepspeed_muon
from deepspeed_muon.engine.views import view_of
from deepspeed_muon.optimizer import Muon
from tests.support import training
from tests.support.autoep_models import AUTOEP_MATRICES, STACKS
from tests.support.autoep_models import build_plain as build_autoep
from tests.support.calls import Operations
from tests.support.comparisons import all_within, relative, within
from tests.support.contract import STEPS, train_reference
from tests.support.engines import ENGINES
from tests.support.models import GRIDS, MATRICES, Linear, batch, build
from tests.support.moe_models import MOE_MATRICES
from tests.support.moe_models import build_plain as build_moe
from tests.support.oracle import Oracle, matrices_of
from tests.support.pipelines import Embed
from tests.support.rounding import FP32_GATE, HALF_MODEL, USUAL, Arithmetic, limits
from tests.support.thinning import full, usual
from tests.support.training import FP32_SUMS, OFFLOAD

LIMIT = 0.2
"""Below the norms of both algorithms in every step of the toy models."""


@functools.lru_cache(maxsize=32)
def reference(
    kind: str, micro_batches: int, clipping: float, steps: int
) -> tuple[Any, Any, list[float], Any]:
    """Train in one process in float64.

    Returns:
        Start, end, norms (of all gradients in every step, then those of Muon's and of AdamW's), and running means.
    """
    if kind == "moe":
        model, matrices = build_moe(), matrices_of(MOE_MATRICES)
    elif kind == "autoep":
        model, matrices = build_autoep(), matrices_of(AUTOEP_MATRICES, experts=STACKS)
    else:
        model, matrices = build(kind), matrices_of(MATRICES[kind], grids=GRIDS.get(kind, {}))
    oracle = Oracle(matrices, clipping=clipping)
    start, end, _ = train_reference(model, oracle, micro_batches, steps)
    norms = [of_step[key] for key in ("all", "muon", "adamw") for of_step in oracle.norms]
    means = {
        key[0]: value for key, value in oracle.state.items() if key[-1] in ("momentum_buffer", "exp_avg")
    }
    return start, end, norms, means


def test_the_limit_clips_both_algorithms() -> None:
    for kind in ("toy", "even", "tied"):
        *_, norms, _ = reference(kind, 2, LIMIT, STEPS)
        assert min(norms) > 1.5 * LIMIT, (kind, norms)


def recorded(rank: int, world_size: int, *, of: str, **settings: Any) -> dict[str, Any]:
    """Run another rank function that reports ``norms``; put those by algorithm behind the norms of all gradients."""
    by_step: list[dict[str, float]] = []
    record_norms = Muon._record_norms

    def record(optimizer: Muon, norms: dict[str, Tensor]) -> None:
        if norms:
            by_step[-1] = {algorithm: float(norm) for algorithm, norm in norms.items()}
        else:
            by_step.append({})  # a step begins
        record_norms(optimizer, norms)

    module, _, function = of.partition(":")
    with mock.patch.object(Muon, "_record_norms", record):
        result = getattr(importlib.import_module(module), function)(rank, world_size, **settings)
    if "norms" in result:
        result["norms"] += [norms.get(key, 0.0) for key in ("muon", "adamw") for norms in by_step]
    return result


def train(
    rank: int,
    world_size: int,
    *,
    stage: int,
    clipping: float,
    params: dict[str, Any],
    exact: bool = True,
    accumulation: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Train; report running means, norms and health."""
    config = training.ds_config(
        stage, accumulation=accumulation, clipping=clipping, params=params, **settings
    )
    engine = training.make_engine(config, exact=exact)
    norms = training.train_steps(engine, STEPS, rank, world_size, accumulation)
    means = {**training.full_states(engine, "momentum_buffer"), **training.full_states(engine, "exp_avg")}
    health = deepspeed_muon.health(engine)
    return {
        "means": means,
        "norms": norms,
        "health": [health["grad_norm_muon"], health["grad_norm_adamw"]],
    }


def check(
    pool: Any,
    of: str,
    kind: str,
    micro_batches: int,
    arithmetic: Arithmetic = USUAL,
    /,
    steps: int = STEPS,
    clipping: float = LIMIT,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Train by the rank function ``of``; check all ranks' norms and running means; its own test compares weights."""
    params = {"health": 1}
    results = pool.run(recorded, of=of, clipping=clipping, params=params, **settings)
    *_, norms, means = reference(kind, micro_batches, clipping, steps)
    allowed = limits(reference, kind, micro_batches, clipping, steps, arithmetic=arithmetic)
    for result in results:
        assert len(result["norms"]) == len(norms)
        for number, (norm, expected) in enumerate(zip(result["norms"], norms, strict=True)):
            within(abs(norm - expected) / expected, allowed.norms, f"norm {number}")
        errors = {name: relative(value, means[name]) for name, value in result.get("means", {}).items()}
        all_within(errors, allowed.momentum, "running mean of")
    return results


TOY = "tests.distributed.test_clip:train"
FP32 = ("0", "1", "1-offload", "1-overlap-round-robin", "2", "2-offload", "3", "3-sub-groups", "3-offload")
USUAL_FP32 = {
    *(("0", 2), ("1", 4), ("1-offload", 2), ("2", 2), ("2-offload", 2)),
    *(("3-sub-groups", 4), ("3-offload", 2)),
}


@pytest.mark.parametrize(("setting", "world"), usual(product(FP32, (1, 2, 4)), USUAL_FP32))
def test_matches_the_reference(ranks: Any, setting: str, world: int) -> None:
    accumulation = 2 if world == 2 else 1
    arguments = {**ENGINES[setting], "accumulation": accumulation}
    for result in check(ranks(world), TOY, "toy", world * accumulation, **arguments):
        assert result["health"] == [result["norms"][2 * STEPS - 1], result["norms"][3 * STEPS - 1]]


HALF = (
    *("0-bf16", "0-fp16", "1-bf16", "1-bf16-fp32-sums", "1-fp16", "2-fp16", "2-fp16-offload"),
    *("3-bf16", "3-fp16", "3-fp16-offload"),
)
USUAL_HALF = {"0-fp16", "1-bf16-fp32-sums", "2-fp16-offload", "3-fp16"}


@pytest.mark.parametrize("setting", usual(HALF, USUAL_HALF))
def test_half_precision(ranks: Any, setting: str) -> None:
    """Gradients must be divided by the loss scale. Running means show it."""
    precision = ENGINES[setting]["precision"]
    check(ranks(2), TOY, "toy", 2, HALF_MODEL[precision], **ENGINES[setting])


PIPELINES = [
    # Model, stages, ranks, ZeRO, tensor-parallel ranks.
    ("toy", 2, 4, 0, 1),
    ("tied", 2, 2, 0, 1),
    ("tied", 2, 4, 1, 1),
    ("toy", 3, 3, 1, 1),
    ("toy", 2, 4, 0, 2),
    ("toy", 2, 4, 1, 2),
]
USUAL_PIPELINES = {("tied", 2, 2, 0, 1), ("toy", 2, 4, 1, 2)}


@pytest.mark.parametrize(("kind", "stages", "world", "zero", "tensor"), usual(PIPELINES, USUAL_PIPELINES))
def test_pipelines(ranks: Any, kind: str, stages: int, world: int, zero: int, tensor: int) -> None:
    """The norms are those of all stages; a tied layer, and what tensor parallelism does not cut, counts once."""
    arguments = {"kind": kind, "stages": stages, "zero": zero, "tensor": tensor}
    micro_batches = 2 * world // (stages * tensor)
    check(ranks(world), "tests.support.pipelines:train", kind, micro_batches, **arguments)


@pytest.mark.parametrize("stage", usual((0, 1, 2, 3), {0, 3}))
def test_tensor_parallelism(ranks: Any, stage: int) -> None:
    """Shards count on every rank, and copies once."""
    check(ranks(4), "tests.support.tensor_parallel:train", "even", 2, stage=stage)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "extra"), [(0, {}), (1, FP32_SUMS), (1, {})])
def test_tensor_parallelism_in_bf16(ranks: Any, stage: int, extra: dict[str, Any]) -> None:
    arguments = {"stage": stage, "precision": "bf16", "extra": extra}
    check(ranks(2), "tests.support.tensor_parallel:train", "even", 1, HALF_MODEL["bf16"], **arguments)


MOE = [
    *product((0,), ("fp32", "fp16"), ("",)),
    *product((1, 2), ("fp32",), ("", "offload")),
    (1, "bf16", "fp32-sums"),
]
USUAL_MOE = {(1, "bf16", "fp32-sums")}


@pytest.mark.parametrize(("stage", "precision", "setting"), usual(MOE, USUAL_MOE))
def test_experts(ranks: Any, stage: int, precision: str, setting: str) -> None:
    """The experts of all ranks count, each once, although two ranks of four have the same ones."""
    check(
        ranks(4),
        "tests.distributed.test_experts:train",
        "moe",
        4,
        FP32_GATE if precision == "fp32" else HALF_MODEL[precision],
        kind="moe",
        stage=stage,
        ep_size=2,
        precision=precision,
        zero=OFFLOAD if setting == "offload" else {},
        extra=FP32_SUMS if setting == "fp32-sums" else {},
    )


AUTOEP = list(product((1, 2, 3), ("", "offload")))


@pytest.mark.parametrize(("stage", "setting"), usual(AUTOEP, {}))
def test_autoep(ranks: Any, stage: int, setting: str) -> None:
    arguments = {"kind": "autoep", "stage": stage, "ep_size": 2, "zero": OFFLOAD if setting else {}}
    check(ranks(4), "tests.distributed.test_experts:train", "autoep", 4, FP32_GATE, steps=4, **arguments)


@pytest.mark.full
def test_nvme(ranks: Any, tmp_path: Path) -> None:
    """Sub-groups whose masters are on the disk between steps; the norms of their gradients are not."""
    check(ranks(2), "tests.distributed.test_nvme:train", "toy", 2, clipping=0.5, folder=str(tmp_path))


def overflowing(rank: int, world_size: int, *, stage: int) -> dict[str, Any]:
    """Give one matrix an infinite gradient; report the norms."""
    engine = training.make_engine(training.ds_config(stage, clipping=LIMIT, params={"health": 1}))
    engine.module.blocks[0].up.weight.register_hook(lambda grad: grad * float("inf"))
    training.run_step(engine, 0, rank, world_size, 1)
    norms = deepspeed_muon.muon_optimizer(engine).norms_by_algorithm
    assert norms is not None
    return {
        "norms": [float(norms[key]) for key in ("muon", "adamw")],
        "total": training.norm_of(engine),
        "skipped": engine.skipped_steps,
    }


@pytest.mark.parametrize("stage", [full(0), 1, full(2), 3])
def test_the_norms_say_whose_gradient_is_not_finite(ranks: Any, stage: int) -> None:
    for result in ranks(2).run(overflowing, stage=stage):
        muon, adamw = result["norms"]
        assert not math.isfinite(muon) and math.isfinite(adamw) and not math.isfinite(result["total"])
        assert result["skipped"] == 1


def test_monitors_show_both_norms_beside_the_rates(ranks: Any, tmp_path: Path) -> None:
    """In every step, also with the default, which reads no gradient again for them."""
    results = ranks(2).run(monitored, folder=str(tmp_path))
    for key in ("muon", "adamw"):
        (file,) = tmp_path.rglob(f"*grad_norm_{key}.csv")
        rows = [float(line.split(",")[1]) for line in file.read_text().splitlines()[1:]]
        assert rows == pytest.approx(results[0][key], rel=1e-6)
    total = [math.hypot(*norms) for norms in zip(results[0]["muon"], results[0]["adamw"], strict=True)]
    assert total == pytest.approx(results[0]["norms"], rel=1e-6)


def monitored(rank: int, world_size: int, *, folder: str) -> dict[str, Any]:
    section = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    engine = training.make_engine(training.ds_config(2, clipping=LIMIT, extra=section))
    optimizer = deepspeed_muon.muon_optimizer(engine)
    report: dict[str, Any] = {"muon": [], "adamw": [], "norms": []}
    for step in range(STEPS):
        training.run_step(engine, step, rank, world_size, 1)
        report["norms"].append(training.norm_of(engine))
        for key, norm in (optimizer.norms_by_algorithm or {}).items():
            report[key].append(float(norm))
    return report


def in_shuffled_orders(rank: int, world_size: int) -> Any:
    """Train a pipeline whose first stage AdamW trains, and whose last one Muon does."""
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(0)
    layers = [Embed(), Linear(16, 16)]
    pipeline = PipelineModule(
        layers, num_stages=2, loss_fn=lambda x, _: x.square().mean(), partition_method="uniform"
    )
    config = training.ds_config(1, accumulation=2, clipping=LIMIT, params={"include": ["*1.weight"]})
    engine = training.initialize(pipeline, config)
    engine.train_batch(iter([batch(0, micro) for micro in range(2)]))
    return [training.norm_of(engine), deepspeed_muon.muon_optimizer(engine).norms_by_algorithm]


def test_stages_of_different_algorithms(ranks: Any) -> None:
    """ZeRO 1 adds up the norms of groups of one number, which are of two algorithms here."""
    for norm, by_algorithm in ranks(2).run(in_shuffled_orders):
        assert norm > 0 and by_algorithm is None


def measure_gradients(
    rank: int, world_size: int, *, stage: int, scale: float
) -> tuple[int, list[float], float]:
    """Return the operations of the norm, those of Muon's and AdamW's partition, and the norm of all in float64."""
    engine = training.make_engine(training.ds_config(stage, precision="fp16"))
    tokens, targets = batch(0, rank)
    engine.backward(engine(tokens, targets))
    view = view_of(engine.optimizer)
    gradients = [gradient for group in view.wrapper.averaged_gradients.values() for gradient in group]
    for gradient in gradients:
        gradient.mul_(scale)
    with Operations() as operations:
        norms = view.norms_on_device()[:2]
    square = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
    torch.distributed.all_reduce(square)
    return operations.count, [float(norm) for norm in norms], float(square.sqrt())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_reads_all_gradients_of_a_partition_together(ranks: Any, stage: int) -> None:
    """DeepSpeed takes three operations a gradient, 46 here; where one is not finite the norm stays -1."""
    for count, norms, expected in ranks(2).run(measure_gradients, stage=stage, scale=1.0):
        assert math.hypot(*norms) == pytest.approx(expected, rel=2e-7)  # rounded to fp32
        assert count <= 38, count
    for _, norms, _ in ranks(2).run(measure_gradients, stage=stage, scale=math.inf):
        assert norms == [-1.0, -1.0]
