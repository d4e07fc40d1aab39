"""DeepSpeed's mixture-of-experts layers: every expert is updated as in a single process, by the ranks that share it."""

from __future__ import annotations

import functools
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_muon
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.variants import VARIANTS
from tests.support import training
from tests.support.comparisons import relative, within
from tests.support.contract import backward, compare_norms, train_reference
from tests.support.moe_models import EXPERTS, GATE, MOE_MATRICES, build_deepspeed, build_plain, global_name
from tests.support.oracle import Cuts, Oracle, cuts_in, matrices_of, stored_in_8_bits
from tests.support.rounding import FP32_GATE, HALF_MODEL, limits
from tests.support.tensor_parallel import Mpu
from tests.support.thinning import each_value, full, usual

STEPS = 3


def make_engine(
    ep_size: int,
    rank: int,
    *,
    stage: int,
    groups: str = "list",
    tensor_size: int = 1,
    **settings: Any,
) -> Any:
    """Return an engine; ``groups`` says how the parameters are passed."""
    model = build_deepspeed(ep_size, rank % ep_size)
    config = training.ds_config(stage, **settings)
    params: Any = list(model.parameters())
    optimizer = None
    if groups == "caller":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        params = split_params_into_different_moe_groups_for_optimizer({"params": params, "name": "all"})
    elif groups == "unnamed":
        params = [
            {"params": [p for p in params if p.ndim > 1]},
            {"params": [p for p in params if p.ndim < 2], "algorithm": "adamw"},
        ]
    elif groups == "client":
        optimizer = Muon(model, **training.MUON_PARAMS)
        del config["optimizer"]
    mpu = Mpu(tensor_size) if tensor_size > 1 else None
    return training.initialize(model, config, model_parameters=params, optimizer=optimizer, mpu=mpu)


def train(
    rank: int,
    world_size: int,
    *,
    ep_size: int,
    stage: int,
    accumulation: int = 1,
    groups: str = "list",
    **settings: Any,
) -> Any:
    """Train; return this rank's experts under their global names, everything else, and the norms."""
    engine = make_engine(ep_size, rank, stage=stage, groups=groups, accumulation=accumulation, **settings)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    norms = []
    for step in range(STEPS):
        optimizer.stats.reset()
        training.run_step(engine, step, rank, world_size, accumulation)
        norms.append(float(engine.get_global_grad_norm()))
    first = (rank % ep_size) * (EXPERTS // ep_size)
    return {
        "params": {global_name(n, first): p for n, p in training.full_masters(engine).items()},
        "cuts": {global_name(n, first): cuts for n, cuts in training.cuts_of(engine).items()},
        "norms": norms,
        "orthogonalized": optimizer.stats.matrices_orthogonalized,
        "routes": {route.name: route.algorithm for route in optimizer.routes},
        "groups": [[g["algorithm"], bool(g.get("moe"))] for g in optimizer.param_groups],
        "caller_groups": [g["caller_group"] for g in optimizer.param_groups],
    }


@functools.lru_cache(maxsize=8)
def reference(
    micro_batches: int, clipping: float, variant: str = "muon", int8_cuts: Cuts | None = None
) -> tuple[Any, Any, list[float]]:
    """Train the plain model in float64 in this process, with int8 momentum if its cuts are given."""
    model = build_plain()
    oracle = Oracle(matrices_of(MOE_MATRICES), clipping=clipping, variant=variant)
    if int8_cuts is not None:
        oracle.store_momentum = stored_in_8_bits(int8_cuts)

    def gradients(step: int) -> None:
        backward(model, step, micro_batches)
        assert all(param.grad.any() for param in model.parameters()), "every expert gets a token"

    return train_reference(model, oracle, micro_batches, STEPS, gradients=gradients)


def compare(results: list[Any], micro_batches: int, clipping: float, variant: str = "muon") -> None:
    start, end, norms = reference(micro_batches, clipping, variant)
    # DeepSpeed's gate computes in fp32 whatever the rest does.
    allowed = limits(reference, micro_batches, clipping, variant, arithmetic=FP32_GATE)
    seen = set()
    for result in results:
        for name, value in result["params"].items():
            within(relative(value, end[name], start[name]), allowed.paths[name], f"path of {name}")
            seen.add(name)
        compare_norms(result["norms"], norms, allowed.norms)
        assert result["routes"][GATE] == "adamw"
    assert seen == end.keys(), "all experts together are the whole model"


CASES = [
    (0, 2, 1, 1, 0.5),
    (0, 4, 2, 1, 0.5),
    (0, 2, 2, 2, 0.0),
    (1, 3, 1, 1, 0.0),
    (1, 4, 2, 1, 0.5),
    (2, 2, 1, 2, 0.5),
    (2, 4, 2, 1, 0.5),
    (2, 2, 2, 2, 0.0),
]
CORE = {CASES[1], CASES[3], CASES[4], CASES[5], CASES[7]}


@pytest.mark.parametrize(
    ("stage", "world", "ep_size", "accumulation", "clipping"), usual(CASES, CORE, compat=CORE)
)
def test_matches_the_reference(
    ranks: Any, stage: int, world: int, ep_size: int, accumulation: int, clipping: float
) -> None:
    results = ranks(world).run(
        train, stage=stage, ep_size=ep_size, accumulation=accumulation, clipping=clipping
    )
    compare(results, world * accumulation, clipping)
    # Newton-Schulz runs once for every expert and matrix, over all ranks that share it.
    assert sum(result["orthogonalized"] for result in results) == len(MOE_MATRICES)


@pytest.mark.parametrize(
    ("groups", "stage"), [("caller", 1), ("unnamed", 2), ("client", 0), full("client", 2)]
)
def test_ways_of_passing_the_parameters(ranks: Any, groups: str, stage: int) -> None:
    """The caller's expert groups, groups without a name, and a client optimizer that knows nothing of experts."""
    results = ranks(2).run(train, stage=stage, ep_size=2, groups=groups)
    compare(results, 2, 0.0)
    kinds = {tuple(group) for group in results[0]["groups"]}
    assert kinds == {("muon", False), ("adamw", False), ("muon", True), ("adamw", True)}
    # Of groups with an algorithm it was the number among DeepSpeed's divided groups.
    assert groups != "unnamed" or set(results[0]["caller_groups"]) == {0, 1}


@pytest.mark.parametrize(
    ("stage", "precision", "extra"),
    [(1, "bf16", training.FP32_SUMS), full(2, "bf16", {}), (0, "fp16", {})],
)
def test_half_precision(ranks: Any, stage: int, precision: str, extra: dict[str, Any]) -> None:
    """BF16_Optimizer, the ZeRO wrapper and FP16_UnfusedOptimizer."""
    results = ranks(2).run(train, stage=stage, ep_size=2, precision=precision, clipping=0.5, extra=extra)
    start, end, norms = reference(2, 0.5)
    allowed = limits(reference, 2, 0.5, arithmetic=HALF_MODEL[precision])
    for result in results:
        for name in result["params"].keys() & MOE_MATRICES:
            error = relative(result["params"][name], end[name], start[name])
            within(error, allowed.paths[name], f"path of {name}")
        compare_norms(result["norms"], norms, allowed.norms)


def overflowing(rank: int, world_size: int) -> list[float]:
    """Take three steps, where an expert of rank 0 overflows in the second; return the loss scale after each of them."""
    autocast = {
        "enabled": True,
        "dtype": "float16",
        "lower_precision_safe_modules": ["tests.support.models.Linear"],
    }
    engine = make_engine(2, rank, stage=0, extra={"torch_autocast": autocast})
    scales = []
    for step in range(3):
        if rank == 0 and step == 1:
            expert = next(
                p for name, p in engine.module.named_parameters() if "experts" in name and p.ndim > 1
            )
            hook = expert.register_hook(lambda grad: grad * float("inf"))
        training.run_step(engine, step, rank, world_size, 1)
        if rank == 0 and step == 1:
            hook.remove()
        scales.append(engine.torch_autocast_z0_gradscaler.get_scale())
    assert deepspeed_muon.muon_optimizer(engine).skipped_steps == engine.skipped_steps == 1
    return scales


def test_all_ranks_lower_the_loss_scale(ranks: Any) -> None:
    """Each rank had a ``GradScaler`` of its own, and gradients of different scales were averaged after an overflow.

    All ranks skipped the step, but those without the expert that overflowed kept their scale.
    """
    for scales in ranks(2).run(overflowing):
        assert scales == [2.0**16, 2.0**15, 2.0**15]


def refused(rank: int, world_size: int, *, ep_size: int, stage: int, **settings: Any) -> str:
    start = lambda: make_engine(ep_size, rank, stage=stage, **settings)  # noqa: E731
    return training.refusal(start, deepspeed_muon.ConfigError)


@pytest.mark.parametrize(
    ("ep_size", "stage", "settings", "said"),
    [
        (1, 1, {"tensor_size": 2}, "tensor parallelism with deepspeed.moe is not supported"),
    ],
)
def test_refusals(ranks: Any, ep_size: int, stage: int, settings: dict[str, Any], said: str) -> None:
    for text in ranks(2).run(refused, ep_size=ep_size, stage=stage, **settings):
        assert said in text, text


def poisoned(rank: int, world_size: int, *, stage: int, mode: str) -> Any:
    """Put an infinity into the gradient of an expert that only rank 0 has."""
    engine = make_engine(2, rank, stage=stage, params={"nonfinite_grad": mode})
    optimizer = deepspeed_muon.muon_optimizer(engine)
    before = training.full_masters(engine)
    inner = optimizer.step

    def step(*args: Any) -> Any:
        for group in optimizer.param_groups:
            if rank == 0 and group.get("moe"):
                group["params"][0].grad.view(-1)[0] = float("inf")
        return inner(*args)

    optimizer.step = step
    said = training.refusal(
        lambda: training.run_step(engine, 0, rank, world_size, 1), deepspeed_muon.NumericalError
    )
    after = training.full_masters(engine)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    return {"said": said, "moved": moved, "skipped": optimizer.skipped_steps}


@pytest.mark.parametrize("mode", ["skip", "error"])
def test_an_infinity_in_one_expert_is_known_to_all_ranks(ranks: Any, mode: str) -> None:
    for result in ranks(2).run(poisoned, stage=0, mode=mode, timeout=60):
        assert not result["moved"]
        assert ("non-finite gradient" in result["said"]) == (mode == "error")
        assert result["skipped"] == (mode == "skip")


def resumed(rank: int, world_size: int, *, stage: int, folder: str, phase: str) -> Any:
    engine = make_engine(2, rank, stage=stage, clipping=0.5)
    return training.train_all_or_rest(engine, rank, world_size, folder=folder, phase=phase)


@pytest.mark.parametrize("stage", [full(1), 2])
def test_resume_is_bit_identical(ranks: Any, stage: int, tmp_path: Path) -> None:
    uninterrupted = ranks(4).run(resumed, stage=stage, folder=str(tmp_path), phase="whole")
    rest = ranks(4).run(resumed, stage=stage, folder=str(tmp_path), phase="rest")
    for first, second in zip(uninterrupted, rest, strict=True):
        training.assert_same_bits(second, first)


@pytest.mark.parametrize(("stage", "ep_size"), [(0, 2), (1, 2), (2, 1)])
def test_int8_momentum(ranks: Any, stage: int, ep_size: int) -> None:
    results = ranks(4).run(train, ep_size=ep_size, stage=stage, params={"momentum_dtype": "int8"})
    start, end, _ = reference(4, 0.0, int8_cuts=cuts_in(*results))
    for result in results:
        errors = sorted(relative(value, end[name], start[name]) for name, value in result["params"].items())
        # See test_precision: some scales and some codes are rounded to the other side.
        within(errors[len(errors) // 2], 1e-4, "median of paths")
        within(errors[-1], 3e-2, "path")


@pytest.mark.parametrize(
    ("stage", "variant"), each_value(product((1, 0), (name for name in VARIANTS if VARIANTS[name].state)))
)
def test_variants_of_experts(ranks: Any, stage: int, variant: str) -> None:
    """What a variant keeps of an expert lies and travels among the ranks that share it."""
    results = ranks(4).run(train, ep_size=2, stage=stage, params={"variant": variant})
    compare(results, 4, 0.0, variant=variant)
