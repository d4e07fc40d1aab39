"""Health on real ranks: the samples, the monitor's files, a forced failure, and ranks that have nothing to say."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_muon
from tests.support import training
from tests.support.contract import STEPS, compare
from tests.support.models import MATRICES
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
    for step in range(4):
        training.run_step(engine, step, rank, world_size, accumulation)
    report = deepspeed_muon.health(engine)
    samples = engine.global_samples
    engine.destroy()
    return {"report": report, "samples": samples}


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
    results = ranks(world).run(
        watch,
        stage=stage,
        health=2,
        folder=str(tmp_path),
        accumulation=accumulation,
        precision=precision,
    )
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
    shares = [report[f"time_{part}"] for part in ("gather", "newton_schulz", "scatter")]
    assert all(share >= 0 for share in shares) and 0 < sum(shares) <= 1


def test_fewer_matrices_than_ranks(ranks: Any) -> None:
    """Ranks that own nothing enter the exchange with empty hands; sub-groups make several inner steps of one."""
    results = ranks(4).run(watch, stage=3, health=1, kind="single", zero={"sub_group_size": 16})
    assert all(set(result["report"]["matrices"]) == {"mix.weight"} for result in results)
    off = ranks(4).run(watch, stage=3, health=False, kind="single")
    assert all(result["report"] == {"redone": 0, "failed": 0} for result in off)


def overflowing(rank: int, world_size: int) -> Any:
    """An fp16 step that overflows is a sampled step without samples."""
    config = training.ds_config(2, precision="fp16", params={"health": 1})
    config["fp16"].update(initial_scale_power=32, hysteresis=1)
    engine = training.make_engine(config, exact=False)
    training.run_step(engine, 0, rank, world_size, 1)
    report = deepspeed_muon.health(engine)
    skipped = engine.skipped_steps
    engine.destroy()
    return {"report": report, "skipped": skipped}


def test_a_skipped_step_hangs_nobody(ranks: Any) -> None:
    for result in ranks(2).run(overflowing):
        assert result["skipped"] == 1
        assert result["report"]["matrices"] == {} and "update_rms" not in result["report"]


def broken(
    rank: int,
    world_size: int,
    *,
    stage: int,
    names: list[str],
    how: str,
    told_later: bool = False,
    params: dict[str, Any] | None = None,
) -> Any:
    """Train while the bf16 iteration returns garbage for some matrices: NaN, zeros, or ten times too much."""
    messages = training.heard()
    config = training.ds_config(stage, params={"ns_dtype": "bf16", "health": STEPS, **(params or {})})
    engine = training.make_engine(config)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    optimizer.recorder.matrices = 8
    garbage = {"nan": float("nan"), "zero": 0.0, "large": 10.0}[how]
    for runner in optimizer._runners:
        shapes = {m.block_shape for m in runner.plan.matrices if m.name in names}
        placement = runner._strategy
        original = placement._orthogonalize
        runner.check.told_later = told_later

        def orthogonalize(x: Any, *, settings: Any, original: Any = original, shapes: Any = shapes) -> Any:
            result = original(x, settings=settings)
            if settings.dtype == torch.bfloat16 and tuple(x.shape[-2:]) in shapes:
                result = result * garbage
            return result

        placement._orthogonalize = orthogonalize
    for step in range(STEPS):
        training.run_step(engine, step, rank, world_size, 1)
    result = {
        "params": training.full_masters(engine),
        "report": deepspeed_muon.health(engine),
        "messages": messages,
    }
    engine.destroy()
    return result


@pytest.mark.parametrize(("stage", "how"), [(0, "zero"), (2, "large"), (3, "nan")])
def test_garbage_in_bf16_is_redone_in_fp32(ranks: Any, stage: int, how: str) -> None:
    """All matrices are garbage in bf16, so all updates are fp32 ones: the reference holds to its tolerance."""
    results = ranks(2).run(broken, stage=stage, names=sorted(MATRICES["toy"]), how=how)
    report = results[0]["report"]
    assert report["failed"] == 0
    assert report["redone"] == STEPS * len(MATRICES["toy"])
    messages = [
        message for result in results for message in result["messages"] if "redone in fp32" in message
    ]
    assert len(messages) == len(MATRICES["toy"]), "one for each matrix, on its owner"
    assert any("blocks.0.up.weight (16 x 16)" in message for message in messages)
    plain = ranks(2).run(training.train, stage=stage)[0]
    compare([{**plain, "params": results[0]["params"]}], "toy", 2, 0.0)


@pytest.mark.parametrize(
    ("stage", "how", "variant"), [(0, "large", "muon"), full(1, "zero", "normuon"), (3, "nan", "normuon")]
)
def test_on_an_accelerator_garbage_is_left_out_once(ranks: Any, stage: int, how: str, variant: str) -> None:
    """As there: nobody waits for a verdict in the step; the first step changes nothing, all others run in fp32."""
    args = {"stage": stage, "names": sorted(MATRICES["toy"]), "how": how}
    results = ranks(2).run(broken, told_later=True, params={"variant": variant}, **args)
    report = results[0]["report"]
    assert (report["failed"], report["redone"]) == (len(MATRICES["toy"]), (STEPS - 1) * len(MATRICES["toy"]))
    messages = [m for result in results for m in result["messages"] if "in fp32 from now on" in m]
    assert len(messages) == len(MATRICES["toy"]), "one for each matrix, on its owner"
    assert all(bool(torch.isfinite(value).all()) for value in results[0]["params"].values())
    at_once = ranks(2).run(broken, params={"variant": variant}, **args)
    distance = max(
        float((results[0]["params"][name] - value).abs().max())
        for name, value in at_once[0]["params"].items()
        if name in MATRICES["toy"]
    )
    # One update is missing.
    assert 0 < distance < 0.2


def test_a_schedule_that_diverges_in_bf16(ranks: Any) -> None:
    """Nothing is injected: cans in bf16 blows up on the 1 x 16 and 16 x 1 matrices, and only the check notices."""
    params = {"ns_schedule": "cans", "ns_dtype": "bf16", "ns_backend": "torch"}
    checked = ranks(2).run(training.train, stage=1, params=params)[0]["params"]
    assert all(bool(torch.isfinite(value).all()) for value in checked.values())
    blind = ranks(2).run(training.train, stage=1, params={**params, "health": False}, steps=1)[0]["params"]
    assert not all(bool(torch.isfinite(value).all() and value.abs().max() < 100) for value in blind.values())


def disagree(rank: int, world_size: int) -> str:
    start = lambda: training.make_engine(training.ds_config(1, params={"health": 1 + rank}))  # noqa: E731
    return training.refusal(start, deepspeed_muon.RankDisagreementError)


def test_ranks_with_other_settings_are_told(ranks: Any) -> None:
    for message in ranks(2).run(disagree):
        assert "optimizer.params.health" in message
