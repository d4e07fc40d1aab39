"""How a method of one engine or of its wrapper is replaced, and what the replacements remember between calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

__all__ = ["Memory", "memory_of", "replace_method"]


@dataclass(slots=True)
class Memory:
    """What the replaced methods of a wrapper remember; its attribute ``_deepspeed_muon_memory``.

    Attributes:
        engine: The wrapper's engine, referred to weakly.
        duties: Make the context managers in which each step runs, outermost first.
        reduced: ``id`` of every parameter whose gradient was reduced since the last step.
        queued: The same since the last call of ``reduce_gradients`` (ZeRO 1 with ``overlap_comm``).
        restart: Whether the next gradient is the first of a step (after ``zero_grad``).
        applied_scale: The loss scale of the gradients of the running step (ZeRO 0 in half precision).
    """

    engine: weakref.ref[Any]
    duties: Sequence[Callable[[Any], AbstractContextManager[None]]]
    reduced: set[int] = field(default_factory=set)
    queued: set[int] = field(default_factory=set)
    restart: bool = False
    applied_scale: float = 1.0


def memory_of(wrapper: Any) -> Memory:
    """Return what the replaced methods of ``wrapper`` remember."""
    memory: Memory = wrapper._deepspeed_muon_memory
    return memory


def replace_method(owner: Any, attribute: str, function: Callable[..., Any]) -> None:
    """Let ``owner.attribute(...)`` call ``function(original, owner, ...)``.

    The replacement refers to its owner weakly. A bound method would make a cycle, and the owner's memory on the device
    would wait for the garbage collector.

    Args:
        owner: An engine or a wrapper. Mutated.
        attribute: The name of a method.
        function: Gets the original, bound to ``owner``, then ``owner`` and the arguments of the call.
    """
    reference = weakref.ref(owner)
    method = getattr(owner, attribute)
    is_own = isinstance(method, MethodType) and method.__self__ is owner
    plain: Callable[..., Any] = method.__func__ if is_own else method

    def replacement(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        assert owner is not None
        return function(MethodType(plain, owner) if is_own else plain, owner, *args, **kwargs)

    replacement.__name__, replacement.__doc__ = attribute, method.__doc__
    setattr(owner, attribute, replacement)
