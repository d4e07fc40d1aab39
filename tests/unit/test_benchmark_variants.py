"""The study of the variants: what it runs next, and that it goes on where it stopped."""

import json
import math
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from benchmarks import variants, variants_report
from benchmarks.variants import Axis, Results, Run, Search

TINY = Run("normuon", dim=32, layers=1, steps=3, rate=0.02, decay=0.002, rest=0.01)


def complete(search: Search, results: Results, loss) -> None:
    while todo := [run for run in search.runs(results) if results.row(run) is None]:
        last = loss(todo[0])
        told = {"loss": last, "seconds": 1.0, "optimizer_ms": 5.0, "hardware": "none", "torch": "2"}
        # Each curve falls by 0.01 a step.
        curve = (
            [[step, last + 0.01 * (300 - step), 0.1, 0.01, 1.0, 2.0] for step in (100, 200, 300)]
            if last
            else []
        )
        results.add({**asdict(todo[0]), **told, "curve": curve})


def test_goes_on_at_an_edge_then_takes_the_next_axis_and_the_seeds(tmp_path):
    results = Results(tmp_path / "raw.jsonl")
    search = Search(TINY, (Axis("rate", 2, (-1, 0, 1)), Axis("decay", 4, (-1, 0, 1))), seeds=3, around=1)
    # The best rate lies two octaves above the start, beyond the first three; that of decay at the start.
    complete(search, results, lambda run: abs(math.log2(run.rate / 0.08)) + abs(math.log2(run.decay / 0.002)))
    assert search.best(results) == Run(**{**asdict(TINY), "rate": 0.08})
    rates = {row["rate"] for row in results.rows.values() if row["decay"] == TINY.decay and row["seed"] == 0}
    assert rates == {0.01, 0.02, 0.04, 0.08, 0.16}
    seeded = [(row["rate"], row["seed"]) for row in results.rows.values() if row["seed"]]
    assert sorted(seeded) == [(rate, seed) for rate in (0.04, 0.08, 0.16) for seed in (1, 2)]


def test_a_diverged_run_is_not_the_best_and_every_optimizer_gets_the_same_number_of_trials(tmp_path):
    trials = []
    for optimizer in (variants.ADAMW, *variants.VARIANTS):
        results = Results(tmp_path / optimizer)
        search = variants.first_search(optimizer, (32, 1), 3)
        complete(
            search,
            results,
            lambda run, first=search.start: None if run.rate > 2 * first.rate else 1 / run.rate,
        )
        assert search.best(results).rate > search.start.rate
        trials.append(sum(row["seed"] == 0 for row in results.rows.values()))
    assert min(trials) >= 10 and max(trials) - min(trials) <= 4  # an axis may be extended twice


@pytest.mark.time_limit(120)
def test_resumes_behind_the_last_whole_line(tmp_path, monkeypatch):
    """One run trains; the next one has its losses."""
    trained = []

    def train_once(command, **options):
        if not trained:
            trained.append(json.loads(run(command, **options).stdout))
        return SimpleNamespace(stdout=json.dumps({**trained[0], **json.loads(command[-1])}))

    run = subprocess.run
    monkeypatch.setattr(variants.subprocess, "run", train_once)
    search = Search(TINY, (Axis("rate", 2, (0, 1), extensions=0),), seeds=1)
    monkeypatch.setattr(variants, "studies", lambda results: {"tiny": {"normuon": search}})
    out = tmp_path / "raw.jsonl"

    def go_on(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["variants.py", "--out", str(out), *words])
        variants.main()
        return out.read_text().splitlines()

    first = go_on("--budget", "0.0001")
    assert len(first) == 1
    with out.open("a") as file:
        file.write('{"optimizer": "normuon", "dim"')  # a run whose line a power cut tore
    second = go_on()
    assert second[0] == first[0] and len(second) == 3
    assert [row["rate"] for row in Results(out).rows.values()] == [0.02, 0.04]
    assert all(math.isfinite(row["loss"]) and row["curve"] for row in Results(out).rows.values())
    assert go_on() == second


def test_report_says_better_only_beyond_two_standard_errors(tmp_path, monkeypatch):
    """Known differences: NorMuon always 0.1 below Muon, MuonEq 0.1 above and below in turn."""
    out = tmp_path / "raw.jsonl"
    results = Results(out)
    shift = {variants.ADAMW: 0.5, "muon": 0.0, "normuon": -0.1}
    seeded = {"muon_eq": (0.1, -0.1, 0.1, -0.1, 0.0)}

    def loss(run: Run) -> float:
        away = abs(math.log2(run.rate / variants.FIRST_RATE.get(run.optimizer, 0.04)))
        own = seeded.get(run.optimizer, (shift.get(run.optimizer, 0.2),) * 5)[run.seed]
        return 2.0 + 0.2 * away + abs(math.log2(run.rest / 0.016)) + own + 0.001 * run.seed

    for search in variants.studies(results)["1M-300"].values():
        complete(search, results, loss)
    monkeypatch.setattr(sys, "argv", ["variants_report.py", "--raw", str(out)])
    variants_report.main()
    page = out.with_suffix(".md").read_text().split("## iteration")[0]
    cells = {line.split(" | ")[0][2:]: line.split(" | ") for line in page.splitlines() if " ± " in line}
    assert {name: cells[name][5] for name in ("normuon", "muon_eq", variants.ADAMW)} == {
        "normuon": "better",
        "muon_eq": "no difference",
        variants.ADAMW: "worse",
    }
    assert cells["normuon"][4] == "-0.1000 ± 0.0000"
    # Its curve, 0.5 below AdamW's, reaches AdamW's last loss 50 steps before the end.
    assert cells["muon"][6] == f"{250 / 300:.2f}"
    assert float(cells["muon"][7]) == pytest.approx(2 * variants_report.MARGIN / 0.2, abs=0.06)
    assert out.with_suffix(".png").exists()


def test_report_says_by_how_many_octaves_the_best_rate_moves(tmp_path):
    results = Results(tmp_path / "raw.jsonl")
    searches = variants.studies(results)["widths"]

    def loss(run: Run) -> float:
        # Plain Muon's best rate falls by half an octave a doubling, from a point between two rates that are tried.
        octaves = -0.5 * math.log2(run.dim / 128) - 0.3 if run.optimizer == "muon" else 0.2
        first = variants.FIRST_RATE.get(run.optimizer, 0.04)
        return 2.0 + 0.1 * (math.log2(run.rate / first) - octaves) ** 2 + 0.01 * run.seed

    for search in searches.values():
        complete(search, results, loss)
    table = {line.split(" | ")[0]: line for line in variants_report.widths_table(searches, results)}
    assert table["| original"].endswith("| -1.0 |") and table["| hyperball"].endswith("| +0.0 |")
    assert f"| {0.04 * 2**-0.3:.3g} |" in table["| original"]
