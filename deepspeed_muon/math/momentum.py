"""The elementwise part of the Muon step: momentum and the Nesterov blend on a flat shard."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MomentumStep", "update_momentum_"]


@dataclass(frozen=True, slots=True)
class MomentumStep:
    """The two settings of the elementwise part.

    Attributes:
        momentum: Decay of the exponential moving average, in [0, 1).
        nesterov: Blend the gradient into the direction once more.
    """

    momentum: float
    nesterov: bool


def update_momentum_(buf: Tensor, grad: Tensor, *, step: MomentumStep, out: Tensor) -> Tensor:
    """Update the momentum in place and write the direction to be orthogonalised.

    ``buf <- momentum * buf + (1 - momentum) * grad`` and
    ``out <- grad + momentum * (buf - grad)`` with Nesterov, ``out <- buf`` without: the exponential-average form
    of Keller Jordan's Muon and of ``torch.optim.Muon``. The gradient is not modified, because at ZeRO stage 0 it is
    the caller's ``param.grad``.

    Args:
        buf: Momentum, any shape, float32. Mutated.
        grad: Gradient of the same shape, float32, already unscaled and clipped.
        step: Decay and Nesterov switch.
        out: Receives the direction, rounded to its own dtype (the wire dtype). Same shape. Mutated.

    Returns:
        ``out``.
    """
    buf.lerp_(grad, 1.0 - step.momentum)
    if not step.nesterov:
        return out.copy_(buf)
    if out.dtype == buf.dtype:
        return torch.lerp(grad, buf, step.momentum, out=out)
    return out.copy_(torch.lerp(grad, buf, step.momentum))
