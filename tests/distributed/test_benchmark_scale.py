"""One rank of 16,384: what it keeps, saves and sends at the start is bounded, whatever the number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scale import LIMITS
from tests.support.thinning import full

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scale.py"


def one_rank(parameters: int, stage: int, world: int) -> dict[str, float]:
    command = [sys.executable, str(SCRIPT), "--cell", str(parameters), str(stage), str(world)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(("parameters", "stage"), [(723, 3), full(723, 1), full(44000, 1), full(44000, 3)])
def test_one_rank_of_many(parameters: int, stage: int) -> None:
    """Times are for the benchmark: they depend on what else the machine does."""
    found = one_rank(parameters, stage, 16384)
    for what in ("memory_mb", "record_kb", "messages_kb"):
        assert found[what] <= LIMITS[what], what
    assert found["chunks"] >= 1
