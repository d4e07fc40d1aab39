"""The diagnosis on real engines: it names what is wrong in runs that were made to go wrong, and nothing in others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import deepspeed_muon
from deepspeed_muon.monitoring.page import findings, read_run
from tests.support import training
from tests.support.diagnosed_runs import BAD, GOOD, train
from tests.support.thinning import full

STEPS, EVERY = 24, 12
# Of a run of 24 steps on a machine that does other things, too: no test depends on time.
IGNORED = {"time_optimizer", "time_exchange"}

USUAL_GOOD = {"original", "match_rms_adamw, stage 1, bf16", "hyperball, stage 3"}
USUAL_BAD = set(BAD) - {"5 times spectral at AdamW's rate", "matrices at the rate of embeddings"}


def cases(runs: dict[str, Any], usual: set[str]) -> list[Any]:
    return [name if name in usual else full(name) for name in runs]


@pytest.mark.parametrize("name", cases(GOOD, USUAL_GOOD))
def test_a_good_run_has_no_finding(ranks: Any, name: str) -> None:
    """All ranks have the same report, and the log has the line with all quantities."""
    first, second = ranks(2).run(train, name=name, steps=STEPS, every=EVERY)
    assert first["report"] == second["report"]
    assert set(first["report"]["findings"]) <= IGNORED, first["report"]
    assert first["losses"][-1] < first["losses"][0]
    assert not [text for text in first["messages"] if "docs/health.md" in text and "time_" not in text]


@pytest.mark.parametrize("name", cases(BAD, USUAL_BAD))
def test_a_bad_run_is_told_why(ranks: Any, tmp_path: Path, name: str) -> None:
    """The report names the cause, rank 0 warns of it, and the command finds the same in the files of the monitor."""
    first, second = ranks(2).run(train, name=name, steps=STEPS, every=EVERY, folder=str(tmp_path))
    expected, report = BAD[name].finding, first["report"]
    assert first["report"] == second["report"]
    assert expected in report["findings"], report
    # A wrong rate shows in two ways: against the weights and against AdamW.
    assert set(report["findings"]) - IGNORED <= {expected, "update_over_adamw"}
    if name != "rate / 30":  # which fine-tuning has, too
        assert [report["findings"][expected] in text for text in first["messages"]].count(True) == 1
    assert not [text for text in second["messages"] if "docs/health.md" in text]
    judged = {finding.key: finding for finding in findings(read_run(tmp_path / "run"))}
    assert judged[expected].text == report["findings"][expected]
    assert judged[expected].level == ("look" if name == "rate / 30" else "bad")


def sizes(rank: int, world_size: int, *, stage: int, factor: float) -> dict[str, Any]:
    """Return what two samples measure, and what the weights really did, when the rate rises by a factor in between."""
    config = training.ds_config(
        stage, params={"health": 1, "weight_decay": 0.0, "muon_lr": 0.02 / factor, "adam_lr": 0.003 / factor}
    )
    engine = training.make_engine(config)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    optimizer.recorder.matrices = 8
    reports, ratios = [], []
    for step in range(2):
        before = training.full_masters(engine)
        training.run_step(engine, step, rank, world_size, 1)
        after = training.full_masters(engine)
        reports.append(deepspeed_muon.health(engine))
        ratios.append(
            {
                name: float((after[name] - weights).norm() / weights.norm())
                for name, weights in before.items()
                if name in reports[-1]["matrices"]
            }
        )
        for group in optimizer.param_groups:
            group["lr"] *= factor
    return {"reports": reports, "ratios": ratios}


@pytest.mark.parametrize("stage", [0, 3])
def test_the_sizes_are_those_of_the_weights(ranks: Any, stage: int) -> None:
    """The ratio of every matrix is that of its weights before and after; the one that is judged is at the peak."""
    result = ranks(2).run(sizes, stage=stage, factor=10.0)[0]
    for report, ratios in zip(result["reports"], result["ratios"], strict=True):
        assert ratios
        for name, ratio in ratios.items():
            # At ZeRO 3 the owner has half of the weights: of 32 normal elements the RMS is within 12 % of one sigma.
            tolerance = 1e-3 if stage == 0 else 0.5
            assert report["matrices"][name]["update_over_weight"] == pytest.approx(ratio, rel=tolerance), name
    first, second = result["reports"]
    # The first step had the configured rate, the second one ten times as much.
    assert second["update_over_weight"] == pytest.approx(10 * first["update_over_weight"], rel=0.3)
    adam_rms = 3e-4 * math.sqrt((1 - 0.9) / (1 + 0.9))
    mean = sum(m["update_rms"] for m in first["matrices"].values()) / len(first["matrices"])
    assert first["update_over_adamw"] == pytest.approx(2e-3 * mean / adam_rms, rel=1e-5)


def resumed(rank: int, world_size: int, *, folder: str, saved_clipping: float) -> dict[str, Any]:
    """Load a checkpoint of a run with another limit of clipping; return what health and the log say of it."""
    params = {"clip": "separate", "health": 20}
    first = training.make_engine(training.ds_config(1, clipping=saved_clipping or 1.0, params=params))
    first.optimizer.clip_grad = saved_clipping
    training.run_step(first, 0, rank, world_size, 1)
    first.save_checkpoint(folder)
    engine = training.make_engine(training.ds_config(1, clipping=1.0, params=params))
    messages = training.heard()
    engine.load_checkpoint(folder)
    for group in deepspeed_muon.muon_optimizer(engine).param_groups:
        group["lr"] *= 1e-3  # as at the end of a schedule
    for step in range(1, 40):
        training.run_step(engine, step, rank, world_size, 1)
    return {"report": deepspeed_muon.health(engine), "messages": messages}


@pytest.mark.parametrize("saved_clipping", [1e-6, 0.0])
def test_a_resumed_run_is_judged_by_the_limit_that_it_clips_to(
    ranks: Any, tmp_path: Path, saved_clipping: float
) -> None:
    """ZeRO 1 loads the limit: the configured one was reported, and that 0 ends ``clip`` was not said.

    The low rate is expected, and no finding.
    """
    (result,) = ranks(1).run(resumed, folder=str(tmp_path), saved_clipping=saved_clipping)
    coefficient = result["report"].get("clip_coefficient")
    if saved_clipping:
        assert coefficient < 1e-4 and set(result["report"]["findings"]) - IGNORED == {"clip_coefficient"}
    else:
        assert coefficient is None and set(result["report"]["findings"]) <= IGNORED
    warnings = [
        text
        for text in result["messages"]
        if f"gradient_clipping is {saved_clipping}, configured 1.0" in text
    ]
    assert len(warnings) == 1 and ("clip 'separate' clips nothing" in warnings[0]) == (saved_clipping == 0)
