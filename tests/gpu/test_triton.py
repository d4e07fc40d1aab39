"""Triton's symmetric product on a GPU, against float64; skipped without one."""

# ruff: noqa: E402  # the imports below need Triton and DeepSpeed
from __future__ import annotations

import itertools

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
pytest.importorskip("deepspeed", reason="deepspeed_muon registers with DeepSpeed when it is imported")

from tests.support.triton_cases import SHAPES, UNIT, product_faults

LARGE = [(1, 2048, 5464), (16, 512, 1024), (1, 1000, 4000)]


@pytest.mark.parametrize(("shape", "dtype"), list(itertools.product([*SHAPES, *LARGE], UNIT)), ids=str)
def test_sym_gemm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for with_c, strided in ((False, False), (True, False), (True, True)):
        assert product_faults(*shape, dtype, with_c, strided, device="cuda") == []
