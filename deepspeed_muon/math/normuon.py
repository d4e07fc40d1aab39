"""NorMuon (arXiv 2510.05491): a running second moment brings the rows of the update to equal size.

For each row ``i`` of the orthogonalised ``r x c`` update ``o``::

    v_i <- beta2 * v_i + (1 - beta2) * mean_j(o_ij^2)
    n_i  = o_i / (sqrt(v_i) + eps)
    o_i <- n_i * |o|_F / |n|_F

The last line restores the norm of the whole matrix, so the update is as large as plain Muon's and every
``adjust_lr_fn`` keeps its meaning. It also cancels common factors, so ``v`` starts at zero without bias correction.

The readable float64 counterpart is :func:`deepspeed_muon.math.reference_variants.reference_normalize_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

__all__ = ["VariantName", "normalize_rows"]

VariantName = Literal["muon", "normuon"]

_EPS = 1e-8
"""Added to the root of the second moment, so that a row that was always zero stays zero and does not become NaN."""


def normalize_rows(
    updates: Tensor,
    moments: Tensor,
    *,
    beta2: float | Tensor,
    cols: int = 0,
    sum_of_row: Callable[[Tensor], Tensor] | None = None,
    sum_over_rows: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Normalise the rows of a batch of orthogonalised matrices.

    Of a matrix that is cut over ranks this is one rank's part, and the sums run over all of them.

    Args:
        updates: ``(batch, rows, cols)``, any floating dtype. Not mutated.
        moments: ``(batch, rows)``, fp32, contiguous or not: the running mean square of each row. Mutated.
        beta2: Decay of the running mean, in [0, 1); a tensor ``(batch, 1)`` has one for each matrix.
        cols: Columns of the whole matrix, if other ranks hold some of them.
        sum_of_row: Adds up what the ranks that hold other columns give: a tensor ``(batch, rows)``, fp32 at least.
        sum_over_rows: Adds up what the ranks that hold other rows give: ``(batch, 2)``, fp32.

    Returns:
        A new fp32 tensor of the shape of ``updates``. An all-zero matrix gives zeros.
    """
    wide = torch.promote_types(updates.dtype, torch.float32)
    squares = torch.linalg.vector_norm(updates, dim=-1, dtype=wide).square_()
    squares = squares if sum_of_row is None else sum_of_row(squares)
    squares = squares.div_(cols or updates.shape[-1]).float()
    moments.lerp_(squares, 1.0 - beta2)
    factors = moments.sqrt().add_(_EPS).reciprocal_()
    # |o|^2 / |n|^2 from the mean squares of the rows; where the denominator is zero, so is the numerator.
    sums = torch.stack((squares, squares * factors.square()), dim=-1).sum(dim=-2)
    before, after = (sums if sum_over_rows is None else sum_over_rows(sums)).split(1, dim=-1)
    factors *= (before / after.clamp_(min=torch.finfo(torch.float32).tiny)).sqrt_()
    return updates * factors.unsqueeze(-1)
