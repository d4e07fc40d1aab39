"""Hyperball, or MuonH (arXiv 2606.16899): every matrix keeps its Frobenius norm.

With the orthogonalised direction ``o`` and ``N(x) = x / |x|_F``::

    W <- |W| * N(W - lr * |W| * N(o))

So ``lr`` is the size of a step relative to the weights, whatever the shape: there is neither a scale rule nor weight
decay. Each block (head, part, expert) has its own norm. A block whose update is zero keeps its weights.

The paper's radius is the norm of the first weights. A step does not change the norm, so that of the current weights is
the same radius (up to rounding: 1e-7 a step in fp32, without a trend) and nothing needs to be stored: weights that are
loaded or replaced during a run keep the norm that they bring. A block of zeros has no norm to keep: it is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_muon.variants.variant import Variant

_TINY = torch.finfo(torch.float64).tiny


def apply(products: tuple[Tensor, Tensor, Tensor], rates: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of weights and updates; see :data:`.variant.Combine`."""
    square, along, length = products  # |W|^2, <W, o>, |o|^2
    norm = square.sqrt()
    move = rates * norm / length.sqrt().clamp(min=_TINY)
    after = (square - 2 * move * along + move.square() * length).clamp(min=0).sqrt()
    keep = norm / after.clamp(min=_TINY)
    moves = (length > 0) & (square > 0)
    return torch.where(moves, keep, 1.0), torch.where(moves, -keep * move, 0.0)


VARIANT = Variant(
    "hyperball",
    description="every matrix keeps its norm, and `lr` is relative to that norm",
    apply=apply,
    relative_rate=True,
    refuses={
        "weight_decay": "it keeps the norm of every matrix, which decay shrinks: set muon_weight_decay to 0; "
        "adam_weight_decay is for the rest",
        "adjust_lr_fn": "its rate is the size of a step relative to the weights, so no scale applies: unset it",
    },
)
