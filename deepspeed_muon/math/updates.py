"""The numbers in an update of Muon (momentum warm-up, ``adjust_lr_fn``, ``weight_decay_mode``), and AdamW by torch.

What subtracts Muon's update from the weights is :func:`deepspeed_muon.step.runner.apply`.

``adjust_lr_fn``: the factor of an update, an orthogonalised direction, for a matrix of ``rows x cols``. Beware of
"spectral": other projects call two different rules by that name. ``update_scale`` is one more factor, the same for all
shapes.

==================  ===========================  ==================================================
name                factor                       source
==================  ===========================  ==================================================
``original``        ``sqrt(max(1, rows/cols))``  Keller Jordan's Muon; ``torch.optim.Muon`` "original"
``match_rms_adamw`` ``0.2 sqrt(max(rows, cols))``  Moonlight (arXiv 2502.16982); torch's name
``spectral``        ``sqrt(max(rows, cols))``    TransformerEngine / Emerging-Optimizers "spectral"
``unit_rms_norm``   ``sqrt(rows/cols)``          arXiv 2502.07529; Dion calls it "spectral_norm"
==================  ===========================  ==================================================

``weight_decay_mode``: how weight decay shrinks a parameter of Muon or of AdamW. ``u`` is Muon's update times its
factor, or Adam's ratio of moments::

    decoupled    p <- p - lr * wd * p                  - lr * u
    independent  p <- p - wd * p                       - lr * u
    cautious     p <- p - lr * wd * p * [u * p >= 0]   - lr * u

=============== ======================================================================================================
``decoupled``   ``torch.optim.AdamW``'s form of Loshchilov and Hutter (arXiv 1711.05101): decay scales with the rate
``independent`` decay ignores the rate and its schedule (NVIDIA Emerging-Optimizers has the same name): a weight that
                gets no update halves in ``0.69 / wd`` steps, so useful values are ``lr`` times those of decoupled
``cautious``    Cautious Weight Decay (arXiv 2510.12402): only elements decay that the update pulls towards zero
=============== ======================================================================================================

Every term reads ``p`` before the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

WeightDecayMode = Literal["decoupled", "independent", "cautious"]


def momentum_in_warmup(momentum: float, *, start: float, steps: int, step: int) -> float:
    """Return the momentum of a step that rises linearly from ``start`` in step 1 to ``momentum`` in step ``steps + 1``.

    A momentum that is not above ``start`` is returned as it is, and so is every momentum after the warm-up.
    """
    if step > steps or momentum <= start:
        return momentum
    return start + (momentum - start) * (step - 1) / steps


def decay_factor(mode: WeightDecayMode, *, lr: float, weight_decay: float) -> float:
    """Return the factor of a weight before the update is subtracted; ``cautious`` has no common factor."""
    assert mode != "cautious"
    return 1.0 - weight_decay * (lr if mode == "decoupled" else 1.0)


def cautious_decay_(param: Tensor, direction: Tensor, *, decay: float) -> None:
    """Shrink the elements of ``param`` whose update has their sign or is zero, by learning rate times weight decay.

    ``direction`` has the signs of the update and any floating dtype.
    """
    if decay != 0.0:
        aligned = (param * direction).ge_(0.0)  # 1 where the update pulls towards zero, else 0
        param.sub_(aligned.mul_(param), alpha=decay)


AdjustLrName = Literal["original", "match_rms_adamw", "spectral", "unit_rms_norm"]

WIDTH_EXPONENT: dict[AdjustLrName, float] = {"original": -0.15, "match_rms_adamw": -0.65, "spectral": -0.65}
"""Muon's rate is made to follow ``width ** exponent``; under ``unit_rms_norm`` nothing was measured.

That of ``original`` is Marin's law, with which the runs of ``benchmarks/rates.py`` agree; that of ``match_rms_adamw``
is their fit, which holds for ``spectral`` (``docs/measured.md``). The factors of these two contain the root of the
width, which the best rate has to cancel: -0.5 of the exponent.
"""


def shape_scale(rule: AdjustLrName, rows: int, cols: int) -> float:
    """Return the factor in ``W <- W - lr * update_scale * factor * orthogonalize(u)``, by the table above.

    The layer has ``rows`` outputs and ``cols`` inputs, however its weight is stored.
    """
    return {
        "original": math.sqrt(max(1.0, rows / cols)),
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
        "spectral": math.sqrt(max(rows, cols)),
        "unit_rms_norm": math.sqrt(rows / cols),
    }[rule]


@dataclass(frozen=True, slots=True)
class AdamStep:
    """Settings of one AdamW step.

    Attributes:
        weight_decay: Decoupled decay, or an L2 term of the gradient when ``decoupled`` is false.
        step: Number of this step, counted from 1.
        decoupled: AdamW when true, Adam when false (``adam_w_mode``).
        decay_mode: How AdamW's decay shrinks the parameters, by the table above.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    decay_mode: WeightDecayMode = "decoupled"


AdamTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""A parameter, its gradient, and its first and second moment."""


def adam_step_(tensors: Sequence[AdamTensors], *, settings: AdamStep) -> None:
    """Update parameters (float32 or float64, all on one device) and both moments in place with torch's fused kernel."""
    if not tensors:
        return
    weight_decay = settings.weight_decay
    if settings.decoupled and settings.decay_mode != "decoupled":
        _decay(tensors, settings)
        weight_decay = 0.0
    params, grads, exp_avgs, exp_avg_sqs = (list(column) for column in zip(*tensors, strict=True))
    device = params[0].device
    # The kernel increments the counter before it uses it, and wants one tensor for each parameter: views of a vector,
    # which takes a single launch to fill.
    counts = torch.full((len(params),), float(settings.step - 1), dtype=torch.float32, device=device)
    steps = list(counts.unbind())
    # The functional forms: torch.optim.AdamW would keep a state of its own.
    function = adamw if settings.decoupled else adam
    function(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],  # max_exp_avg_sqs, for amsgrad
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


def _decay(tensors: Sequence[AdamTensors], settings: AdamStep) -> None:
    """Shrink the parameters by a kind of decay that torch's kernel does not have."""
    if settings.decay_mode == "cautious":
        for param, grad, exp_avg, _ in tensors:
            # Adam's update has the sign of the new first moment, which the kernel has not computed yet.
            first = torch.lerp(exp_avg, grad, 1.0 - settings.betas[0])
            cautious_decay_(param, first, decay=settings.lr * settings.weight_decay)
    else:
        factor = decay_factor(settings.decay_mode, lr=settings.lr, weight_decay=settings.weight_decay)
        torch._foreach_mul_([param for param, *_ in tensors], factor)
