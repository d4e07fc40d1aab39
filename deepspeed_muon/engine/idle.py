"""Parameters that get no gradient in a step: their gradients of earlier steps must not be used again.

ZeRO 3, and ZeRO 1 and 2 with an offloaded optimizer, keep reduced gradients in buffers that outlive the step, and write
only those that a backward pass reduces. So DeepSpeed goes wrong in two ways:

- A parameter without a gradient is updated with its last one in every step. That gradient is also part of the norm, and
  if it is infinite, all later steps overflow.
- In an accumulation DeepSpeed copies gradients in the first micro-step and adds them in the later ones. If the first
  gradient of a parameter comes later, it is added to that of the step before. With offload, if its last gradient comes
  before the last micro-step, the sum never reaches the optimizer.

This module copies the first gradient *of a parameter* in a step and adds the later ones. A parameter that the last
backward pass did not reduce gets a gradient of zero, through the same functions as DeepSpeed's own gradients, so that
all readers of the buffers (overflow check, norm, clipping, ``safe_get_full_grad``) find the right numbers. Nothing is
communicated: the ranks that reduce a parameter together all know whether they did.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from deepspeed_muon.engine.memory import at_boundary, memory_of

__all__ = [
    "copy_grads_in_partition",
    "divides_gradients",
    "gradient_partition_epilogue",
    "keeps_gradients",
    "keeps_offloaded_gradients",
    "only_gradients_of_the_step",
    "partition_grads",
    "reduce_gradients",
    "reduce_independent_gradient",
    "reduces_last_gradients_only",
    "zero_grad",
]


def divides_gradients(engine: Any) -> bool:
    """Return whether the wrapper is ZeRO 3, where one buffer holds a rank's part of every gradient."""
    return isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3)


def keeps_offloaded_gradients(engine: Any) -> bool:
    """Return whether the wrapper is ZeRO 1 or 2 with offload, which keeps sums over the micro-steps."""
    return isinstance(engine.optimizer, DeepSpeedZeroOptimizer) and bool(engine.optimizer.cpu_offload)


def keeps_gradients(engine: Any) -> bool:
    """Return whether gradients outlive the step in the wrapper's buffers."""
    return divides_gradients(engine) or keeps_offloaded_gradients(engine)


def reduces_last_gradients_only(engine: Any) -> bool:
    """Return whether the wrapper is ZeRO 1 with ``overlap_comm``.

    It reduces a gradient when the last micro-step adds to it. Gradients of earlier micro-steps alone stay unreduced.
    """
    wrapper = engine.optimizer
    known = isinstance(wrapper, DeepSpeedZeroOptimizer)
    return known and wrapper.overlap_comm and not wrapper.partition_gradients


def reduce_independent_gradient(
    original: Callable[..., Any], wrapper: Any, param: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Note that ZeRO 1 reduces the gradient of ``param`` by itself."""
    memory_of(wrapper).queued.add(id(param))
    return original(param, *args, **kwargs)


def reduce_gradients(original: Callable[..., Any], wrapper: Any, pipeline_parallel: bool = False) -> Any:
    """Reduce what the last micro-step of an accumulation did not add to, then finish the reduction."""
    queued = memory_of(wrapper).queued
    # A pipeline fills its buckets in the call below, with each layer's gradient over all micro-batches.
    for number, params in enumerate(() if pipeline_parallel else wrapper.bit16_groups):
        for param in params:
            if id(param) not in queued and wrapper.get_gradient_for_reduction(param) is not None:
                wrapper.reduce_ready_partitions_and_remove_grads(param, number)
    queued.clear()
    return original(pipeline_parallel=pipeline_parallel)


def gradient_partition_epilogue(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """End a backward pass, then give parameters that it did not reduce a gradient of zero."""
    result = original(*args, **kwargs)
    _fill_up(wrapper)
    return result


@contextlib.contextmanager
def only_gradients_of_the_step(wrapper: Any) -> Iterator[None]:
    """Fill in zeros once more, for programs that end an accumulation in ``step()``; forget all after the step."""
    _fill_up(wrapper)
    try:
        yield
    finally:
        _start_afresh(wrapper)


def zero_grad(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the next backward pass forget earlier gradients, as in DeepSpeed; a step before it still uses them."""
    memory_of(wrapper).restart = True
    return original(*args, **kwargs)


def partition_grads(
    original: Callable[..., Any], wrapper: Any, params: Sequence[Tensor], partitions: Sequence[Tensor]
) -> list[Tensor]:
    """Copy first gradients of the step into ZeRO 3's buffer, and add later ones."""
    memory = memory_of(wrapper)
    if memory.restart:
        memory.restart = False
        _start_afresh(wrapper)
    parts: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for param, partition in zip(params, partitions, strict=True):
        # DeepSpeed copies in micro-step 0 and adds in the others.
        chosen = parts.setdefault(0 if _is_new(wrapper, param) else 1, ([], []))
        chosen[0].append(param)
        chosen[1].append(partition)
    buffers: list[Tensor] = []
    micro_step = wrapper.micro_step_id
    try:
        for wrapper.micro_step_id, part in parts.items():
            buffers += original(*part)
    finally:
        wrapper.micro_step_id = micro_step
    return buffers


def copy_grads_in_partition(original: Callable[..., Any], wrapper: Any, param: Tensor, *args: Any) -> Any:
    """Copy the first gradient of ``param`` in the step, and add later ones (ZeRO 1 and 2 with offload)."""
    micro_step = wrapper.micro_step_id
    wrapper.micro_step_id = 0 if _is_new(wrapper, param) else max(1, micro_step)
    try:
        return original(param, *args)
    finally:
        wrapper.micro_step_id = micro_step


def _is_new(wrapper: Any, param: Tensor) -> bool:
    """Return whether this is the first gradient of ``param`` in the step, and remember that there was one."""
    reduced = memory_of(wrapper).reduced
    new = id(param) not in reduced
    reduced.add(id(param))
    return new


def _start_afresh(wrapper: Any) -> None:
    """Forget what was reduced, and what remains of a step that overflowed or raised."""
    memory_of(wrapper).reduced.clear()
    is_flat = isinstance(wrapper, DeepSpeedZeroOptimizer)
    if wrapper.cpu_offload if is_flat else wrapper.offload_optimizer:
        # Also the record of what has reached the gradients of the masters.
        wrapper.reset_cpu_buffers()
    if is_flat:
        # fp32 sums of gradients in half precision.
        wrapper.averaged_gradients = dict.fromkeys(wrapper.averaged_gradients)


def _undelivered(wrapper: Any, param: Tensor) -> bool:
    """Return whether an offloaded parameter's sum of gradients has not reached its master yet."""
    return wrapper.get_param_id(param) not in wrapper.norm_for_param_grads


def _fill_up(wrapper: Any) -> None:
    """Give what was not reduced in this step a gradient of zero."""
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        _fill_up_partitions(wrapper)
    elif at_boundary(wrapper):
        _fill_up_masters(wrapper)


def _fill_up_partitions(wrapper: Any) -> None:
    """Put zeros into ZeRO 3's buffer, and with offload into the gradients of the masters."""
    reduced = memory_of(wrapper).reduced
    delivers = wrapper.offload_optimizer and at_boundary(wrapper)
    missing = [
        param
        for group in wrapper.fp16_groups
        for param in group
        if id(param) not in reduced or (delivers and _undelivered(wrapper, param))
    ]
    if not missing:
        return
    accelerator = get_accelerator()
    # The stream on which DeepSpeed reduces, and looks for infinities.
    with accelerator.stream(wrapper.reduce_and_partition_stream):
        kind: Any = {
            "dtype": wrapper.gradient_accumulation_dtype,
            "device": accelerator.current_device_name(),
        }
        zeros = [torch.zeros(param.partition_numel(), **kind) for param in missing]
        wrapper.partition_grads(missing, zeros)
    if not accelerator.resolves_data_dependency():
        wrapper.reduce_and_partition_stream.synchronize()


def _fill_up_masters(wrapper: Any) -> None:
    """Put zeros where ZeRO 1 and 2 put offloaded gradients."""
    reduced = memory_of(wrapper).reduced
    attribute = "grad_accum" if wrapper.use_grad_accum_attribute else "grad"
    for param in itertools.chain.from_iterable(wrapper.params_in_partition):
        # With ignore_unused_parameters false DeepSpeed itself reports parameters that got no gradient.
        ignored = wrapper.ignore_unused_parameters or id(param) in reduced
        if ignored and _undelivered(wrapper, param):
            dtype = wrapper.gradient_accumulation_dtype if attribute == "grad_accum" else param.dtype
            setattr(param, attribute, torch.zeros_like(param, dtype=dtype))
            wrapper.copy_grads_in_partition(param)
            setattr(param, attribute, None)
