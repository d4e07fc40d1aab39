"""What several files of unit tests share."""

from __future__ import annotations

import pytest

from tests.support import cuda_bench


@pytest.fixture(scope="session")
def bench() -> cuda_bench.Bench:
    """The CUDA kernels on the CPU's bench."""
    return cuda_bench.unchanged()
