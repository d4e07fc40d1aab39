"""The study of transferred rates: its plan, the order of its runs, and the numbers of its page on known losses."""

import json
import math
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import transfer, transfer_report, variants
from benchmarks.transfer import BASE, Cell
from benchmarks.variants import Run, read_rows
from deepspeed_muon.tools import size_laws

WIDER = Cell(dim=256)


def row(run: Run, loss: float) -> variants.Row:
    return {**asdict(run), "loss": loss, "seconds": 1.0, "hardware": "none", "torch": "0", "clipped": [0.5]}


def trained(rows, loss_of):
    """Finish the runs of the base and of width 256 as ``transfer.py`` does, those that depend on others last."""
    for cell in (BASE, WIDER, WIDER):
        for run in transfer.transfer_runs(rows, "match_rms_adamw", cell):
            rows[run] = row(run, loss_of(run))
    return rows


def parabola(best_octave: float, above: dict[int, float]):
    """Losses whose optimum moves with the width by 0.65 octaves an octave; each seed has something above seed 0."""
    return lambda run: (
        2
        + 0.05 * (math.log2(run.rate) - best_octave + 0.65 * math.log2(run.dim / 128)) ** 2
        + above[run.seed]
    )


def test_two_more_seeds_at_the_rates_that_are_compared():
    rows = trained({}, parabola(math.log2(0.008), {0: 0, 1: 0.1, 2: -0.1}))
    assert transfer.tuned_rate(rows, "match_rms_adamw") == 0.008
    with_seeds = {run.rate for run in rows if run.dim == 256 and run.seed == 2}
    assert with_seeds == {0.008, variants.rounded(0.008 * 2**-0.65)}
    assert transfer.tuned_rate(rows, "muon") is None
    assert not any(run in rows for runs in transfer.missing(rows).values() for run in runs)


def test_excess_of_the_printed_and_of_the_tuned_rate():
    """On exact parabolas the vertex is exact: the printed rate costs nothing, the tuned one 0.05 * 0.65 ** 2."""
    rows = trained({}, parabola(math.log2(0.008), {0: 0, 1: 0.1, 2: -0.1}))
    fitted = transfer_report.fit(rows, "match_rms_adamw", WIDER, pooled=0.0)
    assert fitted.best == pytest.approx(math.log2(0.008) - 0.65)
    assert fitted.excess(2**fitted.best)[0] == pytest.approx(0, abs=1e-9)
    # 0.65 octaves from the best rate lies beyond the neighbours, where lines join the losses at half an octave and one.
    excess, error = fitted.excess(0.008)
    assert excess == pytest.approx(0.05 * 0.65**2, rel=0.2) and error == pytest.approx(0, abs=1e-9)
    assert fitted.paired(0.008) == pytest.approx([0.05 * 0.65**2] * 3)


def test_rates_that_differ_by_rounding_make_no_parabola():
    line = {octave: 2 + 0.05 * octave**2 for octave in (-1.0, -0.5, 0.0, 0.5, 1.0)} | {0.001: 1.99}
    best, loss_at = transfer_report.vertex(line)
    assert abs(best) < 0.1 and 1.98 < loss_at(best) <= 1.99


NAMES = {
    "muon": "original",
    "match_rms_adamw": "match_rms_adamw",
    "normuon": "normuon",
}
"""Rule of the study to its name in ``rates`` and in docs/measured.md."""


@pytest.mark.parametrize("rule", NAMES)
def test_what_rates_and_its_page_say_of_the_law_is_what_the_runs_show(rule):
    worst = transfer_report.worst(read_rows(variants.RAW) | read_rows(transfer.RAW), rule)
    said = (
        f"cost at most {worst.printed[0]:.3f} nats in {worst.cells} cells that chose no constant, the kept rate "
        f"{worst.tuned[0]:.3f}"
    )
    assert said in size_laws.MEASURED[NAMES[rule]].costs
    page = (Path(__file__).resolve().parents[2] / "docs" / "measured.md").read_text()
    row = re.search(rf"^\| `{NAMES[rule]}` \| {worst.cells} \| .*", page, re.M)
    costs = [f"{cost:.3f} ({error:.3f})" for cost, error in (worst.printed, worst.tuned)]
    assert row and all(cost in row[0] for cost in costs), costs
    assert "no" not in worst.verdicts, "the bound is missed by more than two standard errors"
    if rule in ("muon", "normuon"):
        assert worst.printed[0] < transfer_report.BOUND


@pytest.mark.parametrize("rule", [*NAMES, "spectral"])
def test_the_measured_ranges_of_a_rule_are_those_of_its_cells(rule):
    cells = transfer_report.fits_of(read_rows(variants.RAW) | read_rows(transfer.RAW), rule)
    sizes = {
        "width": [cell.dim for cell in cells],
        "depth": [cell.layers for cell in cells],
        "tokens": [cell.steps * cell.tokens for cell in cells],
        "batch": [cell.tokens for cell in cells],
    }
    ranges = size_laws.MEASURED[NAMES.get(rule, rule)].ranges
    assert ranges == {size: (min(values), max(values)) for size, values in sizes.items()}


@pytest.mark.parametrize(
    ("excess", "verdict"), [((0.01, 0.004), "yes"), ((0.01, 0.01), "open"), ((0.05, 0.01), "no")]
)
def test_verdict_needs_two_standard_errors(excess, verdict):
    assert transfer_report.verdict(excess) == verdict


def test_table_puts_the_runs_into_the_raw_file(tmp_path, monkeypatch):
    raw, out = tmp_path / "raw.jsonl", tmp_path / "out.jsonl"
    monkeypatch.setattr(transfer_report, "RAW", raw)
    cell = transfer.policy_cell("1M", 300, 2048)
    runs = {arm: transfer.policy_runs(cell, [arm]) for arm in ("all", "none")}
    rows = trained({}, parabola(math.log2(0.008), {0: 0, 1: 0.1, 2: -0.1}))
    rows |= {run: row(run, 2 + 0.1 * run.seed) for run in runs["all"]}
    rows |= {run: row(run, 2.5 + 0.1 * run.seed) for run in runs["none"]}
    out.write_text("".join(json.dumps(each) + "\n" for each in rows.values()))
    monkeypatch.setattr(sys, "argv", ["transfer.py", "--table", "--out", str(out)])
    transfer.main()
    assert read_rows(raw) == rows
    page = raw.with_suffix(".md").read_text()
    assert "| none | 2.6000 ± 0.0577 (3) | +0.5000 ± 0.0000 (3) | worse | 0.50 |" in page
    assert f"{len(rows)} runs in" in page


def test_a_run_is_claimed_once(tmp_path):
    run = replace(BASE.run("muon", 0.02), steps=1)
    lock = transfer.claim(tmp_path, run)
    assert lock is not None and transfer.claim(tmp_path, run) is None
    lock.close()
    assert transfer.claim(tmp_path, run) is not None
