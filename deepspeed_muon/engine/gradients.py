"""Gradients between a backward pass and the step of ZeRO 1, 2 and 3: all of this step, none of an earlier one.

**Parameters that get no gradient in a step.** ZeRO 3, and ZeRO 1 and 2 with an offloaded optimizer, keep reduced
gradients in buffers that outlive the step, and write only those that a backward pass reduces. So DeepSpeed goes wrong
in two ways:

- A parameter without a gradient is updated with its last one in every step. That gradient is also part of the norm, and
  if it is infinite, all later steps overflow.
- In an accumulation DeepSpeed copies gradients in the first micro-step and adds them in the later ones. If the first
  gradient of a parameter comes later, it is added to that of the step before. With offload, if its last gradient comes
  before the last micro-step, the sum never reaches the optimizer.

Here the first gradient *of a parameter* in a step is copied and the later ones are added. A parameter that the last
backward pass did not reduce gets a gradient of zero, through the same functions as DeepSpeed's own gradients, so that
all readers of the buffers (overflow check, norm, clipping, ``safe_get_full_grad``) find the right numbers. Nothing is
communicated: the ranks that reduce a parameter together all know whether they did.

**Flags.** ZeRO calls the inner step once for each param group (stages 1, 2) or sub-group (stage 3), and looks for
gradients that are not finite before that: it reads all gradients twice and sends a message. All gradients of the step
lie in the wrapper's buffers already when its ``step`` begins. So the ranks tell each other the flags of all groups
there, in one message, which also answers ZeRO's question.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.engine.zero import View, Zero3View, Zero12View, ZeroView, view_of
from deepspeed_muon.step.gradients import Flat


def divides_gradients(engine: Any) -> bool:
    """Return whether the wrapper is ZeRO 3, where one buffer holds a rank's part of every gradient."""
    return isinstance(view_of(engine.optimizer), Zero3View)


def keeps_offloaded_gradients(engine: Any) -> bool:
    """Return whether the wrapper is ZeRO 1 or 2 with offload, which keeps sums over the micro-steps."""
    return keeps_gradients(engine) and not divides_gradients(engine)


def keeps_gradients(engine: Any) -> bool:
    """Return whether gradients outlive the step in the wrapper's buffers."""
    return view_of(engine.optimizer).keeps_gradients


def reduces_last_gradients_only(engine: Any) -> bool:
    """Return whether the wrapper is ZeRO 1 with ``overlap_comm``.

    It reduces a gradient when the last micro-step adds to it. Gradients of earlier micro-steps alone stay unreduced.
    """
    view = view_of(engine.optimizer)
    return isinstance(view, Zero12View) and view.reduces_last_only


def reduce_independent_gradient(
    original: Callable[..., Any], view: Zero12View, param: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Note that ZeRO 1 reduces the gradient of ``param`` by itself."""
    view.memory.queued.add(id(param))
    return original(param, *args, **kwargs)


def reduce_gradients(original: Callable[..., Any], view: Zero12View, pipeline_parallel: bool = False) -> Any:
    """Reduce what the last micro-step of an accumulation did not add to, then finish the reduction."""
    queued = view.memory.queued
    # A pipeline fills its buckets in the call below, with each layer's gradient over all micro-batches.
    for number, params in enumerate(() if pipeline_parallel else view.params):
        for param in params:
            if id(param) not in queued and view.has_gradient(param):
                view.reduce(param, number)
    queued.clear()
    return original(pipeline_parallel=pipeline_parallel)


def gradient_partition_epilogue(
    original: Callable[..., Any], view: ZeroView, *args: Any, **kwargs: Any
) -> Any:
    """End a backward pass, then give parameters that it did not reduce a gradient of zero."""
    result = original(*args, **kwargs)
    _fill_up(view)
    return result


@contextlib.contextmanager
def only_gradients_of_the_step(view: ZeroView) -> Iterator[None]:
    """Fill in zeros once more, for programs that end an accumulation in ``step()``; forget all after the step."""
    _fill_up(view)
    try:
        yield
    finally:
        _start_afresh(view)


def zero_grad(original: Callable[..., Any], view: ZeroView, *args: Any, **kwargs: Any) -> Any:
    """Let the next backward pass forget earlier gradients, as in DeepSpeed; a step before it still uses them."""
    view.memory.restart = True
    return original(*args, **kwargs)


def partition_grads(
    original: Callable[..., Any], view: ZeroView, params: Sequence[Tensor], partitions: Sequence[Tensor]
) -> list[Tensor]:
    """Copy first gradients of the step into ZeRO 3's buffer, and add later ones."""
    if view.memory.restart:
        view.memory.restart = False
        _start_afresh(view)
    parts: dict[bool, tuple[list[Tensor], list[Tensor]]] = {}
    for param, partition in zip(params, partitions, strict=True):
        chosen = parts.setdefault(_is_new(view, param), ([], []))
        chosen[0].append(param)
        chosen[1].append(partition)
    buffers: list[Tensor] = []
    for is_new, part in parts.items():
        with view.in_micro_step(first=is_new):
            buffers += original(*part)
    return buffers


def copy_grads_in_partition(original: Callable[..., Any], view: ZeroView, param: Tensor, *args: Any) -> Any:
    """Copy the first gradient of ``param`` in the step, and add later ones (ZeRO 1 and 2 with offload)."""
    with view.in_micro_step(first=_is_new(view, param)):
        return original(param, *args)


def _is_new(view: View, param: Tensor) -> bool:
    """Return whether this is the first gradient of ``param`` in the step, and remember that there was one."""
    reduced = view.memory.reduced
    new = id(param) not in reduced
    reduced.add(id(param))
    return new


def _start_afresh(view: ZeroView) -> None:
    """Forget what was reduced, and what remains of a step that overflowed or raised."""
    view.memory.reduced.clear()
    view.forget_gradients()


def _fill_up(view: ZeroView) -> None:
    """Give what was not reduced in this step a gradient of zero, also in the gradients of offloaded masters."""
    reduced = view.memory.reduced
    if isinstance(view, Zero3View):
        delivers = view.offloads and view.at_boundary
        missing = [
            param
            for group in view.params
            for param in group
            if id(param) not in reduced or (delivers and view.is_undelivered(param))
        ]
        if missing:
            view.put_zeros(missing)
    elif isinstance(view, Zero12View) and view.at_boundary:
        for param in view.undelivered(reduced):
            view.deliver_zero(param)


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
    view = view_of(engine.optimizer)
    return isinstance(view, ZeroView) and view.holds_gradients


@contextlib.contextmanager
def exchange_flags_first(view: ZeroView) -> Iterator[None]:
    """Exchange the flags of all groups before a step; forget them after it. Must be called by all ranks."""
    bound = view.optimizer._bound_steps
    flat: dict[int, Flat] = {
        index: kept.reshape(-1) if isinstance(kept, Tensor) else Pieces(kept)
        for index, kept in view.gradients().items()
    }
    bound.exchange_flags(flat)
    try:
        yield
    finally:
        bound.forget_flags()


def has_overflow(original: Callable[..., Any], view: ZeroView, *args: Any, **kwargs: Any) -> bool:
    """Answer from the flags whether a gradient is not finite on any rank, where all groups have the same ranks."""
    optimizer = view.optimizer
    found = optimizer._bound_steps.found_nonfinite(view.data_parallel_group)
    if found is None:
        return bool(original(*args, **kwargs))
    return view.is_true_of_any(
        torch.tensor([found], dtype=torch.uint8, device=optimizer.exchange_buffers.device)
    )
