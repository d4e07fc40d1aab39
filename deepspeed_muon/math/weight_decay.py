"""The ``weight_decay_mode`` rules: how weight decay shrinks a parameter of Muon or of AdamW.

With ``u`` the update that is subtracted (``lr * u``: Muon's scaled orthogonal factor, or Adam's ratio of moments)::

    decoupled    p <- p - lr * wd * p                  - lr * u
    independent  p <- p - wd * p                       - lr * u
    cautious     p <- p - lr * wd * p * [u * p >= 0]   - lr * u

=============== ======================================================================================================
``decoupled``   ``torch.optim.AdamW``'s form of Loshchilov and Hutter (arXiv 1711.05101): decay scales with the rate
``independent`` decay ignores the rate and its schedule (NVIDIA Emerging-Optimizers has the same name): a weight that
                gets no update halves in ``0.69 / wd`` steps, so useful values are ``lr`` times those of decoupled
``cautious``    Cautious Weight Decay (arXiv 2510.12402): only elements decay that the update pulls towards zero
=============== ======================================================================================================

Every term reads ``p`` before the step. The float64 counterpart is
:func:`tests.support.reference.decayed_step`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["WeightDecayMode", "cautious_apply_", "cautious_decay_", "decay_factor"]

WeightDecayMode = Literal["decoupled", "independent", "cautious"]


def decay_factor(mode: WeightDecayMode, *, lr: float, weight_decay: float) -> float:
    """Return the factor of every element before the update is subtracted; not for ``cautious``, which has many."""
    assert mode != "cautious"
    return 1.0 - weight_decay * (lr if mode == "decoupled" else 1.0)


def cautious_decay_(param: Tensor, direction: Tensor, *, decay: float) -> None:
    """Shrink the elements of ``param`` whose update has their sign, or is zero.

    Args:
        param: Any shape. Mutated.
        direction: Same shape, any floating dtype; its signs are those of the update.
        decay: Learning rate times weight decay.
    """
    if decay != 0.0:
        aligned = (param * direction).ge_(0.0)
        param.sub_(aligned.mul_(param), alpha=decay)


def cautious_apply_(param: Tensor, update: Tensor, *, lr_scale: float, decay: float) -> None:
    """Write ``param <- param - decay * param * [update * param >= 0] - lr_scale * update``.

    Args:
        param: Flat. Mutated.
        update: Flat, any floating dtype.
        lr_scale: Learning rate times the scale of the matrix.
        decay: Learning rate times weight decay.
    """
    with torch.no_grad():
        cautious_decay_(param, update, decay=decay)
        param.add_(update, alpha=-lr_scale)
