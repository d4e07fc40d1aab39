"""The ranges of the diagnosis are those of the runs that ``benchmarks/diagnosis.py`` trained."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepspeed_muon.monitoring.diagnosis import QUANTITIES, diagnose, line
from tests.support.native_ops import REPOSITORY

ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / "benchmarks/results/diagnosis.json").read_text())[
    "rows"
]
GOOD, BAD = ([row for row in ROWS if row["good"] == good] for good in (True, False))


def keys(row: dict[str, Any]) -> set[str]:
    """Return the keys of the findings; those about time are the machine's."""
    return {finding.key for finding in diagnose(row) if not finding.key.startswith("time_")}


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
    quantity, values = QUANTITIES[name], [row[name] for row in GOOD if name in row]
    assert quantity.good == tuple(float(f"{bound(values):.2g}") for bound in (min, max))
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
