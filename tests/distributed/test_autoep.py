"""AutoEP: every expert is updated as in a single process, once, by the ranks that share it, at ZeRO 1 to 3."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import deepspeed_muon
from deepspeed_muon.optimizer import Muon
from tests.support import training
from tests.support.autoep_models import (
    AUTOEP_MATRICES,
    EXPERTS,
    GATES,
    STACKS,
    autoep_config,
    build_plain,
    build_source,
    compute_exactly,
    source_state,
)
from tests.support.models import batch
from tests.support.reference import Oracle, relative
from tests.support.thinning import pairwise

STEPS = 4

# AutoEP computes the softmax of its gate in fp32 (6e-8) whatever the rest does; see test_moe.
MUON_TOLERANCE = 2e-5
ADAM_TOLERANCE = 1e-4


def make_engine(
    ep_size: int,
    stage: int,
    *,
    idle: int | None = None,
    zero_init: bool = False,
    extra: Any = None,
    **settings: Any,
) -> Any:
    """Return an engine whose experts AutoEP has divided over ``ep_size`` ranks."""
    own = {"expert_parallel": autoep_config(ep_size), **(extra or {})}
    config = training.ds_config(stage, extra=own, **settings)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero_init):
        model = build_source(idle, loaded=not zero_init)
    if zero_init:
        source = source_state(idle)
        for name, param in model.named_parameters():
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.data.copy_(source[name])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    compute_exactly(engine.module)
    return engine


def first_expert(rank: int, ep_size: int) -> int:
    return (rank % ep_size) * (EXPERTS // ep_size)


def train(
    rank: int, world_size: int, *, ep_size: int, stage: int, accumulation: int = 1, **settings: Any
) -> Any:
    """Train; return this rank's experts and everything else, the norms, and the tokens of every expert."""
    engine = make_engine(ep_size, stage, accumulation=accumulation, **settings)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    norms, tokens = [], []
    layers = [layer.mlp for layer in engine.module.model.layers]
    for step in range(STEPS):
        optimizer.stats.reset()
        before = torch.stack([layer.tokens_per_expert for layer in layers])
        training.run_step(engine, step, rank, world_size, accumulation)
        norms.append(float(engine.get_global_grad_norm()))
        tokens.append((torch.stack([layer.tokens_per_expert for layer in layers]) - before).tolist())
    report = {
        "params": training.full_masters(engine),
        "first": first_expert(rank, ep_size),
        "norms": norms,
        "tokens": tokens,
        "orthogonalized": optimizer.stats.matrices_orthogonalized,
        "routes": {route.name: route.algorithm for route in optimizer.routes},
    }
    engine.destroy()
    return report


@functools.lru_cache(maxsize=8)
def reference(
    micro_batches: int, clipping: float, variant: str = "muon", idle: int | None = None
) -> tuple[Any, Any, list[float]]:
    """Train the plain model in float64 in this process."""
    model = build_plain(idle)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    model = model.double()
    oracle = Oracle(AUTOEP_MATRICES, clipping=clipping, variant=variant, experts=STACKS)
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        for micro in range(micro_batches):
            (model(*batch(step, micro)) / micro_batches).backward()
        norms.append(oracle.update(model))
    return start, {name: param.detach() for name, param in model.named_parameters()}, norms


def worst_error(
    results: list[Any], micro_batches: int, clipping: float, **kwargs: Any
) -> tuple[float, float]:
    """Return the largest errors of Muon's and of AdamW's parameters; every expert is compared by itself."""
    start, end, _ = reference(micro_batches, clipping, **kwargs)
    muon, adam = [0.0], [0.0]
    seen: dict[str, set[int]] = {}
    for result in results:
        for name, value in result["params"].items():
            first = result["first"] if name in STACKS else 0
            pieces = zip(
                *(t[first:][: len(value)] if name in STACKS else t[None] for t in (end[name], start[name]))
            )
            values = value if name in STACKS else value[None]
            for number, (own, (expected, begun)) in enumerate(zip(values, pieces, strict=True)):
                (muon if name in AUTOEP_MATRICES else adam).append(relative(own, expected, begun))
                seen.setdefault(name, set()).add(first + number)
    assert seen.keys() == end.keys()
    assert all(seen[name] == set(range(EXPERTS)) for name in STACKS), "all ranks together hold every expert"
    return max(muon), max(adam)


def compare(results: list[Any], micro_batches: int, clipping: float, **kwargs: Any) -> None:
    muon, adam = worst_error(results, micro_batches, clipping, **kwargs)
    assert muon <= MUON_TOLERANCE and adam <= ADAM_TOLERANCE, (muon, adam)
    norms = torch.tensor(reference(micro_batches, clipping, **kwargs)[2])
    for result in results:
        torch.testing.assert_close(torch.tensor(result["norms"]), norms, rtol=1e-6, atol=0)
        assert all(result["routes"][gate] == "adamw" for gate in GATES)
        assert all(result["routes"][stack] == "muon" for stack in STACKS)


CASES = [
    (stage, world, ep_size, accumulation, clipping)
    for stage in (1, 2, 3)
    for world, ep_size in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
    for accumulation, clipping in ((1, 0.5), (2, 0.0), (2, 0.5))
]


@pytest.mark.parametrize(("stage", "world", "ep_size", "accumulation", "clipping"), pairwise(CASES))
def test_matches_the_reference(
    ranks: Any, stage: int, world: int, ep_size: int, accumulation: int, clipping: float
) -> None:
    results = ranks(world).run(
        train, stage=stage, ep_size=ep_size, accumulation=accumulation, clipping=clipping
    )
    compare(results, world * accumulation, clipping)
    # Newton-Schulz runs once for every matrix and every stack of experts, over all ranks that share it.
    others = len(AUTOEP_MATRICES - STACKS)
    assert sum(result["orthogonalized"] for result in results) == others + ep_size * len(STACKS)
