"""The study of the variants: what it tries, that it trains no run twice, and that its page has what was measured."""

import math
import sys
from dataclasses import asdict

import pytest

from benchmarks import variants, variants_report
from benchmarks.variants import RAW, Results, Run

TINY = Run("normuon", dim=32, layers=1, steps=3, rate=0.02, decay=0.002, rest=0.01)


class Known(Results):
    """Results of runs whose losses a function gives."""

    def __init__(self, path, loss):
        super().__init__(path)
        self.loss = loss

    def row(self, run):
        self.rows[run] = {**asdict(run), "loss": self.loss(run)}
        return self.rows[run]


@pytest.mark.time_limit(120)
def test_a_run_is_trained_once(tmp_path):
    out = tmp_path / "raw.jsonl"
    row = Results(out, train=True).row(TINY)
    assert math.isfinite(row["loss"]) and row["curve"]
    lines = out.read_text()
    assert Results(out, train=True).row(TINY) == row
    assert out.read_text() == lines
    with pytest.raises(KeyError):
        Results(out).row(variants.replace(TINY, seed=1))


def test_the_page_is_that_of_the_runs(tmp_path, monkeypatch):
    """All runs of the study are in the raw file, from which the page and the picture follow."""
    out = tmp_path / RAW.name
    out.write_text(RAW.read_text())
    monkeypatch.setattr(sys, "argv", ["variants.py", "--out", str(out)])
    variants.main()
    assert out.read_text() == RAW.read_text()
    monkeypatch.setattr(sys, "argv", ["variants_report.py", "--raw", str(out)])
    variants_report.main()
    assert out.with_suffix(".md").read_text() == RAW.with_suffix(".md").read_text()
    assert out.with_suffix(".png").exists()


def test_report_says_better_only_beyond_two_standard_errors(tmp_path):
    """Known differences: one always 0.1 below, one 0.1 above and below in turn, one always 0.5 above."""
    own = {
        "muon": (0,) * 5,
        "normuon": (-0.1,) * 5,
        "muon_eq": (0.1, -0.1, 0.1, -0.1, 0),
        "quintic, 4 steps": (0.5,) * 5,
    }
    results = Known(tmp_path / "raw", lambda run: 2 + own[run.optimizer][run.seed] + 0.001 * run.seed)
    found = {name: variants.search(results, variants.replace(TINY, optimizer=name), seeds=5) for name in own}
    said = {name: variants_report.difference(each, found["muon"]) for name, each in found.items()}
    assert said["normuon"] == ("-0.1000 ± 0.0000", "better")
    assert [said[name][1] for name in own] == ["", "better", "no difference", "worse"]
