"""The benchmarks of a step: bytes and times of every optimizer, and one rank of very many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.network import refusal
from benchmarks.scale import LIMITS
from tests.support.harness import REPOSITORY, run_command
from tests.support.thinning import full

WHY_NOT = refusal()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "hosts can be made")


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize(
    "rates", [[], pytest.param(["unlimited", "20mbit"], marks=needs_namespaces)], ids=str
)
def test_quick_run(tmp_path: Path, rates: list[str]) -> None:
    out = tmp_path / "step"
    names = ["ours", "DeepSpeed Muon, standard", "DeepSpeed AdamW"]
    command = [sys.executable, "benchmarks/optimizer_step.py", "--model", "tiny", "--stages", "3"]
    command += ["--ranks", "2", "--accumulation", "1", "--repeats", "2", "--optimizers", *names]
    command += ["--rates", *rates] if rates else []
    run_command([*command, "--out", str(out)], timeout=800)
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert sorted(row["optimizer"] for row in rows) == sorted(names * max(len(rates), 1))
    assert out.with_suffix(".md").read_text().count("\n| tiny |") == len(rows)
    sent = {row["optimizer"]: row["sent_bytes"] for row in rows}
    assert sent["ours"] < sent["DeepSpeed Muon, standard"]
    for row in rows:
        assert min(row["total_s"]) > 0
        assert bool(rates) or row["peak_bytes"] > 0  # times alone are measured over links of a limited rate
        if row["optimizer"] == "ours":
            assert any(kernel["calls"] for kernel in row["kernels"])
        if rates:
            # plan predicts no step of DeepSpeed's Muon.
            predicted = row["rate"] is not None and not row["optimizer"].startswith("DeepSpeed Muon")
            assert ("predicted_s" in row) == predicted and row.get("predicted_s", 1.0) > 0
            assert min(row["link_bytes"]) >= row["sent_bytes"] > 0


def test_users_without_the_right_to_make_hosts_read_what_it_needs() -> None:
    become = "os.setuid(65534); " if os.geteuid() == 0 else ""
    program = f"import os, sys; from benchmarks import optimizer_step as step; {become}sys.exit(step.main())"
    command = [sys.executable, "-c", program, "--rates", "200mbit"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "optimizer_step.py: " in done.stderr
    assert any(word in done.stderr for word in ("root", "iproute2", "Linux"))


@pytest.mark.parametrize(("parameters", "stage"), [(723, 3), full(44000, 1), full(44000, 3)])
def test_one_rank_of_16384(parameters: int, stage: int) -> None:
    """What it stores, saves and sends at the start is bounded; times depend on what else the machine does."""
    command = [sys.executable, "benchmarks/scale.py", "--cell", str(parameters), str(stage), "16384"]
    measured = json.loads(run_command(command).stdout.splitlines()[-1])
    for quantity in ("memory_mb", "record_kb", "messages_kb"):
        assert measured[quantity] <= LIMITS[quantity], quantity
    assert measured["chunks"] >= 1
