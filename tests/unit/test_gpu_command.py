"""``make gpu`` without a GPU: what fails or hangs costs its step only, a later call continues, and there is a page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.harness import run_command
from tests.support.native_ops import REPOSITORY
from tests.support.scripts import load_script

FACTS = {"card": "NVIDIA H200", "gpus": 1, "torch": "2.11.0+cu130"}
GPU = ("a CUDA GPU",)


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return load_script("gpu")


def step(gpu: ModuleType, name: str, code: str, seconds: float = 60.0, **options: Any) -> Any:
    return gpu.Step(name, gpu.python("-c", code), seconds, **options)


def ended(session: Any, part: str) -> list[str]:
    return [outcome["ended"] for outcome in session.state["steps"][part].values()]


def test_a_step_that_fails_hangs_or_crashes_costs_that_step_only(gpu: ModuleType, tmp_path: Path) -> None:
    hangs = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn=os.setpgrp)  # as ninja does
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    steps = [
        gpu.Step("missing", ["no-such-program"], 20.0),
        step(gpu, "failing", "print('why it failed'); raise SystemExit(3)"),
        step(gpu, "crashing", "import os; os.abort()"),
        step(gpu, "hanging", hangs, 8.0),
        step(gpu, "for two cards", "", needs=("two GPUs",)),
        step(gpu, "right", "print('x' * 3_000_000)"),
    ]
    session = gpu.Session(tmp_path, dry_run=False, facts=FACTS)
    assert not session.run({"check": steps}, GPU)
    first, *others = ended(session, "check")
    assert first.startswith("did not start")
    assert others == ["failed with 3", "failed with -6", "took too long", "left out: needs two GPUs", "ok"]
    child = Path("/proc", (tmp_path / "child").read_text())
    while child.exists() and (child / "stat").read_text().split()[2] != "Z":
        time.sleep(0.1)
    page = session.page.read_text()
    assert session.page.name.startswith("gpu-nvidia-h200-2") and "why it failed" in page
    assert json.loads(session.page.with_suffix(".json").read_text()) == session.state
    assert sum(path.stat().st_size for path in session.logs.iterdir()) < 1 << 20


def test_a_later_call_runs_what_is_not_ok_yet_and_what_prepares_it(gpu: ModuleType, tmp_path: Path) -> None:
    made = tmp_path / "made"
    preparing = step(gpu, "preparing", f"open({str(made)!r}, 'a').write('again')", prepares=True)
    right = step(gpu, "right", f"open({str(tmp_path / 'ran')!r}, 'x')")
    later = step(gpu, "later", f"import os; os.remove({str(tmp_path / 'ran')!r})")
    parts = {"check": [preparing, right], "time": [preparing, later]}

    def call(**options: Any) -> Any:
        session = gpu.Session(tmp_path / "out", dry_run=False, facts={**FACTS, **options.pop("facts", {})})
        return session, session.run(parts, GPU, **options)

    session, all_right = call(limit=1.0)
    assert not all_right and set(ended(session, "check")) == {"not started: no time left"}
    session, all_right = call()
    assert all_right and made.read_text() == "again"  # once for both parts
    session, all_right = call()
    assert all_right and made.read_text() == "again"
    # A step that failed is repeated, and what prepares it.
    session.state["steps"]["time"]["later"]["ended"] = "failed with 1"
    session.save()
    (tmp_path / "ran").touch()
    session, all_right = call()
    assert all_right and made.read_text() == "againagain" and not (tmp_path / "ran").exists()
    # Another card begins anew.
    session, _ = call(facts={"card": "NVIDIA B200"})
    assert "b200" in session.page.name and session.state["steps"]["check"]["right"]["ended"] == "ok"
    assert made.read_text() == "againagainagain"


def test_steps_run_side_by_side_but_for_timed_ones_and_after_what_prepares_them(
    gpu: ModuleType, tmp_path: Path
) -> None:
    def waiting(name: str, other: str) -> Any:
        code = f"""
import pathlib, time
folder = pathlib.Path({str(tmp_path)!r})
assert (folder / "prepared").exists()
(folder / {name!r}).touch()
while not (folder / {other!r}).exists():
    time.sleep(0.05)
"""
        return step(gpu, name, code)

    prepared = step(gpu, "preparing", f"open({str(tmp_path / 'prepared')!r}, 'x')", prepares=True)
    steps = [waiting("one", "two"), prepared, waiting("two", "one")]
    session = gpu.Session(tmp_path / "out", dry_run=False, facts=FACTS)
    assert session.run({"check": steps}, GPU, jobs=2), session.page.read_text()
    folder = str(tmp_path / "alone")
    alone = f"import os, time; os.mkdir({folder!r}); time.sleep(0.5); os.rmdir({folder!r})"
    session = gpu.Session(tmp_path / "out", dry_run=False, facts=FACTS, fresh=True)
    assert session.run({"time": [step(gpu, name, alone) for name in "ab"]}, GPU, jobs=2)


def test_the_page_has_speeds_whole_steps_and_losses(gpu: ModuleType, tmp_path: Path) -> None:
    kernels = [{"problem": "8x512x512", "ran": "sm90 gram", "note": ""}]
    ours = {"ms": [90.0, 30.0, 30.0], "losses": [4.0, 3.5, 3.25], "peak_bytes": 3 << 29, "kernels": kernels}
    adamw = {"ms": [50.0, 20.0, 20.0], "losses": [4.0, 3.75]}
    losses = [{"optimizer": "ours", **ours}, {"optimizer": "DeepSpeed AdamW", **adamw}]
    speeds = [{"m": 2048, "sym_gemm, TFLOP/s": 512.34567, "quack, TFLOP/s": 498.0}]
    state = {
        "machine": FACTS,
        "revision": "abc",
        "dry run": False,
        "started": "2026-11-26",
        "steps": {"check": {"self-test": {"ended": "ok", "seconds": 3.0, "log": "log"}}},
        "results": {"sym_gemm": {"sym_gemm": speeds}, "losses-350M": {"rows": losses}},
    }
    page = "\n".join(gpu.page_of(state, tmp_path))
    for line in (
        "| m | sym_gemm, TFLOP/s | quack, TFLOP/s |",
        "| 2048 | 512.3 | 498 |",
        "| ours | 90 | 30 | 1.5 | 1.5 |",
        "| 8x512x512 | sm90 gram |  |",
        "| 3 | 3.25 |  |",
        "| check | self-test | ok | 3 |",
    ):
        assert line in page
    assert "attach this page and the JSON" in page and "What failed" not in page and "dry run" not in page


@pytest.mark.parametrize("options", [["-n"], ["DRY_RUN=1", "-n", "PARTS=check time"]], ids=str)
def test_make_walks_it_too_when_it_only_prints(tmp_path: Path, options: list[str]) -> None:
    """``make gpu --dry-run`` is make's own option: it runs the command all the same, which walks the parts."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "calls"}\n')
    stand_in.chmod(0o755)
    command = ["make", "-C", str(REPOSITORY), "gpu", f"BIN={tmp_path}", *options]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    (call,) = (tmp_path / "calls").read_text().splitlines()
    parts = " check time" if len(options) > 1 else ""
    assert call.split() == f"scripts/gpu.py{parts} --dry-run".split()


def test_without_a_gpu_it_says_how_to_walk_it(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/gpu.py", "check", "--out", str(tmp_path)]
    done = run_command(command, env={"CUDA_VISIBLE_DEVICES": ""}, check=False)
    assert done.returncode == 2 and "--dry-run" in done.stdout and not list(tmp_path.iterdir())


def test_all_programs_are_there(gpu: ModuleType, tmp_path: Path) -> None:
    """Every step names a script, a module or a selection of tests of this repository, also those for a GPU alone."""
    for steps in gpu.steps_of(tmp_path).values():
        for command in (each for step in steps for each in (step.command, step.dry) if each):
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
    assert len(outcomes) > 20 and all(each.startswith(("ok", "left out: needs a GPU")) for each in outcomes)
    results = json.loads(page.with_suffix(".json").read_text())["results"]
    assert results.keys() == {"flat", "sym_gemm", "iteration", "optimizer_step", "losses-350M"}
    ours, adam, *theirs = results["losses-350M"]["rows"]
    assert len(theirs) == 2 and ours["losses"][0] == adam["losses"][0]
    for row in theirs:  # the same updates but for the rounding of their iterations; AdamW's are others
        assert ours["losses"][0] == row["losses"][0]
        assert ours["losses"] == pytest.approx(row["losses"], abs=0.02)
    assert ours["kernels"] and len(ours["ms"]) == 3


def test_wheels_of_several_folders_are_unpacked_once_for_each_interpreter(
    gpu: ModuleType, tmp_path: Path
) -> None:
    site, folders = tmp_path / "site", [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        with zipfile.ZipFile(folder / f"{folder.name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"namespace/{folder.name}.py", "")
            wheel.writestr(f"{folder.name}-1.dist-info/RECORD", "")
    gpu.unpack(folders[:1], site)
    (site / "namespace" / "first.py").write_text("changed")
    gpu.unpack(folders, site)
    assert {path.name for path in (site / "namespace").iterdir()} == {"first.py", "second.py"}
    assert (site / "namespace" / "first.py").read_text() == "changed"
    assert gpu.site_folder().name == f"site-{sys.implementation.cache_tag}"


def test_changed_sources_are_another_revision(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources that are not committed, or have no git, were taken for those of the results: steps did not run again."""
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    kernel = tmp_path / "ops" / "csrc" / "kernel.cu"
    kernel.parent.mkdir(parents=True)
    revisions = []
    for text in ("one", "two", "two"):
        kernel.write_text(text)
        revisions.append(gpu.revision())
    assert revisions[0] != revisions[1] == revisions[2]
