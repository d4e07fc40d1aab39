"""The benchmarks of a step: bytes and times of every optimizer, and one rank of very many."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.scale import LIMITS
from tests.support.harness import REPOSITORY, run_command
from tests.support.thinning import full


def test_users_without_the_right_to_make_hosts_read_the_reason() -> None:
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
