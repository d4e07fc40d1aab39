"""What several files of unit tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import cuda_bench


@pytest.fixture(scope="session")
def bench() -> cuda_bench.Bench:
    """The CUDA kernels on the CPU's bench."""
    return cuda_bench.unchanged()


@pytest.fixture
def plan_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run ``python -m deepspeed_muon plan`` with ``--json`` and further arguments, and return what it prints."""
    from deepspeed_muon.__main__ import main

    def run(*arguments: object) -> dict[str, Any]:
        assert main(["plan", *map(str, arguments), "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    return run
