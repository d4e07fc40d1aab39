"""The launchers' checks of arguments, on the CPU's bench (``tests/support/cuda_bench``)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from tests.support import cuda_bench
from tests.support.cuda_bench import Bench
from tests.support.cuda_library import (
    BAD_ARGUMENT,
    DTYPE,
    MISALIGNED,
    OK,
    SHAPE,
    ApplyRow,
    DivideTransposed,
    Kernels,
    PackRow,
    SymGemm,
    build,
    find_nvcc,
    problem_of,
)

pytestmark = pytest.mark.skipif(cuda_bench.unavailable() is not None, reason=str(cuda_bench.unavailable()))


def problem() -> SymGemm:
    a = torch.zeros(2, 128, 64, dtype=torch.float16)
    d = torch.zeros(2, 128, 128, dtype=torch.float16)
    return problem_of(a, a, None, d, alpha=1.0, beta=0.0, diag=0.0)


# One case per reason; a pointer is never followed.
@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"dtype": 0}, DTYPE),
        ({"dtype": 9}, DTYPE),
        ({"m": 132}, SHAPE),
        ({"k": 60}, SHAPE),
        ({"m": 0}, SHAPE),
        ({"k": 0}, SHAPE),
        ({"lda": 68}, SHAPE),
        ({"stride_d": 4}, SHAPE),
        ({"m": 1 << 25}, SHAPE),
        ({"m": -8}, BAD_ARGUMENT),
        ({"ldb": 56}, BAD_ARGUMENT),
        ({"d": 0}, BAD_ARGUMENT),
        ({"a": 8}, MISALIGNED),
        ({"c": 4104, "ldc": 128, "stride_c": 128 * 128}, MISALIGNED),
    ],
    ids=str,
)
def test_sym_gemm_refuses(bench: Bench, change: dict[str, int], status: int) -> None:
    wrong = problem()
    for name, value in change.items():
        setattr(wrong, name, value)
    bench.configure()
    assert bench.library.muon_sym_gemm(ctypes.byref(wrong), 0) == status
    assert bench.name(status) not in ("ok", "unknown status")


def test_strides_of_a_single_matrix_do_not_matter(bench: Bench) -> None:
    bench.configure()
    a, d = (torch.zeros(1, 128, k, dtype=torch.float16) for k in (64, 128))
    single = problem_of(a, a, None, d, alpha=1.0, beta=0.0, diag=0.0)
    single.stride_a = single.stride_b = single.stride_d = 3
    assert bench.library.muon_sym_gemm(ctypes.byref(single), 0) == OK


def test_flat_passes_refuse(bench: Bench) -> None:
    bench.configure()

    def pack(dtypes: tuple[int, int, int], *rows: tuple[int, ...]) -> int:
        table = (PackRow * len(rows))(*(PackRow(*row[:4], 0.9, 1, *row[4:]) for row in rows))
        return int(bench.library.muon_momentum_pack(table, len(rows), *dtypes, None))

    def apply(dtypes: tuple[int, int], *rows: tuple[int, int, int]) -> int:
        table = (ApplyRow * len(rows))(*(ApplyRow(*row, 0.1, 1.0) for row in rows))
        return int(bench.library.muon_unpack_apply(table, len(rows), *dtypes, None))

    good = (4096, 4096, 4096, 8)
    assert pack((0, 0, 2)) == 0 and bench.library.muon_momentum_pack(None, 1, 0, 0, 2, None) == BAD_ARGUMENT
    for dtypes in ((7, 0, 2), (0, 7, 2), (0, 0, 7)):
        assert pack(dtypes, good) == DTYPE
    for wrong, status in [
        ((0, 0, 0, 8), BAD_ARGUMENT),
        ((4096, 4096, 4096, -1), BAD_ARGUMENT),
        ((4098, 4096, 4096, 8), MISALIGNED),
        ((4096, 4098, 4096, 8), MISALIGNED),
        ((4096, 4096, 4097, 8), MISALIGNED),
    ]:
        assert pack((0, 0, 2), good, wrong) == status
    assert pack((3, 0, 2)) == 0 and pack((0, 3, 2), good) == pack((0, 0, 3), good) == DTYPE
    for blocks, status in [
        ((0, 0), BAD_ARGUMENT),
        ((-1, 4096), BAD_ARGUMENT),
        ((256, 4096), BAD_ARGUMENT),
        ((0, 4098), MISALIGNED),
    ]:
        assert pack((3, 0, 2), (4097, 4096, 4096, 8, *blocks)) == status
    assert apply((0, 2)) == 0
    assert apply((9, 2), (4096, 4096, 8)) == apply((0, 9), (4096, 4096, 8)) == DTYPE
    for other, status in [
        ((4096, 0, 8), BAD_ARGUMENT),
        ((4096, 4098, 8), MISALIGNED),
        ((4097, 4096, 8), MISALIGNED),
    ]:
        assert apply((2, 0), (4096, 4096, 8), other) == status


# One case per reason, of (3, 40, 8) at addresses that are never followed.
@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"x_dtype": 3}, DTYPE),
        ({"out_dtype": -1}, DTYPE),
        ({"batch": 0, "x": 0}, OK),
        ({"rows": -1}, BAD_ARGUMENT),
        ({"norms": 0}, BAD_ARGUMENT),
        ({"x": 4098}, MISALIGNED),
        ({"rows": 1 << 40}, SHAPE),
        ({"batch": 1 << 62, "cols": 1 << 62}, SHAPE),
    ],
    ids=str,
)
def test_divide_transposed_refuses(bench: Bench, change: dict[str, int], status: int) -> None:
    bench.configure()
    problem = DivideTransposed(4096, 4096, 4096, 3, 40, 8, 320, 8, 1, 0, 2)
    for name, value in change.items():
        setattr(problem, name, value)
    assert bench.library.muon_divide_transposed(ctypes.byref(problem), None) == status


@pytest.mark.full
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_what_nvcc_builds_says_so(tmp_path: Path) -> None:
    kernels = Kernels(build(tmp_path, ("90a",)))
    assert kernels.available() > 0  # a cudaError_t
    assert kernels.name(kernels.available()) != "unknown status"
