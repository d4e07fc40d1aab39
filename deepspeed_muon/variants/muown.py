"""Muown (arXiv 2605.10797): Muon for the direction of every row, Adam for its magnitude.

A row ``i`` of the weights is ``W_i = g_i v_i / |v_i|``, with a magnitude ``g_i`` and a direction ``v_i`` that is not
stored: its norm ``q_i`` is enough. Both norms start as that of the row. With the gradient ``G``, before momentum::

    dg_i = <G_i, W_i> / g_i
    dV_i = (g_i / q_i) (G_i - dg_i W_i / g_i)

The momentum of ``dV`` is orthogonalised to ``o``, without Nesterov's blend by default, and then::

    v_i <- v_i - lr * scale * o_i
    g_i <- g_i * (1 - lr * weight_decay) - lr * Adam(dg_i)
    W_i <- g_i v_i / |v_i|

Adam has the ``betas`` and the ``eps`` of AdamW, and counts its steps. Here ``W_i / g_i`` is the row by its own norm, so
that weights which are stored in half precision do not drift from ``g``. A row whose update is zero stays. A row of
zeros has no direction: it takes Muon's step, and its magnitude is that of the weights which it then has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_muon.variants.variant import ReferenceRates, RowState, UnitRates, Variant

MAGNITUDE, NORM = "row_magnitude", "row_direction_norm"
FIRST, SECOND = "row_magnitude_exp_avg", "row_magnitude_exp_avg_sq"
_TINY = torch.finfo(torch.float64).tiny
_Products = tuple[Tensor, Tensor, Tensor]


def before_momentum(products: _Products, state: dict[str, Tensor], rates: UnitRates) -> tuple[Tensor, Tensor]:
    """Return the factors of weights and gradient, and advance Adam's moments; see :data:`.variant.Combine`."""
    square, along, _ = products
    norm = square.sqrt()
    starts = state[MAGNITUDE] == 0
    magnitude = state[MAGNITUDE] = torch.where(starts, norm, state[MAGNITUDE])
    state[NORM] = torch.where(starts, norm, state[NORM])
    slope = magnitude.sign() * along / norm.clamp(min=_TINY)
    state[FIRST] = rates.beta1 * state[FIRST] + (1 - rates.beta1) * slope
    state[SECOND] = rates.beta2 * state[SECOND] + (1 - rates.beta2) * slope.square()
    factor = torch.where(square > 0, magnitude / state[NORM].clamp(min=_TINY), 1.0)
    return -factor * along / square.clamp(min=_TINY), factor


def apply(products: _Products, state: dict[str, Tensor], rates: UnitRates) -> tuple[Tensor, Tensor]:
    """Return the factors of weights and update, and step the magnitudes; see :data:`.variant.Combine`."""
    square, along, length = products
    # The direction is the weights times ``to_direction``.
    to_direction = state[MAGNITUDE].sign() * state[NORM] / square.sqrt().clamp(min=_TINY)
    after = (
        to_direction.square() * square - 2 * rates.size * to_direction * along + rates.size.square() * length
    )
    norm = after.clamp(min=0).sqrt().clamp(min=_TINY)
    root = (state[SECOND] / (1 - rates.beta2**rates.step)).sqrt() + rates.eps
    step = state[FIRST] / (1 - rates.beta1**rates.step) / root
    magnitude = rates.keep * state[MAGNITUDE] - rates.lr * step
    moves, known = length > 0, square > 0
    state[MAGNITUDE] = torch.where(moves & known, magnitude, state[MAGNITUDE])
    state[NORM] = torch.where(moves & known, norm, state[NORM])
    keep, move = magnitude * to_direction / norm, -magnitude * rates.size / norm
    keep, move = torch.where(known, keep, 1.0), torch.where(known, move, -rates.size)
    return torch.where(moves, keep, 1.0), torch.where(moves, move, 0.0)


def reference_gradient(
    weights: Tensor, gradient: Tensor, state: dict[str, Tensor], rates: ReferenceRates
) -> Tensor:
    """See :data:`.variant.Reference`."""
    zeros = torch.zeros(len(weights), dtype=torch.float64)
    for key in (MAGNITUDE, NORM, FIRST, SECOND):
        state.setdefault(key, zeros.clone())
    entering = gradient.clone()
    for i, (row, slopes) in enumerate(zip(weights, gradient, strict=True)):
        if not row.any():
            continue
        if state[MAGNITUDE][i] == 0:
            state[MAGNITUDE][i] = state[NORM][i] = row.norm()
        unit = row / state[MAGNITUDE][i]
        slope = slopes @ unit
        for key, beta, value in zip((FIRST, SECOND), rates.betas, (slope, slope**2), strict=True):
            state[key][i] = beta * state[key][i] + (1 - beta) * value
        entering[i] = state[MAGNITUDE][i] / state[NORM][i] * (slopes - slope * unit)
    return entering


def reference(weights: Tensor, direction: Tensor, state: dict[str, Tensor], rates: ReferenceRates) -> Tensor:
    """See :data:`.variant.Reference`."""
    update = rates.scale * rates.orthogonalize(direction)
    moved = weights - rates.lr * update
    for i, row in enumerate(weights):
        if not row.any() or not update[i].any():
            continue
        magnitude = state[MAGNITUDE][i]
        step = state[FIRST][i] / (1 - rates.betas[0] ** rates.step)
        step = step / ((state[SECOND][i] / (1 - rates.betas[1] ** rates.step)).sqrt() + rates.eps)
        ray = row * state[NORM][i] / magnitude - rates.lr * update[i]
        state[MAGNITUDE][i] = (1 - rates.lr * rates.weight_decay) * magnitude - rates.lr * step
        state[NORM][i] = ray.norm()
        moved[i] = state[MAGNITUDE][i] * ray / ray.norm()
    return (weights - moved) / rates.lr


VARIANT = Variant(
    "muown",
    reference,
    description="Muon updates the directions of rows, Adam their magnitudes",
    state=(
        RowState(MAGNITUDE, "magnitudes of Muown"),
        RowState(NORM, "norms of Muown's directions"),
        RowState(FIRST, "first moments of Muown's magnitudes"),
        RowState(SECOND, "second moments of Muown's magnitudes"),
    ),
    before_momentum=before_momentum,
    reference_gradient=reference_gradient,
    apply=apply,
    of_rows=True,
    defaults={"nesterov": False},
    refuses={
        "weight_decay_mode": "its weight decay is that of the rows' magnitudes, decoupled: unset it",
        "qk_clip": "it keeps the magnitude of every row, so the next step would undo the clip: unset one of them",
    },
)
