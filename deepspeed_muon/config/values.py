"""Types of the settings' values, the settings that are objects, and the error messages about both.

:class:`StatePolicy` combines the settings of this package and of DeepSpeed that decide the dtypes of the state.
"""

from __future__ import annotations

import contextlib
import difflib
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails
from torch import Tensor

TORCH_OPTIONS = {
    "maximize": "negate the loss instead",
    "amsgrad": "neither Muon nor this AdamW has it",
    "differentiable": "a step is not differentiable here",
    "capturable": "a step is not captured as a whole; CUDA graphs are used inside where they pay",
    "foreach": "ns_backend chooses the kernels",
    "fused": "ns_backend chooses the kernels",
    "ns_coefficients": "write ns_schedule: [[a, b, c], ...] with one triple for each step, and leave out the eps of "
    "torch.optim.Muon: here eps is AdamW's",
}
"""Options of torch's optimizers that this one does not have, with what to do instead."""

RENAMED = {
    "mu": "momentum",
    "momentum_beta": "momentum",
    "learning_rate": "lr",
    "num_ns_steps": "ns_steps",
    "backend_steps": "ns_steps",
    "coefficient_type": "ns_schedule",
    "scale_mode": "adjust_lr_fn",
    "fp32_matmul_prec": "ns_dtype",
    "use_decoupled_weight_decay": "weight_decay_mode",
    "cautious_wd": "weight_decay_mode",
    "adamw_betas": "betas",
    "adamw_eps": "eps",
    "epsilon": "eps",
    "extra_scale_factor": "update_scale",
    "per_head_muon": "matrices",
}
"""Arguments of the Muon of DeepSpeed, Dion, Megatron-LM (Emerging-Optimizers) and Keller Jordan, with the keys here."""


def unknown_key_message(key: str, valid_keys: Iterable[str], where: str = "") -> str:
    """Return the message of an error about an unknown key, which suggests what to write instead.

    Args:
        key: The unknown key.
        valid_keys: The keys that exist.
        where: The section or param group in which it is.
    """
    where = f"{where}: " if where else ""
    if key in TORCH_OPTIONS:
        return f"{where}{key!r} is an option of torch's optimizers that this one does not have; {TORCH_OPTIONS[key]}"
    if key in RENAMED:
        return f"{where}{key!r} is an argument of another Muon; write {RENAMED[key]}"
    names = sorted(valid_keys)
    similar = difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.6)
    hint = f"did you mean {similar[0]!r}?" if similar else f"known keys: {', '.join(names)}"
    return f"{where}unknown key {key!r}; {hint}"


def shown(value: object) -> str:
    """Return the repr of a value, shortened to one line."""
    return " ".join(reprlib.repr(value).split())


def readable(error: ErrorDetails, where: str) -> str:
    """Return an error of pydantic about the section ``where`` as a line, with a remedy where one can be guessed."""
    *sections, key = (where, *map(str, error["loc"]))
    message, value = error["msg"], error["input"]
    if error["type"] != "value_error":  # pydantic's own: in JSON's words for the types
        message = message.partition(" or instance of ")[0].replace("dictionary", "object")
        message = message.replace("tuple", "list").replace("Tuple", "List")
    if error["type"] == "extra_forbidden":
        model = SECTIONS[sections[1]]
        known = [field.alias or name for name, field in model.model_fields.items()]
        return unknown_key_message(key, known, ".".join(sections))
    is_number = error["type"] in ("float_type", "int_type", "tuple_type")  # betas are two of them
    if is_number and isinstance(value, str) and value == "auto":
        message += ", and only the Hugging Face integrations fill in 'auto' (lr, betas, eps, weight_decay)"
    elif is_number and isinstance(value, str):
        with contextlib.suppress(ValueError):
            message += f": {float(value):.12g} without quotes (YAML wants a point, as in 1.0e-4)"
    return f"{'.'.join(sections)}.{key}: {message} (got {shown(value)})"


def plain(value: Any) -> Any:
    """Return the number in a tensor or array of one element, or of numpy, and any other value as it is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.item()
    return value.item() if isinstance(value, (np.ndarray, np.generic)) and value.size == 1 else value


def _as_integer(value: object) -> object:
    """Return 1e8, as JSON may have it, as an int, False (for ``health``) as 0, and any other value as it is."""
    return int(value) if value is False or (isinstance(value, float) and value.is_integer()) else value


# Strict: to pydantic True and "1" would be numbers.
Number = Annotated[float, Field(strict=True)]
Integer = Annotated[int, Field(strict=True), BeforeValidator(_as_integer)]
Flag = Annotated[bool, Field(strict=True)]
# A larger rate or decay is a mistake: the bound is far above all useful values, and far below the largest fp32.
Rate = Annotated[Number, Field(ge=0, le=1e4)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Size = Annotated[int, Field(strict=True, ge=1)]
Sizes = Annotated[list[Size], Field(min_length=1)]


class _Section(BaseModel):
    """A setting that is an object. Unknown keys in it are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MatricesConfig(_Section):
    """A value of ``matrices``: which matrices the weights that match its pattern consist of."""

    split: Literal["qkv", "gate_up"] | Sizes | None = Field(
        default=None,
        description="Sections of a fused projection: `qkv`, `gate_up`, or sizes.",
    )
    heads: Literal["config"] | Size | Sizes | None = Field(
        default=None,
        description="Attention heads: their number, one number per section, or `config`: from the model's `config`.",
    )
    transposed: Flag | None = Field(
        default=None, description="The weight is stored as input x output; unset: decided by its module."
    )


class MomentumWarmupConfig(_Section):
    """The value of ``momentum_warmup``."""

    start: Fraction = Field(alias="from", description="Momentum of the first step; must be below `momentum`.")
    steps: Annotated[Integer, Field(ge=1, le=1 << 40)] = Field(
        description="Number of steps after which `momentum` is reached; skipped steps do not count."
    )

    @model_serializer
    def _by_key(self) -> dict[str, float]:
        return {"from": self.start, "steps": self.steps}


class QkClipConfig(_Section):
    """The value of ``qk_clip`` (:mod:`deepspeed_muon.qk_clip.clip`)."""

    threshold: Annotated[Number, Field(gt=0, allow_inf_nan=False)] = Field(
        default=100.0, description="Heads with a larger logit are clipped."
    )
    alpha: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0.5, description="Exponent of the factor for queries; keys get `1 - alpha`."
    )


class RestoreConfig(_Section):
    """The value of ``restore_from``: what :func:`deepspeed_muon.checkpoint.restore` reads before the first step."""

    path: str = Field(min_length=1, description="Folder to read.")
    progress: Flag = Field(
        default=True,
        description="Continue the saved run: step counters, schedule, loss scale and param group settings. `false` "
        "loads only weights and optimizer state. The step counts of the state continue, and with them AdamW's bias "
        "correction and `momentum_warmup`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value


SECTIONS: dict[str, type[BaseModel]] = {
    "matrices": MatricesConfig,
    "momentum_warmup": MomentumWarmupConfig,
    "qk_clip": QkClipConfig,
    "restore_from": RestoreConfig,
}
"""The settings that are objects."""


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """The dtypes of momentum and moments.

    They are fp32 (float64 for float64 parameters) unless the user asks for less, even if the master weights have half
    precision: an average of many gradients loses more by rounding than a weight does.

    Attributes:
        momentum_dtype: ``optimizer.params.momentum_dtype``; ``None`` if it is not set.
        half_states: Whether DeepSpeed's ``bf16_optimizer_states`` asks for all state in bf16.
    """

    momentum_dtype: str | None = None
    half_states: bool = False

    @property
    def quantizes_momentum(self) -> bool:
        """Whether momentum is stored as int8."""
        return self.momentum_dtype == "int8"

    def dtype(self, key: str, master: torch.dtype) -> torch.dtype:
        """Return the dtype of the state tensor ``key`` of a parameter or partition whose dtype is ``master``."""
        half = self.half_states
        if key == "momentum_buffer" and self.quantizes_momentum:
            return torch.int8
        # The user's momentum_dtype takes precedence over bf16_optimizer_states.
        if key == "momentum_buffer" and self.momentum_dtype is not None:
            half = self.momentum_dtype == "bf16"
        return torch.bfloat16 if half else torch.promote_types(master, torch.float32)

    def make(self, key: str, tensor: Tensor) -> Tensor:
        """Return zeros for the state tensor ``key`` of ``tensor``: contiguous, and pinned if ``tensor`` is pinned."""
        return torch.zeros_like(
            tensor,
            dtype=self.dtype(key, tensor.dtype),
            requires_grad=False,
            memory_format=torch.contiguous_format,
            pin_memory=tensor.device.type == "cpu" and tensor.is_pinned(),
        )
