"""Reads which parts of which parameters every wrapper of DeepSpeed keeps in its partitions.

- ZeRO 0: every rank holds every parameter whole, in fp32 itself or as an fp32 copy of half-precision weights. The
  Newton-Schulz work is still shared: each matrix has one owner, which sends the update to all other ranks.
- ZeRO 1 and 2, and ``BF16_Optimizer``: one flat buffer for each param group, cut into equal partitions. A parameter's
  place is read from its address inside the flat buffer. That holds under round-robin ordering, padding and alignment,
  where DeepSpeed's own mapping (``_hp_mapping``) does not.
- ZeRO 3: every parameter is divided over the ranks, and every sub-group has a flat fp32 partition.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from deepspeed_muon.engine.cpu_adam import CpuAdam
from deepspeed_muon.engine.ranks import holders, skips_with
from deepspeed_muon.engine.tensor_parallel import tensor_parallel_group, with_tensor_parallel
from deepspeed_muon.errors import BindingError, UnsupportedConfigError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.spread import flat_spread, sharded_spread
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.shapes import true_shape
from deepspeed_muon.step.layout_reader import LayoutReader, read_whole
from deepspeed_muon.step.step_set import StepSet

__all__ = ["half_pairs", "read_step_sets"]

Item = TypeVar("Item")


def read_step_sets(engine: Any, optimizer: Muon, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read the layout of whichever wrapper DeepSpeed put around ``optimizer``.

    Args:
        engine: The ``DeepSpeedEngine`` whose ``optimizer`` attribute is the wrapper.
        optimizer: Our optimizer, inside the wrapper.
        routes: ``id(model parameter)`` to its route.

    Returns:
        The step sets in an order that all ranks share.

    Raises:
        UnsupportedConfigError: If the wrapper is of an unknown class, or a matrix that tensor parallelism cuts is of a
            kind that cannot be orthogonalised.
        BindingError: If the layout does not fit the routes.
        PlanMismatchError: If the ranks of a tensor-parallel group hold different matrices.
    """
    read = functools.partial(_read, engine, optimizer, routes)
    group = tensor_parallel_group(engine)
    return read() if group is None else with_tensor_parallel(group, read, engine.module, routes)


def _read(engine: Any, optimizer: Muon, routes: Mapping[int, Route]) -> list[StepSet]:
    wrapper = engine.optimizer
    if wrapper is optimizer or getattr(wrapper, "optimizer", None) is optimizer:
        for kind, read in _READERS:
            if isinstance(wrapper, kind):
                return read(engine, wrapper, routes)
    raise UnsupportedConfigError(
        f"DeepSpeed wrapped the optimizer in {type(wrapper).__name__}, whose layout is not known here; "
        f"known: ZeRO stages 0 to 3, BF16_Optimizer and FP16_UnfusedOptimizer"
    )


def _read_whole(engine: Any, wrapper: Any, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read a stage 0 engine; the inner step is called once."""
    group = engine.seq_data_parallel_group
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        pairs = half_pairs(wrapper)
    else:
        pairs = [(param, param) for group_ in wrapper.param_groups for param in group_["params"]]
    sets = []
    for holder, numbers in _by_group(range(len(pairs)), lambda number: holders(pairs[number][0], group)):
        members = [pairs[number] for number in numbers]
        others = skips_with(members[0][0], group)
        sets.append(read_whole(members, routes, holder, numbers=numbers, others=others))
    return sets


def half_pairs(wrapper: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the half-precision parameters of ``FP16_UnfusedOptimizer``, each with its fp32 copy."""
    return [
        (model, master)
        for models, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        for model, master in zip(models, masters, strict=True)
    ]


def _read_bf16(engine: Any, wrapper: Any, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read all param groups, those of one data-parallel group as one set; the inner step is called once."""
    sets = []
    numbers = range(len(wrapper.bf16_groups))
    for group, members in _by_group(numbers, lambda index: wrapper.real_dp_process_group[index]):
        first = wrapper.bf16_groups[members[0]][0]
        reader = LayoutReader(routes, group, others=skips_with(first, engine.seq_data_parallel_group))
        for index in members:
            tensor = wrapper.fp32_groups_flat_partition[index]
            _add_flat(reader, index, tensor, wrapper.bf16_groups[index], wrapper.bf16_groups_flat[index])
        sets.append(reader.step_set())
    return sets


def _read_stage12(engine: Any, wrapper: Any, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read every param group; the inner step is called once for each of them."""
    sets = []
    for index, params in enumerate(wrapper.bit16_groups):
        reader = LayoutReader(
            routes,
            wrapper.real_dp_process_group[index],
            others=skips_with(params[0], engine.seq_data_parallel_group),
            native_adam=CpuAdam if wrapper.cpu_offload else None,
        )
        tensor = wrapper.single_partition_of_fp32_groups[index]
        _add_flat(reader, index, tensor, params, wrapper.bit16_groups_flat[index])
        refresh = functools.partial(_refresh_stage12, weakref.ref(wrapper), index, reader.rank)
        sets.append(reader.step_set(None if wrapper.cpu_offload else refresh))
    return sets


def _add_flat(
    reader: LayoutReader, index: int, tensor: Tensor, params: Sequence[Tensor], flat: Tensor
) -> None:
    """Add a rank's partition of the flat buffer of a param group."""
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
        reader.add_parameter(param, flat_spread(offset, numel, partition_numel))


def _read_stage3(engine: Any, wrapper: Any, routes: Mapping[int, Route]) -> list[StepSet]:
    """Read every sub-group; the inner step is called once for each of them."""
    sets = []
    # Up to 0.19.2 one process group partitions all sub-groups.
    group_of = getattr(wrapper, "_get_sub_group_process_group", lambda _: wrapper.dp_process_group)
    for index, params in enumerate(wrapper.fp16_groups):
        native_adam = CpuAdam if wrapper.offload_optimizer else None
        others = skips_with(params[0], engine.seq_data_parallel_group)
        reader = LayoutReader(routes, group_of(index), others=others, native_adam=native_adam)
        reader.add_partition(index, wrapper.fp32_partitioned_groups_flat[index], params)
        offset = 0
        for param in params:
            shard_numel = param.partition_numel()
            if param.ds_numel:
                reader.add_parameter(param, sharded_spread(offset, param.ds_numel, shard_numel))
            offset += shard_numel
        elsewhere = wrapper.offload_optimizer or wrapper.fp16_partitioned_groups_flat[index] is None
        refresh = functools.partial(_refresh_stage3, weakref.ref(wrapper), index)
        sets.append(reader.step_set(None if elsewhere else refresh))
    return sets


# Both refer to the wrapper weakly, as does all that the optimizer keeps: a cycle would keep the device's memory.
def _refresh_stage12(reference: weakref.ref[Any], index: int, rank: int, offset: int, numel: int) -> None:
    """Round a run of a partition into the weights of the forward pass, as DeepSpeed does with all of it."""
    wrapper: Any = reference()
    weights = wrapper.parallel_partitioned_bit16_groups[index][rank]
    _copy_run(weights, wrapper.single_partition_of_fp32_groups[index], offset, numel)


def _refresh_stage3(reference: weakref.ref[Any], index: int, offset: int, numel: int) -> None:
    wrapper: Any = reference()
    weights = wrapper.fp16_partitioned_groups_flat[index]
    _copy_run(weights, wrapper.fp32_partitioned_groups_flat[index], offset, numel)


def _copy_run(weights: Tensor, master: Tensor, offset: int, numel: int) -> None:
    weights.data.narrow(0, offset, numel).copy_(master.data.narrow(0, offset, numel))


def _by_group(
    items: Iterable[Item], group_of: Callable[[Item], dist.ProcessGroup]
) -> list[tuple[dist.ProcessGroup, list[Item]]]:
    """Sort items by the process group that holds them, both in the order in which they come."""
    found: dict[int, tuple[dist.ProcessGroup, list[Item]]] = {}
    for item in items:
        group = group_of(item)
        found.setdefault(id(group), (group, []))[1].append(item)
    return list(found.values())


_READERS: tuple[tuple[type, Callable[[Any, Any, Mapping[int, Route]], list[StepSet]]], ...] = (
    (DeepSpeedZeroOptimizer_Stage3, _read_stage3),
    (DeepSpeedZeroOptimizer, _read_stage12),
    (BF16_Optimizer, _read_bf16),
    (FP16_UnfusedOptimizer, _read_whole),
    (Muon, _read_whole),
)
