"""The real CUDA kernels, run on a CPU (``tests/support/cuda_bench``): right, and each planted defect is found."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_muon.ops.dispatch import flat_passes
from tests.gpu import sanitized
from tests.support import binding_cases, cuda_bench
from tests.support import cuda_cases as cases
from tests.support.comparisons import close
from tests.support.cuda_bench import ANY_TIME, EARLY, LATE, Bench, Binding
from tests.support.cuda_cases import Inputs
from tests.support.cuda_library import (
    BAD_ARGUMENT,
    DEVICE,
    FLAT_ROWS,
    OK,
    SHAPE,
    problem_of,
)  # fmt: skip
from tests.support.planted import planted
from tests.support.thinning import pairwise

pytestmark = pytest.mark.skipif(cuda_bench.unavailable() is not None, reason=str(cuda_bench.unavailable()))

# Fewer k than a stage, one tile, tiles that end in the middle, several tiles for a block, and many k.
SHAPES = [(1, 8, 8), (1, 128, 64), (1, 136, 72), (2, 264, 200), (3, 512, 8), (1, 384, 1016)]


# Both dtypes, every way in which asynchronous work ends, one and several multiprocessors.
MODES = [(torch.float16, ANY_TIME, 3), (torch.bfloat16, LATE, 1), (torch.float16, EARLY, 1)]


@pytest.mark.parametrize(("shape", "mode_index"), pairwise(product(SHAPES, range(len(MODES)))))
def test_sym_gemm(bench: Bench, shape: tuple[int, int, int], mode_index: int) -> None:
    dtype, mode, processors = MODES[mode_index]
    bench.configure(processors=processors, mode=mode, seed=100 * mode_index + 1)
    cases.sym_gemm(bench, shape, dtype, Inputs("cpu", mode_index))


def test_tiles_in_any_order_give_the_same_bits(bench: Bench) -> None:
    a, results = Inputs("cpu")(2, 264, 200, dtype=torch.float16), []
    for seed in range(12):
        # Blocks that come first take all tiles of others but their first ones, some or none.
        bench.configure(processors=1 + seed % 4, seed=100 * seed)
        results.append(torch.full((2, 264, 264), torch.nan, dtype=torch.float16))
        assert bench.sym_gemm(a, a, None, results[-1]) == OK
        assert torch.equal(results[-1], results[0]) and not bench.counter(a.device).any()


@pytest.mark.parametrize("case", [cases.nothing_outside_is_written, cases.c_may_be_the_output])
def test_operands_that_are_views_or_the_output(bench: Bench, case: Callable[[Bench, Inputs], None]) -> None:
    bench.configure(processors=2)
    case(bench, Inputs("cpu"))


def test_calls_of_the_sanitizers(bench: Bench) -> None:
    bench.configure(major=9, processors=2)
    calls = sanitized.kernels_of(bench, "cpu", processors=2)
    assert {"sym_gemm", "momentum_pack_int8", "divide_transposed", "squares"} <= calls.keys()
    for call in calls.values():
        call()


def test_refused_operands(bench: Bench) -> None:
    refusals(bench)
    a, d = (torch.zeros(2, 128, k, dtype=torch.float16) for k in (64, 128))
    # One case per reason that `refusals` lacks; a pointer is never followed.
    for name, value, status in (
        ("m", 0, SHAPE),
        ("k", 60, SHAPE),
        ("lda", 68, SHAPE),
        ("stride_d", 4, SHAPE),
        ("m", 1 << 25, SHAPE),
        ("m", 1 << 24, SHAPE),  # more tiles than 32 bits count
        ("m", -8, BAD_ARGUMENT),
        ("ldb", 56, BAD_ARGUMENT),
        ("d", 0, BAD_ARGUMENT),
        ("counter", 0, BAD_ARGUMENT),
    ):
        wrong = problem_of(a, a, None, d, bench.counter(d.device), alpha=1.0, beta=0.0, diag=0.0)
        setattr(wrong, name, value)
        assert bench.library.muon_sym_gemm(ctypes.byref(wrong), 0) == status, name
        assert bench.name(status) not in ("ok", "unknown status")
    for major in (8, 10):
        bench.configure(major=major)
        assert bench.available() == DEVICE


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("dtypes", "offsets"),
    # Every dtype of the gradient, the momentum and what is sent, aligned and not.
    [
        ((FP32, FP32, BF16), (0, 0, 0)),
        ((FP32, FP32, FP16), (3, 3, 3)),
        ((FP32, FP32, FP32), (3, 7, 5)),
        ((FP32, BF16, BF16), (5, 5, 5)),
        ((BF16, FP32, BF16), (4, 4, 4)),
        ((BF16, BF16, FP16), (0, 0, 1)),
        ((FP16, FP16, FP32), (4, 4, 4)),
        ((FP32, FP16, BF16), (2, 2, 3)),
    ],
    ids=str,
)
def test_momentum_pack(bench: Bench, dtypes: Any, offsets: tuple[int, int, int]) -> None:
    # More fragments than one launch takes, and as many.
    rows = FLAT_ROWS["momentum_pack"]
    for many, nesterov in ((rows, True), (rows - len(cases.LENGTHS), False)):
        bench.configure(processors=1 + many % 3)
        lengths = cases.fragment_lengths(many)
        cases.momentum_pack(bench, lengths, offsets, dtypes, nesterov, Inputs("cpu"))


BLOCK_LENGTHS = [*cases.LENGTHS, 255, 256, 257, 512, 1000, 4093]
"""With momentum in 8 bits in blocks of 256."""


@pytest.mark.parametrize("backend", ["ops", "torch"])
@pytest.mark.kernels
@pytest.mark.native
@pytest.mark.parametrize(
    ("dtypes", "offsets"),
    # Every dtype of the gradient and of what is sent, aligned and not.
    [
        ((FP32, BF16), (0, 0, 0)),
        ((FP32, FP16), (3, 3, 3)),
        ((FP32, FP32), (8, 4, 4)),
        ((BF16, BF16), (1, 0, 0)),
        ((BF16, FP16), (0, 1, 0)),
        ((BF16, FP32), (8, 8, 1)),
        ((FP16, BF16), (5, 5, 5)),
        ((FP16, FP16), (8, 0, 8)),
        ((FP16, FP32), (11, 3, 7)),
    ],
    ids=str,
)
def test_momentum_pack_int8(bench: Bench, backend: Any, dtypes: Any, offsets: tuple[int, int, int]) -> None:
    run = flat_passes(backend).momentum_pack_int8
    # More fragments than one launch takes, and as many.
    rows = FLAT_ROWS["momentum_pack_int8"]
    for many, nesterov in ((rows, True), (rows - len(BLOCK_LENGTHS) + 1, False)):
        bench.configure(processors=1 + many % 3)
        lengths = [*BLOCK_LENGTHS, *(1 + 37 * number % 300 for number in range(many))]
        cases.momentum_pack_int8(bench, run, lengths, offsets, dtypes, nesterov, Inputs("cpu"))


@pytest.mark.parametrize(
    ("dtypes", "offsets"),
    [
        ((FP32, BF16), (0, 0)),
        ((FP32, FP16), (3, 3)),
        ((FP32, FP32), (3, 7)),
        ((BF16, BF16), (4, 4)),
        ((FP16, FP32), (0, 1)),
        ((BF16, FP16), (7, 7)),
    ],
    ids=str,
)
def test_unpack_apply(bench: Bench, dtypes: Any, offsets: tuple[int, int]) -> None:
    for many in (FLAT_ROWS["unpack_apply"], 0):
        bench.configure(processors=1 + many % 3)
        cases.unpack_apply(bench, cases.fragment_lengths(many), offsets, dtypes, Inputs("cpu"))


@pytest.mark.parametrize(
    ("shape", "step", "dtypes"),
    # Squares of 32 that are whole and not, a tall matrix by one row, a column; every pair of dtypes.
    pairwise(
        product(
            [(1, 33, 32), (2, 64, 32), (3, 70, 41), (2, 130, 1), (1, 300, 96)],
            [1, 2],
            product((FP32, FP16, BF16), repeat=2),
        )
    ),
    ids=str,
)
def test_divide_transposed(bench: Bench, shape: tuple[int, int, int], step: int, dtypes: Any) -> None:
    bench.configure(processors=shape[0])
    cases.divide_transposed(bench, shape, step, dtypes, Inputs("cpu"))


@pytest.mark.parametrize(
    ("numel", "parts", "offset", "dtype"),
    # Parts that are empty, of less than a vector, whole, and of several steps of a warp.
    pairwise(product([1, 7, 264, 1000, 4099], [1, 3, 40], [0, 3], (FP32, FP16, BF16))),
    ids=str,
)
def test_squares(bench: Bench, numel: int, parts: int, offset: int, dtype: torch.dtype) -> None:
    bench.configure(processors=1 + parts % 3)
    cases.squares(bench, 3, numel, parts, offset, dtype, Inputs("cpu"))


def far(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of which only those pages take memory that are written to."""
    size = math.prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).view(shape)


SIDE = 1 << 16
TILES = SIDE // 128 * (SIDE // 128 + 1) // 2


def beyond_2_31(kernels: Bench) -> None:
    """The last tiles of two matrices of 2^32 elements each: rows, columns and matrices begin behind 2^31."""
    a, c, d = (far(2, SIDE, SIDE, dtype=torch.float16) for _ in range(3))
    a = a[:, :, :72]
    inputs = Inputs("cpu")
    a[1, -256:] = inputs(256, 72, dtype=torch.float16)
    c[1, -256:, -256:] = cases.lower_mirrored(inputs(256, 256, dtype=torch.float16))
    # A block for each tile, of which two run: on the diagonal and left of it.
    kernels.configure(processors=2 * TILES, blocks=(2 * TILES - 2, 2))
    assert kernels.sym_gemm(a, a, c, d, alpha=0.5, beta=2.0) == OK
    exact = 0.5 * a[1, -128:].double() @ a[1, -256:].double().mT + 2.0 * c[1, -128:, -256:].double()
    for tiles in (d[1, -128:, -256:], d[1, -256:, -128:].mT):
        close(tiles.double(), exact, rtol=2.0**-10, atol=1e-3)


def more_tiles_than_2_31(kernels: Bench) -> None:
    """A block whose second and last tile is that of the last of 20,000 equal matrices."""
    a, d = far(1, SIDE, 64, dtype=torch.float16), far(1, SIDE, SIDE, dtype=torch.float16)
    a[0, -128:] = Inputs("cpu")(128, 64, dtype=torch.float16)
    grid, tiles = (1 << 31) - 1, 20000 * TILES
    kernels.configure(processors=grid, blocks=(tiles - 1 - grid, 1))
    # All others have taken their tiles.
    kernels.counter(d.device).fill_(tiles - 1 - grid)
    matrices = a.expand(20000, -1, -1)
    assert kernels.sym_gemm(matrices, matrices, None, d.expand(20000, -1, -1)) == OK
    cases.check_product(d[:, -128:, -128:].contiguous(), a[:, -128:], a[:, -128:], None, 1.0, 0.0, 0.0)


def transposed_beyond_2_31(kernels: Bench) -> None:
    """The last square of two matrices of more than 2^31 elements each."""
    rows, cols = (1 << 16) + 40, (1 << 15) + 8
    x, out = far(2, rows, cols, dtype=BF16), far(2, cols, rows, dtype=FP16)
    x[1, -8:, -8:] = Inputs("cpu")(8, 8, dtype=BF16)
    squares = 2 * -(-rows // 32) * -(-cols // 32)
    kernels.configure(processors=squares, blocks=(squares - 1, 1))
    norms = torch.tensor([1.0, 3.0]).view(2, 1, 1)
    assert kernels.divide_transposed(x, norms, out) == OK
    assert torch.equal(out[1:, -8:, -8:], (x[1:, -8:, -8:].mT / norms[1:]).to(FP16))


def long_fragments(kernels: Bench) -> None:
    """The last tile of fragments of more than 2^31 elements."""
    n = (1 << 31) + 8192
    momentum, grad, out = far(n, dtype=FP32), far(n, dtype=BF16), far(n, dtype=BF16)
    inputs = Inputs("cpu")
    momentum[-4096:], grad[-4096:] = inputs(4096), inputs(4096, dtype=BF16)
    before, direction = momentum[-4096:].clone(), grad[-4096:].float()
    for run in (
        lambda: kernels.momentum_pack([((momentum, grad, out), 0.9)], nesterov=False),
        lambda: kernels.unpack_apply([((momentum, grad), 0.5)], lr_scale=0.25),
    ):
        kernels.configure(processors=n // 4096, blocks=(n // 4096 - 1, 1))
        assert run() == OK
    lerped = torch.lerp(before, direction, 0.1)
    close(out[-4096:].float(), lerped, rtol=2.0**-7, atol=1e-6)
    torch.testing.assert_close(momentum[-4096:], 0.5 * lerped - 0.25 * direction)


def products(kernels: Bench) -> None:
    """Products of two matrices of six tiles, in twelve orders of everything that may be in any order.

    A tile has more stages than the ring, and fewer: the ring then has copies of two tiles.
    """
    for seed in range(12):
        kernels.configure(
            processors=1 + 2 * (seed % 2), mode=(ANY_TIME, LATE, EARLY)[seed % 3], seed=1000 * seed + 1
        )
        cases.sym_gemm(kernels, (2, 264, (520, 200)[seed // 6]), torch.float16, Inputs("cpu", seed))


def turned(kernels: Bench) -> None:
    """Two matrices of some squares each, by one block and by several."""
    for processors in (1, 3):
        kernels.configure(processors=processors)
        cases.divide_transposed(kernels, (2, 130, 70), 1, (FP32, BF16), Inputs("cpu"))


def sums(kernels: Bench) -> None:
    """Sums of squares of more parts than warps, on the 16-byte grid and beside it."""
    kernels.configure(processors=1)
    for numel, offset in ((4096, 0), (4099, 0), (4096, 3)):
        cases.squares(kernels, 3, numel, 40, offset, BF16, Inputs("cpu"))


def passes(kernels: Bench) -> None:
    """The flat passes, with each array unaligned in turn."""
    kernels.configure(processors=2)
    lengths = cases.fragment_lengths(max(FLAT_ROWS.values()))
    for offsets in ((0, 0, 0), (0, 0, 1), (0, 1, 0)):
        cases.momentum_pack(kernels, lengths, offsets, (BF16, FP32, FP32), False, Inputs("cpu"))
        cases.unpack_apply(kernels, lengths, offsets[1:], (FP32, BF16), Inputs("cpu"))
    reference, coded = flat_passes("torch").momentum_pack_int8, [*BLOCK_LENGTHS, *lengths]
    for offsets in ((0, 0, 0), (1, 0, 0), (0, 1, 0)):
        cases.momentum_pack_int8(kernels, reference, coded, offsets, (FP32, BF16), True, Inputs("cpu"))


def refusals(kernels: Bench) -> None:
    """What a kernel must refuse."""
    kernels.configure()
    cases.refused_operands(kernels, Inputs("cpu"))


@pytest.fixture(scope="module")
def binding(bench: Bench) -> Binding:
    return cuda_bench.unchanged_binding(bench)


@pytest.mark.parametrize("case", binding_cases.CASES)
def test_the_binding(binding: Binding, case: Callable[[Binding], None]) -> None:
    case(binding)


DEFECTS = planted("planted_kernel_defects.toml")["defect"]
FINDERS: dict[str, Callable[[Any], None]] = {
    finder.__name__: finder
    for finder in (
        products, passes, sums, turned, refusals, beyond_2_31, more_tiles_than_2_31, transposed_beyond_2_31,
        long_fragments, binding_cases.every_case,
    )
}  # fmt: skip


ALWAYS_PLANTED = {
    "the last tile is not cut",
    "elements behind a row are read",
    "half of a stage's bytes are waited for",
}
"""One of each kernel; the others are left to ``--full``: each compiles a kernel anew."""


@pytest.mark.parametrize(
    "defect",
    [
        pytest.param(
            defect, id=defect["harm"], marks=() if defect["harm"] in ALWAYS_PLANTED else pytest.mark.full
        )
        for defect in DEFECTS
    ],
)
def test_planted_defects_fail(bench: Bench, tmp_path: Path, defect: dict[str, str]) -> None:
    mutation = {defect["old"]: defect["new"]}
    broken = (
        cuda_bench.build_binding(tmp_path, bench, mutation)
        if defect["source"] in cuda_bench.BINDING
        else cuda_bench.build(tmp_path, mutation, beside=bench.folder, only=defect["source"])
    )
    with pytest.raises(AssertionError):
        FINDERS[defect.get("found_by", "products")](broken)


@pytest.mark.parametrize(
    "finder",
    # The others are what the tests above run.
    [name for name in FINDERS if name not in ("products", "passes", "refusals", "every_case")],
)
def test_finders_pass_without_a_defect(bench: Bench, finder: str) -> None:
    FINDERS[finder](bench)
