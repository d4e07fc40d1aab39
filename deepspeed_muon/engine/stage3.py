"""ZeRO stage 3: every parameter is divided over the ranks, every sub-group has a flat fp32 partition."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deepspeed_muon.engine.cpu_adam import CpuAdam
from deepspeed_muon.plan.layout import sharded_fragments
from deepspeed_muon.routing.rules import Route
from deepspeed_muon.step.layout_reader import LayoutReader
from deepspeed_muon.step.step_set import StepSet

__all__ = ["knows", "read"]


def knows(wrapper: Any, optimizer: Any) -> bool:
    """Return whether ``wrapper`` is one that this adapter reads."""
    return isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3) and wrapper.optimizer is optimizer


def read(engine: Any, wrapper: Any, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read every sub-group; DeepSpeed calls the inner step once for each of them."""
    sets = []
    for index, params in enumerate(wrapper.fp16_groups):
        reader = LayoutReader(
            routes,
            _process_group(wrapper, index),
            native_adam=CpuAdam if wrapper.offload_optimizer else None,
        )
        reader.add_partition(index, wrapper.fp32_partitioned_groups_flat[index], params)
        offset = 0
        for param in params:
            shard_numel = param.partition_numel()
            reader.add_parameter(param, sharded_fragments(offset, param.ds_numel, shard_numel))
            offset += shard_numel
        elsewhere = wrapper.offload_optimizer or wrapper.fp16_partitioned_groups_flat[index] is None
        # Weakly, as everywhere that the optimizer refers to its wrapper: a cycle would keep the device's memory.
        refresh = functools.partial(_refresh, weakref.ref(wrapper), index)
        sets.append(reader.step_set(None if elsewhere else refresh))
    return sets


def _refresh(
    reference: weakref.ref[DeepSpeedZeroOptimizer_Stage3], index: int, offset: int, numel: int
) -> None:
    """Repeat DeepSpeed's copy of a sub-group for a run of it."""
    wrapper = reference()
    assert wrapper is not None
    weights = wrapper.fp16_partitioned_groups_flat[index]
    master = wrapper.fp32_partitioned_groups_flat[index]
    weights.data.narrow(0, offset, numel).copy_(master.data.narrow(0, offset, numel))


def _process_group(wrapper: Any, index: int) -> dist.ProcessGroup:
    """Return the group that partitions a sub-group; before 0.18 there was one for all of them."""
    per_sub_group = getattr(wrapper, "_get_sub_group_process_group", None)
    group: dist.ProcessGroup = wrapper.dp_process_group if per_sub_group is None else per_sub_group(index)
    return group
