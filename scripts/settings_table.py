#!/usr/bin/env python3
"""Writes the table of settings in ``docs/settings.md`` from ``deepspeed_muon/config/``.

python scripts/settings_table.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from deepspeed_muon.config.documentation import keys_with_sentences

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
BEGIN = "<!-- written by scripts/settings_table.py from deepspeed_muon/config/settings.py -->\n"
END = "<!-- end -->\n"


def shown(default: Any) -> str:
    """Return a default as it stands in JSON; ``-`` for none."""
    return "-" if default is None else f"`{json.dumps(default)}`"


def table() -> str:
    """Return the table in Markdown, one row for each key."""
    rows = [f"| `{name}` | {shown(default)} | {text} |\n" for name, default, text in keys_with_sentences()]
    return "| key | default | meaning |\n|---|---|---|\n" + "".join(rows)


def page() -> str:
    """Return the page with its table as it should be."""
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    return re.sub(pattern, lambda _: BEGIN + table() + END, PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page())
