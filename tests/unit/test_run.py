"""``python -m deepspeed_muon.run``: scripts, modules and programs that know nothing of this project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_muon.run import split_arguments

SAYS = """
import os, sys
import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
print(sys.argv[1:], hasattr(DeepSpeedEngine._configure_optimizer, '__wrapped__'), __name__)
print("for children:", os.environ["DEEPSPEED_MUON"])
if "engine" in sys.argv:
    open(os.environ["DEEPSPEED_MUON_NOTE"], "w")
"""
NOBODY = "no engine with this Muon was made"


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deepspeed_muon.run", *arguments],
        env={**os.environ, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    (folder / "script.py").write_text(SAYS)
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "train.py").write_text(SAYS)
    program = folder / "bin" / "train-it"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{SAYS}")
    program.chmod(0o755)
    (folder / "bin" / "shell").write_text("#!/bin/sh\ntrue\n")
    (folder / "bin" / "shell").chmod(0o755)
    return folder


@pytest.mark.parametrize("how", [["script.py"], ["-m", "package.train"], ["train-it"]], ids=" ".join)
def test_what_runs(folder: Path, how: list[str]) -> None:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = run("--local_rank=1", *how, "--x", "3", cwd=folder, PATH=path)
    assert "['--local_rank=1', '--x', '3'] True __main__" in done.stdout, done.stdout + done.stderr
    assert "for children: 1" in done.stdout
    assert NOBODY in done.stderr


def test_no_warning_where_an_engine_was_made(folder: Path) -> None:
    assert NOBODY not in run("script.py", "engine", cwd=folder).stderr


@pytest.mark.parametrize(
    ("program", "said"), [("absent.py", "no such file or program"), ("bin/shell", "is not a Python program")]
)
def test_what_cannot_run(folder: Path, program: str, said: str) -> None:
    done = run(program, cwd=folder)
    assert done.returncode == 1 and said in done.stderr


def test_arguments() -> None:
    assert split_arguments(["a.py", "b"]) == ("a.py", ["b"], False)
    assert split_arguments(["--local_rank", "2", "a.py"]) == ("a.py", ["--local_rank", "2"], False)
    assert split_arguments(["--local_rank=2", "-m", "a", "-m"]) == ("a", ["--local_rank=2", "-m"], True)
    for bad in ([], ["--verbose", "a.py"], ["-m"]):
        with pytest.raises(SystemExit, match="usage"):
            split_arguments(bad)
