"""The engine as checkpoints see it: counters, schedule, loss scale, param groups, low-precision weights."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_muon.checkpoint.index import COUNTERS, SCALE_KEYS
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.routing.pipeline_module import is_divided

__all__ = ["DeepSpeedHost", "set_loss_scale_state"]


class DeepSpeedHost:
    """Implements :class:`deepspeed_muon.checkpoint.host.Host` with a ``DeepSpeedEngine``."""

    def __init__(self, engine: Any) -> None:
        """Refer to the engine weakly: its optimizer refers to this, and must not keep the engine alive.

        Args:
            engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound.
        """
        self._reference = weakref.ref(engine)

    @property
    def _engine(self) -> Any:
        engine = self._reference()
        if engine is None:
            raise CheckpointError("the engine of this optimizer is gone")
        return engine

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage."""
        return int(self._engine.zero_optimization_stage())

    @property
    def is_divided(self) -> bool:
        """Whether the model is one of several stages of a pipeline."""
        return is_divided(self._engine.module)

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler, or ``None``."""
        return getattr(self._engine, "lr_scheduler", None)

    def counters(self) -> dict[str, int]:
        """Return what the engine counts."""
        return {key: int(getattr(self._engine, key)) for key in COUNTERS}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set what the engine counts."""
        for key, value in counters.items():
            setattr(self._engine, key, value)

    def param_group_numbers(self) -> list[int]:
        """Return the number of the param group that every partition belongs to, in the order of the partitions."""
        wrapper = self._engine.optimizer
        if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
            return [int(wrapper.sub_group_to_group_id[index]) for index in range(len(wrapper.fp16_groups))]
        if isinstance(wrapper, DeepSpeedZeroOptimizer):
            return list(range(len(wrapper.bit16_groups)))
        if isinstance(wrapper, BF16_Optimizer):
            return list(range(len(wrapper.bf16_groups)))
        if isinstance(wrapper, FP16_UnfusedOptimizer):
            return [number for number, group in enumerate(wrapper.fp32_groups) for _ in group]
        return [number for number, group in enumerate(wrapper.param_groups) for _ in group["params"]]

    def loss_scale(self) -> dict[str, float] | None:
        """Return what the dynamic loss scale needs to continue, or ``None`` where there is none."""
        scaler = _scaler(self._engine.optimizer)
        if scaler is None:
            return None
        values = {key: getattr(scaler, key, None) for key in SCALE_KEYS}
        return {key: value for key, value in values.items() if isinstance(value, (int, float))}

    def set_loss_scale(self, state: Mapping[str, float]) -> None:
        """Continue with a loss scale from :meth:`loss_scale`."""
        set_loss_scale_state(self._engine.optimizer, state)

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Round the fp32 masters into the weights of the forward pass. Must be called by all ranks."""
        wrapper = self._engine.optimizer
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


def set_loss_scale_state(wrapper: Any, state: Mapping[str, float]) -> None:
    """Let the dynamic loss scale of ``engine.optimizer`` go on from a saved one; others are left alone."""
    scaler = _scaler(wrapper)
    for key in SCALE_KEYS:
        if scaler is not None and key in state and hasattr(scaler, key):
            setattr(scaler, key, state[key])
