"""At every instant of a save, whatever fails or dies, the folder holds the old set or the new one, whole.

A rank that is killed within a load leaves no other rank waiting, and the set as it was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disk import Disk, worst_folders
from tests.faults.injector import describe
from tests.faults.runner import verified
from tests.support.harness import run_command

# The fixture takes a minute: the file is among the first.
pytestmark = pytest.mark.time_limit(400)
INDEX = "muon_index.json"


def run(work: Path, *options: str, timeout: float) -> dict[str, Any]:
    run_command([sys.executable, "-m", "tests.faults.runner", str(work), *options], timeout=timeout)
    results: dict[str, Any] = json.loads((work / "results.json").read_text())
    return results


def check(results: dict[str, Any]) -> None:
    wrong = [case for case in (*results["cases"], *results["loads"]) if case["wrong"]]
    assert not wrong, json.dumps(wrong, indent=1)
    for saver, outcome in results["without a fault"].items():
        # Power cuts after the save has returned cannot bring back the old set.
        assert outcome["left"] == "new" and outcome["at the end"] == ["new"], (saver, outcome)
        assert set(outcome["power cuts"]) <= {"old", "new", "nothing"}, (saver, outcome)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def results(work: Path) -> dict[str, Any]:
    return run(work, timeout=200)


def test_failed_calls_leave_a_set(results: dict[str, Any]) -> None:
    """Around the commit on two ranks, and every other kind of call once."""
    check(results)
    assert len({case["call"] for case in results["cases"]}) >= 14
    assert {case["left"] for case in results["cases"]} >= {"old", "new"}
    assert results["loads"]


@pytest.mark.full
@pytest.mark.time_limit(2400)
def test_every_failed_call_leaves_a_set(tmp_path: Path) -> None:
    """Each call of one process and of two, each way to fail."""
    results = run(tmp_path, "--full", timeout=2300)
    check(results)
    assert len(results["cases"]) > 300
    assert {load["stage"] for load in results["loads"]} == {0, 1, 2, 3}


def worst(work: Path, log: list[dict[str, Any]], base: Path) -> list[str]:
    """Return what is wrong with the folders that power cuts leave of a save of the command line."""
    case = work / "cases" / "command_line" / "none"
    left = worst_folders(log, Disk(work / "old1", case / "set", case), INDEX)
    return [text for _, content in left if (text := verified(base, content)).startswith("NEITHER")]


def test_the_model_of_a_disk_finds_every_sync_that_is_missing(
    results: dict[str, Any], work: Path, tmp_path: Path
) -> None:
    """Without any one of the syncs of a save, some power cut leaves neither set."""
    lines = (work / "cases" / "command_line" / "none" / "log.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    assert not worst(work, log, tmp_path / "all")
    # The first one is of the folder above, which was there before.
    syncs = [number for number, entry in enumerate(log) if entry["kind"].startswith("fsync")][1:]
    assert len(syncs) > 4
    for number in syncs:
        without = log[:number] + log[number + 1 :]
        assert worst(work, without, tmp_path / str(number)), describe(log[number])
