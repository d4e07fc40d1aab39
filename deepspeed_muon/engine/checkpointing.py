"""The engine as checkpoints see it, and DeepSpeed's universal checkpoints where the optimizer is ours."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_muon.checkpoint.host import optimizer_of, require_all_ranks
from deepspeed_muon.checkpoint.index import COUNTERS, SCALE_KEYS
from deepspeed_muon.checkpoint.live import collect
from deepspeed_muon.checkpoint.restore import restore_from_source
from deepspeed_muon.checkpoint.sealed import refusing
from deepspeed_muon.checkpoint.settings import Before
from deepspeed_muon.checkpoint.universal import UniversalSource, convert_to_universal, is_ours
from deepspeed_muon.engine.layouts import half_pairs
from deepspeed_muon.engine.memory import memory_of
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.slices import TensorSlice

__all__ = ["DeepSpeedHost", "convert", "load_checkpoint", "load_universal_checkpoint", "loads_universal"]


class DeepSpeedHost:
    """Implements :class:`deepspeed_muon.checkpoint.host.Host` with a ``DeepSpeedEngine``."""

    def __init__(self, engine: Any, parts: Mapping[str, TensorSlice | str]) -> None:
        """Refer to the engine weakly, because its optimizer refers to this and must not keep the engine alive.

        Args:
            engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound.
            parts: See :func:`deepspeed_muon.engine.parts.parts_of`.
        """
        self._reference = weakref.ref(engine)
        self.parts = parts

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
        wrapper, groups = self._engine.optimizer, self._engine.basic_optimizer.param_groups
        if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
            return [int(wrapper.sub_group_to_group_id[index]) for index in range(len(wrapper.fp16_groups))]
        if isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
            return list(range(len(groups)))
        return [number for number, group in enumerate(groups) for _ in group["params"]]

    def loss_scale(self) -> dict[str, float] | None:
        """Return what the dynamic loss scale needs to continue, or ``None`` where there is none."""
        scaler = _scaler(self._engine.optimizer)
        if scaler is None:
            return None
        values = {key: getattr(scaler, key, None) for key in SCALE_KEYS}
        return {key: value for key, value in values.items() if isinstance(value, (int, float))}

    def set_loss_scale(self, state: Mapping[str, float]) -> None:
        """Let a dynamic loss scale continue from :meth:`loss_scale`; others are left alone."""
        scaler = _scaler(self._engine.optimizer)
        for key in SCALE_KEYS:
            if scaler is not None and key in state and hasattr(scaler, key):
                setattr(scaler, key, state[key])

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Round the fp32 masters into the weights of the forward pass. Must be called by all ranks."""
        wrapper = self._engine.optimizer
        if isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
            wrapper.update_lp_params()
        elif isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
            _refresh_stage3(wrapper)
        elif isinstance(wrapper, FP16_UnfusedOptimizer):
            for model, master in half_pairs(wrapper):
                model.data.copy_(master.data)


def _refresh_stage3(wrapper: Any) -> None:
    """Copy every sub-group's partition; persistent parameters are divided meanwhile, and gathered again afterwards."""
    wrapper.checkpoint_event_prologue()
    for index, master in enumerate(wrapper.fp32_partitioned_groups_flat):
        flat = wrapper.fp16_partitioned_groups_flat[index]
        if master.numel() == 0 or flat is None:
            continue
        flat.data.copy_(master.data)
        wrapper._unflatten_partitioned_parameters(index)
    wrapper.checkpoint_event_epilogue()


def _scaler(wrapper: Any) -> Any:
    """Return the object that holds a dynamic loss scale, or ``None``."""
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        config = getattr(wrapper, "loss_scale_config", wrapper)  # older wrappers hold the scale themselves
        return config if getattr(config, "dynamic_loss_scale", False) else None
    return getattr(wrapper, "loss_scaler", None) if getattr(wrapper, "dynamic_loss_scale", False) else None


def convert(original: Callable[..., Any], args: Any) -> None:
    """Convert a checkpoint of ours. DeepSpeed gets all others, also those that cannot be read: it says why."""
    if is_ours(args.input_folder):
        convert_to_universal(args.input_folder, args.output_folder)
    else:
        original(args)


def loads_universal(engine: Any) -> bool:
    """Return whether the wrapper of ``engine`` can load universal checkpoints."""
    return hasattr(engine.optimizer, "_load_universal_checkpoint")


def load_universal_checkpoint(
    original: Callable[..., Any],
    wrapper: Any,
    checkpoint_folder: str,
    load_optimizer_states: bool = True,
    *_: Any,
    **__: Any,
) -> None:
    """Load a universal checkpoint through our layouts. Must be called by all ranks."""
    engine = memory_of(wrapper).engine()
    require_all_ranks(engine)
    source: UniversalSource | None = None
    error: Exception | None = None
    try:
        with refusing(str(checkpoint_folder)):
            routes = {parameter.name: parameter.whole for parameter in collect(engine).parameters}
            source = UniversalSource(checkpoint_folder, routes)
    except Exception as caught:
        error = caught
    restore_from_source(engine, source, progress=False, state_too=load_optimizer_states, error=error)
    if source is not None and source.loss_scale:
        optimizer_of(engine).host.set_loss_scale(source.loss_scale)


def load_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Load. DeepSpeed sets counters and schedule first: put them back if a universal checkpoint is refused."""
    if not engine.load_universal_checkpoint():
        return original(*args, **kwargs)
    before = Before(engine)
    try:
        return original(*args, **kwargs)
    except Exception as error:
        before.put_back()
        if isinstance(error, CheckpointError) and hasattr(engine.optimizer, "checkpoint_event_epilogue"):
            engine.optimizer.checkpoint_event_epilogue()  # all ranks are here: they agreed to refuse
        raise
