"""Measures how well a matrix was orthogonalised: norm bounds for every result, spectral estimates for sampled ones.

Let ``p`` be the composition of all Newton-Schulz polynomials and ``s`` the singular values of the normalised input
(``sum s^2 = 1``). The result ``X`` has the singular values ``p(s)``, which bounds its Frobenius norm::

    min p(s)/s  <=  ||X||_F  <=  max p(s) * sqrt(min(rows, cols))

The spectrum of a sampled matrix is estimated by stochastic Lanczos quadrature (Ubaru, Chen, Saad 2017,
doi 10.1137/16M1104974): a few Lanczos steps on ``X X^T`` from random sign vectors give the nodes and weights of a
quadrature rule for the distribution of its eigenvalues. The exact counterpart is
``tests.support.reference_math.reference_health``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepspeed_muon.math.coefficients import Band
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize

# The bf16 iteration may differ from float64 by 0.3 in relative Frobenius norm (for the worst spectrum; the tests of
# math/ and ops/ require this of every backend). A norm that exceeds its bounds by more is wrong, not just imprecise.
NORM_TOLERANCE = 0.3
# For the largest singular value of a sampled matrix. In half precision every schedule that a configuration can select
# stays below 1.12 * high for condition numbers up to 1e8 (tests/unit/test_schedules_and_dtypes.py).
SIGMA_TOLERANCE = 0.3

_PROBES = 4
_LANCZOS_STEPS = 8
# Up to this many elements are converted to fp32 at once; a larger batch is read in blocks of columns.
_CONVERT_NUMEL = 1 << 24


MeasuredBlocks = dict[str, float]
"""The result of :func:`measure`: sums over some blocks of a matrix."""


def norm_bounds(rows: int, cols: int, band: Band) -> tuple[float, float]:
    """Return the smallest and largest valid Frobenius norm of the result for a nonzero ``(rows, cols)`` input."""
    smallest = max(0.0, band.gain) * (1 - NORM_TOLERANCE)
    return smallest, band.high * (1 + NORM_TOLERANCE) * math.sqrt(min(rows, cols))


def orthogonalize_carefully(x: Tensor, settings: NsSettings) -> Tensor:
    """Orthogonalise by the standard iteration in fp32, after dividing by the largest magnitude.

    The division keeps the sum of squares finite even where squares of elements overflow (magnitudes above 1.8e19).

    Args:
        x: ``(batch, rows, cols)``. Not mutated.
        settings: The configured iteration; its method and dtype are overridden.

    Returns:
        ``(batch, rows, cols)``, fp32.
    """
    scaled = x.float() / x.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)
    return orthogonalize(scaled, settings=replace(settings, method="standard", dtype=torch.float32))


def spectrum(x: Tensor, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Estimate the distribution of the squared singular values of every matrix in a batch.

    Args:
        x: ``(batch, rows, cols)``, any floating dtype. Not mutated.
        seed: Seed of the random sign vectors.

    Returns:
        Nodes and weights, each ``(batch, probes, steps)``, float64 on the CPU. For a function ``f``, the mean of
        ``f(s^2)`` over the ``min(rows, cols)`` singular values is approximately the sum of ``weight * f(node)`` over
        the last axis, averaged over the probes. The largest node approaches ``s_max^2`` from below.
    """
    x = x if x.shape[-2] <= x.shape[-1] else x.mT
    batch, short, _ = x.shape  # (batch, short, long)
    steps = min(_LANCZOS_STEPS, short)
    generator = torch.Generator(device=x.device).manual_seed(seed)
    signs = torch.randint(2, (batch, _PROBES, short), generator=generator, dtype=torch.int64, device=x.device)
    v = (2.0 * signs.float() - 1.0) / math.sqrt(short)  # (batch, probes, short) fp32, unit vectors
    basis, diagonal, off_diagonal = [v], [], []
    for _ in range(steps):
        w = _gram_times(x, v)
        diagonal.append((v * w).sum(dim=-1))  # (batch, probes)
        reach = w.norm(dim=-1, keepdim=True)
        # Reorthogonalise against the full basis, twice: otherwise rounding duplicates eigenvalues that have converged.
        for _ in range(2):
            for vector in basis:
                w = w - vector * (vector * w).sum(dim=-1, keepdim=True)
        beta = w.norm(dim=-1, keepdim=True)
        # Once the Krylov space is exhausted, w is only rounding error: a zero vector ends the recursion.
        beta = torch.where(beta > 1e-5 * reach, beta, torch.zeros_like(beta))
        v = torch.where(beta > 0, w / beta, torch.zeros_like(w))
        basis.append(v)
        off_diagonal.append(beta.squeeze(-1))
    return _quadrature(torch.stack(diagonal, dim=-1), torch.stack(off_diagonal, dim=-1)[..., :-1])


def _gram_times(x: Tensor, v: Tensor) -> Tensor:
    """Return ``v x x^T`` in fp32 for ``x`` (batch, m, n) and ``v`` (batch, probes, m), in blocks of columns.

    The probes are rows because CPU libraries are far slower for matrices of so few columns.
    """
    width = max(1, _CONVERT_NUMEL // (x.shape[0] * x.shape[1]))
    result = torch.zeros_like(v)
    for columns in x.split(width, dim=-1):
        fp32 = columns.float()  # (batch, m, width)
        result += (v @ fp32) @ fp32.mT
    return result


def _quadrature(diagonal: Tensor, off_diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of the tridiagonal matrices and the squared first components of their eigenvectors."""
    # Both in one transfer to the CPU, (batch, probes, 2 * steps - 1).
    packed = torch.cat((diagonal, off_diagonal), dim=-1).double().cpu()
    steps = diagonal.shape[-1]
    if not bool(torch.isfinite(packed).all()):
        nan = torch.full((*packed.shape[:-1], steps), math.nan, dtype=torch.float64, device="cpu")
        return nan, nan
    beta = packed[..., steps:]
    tridiagonal = (
        torch.diag_embed(packed[..., :steps]) + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
    )
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    return nodes.clamp(min=0), vectors[..., 0, :] ** 2


def measure(direction: Tensor, result: Tensor, *, scale: float, band: Band) -> MeasuredBlocks:
    """Measure orthogonalised blocks of one matrix, all of one shape and scale. Synchronises with the device.

    Args:
        direction: ``(blocks, rows, cols)``, the input of the iteration. Not mutated.
        result: The orthogonalised blocks, same shape, before scaling. Not mutated.
        scale: Factor of the update before the learning rate.
        band: The singular values that the schedule can produce.

    Returns:
        The number of ``blocks``, of singular ``values`` and of elements (``numel``); ``sigma_max``; and sums over the
        blocks: ``distances``, the squared distances of the singular values from the band; ``stable_ranks`` of the
        directions; ``directions`` and ``updates``, the squared elements of the directions and of the scaled updates;
        ``products``, the inner products of both.
    """
    batch, rows, cols = result.shape
    nodes, weights = spectrum(result)
    sigma = nodes.sqrt()
    # (batch, probes, steps): how far each node is outside the band
    distance = (band.low - sigma).clamp(min=0) + (sigma - band.high).clamp(min=0)
    error = float((weights * distance.square()).sum(dim=-1).mean())
    uu, xx, ux = _products(direction, result).double().cpu()
    top = spectrum(direction)[0].amax(dim=(-2, -1))  # (batch,), squared spectral norms
    return {
        "blocks": batch,
        "values": batch * min(rows, cols),
        "numel": result.numel(),
        "distances": error * batch * min(rows, cols),
        "sigma_max": float(sigma.max()),
        "stable_ranks": float(torch.where(top > 0, uu / top, torch.zeros_like(top)).sum()),
        "directions": float(uu.sum()),
        "updates": scale**2 * float(xx.sum()),
        "products": scale * float(ux.sum()),
    }


def combine(block_sums: Sequence[MeasuredBlocks]) -> dict[str, float]:
    """Combine the sums over a matrix's blocks into the measurements of the matrix.

    Returns:
        ``update_rms``, the root mean square of the elements of the scaled update, before the learning rate;
        ``orthogonality_error``, the root mean square distance of the update's singular values from the schedule's band;
        ``sigma_max``, the largest singular value, before scaling; ``stable_rank``, ``||U||_F^2 / ||U||_2^2`` of the
        direction ``U``; ``alignment``, the cosine of the angle between update and direction.
    """
    total = {key: math.fsum(sums[key] for sums in block_sums) for key in block_sums[0]}
    norms = math.sqrt(total["directions"]) * math.sqrt(total["updates"])
    return {
        "update_rms": math.sqrt(total["updates"] / total["numel"]),
        "orthogonality_error": math.sqrt(total["distances"] / total["values"]),
        "sigma_max": max(sums["sigma_max"] for sums in block_sums),
        "stable_rank": total["stable_ranks"] / total["blocks"],
        "alignment": total["products"] / norms if norms else 0.0,
    }


def _products(u: Tensor, x: Tensor) -> Tensor:
    """Return ``<u, u>, <x, x>, <u, x>`` of every matrix, ``(3, batch)`` fp32, in blocks of columns."""
    width = max(1, _CONVERT_NUMEL // (x.shape[0] * x.shape[1]))
    total = torch.zeros(3, x.shape[0], dtype=torch.float32, device=x.device)
    for left, right in zip(u.split(width, dim=-1), x.split(width, dim=-1), strict=True):
        a, b = left.float(), right.float()
        total += torch.stack([torch.einsum("bij,bij->b", p, q) for p, q in ((a, a), (b, b), (a, b))])
    return total


def why_wrong(norm: float, bounds: Sequence[float]) -> str | None:
    """Return what is wrong with the Frobenius norm of a result, or ``None`` if it is within its bounds."""
    if not math.isfinite(norm):
        return "it contains an infinity or NaN"
    if not bounds[0] <= norm <= bounds[1]:
        return f"its Frobenius norm {norm:.3g} is outside [{bounds[0]:.3g}, {bounds[1]:.3g}]"
    return None
