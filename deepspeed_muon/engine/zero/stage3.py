"""The wrapper of ZeRO 3: every parameter is divided over the ranks, and sub-groups of them have a flat partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_muon.engine.zero.views import ZeroView
from deepspeed_muon.plan.placement import Placement, sharded_placement


class Zero3View(ZeroView):
    """ZeRO 3: every parameter is divided over the ranks, in partitions of several parameters (sub-groups)."""

    keeps_gradients = True

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper, wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat)
        self.offloads = bool(wrapper.offload_optimizer)

    def group(self, index: int) -> dist.ProcessGroup | None:
        # Up to 0.19.2 one process group divides all sub-groups.
        of_sub_group = getattr(self.wrapper, "_get_sub_group_process_group", None)
        group: dist.ProcessGroup = of_sub_group(index) if of_sub_group else self.data_parallel_group
        return group

    def placements(self, index: int, ranks: int) -> Iterator[tuple[Tensor, Placement]]:
        offset = 0
        for param in self.params[index]:
            each: Any = param
            if each.ds_numel:
                yield param, sharded_placement(offset, each.ds_numel, each.partition_numel())
            offset += each.partition_numel()

    def weights(self, index: int) -> Tensor | None:
        return None if self.offloads else self.wrapper.fp16_partitioned_groups_flat[index]

    def group_numbers(self) -> list[int]:
        return [int(self.wrapper.sub_group_to_group_id[index]) for index in range(len(self.params))]

    def refresh_weights(self) -> None:
        # Persistent parameters are divided meanwhile, and gathered again afterwards.
        self.wrapper.checkpoint_event_prologue()
        for index, master in enumerate(self.masters):
            weights = self.wrapper.fp16_partitioned_groups_flat[index]
            if master.numel() and weights is not None:
                weights.data.copy_(master.data)
                self.wrapper._unflatten_partitioned_parameters(index)
        self.end_of_load()

    def end_of_load(self) -> None:
        self.wrapper.checkpoint_event_epilogue()

    @property
    def module(self) -> Any:
        """The model."""
        return self.wrapper.parameter_offload.module

    def put_zeros(self, params: Sequence[Tensor]) -> None:
        """Reduce gradients of zero of some parameters, on the stream on which DeepSpeed reduces."""
        accelerator, stream = get_accelerator(), self.wrapper.reduce_and_partition_stream
        device, dtype = accelerator.current_device_name(), self.wrapper.gradient_accumulation_dtype
        # DeepSpeed looks for infinities on it too.
        with accelerator.stream(stream):
            numels = [param.partition_numel() for param in params]  # type: ignore[attr-defined]
            zeros = [torch.zeros(numel, dtype=dtype, device=device) for numel in numels]
            self.wrapper.partition_grads(params, zeros)
        if not accelerator.resolves_data_dependency():
            stream.synchronize()
