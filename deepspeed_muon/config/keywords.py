"""Keywords of ``Muon`` for type checkers; scripts/settings_table.py writes them from settings.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from torch import Tensor


# fmt: off
class MuonKeywords(TypedDict, total=False):
    """The keys of :class:`~deepspeed_muon.MuonConfig` without ``lr``, and the types of their values."""

    beta2: float
    muon_lr: Tensor | float | None
    adam_lr: Tensor | float | None
    momentum: float
    momentum_warmup: Mapping[str, object] | str | bool | None
    nesterov: bool
    weight_decay: float
    muon_weight_decay: float | None
    adam_weight_decay: float | None
    weight_decay_mode: Literal["decoupled", "independent", "cautious"]
    betas: Sequence[float]
    eps: float
    adam_w_mode: bool
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral", "unit_rms_norm"]
    update_scale: float
    ns_method: Literal["gram", "standard"]
    ns_schedule: Literal["quintic", "polar_express", "polar_express_5", "cans", "deepseekv4"] | Sequence[Sequence[float]]
    ns_steps: int | None
    ns_dtype: Literal["auto", "fp32", "bf16", "fp16"]
    ns_backend: Literal["auto", "ops", "torch"]
    variant: Literal["muon", "normuon", "muon_eq"]
    qk_clip: Mapping[str, object] | str | bool | None
    momentum_dtype: Literal["fp32", "bf16", "int8"] | None
    wire_dtype: Literal["auto", "fp32", "bf16", "fp16"]
    matrices: Mapping[str, Mapping[str, object]]
    include: Sequence[str]
    exclude: Sequence[str]
    nonfinite_grad: Literal["skip", "error"]
    exchange_chunk_numel: int
    exchange_overlap: bool
    health: int
    consolidate_on_save: bool
    restore_from: Mapping[str, object] | str | bool | None
