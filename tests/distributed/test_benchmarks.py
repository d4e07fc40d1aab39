"""The benchmark of one rank of very many."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.scale import LIMITS
from tests.support.harness import run_command


@pytest.mark.full
@pytest.mark.parametrize(("parameters", "stage"), [(723, 3), (44000, 1), (44000, 3)])
def test_one_rank_of_16384(parameters: int, stage: int) -> None:
    """What it stores, saves and sends at the start is bounded; times depend on what else the machine does."""
    command = [sys.executable, "benchmarks/scale.py", "--cell", str(parameters), str(stage), "16384"]
    measured = json.loads(run_command(command).stdout.splitlines()[-1])
    for quantity in ("memory_mb", "record_kb", "messages_kb"):
        assert measured[quantity] <= LIMITS[quantity], quantity
    assert measured["chunks"] >= 1
