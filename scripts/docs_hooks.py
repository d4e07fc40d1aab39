"""What mkdocs does to the pages besides building them; ``mkdocs.yml`` names this file."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Docstrings name other objects as Sphinx does: :class:`~package.module.Name`.
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?([\w.]+)</code>")

# Where the site shows a file of the repository. GitHub hides the comment, and a link beside it leads to the file.
_SOURCE = re.compile(r"<!-- source: (\S+) -->\n")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Show the files that a page includes."""
    return _SOURCE.sub(lambda comment: f"```python\n{(ROOT / comment[1]).read_text()}```\n", markdown)


def on_post_page(output: str, **_: object) -> str:
    """Show the name of an object where a docstring refers to it."""
    return _ROLE.sub(lambda role: f"<code>{role[1].rpartition('.')[2]}</code>", output)
