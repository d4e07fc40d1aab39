"""The Newton-Schulz iteration in torch: the approximate polar factor of every matrix in a batch.

Two methods evaluate the same polynomial of the input, with different costs and different rounding:

* ``standard`` iterates on ``X`` (m x n): ``X <- a X + (b A + c A^2) X`` with ``A = X X^T``.
* ``gram`` iterates on the Gram matrix ``R = X X^T`` (m x m) and collects the factor ``Q`` by which it multiplies ``X``
  at the end. ``R``, ``Z`` and ``Q`` are polynomials of one symmetric matrix, so they commute. This is cheaper for
  rectangular matrices; square ones gain nothing and run the standard iteration. In half precision ``R`` drifts away
  from the Gram matrix of ``Q X``, so the iteration restarts: it multiplies ``X`` by ``Q`` and computes ``R`` again.

The readable float64 counterpart is :func:`deepspeed_muon.reference.newton_schulz`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from deepspeed_muon.math.coefficients import SMALLEST_NORM, Coefficients, steps_that_need_an_exact_input

NsMethod = Literal["gram", "standard"]
GramOf = Callable[[Tensor], Tensor]
NsDtypeName = Literal["auto", "fp32", "bf16", "fp16"]

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Gram pays off from this long side / short side on (FLOP model: 49.3 against 63.3 m^3 at 2.67, 36 against 30 at 1), and
# from the second one on with kernels that compute half of a symmetric product (30 against 45, 20 against 20).
_GRAM_MIN_RATIO = 2.0
_GRAM_MIN_RATIO_OF_HALVES = 1.3

# The step after which the Gram iteration restarts first, and the steps from one restart to the next, chosen for five
# quintic steps. Steeper schedules restart more often in half precision, see restart_steps.
_RESTARTS: dict[torch.dtype, tuple[int, int]] = {
    torch.bfloat16: (1, 2),
    torch.float16: (3, 2),
    torch.float32: (3, 3),
    torch.float64: (3, 3),
}


@dataclass(frozen=True, slots=True)
class NsSettings:
    """Everything that determines the result of :func:`orthogonalize` besides its input.

    Attributes:
        coefficients: One ``(a, b, c)`` per iteration.
        method: ``gram`` or ``standard``.
        dtype: The dtype of the matrix products.
    """

    coefficients: tuple[Coefficients, ...]
    method: NsMethod = "gram"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Products:
    """The products of the iteration whose result is symmetric, of single matrices and of batches.

    Kernels that compute half of such a result and mirror it make Gram pay for more matrices.

    Attributes:
        gram: Returns ``X X^T``.
        multiply_add: Returns ``beta c + alpha a b`` of symmetric matrices that commute, with the arguments of
            ``torch.addmm``; ``None`` for ``addmm`` and ``baddbmm``.
    """

    gram: GramOf
    multiply_add: Callable[..., Tensor] | None = None


def resolve_ns_dtype(name: NsDtypeName, device: torch.device) -> torch.dtype:
    """Return the dtype in which the iteration runs on ``device``.

    ``auto`` is float16 on CUDA: its roundoff is an eighth of bfloat16's at the same speed, and nothing overflows
    because the input is normalised in float32 first. It is bfloat16 on CPUs with fast bfloat16 products, else float32.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.float16
    return torch.bfloat16 if device.type == "cpu" and _bf16_is_faster() else torch.float32


@functools.cache
def _bf16_is_faster() -> bool:
    """Return whether this CPU multiplies bf16 faster than fp32: with AMX, or AMD's with AVX512-BF16.

    Intel's without AMX (virtual machines often hide it) take 1.2 to 1.9 times as long in bf16 as in fp32
    (``benchmarks/results/newton_schulz-xeon-avx512*.md``).
    """
    if torch.cpu._is_amx_tile_supported():
        return True
    processors = Path("/proc/cpuinfo")
    is_amd = processors.exists() and "AuthenticAMD" in processors.read_text()
    return is_amd and torch.cpu._is_avx512_bf16_supported()


def orthogonalize(x: Tensor, *, settings: NsSettings, products: Products | None = None) -> Tensor:
    """Return the approximate polar factor of every matrix in a batch.

    The input is divided by its Frobenius norm in float32 *before* the cast to ``settings.dtype``: the other order would
    flush elements below 6e-8 to zero in float16.

    Args:
        x: ``(..., rows, cols)``, any floating dtype. Not mutated; views are not copied.
        settings: Polynomial, method and dtype.
        products: Kernels for the symmetric products; torch's by default.

    Returns:
        A new tensor of the same shape, in ``settings.dtype``. An all-zero matrix gives zero; a non-finite one gives
        non-finite values.

    Raises:
        ValueError: If ``x`` has fewer than two dimensions.
    """
    if x.ndim < 2:
        raise ValueError(f"orthogonalize needs (..., rows, cols), got shape {tuple(x.shape)}")
    if x.numel() == 0:
        return x.to(settings.dtype, copy=True)
    rows, cols = x.shape[-2:]
    short, long = min(rows, cols), max(rows, cols)
    batch = (x.mT if rows > cols else x).reshape(-1, short, long)
    iterate = _gram if runs_gram(short, long, settings.method, halves=products is not None) else _standard
    # The normalised matrices have no name here, so that the iteration can free them.
    result = iterate(_normalized(batch, settings), settings, products or _TORCH_PRODUCTS)
    result = result.reshape(*x.shape[:-2], short, long)
    return result.mT if rows > cols else result


def _normalized(x: Tensor, settings: NsSettings) -> Tensor:
    """Divide each matrix by its Frobenius norm, then cast."""
    if x.device.type == "cpu":
        # In half precision a CPU multiplies by the transpose of a tall matrix more slowly than by a copy of it, and a
        # cast to fp32 takes less time than sums and quotients of two dtypes.
        if settings.dtype.itemsize == 2:
            x = x.contiguous()
        if x.dtype.itemsize == 2:
            x = x.float()
            return x.div_(divisors(x, (-2, -1))).to(settings.dtype)
    # One pass over memory: the quotient is rounded as it is written.
    return torch.div(x, divisors(x, (-2, -1)), out=torch.empty_like(x, dtype=settings.dtype))


def divisors(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the norms over ``dim``, which is kept, in float32 or wider, none below the smallest normal number."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=dtype)
    if x.dtype != torch.float16:  # whose smallest number has the norm 6e-8
        # The squares of elements below 1e-19 underflow: a small norm is that of elements 2^80 times as large.
        is_small = norms < 1e-12
        if x.device.type != "cpu" or is_small.any():  # a host waits for a CPU anyway, and not for a GPU
            scaled = torch.linalg.vector_norm(x * 2.0**80, dim=dim, keepdim=True, dtype=dtype)
            norms = torch.where(is_small, scaled * 2.0**-80, norms)
    return norms.clamp_(min=SMALLEST_NORM)


_TORCH_PRODUCTS = Products(lambda x: (torch.mm if x.ndim == 2 else torch.bmm)(x, x.mT))


def _standard(x: Tensor, settings: NsSettings, products: Products) -> Tensor:
    """Iterate on ``x`` (batch, m, n) with m <= n. A batch of one runs as mm: bmm of one matrix is slower on CPUs."""
    single = x.shape[0] == 1
    if single:
        x = x[0]
    multiply_add = torch.addmm if single else torch.baddbmm
    symmetric = products.multiply_add or multiply_add
    for a, b, c in settings.coefficients:
        gram = products.gram(x)  # (batch, m, m)
        x = multiply_add(x, symmetric(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a X + (b A + c A^2) X
    return x.unsqueeze(0) if single else x


def iterate_columns(x: Tensor, *, settings: NsSettings, gram_of: GramOf) -> Tensor:
    """Run the iteration on some columns of normalised matrices; ``gram_of`` supplies the Gram matrix of all columns.

    ``X <- p(X X^T) X`` changes every column independently, given ``X X^T``, so a rank that gets the sum of the Gram
    matrices of all ranks can iterate on its own columns. ``gram`` needs the Gram matrix at the start and at each
    restart, ``standard`` in every step.

    ``x`` is ``(batch, m, columns)`` in ``settings.dtype``; a rank may have no columns. The complete matrices are
    ``m x n`` with ``m <= n`` and Frobenius norm at most 1. ``gram`` runs for square matrices too, unlike in
    :func:`orthogonalize`. ``gram_of`` also maps ``(m, columns)``, a batch of one.
    """
    return (_gram if settings.method == "gram" else _standard)(x, settings, Products(gram_of))


def runs_gram(short: int, long: int, method: NsMethod, *, halves: bool = False) -> bool:
    """Return whether a matrix with these sides runs the Gram iteration; ``halves`` as with :class:`Products`."""
    return method == "gram" and long >= (_GRAM_MIN_RATIO_OF_HALVES if halves else _GRAM_MIN_RATIO) * short


@functools.lru_cache(maxsize=64)
def restart_steps(coefficients: tuple[Coefficients, ...], dtype: torch.dtype) -> frozenset[int]:
    """Return the numbers of completed steps after which the Gram iteration restarts (never after the last).

    In half precision it also restarts before every step that needs an exact input. Without these restarts, five steps
    of Polar Express in bf16 put a singular value of 32 of 1,080 ill-conditioned matrices more than 10 % above the band,
    and with them none (``benchmarks/results/restarts-epyc-2cores.md``, with the time that they take).
    """
    first, distance = _RESTARTS[dtype]
    regular = frozenset(range(first, len(coefficients), distance))
    if dtype.itemsize > 2:
        return regular
    return regular | {step - 1 for step in steps_that_need_an_exact_input(coefficients)}


def _gram(x: Tensor, settings: NsSettings, products: Products) -> Tensor:
    """Iterate on the Gram matrix of ``x`` (batch, m, n) with m <= n; ``X <- Q X`` at each restart and at the end.

    Every step multiplies ``X`` by ``P = a I + Z`` with ``Z = b R + c R^2``, so ``Q <- P Q`` and ``R <- P R P``.
    """
    steps = len(settings.coefficients)
    restarts = restart_steps(settings.coefficients, settings.dtype)
    single = x.shape[0] == 1
    if single:
        x = x[0]
    multiply_add = products.multiply_add or (torch.addmm if single else torch.baddbmm)
    q: Tensor | None = None  # (batch, m, m), as R and Z; None stands for the identity
    r = products.gram(x)
    for done, (a, b, c) in enumerate(settings.coefficients, start=1):
        z = multiply_add(r, r, r, beta=b, alpha=c)
        if q is None:
            q = z.clone()
            q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            q = multiply_add(q, z, q, beta=a)
        # Memory is freed early: there are never more than four matrices like R, and only one while there are two of X.
        if done == steps:
            del r, z
            break
        if done in restarts:
            del r, z
            x = q @ x
            r, q = products.gram(x), None
        else:
            rz = multiply_add(r, z, r, beta=a)  # a R + R Z = R P
            del r
            r = multiply_add(rz, z, rz, beta=a)
            del z, rz
    assert q is not None
    result = q @ x
    return result.unsqueeze(0) if single else result


@functools.lru_cache(maxsize=4096)
def orthogonalize_flops(rows: int, cols: int, iteration: NsSettings | None = None) -> float:
    """Return the floating-point operations of orthogonalising one ``rows x cols`` matrix: 5 standard steps by default.

    With ``m`` the short and ``n`` the long side, a standard step is ``X X^T`` (``2 m^2 n``), the square of the Gram
    matrix (``2 m^3``) and a product with ``X`` (``2 m^2 n``). A step of the Gram iteration has up to four products of
    ``2 m^3``. It multiplies with ``X`` twice, and twice more for every restart.
    """
    short, long = min(rows, cols), max(rows, cols)
    squares = passes = steps = 5 if iteration is None else len(iteration.coefficients)
    if iteration is not None and runs_gram(short, long, iteration.method):
        restarts = restart_steps(iteration.coefficients, iteration.dtype)
        squares, fresh = 0, True
        for done in range(1, steps + 1):
            squares += 1 if fresh else 2
            fresh = done in restarts
            if done < steps and not fresh:
                squares += 2
        passes = 1 + len(restarts)
    return passes * 4.0 * short * short * long + squares * 2.0 * short**3
