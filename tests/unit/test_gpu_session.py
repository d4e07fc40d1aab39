"""scripts/gpu_session.py without a GPU: what fails or hangs ends its step only, and all programs are there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.native_ops import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "gpu_session.py"


@pytest.fixture(scope="module")
def session() -> ModuleType:
    found = importlib.util.spec_from_file_location("gpu_session", SCRIPT)
    assert found is not None and found.loader is not None
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.full
def test_a_step_that_fails_or_hangs_does_not_end_the_part(session: ModuleType, tmp_path: Path) -> None:
    steps = [
        session.Step("missing", ["no-such-program"], 20.0),
        session.Step("failing", session.python("-c", "print('why'); raise SystemExit(3)"), 20.0),
        session.Step("hanging", session.python("-c", "import time; time.sleep(600)"), 6.0),
        session.Step("right", session.python("-c", "import deepspeed_muon.errors"), 60.0),
    ]
    found = session.run_part(steps, tmp_path / "part.log", None)
    ended = [each["ended"] for each in found]
    assert ended[0].startswith("did not start") and ended[1:] == ["failed with 3", "took too long", "ok"]
    assert json.loads((tmp_path / "part.json").read_text()) == found
    assert "why" in (tmp_path / "part.log").read_text()


@pytest.mark.full
def test_no_part_takes_ten_minutes(
    session: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session.PART_SECONDS < 600
    monkeypatch.setattr(session, "PART_SECONDS", 6.0)
    steps = [
        session.Step(str(n), session.python("-c", "import time; time.sleep(600)"), 60.0) for n in range(2)
    ]
    found = session.run_part(steps, tmp_path / "part.log", None)
    assert [each["ended"] for each in found] == ["took too long", "not started: no time left"]


@pytest.mark.parametrize("part", ["check", "engine", "time"])
def test_rehearsal(part: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), part, "--dry-run"],
        env={"PATH": "/usr/bin:/bin", "OUT": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "binding and self-test" in done.stdout
