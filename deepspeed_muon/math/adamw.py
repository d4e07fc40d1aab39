"""AdamW (or Adam) for the parameters that are not Muon's, through torch's fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from deepspeed_muon.math.weight_decay import WeightDecayMode, cautious_decay_, decay_factor

__all__ = ["AdamStep", "adam_step_"]


@dataclass(frozen=True, slots=True)
class AdamStep:
    """Settings of one AdamW step.

    Attributes:
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay, or an L2 term of the gradient when ``decoupled`` is false.
        step: Number of this step, counted from 1.
        decoupled: AdamW when true, Adam when false (``adam_w_mode``).
        decay_mode: How AdamW's decay shrinks the parameters; see :mod:`deepspeed_muon.math.weight_decay`.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    decay_mode: WeightDecayMode = "decoupled"


def adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    settings: AdamStep,
) -> None:
    """Update ``params`` (float32, all on one device) and both moments in place with torch's fused kernel."""
    if not params:
        return
    weight_decay = settings.weight_decay
    if settings.decoupled and settings.decay_mode != "decoupled":
        _decay(params, grads, exp_avgs, settings)
        weight_decay = 0.0
    device = params[0].device
    # The kernel increments the counter before it uses it, and wants one tensor for each parameter.
    steps = [torch.full((), float(settings.step - 1), device=device) for _ in params]
    function = adamw if settings.decoupled else adam
    function(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        lr=settings.lr,
        weight_decay=weight_decay,
        eps=settings.eps,
        maximize=False,
    )


def _decay(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], settings: AdamStep
) -> None:
    """Shrink the parameters by a kind of decay that torch's kernel does not know."""
    if settings.decay_mode == "cautious":
        for param, grad, exp_avg in zip(params, grads, exp_avgs, strict=True):
            # Adam's update has the sign of the new first moment, which the kernel computes only later.
            first = torch.lerp(exp_avg, grad, 1.0 - settings.betas[0])
            cautious_decay_(param, first, decay=settings.lr * settings.weight_decay)
    else:
        factor = decay_factor(settings.decay_mode, lr=settings.lr, weight_decay=settings.weight_decay)
        torch._foreach_mul_(list(params), factor)
