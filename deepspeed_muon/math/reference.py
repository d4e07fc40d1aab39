"""The oracle: one Muon step on whole matrices in one process, written to be read and in float64.

Nothing here is fast and nothing here is shared with the fast paths except the tables of constants, so that an
error in a fast path cannot hide in its test.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_muon.math.coefficients import Coefficients
from deepspeed_muon.math.scaling import AdjustLrName, update_scale

__all__ = ["reference_adamw_step", "reference_health", "reference_muon_step", "reference_orthogonalize"]


def reference_orthogonalize(x: Tensor, coefficients: Sequence[Coefficients], eps: float = 1e-12) -> Tensor:
    """Apply the polynomials to one matrix in float64: ``X <- a X + (b A + c A^2) X`` with ``A = X X^T``.

    Args:
        x: ``(rows, cols)``.
        coefficients: One triple per step.
        eps: Lower bound of the Frobenius norm.

    Returns:
        ``(rows, cols)`` in float64.
    """
    x = x.double()
    transposed = x.shape[0] > x.shape[1]
    if transposed:
        x = x.T
    x = x / max(float(x.norm()), eps)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if transposed else x


def reference_muon_step(
    param: Tensor,
    grad: Tensor,
    buf: Tensor,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    coefficients: Sequence[Coefficients],
    adjust_lr_fn: AdjustLrName = "original",
) -> tuple[Tensor, Tensor]:
    """One step of the definition in the README, in float64.

    Args:
        param: ``(rows, cols)``; not mutated.
        grad: Mean gradient of the whole step after clipping by the global norm of the raw gradients.
        buf: Momentum before the step; not mutated.
        lr: Learning rate of the Muon parameters.
        momentum: Decay of the moving average.
        nesterov: Whether to blend the gradient in once more.
        weight_decay: Decoupled weight decay.
        coefficients: One triple per Newton-Schulz step.
        adjust_lr_fn: Scale rule.

    Returns:
        The new parameter and the new momentum, float64.
    """
    param, grad, buf = param.double(), grad.double(), buf.double()
    buf = momentum * buf + (1 - momentum) * grad
    direction = grad + momentum * (buf - grad) if nesterov else buf
    update = reference_orthogonalize(direction, coefficients)
    param = param * (1 - lr * weight_decay)
    return param - lr * update_scale(adjust_lr_fn, *param.shape) * update, buf


def reference_adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One AdamW step (arXiv 1711.05101) in float64.

    Args:
        param: Any shape; not mutated.
        grad: Gradient after clipping.
        exp_avg: First moment before the step.
        exp_avg_sq: Second moment before the step.
        step: Number of this step, counted from 1.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.

    Returns:
        The new parameter, first and second moment, float64.
    """
    param, grad = param.double(), grad.double()
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg.double() + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq.double() + (1 - beta2) * grad**2
    denominator = torch.sqrt(exp_avg_sq / (1 - beta2**step)) + eps
    param = param * (1 - lr * weight_decay)
    return param - lr * (exp_avg / (1 - beta1**step)) / denominator, exp_avg, exp_avg_sq


def reference_health(
    direction: Tensor, result: Tensor, *, scale: float, low: float, high: float
) -> dict[str, float]:
    """Measure one orthogonalised matrix through its singular values, in float64.

    Args:
        direction: ``(rows, cols)``, what was orthogonalised.
        result: ``(rows, cols)``, what came out.
        scale: Factor of the scale rule.
        low: Lower end of the band of singular values.
        high: Upper end.

    Returns:
        The numbers of :class:`deepspeed_muon.monitoring.measure.MatrixHealth`, by name.
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
