"""Limits of comparisons with float64, and pytest's summary of the nearest ones."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.comparisons import all_within, close, relative, within
from tests.support.contract import reference
from tests.support.kernels import forced_kernel
from tests.support.models import MATRICES
from tests.support.native_ops import REPOSITORY
from tests.support.rounding import HALF_MODEL, limits
from tests.support.thinning import full

pytestmark = pytest.mark.skipif(bool(forced_kernel()), reason="forces kernels itself")


def test_a_wrong_update_is_far_from_every_limit() -> None:
    """In fp32 by orders of magnitude, in half precision too: it lacks one, is half as long, or has another sign."""
    start, end, _, _ = reference("toy", 2, 0.5)
    for name in end:
        path = end[name] - start[name]
        for wrong in (start[name], start[name] + path / 2, start[name] - path):
            error = relative(wrong, end[name], start[name])
            assert error >= 2000 * limits(reference, "toy", 2, 0.5).paths[name], name
    for arithmetic in HALF_MODEL.values():
        allowed = limits(reference, "toy", 2, 0.5, arithmetic=arithmetic).paths
        assert all(allowed[name] < 0.3 for name in MATRICES["toy"])


def test_failures() -> None:
    within(0.0, 0.0)
    close(torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf]), rtol=1e-6, atol=0)
    for error, limit in ((1.1, 1.0), (math.nan, 1.0), (1e-9, 0.0)):
        with pytest.raises(AssertionError, match="where"):
            within(error, limit, "a number")
    with pytest.raises(AssertionError, match=r"second: 2, where 1 is allowed(.|\n)*first: 0.1 of 1"):
        all_within({"first": 0.1, "second": 2.0}, 1.0)
    for value in (1.1, math.nan, math.inf):
        with pytest.raises(AssertionError):
            close(torch.tensor([value]), torch.tensor([1.0]), rtol=1e-6, atol=0)


SUITE = """
import pytest
from tests.support.comparisons import within

@pytest.mark.parametrize("error", [0.1, 0.2, 0.3, 0.35, 0.4, 0.45, 0.6])
def test_it(error):
    within(error / 2, 1.0, "half of it")
    within(error, 1.0, "all of it")
"""


@pytest.mark.parametrize("processes", [full("0"), "2"])
def test_the_summary_lists_the_nearest_comparisons(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_sample.py").write_text(SUITE)
    options = ["-q", "-p", "tests.conftest", "-n", processes, "test_sample.py"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if " of the limit" in line]
    assert [line.split()[0] for line in lines] == ["0.60", "0.45", "0.40", "0.35", "0.30", "1"], done.stdout
    assert "6.00e-01 of 1.00e+00 all of it test_sample.py::test_it[0.6]" in lines[0]
    assert lines[-1].startswith("1 above 0.5 of the limit") and done.returncode == 0
