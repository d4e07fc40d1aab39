"""Muon itself: the orthogonalised direction is the update.

Source: Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

from torch import Tensor

from deepspeed_muon.variants.variant import ReferenceRates, Variant


def reference(weights: Tensor, direction: Tensor, state: dict[str, Tensor], rates: ReferenceRates) -> Tensor:
    """See :data:`.variant.Reference`."""
    return rates.scale * rates.orthogonalize(direction)


VARIANT = Variant("muon", reference)
