"""Triton's symmetric product in its interpreter, and which problems it is a candidate for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, Products
from deepspeed_muon.ops import candidates
from deepspeed_muon.ops.candidates import Problem, candidates_for
from tests.support.native_ops import REPOSITORY

FP32 = torch.float32
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


@pytest.mark.parametrize(
    ("device", "dtype", "without", "expected"),
    [
        ("cuda", torch.float16, (), ["triton gram", "triton standard"]),
        ("cuda", torch.bfloat16, (), ["triton gram", "triton standard"]),
        ("cuda", torch.float32, (), []),  # only its half formats run on tensor cores
        ("cuda", torch.float16, ("triton",), []),  # the self-test of this machine failed
        ("cpu", torch.bfloat16, (), []),
    ],
)
def test_when_it_is_a_candidate(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    without: tuple[str, ...],
    expected: list[str],
) -> None:
    monkeypatch.setattr(candidates, "triton_products", lambda: Products(lambda x: x @ x.mT))
    settings = NsSettings(resolve_schedule("quintic"), "gram", dtype)
    problem = Problem(device, torch.bfloat16, 1, 4096, 11008, 0, settings)
    names = [each.name for each in candidates_for(problem, None, without=without)]
    assert [name for name in names if name.startswith("triton")] == expected
    assert names[-2:] == ["torch gram", "torch standard"]
    monkeypatch.setattr(candidates, "triton_products", lambda: None)
    assert not any(each.name.startswith("triton") for each in candidates_for(problem, None, without=without))


@pytest.mark.parametrize(
    ("capability", "first"),
    [((8, 0), "ops"), ((9, 0), "ops"), ((10, 0), "triton"), ((10, 3), "triton"), ((12, 0), "ops")],
)
def test_it_is_expected_to_win_where_only_it_has_tcgen05(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], first: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index: capability if index == 1 else (8, 0)
    )
    monkeypatch.setattr(candidates, "has_kernel", lambda *_: True)
    monkeypatch.setattr(candidates, "triton_products", lambda: Products(lambda x: x @ x.mT))
    operators = types.SimpleNamespace(sym_gemm_kernel=lambda index: "sm80" if index == 1 else "sm90")
    settings = NsSettings(resolve_schedule("quintic"), "gram", torch.float16)
    problem = Problem("cuda", FP32, 1, 4096, 4096, 0, settings, index=1)
    names = [candidate.name for candidate in candidates_for(problem, operators)]
    assert names[0].startswith(first) and {"ops standard+sm80", "triton standard"} <= set(names)
