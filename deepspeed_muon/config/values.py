"""Types of the settings' values: what a number, a flag, a rate or a list of sizes may be."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field

WireDtypeName = Literal["auto", "fp32", "bf16", "fp16", "int8"]
MomentumDtypeName = Literal["fp32", "bf16"]
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
