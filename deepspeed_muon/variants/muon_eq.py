"""MuonEq by rows (arXiv 2603.28254): the rows of the direction are brought to unit norm before they are orthogonalised.

For each row ``i`` of the ``r x c`` direction ``u``, before Newton-Schulz::

    u_i <- u_i / |u_i|

A row of zeros stays one. The authors' code treats rows with a norm below about ``1e-4`` differently; here the result
does not depend on the scale of the gradients. The variant has no state.
"""

from __future__ import annotations

from torch import Tensor

from deepspeed_muon.math.newton_schulz import divisors
from deepspeed_muon.variants.variant import Variant


def before_iteration(directions: Tensor) -> Tensor:
    """Bring the rows of a batch of directions to unit norm; see :data:`.variant.BeforeIteration`.

    Returns:
        A new fp32 tensor (float64 for float64 directions).
    """
    return directions / divisors(directions, -1)  # (batch, rows, 1)


VARIANT = Variant(
    "muon_eq",
    description="rows of the momentum direction are normalised before orthogonalisation",
    before_iteration=before_iteration,
)
