"""Hyperball, or MuonH (arXiv 2606.16899): every matrix keeps its Frobenius norm.

With the orthogonalised direction ``O`` and ``N(X) = X / |X|_F``::

    W <- |W| * N(W - lr * |W| * N(O))

So ``lr`` is the size of a step relative to the weights, whatever their shape: there is neither a scale rule nor weight
decay. Each block (head, expert, slice of a fused weight) has its own norm. A block whose update is zero, or that the
step would bring to zero, is unchanged.

The paper's radius is the norm of the initial weights. A step does not change the norm, so the norm of the current
weights is the same radius (rounding changes it by 1e-7 a step in fp32, without a trend), and nothing is stored. Weights
that are loaded or replaced during a run keep their own norm. A block of zeros can never move: it is refused before the
first step (:meth:`deepspeed_muon.optimizer.Muon.refuse_zero_weights`), and a later one stays zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_muon.variants.variant import Variant

_ROUNDING = torch.finfo(torch.float32).eps
"""Relative error of the sums; a block whose square norm falls below it would be brought back from mere rounding."""


def apply(products: tuple[Tensor, Tensor, Tensor], lr: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rates of the step; see :data:`.variant.Apply`."""
    w_w, w_o, o_o = products  # |W|^2, <W, O>, |O|^2: (blocks,) each
    step = (w_w / o_o).sqrt_().mul_(lr)  # W - step * O is what is brought back to the norm
    # |W - step * O|^2 = |W|^2 - 2 step (<W, O> - step |O|^2 / 2); NaN where O is zero, so that nothing moves.
    moved_square = torch.addcmul(w_w, step, torch.addcmul(w_o, step, o_o, value=-0.5), value=-2.0)
    moves = moved_square > _ROUNDING * w_w
    shrink = (w_w / moved_square).sqrt_()
    return torch.where(moves, step.mul_(shrink), 0.0), torch.where(moves, shrink, 1.0)


VARIANT = Variant(
    "hyperball",
    description="every matrix keeps its norm, and `lr` is relative to that norm",
    apply=apply,
    refuses={
        "weight_decay": "it keeps the norm of every matrix, which decay shrinks: set muon_weight_decay to 0; "
        "adam_weight_decay is for the rest",
        "adjust_lr_fn": "its rate is the size of a step relative to the weights, so no scale applies: unset it",
        "update_scale": "its rate is the size of a step relative to the weights: multiply muon_lr by the factor",
    },
)
