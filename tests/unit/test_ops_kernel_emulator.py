"""The symmetric GEMM kernels, emulated: every element written once, bitwise symmetric, right up to rounding."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import restart_steps
from tests.support.kernel_emulator import SM80, SM90, Emulator, Maps, Shape, build
from tests.support.reference import polar

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

# Half of the distance between neighbours, relative: one rounding of a sum that is exact to 2^-20 or so.
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

# Issue 3: of the whole iteration, relative to the same polynomial in float64.
BOUND = {torch.float16: 4e-2, torch.bfloat16: 3e-1}


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Maps:
    return Maps(build(tmp_path_factory.mktemp("headers")))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def lower_mirrored(x: Tensor) -> Tensor:
    return x.tril() + x.tril(-1).mT


@pytest.mark.parametrize("shape", [SM80, SM90], ids=lambda shape: shape.name)
@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize(
    ("batch", "m", "k", "blocks"),
    [(1, 8, 8, 132), (1, 128, 64, 132), (2, 136, 40, 3), (1, 256, 72, 1), (3, 200, 128, 5), (1, 1160, 16, 7)],
)
def test_one_product(
    maps: Maps, shape: Shape, dtype: torch.dtype, batch: int, m: int, k: int, blocks: int
) -> None:
    # b is not a: the two halves of a diagonal tile are different sums, which only mirroring makes equal. a b^T is
    # symmetric up to that because b = a S with a symmetric S.
    a, noise = random(batch, m, k, dtype=dtype), random(batch, m, k, dtype=dtype, seed=1)
    b = a + 0.01 * noise
    c = lower_mirrored(random(batch, m, m, dtype=dtype, seed=2))
    emulator = Emulator(maps, shape, blocks=blocks)
    for added, beta in ((None, 0.0), (c, 0.0), (c, -4.775)):
        d, writes = emulator.sym_gemm(a, b, added, alpha=2.0315, beta=beta, diag=3.4445)
        assert (writes == 1).all()
        assert torch.equal(bits(d), bits(d.mT.contiguous()))
        product = 2.0315 * a.double() @ b.double().mT
        addend = beta * c.double()
        exact = lower_mirrored(product + addend + 3.4445 * torch.eye(m, dtype=torch.float64))
        # float32 sums of k terms and a rounded factor, then one rounding to dtype.
        size = 2.0315 * a.double().abs() @ b.double().abs().mT + addend.abs() + 4
        assert (
            (d.double() - exact).abs() <= UNIT[dtype] * exact.abs() + 2.0**-20 * lower_mirrored(size)
        ).all()


def test_c_that_is_not_used_may_hold_anything(maps: Maps) -> None:
    a = random(1, 136, 64, dtype=torch.float16)
    c = torch.full((1, 136, 136), torch.nan, dtype=torch.float16)
    d, _ = Emulator(maps, SM90).sym_gemm(a, a, c, beta=0.0)
    assert torch.isfinite(d).all()


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
def test_only_the_lower_triangle_of_c_is_read(maps: Maps, dtype: torch.dtype) -> None:
    a = random(1, 264, 64, dtype=dtype)
    c = lower_mirrored(random(1, 264, 264, dtype=dtype, seed=3))
    spoilt = c.tril() + torch.ones_like(c).triu(1) * 1000
    emulator = Emulator(maps, SM80)
    first, _ = emulator.sym_gemm(a, a, c, beta=1.5)
    second, _ = emulator.sym_gemm(a, a, spoilt, beta=1.5)
    assert torch.equal(bits(first), bits(second))


def gram_iteration(x: Tensor, dtype: torch.dtype, product: Callable[..., Tensor]) -> Tensor:
    """Gram Newton-Schulz with every symmetric product through ``product``; ``Q X`` in float32, as cuBLAS sums it."""
    x = (x / x.norm(dim=(-2, -1), keepdim=True)).to(dtype)
    coefficients = resolve_schedule("quintic")
    restarts = restart_steps(len(coefficients), dtype)
    q: Tensor | None = None
    r = product(x, x)
    for done, (a, b, c) in enumerate(coefficients, start=1):
        z = product(r, r, r, alpha=c, beta=b)
        q = product(z, q, q, beta=a) if q is not None else z + a * torch.eye(z.shape[-1], dtype=dtype)
        if done == len(coefficients):
            break
        if done in restarts:
            x, q = (q.float() @ x.float()).to(dtype), None
            r = product(x, x)
        else:
            rz = product(z, r, r, beta=a)
            r = product(z, rz, rz, beta=a)
    assert q is not None
    return (q.float() @ x.float()).to(dtype)


def spectrum(kind: str, m: int, n: int) -> Tensor:
    x = random(m, n, dtype=torch.float32, seed=5)
    if kind == "low-rank":
        x = x[:, : m // 4] @ random(m // 4, n, dtype=torch.float32, seed=6)
    if kind == "ill-conditioned":
        u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
        x = ((u * torch.logspace(0, -6, m, dtype=torch.float64)) @ v).float()
    return x * {"tiny": 1e-12, "huge": 1e12}.get(kind, 1.0)


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "low-rank", "ill-conditioned", "tiny", "huge"])
def test_as_the_products_of_gram_newton_schulz(maps: Maps, kind: str, dtype: torch.dtype) -> None:
    x = spectrum(kind, 200, 520)
    emulator = Emulator(maps, SM90, blocks=2)
    symmetric: list[bool] = []

    def product(a: Tensor, b: Tensor, c: Tensor | None = None, **scalars: float) -> Tensor:
        d, writes = emulator.sym_gemm(a, b, c, **scalars)
        symmetric.append(bool((writes == 1).all()) and torch.equal(bits(d), bits(d.mT.contiguous())))
        return d

    result = gram_iteration(x.unsqueeze(0), dtype, product)[0].double()
    assert len(symmetric) >= 9 and all(symmetric)
    expected = polar(x)
    assert float((result - expected).norm() / expected.norm()) <= BOUND[dtype]
    largest = (torch.linalg.matrix_norm(y, ord=2) for y in (result, expected))
    assert abs(float(next(largest)) / float(next(largest)) - 1) <= 0.05
