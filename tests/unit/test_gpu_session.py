"""scripts/gpu_session.py without a GPU: what fails or hangs ends its step only, and all programs are there."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.harness import run_command
from tests.support.native_ops import REPOSITORY
from tests.support.scripts import load_script

SCRIPT = REPOSITORY / "scripts" / "gpu_session.py"


@pytest.fixture(scope="module")
def session() -> ModuleType:
    return load_script("gpu_session")


@pytest.mark.full
def test_a_step_that_fails_or_hangs_does_not_end_the_part(session: ModuleType, tmp_path: Path) -> None:
    steps = [
        session.Step("missing", ["no-such-program"], 20.0),
        session.Step("failing", session.python("-c", "print('why'); raise SystemExit(3)"), 20.0),
        session.Step("hanging", session.python("-c", "import time; time.sleep(600)"), 6.0),
        session.Step("right", session.python("-c", "import deepspeed_muon.errors"), 60.0),
    ]
    outcomes = session.run_part(steps, tmp_path / "part.log", None)
    ended = [outcome["ended"] for outcome in outcomes]
    assert ended[0].startswith("did not start") and ended[1:] == ["failed with 3", "took too long", "ok"]
    assert json.loads((tmp_path / "part.json").read_text()) == outcomes
    assert "why" in (tmp_path / "part.log").read_text()


def test_a_resumed_part_runs_what_is_not_ok_yet_and_what_prepares_it(
    session: ModuleType, tmp_path: Path
) -> None:
    def step(name: str, code: str, **options: bool) -> object:
        return session.Step(name, session.python("-c", code), 20.0, **options)

    made = tmp_path / "made"
    steps = [
        step("preparing", f"open({str(made)!r}, 'a').write('again')", prepares=True),
        step("right", "raise SystemExit('ran twice')"),
        step("failing", "raise SystemExit(3)"),
    ]
    report = tmp_path / "part.json"
    known = [{"step": "preparing", "ended": "ok"}, {"step": "right", "ended": "ok"}]
    report.write_text(json.dumps([*known, {"step": "failing", "ended": "took too long"}]))
    outcomes = session.run_part(steps, tmp_path / "part.log", None, session.done_earlier(report))
    assert [outcome["ended"] for outcome in outcomes] == ["ok", "ok", "failed with 3"]
    assert made.read_text() == "again"
    assert session.done_earlier(report) == ["preparing", "right"]  # what a third run goes on from
    # With nothing left nothing is prepared.
    session.run_part(steps[:2], tmp_path / "part.log", None, session.done_earlier(report))
    assert made.read_text() == "again"


def test_wheels_of_several_folders_are_unpacked_once(session: ModuleType, tmp_path: Path) -> None:
    site, folders = tmp_path / "site", [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        with zipfile.ZipFile(folder / f"{folder.name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"namespace/{folder.name}.py", "")
            wheel.writestr(f"{folder.name}-1.dist-info/RECORD", "")
    session.unpack(folders[:1], site)
    (site / "namespace" / "first.py").write_text("changed")
    session.unpack(folders, site)
    assert {path.name for path in (site / "namespace").iterdir()} == {"first.py", "second.py"}
    assert (site / "namespace" / "first.py").read_text() == "changed"


def test_rehearsal(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry-run", "--out", str(tmp_path)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n{part}\n" in "\n" + done.stdout for part in ("check", "engine", "time", "train", "race"))


def test_the_rehearsal_sees_a_wrong_option(session: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    step = session.Step("this script", session.python("scripts/gpu_session.py", "check"), 20.0)
    assert session.rehearse({"part": [step]}, None)
    step.command.append("--dryrun")
    assert not session.rehearse({"part": [step]}, None)
    assert "unrecognized arguments: --dryrun" in "".join(capfd.readouterr())


@pytest.mark.full
@pytest.mark.time_limit(600)
def test_losses_of_three_optimizers_on_the_same_batches(tmp_path: Path) -> None:
    out = tmp_path / "losses"
    command = [
        sys.executable,
        "benchmarks/gpu_losses.py",
        "--model",
        "tiny",
        "--length",
        "64",
        "--steps",
        "6",
    ]
    for names in (["ours", "DeepSpeed AdamW"], ["DeepSpeed Muon, standard"]):  # as in the session, in pieces
        run_command([*command, "--optimizers", *names, "--out", str(out)], timeout=500)
    ours, adam, theirs = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert ours["losses"][0] == adam["losses"][0] == theirs["losses"][0]
    # The same updates but for the rounding of a bf16 iteration; AdamW's are others.
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=0.02)
    assert abs(ours["losses"][-1] - adam["losses"][-1]) > 0.04
    assert all(len(row["ms"]) == 6 for row in (ours, adam, theirs)) and ours["kernels"]
    assert out.with_suffix(".md").read_text().count("\n| ") == 4
