"""Muon itself: the orthogonalised direction is the update.

Source: Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

from deepspeed_muon.variants.variant import Variant

VARIANT = Variant("muon")
