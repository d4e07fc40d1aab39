"""Triton's symmetric product in its interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.native_ops import REPOSITORY

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run_alone(program: str, **environment: str) -> None:
    """Run a program of tests/support that says at its end that all is right."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", f"tests.support.{program}"],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.stdout.strip().splitlines()[-1:] == ["all right"], run.stdout + run.stderr


@needs_triton
def test_products_and_iterations_in_the_interpreter() -> None:
    run_alone("triton_cases", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.full
def test_it_compiles_for_every_architecture(tmp_path: Path) -> None:
    run_alone("triton_compiles", TRITON_CACHE_DIR=str(tmp_path))
