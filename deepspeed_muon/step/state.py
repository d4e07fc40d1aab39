"""Dtype and place of the optimizer's state tensors: momentum, and AdamW's two moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.config import MuonConfig

__all__ = ["STATE_TENSORS", "StatePolicy", "state_bytes"]

STATE_TENSORS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """In which dtype state is kept.

    fp32 (float64 for float64 parameters) unless the user asks for less, also for masters in half precision: an
    average of many gradients loses more by rounding than the weight that it moves.

    Attributes:
        momentum_dtype: ``optimizer.params.momentum_dtype``; ``None`` where nothing is said.
        half_states: Whether DeepSpeed's ``bf16_optimizer_states`` asks for all state in bf16.
    """

    momentum_dtype: str | None = None
    half_states: bool = False

    @classmethod
    def of(cls, config: MuonConfig, *, half_states: bool = False) -> StatePolicy:
        """Return the policy of a configuration."""
        return cls(config.momentum_dtype, half_states)

    def dtype(self, key: str, master: torch.dtype) -> torch.dtype:
        """Return the dtype of one state tensor.

        Args:
            key: One of :data:`STATE_TENSORS`.
            master: Dtype of the parameter that the optimizer updates.
        """
        half = self.half_states
        if key == "momentum_buffer" and self.momentum_dtype is not None:
            half = self.momentum_dtype == "bf16"
        return torch.bfloat16 if half else torch.promote_types(master, torch.float32)

    def make(self, key: str, tensor: Tensor) -> Tensor:
        """Return zeros for one state tensor of ``tensor``: its shape and device, contiguous, pinned where it is pinned.

        Args:
            key: One of :data:`STATE_TENSORS`.
            tensor: The parameter that the optimizer updates.
        """
        return torch.zeros_like(
            tensor,
            dtype=self.dtype(key, tensor.dtype),
            requires_grad=False,
            memory_format=torch.contiguous_format,
            pin_memory=tensor.device.type == "cpu" and tensor.is_pinned(),
        )


def state_bytes(state: Mapping[Any, Mapping[str, Any]]) -> dict[str, int]:
    """Return how many bytes this rank's state tensors take, by key.

    Args:
        state: ``optimizer.state``.
    """
    found: dict[str, int] = {}
    for own in state.values():
        for key, value in own.items():
            if isinstance(value, Tensor):
                found[key] = found.get(key, 0) + value.numel() * value.element_size()
    return found
