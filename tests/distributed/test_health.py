"""Health on real ranks: the samples, the monitor's files, a forced failure, and ranks that have nothing to say."""

from __future__ import annotations

import csv
import logging
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed_muon
from deepspeed_muon import Muon
from deepspeed_muon.reference import ReferenceMuon
from deepspeed_muon.step import runner as step_runner
from deepspeed_muon.step.check import DeferredCheck, ResultCheck
from deepspeed_muon.variants.normuon import MOMENTS
from tests.support import training
from tests.support.comparisons import close, relative, within
from tests.support.contract import STEPS, compare_paths, reference
from tests.support.models import MATRICES
from tests.support.rounding import iteration_limit, limits
from tests.support.thinning import full
from tests.support.training import EVENTS


def watch(
    rank: int,
    world_size: int,
    *,
    stage: int,
    health: Any,
    kind: str = "toy",
    folder: str | None = None,
    accumulation: int = 1,
    **settings: Any,
) -> Any:
    """Train and return the report of this rank, the same from rank 0's files, and the samples seen."""
    extra = (
        {} if folder is None else {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    )
    config = training.ds_config(
        stage, accumulation=accumulation, params={"health": health}, extra=extra, **settings
    )
    engine = training.make_engine(config, kind, exact=settings.get("precision", "fp32") == "fp32")
    training.train_steps(engine, 4, rank, world_size, accumulation)
    return {"report": deepspeed_muon.health(engine), "samples": engine.global_samples}


def read_events(folder: Path) -> dict[str, list[list[str]]]:
    files = (folder / "run").glob("Train_Muon_*.csv")
    return {f.stem.removeprefix("Train_Muon_"): list(csv.reader(f.open()))[1:] for f in files}


@pytest.mark.compat
@pytest.mark.parametrize(
    ("stage", "world", "accumulation", "precision"),
    [(0, 2, 1, "fp32"), (1, 3, 1, "bf16"), (2, 2, 2, "fp32"), (3, 4, 1, "bf16")],
)
def test_samples_reach_the_monitor(
    ranks: Any, tmp_path: Path, stage: int, world: int, accumulation: int, precision: str
) -> None:
    """Every second step, all ranks hold the same report, and rank 0 writes it where DeepSpeed writes its events."""
    settings = {"stage": stage, "accumulation": accumulation, "precision": precision}
    results = ranks(world).run(watch, health=2, folder=str(tmp_path), **settings)
    report = results[0]["report"]
    assert all(result["report"] == report for result in results)
    assert report["step"] == 4 and len(report["matrices"]) == 4
    assert set(report["matrices"]) <= MATRICES["toy"]
    events = read_events(tmp_path)
    assert set(events) == EVENTS
    batch_size = results[0]["samples"] // 4
    for name, rows in events.items():
        assert [int(row[0]) for row in rows] == [2 * batch_size, 4 * batch_size], name
        assert float(rows[-1][1]) == pytest.approx(report[name]), name
    assert (report["redone"], report["failed"]) == (0, 0)
    # Band and rounding: the quintic's largest value is 1.2024, bf16 adds less than a tenth.
    assert 0.3 < report["sigma_max"] < 1.3
    shares = [report[f"time_{phase}"] for phase in ("gather", "newton_schulz", "scatter")]
    assert all(share >= 0 for share in shares) and 0 < sum(shares) <= 1


def test_fewer_matrices_than_ranks(ranks: Any) -> None:
    """Ranks that own nothing enter the exchange with empty hands; sub-groups make several inner steps of one."""
    results = ranks(4).run(watch, stage=3, health=1, kind="single", zero={"sub_group_size": 16})
    assert all(set(result["report"]["matrices"]) == {"mix.weight"} for result in results)
    off = ranks(4).run(watch, stage=3, health=False, kind="single")
    empty = {"redone": 0, "failed": 0, "matrices": {}}
    assert all(result["report"] == empty for result in off)


def overflowing(rank: int, world_size: int) -> Any:
    """An fp16 step that overflows is a sampled step without samples."""
    config = training.ds_config(2, precision="fp16", clipping=1.0, params={"health": 1})
    config["fp16"].update(initial_scale_power=32, hysteresis=1)
    engine = training.make_engine(config, exact=False)
    training.run_step(engine, 0, rank, world_size, 1)
    return {"report": deepspeed_muon.health(engine), "skipped": engine.skipped_steps}


def test_a_skipped_step_hangs_nobody(ranks: Any) -> None:
    for result in ranks(2).run(overflowing):
        assert result["skipped"] == 1
        assert result["report"]["matrices"] == {} and "update_rms" not in result["report"]
        assert "clip_coefficient" not in result["report"]


def sizes(rank: int, world_size: int, *, stage: int) -> dict[str, Any]:
    """Return what a sample measures, and what the weights really did."""
    engine = training.make_engine(training.ds_config(stage, params={"health": 1, "weight_decay": 0.0}))
    deepspeed_muon.muon_optimizer(engine).recorder.matrices = 8
    before = training.full_masters(engine)
    training.run_step(engine, 0, rank, world_size, 1)
    after = training.full_masters(engine)
    ratios = {name: float((after[name] - old).norm() / old.norm()) for name, old in before.items()}
    return {"report": deepspeed_muon.health(engine), "ratios": ratios}


@pytest.mark.parametrize("stage", [0, 3])
def test_the_sizes_are_those_of_the_weights(ranks: Any, stage: int) -> None:
    """The ratio of every matrix is that of its weights before and after."""
    result = ranks(2).run(sizes, stage=stage)[0]
    measured = {
        name: matrix["update_over_weight"]
        for name, matrix in result["report"]["matrices"].items()
        if "update_over_weight" in matrix
    }
    # At ZeRO 3 the owner has half of the weights: of 32 normal elements the RMS is within 12 % of one sigma.
    assert measured == pytest.approx(
        {name: result["ratios"][name] for name in measured}, rel=1e-3 if stage == 0 else 0.5
    )
    mean = sum(measured.values()) / len(measured)
    assert result["report"]["update_over_weight"] == pytest.approx(mean)


def resumed(rank: int, world_size: int, *, folder: str) -> dict[str, Any]:
    """Load a checkpoint of a run with another limit of clipping; return what health and the log say of it."""
    first = training.make_engine(training.ds_config(1, clipping=1e-6))
    training.run_step(first, 0, rank, world_size, 1)
    first.save_checkpoint(folder)
    engine = training.make_engine(training.ds_config(1, clipping=1.0, params={"health": 7}))
    messages = training.heard()
    engine.load_checkpoint(folder)
    for step in range(1, 21):
        training.run_step(engine, step, rank, world_size, 1)
    return {"report": deepspeed_muon.health(engine), "messages": messages}


def test_the_coefficient_is_that_of_the_limit_that_was_loaded(ranks: Any, tmp_path: Path) -> None:
    """ZeRO 1 loads the limit: the coefficient was that of the configured one."""
    first, second = ranks(2).run(resumed, folder=str(tmp_path))
    assert first["report"]["clip_coefficient"] == second["report"]["clip_coefficient"] < 1e-4
    counts = [
        len([text for text in result["messages"] if "were clipped" in text]) for result in (first, second)
    ]
    assert counts == [1, 0]


def broken(
    rank: int,
    world_size: int,
    *,
    stage: int,
    names: list[str],
    how: str,
    is_deferred: bool = False,
    params: dict[str, Any] | None = None,
) -> Any:
    """Train while the bf16 iteration returns garbage for some matrices: NaN, zeros, or ten times too much."""
    messages = training.heard()
    config = training.ds_config(stage, params={"ns_dtype": "bf16", "health": STEPS, **(params or {})})
    with mock.patch.object(step_runner, "ResultCheck", DeferredCheck if is_deferred else ResultCheck):
        engine = training.make_engine(config)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    optimizer.recorder.matrices = 8
    garbage = {"nan": float("nan"), "zero": 0.0, "large": 10.0}[how]
    for runner in optimizer.runners:
        shapes = {m.block_shapes[0] for m in runner.plan.matrices if m.name in names}
        placement = runner._orthogonalizer
        original = placement.newton_schulz

        def orthogonalize(x: Any, *, settings: Any, original: Any = original, shapes: Any = shapes) -> Any:
            result = original(x, settings=settings)
            if settings.dtype == torch.bfloat16 and tuple(x.shape[-2:]) in shapes:
                result = result * garbage
            return result

        placement.newton_schulz = orthogonalize
    training.train_steps(engine, STEPS, rank, world_size)
    return {
        "params": training.full_masters(engine),
        "report": deepspeed_muon.health(engine),
        "messages": messages,
    }


@pytest.mark.parametrize(("stage", "how"), [(0, "zero"), (2, "large"), (3, "nan")])
def test_garbage_in_bf16_is_redone_in_fp32(ranks: Any, stage: int, how: str) -> None:
    """All matrices are garbage in bf16, so all updates are fp32 ones: the reference holds to its tolerance."""
    results = ranks(2).run(broken, stage=stage, names=sorted(MATRICES["toy"]), how=how)
    report = results[0]["report"]
    assert report["failed"] == 0
    assert report["redone"] == STEPS * len(MATRICES["toy"])
    messages = [text for result in results for text in result["messages"] if "redone in fp32" in text]
    assert len(messages) == len(MATRICES["toy"]), "one for each matrix, on its owner"
    assert any("blocks.0.up.weight (16 x 16)" in message for message in messages)
    start, end, *_ = reference("toy", 2, 0.0)
    compare_paths(results[0]["params"], start, end, limits(reference, "toy", 2, 0.0))


@pytest.mark.parametrize(
    ("stage", "how", "variant"), [(0, "large", "muon"), full(1, "zero", "normuon"), (3, "nan", "normuon")]
)
def test_on_an_accelerator_garbage_is_left_out_once(ranks: Any, stage: int, how: str, variant: str) -> None:
    """As there: nobody waits for the check in the step; the first step changes nothing, all others run in fp32."""
    args = {"stage": stage, "names": sorted(MATRICES["toy"]), "how": how}
    results = ranks(2).run(broken, is_deferred=True, params={"variant": variant}, **args)
    report = results[0]["report"]
    assert (report["failed"], report["redone"]) == (len(MATRICES["toy"]), (STEPS - 1) * len(MATRICES["toy"]))
    messages = [m for result in results for m in result["messages"] if "in fp32 from now on" in m]
    assert len(messages) == len(MATRICES["toy"]), "one for each matrix, on its owner"
    assert all(bool(torch.isfinite(value).all()) for value in results[0]["params"].values())
    immediate = ranks(2).run(broken, params={"variant": variant}, **args)
    late, early = results[0]["params"], immediate[0]["params"]
    distance = max(float((late[name] - early[name]).abs().max()) for name in MATRICES["toy"])
    assert 0 < distance < 0.2, "one update is missing"


def train_diverging(rank: int, world_size: int, **settings: Any) -> Any:
    """Train in bf16 with cans, which a configuration refuses."""
    params = {"ns_schedule": "cans", "ns_dtype": "bf16", "ns_backend": "torch", **settings.pop("params", {})}
    with mock.patch("deepspeed_muon.config.settings.tolerates_rounding", return_value=True):
        return training.train(rank, world_size, stage=1, params=params, **settings)


def test_a_schedule_that_diverges_in_bf16(ranks: Any) -> None:
    """Nothing is injected: cans in bf16 blows up on the 1 x 16 and 16 x 1 matrices, and only the check notices."""
    checked = ranks(2).run(train_diverging)[0]["params"]
    assert all(bool(torch.isfinite(value).all()) for value in checked.values())
    blind = ranks(2).run(train_diverging, params={"health": False}, steps=1)[0]["params"]
    assert not all(bool(torch.isfinite(value).all() and value.abs().max() < 100) for value in blind.values())


# A bad row moment of NorMuon (from a damaged state) made its whole matrix NaN: only what came before was checked.

BETA2 = 0.9


def one_matrix(**kwargs: Any) -> tuple[nn.Parameter, Muon]:
    weight = nn.Parameter(torch.zeros(12, 20))
    settings = {"ns_dtype": "fp32", "beta2": BETA2, "momentum": 0.0, "nesterov": False, **kwargs}
    named = [("layer.weight", weight)]
    return weight, Muon(named, variant="normuon", muon_lr=1.0, ns_backend="torch", **settings)


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_bad_moments_start_anew(caplog: pytest.LogCaptureFixture, value: float) -> None:
    """The matrix gets the update of a first step, and the next one goes on from there."""
    weight, optimizer = one_matrix()
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(3, 12, 20, generator=generator)
    reference = ReferenceMuon({}, variant="normuon", beta2=BETA2)
    for step, gradient in enumerate(gradients):
        weight.data.zero_()
        weight.grad = gradient
        if step == 1:
            optimizer.state[weight][MOMENTS][3] = value
            reference.state.clear()
        with caplog.at_level(logging.WARNING):
            optimizer.step()
        expected = reference.update_of(gradient)
        within(relative(-weight.detach(), expected), iteration_limit(gradient, torch.float32), "update")
        close(optimizer.state[weight][MOMENTS].double(), reference.state[MOMENTS,], rtol=1e-4, atol=0)
    assert [optimizer.health()[key] for key in ("redone", "failed")] == [1, 0]
    assert caplog.text.count("layer.weight") == 1 and "the state of its rows was reset" in caplog.text


def test_bad_moments_start_anew_after_a_step_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator what was left out is read in the next step, in which the matrix may have no gradient."""
    weights = [nn.Parameter(torch.zeros(12, 20)) for _ in range(2)]
    optimizer = Muon(
        zip(("idle.weight", "other.weight"), weights, strict=True), variant="normuon", muon_lr=1.0
    )
    monkeypatch.setattr(step_runner, "ResultCheck", DeferredCheck)
    for step in range(4):
        before = weights[0].detach().clone()
        for weight in weights if step != 2 else weights[1:]:
            weight.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(3))
        if step == 1:
            optimizer.state[weights[0]][MOMENTS][3] = math.inf
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(weights[0], before) == (step in (1, 2)), step
    assert optimizer.state[weights[0]][MOMENTS].isfinite().all()


def test_a_matrix_without_an_update_keeps_its_moments() -> None:
    """An element beyond fp16's range is an infinity on an fp16 wire."""
    weight, optimizer = one_matrix(wire_dtype="fp16")
    weight.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(2))
    optimizer.step()
    before, moments = weight.detach().clone(), optimizer.state[weight][MOMENTS].clone()
    weight.grad = torch.full((12, 20), 1e6)
    optimizer.step()
    assert torch.equal(weight, before) and torch.equal(optimizer.state[weight][MOMENTS], moments)
    assert [optimizer.health()[key] for key in ("redone", "failed")] == [0, 1]


def test_a_matrix_without_a_gradient_keeps_its_moments() -> None:
    """While the other one goes on; before its first gradient it has none but zeros."""
    weights = [nn.Parameter(torch.zeros(12, 20)) for _ in range(2)]
    optimizer = Muon(
        zip(("idle.weight", "other.weight"), weights, strict=True), variant="normuon", muon_lr=1.0
    )
    moments = []
    for idle_too in (False, True, False):
        for weight in weights if idle_too else weights[1:]:
            weight.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(3))
        optimizer.step()
        optimizer.zero_grad()
        moments.append([optimizer.state[weight][MOMENTS].clone() for weight in weights])
    (first, busy), (stored, _), (later, after) = moments
    assert not first.any() and stored.any() and torch.equal(stored, later) and not torch.equal(busy, after)


def train(rank: int, world_size: int, *, stage: int) -> dict[str, Any]:
    """Train three steps; after the first one spoil a row moment that the last rank keeps."""
    engine = training.make_engine(training.ds_config(stage, params={"variant": "normuon"}))
    optimizer = deepspeed_muon.muon_optimizer(engine)
    for step in range(3):
        training.run_step(engine, step, rank, world_size, 1)
        if step == 0 and rank == world_size - 1:
            stored = [entries[MOMENTS] for entries in optimizer.state.values() if MOMENTS in entries]
            next(tensor for tensor in stored if tensor.numel())[0] = math.inf
    finite = all(bool(torch.isfinite(value).all()) for value in training.full_masters(engine).values())
    return {"finite": finite, **deepspeed_muon.health(engine)}


@pytest.mark.parametrize("stage", [1, 3])
def test_on_two_ranks(ranks: Any, stage: int) -> None:
    results = ranks(2).run(train, stage=stage)
    assert all(result["finite"] for result in results)
    assert [sum(result[key] for result in results) for key in ("redone", "failed")] == [1, 0]
