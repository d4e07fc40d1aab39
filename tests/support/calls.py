"""Counts function calls: whether a computation does more with larger numbers, without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable


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
