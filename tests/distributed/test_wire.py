"""``wire_dtype: int8``: a quarter of fp32's bytes, nearly the same updates, the same weights on all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import deepspeed_muon
from tests.support import training
from tests.support.models import build
from tests.support.thinning import full


def distance(result: dict[str, Any], exact: dict[str, Any]) -> float:
    """Return how far the weights of two runs are apart, relative to how far they have come."""
    start = dict(build("toy").named_parameters())
    apart = [(result["params"][name] - exact["params"][name]).square().sum() for name in start]
    moved = [(exact["params"][name] - start[name].detach()).square().sum() for name in start]
    return math.sqrt(float(sum(apart)) / float(sum(moved)))


@pytest.mark.parametrize(
    ("stage", "world", "params"),
    [
        (0, 4, {}),  # an owner in the middle sends to ranks on both sides
        full(1, 3, {}),
        full(2, 3, {}),
        (3, 2, {"variant": "normuon"}),
        full(3, 4, {}),
        (3, 4, {"exchange_chunk_numel": 90}),
    ],
)
def test_nearly_the_same_updates(ranks: Any, stage: int, world: int, params: dict[str, Any]) -> None:
    coded, exact = (
        ranks(world).run(training.train, stage=stage, steps=3, params={**params, "wire_dtype": name})
        for name in ("int8", "fp32")
    )
    for result, expected in zip(coded, exact, strict=True):
        # 0.7 % of what travels, more in the directions of small singular values, over three steps.
        assert 0 < distance(result, expected) < 0.05
        assert result["bytes_sent"] == result["planned_bytes"]
        for name, weights in coded[0]["params"].items():
            assert torch.equal(result["params"][name], weights), name
    bytes_sent, all_bytes = (sum(result["bytes_sent"] for result in each) for each in (coded, exact))
    # Small fragments: a scale of four bytes for each of them.
    assert 0.25 * all_bytes < bytes_sent < 0.4 * all_bytes


def sampled(rank: int, world_size: int, *, wire: str) -> dict[str, Any]:
    params = {"wire_dtype": wire, "health": 2}
    engine = training.make_engine(training.ds_config(3, params=params))
    training.train_steps(engine, 2, rank, world_size)
    return deepspeed_muon.health(engine)


def test_health_says_what_the_wire_changes(ranks: Any) -> None:
    for found in ranks(2).run(sampled, wire="int8"):
        assert 0.001 < found["wire_error_direction"] < 0.02
        assert 0.001 < found["wire_error_update"] < 0.02
    for found in ranks(2).run(sampled, wire="fp32"):
        assert "wire_error_direction" not in found and "wire_error_update" not in found
