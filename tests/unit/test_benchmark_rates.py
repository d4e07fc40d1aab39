"""Constants and sentences about rates follow from the raw runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import rates
from benchmarks.variants import RAW, Results
from deepspeed_muon.math.updates import WIDTH_EXPONENT
from deepspeed_muon.tools.size_laws import MEASURED

RESULTS = Results(RAW)


def test_the_page_is_that_of_the_runs() -> None:
    assert rates.PAGE.read_text() == "\n".join(rates.page(RESULTS)) + "\n"


def test_the_exponent_of_the_width_is_the_fitted_one() -> None:
    mean, error = rates.exponent(RESULTS, "match_rms_adamw")
    assert round(mean / 0.05) * 0.05 == pytest.approx(WIDTH_EXPONENT["match_rms_adamw"])
    assert error < 0.05
    # Of "original" it is Marin's, which the fit agrees with, and the root of the width makes the difference.
    mean, error = rates.exponent(RESULTS, "muon")
    assert abs(mean - WIDTH_EXPONENT["original"]) < 2 * error
    assert WIDTH_EXPONENT["original"] - 0.5 == pytest.approx(WIDTH_EXPONENT["match_rms_adamw"])


@pytest.mark.parametrize("rule", ["match_rms_adamw", "spectral"])
def test_the_factor_holds_where_it_was_not_fitted(rule: str) -> None:
    """Within 0.02 nats, the noise of a few cells; the kept rate is not."""
    assert WIDTH_EXPONENT[rule] == WIDTH_EXPONENT["match_rms_adamw"]
    assert max(rates.width_costs(RESULTS, rule, WIDTH_EXPONENT[rule])) < 0.02
    assert min(rates.width_costs(RESULTS, rule, 0.0)) > 0.02


def test_the_printed_costs_are_those_of_the_table() -> None:
    for rule in ("match_rms_adamw", "spectral"):
        twice, four_times = rates.width_costs(RESULTS, rule, 0.0)
        assert f"the kept rate cost {twice:.2f} at twice the width and {four_times:.2f}" in MEASURED[
            rule
        ].costs.replace(" nats at", " at")
    for rule in ("match_rms_adamw", "spectral"):
        worst = max(rates.width_costs(RESULTS, rule, WIDTH_EXPONENT[rule]))
        assert (
            MEASURED[rule].costs.startswith("width^-0.65")
            and f" cost {worst:.3f} nats from width 128" in MEASURED[rule].costs
        )
    law, kept = (
        max(rates.width_costs(RESULTS, "muon", power)) for power in (WIDTH_EXPONENT["original"], 0.0)
    )
    assert MEASURED["original"].costs.startswith(
        f"width^-0.15 cost {law:.3f} nats from width 128 to 512, the kept rate {kept:.3f}."
    )


def test_the_page_quotes_the_table() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "measured.md").read_text()
    for optimizer in ("muon", "match_rms_adamw", "spectral"):
        mean, error = rates.exponent(RESULTS, optimizer)
        costs = [
            ", ".join(f"{value:.3f}" for value in rates.width_costs(RESULTS, optimizer, power))
            for power in (0, -0.65)
        ]
        name = "original" if optimizer == "muon" else optimizer
        row = f"| `{name}` | width^({mean:.2f} ± {error:.2f}) | {costs[0]} | {costs[1]} |"
        assert row in page.replace(" nats |", " |").replace(" nats,", ","), row


def test_a_parabola_is_found_again() -> None:
    line = [(octave, 0.1 * (octave - 0.3) ** 2) for octave in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    assert rates.optimum(line) == pytest.approx((0.3, 0.0))
    assert rates.cost(line, 1.3) == pytest.approx(0.1) and rates.cost(line, -1.7) == pytest.approx(0.4)
