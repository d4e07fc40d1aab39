"""The texts of errors in the settings: one line for each bad key, with the value and what is allowed."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from deepspeed_muon.math.coefficients import NsScheduleName

__all__ = ["TORCH_OPTIONS", "readable", "shown", "unknown_key_message"]

TORCH_OPTIONS = {
    "maximize": "negate the loss instead",
    "amsgrad": "it has no counterpart here",
    "differentiable": "a step is not differentiable here",
    "capturable": "a step is not captured as a whole; CUDA graphs are used inside where they pay",
    "foreach": "ns_backend and torch_adam choose the kernels",
    "fused": "ns_backend and torch_adam choose the kernels",
    "ns_coefficients": "write ns_schedule: [[a, b, c], ...] with one triple for each step",
}
"""Options of torch's optimizers that this one does not have, and what to do instead."""

# Keys whose value may be of several kinds. Pydantic reports one error for each kind; these texts replace them.
_ALLOWED = {
    "ns_schedule": "must be one of {} or a list of triples [a, b, c]".format(
        ", ".join(map(repr, get_args(NsScheduleName)))
    ),
    "split": "must be 'qkv', 'gate_up', a list of whole sizes, or a list of at least 2 fractions between 0 and 1",
    "heads": "must be a whole number of at least 1, or a list of those",
    "share_matrices": "must be 'auto', false, or a whole number of at least 2",
}

_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}


def unknown_key_message(key: str, known: Any, where: str = "") -> str:
    """Return the text of an unknown-key error in the section ``where``, with a similar known key if there is one."""
    where = f"{where}: " if where else ""
    if key in TORCH_OPTIONS:
        return f"{where}{key!r} is an option of torch's optimizers that this one does not have; {TORCH_OPTIONS[key]}"
    names = sorted(str(name) for name in known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
    return f"{where}unknown key {key!r}; {hint}"


def readable(error: ValidationError, params: Mapping[str, Any], where: str) -> str:
    """Turn pydantic's report on ``params``, the section ``where``, into one line per key."""
    lines: dict[str, str] = {}
    for item in error.errors():
        location, value, message = item["loc"], item["input"], str(item["msg"])
        key, context = str(location[0]), item.get("ctx", {})
        if item["type"] in _BOUNDS:
            word, name = _BOUNDS[item["type"]]
            message = f"must be {word} {context[name]:g}"
        elif isinstance(context.get("error"), ValueError):
            message = str(context["error"])
        if key in _ALLOWED:
            value, message = params[key], _ALLOWED[key]
            if key in ("split", "heads") and len(location) > 1:
                key, value = f"{key}[{location[1]!r}]", value[location[1]]
            elif key in ("split", "heads"):
                message = f"must be an object: name pattern to a value, which {message}"
        else:
            for part in location[1:]:
                key += f"[{part}]" if isinstance(part, int) else f".{part}"
        lines.setdefault(key, f"{where}.{key}: {message} (got {shown(value)})")
    return "\n".join(lines.values())


def shown(value: Any) -> str:
    """Return a value in one short line."""
    return " ".join(reprlib.repr(value).split())
