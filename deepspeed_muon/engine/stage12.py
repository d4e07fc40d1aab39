"""ZeRO stages 1 and 2, and ``BF16_Optimizer``: one flat buffer per param group, cut into equal partitions.

A parameter's place is read from its address inside the flat buffer. That holds under round-robin ordering, padding
and alignment, where DeepSpeed's own mapping (``_hp_mapping``) does not.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from deepspeed_muon.engine.cpu_adam import CpuAdam
from deepspeed_muon.engine.experts import by_group
from deepspeed_muon.errors import BindingError
from deepspeed_muon.plan.layout import flat_fragments
from deepspeed_muon.routing.rules import Route, true_shape
from deepspeed_muon.step.layout_reader import LayoutReader
from deepspeed_muon.step.step_set import StepSet

__all__ = ["knows", "read"]


def knows(wrapper: Any, optimizer: Any) -> bool:
    """Return whether ``wrapper`` is one that this adapter reads."""
    return isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)) and wrapper.optimizer is optimizer


def read(engine: Any, wrapper: Any, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read every param group's flat buffer.

    ``DeepSpeedZeroOptimizer`` calls the inner step once per group; ``BF16_Optimizer`` once for all groups.
    """
    if isinstance(wrapper, BF16_Optimizer):
        return _read_bf16(engine, wrapper, routes)
    sets = []
    for index, params in enumerate(wrapper.bit16_groups):
        reader = LayoutReader(
            routes,
            wrapper.real_dp_process_group[index],
            wider_group=engine.seq_data_parallel_group,
            native_adam=CpuAdam if wrapper.cpu_offload else None,
        )
        tensor = wrapper.single_partition_of_fp32_groups[index]
        _read_group(reader, index, tensor, params, wrapper.bit16_groups_flat[index])
        # Weakly, as everywhere that the optimizer refers to its wrapper: a cycle would keep the device's memory.
        refresh = functools.partial(_refresh, weakref.ref(wrapper), index, reader.rank)
        sets.append(reader.step_set(None if wrapper.cpu_offload else refresh))
    return sets


def _refresh(
    reference: weakref.ref[DeepSpeedZeroOptimizer], index: int, rank: int, offset: int, numel: int
) -> None:
    """Repeat DeepSpeed's copy of a partition for a run of it."""
    wrapper = reference()
    assert wrapper is not None
    weights = wrapper.parallel_partitioned_bit16_groups[index][rank]
    master = wrapper.single_partition_of_fp32_groups[index]
    weights.data.narrow(0, offset, numel).copy_(master.data.narrow(0, offset, numel))


def _read_bf16(engine: Any, wrapper: BF16_Optimizer, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read all param groups, those of one data-parallel group as one set; the inner step is called once."""
    sets = []
    numbers = range(len(wrapper.bf16_groups))
    for group, members in by_group(numbers, lambda index: wrapper.real_dp_process_group[index]):
        reader = LayoutReader(routes, group, wider_group=engine.seq_data_parallel_group)
        for index in members:
            tensor = wrapper.fp32_groups_flat_partition[index]
            _read_group(reader, index, tensor, wrapper.bf16_groups[index], wrapper.bf16_groups_flat[index])
        sets.append(reader.step_set())
    return sets


def _read_group(
    reader: LayoutReader, index: int, tensor: Tensor, params: Sequence[Tensor], flat: Tensor
) -> None:
    reader.add_partition(index, tensor, params)
    partition_numel = flat.numel() // reader.world_size
    for param in params:
        numel = param.numel()
        if numel == 0:
            continue
        offset, remainder = divmod(param.data_ptr() - flat.data_ptr(), flat.element_size())
        if remainder or offset < 0 or offset + numel > flat.numel():
            raise BindingError(
                f"parameter of shape {true_shape(param)} does not lie in the flat buffer of its param group {index}; "
                f"its data was replaced after deepspeed.initialize"
            )
        reader.add_parameter(param, flat_fragments(offset, numel, partition_numel))
