"""One exchange of gradient flags for a whole step of ZeRO, in place of one for each group and of ZeRO's overflow check.

ZeRO calls the inner step once for each param group (stages 1, 2) or sub-group (stage 3), and looks for gradients that
are not finite before that: it reads all gradients twice and sends a message. All gradients of the step lie in the
wrapper's buffers already when its ``step`` begins. So the ranks tell each other the flags of all groups there, in one
message, which also answers ZeRO's question.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from deepspeed_muon.step.gradients import Flat

__all__ = ["exchange_first", "has_overflow", "holds_gradients"]


class Pieces:
    """A rank's gradient of one partition as ZeRO keeps it: tensors that follow each other in the partition."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach().reshape(-1) for tensor in tensors]
        self._starts = list(accumulate((tensor.numel() for tensor in self._tensors), initial=0))

    def narrow(self, dim: int, start: int, length: int, /) -> Tensor:
        """Return elements from ``start`` on; a view where they lie in one tensor, as a parameter's do."""
        first = bisect_right(self._starts, start) - 1
        parts = []
        while length:
            inside = start - self._starts[first]
            part = self._tensors[first].narrow(0, inside, min(length, self._tensors[first].numel() - inside))
            parts.append(part)
            start, length, first = start + part.numel(), length - part.numel(), first + 1
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def holds_gradients(engine: Any) -> bool:
    """Return whether the wrapper is ZeRO 1, 2 or 3 and holds all gradients in memory when its step begins."""
    wrapper = engine.optimizer
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        return not getattr(wrapper, "swap_optimizer", False)
    return isinstance(wrapper, DeepSpeedZeroOptimizer)


@contextlib.contextmanager
def exchange_first(wrapper: Any) -> Iterator[None]:
    """Exchange the flags of all groups before a step; forget them after it. Must be called by all ranks."""
    waits = getattr(wrapper, "_wait_for_offload_copies", None)  # DeepSpeed 0.19.2 copies at once
    if waits is not None:
        waits()
    bound = wrapper.optimizer._bound_steps
    bound.exchange_flags(_gradients(wrapper))
    try:
        yield
    finally:
        bound.forget_flags()


def has_overflow(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> bool:
    """Answer from the flags whether a gradient is not finite on any rank, where all groups have the same ranks."""
    found = wrapper.optimizer._bound_steps.found_nonfinite(wrapper.dp_process_group)
    if found is None:
        return bool(original(*args, **kwargs))
    everywhere = torch.tensor([found], dtype=torch.uint8, device=wrapper.optimizer.exchange_buffers.device)
    wrapper._model_parallel_all_reduce(tensor=everywhere, op=dist.ReduceOp.MAX)
    return bool(everywhere.item())


def _gradients(wrapper: Any) -> dict[int, Flat]:
    """Return this rank's gradients by partition index; those without any are left out."""
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        offloaded, masters = wrapper.offload_optimizer, wrapper.fp32_partitioned_groups_flat
    else:
        offloaded, masters = wrapper.cpu_offload, wrapper.single_partition_of_fp32_groups
    found: dict[int, Flat] = {}
    for index, master in enumerate(masters):
        kept = master.grad if offloaded else wrapper.averaged_gradients.get(index)
        if kept is not None:
            found[index] = kept.reshape(-1) if isinstance(kept, Tensor) else Pieces(kept)
    return found
