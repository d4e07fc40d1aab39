"""The study of the variants: what it tries, that it trains no run twice, and that its page has what was measured."""

import math
import sys
from dataclasses import asdict

import pytest

from benchmarks import variants, variants_report
from benchmarks.variants import RAW, Axis, Results, Run

TINY = Run("normuon", dim=32, layers=1, steps=3, rate=0.02, decay=0.002, rest=0.01)


class Known(Results):
    """Results of runs whose losses a function gives."""

    def __init__(self, path, loss):
        super().__init__(path)
        self.loss = loss

    def row(self, run):
        self.rows[run] = {**asdict(run), "loss": self.loss(run)}
        return self.rows[run]


def test_goes_on_at_an_edge_then_takes_the_next_axis_and_the_seeds(tmp_path):
    # The best rate lies two octaves above the start, beyond the first three; that of decay at the start.
    results = Known(
        tmp_path / "raw",
        lambda run: abs(math.log2(run.rate / 0.08)) + abs(math.log2(run.decay / 0.002)),
    )
    axes = Axis("rate", 2, (-1, 0, 1)), Axis("decay", 4, (-1, 0, 1))
    found = variants.search(results, TINY, axes, seeds=3, around=1)
    assert found.point == Run(**{**asdict(TINY), "rate": 0.08})
    rates = {run.rate for run in results.rows if run.decay == TINY.decay and run.seed == 0}
    assert rates == {0.01, 0.02, 0.04, 0.08, 0.16}
    seeded = [(run.rate, run.seed) for run in results.rows if run.seed]
    assert sorted(seeded) == [(rate, seed) for rate in (0.04, 0.08, 0.16) for seed in (1, 2)]


def test_a_diverged_run_is_not_the_best_and_every_optimizer_gets_the_same_number_of_trials(tmp_path):
    trials = []
    for optimizer in (variants.ADAMW, *variants.VARIANTS):
        start = variants.first_point(optimizer, 32, 1, 3)
        results = Known(
            tmp_path / "raw",
            lambda run, first=start: None if run.rate > 2 * first.rate else 1 / run.rate,
        )
        assert variants.first_search(results, start).point.rate > start.rate
        trials.append(sum(run.seed == 0 for run in results.rows))
    assert min(trials) >= 10 and max(trials) - min(trials) <= 4  # an axis may be extended twice


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
        "hyperball": (0.5,) * 5,
    }
    results = Known(tmp_path / "raw", lambda run: 2 + own[run.optimizer][run.seed] + 0.001 * run.seed)
    found = {name: variants.search(results, variants.replace(TINY, optimizer=name), seeds=5) for name in own}
    said = {name: variants_report.difference(each, found["muon"]) for name, each in found.items()}
    assert said["normuon"] == ("-0.1000 ± 0.0000", "better")
    assert [said[name][1] for name in own] == ["", "better", "no difference", "worse"]


def test_report_says_by_how_many_octaves_the_best_rate_moves(tmp_path):
    def loss(run: Run) -> float:
        # Plain Muon's best rate falls by half an octave a doubling, from a point between two rates that are tried.
        octaves = -0.5 * math.log2(run.dim / 128) - 0.3 if run.optimizer == "muon" else 0.2
        first = variants.FIRST_RATE.get(run.optimizer, 0.04)
        return 2.0 + 0.1 * (math.log2(run.rate / first) - octaves) ** 2 + 0.01 * run.seed

    results = Known(tmp_path / "raw", loss)
    table = {line.split(" | ")[0]: line for line in variants_report.widths_table(results)}
    assert table["| original"].endswith("| -1.0 |") and table["| hyperball"].endswith("| +0.0 |")
    assert f"| {0.04 * 2**-0.3:.3g} |" in table["| original"]


def test_plateau_reaches_to_where_the_lines_between_the_trials_cross_the_margin():
    line = [(0.04 * 2.0**k, 2.0 + 0.2 * abs(k)) for k in (-2, -1, 0, 1)]
    assert float(variants_report.plateau(line)) == pytest.approx(2 * variants_report.MARGIN / 0.2, abs=0.06)
    assert variants_report.plateau(line[:3]).startswith("at least ")
