"""The studies of ``benchmarks/``: constants and sentences follow from the stored runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import rates, transfer, transfer_report
from benchmarks.variants import RAW, Results, read_rows
from deepspeed_muon.math.updates import WIDTH_EXPONENT
from deepspeed_muon.tools.rates import MEASURED

RESULTS = Results(RAW)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "measured.md"


def test_the_exponent_of_the_width_is_the_fitted_one() -> None:
    mean, error = rates.exponent(RESULTS, "match_rms_adamw")
    assert round(mean / 0.05) * 0.05 == pytest.approx(WIDTH_EXPONENT["match_rms_adamw"])
    assert error < 0.05
    # Of "original" it is Marin's, which the fit agrees with, and the root of the width makes the difference.
    mean, error = rates.exponent(RESULTS, "muon")
    assert abs(mean - WIDTH_EXPONENT["original"]) < 2 * error
    assert WIDTH_EXPONENT["original"] - 0.5 == pytest.approx(WIDTH_EXPONENT["match_rms_adamw"])


def test_the_page_quotes_the_table() -> None:
    page = PAGE.read_text()
    for optimizer in ("muon", "match_rms_adamw", "spectral"):
        mean, error = rates.exponent(RESULTS, optimizer)
        costs = [
            ", ".join(f"{value:.3f}" for value in rates.width_costs(RESULTS, optimizer, power))
            for power in (0, -0.65)
        ]
        name = "original" if optimizer == "muon" else optimizer
        row = f"| `{name}` | width^({mean:.2f} ± {error:.2f}) | {costs[0]} | {costs[1]} |"
        assert row in page.replace(" nats |", " |").replace(" nats,", ","), row


NAMES = {"muon": "original", "match_rms_adamw": "match_rms_adamw", "normuon": "normuon"}
"""Rule of the study to its name in docs/measured.md."""


@pytest.mark.parametrize("rule", NAMES)
def test_the_law_on_its_page_is_that_of_the_runs(rule: str) -> None:
    worst = transfer_report.worst(read_rows(RAW) | read_rows(transfer.RAW), rule)
    assert NAMES[rule] in MEASURED
    page = PAGE.read_text()
    row = re.search(rf"^\| `{NAMES[rule]}` \| {worst.cells} \| .*", page, re.M)
    costs = [f"{cost:.3f} ({error:.3f})" for cost, error in (worst.printed, worst.tuned)]
    assert row and all(cost in row[0] for cost in costs), costs
    assert "no" not in worst.verdicts, "the bound is missed by more than two standard errors"
    if rule in ("muon", "normuon"):
        assert worst.printed[0] < transfer_report.BOUND
