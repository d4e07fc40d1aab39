"""NorMuon (arXiv 2510.05491): rows of the orthogonalised update brought to equal size by a running second moment.

For each row ``i`` of the orthogonalised ``r x c`` update ``o``::

    v_i <- beta2 * v_i + (1 - beta2) * mean_j(o_ij^2)
    n_i  = o_i / (sqrt(v_i) + eps)
    o_i <- n_i * |o|_F / |n|_F

Both norms are those of the whole matrix, so its size is that of plain Muon and every ``adjust_lr_fn`` keeps its
meaning. ``v`` starts at zero without a bias correction: the common factor that it would be cancels in the last line.

The readable float64 counterpart is :func:`deepspeed_muon.math.reference_variants.reference_normalize_rows`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["NORMUON_EPS", "VariantName", "normalize_rows"]

VariantName = Literal["muon", "normuon"]

NORMUON_EPS = 1e-8
"""Added to the root of the second moment: a row that was zero so far stays zero instead of becoming NaN."""


def normalize_rows(updates: Tensor, moments: Tensor, *, beta2: float | Tensor) -> Tensor:
    """Normalise the rows of a batch of orthogonalised matrices.

    Args:
        updates: ``(batch, rows, cols)``, any floating dtype. Not mutated.
        moments: ``(batch, rows)``, fp32, contiguous or not: the running mean square of each row. Mutated.
        beta2: Decay of the running mean, in [0, 1); or of each matrix, ``(batch, 1)``.

    Returns:
        A new fp32 tensor of the shape of ``updates``. An all-zero matrix gives zeros.
    """
    wide = torch.promote_types(updates.dtype, torch.float32)
    squares = torch.linalg.vector_norm(updates, dim=-1, dtype=wide).square_().div_(updates.shape[-1]).float()
    moments.lerp_(squares, 1.0 - beta2)
    factors = moments.sqrt().add_(NORMUON_EPS).reciprocal_()
    # |o|^2 / |n|^2 from the rows' mean squares; where the denominator is zero, so is the numerator.
    before = squares.sum(dim=-1, keepdim=True)
    after = (squares * factors.square()).sum(dim=-1, keepdim=True)
    factors *= (before / after.clamp_(min=torch.finfo(torch.float32).tiny)).sqrt_()
    return updates * factors.unsqueeze(-1)
