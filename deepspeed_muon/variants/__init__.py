"""Muon itself, and its variants, one file each; :mod:`.variant` shows how to add one."""

from __future__ import annotations

from deepspeed_muon.variants import muon_eq, normuon
from deepspeed_muon.variants.variant import RowState, Setting, Variant

VARIANTS: dict[str, Variant] = {
    variant.name: variant for variant in (Variant("muon"), normuon.VARIANT, muon_eq.VARIANT)
}
"""The variants by their name, the value of ``optimizer.params.variant``."""

SETTINGS: dict[str, Setting] = {
    setting.name: setting for variant in VARIANTS.values() for setting in variant.settings
}
"""All keys of ``optimizer.params`` that only one variant reads."""

ROW_STATE: dict[str, RowState] = {
    variant.state.key: variant.state for variant in VARIANTS.values() if variant.state is not None
}
"""The entries of the optimizer state that have one number for each row, by key."""
