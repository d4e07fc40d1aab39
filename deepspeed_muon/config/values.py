"""Types of the settings' values: numbers, flags, rates, lists of sizes, and the settings that are objects."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from deepspeed_muon.config.messages import REMOVED, unknown_key_message

WireDtypeName = Literal["auto", "fp32", "bf16", "fp16", "int8"]
MomentumDtypeName = Literal["fp32", "bf16", "int8"]
TensorParallelMode = Literal["gather", "distributed"]

# A value beyond these bounds is a mistake. They lie far above useful values and far below the limits of fp32.
MAX_RATE = 1e4
"""Largest rate and weight decay."""
MAX_EPS = 100.0
"""Largest ``eps`` of AdamW; 1 is in use."""
MIN_EPS = 1e-30
"""Smallest ``eps``: well inside fp32, where 1e-46 becomes 0 and 0 / 0 is NaN."""
MAX_STEPS = 1_000_000
"""Largest number of steps between two samples of ``health``."""
HEALTH_EVERY = 100
"""Steps between two samples of ``health`` by default."""
MAX_CHUNK_NUMEL = 1 << 40


def _number(value: Any) -> Any:
    """Accept numbers, also of numpy and in one-element tensors; raise with a hint for anything else."""
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


def pair(value: Any) -> Any:
    """Raise for anything that is not two values; pydantic checks each of them."""
    if isinstance(value, str):
        return _number(value)
    if not hasattr(value, "__len__") or len(value) != 2:
        raise ValueError("must be two numbers, as in [0.9, 0.95]")
    return value


def steps_between_samples(value: Any) -> Any:
    """Return the steps between two samples of health: 0 for ``False``, the default for ``True`` and ``None``."""
    if isinstance(value, Mapping):
        gone = [
            unknown_key_message(str(key), (), section="health") for key in value if f"health.{key}" in REMOVED
        ]
        raise ValueError("; ".join(gone) or "must be the steps between two samples, or true or false")
    if value is None or value is True:
        return HEALTH_EVERY
    return 0 if value is False else _number(value)


def by_pattern(value: Any) -> Any:
    """Return an empty object for ``None``; raise for anything else that is no object."""
    if not isinstance(value, (Mapping, type(None))):
        raise ValueError("must be an object: name pattern to an object with split, heads or transposed")
    return value or {}


Number = Annotated[float, BeforeValidator(_number)]
Whole = Annotated[int, BeforeValidator(_number)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Rate = Annotated[Number, Field(ge=0, le=MAX_RATE)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
# AdamW divides by the root of the second moment. With a decay of 0 the update is only the gradient's sign, or blows up.
SecondBeta = Annotated[Number, Field(gt=0, lt=1)]
Eps = Annotated[Number, Field(ge=MIN_EPS, le=MAX_EPS)]
Positive = Annotated[Number, Field(gt=0, allow_inf_nan=False)]
ChunkNumel = Annotated[Whole, Field(ge=1, le=MAX_CHUNK_NUMEL)]
Size = Annotated[Whole, Field(ge=1, strict=True)]
Sizes = Annotated[list[Size], Field(min_length=1)]
Fractions = Annotated[list[Annotated[Number, Field(gt=0, lt=1)]], Field(min_length=2)]


class _Section(BaseModel):
    """An object among the settings. Unknown keys in it are errors; a short form may stand for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: ClassVar[str]
    """The key that holds it."""

    @classmethod
    def _long_form(cls, value: Any) -> Any:
        """Return the object that a short form stands for, and any other value as it is."""
        return value

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        value = cls._long_form(value)
        unknown = (
            [str(key) for key in value if key not in cls.model_fields] if isinstance(value, Mapping) else []
        )
        if unknown:
            texts = [unknown_key_message(key, cls.model_fields, section=cls.key) for key in unknown]
            raise ValueError("; ".join(texts))
        return value


class MatricesConfig(_Section):
    """A value of ``matrices``: which matrices the weights that its pattern matches are made of."""

    key = "matrices"

    split: Literal["qkv", "gate_up"] | Sizes | Fractions | None = Field(
        default=None,
        description="Parts of a fused projection: `qkv`, `gate_up`, sizes, or fractions of the output.",
    )
    heads: Literal["config"] | Size | Sizes | None = Field(
        default=None,
        description="Attention heads: their number, one number per part, or `config`: from the model's `config` or "
        "DeepSpeed's tags.",
    )
    transposed: Flag | None = Field(
        default=None, description="The weight is stored as input x output; unset: decided by its module."
    )

    @classmethod
    def _long_form(cls, value: Any) -> Any:
        if not isinstance(value, (Mapping, cls)):
            raise ValueError("must be an object with split, heads or transposed")
        return value


class QkClipConfig(_Section):
    """The object under ``qk_clip`` (:mod:`deepspeed_muon.qk_clip.clip`)."""

    key = "qk_clip"

    threshold: Positive = Field(default=100.0, description="Heads with a larger logit are clipped.")
    alpha: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0.5, description="Exponent of the factor for queries; keys get `1 - alpha`."
    )


class RestoreConfig(_Section):
    """The object under ``restore_from``: what :func:`deepspeed_muon.checkpoint.restore` reads before the first step."""

    key = "restore_from"

    path: str = Field(min_length=1, description="Folder to read.")
    progress: Flag = Field(
        default=True,
        description="Continue the saved run with its step counters, schedule, loss scale and param group settings; "
        "`false`: a new run from the saved weights and momentum.",
    )

    @classmethod
    def _long_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"path": value}
        if isinstance(value, Mapping) and "\0" in str(value.get("path", "")):
            raise ValueError("holds a NUL character, which no path can")
        if not isinstance(value, (Mapping, cls)):
            raise ValueError("must be a path, or an object with path and progress")
        return value
