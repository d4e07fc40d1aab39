"""Hyperball, or MuonH (arXiv 2606.16899): every matrix keeps the Frobenius norm of its first weights.

With ``R`` that norm, ``o`` the orthogonalised direction and ``N(x) = x / |x|_F``::

    W <- R * N(W - lr * R * N(o))

So ``lr`` is the size of a step relative to the weights, whatever the shape: there is neither a scale rule nor weight
decay. Each block (head, part, expert) has its own norm. A block whose update is zero keeps its weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_muon.variants.variant import ReferenceRates, RowState, UnitRates, Variant

RADIUS = "radius"
_TINY = torch.finfo(torch.float64).tiny


def apply(
    products: tuple[Tensor, Tensor, Tensor], state: dict[str, Tensor], rates: UnitRates
) -> tuple[Tensor, Tensor]:
    """Return the factors of weights and updates; see :data:`.variant.Combine`."""
    square, along, length = products
    norm = square.sqrt()
    radius = state[RADIUS] = torch.where(state[RADIUS] > 0, state[RADIUS], norm)
    move = rates.size * radius / length.sqrt().clamp(min=_TINY)
    after = (square - 2 * move * along + move.square() * length).clamp(min=0).sqrt()
    keep = radius / after.clamp(min=_TINY)
    moves = length > 0
    return torch.where(moves, keep, 1.0), torch.where(moves, -keep * move, 0.0)


def reference(weights: Tensor, direction: Tensor, state: dict[str, Tensor], rates: ReferenceRates) -> Tensor:
    """See :data:`.variant.Reference`."""
    radius = state.setdefault(RADIUS, weights.norm())
    update = rates.orthogonalize(direction)
    if not update.any():
        return update
    moved = weights - rates.lr * radius * update / update.norm()
    found: Tensor = weights - radius * moved / moved.norm()
    return found / rates.lr


VARIANT = Variant(
    "hyperball",
    reference,
    description="every matrix keeps the norm of its first weights, and `lr` is relative to that norm",
    state=(RowState(RADIUS, "radii of hyperball", of_block=True),),
    apply=apply,
    relative_rate=True,
    refuses={
        "weight_decay": "it keeps the norm of every matrix, which decay shrinks: set muon_weight_decay to 0; "
        "adam_weight_decay is for the rest",
        "adjust_lr_fn": "its rate is the size of a step relative to the weights, so no scale applies: unset it",
        "qk_clip": "it keeps the norm of every matrix, so the next step would undo the clip: unset one of them",
    },
)
