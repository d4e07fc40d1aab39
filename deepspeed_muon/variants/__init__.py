"""The variants of Muon, one file each. A new one needs its file and a line in :data:`VARIANTS`."""

from __future__ import annotations

from deepspeed_muon.variants import hyperball, muon, muon_eq, muown, normuon
from deepspeed_muon.variants.variant import RowState, Setting, Variant

VARIANTS: dict[str, Variant] = {
    each.VARIANT.name: each.VARIANT for each in (muon, normuon, muon_eq, hyperball, muown)
}
"""``optimizer.params.variant`` to what it means."""

SETTINGS: dict[str, Setting] = {each.name: each for variant in VARIANTS.values() for each in variant.settings}
"""All keys of ``optimizer.params`` that only one variant reads."""

ROW_STATE: dict[str, RowState] = {each.key: each for variant in VARIANTS.values() for each in variant.state}
"""All entries of the optimizer state that some variant keeps for each row."""
