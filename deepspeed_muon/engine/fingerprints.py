"""Which functions of the installed DeepSpeed are not those of any tested release.

``fingerprints.json`` has the digest of every function of DeepSpeed that this package replaces, calls or relies on, for
each tested release; ``scripts/fingerprints.py`` writes it. A new release that keeps names and parameters, and changes
what a function does, would otherwise go unnoticed.

The digest is that of the text: Python's own representations of a function (bytecode, syntax tree, tokens) differ
between its versions. A release in which only a comment changed is warned of, too.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import deepspeed
import torch.distributed as dist

from deepspeed_muon.logs import warn

TABLE = Path(__file__).with_suffix(".json")

Followed = tuple[Any, str]
"""A class or module of DeepSpeed, and the name of a function in it."""


class Table(TypedDict):
    """What ``fingerprints.json`` holds.

    Attributes:
        releases: The tested releases, the oldest first.
        functions: What :func:`name_of` calls a function to its digests, each by the first release that has it.
    """

    releases: list[str]
    functions: dict[str, dict[str, str]]


@functools.cache
def table() -> Table:
    """Return the digests of the tested releases."""
    content: Table = json.loads(TABLE.read_text())
    return content


@functools.cache
def warn_of_unknown(followed: Callable[[], Iterable[Followed]]) -> None:
    """Warn, once in a process and on the first rank, of functions that no tested release has.

    Args:
        followed: Returns the functions.
    """
    if dist.is_initialized() and dist.get_rank():
        return
    functions = list(followed())
    if names := unknown(functions):
        releases = table()["releases"]
        warn(
            "deepspeed_muon: DeepSpeed %s was not tested, and %d of the %d functions that are replaced or relied on "
            "are those of no tested release (%s): %s. Training may differ in silence: install a tested release or a "
            "newer deepspeed_muon, or compare a short run with one under a tested release",
            deepspeed.__version__,
            len(names),
            len(functions),
            ", ".join(releases),
            ", ".join(names),
        )


def unknown(followed: Iterable[Followed]) -> list[str]:
    """Return the names of functions that are not those of any tested release."""
    tested = table()["functions"]
    return [
        name_of(*function)
        for function in followed
        if digest_of(*function) not in tested.get(name_of(*function), {}).values()
    ]


def name_of(owner: type | ModuleType, name: str) -> str:
    """Return what messages and the table call a function."""
    return f"{owner.__name__}.{name}"


def function_of(owner: object, name: str) -> Any:
    """Return a function of DeepSpeed as it is written there, under what replaces and decorates it; ``None`` if none."""
    attribute: Any = getattr(owner, name, None)
    function = inspect.unwrap(attribute)
    # DeepSpeed's decorator for NVTX ranges hides it in a closure. The class is a prefix of names with two underscores.
    cells = getattr(function, "__closure__", None) or ()
    hidden = (inspect.unwrap(cell.cell_contents) for cell in cells)
    return next((inner for inner in hidden if name.endswith(getattr(inner, "__name__", "") or "?")), function)


def source_of(owner: object, name: str) -> str:
    """Return the source of a function, empty if there is none."""
    try:
        return inspect.getsource(function_of(owner, name))
    except (TypeError, OSError):
        return ""


def digest_of(owner: object, name: str) -> str:
    """Return the digest of a function's source."""
    return hashlib.sha256(source_of(owner, name).encode()).hexdigest()[:16]
