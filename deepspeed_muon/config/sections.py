"""The settings that are objects: ``qk_clip``, ``health`` and ``restore_from``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deepspeed_muon.config import values as v
from deepspeed_muon.config.messages import unknown_key_message

__all__ = ["HealthConfig", "QkClipConfig", "RestoreConfig"]


class _Section(BaseModel):
    """An object among the settings. Unknown keys in it are errors; a short form may stand for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
            raise ValueError("; ".join(unknown_key_message(key, cls.model_fields) for key in unknown))
        return value


class QkClipConfig(_Section):
    """The object under ``qk_clip`` (:mod:`deepspeed_muon.qk_clip.logits`)."""

    threshold: v.Positive = Field(default=100.0, description="Attention logits above it are clipped.")
    alpha: Annotated[v.Number, Field(ge=0, le=1)] = Field(
        default=0.5, description="Share of the factor that the queries get; the keys get the rest."
    )


class HealthConfig(_Section):
    """The object under ``health``: whether every update is checked, and how often some are measured."""

    every: v.Whole = Field(
        default=100,
        ge=0,
        le=v.MAX_STEPS,
        description="Steps between samples, which go to DeepSpeed's monitor; 0: no samples.",
    )
    matrices: v.Whole = Field(
        default=4, ge=1, description="Matrices that a sample measures, other ones each time."
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
            raise ValueError("must be an object with every, matrices and check, or true or false")
        return value


class RestoreConfig(_Section):
    """The object under ``restore_from``: the arguments of :func:`deepspeed_muon.checkpoint.restore`."""

    path: str = Field(min_length=1, description="The folder to read.")
    hyperparameters: v.Flag = Field(
        default=True,
        description="Take the settings of the param groups from there, unless it was converted from another optimizer.",
    )
    progress: v.Flag = Field(default=True, description="Restore step counters, scheduler and loss scale.")
    scheduler: v.Flag = Field(
        default=True,
        description="With `progress`, restore the scheduler; false: go on with this run's own schedule.",
    )
    allow_nonfinite: v.Flag = Field(
        default=False, description="Restore a state that holds infinities or NaN, too."
    )

    @classmethod
    def _long_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"path": value}
        if isinstance(value, Mapping) and "\0" in str(value.get("path", "")):
            raise ValueError("holds a NUL character, which no path can")
        if not isinstance(value, (Mapping, cls)):
            raise ValueError("must be a path, or an object with path and the arguments of restore")
        return value
