"""What the replaced methods of a wrapper remember between calls, and what they all ask it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Memory", "at_boundary", "memory_of"]


@dataclass(slots=True)
class Memory:
    """What the replaced methods of a wrapper remember, in its attribute ``_deepspeed_muon_memory``.

    Attributes:
        engine: The wrapper's engine, referred to weakly.
        duties: Make the context managers in which each step runs, outermost first.
        reduced: ``id`` of every parameter whose gradient was reduced since the last step.
        queued: The same since the last call of ``reduce_gradients`` (ZeRO 1 with ``overlap_comm``).
        restart: Whether the next gradient is the first of a step (after ``zero_grad``).
        waiting: ``id`` of every parameter whose gradient waits for the end of the backward pass (ZeRO 1 and 2).
        applied_scale: The loss scale of the gradients of the running step (ZeRO 0 in half precision).
    """

    engine: weakref.ref[Any]
    duties: Sequence[Callable[[Any], AbstractContextManager[None]]]
    reduced: set[int] = field(default_factory=set)
    queued: set[int] = field(default_factory=set)
    restart: bool = False
    waiting: frozenset[int] = frozenset()
    applied_scale: float = 1.0


def memory_of(wrapper: Any) -> Memory:
    """Return what the replaced methods of ``wrapper`` remember."""
    memory: Memory = wrapper._deepspeed_muon_memory
    return memory


def at_boundary(wrapper: Any) -> bool:
    """Return whether the last micro-step is running. DeepSpeed 0.19.2 has an attribute, 0.19.8 a method."""
    boundary = wrapper.is_gradient_accumulation_boundary
    return bool(boundary() if callable(boundary) else boundary)
