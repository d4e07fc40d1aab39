"""The studies of ``benchmarks/``: a run is trained once, and the stored pages are those of the stored runs."""

import math
import sys

import pytest

from benchmarks import finetuning, rates, rewards, training_runs, variants, variants_report
from benchmarks.variants import RAW, Results, Run

TINY = Run("normuon", dim=32, layers=1, steps=3, rate=0.02, decay=0.002, rest=0.01)


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


@pytest.mark.parametrize("study", [finetuning, rewards])
def test_stored_pages_are_those_of_the_stored_runs(study):
    rows = training_runs.read_rows(study.RAW)
    assert not rows or study.RAW.with_suffix(".md").read_text() == "\n".join(study.page(rows)) + "\n"


def test_the_page_of_rates_is_that_of_the_runs():
    assert rates.PAGE.read_text() == "\n".join(rates.page(Results(RAW))) + "\n"


def test_the_page_of_variants_is_that_of_the_runs(tmp_path, monkeypatch):
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
