"""Parameters that get no gradient in a step: what DeepSpeed still has of their last one is kept out of it.

ZeRO 3, and ZeRO 1 and 2 with the optimizer offloaded, keep reduced gradients in buffers that outlive the step, and
write only what a backward pass reduces. A parameter that goes idle would be updated with its last gradient again and
again, that gradient would be part of the norm, and an infinity of a step that overflowed would make every later step
overflow. Over an accumulation they copy in the first micro-step and add in the later ones: a parameter whose first
gradient comes later is added to what the step before left, and with offload one whose last gradient comes earlier
never reaches the optimizer.

Here the first gradient *of a parameter* in a step is copied and its later ones are added; and a parameter that the
last backward pass did not reduce gets a gradient of zero by the way that DeepSpeed's own gradients take, so that
whatever reads the buffers afterwards (overflow check, norm, clipping, ``safe_get_full_grad``) finds the right numbers.
Nothing is sent: which parameters are reduced is the same on all ranks that reduce them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

__all__ = ["forget_last_gradients"]


def forget_last_gradients(wrapper: Any) -> None:
    """Let every step of a ZeRO wrapper see the gradients of that step alone.

    Args:
        wrapper: ``engine.optimizer``. Methods of this instance are replaced; wrappers that keep no gradient from one
            step to the next are left alone.
    """
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        _PartitionedGradients(wrapper)
    elif isinstance(wrapper, DeepSpeedZeroOptimizer):
        if wrapper.cpu_offload:
            _OffloadedGradients(wrapper)
        if wrapper.overlap_comm and not wrapper.partition_gradients:
            _reduce_what_came_earlier(wrapper)


def _reduce_what_came_earlier(wrapper: Any) -> None:
    """Let ZeRO 1 with ``overlap_comm`` reduce the gradients that the last micro-step of an accumulation did not add to.

    It reduces a gradient when the last micro-step adds to it. What only earlier ones used stayed each rank's own.
    """
    reduced: set[int] = set()
    original_reduce = wrapper.reduce_independent_p_g_buckets_and_remove_grads
    original_reduce_all = wrapper.reduce_gradients

    def reduce(param: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.add(id(param))
        return original_reduce(param, *args, **kwargs)

    def reduce_all(pipeline_parallel: bool = False) -> Any:
        # A pipeline makes its buckets in the call below, and reduces a layer's gradient over all micro-batches.
        for number, params in enumerate(() if pipeline_parallel else wrapper.bit16_groups):
            for param in params:
                if id(param) not in reduced and wrapper.get_gradient_for_reduction(param) is not None:
                    wrapper.reduce_ready_partitions_and_remove_grads(param, number)
        reduced.clear()
        return original_reduce_all(pipeline_parallel=pipeline_parallel)

    wrapper.reduce_independent_p_g_buckets_and_remove_grads = reduce
    wrapper.reduce_gradients = reduce_all


class _StepGradients:
    """Which parameters were reduced since the last step; the subclasses know where their gradients are kept."""

    def __init__(self, wrapper: Any, *, offloaded: bool) -> None:
        self._wrapper = wrapper
        self._offloaded = offloaded
        self._reduced: set[int] = set()
        original_epilogue, original_step = wrapper.independent_gradient_partition_epilogue, wrapper.step

        def epilogue(*args: Any, **kwargs: Any) -> Any:
            result = original_epilogue(*args, **kwargs)
            self.fill_up()
            return result

        def step(*args: Any, **kwargs: Any) -> Any:
            # For the programs that end an accumulation in step(), after the last epilogue.
            self.fill_up()
            try:
                return original_step(*args, **kwargs)
            finally:
                self._start_afresh()

        wrapper.independent_gradient_partition_epilogue = epilogue
        wrapper.step = step

    def fill_up(self) -> None:
        """Give what was not reduced in this step a gradient of zero."""
        raise NotImplementedError

    def _start_afresh(self) -> None:
        self._reduced.clear()
        if self._offloaded:
            # Also the record of what has reached the gradients of the masters, which a step that raised leaves behind.
            self._wrapper.reset_cpu_buffers()

    def _is_new(self, param: Tensor) -> bool:
        """Return whether this is the first gradient of ``param`` in the step, and remember that there was one."""
        new = id(param) not in self._reduced
        self._reduced.add(id(param))
        return new

    def _at_boundary(self) -> bool:
        """Return whether the last micro-step is running; before 0.18 this was no method."""
        boundary = self._wrapper.is_gradient_accumulation_boundary
        return bool(boundary() if callable(boundary) else boundary)

    def _undelivered(self, param: Tensor) -> bool:
        """Return whether the sum of an offloaded parameter has yet to reach the gradient of its master."""
        return self._wrapper.get_param_id(param) not in self._wrapper.norm_for_param_grads


class _PartitionedGradients(_StepGradients):
    """ZeRO 3: one buffer of a rank's shares of all gradients, and with offload the gradients of the masters."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper, offloaded=bool(wrapper.offload_optimizer))
        self._restart = False
        self._partition_grads: Callable[..., Any] = wrapper.partition_grads
        original_zero_grad = wrapper.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            # As in DeepSpeed the next backward pass starts afresh, and a step before it still has its gradients.
            self._restart = True
            return original_zero_grad(*args, **kwargs)

        wrapper.partition_grads = self._partition
        wrapper.zero_grad = zero_grad

    def _partition(self, params: Sequence[Tensor], partitions: Sequence[Tensor]) -> list[Tensor]:
        """Copy what is new in this step into the buffer, add what is not."""
        if self._restart:
            self._restart = False
            self._start_afresh()
        wrapper = self._wrapper
        parts: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        for param, partition in zip(params, partitions, strict=True):
            # DeepSpeed copies in micro-step 0 and adds in the others.
            chosen = parts.setdefault(0 if self._is_new(param) else 1, ([], []))
            chosen[0].append(param)
            chosen[1].append(partition)
        buffers: list[Tensor] = []
        micro_step = wrapper.micro_step_id
        try:
            for wrapper.micro_step_id, part in parts.items():
                buffers += self._partition_grads(*part)
        finally:
            wrapper.micro_step_id = micro_step
        return buffers

    def fill_up(self) -> None:
        wrapper = self._wrapper
        delivers = self._offloaded and self._at_boundary()
        missing = [
            param
            for group in wrapper.fp16_groups
            for param in group
            if id(param) not in self._reduced or (delivers and self._undelivered(param))
        ]
        if not missing:
            return
        accelerator = get_accelerator()
        # The stream on which DeepSpeed reduces, and looks for infinities.
        with accelerator.stream(wrapper.reduce_and_partition_stream):
            zeros = [
                torch.zeros(
                    param.partition_numel(),
                    dtype=wrapper.gradient_accumulation_dtype,
                    device=accelerator.current_device_name(),
                )
                for param in missing
            ]
            self._partition(missing, zeros)
        if not accelerator.resolves_data_dependency():
            wrapper.reduce_and_partition_stream.synchronize()


class _OffloadedGradients(_StepGradients):
    """ZeRO 1 and 2 with offload: sums over the micro-steps, and the gradients of the masters."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper, offloaded=True)
        self._copy_grads: Callable[..., Any] = wrapper.copy_grads_in_partition
        wrapper.copy_grads_in_partition = self._copy

    def _copy(self, param: Tensor, *args: Any) -> Any:
        """Copy the gradient of ``param`` if it is new in this step, else add it."""
        wrapper = self._wrapper
        micro_step = wrapper.micro_step_id
        wrapper.micro_step_id = 0 if self._is_new(param) else max(1, micro_step)
        try:
            return self._copy_grads(param, *args)
        finally:
            wrapper.micro_step_id = micro_step

    def _start_afresh(self) -> None:
        super()._start_afresh()
        # fp32 sums of gradients in half precision, which a step that overflowed leaves behind.
        self._wrapper.averaged_gradients = dict.fromkeys(self._wrapper.averaged_gradients)

    def fill_up(self) -> None:
        wrapper = self._wrapper
        if not self._at_boundary():
            return
        attribute = "grad_accum" if wrapper.use_grad_accum_attribute else "grad"
        for param in self._missing():
            dtype = wrapper.gradient_accumulation_dtype if attribute == "grad_accum" else param.dtype
            setattr(param, attribute, torch.zeros_like(param, dtype=dtype))
            wrapper.copy_grads_in_partition(param)
            setattr(param, attribute, None)

    def _missing(self) -> Iterator[Tensor]:
        for params in self._wrapper.params_in_partition:
            for param in params:
                # Without a gradient of its own DeepSpeed reports it, if it was told not to ignore it.
                ignored = self._wrapper.ignore_unused_parameters or id(param) in self._reduced
                if ignored and self._undelivered(param):
                    yield param
