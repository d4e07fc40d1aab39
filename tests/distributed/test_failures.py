"""What must not change anything, and what must fail on every rank with a clear error instead of hanging."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import deepspeed_muon
from tests.support import training
from tests.support.models import batch
from tests.support.snapshots import changed, tensors_of
from tests.support.thinning import each_value
from tests.support.training import try_to_start


def poisoned_step(
    rank: int, world_size: int, *, stage: int, precision: str, factor: float, **options: Any
) -> Any:
    """Two good steps, one whose loss is multiplied by ``factor`` on the last rank only, one good step."""
    engine = training.make_engine(training.ds_config(stage, precision=precision, **options))
    for step in range(2):
        training.run_step(engine, step, rank, world_size, 1)
    before = tensors_of(engine)
    loss = engine(*batch(2, rank))
    engine.backward(loss * (factor if rank == world_size - 1 else 1.0))
    error = ""
    try:
        engine.step()
    except deepspeed_muon.NonFiniteGradientError as caught:
        error = str(caught)
    unchanged = not changed(before, tensors_of(engine))
    engine.zero_grad()
    if not error:
        training.run_step(engine, 3, rank, world_size, 1)
    after = tensors_of(engine)
    report = {
        "unchanged": unchanged,
        "moved": bool(changed(before, after)),
        "finite": all(bool(torch.isfinite(tensor.float()).all()) for tensor in after.values()),
        "error": error,
        "skipped": engine.skipped_steps,
    }
    engine.destroy()
    return report


STAGES = list(product((0, 1, 2, 3), ("fp32", "bf16")))


@pytest.mark.compat
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overflowed_fp16_step_changes_nothing(ranks: Any, stage: int) -> None:
    for report in ranks(2).run(poisoned_step, stage=stage, precision="fp16", factor=1e9):
        assert report == {"unchanged": True, "moved": True, "finite": True, "error": "", "skipped": 1}


@pytest.mark.parametrize(("stage", "precision"), each_value(STAGES))
def test_nonfinite_gradient_is_skipped(ranks: Any, stage: int, precision: str) -> None:
    settings = {"stage": stage, "precision": precision, "clipping": 1.0}
    for report in ranks(2).run(poisoned_step, factor=float("nan"), **settings):
        assert report == {"unchanged": True, "moved": True, "finite": True, "error": "", "skipped": 1}


@pytest.mark.parametrize(("stage", "precision"), each_value(reversed(STAGES)))
def test_nonfinite_gradient_is_an_error_if_asked(ranks: Any, stage: int, precision: str) -> None:
    settings = {"stage": stage, "precision": precision, "params": {"nonfinite_grad": "error"}}
    for report in ranks(2).run(poisoned_step, factor=float("inf"), **settings):
        assert "nonfinite_grad is 'error'" in report["error"]
        assert report["unchanged"] and report["finite"]


DIFFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"params": {"momentum": 0.9}}, "momentum"),
    ({"params": {"exclude": ["blocks.0.*"]}}, "routes"),
    ({"gradient_clipping": 0.7}, "gradient_clipping"),
]


@pytest.mark.parametrize(
    ("difference", "said", "stage"), each_value((*each, stage) for stage in (0, 2, 3) for each in DIFFERENCES)
)
def test_ranks_that_disagree_fail_on_every_rank(
    ranks: Any, difference: dict[str, Any], said: str, stage: int
) -> None:
    for text in ranks(3).run(try_to_start, stage=stage, on_last_rank=difference, common={}):
        assert text.startswith("RankDisagreementError: ") and said in text and "[2]" in text, text


def test_error_on_one_rank_stops_all(ranks: Any) -> None:
    wrong = "ConfigError: optimizer.params: unknown key 'momentun'; did you mean 'momentum'?"
    texts = ranks(3).run(try_to_start, stage=3, on_last_rank={"params": {"momentun": 0.9}}, common={})
    assert all(text.startswith("RankDisagreementError: ") for text in texts[:2]), texts
    assert f"rank 2: {wrong}" in texts[0] and texts[2].startswith(wrong)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"params": {"lr": -0.1}}, "ConfigError", "optimizer.params.lr"),
        ({"params": {"ns_schedule": "cans", "ns_steps": 7}}, "ScheduleError", "set ns_steps to 5"),
        ({"params": {"exclude": ["bloks.*"]}}, "RoutingError", "matches no parameter"),
    ],
)  # fmt: skip
def test_bad_input_is_a_typed_error(ranks: Any, change: dict[str, Any], kind: str, said: str) -> None:
    for text in ranks(2).run(try_to_start, stage=1, on_last_rank={}, common=change):
        assert text.startswith(f"{kind}: ") and said in text, text
