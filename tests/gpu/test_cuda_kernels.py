"""Every CUDA kernel on the device at hand, against float64. Run by scripts/gpu_session.py; skipped without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.cuda_library import (
    DTYPE,
    MISALIGNED,
    NOT_COMPILED,
    OK,
    SHAPE,
    Kernels,
    build,
    find_nvcc,
    gram,
    product_of,
)

pytestmark = pytest.mark.gpu

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half of the distance between neighbours, relative: the one rounding of a result."""

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


@pytest.fixture(params=["sm80", "sm90"])
def kernel(request: pytest.FixtureRequest, kernels: Kernels) -> str:
    status = kernels.available(request.param)
    if request.param == "sm90" and torch.cuda.get_device_capability() == (9, 0):
        assert status == OK, kernels.name(status)
    if status != OK:
        pytest.skip(kernels.name(status))
    return str(request.param)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def lower_mirrored(x: Tensor) -> Tensor:
    return x.tril() + x.tril(-1).mT


def check(d: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, diag: float) -> None:
    assert torch.equal(d.view(torch.int16), d.mT.contiguous().view(torch.int16))
    exact = alpha * a.double() @ b.double().mT
    size = abs(alpha) * a.double().abs() @ b.double().abs().mT + abs(diag)
    if c is not None:
        exact, size = exact + beta * c.double(), size + abs(beta) * c.double().abs()
    exact = lower_mirrored(exact + diag * torch.eye(a.shape[1], dtype=torch.float64, device=a.device))
    # A tensor core adds 16 products to its sum at once: it shifts all of them to the largest one and truncates at a
    # float32's last bit, or one before. That is at most 2^-22 of the terms' sizes for each such step; four more for the
    # epilogue's three IEEE operations and the first sum.
    slack = 2.0**-22 * (-(-a.shape[-1] // 16) + 4)
    bound = UNIT[d.dtype] * exact.abs() + slack * lower_mirrored(size)
    excess = ((d.double() - exact).abs() / bound).max()
    assert float(excess) <= 1, f"{float(excess):.3g} times the bound"


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sym_gemm(kernels: Kernels, kernel: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    batch, m, k = shape
    a = random(batch, m, k, dtype=dtype)
    b = a + 0.01 * random(batch, m, k, dtype=dtype)
    c = lower_mirrored(random(batch, m, m, dtype=dtype))
    for added, alpha, beta, diag in ((None, 1.0, 0.0, 0.0), (c, 2.0315, -4.775, 3.4445), (c, -1.0, 0.5, 0.0)):
        d = torch.full_like(c, torch.nan)
        assert kernels.sym_gemm(kernel, a, b, added, d, alpha=alpha, beta=beta, diag=diag) == OK
        check(d, a, b, added, alpha, beta, diag)


def test_the_same_input_gives_the_same_bits(kernels: Kernels, kernel: str) -> None:
    # A race shows as a result that changes; 50 runs over a ring of outputs.
    a = random(4, 1024, 768, dtype=torch.float16)
    first = torch.empty(4, 1024, 1024, dtype=torch.float16, device="cuda")
    assert kernels.sym_gemm(kernel, a, a, None, first) == OK
    for _ in range(50):
        d = torch.full_like(first, torch.nan)
        assert kernels.sym_gemm(kernel, a, a, first, d, beta=1.0) == OK
        again = torch.full_like(first, torch.nan)
        assert kernels.sym_gemm(kernel, a, a, None, again) == OK
        assert torch.equal(again, first)


def test_c_may_be_the_output(kernels: Kernels, kernel: str) -> None:
    a = random(2, 648, 256, dtype=torch.bfloat16)
    c = lower_mirrored(random(2, 648, 648, dtype=torch.bfloat16))
    d = c.clone()
    assert kernels.sym_gemm(kernel, a, a, d, d, alpha=0.5, beta=2.0) == OK
    check(d, a, a, c, 0.5, 2.0, 0.0)


def test_nothing_outside_of_the_output_is_written(kernels: Kernels, kernel: str) -> None:
    wide = torch.full((3, 280, 296), 7.0, dtype=torch.float16, device="cuda")
    a = random(3, 280, 400, dtype=torch.float16)[:, 8:272, 16:]
    d = wide[:, 8:272, 16:280]
    assert kernels.sym_gemm(kernel, a, a, None, d) == OK
    check(d.contiguous(), a, a, None, 1.0, 0.0, 0.0)
    d.fill_(7.0)
    assert bool((wide == 7.0).all())


def test_what_is_refused(kernels: Kernels, kernel: str) -> None:
    d = torch.empty(1, 128, 128, dtype=torch.float16, device="cuda")
    a = random(1, 128, 68, dtype=torch.float16)
    assert kernels.sym_gemm(kernel, a, a, None, d) == SHAPE
    a = random(1, 128, 72, dtype=torch.float16)[:, :, 4:68]
    assert kernels.sym_gemm(kernel, a, a, None, d) == MISALIGNED
    a = random(1, 128, 64)
    assert kernels.sym_gemm(kernel, a, a, None, d) == DTYPE
    assert kernels.available("sm90") in (OK, NOT_COMPILED, -5)


def test_in_a_cuda_graph(kernels: Kernels, kernel: str) -> None:
    a = random(2, 512, 512, dtype=torch.float16)
    d = torch.empty_like(a)
    assert kernels.sym_gemm(kernel, a, a, None, d) == OK
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert kernels.sym_gemm(kernel, a, a, None, d) == OK
    a.copy_(random(2, 512, 512))
    d.fill_(torch.nan)
    graph.replay()
    check(d, a, a, None, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, *UNIT], ids=str)
@pytest.mark.parametrize("n", [1, 7, 8, 4099, 3_000_001])
@pytest.mark.parametrize("offsets", [(0, 0, 0), (4, 4, 4), (3, 7, 5), (3, 3, 3), (0, 0, 1)], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_pack(
    kernels: Kernels, n: int, offsets: tuple[int, int, int], dtype: torch.dtype, nesterov: bool
) -> None:
    around = [random(n + 16), random(n + 16), random(n + 16, dtype=dtype)]
    before = [each.clone() for each in around]
    views = [each[offset : offset + n] for each, offset in zip(around, offsets, strict=True)]
    momentum, grad = (view.double() for view in views[:2])
    size = momentum.abs() + grad.abs()
    momentum += 0.05 * (grad - momentum)
    direction = grad + 0.95 * (momentum - grad) if nesterov else momentum
    assert kernels.momentum_pack(*views, decay=0.95, nesterov=nesterov) == OK
    assert_close(views[0], momentum, torch.float32, size)
    assert_close(views[2], direction, dtype, size)
    for each, old, offset in zip(around, before, offsets, strict=True):
        assert torch.equal(each[:offset], old[:offset]) and torch.equal(each[offset + n :], old[offset + n :])


@pytest.mark.parametrize("dtype", [torch.float32, *UNIT], ids=str)
@pytest.mark.parametrize("n", [1, 7, 8, 4099, 3_000_001])
@pytest.mark.parametrize("offsets", [(0, 0), (4, 4), (3, 7), (3, 3), (0, 1)], ids=str)
def test_unpack_apply(kernels: Kernels, n: int, offsets: tuple[int, int], dtype: torch.dtype) -> None:
    around = [random(n + 16), random(n + 16, dtype=dtype)]
    before = [each.clone() for each in around]
    param, update = (each[offset : offset + n] for each, offset in zip(around, offsets, strict=True))
    expected = 0.998 * param.double() - 0.02 * update.double()
    size = param.double().abs() + update.double().abs()
    assert kernels.unpack_apply(param, update, lr_scale=0.02, decay=0.998) == OK
    assert_close(param, expected, torch.float32, size)
    assert torch.equal(around[1], before[1])
    assert torch.equal(around[0][: offsets[0]], before[0][: offsets[0]])
    assert torch.equal(around[0][offsets[0] + n :], before[0][offsets[0] + n :])


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, size: Tensor) -> None:
    # In float32 at most four roundings, each of 2^-24 of a value that is at most the inputs' ``size``: of the weight
    # (0.05, say), of a difference and of a fused multiply-add, and with Nesterov's blend of the last two again, where
    # the first error enters with a factor below 1. So 2^-21 of the size is twice the bound. Then one rounding to dtype,
    # which below the smallest normal number is half of the smallest subnormal one.
    unit = UNIT.get(dtype, 0.0)
    bound = unit * expected.abs().clamp(min=torch.finfo(dtype).smallest_normal) + (1 + unit) * 2.0**-21 * size
    assert bool(((actual.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 4e-2), (torch.bfloat16, 3e-1)], ids=str)
@pytest.mark.parametrize("shape", [(512, 2048), (1000, 3000), (2048, 5464)], ids=str)
def test_gram_newton_schulz(
    kernels: Kernels, kernel: str, shape: tuple[int, int], dtype: torch.dtype, bound: float
) -> None:
    x = random(1, *shape)
    result = gram(x, dtype, product_of(kernels, kernel))
    exact = x.double() / x.double().norm()
    for _ in range(5):
        square = exact @ exact.mT
        exact = 3.4445 * exact + (-4.775 * square + 2.0315 * square @ square) @ exact
    assert float((result.double() - exact).norm() / exact.norm()) <= bound
    # The square roots of the Gram matrices' largest eigenvalues: a singular value decomposition in fp64 takes minutes.
    grams = (y.double() @ y.double().mT for y in (result, exact))
    largest, expected = (float(torch.linalg.eigvalsh(each)[0, -1]) ** 0.5 for each in grams)
    assert abs(largest / expected - 1) <= 0.05


def test_the_registered_operators_agree_with_their_references(kernels: Kernels) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed_muon.ops import library, reference

    ops = library.load()
    a = random(2, 1024, 2048, dtype=torch.float16)
    c = lower_mirrored(random(2, 1024, 1024, dtype=torch.float16))
    actual = ops.sym_gemm(a, a, c, 0.01, -1.0, 3.0)
    expected = reference.sym_gemm(a, a, c, 0.01, -1.0, 3.0)
    assert float((actual - expected).float().norm() / expected.float().norm()) <= 2e-3
    assert torch.equal(actual, actual.mT)
