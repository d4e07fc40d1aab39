"""``optimizer.params`` of the DeepSpeed JSON: every key, its default and its check.

The keys of DeepSpeed's own Muon keep their names, meanings and defaults, so that an existing configuration runs
unchanged. Unknown keys are errors, because a misspelt key that is ignored is a run with the wrong settings.

Precedence, most specific last: the shared key (``lr``, ``weight_decay``), the half's key (``muon_lr``,
``adam_weight_decay``, ...), the caller's own param group.
"""

from __future__ import annotations

import difflib
import json
import numbers
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import numpy as np
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
from deepspeed_muon.routing.shapes import ShapeRules

__all__ = [
    "GROUP_KEYS",
    "HealthConfig",
    "MomentumDtypeName",
    "MuonConfig",
    "QkClipConfig",
    "RestoreConfig",
    "WireDtypeName",
]

WireDtypeName = Literal["auto", "fp32", "bf16", "fp16"]
TensorParallelMode = Literal["gather", "distributed"]
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


# Bounds beyond which a value is a slip: far above what anyone runs, far below where fp32 arithmetic stops.
MAX_RATE = 1e4
"""Largest rate and weight decay."""
MAX_EPS = 100.0
"""Largest ``eps`` of AdamW; 1 is in use."""
MAX_NS_EPS = 0.01
"""Largest ``ns_eps``: a matrix whose direction is smaller than that is no longer orthogonalised."""
MIN_EPS = 1e-30
"""Smallest ``eps`` and ``ns_eps``: well inside fp32, where 1e-46 is 0 and divides nothing by nothing."""
MAX_STEPS = 1_000_000
"""Largest number of steps between two samples of ``health``."""
MAX_CHUNK_NUMEL = 1 << 40


def _number(value: Any) -> Any:
    """Let numbers through, those of numpy and one-element tensors too; say what else the value is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, str):
        if value == "auto":
            raise ValueError(
                "is 'auto', which only the Hugging Face integrations fill in (for lr, betas, eps and weight_decay); "
                "write a number"
            )
        try:
            number = float(value)
        except ValueError:
            raise ValueError("must be a number") from None
        raise ValueError(
            f"must be a number, not a text: write {number:.12g} without quotes (YAML wants a point, as in 1.0e-4)"
        )
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ValueError("must be a number")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _flag(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError("must be true or false")


def _pair(value: Any) -> Any:
    return _number(value) if isinstance(value, (str, bool)) or not hasattr(value, "__len__") else value


_Number = Annotated[float, BeforeValidator(_number)]
_Whole = Annotated[int, BeforeValidator(_number)]
_Flag = Annotated[bool, BeforeValidator(_flag)]
_Rate = Annotated[_Number, Field(ge=0, le=MAX_RATE)]
_Fraction = Annotated[_Number, Field(ge=0, lt=1)]
# AdamW divides by the root of the second moment: without a memory it is the sign of the gradient, or blows up.
_SecondBeta = Annotated[_Number, Field(gt=0, lt=1)]
_Eps = Annotated[_Number, Field(ge=MIN_EPS, le=MAX_EPS)]
_NsEps = Annotated[_Number, Field(ge=MIN_EPS, le=MAX_NS_EPS)]
_Positive = Annotated[_Number, Field(gt=0, allow_inf_nan=False)]


_Size = Annotated[_Whole, Field(ge=1, strict=True)]
_Sizes = Annotated[list[_Size], Field(min_length=1)]
_Fractions = Annotated[list[Annotated[_Number, Field(gt=0, lt=1)]], Field(min_length=2)]

# What a value of several kinds may be: pydantic complains once for each kind.
_ALLOWED = {
    "ns_schedule": "must be one of {} or a list of triples [a, b, c]".format(
        ", ".join(map(repr, get_args(NsScheduleName)))
    ),
    "split": "must be 'qkv', 'gate_up', a list of whole sizes, or a list of at least 2 fractions between 0 and 1",
    "heads": "must be a whole number of at least 1, or a list of those",
    "share_matrices": "must be 'auto', false, or a whole number of at least 2",
}

TORCH_OPTIONS = {
    "maximize": "negate the loss instead",
    "amsgrad": "it has no counterpart here",
    "differentiable": "a step is not differentiable here",
    "capturable": "a step is not captured as a whole; CUDA graphs are used inside where they pay",
    "foreach": "ns_backend and torch_adam choose the kernels",
    "fused": "ns_backend and torch_adam choose the kernels",
    "ns_coefficients": "write ns_schedule: [[a, b, c], ...] with one triple for each step",
}
"""Options of torch's optimizers that this one does not have, and what to do instead."""


class QkClipConfig(BaseModel):
    """The settings of QK-clip (:mod:`deepspeed_muon.qk_clip.logits`).

    Attributes:
        threshold: Attention logits above it are clipped.
        alpha: Share of the queries; the keys have the rest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    threshold: _Positive = 100.0
    alpha: Annotated[_Number, Field(ge=0, le=1)] = 0.5

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
        every: Steps between samples, which go to DeepSpeed's monitor; 0 for none, at most :data:`MAX_STEPS`.
        matrices: Matrices that a sample measures, another set each time.
        check: Whether every result is checked, and redone in fp32 where it is wrong.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: _Whole = Field(default=100, ge=0, le=MAX_STEPS)
    matrices: _Whole = Field(default=4, ge=1)
    check: _Flag = True

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


class RestoreConfig(BaseModel):
    """The object under ``restore_from``: the arguments of :func:`deepspeed_muon.checkpoint.restore`.

    Attributes:
        path: The folder to read.
        hyperparameters: Take the settings of the param groups from there.
        progress: Restore step counters, scheduler and loss scale.
        scheduler: With ``progress``, restore the scheduler; unset it to go on with another schedule.
        allow_nonfinite: Restore a state that holds infinities or NaN, too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(min_length=1)
    hyperparameters: _Flag = True
    progress: _Flag = True
    scheduler: _Flag = True
    allow_nonfinite: _Flag = False

    @classmethod
    def parse(cls, value: Any) -> Any:
        """Turn a path into the object; leave the rest to pydantic.

        Raises:
            ValueError: For an unknown key, or what cannot be a path.
        """
        if isinstance(value, str):
            value = {"path": value}
        if isinstance(value, Mapping):
            for key in value:
                if key not in cls.model_fields:
                    raise ValueError(unknown_key_message(str(key), cls.model_fields, "restore_from"))
            if "\0" in str(value.get("path", "")):
                raise ValueError("holds a NUL character, which no path can")
        elif value is not None and not isinstance(value, cls):
            raise ValueError("must be a path, or an object with path and the arguments of restore")
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
    betas: Annotated[tuple[_Fraction, _SecondBeta], BeforeValidator(_pair)] = (0.9, 0.95)
    eps: _Eps = 1e-10
    ns_method: NsMethod = "gram"
    per_head_muon: _Flag = False
    torch_adam: _Flag = False
    adam_w_mode: _Flag = True

    # Keys of this project.
    nesterov: _Flag = True
    variant: VariantName = "muon"
    beta2: _Fraction = 0.95
    weight_decay_mode: WeightDecayMode = "decoupled"
    qk_clip: QkClipConfig | None = None
    ns_steps: _Whole | None = Field(default=None, ge=1, le=100)
    ns_schedule: NsScheduleName | list[tuple[_Number, _Number, _Number]] = "quintic"
    ns_dtype: NsDtypeName = "auto"
    ns_eps: _NsEps = 1e-12
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
    min_muon_params: _Whole = Field(default=0, ge=0)
    nonfinite_grad: Literal["skip", "error"] = "skip"
    tensor_parallel_mode: TensorParallelMode = "gather"
    exchange_chunk_numel: _Whole = Field(default=1 << 26, ge=1, le=MAX_CHUNK_NUMEL)
    exchange_overlap: _Flag = True
    order: OrderName = "balanced"
    ranks_per_node: _Whole | None = Field(default=None, ge=1)
    share_matrices: Literal["auto", False] | Annotated[_Whole, Field(ge=2, strict=True)] = "auto"
    consolidate_on_save: _Flag = False
    restore_from: Annotated[RestoreConfig | None, BeforeValidator(RestoreConfig.parse)] = None
    health: Annotated[HealthConfig, BeforeValidator(HealthConfig.parse)] = HealthConfig()

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None, *, where: str = "optimizer.params") -> MuonConfig:
        """Check ``optimizer.params`` and return the typed settings.

        Args:
            params: The JSON object, or ``None`` when the section is absent.
            where: What messages call the section.

        Raises:
            ConfigError: With one line per bad key, naming the key, the value and what is allowed.
            ScheduleError: If ``ns_schedule`` cannot run for ``ns_steps``.
        """
        if not isinstance(params, (Mapping, type(None))):
            raise ConfigError(f"{where}: must be an object, got {_shown(params)}")
        for key in params or {}:
            if key not in cls.model_fields:
                raise ConfigError(unknown_key_message(str(key), cls.model_fields, where))
        try:
            config = cls.model_validate(dict(params or {}))
        except ValidationError as error:
            raise ConfigError(_readable(error, params or {}, where)) from error
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
        for key in ("weight_decay", "muon_weight_decay", "adam_weight_decay"):
            if self.weight_decay_mode == "independent" and (getattr(self, key) or 0.0) > 1.0:
                raise ConfigError(
                    f"optimizer.params.{key}: must be at most 1 with weight_decay_mode 'independent', where it is the "
                    f"share of a weight that goes in each step (got {getattr(self, key)!r})"
                )

    def check_world(self, ranks: int) -> None:
        """Refuse what does not fit the number of ranks.

        Args:
            ranks: Of the whole run.

        Raises:
            ConfigError: Naming the key and both numbers.
        """
        if self.ranks_per_node is not None and self.ranks_per_node > ranks:
            raise ConfigError(
                f"optimizer.params.ranks_per_node: one machine cannot have {self.ranks_per_node} of {ranks} ranks; "
                f"write at most {ranks}, or leave it out"
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
    if key in TORCH_OPTIONS:
        return f"{where}: {key!r} is an option of torch's optimizers that this one does not have; {TORCH_OPTIONS[key]}"
    names = sorted(str(name) for name in known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
    return f"{where}: unknown key {key!r}; {hint}"


_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}


def _readable(error: ValidationError, params: Mapping[str, Any], where: str) -> str:
    """Turn pydantic's report into one line per key."""
    lines: dict[str, str] = {}
    for item in error.errors():
        location, value, message = item["loc"], item["input"], str(item["msg"])
        key, context = str(location[0]), item.get("ctx", {})
        if item["type"] in _BOUNDS:
            word, name = _BOUNDS[item["type"]]
            message = f"must be {word} {context[name]:g}"
        elif isinstance(context.get("error"), ValueError):
            message = str(context["error"])
        if key in _ALLOWED:
            value, message = params[key], _ALLOWED[key]
            if key in ("split", "heads") and len(location) > 1:
                key, value = f"{key}[{location[1]!r}]", value[location[1]]
            elif key in ("split", "heads"):
                message = f"must be an object: name pattern to a value, which {message}"
        else:
            for part in location[1:]:
                key += f"[{part}]" if isinstance(part, int) else f".{part}"
        lines.setdefault(key, f"{where}.{key}: {message} (got {_shown(value)})")
    return "\n".join(lines.values())


def _shown(value: Any) -> str:
    """Return a value in one short line."""
    return " ".join(reprlib.repr(value).split())
