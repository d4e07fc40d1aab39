"""The order of matrices in flat buffers: a permutation that gives all partitions about the same work."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_muon.plan.flat_order import order_of_matrices
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.rules import route_parameters
from deepspeed_muon.tools.model_shapes import PRESETS, from_config, load_model, with_separate_experts
from deepspeed_muon.tools.plan import PlanSettings, exchange_of
from tests.support.layouts import ITERATION
from tests.support.thinning import full

pytest.importorskip("transformers")


@settings(max_examples=200)
@given(
    dims=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=20),
    world=st.integers(1, 7),
)
def test_a_permutation_that_is_the_same_on_every_rank(dims: list[tuple[int, int]], world: int) -> None:
    numels, kinds = [rows * cols for rows, cols in dims], [((1, *shape),) for shape in dims]
    order = order_of_matrices(numels, kinds, world, ITERATION)
    assert sorted(order) == list(range(len(dims)))
    assert order == order_of_matrices(numels, kinds, world, ITERATION)


@functools.cache
def routes_of(model: str, separate: bool = False, layers: int = 61) -> list[Route]:
    if model == "deepseek-v3":
        members = from_config({**DEEPSEEK_V3, "num_hidden_layers": layers})
    else:
        members = load_model(model)
    return route_parameters(with_separate_experts(members) if separate else members)


# (model, ranks): at most this part of the elements that the given order moves, and this balance. What was found.
CASES = [
    ("llama-7b", 3, 0.50, 1.01),
    ("llama-7b", 48, 0.30, 1.06),
    ("llama-70b", 6, 0.14, 1.01),
    ("llama-70b", 128, 0.32, 1.03),
    ("qwen3-30b-a3b", 5, 0.95, 1.06),
]


@pytest.mark.parametrize(("model", "world", "share", "balance"), CASES)
def test_real_models(model: str, world: int, share: float, balance: float) -> None:
    routes = routes_of(model)
    before, after = (exchange_of(routes, PlanSettings(world, 1, reordered=new)) for new in (False, True))
    assert after.gather_elements.sum() <= share * before.gather_elements.sum()
    assert after.balance <= balance


DEEPSEEK_V3 = {
    **PRESETS["kimi-k2"],
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "first_k_dense_replace": 3,
}


@pytest.mark.parametrize(
    ("layers", "world", "balance"),
    [(11, 48, 1.11), full(61, 256, 1.15), full(61, 512, 1.3), full(61, 1024, 1.6), full(61, 2048, 2.2)],
)
def test_deepseek_v3_with_separate_experts(layers: int, world: int, balance: float) -> None:
    """The dear matrices of attention are in different partitions; what is left is their own cost."""
    routes = routes_of("deepseek-v3", separate=True, layers=layers)
    assert exchange_of(routes, PlanSettings(world, 1)).balance <= balance


# Its separate experts are the longer plan of what DeepSeek-V3's show above.
@pytest.mark.parametrize(("separate", "balance"), [full(True, 1.27), (False, 1.294)])
def test_kimi_k2_on_1024_ranks(separate: bool, balance: float) -> None:
    """Of a stack of experts a partition holds 34.06 blocks: no rank has more than 34, of 0.038 of the mean each."""
    routes = routes_of("kimi-k2", separate)
    assert exchange_of(routes, PlanSettings(1024, 1)).balance <= balance


def test_layers_that_divide_evenly_move_nothing() -> None:
    dims = [(8, 8), (16, 8), (8, 16)] * 4
    routes = [Route(f"{n}", (r, c), "muon", "") for n, (r, c) in enumerate(dims)]
    exchange = exchange_of(routes, PlanSettings(4, 1))
    assert exchange.sent_matrices == 0 and exchange.balance == 1.0
