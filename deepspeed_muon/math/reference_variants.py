"""The oracle of NorMuon and of the kinds of weight decay, in float64 and written to be read.

It shares nothing with the fast paths.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["reference_decayed_step", "reference_normalize_rows"]


def reference_normalize_rows(
    o: Tensor, v: Tensor, *, beta2: float, eps: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """Normalise the rows of one orthogonalised matrix as arXiv 2510.05491 does, and restore its Frobenius norm.

    Args:
        o: ``(rows, cols)``.
        v: ``(rows,)``: second moments before the step.
        beta2: Decay of the second moments.
        eps: Added to their roots.

    Returns:
        The new update and the new second moments.
    """
    o, v = o.double(), v.double().clone()
    normalized = torch.zeros_like(o)
    for i in range(o.shape[0]):
        v[i] = beta2 * v[i] + (1 - beta2) * (o[i] ** 2).mean()
        normalized[i] = o[i] / (v[i].sqrt() + eps)
    if float(normalized.norm()) == 0.0:
        return normalized, v
    return normalized * (o.norm() / normalized.norm()), v


def reference_decayed_step(p: Tensor, u: Tensor, *, lr: float, weight_decay: float, mode: str) -> Tensor:
    """Return ``p`` after a step by the scaled update ``u`` with the weight decay ``mode``, one of three kinds."""
    p, u = p.double(), u.double()
    if mode == "decoupled":
        decay = lr * weight_decay * p
    elif mode == "independent":
        decay = weight_decay * p
    elif mode == "cautious":
        decay = torch.where(u * p >= 0, lr * weight_decay * p, torch.zeros_like(p))
    else:
        raise ValueError(f"unknown mode {mode!r}")
    return p - decay - lr * u
