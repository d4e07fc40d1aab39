"""Every native operator of a CPU against float64 or its torch reference."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_muon.ops import builder, torch_operators
from deepspeed_muon.ops.torch_operators import Column
from tests.support.calls import Operations, calls
from tests.support.comparisons import close
from tests.support.fragments import momentum_pack, one_row, rates, unpack_apply
from tests.support.matrices import DTYPES
from tests.support.thinning import pairwise

pytestmark = [pytest.mark.kernels, pytest.mark.native]


@pytest.fixture(scope="module")
def ops() -> Any:
    return builder.load()


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


def test_bad_arguments_are_refused(ops: Any) -> None:
    flat, one = torch.ones(8), rates(0.1, 1.0)

    def refused(said: str, operator: Any, *arguments: Any) -> None:
        with pytest.raises(RuntimeError, match=said):
            operator(*arguments)

    strided = torch.ones(16)[::2]
    refused("gradient must be contiguous", ops.momentum_pack_, [flat], [strided], [flat], one_row(8), one)
    refused("its gradient", ops.momentum_pack_, [flat], [torch.ones(4)], [flat.clone()], one_row(4), one)
    refused("must be float32", ops.unpack_apply_, [flat.double()], [flat], one_row(8), one)
    refused("int64", ops.unpack_apply_, [flat], [flat.clone()], one_row(8).int(), one)
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
    rows = [
        (n % 2, start, (n + 1) % 2, target_start, numel, n)
        for n, (start, target_start, numel) in enumerate(FRAGMENTS)
    ]
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
        passes.momentum_pack_([fp32], [grad], [direction], one_row(numel), numbers[number : number + 1])
        values.copy_(fp32)
        expected[2][out].narrow(0, out_start, numel).copy_(direction)
    with on_threads(threads):
        passes.momentum_pack_(bufs, grads, outs, table, numbers)
        for actual, right in zip((bufs, grads, outs), expected, strict=True):
            assert all(map(torch.equal, actual, right))
        for tensor, start, out, out_start, numel, number in table.tolist():
            values = expected[0][tensor].narrow(0, start, numel)
            fp32, update = values.float(), expected[2][out].narrow(0, out_start, numel).float()
            passes.unpack_apply_([fp32], [update], one_row(numel), numbers[number : number + 1])
            values.copy_(fp32)
        passes.unpack_apply_(bufs, outs, table, numbers)
        assert all(map(torch.equal, bufs, expected[0])) and all(map(torch.equal, outs, expected[2]))


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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_largest_magnitudes(dtype: torch.dtype) -> None:
    table, _ = fragments(torch.Generator().manual_seed(0))
    tensors = [torch.randn(70_000).to(dtype), torch.zeros(70_000, dtype=dtype)]

    def largest() -> list[float]:
        magnitudes = torch_operators.largest_magnitudes(tensors, table)
        assert magnitudes.dtype == torch.float32
        return magnitudes.tolist()

    rows = table[:, [Column.PARTITION, Column.PARTITION_OFFSET, Column.NUMEL]].tolist()
    assert largest() == [float(tensors[i].narrow(0, start, n).abs().max().float()) for i, start, n in rows]
    assert largest()[1::2] == [0.0, 0.0]
    for value in (-1024.0, -math.inf):
        tensors[0][4010 + 39_999] = value
        assert largest()[2] == -value
    tensors[0][4010] = math.nan
    assert math.isnan(largest()[2]), "infinity does not hide it"
    assert torch_operators.largest_magnitudes([], table[:0]).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 31, 13), (0, 4, 8), (2, 0, 8), (520, 530), (2, 2, 200, 96)])
def test_frobenius_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    expected = torch.linalg.matrix_norm(x.double()).float()
    # torch sums all of a matrix in fp32 and rounds the norm to the matrix's dtype.
    loose = max(5e-6, 2 * torch.finfo(dtype).eps)
    for stored in (x, x.mT, x.repeat_interleave(2, dim=-1)[..., ::2]):
        close(torch_operators.frobenius_norms(stored), expected, rtol=loose, atol=0)
