"""Counts function calls and operations: whether a computation does more with larger numbers, without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts the operations of torch that are not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func.overloadpacket.__name__ != "detach"
        return func(*args, **(kwargs or {}))


def calls(run: Callable[[], object]) -> int:
    """Return how many functions, of Python or C, are called while ``run`` runs."""
    count = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
