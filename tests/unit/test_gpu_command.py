"""``make gpu`` without a GPU: a dry run reaches its page, and every program that it names is there."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.harness import run_command
from tests.support.native_ops import REPOSITORY
from tests.support.scripts import load_script


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return load_script("gpu")


def test_all_programs_are_there(gpu: ModuleType, tmp_path: Path) -> None:
    """Every step names a script, a module or a selection of tests of this repository, also those for a GPU alone."""
    for steps in gpu.steps_of(tmp_path).values():
        for command in (words for step in steps for words in (step.command, step.dry) if words):
            assert command[0] in (gpu.PYTHON, "compute-sanitizer")
            for word in command:
                is_path = word.endswith(".py") and "/" in word
                assert not is_path or (REPOSITORY / word).exists(), word
                if word.startswith(("tests.", "deepspeed_muon.")):
                    assert (REPOSITORY / f"{word.replace('.', '/')}.py").exists(), word


@pytest.mark.full
@pytest.mark.time_limit(1800)
def test_a_dry_run_reaches_its_page(tmp_path: Path) -> None:
    run_command([sys.executable, "scripts/gpu.py", "--dry-run", "--out", str(tmp_path)], timeout=1700)
    (page,) = tmp_path.glob("gpu-dry-run-*.md")
    rows = re.findall(r"^\| (?:check|time|train|sanitize).*", page.read_text(), re.MULTILINE)
    outcomes = [row.split(" | ")[2] for row in rows]
    assert len(outcomes) > 20 and all(
        outcome.startswith(("ok", "left out: needs a GPU")) for outcome in outcomes
    )
    results = json.loads(page.with_suffix(".json").read_text())["results"]
    runs = {
        f"steps-350M-{accumulation}-clipping-{clipping}"
        for accumulation, clipping in ((1, 1), (4, 1), (1, 0))
    }
    assert results.keys() == {"flat", "sym_gemm", "iteration", "share", *runs}
    for name in runs:
        ours, *peers = results[name]["rows"]
        assert len(peers) == 2 and all(ours["losses"][0] == peer["losses"][0] for peer in peers)
        if name.endswith("0"):  # the same updates but for the rounding of their iterations
            assert all(ours["losses"] == pytest.approx(peer["losses"], abs=0.02) for peer in peers)
        else:  # AdamW, with its overflow check and without
            assert peers[0]["losses"] == peers[1]["losses"]
        assert ours["kernels"] and len(ours["ms"]) == 6 and ours["ours / it"] == 1
    assert len(list(tmp_path.glob("steps-*.txt"))) == 9
