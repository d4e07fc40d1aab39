"""The order of matrices in flat buffers: a permutation that moves no more than the given order and is balanced."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_muon.forecast.live import planned_parameters
from deepspeed_muon.forecast.model_shapes import PRESETS, from_config, load_model
from deepspeed_muon.forecast.predict import exchange_of, parameter_flops
from deepspeed_muon.forecast.settings import PlanSettings
from deepspeed_muon.math.newton_schulz import orthogonalize_flops
from deepspeed_muon.plan.order import balanced_order, order_quality
from deepspeed_muon.routing.rules import route_parameters


@settings(max_examples=200, deadline=None)
@given(
    dims=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=20),
    world=st.integers(1, 7),
)
def test_a_permutation_that_is_never_worse(dims: list[tuple[int, int]], world: int) -> None:
    numels = [r * c for r, c in dims]
    costs = [orthogonalize_flops(r, c) for r, c in dims]
    order = balanced_order(numels, costs, dims, world)
    assert sorted(order) == list(range(len(dims)))
    given_order = order_quality(numels, costs, world)
    chosen = order_quality([numels[i] for i in order], [costs[i] for i in order], world)
    assert chosen.moved <= given_order.moved
    assert chosen.score <= given_order.score
    assert order == balanced_order(numels, costs, dims, world)


# (model, ranks): at most this part of the elements that the given order moves, and this balance. What was found.
CASES = [
    ("llama-7b", 3, 0.50, 1.01),
    ("llama-7b", 48, 0.30, 1.06),
    ("llama-70b", 6, 0.14, 1.01),
    ("llama-70b", 128, 0.32, 1.03),
    ("qwen3-30b-a3b", 5, 0.47, 1.03),
]


@pytest.mark.parametrize(("model", "world", "part", "balance"), CASES)
def test_real_models(model: str, world: int, part: float, balance: float) -> None:
    muon = [p for p in planned_parameters(route_parameters(load_model(model))) if p.muon]
    numels = [p.numel for p in muon]
    costs = [parameter_flops(p, PlanSettings(1)) for p in muon]
    order = balanced_order(numels, costs, [p.blocks for p in muon], world)
    before = order_quality(numels, costs, world)
    after = order_quality([numels[i] for i in order], [costs[i] for i in order], world)
    assert after.moved <= part * before.moved
    assert after.busiest <= balance * sum(costs) / world


DEEPSEEK_V3 = {
    **PRESETS["kimi-k2"],
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "first_k_dense_replace": 3,
}


@pytest.mark.parametrize(("world", "balance"), [(256, 1.15), (512, 1.3), (1024, 1.6), (2048, 2.2)])
def test_deepseek_v3_with_separate_experts(world: int, balance: float) -> None:
    """The dear matrices of attention are in different partitions; what is left is their own cost."""
    members = from_config(DEEPSEEK_V3, separate_experts=True)
    muon = [p for p in planned_parameters(route_parameters(members)) if p.muon]
    assert exchange_of(muon, PlanSettings(world, 1)).balance <= balance


def test_layers_that_fit_stay_as_they_are() -> None:
    dims = [(8, 8), (16, 8), (8, 16)] * 4
    numels, costs = [r * c for r, c in dims], [orthogonalize_flops(r, c) for r, c in dims]
    assert balanced_order(numels, costs, dims, 4) == list(range(12))
