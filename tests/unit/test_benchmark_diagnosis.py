"""The ranges of the diagnosis are those of the runs that ``benchmarks/diagnosis.py`` trained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from deepspeed_muon.__main__ import main
from deepspeed_muon.monitoring.diagnosis import QUANTITIES, diagnose, line
from tests.support.native_ops import REPOSITORY

ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / "benchmarks/results/diagnosis.json").read_text())[
    "rows"
]
GOOD, BAD = ([row for row in ROWS if row["good"] == good] for good in (True, False))


def keys(row: dict[str, Any]) -> set[str]:
    """Return the keys of the findings; how long a step took is the machine's affair."""
    return {finding.key for finding in diagnose(row)} - {"time_optimizer"}


def test_ten_good_runs_have_no_finding() -> None:
    assert [keys(row) for row in GOOD] == [set()] * 10


@pytest.mark.parametrize("row", BAD, ids=lambda row: row["run"])
def test_a_bad_run_has_the_finding_that_names_its_cause(row: dict[str, Any]) -> None:
    causes = {
        "rate * 30": "update_over_weight",
        "rate / 30": "update_over_weight",
        "clipped to 1e-6": "clip_coefficient",
        "everything excluded": "adamw_share",
        "fp16 overflows": "skipped",
        "a router given to Muon": "routers",
        "5 times spectral at AdamW's rate": "update_over_adamw",
        "matrices at the rate of embeddings": "adamw_over_weight",
    }
    assert keys(row) == {causes[row["run"]]}


@pytest.mark.parametrize("name", [name for name, quantity in QUANTITIES.items() if quantity.good is not None])
def test_ranges_are_those_of_the_good_runs(name: str) -> None:
    """Outwards to two digits: 14.4 was outside of "0.77 to 14"."""
    quantity, values = QUANTITIES[name], [row[name] for row in GOOD if name in row]
    assert quantity.good is not None
    for bound, value, outwards in zip(
        quantity.good, (min(values), max(values)), (math.floor, math.ceil), strict=True
    ):
        digit = 10.0 ** (math.floor(math.log10(value)) - 1) if value else 1.0
        assert bound == pytest.approx(outwards(round(value / digit, 6)) * digit)
    assert quantity.label.partition(" {")[0] in line(GOOD[0])


def test_large_embeddings_are_no_warning() -> None:
    """Those of a small model, or trained beside adapters; without any matrix for Muon it is a warning."""
    levels = {
        share: [found.level for found in diagnose({"adamw_share": share})] for share in (0.9, 0.99, 1.0)
    }
    assert levels == {0.9: [], 0.99: ["look"], 1.0: ["bad"]}


def test_tiny_rates_are_shown() -> None:
    """Those of reinforcement learning were a change of 0.00 %."""
    (finding,) = diagnose({"update_over_weight": 1.3e-5})
    assert finding.level == "look" and "by 0.0013 % of their size" in finding.text


def test_the_page_has_every_quantity() -> None:
    """Log lines end with the key to look up there."""
    page = (REPOSITORY / "docs/health.md").read_text()
    assert [name for name in (*QUANTITIES, "time_exchange") if f"`{name}`" not in page] == []


@pytest.mark.parametrize("tokens", ["20e9", "100e9", "1e12"])
def test_no_other_rate_than_that_of_the_command_is_asked_for(
    tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings of docs/rates.md, over 100e9 tokens, were said to need 16 times their rate."""
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.002, "betas": [0.9, 0.95]}}}
    (tmp_path / "adamw.json").write_text(json.dumps(config))
    sizes = ["--from", "width=256", "tokens=1e9", "--to", "width=1024", f"tokens={tokens}"]
    assert main(["rates", str(tmp_path / "adamw.json"), *sizes, "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["optimizer"]["params"]
    assert settings["adjust_lr_fn"] == "match_rms_adamw"
    # Updates of 0.2 times the rate on weights of 1 / sqrt(width).
    change = 0.2 * settings["muon_lr"] * math.sqrt(1024)
    for finding in diagnose({"update_over_weight": change}):
        assert finding.level == "look" and "try" not in finding.text.lower() and " rates" in finding.text


def test_short_exchanges_are_no_finding() -> None:
    """Those of tiny models, which were reported for four of ten good runs."""
    row = {"time_gather": 0.3, "time_scatter": 0.3, "time_newton_schulz": 0.1}
    assert [keys({**row, "seconds": seconds}) for seconds in (0.1, 1.0)] == [set(), {"time_exchange"}]


def test_rates_that_are_unknown_are_not_one_rate() -> None:
    sizes = {"update_over_adamw": 14.4}
    assert not diagnose(sizes) and not diagnose({**sizes, "two_rates": 1.0})
    assert diagnose({**sizes, "two_rates": 0.0})
