"""How well a matrix was orthogonalised: bounds that every result must keep, and numbers for the sampled ones.

Let ``p`` be the polynomial of all Newton-Schulz steps and ``s`` the singular values of the normalised input
(``sum s^2 = 1``). The result has the singular values ``p(s)``, so its Frobenius norm keeps two bounds::

    min p(s)/s  <=  ||X||_F  <=  max p(s) * sqrt(min(rows, cols))

Stochastic Lanczos quadrature (Ubaru, Chen, Saad 2017, doi 10.1137/16M1104974) estimates the spectrum of a sampled
matrix: a few Lanczos steps on ``X X^T`` from random signs give nodes and weights of a quadrature for the distribution
of its eigenvalues. The exact counterpart is ``tests.support.reference_math.reference_health``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepspeed_muon.math.coefficients import Band
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize

# The iteration in bf16 may differ from float64 by 0.3 in relative Frobenius norm (for the worst spectrum; the tests of
# math/ and ops/ hold every backend to it). A norm that leaves the exact bounds by more is wrong, not imprecise.
NORM_TOLERANCE = 0.3
# For the largest singular value of a sampled matrix. In half precision all schedules that a configuration may ask for
# stay within 1.12 * high over condition numbers up to 1e8 (tests/unit/test_schedules_and_dtypes.py).
SIGMA_TOLERANCE = 0.3

_PROBES = 4
_LANCZOS_STEPS = 8
# A sampled matrix is converted to fp32 whole up to this many elements, in column blocks beyond it.
_CONVERT_NUMEL = 1 << 24


Sums = dict[str, float]
"""What :func:`measure` returns of blocks of a matrix."""


def norm_bounds(rows: int, cols: int, band: Band) -> tuple[float, float]:
    """Return the smallest and the largest Frobenius norm of a right result for an input that is not zero."""
    smallest = max(0.0, band.gain) * (1 - NORM_TOLERANCE)
    return smallest, band.high * (1 + NORM_TOLERANCE) * math.sqrt(min(rows, cols))


def orthogonalize_carefully(
    x: Tensor, settings: NsSettings, *, largest: Tensor, run: Callable[..., Tensor] = orthogonalize
) -> Tensor:
    """Return the polar factors by the standard iteration in fp32, after division by the largest element.

    The division keeps the sum of squares finite even if squares of elements are not (above 1.8e19).

    Args:
        x: ``(batch, rows, cols)``. Not mutated.
        settings: The configured iteration; its method and dtype are replaced.
        largest: The largest magnitude of the whole matrices, of which ``x`` may be a part.
        run: Runs the iteration, called as ``run(x, settings=...)``.

    Returns:
        ``(batch, rows, cols)``, fp32.
    """
    scaled = x.float() / largest.float().clamp(min=torch.finfo(torch.float32).tiny)
    return run(scaled, settings=replace(settings, method="standard", dtype=torch.float32))


def spectrum(x: Tensor, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Estimate the distribution of the squared singular values of every matrix of a batch.

    Args:
        x: ``(batch, rows, cols)``, any floating dtype. Not mutated.
        seed: Seed of the random signs.

    Returns:
        Nodes and weights, each ``(batch, probes, steps)`` in float64 on the CPU. For a function ``f`` the mean of
        ``f(s^2)`` over the ``min(rows, cols)`` singular values is about the sum of ``weight * f(node)`` over the
        last axis, averaged over the probes; the largest node approaches ``s_max^2`` from below.
    """
    x = x if x.shape[-2] <= x.shape[-1] else x.mT
    if x.numel() <= _CONVERT_NUMEL:
        x = x.float()
    batch, short, _ = x.shape
    steps = min(_LANCZOS_STEPS, short)
    generator = torch.Generator(device=x.device).manual_seed(seed)
    signs = torch.randint(2, (batch, _PROBES, short), generator=generator, device=x.device)
    v = (2.0 * signs - 1.0) / math.sqrt(short)
    basis, diagonal, off_diagonal = [v], [], []
    for _ in range(steps):
        w = _gram_times(x, v)
        diagonal.append((v * w).sum(dim=-1))
        reach = w.norm(dim=-1, keepdim=True)
        # Orthogonalise against the whole basis, and twice: otherwise rounding would bring found eigenvalues back.
        for _ in range(2):
            for known in basis:
                w = w - known * (known * w).sum(dim=-1, keepdim=True)
        beta = w.norm(dim=-1, keepdim=True)
        # Only rounding is left of an exhausted Krylov space: a zero vector ends the recursion there.
        beta = torch.where(beta > 1e-5 * reach, beta, torch.zeros_like(beta))
        v = torch.where(beta > 0, w / beta, torch.zeros_like(w))
        basis.append(v)
        off_diagonal.append(beta.squeeze(-1))
    return _quadrature(torch.stack(diagonal, dim=-1), torch.stack(off_diagonal, dim=-1)[..., :-1])


def _gram_times(x: Tensor, v: Tensor) -> Tensor:
    """Return ``v x x^T`` in fp32 for ``x`` (batch, m, n) and ``v`` (batch, probes, m), in column blocks.

    The probes are rows, because a CPU's library is far slower with so few columns.
    """
    width = max(1, _CONVERT_NUMEL // (x.shape[0] * x.shape[1]))
    result = torch.zeros_like(v)
    for part in x.split(width, dim=-1):
        wide = part.float()
        result += (v @ wide) @ wide.mT
    return result


def _quadrature(diagonal: Tensor, off_diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and squared first components of the tridiagonal matrices; the one transfer to the CPU."""
    packed = torch.cat((diagonal, off_diagonal), dim=-1).double().cpu()
    steps = diagonal.shape[-1]
    if not bool(torch.isfinite(packed).all()):
        nan = torch.full((*packed.shape[:-1], steps), math.nan, dtype=torch.float64)
        return nan, nan
    tridiagonal = torch.diag_embed(packed[..., :steps])
    if steps > 1:
        beta = packed[..., steps:]
        tridiagonal = tridiagonal + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    return nodes.clamp(min=0), vectors[..., 0, :] ** 2


def measure(direction: Tensor, result: Tensor, *, scale: float, band: Band) -> Sums:
    """Measure orthogonalised blocks of one matrix, all of one shape and scale; waits for the device.

    Args:
        direction: ``(blocks, rows, cols)``, what was orthogonalised. Not mutated.
        result: The orthogonalised blocks, before scaling. Not mutated.
        scale: Factor of the scale rule.
        band: The band of the schedule.

    Returns:
        Numbers of ``blocks``, singular ``values`` and elements (``numel``), ``sigma_max``, and sums: of the squared
        ``distances`` of the singular values from the band, of the ``stable_ranks`` of the directions, and of the
        squared elements of ``directions`` and scaled ``updates`` and of the ``products`` of both.
    """
    batch, rows, cols = result.shape
    if result.numel() <= _CONVERT_NUMEL:
        direction, result = direction.float(), result.float()
    nodes, weights = spectrum(result)
    sigma = nodes.sqrt()
    distance = (band.low - sigma).clamp(min=0) + (sigma - band.high).clamp(min=0)
    error = float((weights * distance.square()).sum(dim=-1).mean())
    uu, xx, ux = _products(direction, result).double().cpu()
    top = spectrum(direction)[0].amax(dim=(-2, -1))
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


def combine(parts: Sequence[Sums]) -> dict[str, float]:
    """Return the numbers of a sampled matrix from the sums over its blocks.

    Returns:
        ``update_rms``, root mean square of the elements of the scaled update, before the learning rate;
        ``orthogonality_error``, root mean square distance of the update's singular values from the schedule's band;
        ``sigma_max``, the largest one, before scaling; ``stable_rank``, ``||U||_F^2 / ||U||_2^2`` of the direction
        ``U``; ``alignment``, the cosine of the angle between the update and the direction.
    """
    total = {key: math.fsum(part[key] for part in parts) for key in parts[0]}
    norms = math.sqrt(total["directions"]) * math.sqrt(total["updates"])
    return {
        "update_rms": math.sqrt(total["updates"] / total["numel"]),
        "orthogonality_error": math.sqrt(total["distances"] / total["values"]),
        "sigma_max": max(part["sigma_max"] for part in parts),
        "stable_rank": total["stable_ranks"] / total["blocks"],
        "alignment": total["products"] / norms if norms else 0.0,
    }


def _products(u: Tensor, x: Tensor) -> Tensor:
    """Return ``<u, u>, <x, x>, <u, x>`` of every matrix, ``(3, batch)`` in fp32, in column blocks."""
    width = max(1, _CONVERT_NUMEL // (x.shape[0] * x.shape[1]))
    total = torch.zeros(3, x.shape[0], device=x.device)
    for left, right in zip(u.split(width, dim=-1), x.split(width, dim=-1), strict=True):
        a, b = left.float(), right.float()
        total += torch.stack([torch.einsum("bij,bij->b", p, q) for p, q in ((a, a), (b, b), (a, b))])
    return total


def check_failure(norm: float, bounds: Sequence[float]) -> str | None:
    """Return what is wrong with the Frobenius norm of a result, or ``None`` if it keeps its bounds."""
    if not math.isfinite(norm):
        return "it holds an infinity or NaN"
    if not bounds[0] <= norm <= bounds[1]:
        return f"its Frobenius norm {norm:.3g} is outside of [{bounds[0]:.3g}, {bounds[1]:.3g}]"
    return None
