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
from deepspeed_muon.ops.self_test import product_shapes
from deepspeed_muon.reference import newton_schulz
from tests.gpu import sanitized
from tests.support import binding_cases, cuda_bench
from tests.support import cuda_cases as cases
from tests.support.comparisons import close, within
from tests.support.cuda_bench import ANY_TIME, EARLY, LATE, Bench, Binding
from tests.support.cuda_cases import Inputs
from tests.support.cuda_library import DEVICE, FLAT_ROWS, MISALIGNED, OK, ApplyRow, PackRow, gram, product_of
from tests.support.matrices import matrix
from tests.support.planted import planted
from tests.support.rounding import QUINTIC, iteration_limit
from tests.support.thinning import pairwise

pytestmark = pytest.mark.skipif(cuda_bench.unavailable() is not None, reason=str(cuda_bench.unavailable()))

# Fewer k than a stage, one tile, tiles that end in the middle, several tiles for a block, and many k.
SHAPES = [(1, 8, 8), (1, 128, 64), (1, 136, 72), (2, 264, 200), (3, 512, 8), (1, 384, 1016)]


# Both dtypes, every way in which asynchronous work ends, one and several multiprocessors.
WAYS = [(torch.float16, ANY_TIME, 3), (torch.bfloat16, LATE, 1), (torch.float16, EARLY, 1)]


@pytest.mark.parametrize(("shape", "way"), pairwise(product(SHAPES, range(len(WAYS)))))
def test_sym_gemm(bench: Bench, shape: tuple[int, int, int], way: int) -> None:
    dtype, mode, processors = WAYS[way]
    bench.configure(processors=processors, mode=mode, seed=100 * way + 1)
    cases.sym_gemm(bench, shape, dtype, Inputs("cpu", way))


@pytest.mark.parametrize("case", [cases.nothing_outside_is_written, cases.c_may_be_the_output])
def test_operands_that_are_views_or_the_output(bench: Bench, case: Callable[[Bench, Inputs], None]) -> None:
    bench.configure(processors=2)
    case(bench, Inputs("cpu"))


def test_what_the_sanitizers_run(bench: Bench) -> None:
    bench.configure(major=9, processors=2)
    calls = sanitized.kernels_of(bench, "cpu")
    assert {"sym_gemm", "momentum_pack_int8", "divide_transposed"} <= calls.keys()
    for call in calls.values():
        call()


def test_what_is_refused(bench: Bench) -> None:
    refusals(bench)
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


def unaligned_arrays(kernels: Bench) -> None:
    """Arrays of float32 of which one is not on a boundary of its elements."""
    data = torch.zeros(3, 16)
    kernels.configure()
    for wrong in range(3):
        row = [each.data_ptr() + 2 * (number == wrong) for number, each in enumerate(data)]
        pack, apply = PackRow(*row, 8, 0.9, 1), ApplyRow(*row[:2], 8, 0.1, 1.0)
        assert kernels.library.muon_momentum_pack(ctypes.byref(pack), 1, 0, 0, 0, None) == MISALIGNED
        if wrong < 2:
            assert kernels.library.muon_unpack_apply(ctypes.byref(apply), 1, 0, 0, None) == MISALIGNED


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
    for found in (d[1, -128:, -256:], d[1, -256:, -128:].mT):
        close(found.double(), exact, rtol=2.0**-10, atol=1e-3)


def more_tiles_than_2_31(kernels: Bench) -> None:
    """A block whose second and last tile is that of the last of 20,000 equal matrices."""
    a, d = far(1, SIDE, 64, dtype=torch.float16), far(1, SIDE, SIDE, dtype=torch.float16)
    a[0, -128:] = Inputs("cpu")(128, 64, dtype=torch.float16)
    grid, tiles = (1 << 31) - 1, 20000 * TILES
    kernels.configure(processors=grid, blocks=(tiles - 1 - grid, 1))
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


def long_fragments_of_codes(kernels: Bench) -> None:
    """The last tile of a fragment of more than 2^31 elements in 8 bits."""
    n = (1 << 31) + 8192
    codes, scales, grad, out = (
        far(n, dtype=torch.int8),
        far(n // 256, dtype=FP32),
        far(n, dtype=BF16),
        far(n, dtype=BF16),
    )
    inputs = Inputs("cpu")
    codes[-4096:], grad[-4096:], scales[-16:] = inputs(4096, dtype=torch.int8), inputs(4096, dtype=BF16), 0.1
    ends = [each[-4096:].clone() for each in (codes, grad, out)]
    expected = [ends[0], scales[-16:].clone(), *ends[1:]]
    table, rates = torch.tensor([(0, 0, 0, 0, 4096, 0)]), torch.tensor([(0.9, 0.0)], dtype=torch.float64)
    blocks = torch.tensor([(0, 0)])
    flat_passes("torch").momentum_pack_int8(*([each] for each in expected), table, rates, blocks)
    kernels.configure(processors=n // 4096, blocks=(n // 4096 - 1, 1))
    fragment = (codes, grad, out), 0.9
    assert kernels.momentum_pack_int8([fragment], [(0, scales)], nesterov=False) == OK
    for found, right in zip((codes[-4096:], scales[-16:], grad[-4096:], out[-4096:]), expected, strict=True):
        assert torch.equal(found, right)


def test_c_that_is_not_used_may_hold_anything(bench: Bench) -> None:
    bench.configure()
    a = Inputs("cpu")(1, 136, 64, dtype=torch.float16)
    c = torch.full((1, 136, 136), torch.nan, dtype=torch.float16)
    d = torch.empty_like(c)
    assert bench.sym_gemm(a, a, c, d, beta=0.0) == OK
    assert d.isfinite().all()


def test_only_the_lower_triangle_of_c_is_read(bench: Bench) -> None:
    bench.configure()
    inputs = Inputs("cpu")
    a = inputs(1, 264, 64, dtype=torch.bfloat16)
    c = cases.lower_mirrored(inputs(1, 264, 264, dtype=torch.bfloat16))
    first, second = torch.empty_like(c), torch.empty_like(c)
    assert bench.sym_gemm(a, a, c, first, beta=1.5) == OK
    assert bench.sym_gemm(a, a, c.tril() + 1000 * torch.ones_like(c).triu(1), second, beta=1.5) == OK
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.bfloat16, "gaussian"),
        (torch.float16, "low-rank"),
        (torch.bfloat16, "ill-conditioned"),
        (torch.float16, "tiny"),
        (torch.bfloat16, "huge"),
    ],
    ids=str,
)
def test_as_the_products_of_gram_newton_schulz(bench: Bench, dtype: torch.dtype, kind: str) -> None:
    bench.configure(processors=2)
    x = matrix(kind, 136, 344)
    result = gram(x.unsqueeze(0), dtype, product_of(bench))[0].double()
    expected = newton_schulz(x, QUINTIC)
    error = float((result - expected).norm() / expected.norm())
    within(error, iteration_limit(x, dtype), "orthogonalised")
    largest, right = (float(torch.linalg.matrix_norm(y, ord=2)) for y in (result, expected))
    assert abs(largest / right - 1) <= 0.05


def products(kernels: Bench) -> None:
    """Products of two matrices of six tiles, in twelve orders of everything that may be in any order."""
    for seed in range(12):
        kernels.configure(processors=1, mode=(ANY_TIME, LATE, EARLY)[seed % 3], seed=1000 * seed + 1)
        cases.sym_gemm(kernels, (2, 264, 520), torch.float16, Inputs("cpu", seed))


def turned(kernels: Bench) -> None:
    """Two matrices of some squares each, by one block and by several."""
    for processors in (1, 3):
        kernels.configure(processors=processors)
        cases.divide_transposed(kernels, (2, 130, 70), 1, (FP32, BF16), Inputs("cpu"))


def whole_sectors(kernels: Bench) -> None:
    """A warp that turns a matrix reads and writes whole sectors of 32 bytes: each byte once."""
    x, out = Inputs("cpu")(2, 96, 64, dtype=FP32), torch.empty(2, 64, 96, dtype=BF16)
    kernels.configure()
    kernels.library.bench_count_sectors()
    assert kernels.divide_transposed(x, torch.ones(2, 1, 1), out) == OK
    assert kernels.library.bench_sectors() == (x.nbytes + out.nbytes) // 32


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
    cases.what_is_refused(kernels, Inputs("cpu"))


@pytest.fixture(scope="module")
def binding(bench: Bench) -> Binding:
    return cuda_bench.unchanged_binding(bench)


@pytest.mark.parametrize("case", binding_cases.CASES)
def test_the_binding(binding: Binding, case: Callable[[Binding], None]) -> None:
    case(binding)


TABLES = planted("planted_kernel_defects.toml")
FINDERS: dict[str, Callable[[Any], None]] = {
    finder.__name__: finder
    for finder in (
        products, passes, turned, whole_sectors, refusals, unaligned_arrays, beyond_2_31, more_tiles_than_2_31,
        transposed_beyond_2_31, long_fragments, long_fragments_of_codes, binding_cases.every_case,
    )
}  # fmt: skip


@pytest.mark.parametrize("late", TABLES["late"], ids=lambda each: each["harm"])
def test_small_products_do_not_find_what_the_self_test_must(
    bench: Bench, tmp_path: Path, late: dict[str, str]
) -> None:
    small, large = product_shapes(132)
    broken = cuda_bench.build(tmp_path, {late["old"]: late["new"]}, beside=bench.folder, only=late["source"])
    broken.configure(processors=132)
    cases.sym_gemm(broken, small, torch.float16, Inputs("cpu"))
    # As many tiles for each block as the large one has, and as many blocks of k.
    batch, _, k = large
    broken.configure(processors=1)
    with pytest.raises(AssertionError):
        cases.sym_gemm(broken, (batch * 55 // 132, 128, k), torch.float16, Inputs("cpu"))


ALWAYS_PLANTED = {
    "the last tile is not cut",
    "elements behind a row are read",
    "the old scale of a cut block is read where those of the others are",
    "half of a stage's bytes are waited for",
    "any address of c is taken",
    "the copy engine's distance of matrices in 32 bits",
    "the output is taken by the number of the momentum",
}
"""Of each kernel, and what large operands find; the others are left to ``--full``: each compiles a kernel anew."""


@pytest.mark.parametrize(
    "defect",
    [
        pytest.param(each, id=each["harm"], marks=() if each["harm"] in ALWAYS_PLANTED else pytest.mark.full)
        for each in TABLES["defect"]
    ],
)
def test_a_planted_defect_is_found(bench: Bench, tmp_path: Path, defect: dict[str, str]) -> None:
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
def test_what_finds_a_defect_passes_without_it(bench: Bench, finder: str) -> None:
    FINDERS[finder](bench)
