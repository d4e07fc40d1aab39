"""Makes the constructor's signature and docstring from :class:`~deepspeed_muon.config.MuonConfig`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel
from torch import Tensor

from deepspeed_muon.config.settings import RATE_KEYS, MuonConfig
from deepspeed_muon.variants import SETTINGS as VARIANT_SETTINGS

_Init = TypeVar("_Init", bound=Callable[..., None])


def keys_with_sentences() -> Iterator[tuple[str, Any, str]]:
    """Yield name, default and sentence (Markdown) of every key, and of keys of objects, as in ``qk_clip.alpha``."""
    # Settings of variants, which the model has first, come last.
    for name, field in sorted(MuonConfig.model_fields.items(), key=lambda item: item[0] in VARIANT_SETTINGS):
        default = field.get_default(call_default_factory=True)
        yield (
            name,
            default.model_dump() if isinstance(default, BaseModel) else default,
            field.description or "",
        )
        for section in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(section, type) and issubclass(section, BaseModel):
                for key, inner in section.model_fields.items():
                    shown = None if inner.is_required() else inner.default
                    yield f"{name}.{key}", shown, inner.description or ""


def takes_settings(init: _Init) -> _Init:
    """Write every key into the signature and the docstring of a constructor that takes ``**settings``.

    Args:
        init: The constructor. Mutated: its ``__signature__`` gets the keys between its own positional and keyword
            parameters, and in its ``__doc__`` an entry for each key replaces the line of ``lr, **settings``.
    """
    types = get_type_hints(MuonConfig)
    own = inspect.signature(init, eval_str=True)
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in own.parameters.values() if p.kind not in rest]
    keys = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.get_default(call_default_factory=True),
            annotation=types[name] | Tensor if name in RATE_KEYS else types[name],
        )
        for name, field in MuonConfig.model_fields.items()
        if name not in own.parameters
    ]
    first = [p for p in named if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    init.__signature__ = own.replace(parameters=[*first, *keys, *named[len(first) :]])  # type: ignore[attr-defined]
    if init.__doc__ is not None:  # python -OO strips docstrings
        entries = [_entry(name, text) for name, _, text in keys_with_sentences() if "." not in name]
        init.__doc__ = re.sub(r" *lr, \*\*settings:.*\n", lambda _: "".join(entries), init.__doc__)
    return init


def _entry(name: str, text: str) -> str:
    """Return the entry of a key in a Google-style docstring, from Markdown."""
    text = re.sub(r"\[(.*?)\]\([^)]*\)", r"docs/\1", text).replace("`", "``")
    indent = " " * 12
    return (
        textwrap.fill(f"{name}: {text}", 110, initial_indent=indent, subsequent_indent=indent + "    ") + "\n"
    )
