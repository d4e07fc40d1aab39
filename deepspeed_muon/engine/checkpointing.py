"""What checkpoints need of DeepSpeed's wrappers: param groups of partitions, low-precision copies, loss scale."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

__all__ = ["loss_scale_state", "param_group_numbers", "refresh_low_precision", "set_loss_scale_state"]

# What a loss scaler carries from step to step, in every wrapper that has one.
_SCALE_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def param_group_numbers(wrapper: Any) -> list[int]:
    """Return the number of the param group that every partition belongs to, in the order of the partitions.

    Args:
        wrapper: ``engine.optimizer``: a wrapper that an adapter knows, or the optimizer itself.
    """
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        return [int(wrapper.sub_group_to_group_id[index]) for index in range(len(wrapper.fp16_groups))]
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        return list(range(len(wrapper.bit16_groups)))
    if isinstance(wrapper, BF16_Optimizer):
        return list(range(len(wrapper.bf16_groups)))
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        return [number for number, group in enumerate(wrapper.fp32_groups) for _ in group]
    return [number for number, group in enumerate(wrapper.param_groups) for _ in group["params"]]


@torch.no_grad()
def refresh_low_precision(wrapper: Any) -> None:
    """Make the weights of the forward pass equal to the fp32 masters, which were written to from outside.

    Must be called by all ranks.

    Args:
        wrapper: ``engine.optimizer``.
    """
    if isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        wrapper.update_lp_params()
    elif isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        _refresh_stage3(wrapper)
    elif isinstance(wrapper, FP16_UnfusedOptimizer):
        for models, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            for model, master in zip(models, masters, strict=True):
                model.data.copy_(master.data)


def _refresh_stage3(wrapper: Any) -> None:
    """Copy every sub-group's partition, with persistent parameters divided meanwhile and gathered again after."""
    wrapper.checkpoint_event_prologue()
    for index, master in enumerate(wrapper.fp32_partitioned_groups_flat):
        flat = wrapper.fp16_partitioned_groups_flat[index]
        if master.numel() == 0 or flat is None:
            continue
        flat.data.copy_(master.data)
        pieces = wrapper.unflatten(flat, wrapper.fp16_partitioned_groups[index])
        for partitioned, piece in zip(wrapper.fp16_partitioned_groups[index], pieces, strict=True):
            partitioned.data = piece.data
    wrapper.checkpoint_event_epilogue()


def _scaler(wrapper: Any) -> Any:
    """Return the object that holds a dynamic loss scale, or ``None``."""
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        config = getattr(wrapper, "loss_scale_config", wrapper)  # older wrappers hold the scale themselves
        return config if getattr(config, "dynamic_loss_scale", False) else None
    return getattr(wrapper, "loss_scaler", None) if getattr(wrapper, "dynamic_loss_scale", False) else None


def loss_scale_state(wrapper: Any) -> dict[str, float] | None:
    """Return what the dynamic loss scale needs to continue, or ``None`` where there is none."""
    scaler = _scaler(wrapper)
    if scaler is None:
        return None
    return {
        key: getattr(scaler, key)
        for key in _SCALE_KEYS
        if isinstance(getattr(scaler, key, None), (int, float))
    }


def set_loss_scale_state(wrapper: Any, state: dict[str, float]) -> bool:
    """Continue with a loss scale from :func:`loss_scale_state`.

    Returns:
        Whether the wrapper has a dynamic loss scale.
    """
    scaler = _scaler(wrapper)
    if scaler is None:
        return False
    for key in _SCALE_KEYS:
        if key in state and hasattr(scaler, key):
            setattr(scaler, key, state[key])
    return True
