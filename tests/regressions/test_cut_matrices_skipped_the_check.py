"""With tensor parallelism weights became non-finite, or 1e10, and ``redone`` and ``failed`` stayed 0.

The matrices that tensor parallelism cuts went from the iteration to the weights without the check that every other
matrix passes.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import deepspeed_muon
from deepspeed_muon.math.coefficients import band_of, resolve_schedule
from deepspeed_muon.monitoring.measure import norm_bounds
from tests.support import tensor_parallel
from tests.support.comparisons import relative, within
from tests.support.contract import reference
from tests.support.models import MATRICES, batch
from tests.support.rounding import limits
from tests.support.training import ds_config, heard, refusal

CUT = sorted(name for name in MATRICES["even"] if "blocks" in name)


def train_scaled(
    rank: int,
    world_size: int,
    *,
    factors: tuple[float, ...] = (1.0,),
    params: dict[str, Any] | None = None,
    garbage: int = 0,
) -> dict[str, Any]:
    """Train one step a factor, with the loss times it; return whole masters, counters, log and the error.

    The first ``garbage`` iterations of cut matrices on rank 1 return NaN.
    """
    messages = heard()
    left = [garbage if rank == 1 else 0]

    def spoiling(iterate: Any) -> Any:
        def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
            left[0] -= 1
            return iterate(*args, **kwargs) * (float("nan") if left[0] >= 0 else 1.0)

        return broken

    config = ds_config(1, params=params)
    error = ""
    engine = tensor_parallel.make_engine("megatron", 2, config)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    for runner in optimizer.runners:
        local = runner._orthogonalizer._local
        local.newton_schulz = spoiling(local.newton_schulz)
    group = optimizer.runners[0].step_set.tensor_group
    masters = [tensor_parallel.assembled(engine, None, group)]
    for step, factor in enumerate(factors):
        engine.backward(engine(*batch(step, rank // 2)) * factor)
        if said := refusal(engine.step):
            error = f"step {step}: {said}"
        masters.append(tensor_parallel.assembled(engine, None, group))
    return {"masters": masters, **deepspeed_muon.health(engine), "messages": messages, "error": error}


def total(results: list[dict[str, Any]], counter: str) -> int:
    """Each rank reports its own counts until a sample is taken."""
    return sum(result[counter] for result in results)


def test_an_overflowing_wire_spoils_nothing(ranks: Any) -> None:
    """Directions beyond fp16's 65504 are infinite: no iteration can help, so the matrices keep their weights."""
    params = {"wire_dtype": "fp16", "nonfinite_grad": "error", "weight_decay": 0.0}
    results = ranks(2).run(train_scaled, factors=(1e12, 1.0), params=params)
    for result in results:
        start, spoilt, after = result["masters"]
        assert all(bool(torch.isfinite(value).all()) for value in (*spoilt.values(), *after.values()))
        for name in MATRICES["even"]:
            assert torch.equal(spoilt[name], start[name]), name
        # The step after the one that left the updates out raises before it changes anything.
        assert result["error"].startswith("step 1: NumericalError: "), result["error"]
        assert all(torch.equal(after[name], spoilt[name]) for name in after)
    assert total(results, "failed") == len(MATRICES["even"]) and total(results, "redone") == 0
    said = [message for result in results for message in result["messages"] if "blocks.0.up" in message]
    assert len(said) == 1 and "(16 x 16)" in said[0] and "wire_dtype fp16" in said[0]


@pytest.mark.kernels
def test_one_wrong_result_is_redone(ranks: Any) -> None:
    results = ranks(2).run(train_scaled, garbage=1)
    assert total(results, "failed") == 0 and total(results, "redone") >= 1
    start, end, _, _ = reference("even", 1, 0.0, steps=1)
    allowed = limits(reference, "even", 1, 0.0, steps=1)
    for name in MATRICES["even"]:
        error = relative(results[0]["masters"][1][name], end[name], start[name])
        within(error, allowed.paths[name], f"path of {name}")


def train_diverging(rank: int, world_size: int, **settings: Any) -> dict[str, Any]:
    """Train in bf16 with cans, which a configuration refuses."""
    with mock.patch("deepspeed_muon.config.settings.tolerates_rounding", return_value=True):
        return train_scaled(rank, world_size, **settings)


def test_a_diverging_schedule_is_caught(ranks: Any) -> None:
    """Cans in bf16 maps singular values just above 1, where rounding puts them, to anything."""
    params = {
        "ns_schedule": "cans", "ns_dtype": "bf16", "ns_backend": "torch", "weight_decay": 0.0,
        "adjust_lr_fn": "original",
    }  # fmt: skip
    results = ranks(2).run(train_diverging, factors=(1.0,) * 3, params=params)
    assert total(results, "redone") > 0
    band = band_of(resolve_schedule("cans"))
    for before, after in zip(results[0]["masters"], results[0]["masters"][1:], strict=False):
        for name in CUT:
            rows, cols = after[name].shape
            largest = 0.02 * max(1.0, rows / cols) ** 0.5 * norm_bounds(rows, cols, band)[1]
            assert float((after[name] - before[name]).norm()) <= largest, name
