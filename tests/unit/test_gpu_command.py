"""``make gpu`` without a GPU: a dry run reaches its page, and every program that it names is there."""

from __future__ import annotations

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
            assert command[0] in (gpu.PYTHON, "compute-sanitizer", "bash")
            for word in command[-1].split() if command[0] == "bash" else command:
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
