"""The settings that are objects: ``matrices``, ``qk_clip``, ``health`` and ``restore_from``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deepspeed_muon.config import values as v
from deepspeed_muon.config.messages import unknown_key_message


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

    split: Literal["qkv", "gate_up"] | v.Sizes | v.Fractions | None = Field(
        default=None,
        description="Parts of a fused projection, each a matrix of its own: `qkv`, `gate_up`, sizes, or fractions of "
        "the output.",
    )
    heads: Literal["config"] | v.Size | v.Sizes | None = Field(
        default=None,
        description="Attention heads, each a matrix of its own: their number, or one number for each part; `config`: "
        "query, key and value projections have the heads that the model's `config` or DeepSpeed's tags say.",
    )
    transposed: v.Flag | None = Field(
        default=None, description="Whether the weight is stored as input x output; unset: its module tells."
    )

    @classmethod
    def _long_form(cls, value: Any) -> Any:
        if not isinstance(value, (Mapping, cls)):
            raise ValueError("must be an object with split, heads or transposed")
        return value


class QkClipConfig(_Section):
    """The object under ``qk_clip`` (:mod:`deepspeed_muon.qk_clip.logits`)."""

    key = "qk_clip"

    threshold: v.Positive = Field(default=100.0, description="Attention logits above it are clipped.")
    alpha: Annotated[v.Number, Field(ge=0, le=1)] = Field(
        default=0.5, description="Share of the factor that the queries get; the keys get the rest."
    )


class HealthConfig(_Section):
    """The object under ``health``: whether every update is checked, and how often some are measured."""

    key = "health"

    every: v.Whole = Field(
        default=100,
        ge=0,
        le=v.MAX_STEPS,
        description="Steps between samples, which go to DeepSpeed's monitor; 0: no samples.",
    )
    check: v.Flag = Field(
        default=True, description="Check every orthogonalised matrix, and redo it in fp32 where it is wrong."
    )

    @classmethod
    def _long_form(cls, value: Any) -> Any:
        if value is None or value is True:
            return {}
        if value is False:
            return {"every": 0, "check": False}
        if not isinstance(value, (Mapping, cls)):
            raise ValueError("must be an object with every and check, or true or false")
        return value


class RestoreConfig(_Section):
    """The object under ``restore_from``: what :func:`deepspeed_muon.checkpoint.restore` reads before the first step."""

    key = "restore_from"

    path: str = Field(min_length=1, description="The folder to read.")
    progress: v.Flag = Field(
        default=True,
        description="Go on with the saved run: its step counters, schedule, loss scale, rates and other settings of "
        "the param groups; false: a new run that starts from the saved weights and momentum.",
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
