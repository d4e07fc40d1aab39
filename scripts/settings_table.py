#!/usr/bin/env python3
"""Writes the table of settings into the docs, and the constructor's keywords.

python scripts/settings_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from deepspeed_muon.config.settings import KEYS, RATE_KEYS, MuonConfig

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- written by scripts/settings_table.py from deepspeed_muon/config/settings.py -->\n"
END = "<!-- end -->\n"
KEYWORDS = ROOT / "deepspeed_muon" / "config" / "keywords.py"
KEYWORDS_HEAD = '''"""Keywords of ``Muon`` for type checkers; scripts/settings_table.py writes them from settings.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from torch import Tensor


# fmt: off
class MuonKeywords(TypedDict, total=False):
    """The keys of :class:`~deepspeed_muon.MuonConfig` without ``lr``, and the types of their values."""

'''


def shown(default: Any) -> str:
    """Return a default as it stands in JSON; ``-`` for none."""
    return "-" if default is None else f"`{json.dumps(default)}`"


def table() -> str:
    """Return the table in Markdown, one row for each key, and for each key of objects, as in ``qk_clip.alpha``."""
    rows = []
    for name, field in KEYS:
        default = field.get_default(call_default_factory=True)
        default = default.model_dump() if isinstance(default, BaseModel) else default
        rows.append(f"| `{name}` | {shown(default)} | {field.description} |\n")
        for section in (field.annotation, *get_args(field.annotation)):
            if isinstance(section, type) and issubclass(section, BaseModel):
                for field_name, inner in section.model_fields.items():
                    key = inner.alias or field_name
                    value = None if inner.is_required() else inner.default
                    rows.append(f"| `{name}.{key}` | {shown(value)} | {inner.description} |\n")
    return "| key | default | meaning |\n|---|---|---|\n" + "".join(rows)


def pages() -> dict[Path, str]:
    """Return the page with its table as it should be."""
    page = ROOT / "docs" / "settings.md"
    before, _, rest = page.read_text().partition(BEGIN)
    return {page: before + BEGIN + table() + END + rest.partition(END)[2]}


def accepted(kind: Any) -> str:
    """Return the annotation of what a caller may pass for a setting of the type ``kind``."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(json.dumps(part) for part in parts)}]".replace("false", "False")
    if get_origin(kind) in (list, tuple):
        return f"Sequence[{accepted(parts[0])}]"
    if get_origin(kind) is dict:
        return "Mapping[str, Mapping[str, object]]"
    if parts:
        return " | ".join(dict.fromkeys(map(accepted, parts)))
    if issubclass(kind, BaseModel):
        return "Mapping[str, object] | str | bool"
    return "None" if kind is type(None) else str(kind.__name__)


def keywords() -> str:
    """Return the module with the types of the constructor's keywords."""
    lines = [
        f"    {name}: {'Tensor | ' if name in RATE_KEYS else ''}{accepted(kind)}\n"
        for name, kind in get_type_hints(MuonConfig).items()
        if name in MuonConfig.model_fields and name != "lr"
    ]
    return KEYWORDS_HEAD + "".join(lines)


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
    KEYWORDS.write_text(keywords())
