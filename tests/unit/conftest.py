"""What several files of unit tests share."""

from __future__ import annotations

import os

import pytest

from tests.support import cuda_bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> cuda_bench.Bench:
    """The CUDA kernels on the CPU's bench, compiled once for all processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return cuda_bench.session_build(
        (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda_bench"
    )
