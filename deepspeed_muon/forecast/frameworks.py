"""The Muons of other frameworks, and the settings here with which a matrix gets the same step.

:mod:`.translation` translates configurations by these rows, and scripts/settings_table.py writes them into
``docs/rates.md``.
A test writes out the formula of every row and compares it with the float64 reference under the settings of the row.

A sum of gradients, ``M <- momentum * M + G``, as momentum is the running mean here times ``1 / (1 - momentum)``, which
orthogonalisation cancels: also with Nesterov momentum, and as long as momentum is constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrameworkSettings:
    """One configuration of another framework's Muon and its counterpart.

    Attributes:
        framework: The name.
        theirs: Settings that choose the scale of the update, by their names there.
        ours: The counterparts in ``optimizer.params``, with all that differs from the defaults but rates and decay.
        differs: What remains different beside the coefficients of the iteration; empty if nothing does.
    """

    framework: str
    theirs: Mapping[str, object]
    ours: Mapping[str, object]
    differs: str = ""


SOURCES = {
    "Megatron-LM": "NVIDIA-NeMo/Emerging-Optimizers: emerging_optimizers/orthogonalized_optimizers/muon.py",
    "verl": "volcengine/verl: verl/utils/megatron/optimizer.py",
    "torch": "pytorch/pytorch: torch/optim/_muon.py",
    "Keller Jordan": "KellerJordan/Muon: muon.py",
    "DeepSpeed": "deepspeedai/DeepSpeed: deepspeed/runtime/zero/muon/original_muon.py",
    "Dion": "microsoft/dion: dion/muon.py",
    "Moonlight": "MoonshotAI/Moonlight: examples/toy_train.py",
    "xtuner": "InternLM/xtuner: xtuner/v1/config/optim.py (MuonConfig)",
    "nanochat": "karpathy/nanochat: nanochat/optim.py",
}
"""Repository and file of the formula of each framework."""

_PLAIN = {"nesterov": False}  # off there by default, on here

FRAMEWORKS = (
    FrameworkSettings("Megatron-LM", {"muon_scale_mode": "spectral"}, {**_PLAIN, "adjust_lr_fn": "spectral"}),
    FrameworkSettings(
        "Megatron-LM", {"muon_scale_mode": "unit_rms_norm"}, {**_PLAIN, "adjust_lr_fn": "unit_rms_norm"}
    ),
    FrameworkSettings(
        "Megatron-LM", {"muon_scale_mode": "shape_scaling"}, {**_PLAIN, "adjust_lr_fn": "original"}
    ),
    FrameworkSettings(
        "Megatron-LM",
        {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 0.5},
        {**_PLAIN, "adjust_lr_fn": "spectral", "update_scale": 0.5},
    ),
    FrameworkSettings(
        "Megatron-LM",
        {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 0.2},
        {**_PLAIN, "adjust_lr_fn": "match_rms_adamw"},
    ),
    FrameworkSettings(
        "verl",
        {"muon_scale_mode": "spectral", "muon_match_adamw_update_rms": True, "betas": (0.9, 0.999)},
        {**_PLAIN, "adjust_lr_fn": "spectral", "update_scale": (0.1 / 1.9) ** 0.5},
    ),
    FrameworkSettings("torch", {"adjust_lr_fn": None}, {"adjust_lr_fn": "original"}),
    FrameworkSettings("torch", {"adjust_lr_fn": "match_rms_adamw"}, {"adjust_lr_fn": "match_rms_adamw"}),
    FrameworkSettings("Keller Jordan", {}, {"adjust_lr_fn": "original"}),
    FrameworkSettings(
        "DeepSpeed",
        {},
        {"adjust_lr_fn": "original"},
        "at ZeRO 1 to 3 it clips the update by `gradient_clipping`, here it is the gradient",
    ),
    FrameworkSettings("Dion", {"adjust_lr": "spectral_norm"}, {**_PLAIN, "adjust_lr_fn": "unit_rms_norm"}),
    FrameworkSettings("Dion", {"adjust_lr": "rms_norm"}, {**_PLAIN, "adjust_lr_fn": "match_rms_adamw"}),
    FrameworkSettings("Moonlight", {}, {"adjust_lr_fn": "match_rms_adamw"}),
    FrameworkSettings(
        "xtuner", {"adjust_lr": "rms_norm"}, {"adjust_lr_fn": "match_rms_adamw", "clip": "adamw"}
    ),
    FrameworkSettings(
        "xtuner", {"adjust_lr": "spectral_norm"}, {"adjust_lr_fn": "unit_rms_norm", "clip": "adamw"}
    ),
    FrameworkSettings(
        "nanochat",
        {},
        {
            "variant": "normuon",
            "beta2": 0.9,
            "weight_decay_mode": "cautious",
            "ns_schedule": "polar_express_5",
            "momentum": 0.97,
            "momentum_warmup": {"from": 0.85, "steps": 400},
        },
        "it also equalises the rows before the iteration, gives the result the norm of an orthogonal matrix, keeps "
        "moments of the columns of wide matrices, multiplies decay by the scale, and lowers momentum at the end",
    ),
)
"""All rows. Dion and xtuner have a third choice, no scale at all, which no rule here is."""


def framework_settings(framework: str, **theirs: object) -> FrameworkSettings | None:
    """Return the row of a framework with these settings, or ``None``."""
    rows = (row for row in FRAMEWORKS if row.framework == framework and dict(row.theirs) == theirs)
    return next(rows, None)
