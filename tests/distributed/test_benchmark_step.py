"""The step benchmark runs, counts every optimizer's bytes alike, and says what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.harness import run_command


@pytest.mark.full
@pytest.mark.time_limit(900)
def test_quick_run(tmp_path: Path) -> None:
    out = tmp_path / "step"
    names = ["ours", "DeepSpeed Muon, standard", "DeepSpeed AdamW"]
    command = [sys.executable, "benchmarks/optimizer_step.py", "--model", "tiny", "--stages", "1", "3"]
    command += ["--ranks", "2", "--accumulation", "1", "--repeats", "2", "--optimizers", *names]
    run_command([*command, "--out", str(out)], timeout=800)
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert {(row["stage"], row["optimizer"]) for row in rows} == {
        (stage, name) for stage in (1, 3) for name in names
    }
    by_key = {(row["stage"], row["optimizer"]): row for row in rows}
    for stage in (1, 3):
        assert min(row["peak_bytes"] for row in by_key.values()) > 0
        assert min(by_key[stage, "ours"]["total_s"]) > 0
        kernels = by_key[stage, "ours"]["kernels"]
        assert sum(each["calls"] for each in kernels) > 0 and all(each["ran"] for each in kernels)
    assert by_key[3, "ours"]["sent_bytes"] < by_key[3, "DeepSpeed Muon, standard"]["sent_bytes"]
    assert out.with_suffix(".md").read_text().count("\n| tiny |") == len(rows)
