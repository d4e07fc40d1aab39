"""NorMuon (arXiv 2510.05491): a running second moment brings the rows of the update to equal size.

For each row ``i`` of the orthogonalised ``r x c`` update ``o``::

    v_i <- beta2 * v_i + (1 - beta2) * mean_j(o_ij^2)
    n_i  = o_i / (sqrt(v_i) + eps)
    o_i <- n_i * |o|_F / |n|_F

The last line restores the norm of the matrix, so the update is as large as Muon's and every ``adjust_lr_fn`` keeps its
meaning. It also cancels common factors, so ``v`` starts at zero without bias correction.

With ``weight_decay_mode: cautious`` it is the combination that others have evidence for (``docs/how_it_works.md``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from deepspeed_muon.variants.variant import RowState, Setting, Variant

MOMENTS = "row_second_moment"
_EPS = 1e-8
"""Added to the root of the second moment, so that a row that was always zero stays zero and does not become NaN."""


def row_factors(blocks: Tensor, moments: Tensor, settings: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the factors that normalise rows, ``(batch, rows)`` fp32, and the moments; see :data:`.RowFactors`."""
    dtype = torch.promote_types(blocks.dtype, torch.float32)
    norms = torch.linalg.vector_norm(blocks, dim=-1, dtype=dtype).float()  # (batch, rows)
    mean_squares = norms.square().div_(blocks.shape[-1])
    moments = mean_squares.lerp_(moments, settings["beta2"])
    roots = moments.sqrt().add_(_EPS)
    # |o| and |n|, (batch, 1) each; where |n| is zero, so is |o|
    before, after = torch.linalg.vector_norm(torch.stack((norms, norms / roots)), dim=-1, keepdim=True)
    return before / after.clamp_(min=torch.finfo(torch.float32).tiny) / roots, moments


VARIANT = Variant(
    "normuon",
    description="rows of the update are normalised by a running second moment",
    state=RowState(MOMENTS, "row moments of NorMuon"),
    settings=(Setting("beta2", 0.95, Field(ge=0, lt=1), "Decay of NorMuon's second moment of each row."),),
    row_factors=row_factors,
)
