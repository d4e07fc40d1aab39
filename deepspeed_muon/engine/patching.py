"""How functions of DeepSpeed are replaced, which releases need a replacement, and which functions no release had.

A :class:`Hook` names a function of DeepSpeed and the function that is called instead. A :class:`Workaround` is a defect
of DeepSpeed, with the hooks that exist for it alone.

``fingerprints.json`` has the digest of every function of DeepSpeed that this package replaces, calls or relies on, for
each tested release; ``scripts/fingerprints.py`` writes it. Otherwise a new release that keeps names and parameters but
changes what a function does would go unnoticed. The digest is that of the source text, since Python's representations
of a function (bytecode, syntax tree, tokens) differ between its versions. So even a changed comment is warned of.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, TypeAlias, TypedDict

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from packaging.version import Version

from deepspeed_muon.engine.views import WRAPPERS, PlainView, View, view_of
from deepspeed_muon.logs import warn

Original: TypeAlias = Callable[..., Any]
"""A function of DeepSpeed that its replacement may call."""

INSTALLED = Version(deepspeed.__version__)


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of DeepSpeed that is replaced.

    Attributes:
        owner: The class or module whose function it is, or the kinds of views whose wrapper's method it is.
        attribute: The function's name.
        function: Is called instead, with the original, then with the view if the owner is a kind of view, and with the
            arguments of the call.
        applies: Whether an engine whose wrapper has this view needs it. Unused where a function is replaced for the
            whole process.
    """

    owner: type | ModuleType | tuple[type[View], ...]
    attribute: str
    function: Callable[..., Any]
    applies: Callable[[Any], object] = lambda view: True

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.attribute}"

    def is_needed_by(self, view: View) -> bool:
        """Return whether an engine whose wrapper has this view needs it."""
        if isinstance(self.owner, tuple) and (
            isinstance(view, PlainView) or not isinstance(view, self.owner)
        ):
            return False
        return bool(self.applies(view))

    def classes(self) -> list[type]:
        """Return the classes of DeepSpeed whose method is replaced in single engines."""
        if self.owner is DeepSpeedEngine:
            return [DeepSpeedEngine, PipelineEngine]
        assert isinstance(self.owner, tuple)
        return [wrapper for wrapper, view in WRAPPERS.items() if issubclass(view, self.owner)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workaround:
    """A defect of DeepSpeed, whatever the optimizer, and what is replaced because of it.

    Attributes:
        defect: What DeepSpeed does wrong.
        test: Fails without the workaround.
        fixed_in: The first release that was seen to be right; ``None`` if there is none, and later releases are taken
            to have the defect as well.
        hooks: What is replaced. A hook of several workarounds is installed once, and asks :attr:`is_needed` itself.
        calls: Private functions of DeepSpeed that are called and not replaced.
        before_wrapping: Changes this rank's model before the ranks compare what DeepSpeed is about to wrap.
        prepare: Changes a bound engine before the conditions of its hooks are asked.
    """

    defect: str
    test: str
    fixed_in: str | None = None
    hooks: tuple[Hook, ...] = ()
    calls: tuple[tuple[type | ModuleType, tuple[str, ...]], ...] = ()
    before_wrapping: Callable[[DeepSpeedEngine], object] = lambda engine: None
    prepare: Callable[[DeepSpeedEngine, View], object] = lambda engine, view: None

    @property
    def is_needed(self) -> bool:
        """Whether the installed DeepSpeed has the defect."""
        return self.fixed_in is None or Version(self.fixed_in) > INSTALLED


def replace_method(owner: object, hook: Hook) -> None:
    """Replace the hook's method of one engine or wrapper by one that calls the hook's function.

    The replacement refers to its owner weakly. A bound method would make a cycle, and the owner's memory on the device
    would wait for the garbage collector.
    """
    reference, function, has_view = weakref.ref(owner), hook.function, isinstance(hook.owner, tuple)
    method = getattr(owner, hook.attribute)
    is_bound = isinstance(method, MethodType) and method.__self__ is owner
    unbound: Callable[..., Any] = method.__func__ if is_bound else method

    def replacement(*args: object, **kwargs: object) -> Any:
        owner = reference()
        assert owner is not None
        original = MethodType(unbound, owner) if is_bound else unbound
        return function(original, view_of(owner) if has_view else owner, *args, **kwargs)

    replacement.__name__, replacement.__doc__ = hook.attribute, method.__doc__
    setattr(owner, hook.attribute, replacement)


# ---- fingerprints ----

FINGERPRINTS = Path(__file__).with_name("fingerprints.json")

WatchedFunction: TypeAlias = tuple[Any, str]
"""A class or module of DeepSpeed, and the name of a function in it whose changes matter."""


class Fingerprints(TypedDict):
    """What ``fingerprints.json`` holds.

    Attributes:
        releases: The tested releases, the oldest first.
        functions: Name of a function (:func:`name_of`) to its digests, each by the first release that has it.
    """

    releases: list[str]
    functions: dict[str, dict[str, str]]


@functools.cache
def fingerprints() -> Fingerprints:
    """Return the digests of the tested releases."""
    content: Fingerprints = json.loads(FINGERPRINTS.read_text())
    return content


@functools.cache
def warn_of_unknown(watched: Callable[[], Iterable[WatchedFunction]]) -> None:
    """Warn, once in a process and on the first rank, of functions that no tested release has.

    Args:
        watched: Returns the functions.
    """
    if dist.is_initialized() and dist.get_rank():
        return
    functions = list(watched())
    if names := unknown(functions):
        releases = fingerprints()["releases"]
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


def unknown(watched: Iterable[WatchedFunction]) -> list[str]:
    """Return the names of functions that are not those of any tested release."""
    tested = fingerprints()["functions"]
    return [
        name_of(*function)
        for function in watched
        if digest_of(*function) not in tested.get(name_of(*function), {}).values()
    ]


def name_of(owner: type | ModuleType, name: str) -> str:
    """Return what messages and the table call a function."""
    return f"{owner.__name__}.{name}"


def function_of(owner: object, name: str) -> Any:
    """Return a function of DeepSpeed as it is written there, without replacements and decorators; ``None`` if none."""
    attribute: Any = getattr(owner, name, None)
    function = inspect.unwrap(attribute)
    # DeepSpeed's decorator for NVTX ranges hides it in a closure. Names with two underscores begin with the class's.
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
