"""Every native operator against float64 or its torch reference, and as a citizen of torch: opcheck, fakes, compile."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import restart_steps
from deepspeed_muon.ops import library, torch_operators
from deepspeed_muon.reference import newton_schulz
from tests.support.calls import calls
from tests.support.comparisons import close, within
from tests.support.fragments import momentum_pack, rates, unpack_apply, whole
from tests.support.matrices import DTYPES, matrix
from tests.support.rounding import iteration_limit
from tests.support.thinning import each_value, pairwise

pytestmark = [pytest.mark.kernels, pytest.mark.native]

METHODS = [
    base + variant
    for base in ("standard", "gram")
    for variant in ("", "+symmetric", "+tiles", "+vectors", "+generic")
]
SHAPES = [(1, 1), (1, 9), (9, 1), (17, 17), (31, 13), (96, 200), (200, 96), (520, 530)]
FLAT = [value for row in resolve_schedule("quintic") for value in row]


@pytest.fixture(scope="module")
def ops() -> Any:
    return library.load()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.lru_cache(maxsize=64)
def case(kind: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return a matrix and its result in float64; shared, so not to be mutated."""
    x = matrix(kind, *shape)
    return x, newton_schulz(x, resolve_schedule("quintic"))


@functools.lru_cache(maxsize=256)
def limit_of(kind: str, shape: tuple[int, int], dtype: torch.dtype, order: str) -> float:
    return iteration_limit(case(kind, shape)[0], dtype, [order])


def run(ops: Any, x: Tensor, method: str, dtype: torch.dtype, coefficients: list[float] = FLAT) -> Tensor:
    if method.endswith("+tiles") and (dtype != torch.bfloat16 or not ops.tiles_available()):
        pytest.skip("tiles are for bfloat16, on processors that have them")
    if method.endswith("+vectors") and (dtype != torch.bfloat16 or not ops.vectors_available()):
        pytest.skip("vectors are for bfloat16, on processors that multiply it")
    rows = tuple(zip(coefficients[::3], coefficients[1::3], coefficients[2::3], strict=True))
    restarts = sorted(restart_steps(rows, dtype))
    return ops.orthogonalize(x, coefficients, method, restarts, dtype, 1e-12)


@pytest.mark.parametrize(
    ("shape", "kind", "method", "dtype"),
    pairwise(
        case
        for case in product(
            SHAPES, ["gaussian", "low-rank", "ill-conditioned", "tiny", "huge"], METHODS, DTYPES
        )
        if case[3] == torch.bfloat16 or not case[2].endswith(("+tiles", "+vectors"))
    ),
)
def test_orthogonalize_matches_float64(
    ops: Any, shape: tuple[int, int], kind: str, method: str, dtype: torch.dtype
) -> None:
    x, expected = case(kind, shape)
    before = x.clone()
    result = run(ops, x, method, dtype)
    assert result.shape == x.shape and result.dtype == dtype and result.is_contiguous()
    assert torch.equal(x, before), "the input is not mutated"
    error = float((result.double() - expected).norm() / expected.norm())
    within(error, limit_of(kind, shape, dtype, method.partition("+")[0]), "orthogonalised")
    if min(shape) >= 64:
        largest = float(torch.linalg.matrix_norm(result.double(), 2))
        assert largest == pytest.approx(float(torch.linalg.matrix_norm(expected, 2)), rel=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_batches_and_storage_orders_give_the_single_result(ops: Any, method: str) -> None:
    batch = torch.randn(2, 3, 24, 64)
    together = run(ops, batch, method, torch.float32)
    turned = run(ops, batch.mT, method, torch.float32)
    assert together.shape == batch.shape and turned.shape == batch.mT.shape
    strided = run(ops, torch.stack([batch, batch], dim=-1)[..., 0], method, torch.float32)
    for i in range(2):
        for j in range(3):
            single = run(ops, batch[i, j], method, torch.float32)
            for other in (together[i, j], turned[i, j].mT, strided[i, j]):
                close(other, single, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_on_several_threads(ops: Any, threads: int) -> None:
    batch = torch.randn(5, 70, 90)
    with on_threads(threads):
        result = run(ops, batch, "standard", torch.float32)
    for index in range(5):
        expected = newton_schulz(batch[index], resolve_schedule("quintic"))
        error = float((result[index].double() - expected).norm() / expected.norm())
        within(error, iteration_limit(batch[index], torch.float32), "orthogonalised")


@pytest.mark.parametrize(
    ("name", "method"),
    each_value(product(["polar_express", "polar_express_5", "cans", "deepseekv4"], METHODS)),
)
def test_every_schedule(ops: Any, name: str, method: str) -> None:
    rows = resolve_schedule(name)  # type: ignore[arg-type]
    x = matrix("gaussian", 40, 100)
    result = run(ops, x, method, torch.float32, [value for row in rows for value in row])
    expected = newton_schulz(x, rows)
    error = float((result.double() - expected).norm() / expected.norm())
    within(error, iteration_limit(x, torch.float32, [method.partition("+")[0]], rows), "orthogonalised")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_zero_stays_zero_and_nonfinite_shows(ops: Any, method: str, dtype: torch.dtype) -> None:
    assert not run(ops, torch.zeros(8, 32), method, dtype).any()
    for value in (math.nan, math.inf):
        bad = torch.ones(8, 32)
        bad[3, 3] = value
        assert not torch.isfinite(run(ops, bad, method, dtype)).any()


def test_a_matrix_whose_squares_overflow_is_still_orthogonalised(ops: Any) -> None:
    x = matrix("gaussian", 40, 100)
    torch.testing.assert_close(
        run(ops, x * 2.0**90, "standard", torch.float32), run(ops, x, "standard", torch.float32)
    )


def test_empty_batches(ops: Any) -> None:
    assert run(ops, torch.empty(0, 4, 8), "gram", torch.float32).shape == (0, 4, 8)
    assert ops.sym_gemm(torch.empty(0, 4, 8), torch.empty(0, 4, 8), None, 1.0, 0.0, 0.0).shape == (0, 4, 4)


def test_bad_arguments_are_refused(ops: Any) -> None:
    x, flat, one = torch.ones(4, 8), torch.ones(8), rates(0.1, 1.0)

    def refused(said: str, operator: Any, *arguments: Any) -> None:
        with pytest.raises(RuntimeError, match=said):
            operator(*arguments)

    refused("rows, cols", ops.orthogonalize, x[0], FLAT, "gram", [3], torch.float32, 1e-12)
    refused("triples", ops.orthogonalize, x, FLAT[:4], "gram", [3], torch.float32, 1e-12)
    refused("unknown method", ops.orthogonalize, x, FLAT, "newton", [3], torch.float32, 1e-12)
    refused("restart", ops.orthogonalize, x, FLAT, "gram", [5], torch.float32, 1e-12)
    refused("floating", ops.orthogonalize, x, FLAT, "gram", [3], torch.int32, 1e-12)
    refused("eps", ops.orthogonalize, x, FLAT, "gram", [3], torch.float32, 0.0)
    refused("one dtype", ops.sym_gemm, x, x, torch.ones(4, 4).half(), 1.0, 1.0, 0.0)
    refused("must have shape", ops.sym_gemm, x, x, torch.ones(8, 8), 1.0, 1.0, 0.0)
    refused("rows, cols", ops.frobenius_norms, x[0])
    refused("must be float32, bfloat16 or float16", ops.frobenius_norms, x.double())
    for norms in (torch.ones(2, 1, 1), torch.ones(1, 1, 1).double(), torch.ones(1)):
        refused("norms \\(batch, 1, 1\\)", ops.divide_transposed, x[None], norms, torch.float32)
    strided = torch.ones(16)[::2]
    refused("gradient must be contiguous", ops.momentum_pack_, [flat], [strided], [flat], whole(8), one)
    refused("its gradient", ops.momentum_pack_, [flat], [torch.ones(4)], [flat.clone()], whole(4), one)
    refused("must be float32", ops.unpack_apply_, [flat.double()], [flat], whole(8), one)
    refused("int64", ops.unpack_apply_, [flat], [flat.clone()], whole(8).int(), one)
    for row, said in [
        ((1, 0, 0, 0, 8, 0), "outside"),
        ((0, 1, 0, 0, 8, 0), "outside"),
        ((0, 0, 0, 1, 8, 0), "outside"),
        ((0, 0, 1, 0, 8, 0), "outside"),
        ((0, -1, 0, 0, 8, 0), "outside"),
        ((0, 0, 0, 0, -1, 0), "outside"),
        ((0, 1 << 62, 0, 0, 1 << 62, 0), "outside"),
        ((0, 0, 0, 0, 8, 1), "no rates"),
    ]:
        table = torch.tensor([row])
        refused(said, ops.momentum_pack_, [flat], [flat], [flat.clone()], table, one)
        refused(said, ops.unpack_apply_, [flat], [flat.clone()], table, one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 40), (3, 33, 20), (2, 530, 100)])
def test_sym_gemm(ops: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a = torch.randn(shape).to(dtype) / math.sqrt(shape[-1])
    c = torch_operators.sym_gemm(a, a, None, 0.5, 0.0, 0.0)
    for addend, beta, diag in ((None, 0.0, 0.0), (c, -0.7, 2.0)):
        result = ops.sym_gemm(a, a, addend, 1.5, beta, diag)
        expected = torch_operators.sym_gemm(a, a, addend, 1.5, beta, diag)
        assert torch.equal(result, result.mT), "bitwise symmetric"
        # The sum is fp32 in both; the result is rounded once, on the diagonal perhaps twice. Two fp32 sums of a hundred
        # products in another order differ by some ten roundings of numbers up to 4.
        eps = torch.finfo(dtype).eps
        atol = 64 * eps if dtype == torch.float32 else 8 * eps
        close(result.double(), expected.double(), rtol=2 * eps, atol=atol)


def test_sym_gemm_of_two_different_factors(ops: Any) -> None:
    """The products of the iteration: two polynomials of one symmetric matrix, whose product is symmetric."""
    s = matrix("gaussian", 60, 60)
    s = (s + s.T) / 60
    square = (s @ s + (s @ s).T) / 2
    result = ops.sym_gemm(square, s, s, 1.0, 0.5, 0.0)
    close(result, square @ s + 0.5 * s, rtol=1e-4, atol=1e-6)
    assert torch.equal(result, result.T)


@pytest.mark.parametrize(
    ("numel", "dtype", "momentum", "nesterov"),
    pairwise(product([0, 1, 63, 100_003], DTYPES, [0.0, 0.3, 0.95], [True, False])),
)
def test_momentum_pack(ops: Any, numel: int, dtype: torch.dtype, momentum: float, nesterov: bool) -> None:
    buf, grad = torch.randn(numel), torch.randn(numel)
    out = torch.empty(numel, dtype=dtype)
    expected_buf, expected, grad_before = buf.clone(), torch.empty(numel, dtype=dtype), grad.clone()
    momentum_pack(torch_operators.momentum_pack_, expected_buf, grad, expected, momentum, nesterov)
    momentum_pack(ops.momentum_pack_, buf, grad, out, momentum, nesterov)
    # The same formula, with or without fused multiply-add: the last bit of sums of numbers of size 4.
    close(buf, expected_buf, rtol=3e-7, atol=1e-6)
    close(out, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(grad, grad_before), "at stage 0 the gradient is the caller's"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_cast_of_the_flat_passes_is_torchs(ops: Any, dtype: torch.dtype) -> None:
    """With momentum 0 the pass is a cast: ties, subnormals, overflow and NaN as torch rounds them."""
    special = [0.0, -0.0, math.nan, 65504.0, 65519.9, 65520.0, 1e38, 3.4e38, 6e-8, 3e-8, 1e-40]
    values = torch.cat([torch.tensor(special), torch.randn(5000) * 10.0 ** torch.randint(-9, 9, (5000,))])
    bits = torch.randint(0, 1 << 16, (5000,)).to(torch.int32) << 16  # with the half bit set or not: ties
    ties = (bits | 0x8000).view(torch.float32)
    values = torch.cat([values, ties[torch.isfinite(ties)]])
    out = torch.empty(values.numel(), dtype=dtype)
    momentum_pack(ops.momentum_pack_, values.clone(), values, out, 0.0, False)
    torch.testing.assert_close(out, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    every = (
        torch.arange(1 << 16).to(torch.int16).view(dtype)
    )  # all numbers of the format, infinities and NaNs too
    back = torch.zeros(every.numel())
    unpack_apply(ops.unpack_apply_, back, every, -1.0, 0.0)
    torch.testing.assert_close(back, every.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 63, 100_003])
def test_unpack_apply(ops: Any, numel: int, dtype: torch.dtype) -> None:
    param, update = torch.randn(numel), torch.randn(numel).to(dtype)
    expected, update_before = param.clone(), update.clone()
    unpack_apply(torch_operators.unpack_apply_, expected, update, 0.02, 0.99)
    unpack_apply(ops.unpack_apply_, param, update, 0.02, 0.99)
    close(param, expected, rtol=3e-7, atol=1e-6)
    assert torch.equal(update, update_before)


FRAGMENTS = [(0, 3, 4000), (4003, 5, 1), (4010, 8000, 40_000), (50_000, 60_000, 7), (50_100, 4100, 3000)]
"""Of fragments in two tensors and their lengths: out of order, and one that several threads share."""


def fragments(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a table of two tensors' fragments in two others, and different rates for each."""
    rows = [(n % 2, start, (n + 1) % 2, other, numel, n) for n, (start, other, numel) in enumerate(FRAGMENTS)]
    numbers = torch.rand(len(FRAGMENTS), 2, generator=generator, dtype=torch.float64)
    numbers[::2, 1] = 0.0  # without Nesterov
    return torch.tensor(rows), numbers


# The native operators have code of their own for every three dtypes.
TRIPLES = list(product(DTYPES, repeat=3))


@pytest.mark.parametrize(
    ("backend", "state", "gradient", "out_dtype", "threads"),
    [("ops", *dtypes, 1 + number % 2) for number, dtypes in enumerate(TRIPLES)]
    + pairwise(("torch", *dtypes, 1) for dtypes in TRIPLES),
)
def test_a_table_of_fragments(
    ops: Any, backend: str, state: torch.dtype, gradient: torch.dtype, out_dtype: torch.dtype, threads: int
) -> None:
    """Bit for bit what a call for each fragment makes of fp32 copies, rounded; nothing else changes."""
    generator = torch.Generator().manual_seed(0)
    table, numbers = fragments(generator)
    passes = ops if backend == "ops" else torch_operators

    def random(dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(70_000, generator=generator).to(dtype) for _ in range(2)]

    bufs, grads, outs = random(state), random(gradient), random(out_dtype)
    expected = [[tensor_before.clone() for tensor_before in tensors] for tensors in (bufs, grads, outs)]
    for tensor, start, out, out_start, numel, number in table.tolist():
        values = expected[0][tensor].narrow(0, start, numel)
        fp32, direction = values.float(), torch.empty(numel)
        grad = grads[tensor].narrow(0, start, numel).float()
        passes.momentum_pack_([fp32], [grad], [direction], whole(numel), numbers[number : number + 1])
        values.copy_(fp32)
        expected[2][out].narrow(0, out_start, numel).copy_(direction)
    with on_threads(threads):
        passes.momentum_pack_(bufs, grads, outs, table, numbers)
        for actual, right in zip((bufs, grads, outs), expected, strict=True):
            assert all(map(torch.equal, actual, right))
        for tensor, start, out, out_start, numel, number in table.tolist():
            values = expected[0][tensor].narrow(0, start, numel)
            fp32, update = values.float(), expected[2][out].narrow(0, out_start, numel).float()
            passes.unpack_apply_([fp32], [update], whole(numel), numbers[number : number + 1])
            values.copy_(fp32)
        passes.unpack_apply_(bufs, outs, table, numbers)
        assert all(map(torch.equal, bufs, expected[0])) and all(map(torch.equal, outs, expected[2]))


class Operations(TorchDispatchMode):
    """Counts the operations of torch that are not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("state", "gradient", "out_dtype"), pairwise(TRIPLES))
def test_torchs_passes_have_as_many_operations_for_50_fragments_as_for_one(
    state: torch.dtype, gradient: torch.dtype, out_dtype: torch.dtype
) -> None:
    """On a GPU each is a launch."""
    counts = []
    buf, grad, out = (torch.randn(400).to(dtype) for dtype in (state, gradient, out_dtype))
    for many in (1, 50):
        table = torch.tensor([(0, 8 * n, 0, 8 * n, 7, 0) for n in range(many)])
        with Operations() as operations:
            torch_operators.momentum_pack_([buf], [grad], [out], table, rates(0.9, 1.0))
            torch_operators.unpack_apply_([buf], [out], table, rates(0.02, 0.99))
        counts.append(operations.count)
    assert counts[0] == counts[1]


def test_the_work_of_the_host_is_proportional_to_the_fragments() -> None:
    """A fused weight that is stored transposed has one for every row of every block."""

    def calls_for(many: int) -> int:
        table = torch.tensor([(0, 8 * n, 0, 8 * n, 7, 0) for n in range(many)])
        params, updates = [torch.ones(3200)], [torch.ones(3200)]
        return calls(lambda: torch_operators.unpack_apply_(params, updates, table, rates(0.02, 0.99)))

    assert calls_for(400) < 6 * calls_for(100)


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_magnitudes(ops: Any, dtype: torch.dtype) -> None:
    table, _ = fragments(torch.Generator().manual_seed(0))
    table[:, 2:4] = table[:, :2]
    tensors = [torch.randn(70_000).to(dtype), torch.zeros(70_000, dtype=dtype)]
    assert torch.equal(
        ops.largest_magnitudes(tensors, table), torch_operators.largest_magnitudes(tensors, table)
    )
    assert ops.largest_magnitudes(tensors, table)[1::2].tolist() == [0.0, 0.0]
    for value in (-math.inf, math.nan, -65504.0, -0.0):
        tensors[0][4010 + 39_999] = value
        magnitudes = ops.largest_magnitudes(tensors, table)
        torch.testing.assert_close(
            magnitudes, torch_operators.largest_magnitudes(tensors, table), rtol=0, atol=0, equal_nan=True
        )
    tensors[0][4010] = math.nan
    tensors[0][4011] = math.inf
    assert ops.largest_magnitudes(tensors, table)[2].isnan(), "infinity does not hide it"
    assert ops.largest_magnitudes([], table[:0]).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 31, 13), (0, 4, 8), (2, 0, 8), (520, 530), (2, 2, 200, 96)])
def test_frobenius_norms(ops: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    expected = torch.linalg.matrix_norm(x.double()).float()
    for stored in (x, x.mT, x.repeat_interleave(2, dim=-1)[..., ::2]):
        norms = ops.frobenius_norms(stored)
        close(norms, expected, rtol=1e-6, atol=0)
        # torch sums all of a matrix in fp32 and rounds the norm to the matrix's dtype.
        loose = max(5e-6, 2 * torch.finfo(dtype).eps)
        close(norms, torch_operators.frobenius_norms(stored), rtol=loose, atol=0)


def test_frobenius_norms_beyond_fp32_squares(ops: Any) -> None:
    x = torch.tensor([[[1e30, 0.0]], [[3e-30, 4e-30]], [[math.inf, 1.0]], [[math.nan, 1.0]]])
    norms = ops.frobenius_norms(x)
    assert norms[0] == 1e30 and math.isinf(norms[2]) and math.isnan(norms[3])
    large, results = torch.randn(3, 300, 700), []
    for count in (1, 2):
        with on_threads(count):
            results.append(ops.frobenius_norms(large))
    assert torch.equal(*results), "the same bits with any number of threads"


def samples() -> list[tuple[str, tuple[Any, ...]]]:
    a, flat, int8 = torch.randn(2, 12, 20), torch.randn(40), torch.zeros(40, dtype=torch.int8)
    bf16, first, table, one = [torch.empty(40).bfloat16()], torch.tensor([(3, 0)]), whole(40), rates(0.9, 1)
    return [
        ("sym_gemm", (a, a, None, 1.0, 0.0, 0.0)),
        ("sym_gemm", (a[0], a[0], torch.eye(12), 2.0, 0.5, 1.0)),
        ("orthogonalize", (a, FLAT, "gram", [3], torch.bfloat16, 1e-12)),
        ("orthogonalize", (a.mT, FLAT, "standard+symmetric", [], torch.float32, 1e-12)),
        ("orthogonalize", (a[0], FLAT, "standard", [], torch.float32, 1e-12)),
        ("divide_transposed", (a.mT, torch.ones(2, 1, 1), torch.bfloat16)),
        ("frobenius_norms", (a.mT.half(),)),
        ("momentum_pack_", ([flat.clone()], [flat.clone()], bf16, table, one)),
        ("momentum_pack_int8_", ([int8], [torch.zeros(1)], [flat.clone()], bf16, table, one, first)),
        ("unpack_apply_", ([flat.clone()], [torch.randn(40).half()], table, rates(0.1, 0.9))),
        ("largest_magnitudes", ([flat.clone()], table)),
    ]


@pytest.mark.parametrize("index", range(len(samples())))
def test_opcheck(ops: Any, index: int) -> None:
    """Schema, autograd, and fakes: shapes, dtypes, strides and aliases without data are those of the real result."""
    name, arguments = samples()[index]
    torch.library.opcheck(getattr(ops, name).default, arguments)


def test_compile_fullgraph(ops: Any) -> None:
    """``aot_eager`` traces, runs the fakes and functionalises like the default backend, without its C++ compiler."""
    table, momentum, step_rates = whole(512), rates(0.9, 1.0), rates(0.1, 0.99)

    def step(buf: Tensor, grad: Tensor, param: Tensor) -> Tensor:
        out = torch.empty_like(grad, dtype=torch.bfloat16)
        ops.momentum_pack_([buf], [grad], [out], table, momentum)
        update = ops.orthogonalize(out.view(16, 32), FLAT, "gram", [1, 3], torch.bfloat16, 1e-12)
        ops.unpack_apply_([param], [update.reshape(-1)], table, step_rates)
        return ops.sym_gemm(update, update, None, 1.0, 0.0, 0.0)

    tensors = [torch.randn(512) for _ in range(3)]
    copies = [tensor.clone() for tensor in tensors]
    expected = step(*tensors)
    result = torch.compile(step, fullgraph=True, backend="aot_eager")(*copies)
    assert torch.equal(result, expected)
    for one, other in zip(tensors, copies, strict=True):
        assert torch.equal(one, other)
