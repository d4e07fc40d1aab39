"""Every CUDA kernel on the device at hand, against float64. Run by `make gpu`; skipped without a GPU."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import cuda_cases as cases
from tests.support.cuda_cases import UNIT, Inputs, check_product
from tests.support.cuda_library import FLAT_ROWS, OK, Kernels, build, find_nvcc

pytestmark = pytest.mark.gpu

# Not multiples of the tile, fewer k than a stage, many k, one tile, several waves of 132 blocks.
SHAPES = [
    (1, 8, 8),
    (1, 128, 64),
    (1, 136, 72),
    (2, 264, 200),
    (3, 512, 8),
    (1, 1000, 1016),
    (5, 384, 2048),
    (1, 4096, 512),
    (40, 256, 320),
    # more tiles than blocks, and no more loads of a tile than stages of the ring
    (1, 4096, 64),
    (1, 4096, 320),
    (4, 4096, 8),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    ready = os.environ.get("MUON_CUDA_LIBRARY")
    if ready:
        return Kernels(Path(ready))
    if find_nvcc() is None:
        pytest.skip("needs nvcc, or MUON_CUDA_LIBRARY")
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
    return Kernels(build(tmp_path_factory.mktemp("cuda"), (architecture,)))


@pytest.fixture
def hopper(kernels: Kernels) -> Kernels:
    """The kernels on a GPU that has the symmetric product."""
    status = kernels.available()
    if torch.cuda.get_device_capability() == (9, 0):
        assert status == OK, kernels.name(status)
    if status != OK:
        pytest.skip(kernels.name(status))
    return kernels


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sym_gemm(hopper: Kernels, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    cases.sym_gemm(hopper, shape, dtype, Inputs("cuda"))


def test_the_same_input_gives_the_same_bits(hopper: Kernels) -> None:
    # A race shows as a result that changes; 50 runs over a ring of outputs.
    a = random(4, 1024, 768, dtype=torch.float16)
    first = torch.empty(4, 1024, 1024, dtype=torch.float16, device="cuda")
    assert hopper.sym_gemm(a, a, None, first) == OK
    for _ in range(50):
        d = torch.full_like(first, torch.nan)
        assert hopper.sym_gemm(a, a, first, d, beta=1.0) == OK
        again = torch.full_like(first, torch.nan)
        assert hopper.sym_gemm(a, a, None, again) == OK
        assert torch.equal(again, first)


def test_c_may_be_the_output(hopper: Kernels) -> None:
    cases.c_may_be_the_output(hopper, Inputs("cuda"))


def test_nothing_outside_of_the_output_is_written(hopper: Kernels) -> None:
    cases.nothing_outside_is_written(hopper, Inputs("cuda"))


def test_in_a_cuda_graph(hopper: Kernels) -> None:
    a = random(2, 512, 512, dtype=torch.float16)
    d = torch.empty_like(a)
    assert hopper.sym_gemm(a, a, None, d) == OK
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert hopper.sym_gemm(a, a, None, d) == OK
    a.copy_(random(2, 512, 512))
    d.fill_(torch.nan)
    graph.replay()
    check_product(d, a, a, None, 1.0, 0.0, 0.0)


FLAT_DTYPES = [torch.float32, *UNIT]


@pytest.mark.parametrize("dtypes", list(product(FLAT_DTYPES, repeat=3)), ids=str)
@pytest.mark.parametrize("offsets", [(0, 0, 0), (4, 4, 4), (3, 7, 5), (3, 3, 3), (0, 0, 1)], ids=str)
def test_momentum_pack(kernels: Kernels, dtypes: Any, offsets: tuple[int, int, int]) -> None:
    for many, nesterov in ((FLAT_ROWS["momentum_pack"], True), (0, False)):
        lengths = [*cases.fragment_lengths(many), 3_000_001]
        cases.momentum_pack(kernels, lengths, offsets, dtypes, nesterov, Inputs("cuda"))


@pytest.mark.parametrize("dtypes", list(product(FLAT_DTYPES, repeat=2)), ids=str)
@pytest.mark.parametrize("offsets", [(0, 0, 0), (3, 3, 3), (8, 4, 4), (1, 0, 0), (5, 7, 3)], ids=str)
def test_momentum_pack_int8(kernels: Kernels, dtypes: Any, offsets: tuple[int, int, int]) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed_muon.ops.torch_operators import momentum_pack_int8_

    for many, nesterov in ((FLAT_ROWS["momentum_pack_int8"], True), (0, False)):
        lengths = [*cases.fragment_lengths(many), 255, 256, 257, 512, 3_000_001]
        inputs = Inputs("cuda")
        cases.momentum_pack_int8(kernels, momentum_pack_int8_, lengths, offsets, dtypes, nesterov, inputs)


@pytest.mark.parametrize("dtypes", list(product(FLAT_DTYPES, repeat=2)), ids=str)
@pytest.mark.parametrize("offsets", [(0, 0), (4, 4), (3, 7), (3, 3), (0, 1)], ids=str)
def test_unpack_apply(kernels: Kernels, dtypes: Any, offsets: tuple[int, int]) -> None:
    lengths = [*cases.fragment_lengths(FLAT_ROWS["unpack_apply"]), 3_000_001]
    cases.unpack_apply(kernels, lengths, offsets, dtypes, Inputs("cuda"))


@pytest.mark.parametrize("dtypes", list(product(FLAT_DTYPES, repeat=2)), ids=str)
@pytest.mark.parametrize("shape", [(1, 33, 32), (3, 70, 41), (2, 4096, 1000)], ids=str)
def test_divide_transposed(kernels: Kernels, shape: tuple[int, int, int], dtypes: Any) -> None:
    for step in (1, 2):
        cases.divide_transposed(kernels, shape, step, dtypes, Inputs("cuda"))


@pytest.mark.parametrize("dtype", FLAT_DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 4099, 2048 * 5504], ids=str)
def test_squares(kernels: Kernels, numel: int, dtype: torch.dtype) -> None:
    for parts, offset in ((1, 0), (2752, 0), (37, 3)):
        cases.squares(kernels, 3, numel, parts, offset, dtype, Inputs("cuda"))
