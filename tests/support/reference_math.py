"""Single formulas in float64, written to be read: the measures of health, QK-clip."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference_health(
    direction: Tensor, result: Tensor, *, scale: float, low: float, high: float
) -> dict[str, float]:
    """Measure one orthogonalised matrix through its singular values, in float64.

    Args:
        direction: ``(rows, cols)``, what was orthogonalised.
        result: ``(rows, cols)``, what came out.
        scale: Factor of the scale rule.
        low: Lower end of the band in which the singular values belong.
        high: Upper end.

    Returns:
        The numbers of :func:`deepspeed_muon.monitoring.measure.combine`.
    """
    u, x = direction.double(), result.double()
    sigma = torch.linalg.svdvals(x)
    outside = torch.maximum(low - sigma, sigma - high).clamp(min=0)
    return {
        "update_rms": float((scale * x).square().mean().sqrt()),
        "orthogonality_error": float(outside.square().mean().sqrt()),
        "sigma_max": float(sigma.max()),
        "stable_rank": float(u.square().sum() / torch.linalg.svdvals(u).max() ** 2),
        "alignment": float((u * x).sum() / (u.norm() * x.norm())),
    }


def reference_max_logits(query: Tensor, key: Tensor, *, scale: float, causal: bool = True) -> list[float]:
    """Return the largest logit of every query head from the whole matrix of logits.

    Args:
        query: ``(batch, heads, positions, width)``.
        key: ``(batch, key heads, positions, width)``.
        scale: Factor of the products.
        causal: Whether later keys are hidden.
    """
    group = query.shape[1] // key.shape[1]
    largest = []
    for head in range(query.shape[1]):
        logits = scale * torch.einsum("bqd,bkd->bqk", query[:, head].double(), key[:, head // group].double())
        if causal:
            visible = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
            logits = logits[:, visible]
        largest.append(float(logits.max()))
    return largest


def reference_clip(
    wq: Tensor, wk: Tensor, largest: Sequence[float], *, key_heads: int, threshold: float, alpha: float
) -> tuple[Tensor, Tensor]:
    """Clip separate query and key projections, with grouped queries where ``key_heads`` is smaller.

    Args:
        wq: ``(heads * width, inputs)``; not mutated.
        wk: ``(key heads * width, inputs)``; not mutated.
        largest: Largest logit of every query head.
        key_heads: Number of key heads.
        threshold: Logits above it are clipped.
        alpha: Share of the queries.

    Returns:
        The new projections, float64.
    """
    heads = len(largest)
    eta = [min(1.0, threshold / s) if s > 0 else 1.0 for s in largest]
    new_q = wq.double().clone().view(heads, -1, wq.shape[-1])
    new_k = wk.double().clone().view(key_heads, -1, wk.shape[-1])
    for head in range(heads):
        new_q[head] *= eta[head] ** alpha
    for head in range(key_heads):
        served = eta[head * heads // key_heads : (head + 1) * heads // key_heads]
        new_k[head] *= min(served) ** (1 - alpha)
    return new_q.view_as(wq), new_k.view_as(wk)


def reference_clip_latent(
    wq: Tensor, wkv: Tensor, largest: Sequence[float], *, nope: int, rope: int, threshold: float, alpha: float
) -> tuple[Tensor, Tensor]:
    """Clip the up-projections of multi-head latent attention.

    Args:
        wq: ``(heads * (nope + rope), rank)``: per head first the plain, then the rotated queries.
        wkv: ``(heads * (nope + value), rank)``: per head first the plain keys, then the values.
        largest: Largest logit of every head.
        nope: Width of the plain part.
        rope: Width of the rotated part.
        threshold: Logits above it are clipped.
        alpha: Share of the plain queries.

    Returns:
        The new projections, float64.
    """
    heads = len(largest)
    new_q = wq.double().clone().view(heads, nope + rope, -1)
    new_kv = wkv.double().clone().view(heads, -1, wkv.shape[-1])
    for head, s in enumerate(largest):
        eta = min(1.0, threshold / s) if s > 0 else 1.0
        new_q[head, :nope] *= eta**alpha
        new_q[head, nope:] *= eta
        new_kv[head, :nope] *= eta ** (1 - alpha)
    return new_q.view_as(wq), new_kv.view_as(wkv)
