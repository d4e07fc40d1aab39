"""Dtype and place of the optimizer's state tensors: momentum, and AdamW's two moments."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.errors import BindingError
from deepspeed_muon.logs import logger
from deepspeed_muon.ops import FlatPasses, flat_passes, widened
from deepspeed_muon.step.step_set import BoundPartition
from deepspeed_muon.variants import Variant

State = MutableMapping[Tensor, dict[str, Any]]

STATE_TENSORS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """The dtype of the state.

    It is fp32 (float64 for float64 parameters) unless the user asks for less, also for masters in half precision: an
    average of many gradients loses more by rounding than a weight does.

    Attributes:
        momentum_dtype: ``optimizer.params.momentum_dtype``; ``None`` if it is not set.
        half_states: Whether DeepSpeed's ``bf16_optimizer_states`` asks for all state in bf16.
    """

    momentum_dtype: str | None = None
    half_states: bool = False

    @classmethod
    def of(cls, config: MuonConfig, *, half_states: bool = False) -> StatePolicy:
        """Return the policy of a configuration."""
        return cls(config.momentum_dtype, half_states)

    def dtype(self, key: str, master: torch.dtype) -> torch.dtype:
        """Return the dtype of the state tensor ``key`` of a parameter whose dtype is ``master``."""
        half = self.half_states
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


def state_of(partition: BoundPartition, state: State, policy: StatePolicy) -> dict[str, Any]:
    """Return the state of a partition for the next step: create what is missing, and count ``step`` up."""
    own = state[partition.tensor]
    for key in ("momentum_buffer",) if partition.muon else ("exp_avg", "exp_avg_sq"):
        if key not in own:
            own[key] = policy.make(key, partition.tensor)
            own.setdefault("step", 0)
        elif not own[key].is_contiguous():  # loaded from an optimizer that keeps the parameter's strides
            own[key] = own[key].contiguous()
    own["step"] += 1
    return own


def keep_saved_precision(
    state_dict: Mapping[str, Any], params: Sequence[Tensor], state: State, policy: StatePolicy
) -> None:
    """Bring loaded state into the dtypes that it is kept in, from what was saved.

    torch casts state to the parameter's dtype when it loads, and would round fp32 moments of half-precision masters.

    Args:
        state_dict: What was loaded.
        params: The optimizer's parameters, in the order of its groups.
        state: ``optimizer.state``, loaded. Mutated.
        policy: The dtypes.
    """
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, param in zip(saved, params, strict=True):
        for key, value in state_dict["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                dtype = policy.dtype(key, param.dtype) if key in STATE_TENSORS else value.dtype
                if state[param][key].dtype != dtype:
                    state[param][key] = value.to(device=param.device, dtype=dtype, copy=True)


def row_state_of(partition: BoundPartition, state: State, variant: Variant, numel: int) -> dict[str, Tensor]:
    """Return what a variant keeps for the ``numel`` rows of a partition on this rank; create what is missing.

    Raises:
        BindingError: If the state was saved with another layout.
    """
    own = state[partition.tensor]
    for each in variant.state:
        if each.key not in own:
            if own["step"] > 1 and numel:
                logger.warning(
                    "deepspeed_muon: the state of partition %d has no %s after %d steps (saved with another variant?); "
                    "variant %r starts it from %g",
                    partition.index,
                    each.key,
                    own["step"] - 1,
                    variant.name,
                    each.start,
                )
            own[each.key] = torch.full((numel,), each.start, dtype=each.dtype, device=partition.tensor.device)
        if own[each.key].numel() != numel:
            raise BindingError(
                f"the optimizer state holds {own[each.key].numel()} {each.what} of partition {partition.index}, "
                f"expected {numel}: it was saved with another layout. Restore it from a consolidated checkpoint"
            )
    return {each.key: own[each.key] for each in variant.state}


def passes_for(partition: BoundPartition, config: MuonConfig, policy: StatePolicy) -> FlatPasses:
    """Return the elementwise passes for the dtypes of a partition and of its momentum."""
    master = partition.tensor.dtype
    momentum = policy.dtype("momentum_buffer", master)
    if torch.float64 in (master, momentum):
        return flat_passes("torch", partition.tensor.device)  # without DeepSpeed
    passes = flat_passes(config.ns_backend, partition.tensor.device)
    return passes if master == momentum == torch.float32 else widened(passes)
