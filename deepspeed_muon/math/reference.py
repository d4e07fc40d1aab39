"""The oracle of the tests: one step on whole matrices in one process, in float64 and written to be read.

It shares only constants and settings with the fast paths, so that an error of theirs cannot hide in its test.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_muon.math.adamw import AdamStep
from deepspeed_muon.math.coefficients import Coefficients
from deepspeed_muon.math.scaling import update_scale

__all__ = ["reference_adamw_step", "reference_health", "reference_muon_step", "reference_orthogonalize"]


def reference_orthogonalize(x: Tensor, coefficients: Sequence[Coefficients], eps: float = 1e-12) -> Tensor:
    """Apply the polynomials to one matrix in float64: ``X <- a X + (b A + c A^2) X`` with ``A = X X^T``."""
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
) -> tuple[Tensor, Tensor]:
    """One Muon step with the scale ``original``, in float64. Mutates nothing.

    Args:
        param: ``(rows, cols)``.
        grad: Mean gradient of the whole step, after clipping.
        buf: Momentum before the step.
        lr: Learning rate of the Muon parameters.
        momentum: Decay of the moving average.
        nesterov: Whether to blend the gradient in once more.
        weight_decay: Decoupled weight decay.
        coefficients: One triple per Newton-Schulz step.

    Returns:
        The new parameter and the new momentum.
    """
    param, grad, buf = param.double(), grad.double(), buf.double()
    buf = momentum * buf + (1 - momentum) * grad
    direction = grad + momentum * (buf - grad) if nesterov else buf
    update = reference_orthogonalize(direction, coefficients)
    param = param * (1 - lr * weight_decay)
    return param - lr * update_scale("original", *param.shape) * update, buf


def reference_adamw_step(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, settings: AdamStep
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of AdamW (arXiv 1711.05101) or Adam with decoupled or L2 decay, in float64. Mutates nothing.

    Returns:
        The new parameter, first and second moment.
    """
    param, grad = param.double(), grad.double()
    beta1, beta2 = settings.betas
    if settings.decoupled:
        decayed = param * (1 - settings.lr * settings.weight_decay)
    else:
        decayed, grad = param, grad + settings.weight_decay * param
    exp_avg = beta1 * exp_avg.double() + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq.double() + (1 - beta2) * grad**2
    first, second = exp_avg / (1 - beta1**settings.step), exp_avg_sq / (1 - beta2**settings.step)
    return decayed - settings.lr * first / (torch.sqrt(second) + settings.eps), exp_avg, exp_avg_sq


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
