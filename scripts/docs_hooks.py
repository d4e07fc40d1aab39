"""What mkdocs does to the pages besides building them; ``mkdocs.yml`` names this file."""

from __future__ import annotations

import re

# Docstrings name other objects as Sphinx does: :class:`~package.module.Name`.
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?([\w.]+)</code>")


def on_post_page(output: str, **_: object) -> str:
    """Show the name of an object where a docstring refers to it."""
    return _ROLE.sub(lambda role: f"<code>{role[1].rpartition('.')[2]}</code>", output)
