"""A bad row moment of NorMuon (from a damaged state) made its whole matrix NaN: only what came before was checked."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_muon
from deepspeed_muon import Muon
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import reference_orthogonalize
from deepspeed_muon.variants.normuon import MOMENTS, reference_finish
from tests.support import training

BETA2 = 0.9


def one_matrix(**kwargs: Any) -> tuple[nn.Parameter, Muon]:
    weight = nn.Parameter(torch.zeros(12, 20))
    settings = {
        "variant": "normuon",
        "ns_dtype": "fp32",
        "beta2": BETA2,
        "momentum": 0.0,
        "nesterov": False,
        **kwargs,
    }
    return weight, Muon([("layer.weight", weight)], muon_lr=1.0, ns_backend="torch", **settings)


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_bad_moments_start_anew(caplog: pytest.LogCaptureFixture, value: float) -> None:
    """The matrix gets the update of a first step, and the next one goes on from there."""
    weight, optimizer = one_matrix()
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(3, 12, 20, generator=generator)
    moments = torch.zeros(12, dtype=torch.float64)
    for step, gradient in enumerate(gradients):
        weight.data.zero_()
        weight.grad = gradient
        if step == 1:
            optimizer.state[weight][MOMENTS][3] = value
            moments.zero_()
        with caplog.at_level(logging.WARNING):
            optimizer.step()
        polar = reference_orthogonalize(gradient, resolve_schedule("quintic"))
        expected, moments = reference_finish(polar, moments, beta2=BETA2)
        # fp32 against float64, as in the tests of the iteration.
        assert float((-weight.detach() - expected).norm() / expected.norm()) <= 1e-4
        torch.testing.assert_close(optimizer.state[weight][MOMENTS].double(), moments, rtol=1e-4, atol=0)
    assert optimizer.health() == {"redone": 1, "failed": 0}
    assert caplog.text.count("layer.weight") == 1 and "row moments" in caplog.text


def test_a_matrix_without_an_update_keeps_its_moments() -> None:
    """An element beyond fp16's range is an infinity on an fp16 wire."""
    weight, optimizer = one_matrix(wire_dtype="fp16")
    weight.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(2))
    optimizer.step()
    before, moments = weight.detach().clone(), optimizer.state[weight][MOMENTS].clone()
    weight.grad = torch.full((12, 20), 1e6)
    optimizer.step()
    assert torch.equal(weight, before) and torch.equal(optimizer.state[weight][MOMENTS], moments)
    assert optimizer.health() == {"redone": 0, "failed": 1}


def test_a_matrix_without_a_gradient_keeps_its_moments() -> None:
    """While the other one goes on; before its first gradient it has none but zeros."""
    weights = [nn.Parameter(torch.zeros(12, 20)) for _ in range(2)]
    optimizer = Muon(zip(("idle", "other"), weights, strict=True), variant="normuon", muon_lr=1.0)
    moments = []
    for idle_too in (False, True, False):
        for weight in weights if idle_too else weights[1:]:
            weight.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(3))
        optimizer.step()
        optimizer.zero_grad()
        moments.append([optimizer.state[weight][MOMENTS].clone() for weight in weights])
    (first, other), (kept, _), (later, after) = moments
    assert not first.any() and kept.any() and torch.equal(kept, later) and not torch.equal(other, after)


def train(rank: int, world_size: int, *, stage: int) -> dict[str, Any]:
    """Train three steps; after the first one spoil a row moment that the last rank keeps."""
    engine = training.make_engine(training.ds_config(stage, params={"variant": "normuon"}))
    optimizer = deepspeed_muon.muon_optimizer(engine)
    for step in range(3):
        training.run_step(engine, step, rank, world_size, 1)
        if step == 0 and rank == world_size - 1:
            kept = [own[MOMENTS] for own in optimizer.state.values() if MOMENTS in own]
            next(each for each in kept if each.numel())[0] = math.inf
    finite = all(bool(torch.isfinite(value).all()) for value in training.full_masters(engine).values())
    report = deepspeed_muon.health(engine)
    engine.destroy()
    return {"finite": finite, "redone": report["redone"], "failed": report["failed"]}


@pytest.mark.parametrize("stage", [1, 3])
def test_on_two_ranks(ranks: Any, stage: int) -> None:
    results = ranks(2).run(train, stage=stage)
    assert all(result["finite"] for result in results)
    assert [sum(result[key] for result in results) for key in ("redone", "failed")] == [1, 0]
