"""``optimizer.params`` of the DeepSpeed JSON: every key, its default and its check.

The keys of DeepSpeed's own Muon keep their names, meanings and defaults, so that an existing configuration runs
unchanged. Unknown keys are errors, because a misspelt key that is ignored is a run with the wrong settings.

Precedence, most specific last: the shared key (``lr``, ``weight_decay``), the half's key (``muon_lr``,
``adam_weight_decay``, ...), the caller's own param group.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.coefficients import (
    Coefficients,
    NsScheduleName,
    resolve_schedule,
    tolerates_rounding,
)
from deepspeed_muon.math.newton_schulz import NsDtypeName, NsMethod, NsSettings, resolve_ns_dtype
from deepspeed_muon.math.normuon import VariantName
from deepspeed_muon.math.scaling import AdjustLrName
from deepspeed_muon.math.weight_decay import WeightDecayMode
from deepspeed_muon.plan.order import OrderName
from deepspeed_muon.shapes import ShapeRules

__all__ = ["GROUP_KEYS", "HealthConfig", "MomentumDtypeName", "MuonConfig", "QkClipConfig", "WireDtypeName"]

WireDtypeName = Literal["auto", "fp32", "bf16", "fp16"]
MomentumDtypeName = Literal["fp32", "bf16"]

DEFAULT_MUON_LR = 0.02
DEFAULT_ADAM_LR = 3e-4

_WIRE_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Keys that a caller may set in a param group of its own, next to "params" and a MoE group's bookkeeping.
GROUP_KEYS = frozenset(
    {
        "lr",
        "muon_lr",
        "adam_lr",
        "weight_decay",
        "muon_weight_decay",
        "adam_weight_decay",
        "momentum",
        "nesterov",
        "betas",
        "eps",
        "adjust_lr_fn",
        "beta2",
        "weight_decay_mode",
    }
)


def _no_auto(value: Any) -> Any:
    if value == "auto":
        raise ValueError(
            "is 'auto', which only the Hugging Face integrations fill in (for lr, betas, eps and weight_decay); "
            "write a number"
        )
    return value


_Rate = Annotated[float, BeforeValidator(_no_auto), Field(ge=0, allow_inf_nan=False)]
_Fraction = Annotated[float, BeforeValidator(_no_auto), Field(ge=0, lt=1)]
_Positive = Annotated[float, BeforeValidator(_no_auto), Field(gt=0, allow_inf_nan=False)]


_Size = Annotated[int, Field(ge=1, strict=True)]
_Sizes = Annotated[list[_Size], Field(min_length=1)]
_Fractions = Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=2)]


class QkClipConfig(BaseModel):
    """The settings of QK-clip (:mod:`deepspeed_muon.math.qk_clip`).

    Attributes:
        threshold: Attention logits above it are clipped.
        alpha: Share of the queries; the keys have the rest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    threshold: _Positive = 100.0
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        for key in value if isinstance(value, Mapping) else ():
            if key not in cls.model_fields:
                raise ValueError(unknown_key_message(str(key), cls.model_fields, "qk_clip"))
        return value


class HealthConfig(BaseModel):
    """The object under ``health``: what each step checks of itself, and how often it is measured.

    Attributes:
        every: Steps between samples, which go to DeepSpeed's monitor; 0 for none.
        matrices: Matrices that a sample measures, another set each time.
        check: Whether every result is checked, and redone in fp32 where it is wrong.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(default=100, ge=0)
    matrices: int = Field(default=4, ge=1)
    check: bool = True

    @classmethod
    def parse(cls, value: Any) -> Any:
        """Turn the short forms (``true``, ``false``, ``null``) into the object; leave the rest to pydantic.

        Raises:
            ValueError: For an unknown key or a value of another kind.
        """
        if value is None or value is True:
            return cls()
        if value is False:
            return cls(every=0, check=False)
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError("must be an object with every, matrices and check, or true or false")
        for key in value:
            if key not in cls.model_fields:
                raise ValueError(unknown_key_message(str(key), cls.model_fields, "of its keys"))
        return value


class MuonConfig(BaseModel):
    """The settings of one optimizer. Frozen: what the ranks compared at start is what runs.

    Attributes are the JSON keys; the README's table says what each one does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Keys of DeepSpeed's own Muon, with its meanings and defaults.
    lr: _Rate | None = None
    muon_lr: _Rate | None = None
    adam_lr: _Rate | None = None
    momentum: _Fraction = 0.95
    weight_decay: _Rate = 0.0
    betas: Annotated[tuple[_Fraction, _Fraction], BeforeValidator(_no_auto)] = (0.9, 0.95)
    eps: _Positive = 1e-10
    ns_method: NsMethod = "gram"
    per_head_muon: bool = False
    torch_adam: bool = False
    adam_w_mode: bool = True

    # Keys of this project.
    nesterov: bool = True
    variant: VariantName = "muon"
    beta2: _Fraction = 0.95
    weight_decay_mode: WeightDecayMode = "decoupled"
    qk_clip: QkClipConfig | None = None
    ns_steps: int | None = Field(default=None, ge=1, le=100)
    ns_schedule: NsScheduleName | list[Coefficients] = "quintic"
    ns_dtype: NsDtypeName = "auto"
    ns_eps: _Positive = 1e-12
    ns_backend: Literal["auto", "ops", "torch"] = "auto"
    adjust_lr_fn: AdjustLrName = "original"
    wire_dtype: WireDtypeName = "auto"
    momentum_dtype: MomentumDtypeName | None = None
    muon_weight_decay: _Rate | None = None
    adam_weight_decay: _Rate | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    split: dict[str, Literal["qkv", "gate_up"] | _Sizes | _Fractions] = Field(default_factory=dict)
    heads: dict[str, _Size | _Sizes] = Field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    min_muon_params: int = Field(default=0, ge=0)
    nonfinite_grad: Literal["skip", "error"] = "skip"
    tensor_parallel_mode: Literal["gather", "distributed"] = "gather"
    exchange_chunk_numel: int = Field(default=1 << 26, ge=1)
    exchange_overlap: bool = True
    order: OrderName = "balanced"
    ranks_per_node: int | None = Field(default=None, ge=1)
    share_matrices: Literal["auto", False] | Annotated[int, Field(ge=2, strict=True)] = "auto"
    consolidate_on_save: bool = False
    restore_from: str | None = Field(default=None, min_length=1)
    health: Annotated[HealthConfig, BeforeValidator(HealthConfig.parse)] = HealthConfig()

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> MuonConfig:
        """Check ``optimizer.params`` and return the typed settings.

        Args:
            params: The JSON object, or ``None`` when the section is absent.

        Raises:
            ConfigError: With one line per bad key, naming the key, the value and what is allowed.
            ScheduleError: If ``ns_schedule`` cannot run for ``ns_steps``.
        """
        for key in params or {}:
            if key not in cls.model_fields:
                raise ConfigError(unknown_key_message(str(key), cls.model_fields, "optimizer.params"))
        try:
            config = cls.model_validate(dict(params or {}))
        except ValidationError as error:
            raise ConfigError(_readable(error)) from error
        config.coefficients()
        config.check_combinations()
        return config

    def check_combinations(self) -> None:
        """Refuse keys that contradict each other.

        Raises:
            ConfigError: Naming both keys.
        """
        if not self.adam_w_mode and self.weight_decay_mode != "decoupled":
            raise ConfigError(
                f"optimizer.params.weight_decay_mode: {self.weight_decay_mode!r} needs adam_w_mode true; "
                f"with adam_w_mode false the decay of AdamW's half is a term of the gradient"
            )

    def coefficients(self) -> tuple[Coefficients, ...]:
        """Return the ``(a, b, c)`` of every Newton-Schulz step.

        Raises:
            ScheduleError: If ``ns_schedule`` is not valid for ``ns_steps``.
        """
        return resolve_schedule(self.ns_schedule, self.ns_steps)

    def ns_settings(self, device: torch.device) -> NsSettings:
        """Return what the Newton-Schulz iteration needs on ``device``.

        ``ns_dtype: auto`` is the fast dtype of the device, or fp32 for a schedule that has no margin for its rounding.
        """
        coefficients = self.coefficients()
        dtype = resolve_ns_dtype(self.ns_dtype, device)
        if self.ns_dtype == "auto" and not tolerates_rounding(coefficients, dtype):
            dtype = torch.float32
        return NsSettings(coefficients=coefficients, method=self.ns_method, dtype=dtype, eps=self.ns_eps)

    def resolved_wire_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which fragments travel: bf16 for a half-precision model under ``auto``, else fp32.

        Args:
            model_dtype: The dtype of the weights that the forward pass uses.
        """
        if self.wire_dtype != "auto":
            return _WIRE_DTYPES[self.wire_dtype]
        return torch.bfloat16 if model_dtype in (torch.bfloat16, torch.float16) else torch.float32

    def shape_rules(self) -> ShapeRules:
        """Return what the settings say about the division of weights into matrices."""
        return ShapeRules(
            split=self.split, heads=self.heads, transposed=self.transposed, per_head=self.per_head_muon
        )

    def muon_defaults(self) -> dict[str, Any]:
        """Return the settings of a Muon param group before the caller's own group overrides them."""
        return {
            "lr": _first(self.muon_lr, self.lr, DEFAULT_MUON_LR),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": _first(self.muon_weight_decay, self.weight_decay),
            "adjust_lr_fn": self.adjust_lr_fn,
            "beta2": self.beta2,
            "weight_decay_mode": self.weight_decay_mode,
        }

    def adam_defaults(self) -> dict[str, Any]:
        """Return the settings of an AdamW param group before the caller's own group overrides them."""
        return {
            "lr": _first(self.adam_lr, self.lr, DEFAULT_ADAM_LR),
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": _first(self.adam_weight_decay, self.weight_decay),
            "weight_decay_mode": self.weight_decay_mode,
        }

    @property
    def reference_lr(self) -> float:
        """The rate that a scheduler's single number stands for: ``lr`` where given, else Muon's rate."""
        return float(_first(self.lr, self.muon_lr, DEFAULT_MUON_LR))

    def digest(self) -> str:
        """Return a canonical text of all settings, for the comparison between ranks."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def unknown_key_message(key: str, known: Any, where: str) -> str:
    """Return the text of an unknown-key error, with the nearest known key where one is near.

    Args:
        key: What the user wrote.
        known: The names that would have been accepted.
        where: The section of the configuration, for the message.
    """
    names = sorted(str(name) for name in known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
    return f"{where}: unknown key {key!r}; {hint}"


def _readable(error: ValidationError) -> str:
    """Turn pydantic's report into one line per key."""
    lines: list[str] = []
    for item in error.errors():
        location = item["loc"]
        key = ".".join(map(str, location[: 2 if location[0] == "health" else 1])) if location else "?"
        original = item.get("ctx", {}).get("error")
        message = str(original) if isinstance(original, ValueError) else item["msg"]
        line = f"optimizer.params.{key}: {message} (got {item['input']!r})"
        if line not in lines:
            lines.append(line)
    return "\n".join(lines)
