"""scripts/nvcc_check.sh without a compiler, and with one that is not on ``PATH``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.native_ops import REPOSITORY


def check(folder: Path, nvcc: str, ci: str) -> subprocess.CompletedProcess[str]:
    """Run the script on one source, where ``ops/toolchain.py`` finds the compiler ``nvcc``."""
    for name in ("scripts", "ops/csrc", ".venv/bin"):
        (folder / name).mkdir(parents=True)
    shutil.copy(REPOSITORY / "scripts" / "nvcc_check.sh", folder / "scripts")
    (folder / "scripts" / "sass_check.py").touch()
    (folder / "ops" / "csrc" / "one.cu").touch()
    (folder / "ops" / "toolchain.py").write_text(f"def find_nvcc(): return {nvcc!r}\n")
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    return subprocess.run(
        [folder / "scripts" / "nvcc_check.sh"],
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_in_ci_nothing_is_skipped(tmp_path: Path, ci: str, code: int) -> None:
    done = check(tmp_path, "", ci)
    assert done.returncode == code and "SKIPPED" in done.stdout and "one.cu" in done.stdout


@pytest.mark.parametrize(
    ("text", "code"), [("while [ $1 != -o ]; do shift; done; touch $2", 0), ("exit 1", 1)]
)
def test_the_compiler_that_a_build_would_take_is_taken(tmp_path: Path, text: str, code: int) -> None:
    nvcc = tmp_path / "cu13" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/bash\n{text}\n")
    nvcc.chmod(0o755)
    done = check(tmp_path, str(nvcc), "true")
    assert done.returncode == code, done.stdout + done.stderr
    assert f"{4 - 4 * code} of 4 compiled cleanly" in done.stdout
