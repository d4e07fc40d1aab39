"""Makes the README's relative links absolute, for the page on PyPI, and gives the wheel links to the project.

    scripts/absolute_links.py https://github.com/OWNER/NAME v0.3.0

Pages and files lead to the tag of the repository, pictures to their raw content. Changes ``README.md`` and
``pyproject.toml`` in place.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def absolute(text: str, repository: str, tag: str) -> str:
    """Return a page's text with absolute links."""

    def replace(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        kind = "raw" if picture else "blob"
        return f"{picture}[{label}]({repository}/{kind}/{tag}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replace, text)


def with_links(project: str, repository: str, tag: str) -> str:
    """Return the text of ``pyproject.toml`` with the links that PyPI shows."""
    pages = {
        "Repository": "",
        "Documentation": f"/tree/{tag}/docs",
        "Changelog": f"/blob/{tag}/CHANGELOG.md",
        "Issues": "/issues",
    }
    links = "".join(f'{name} = "{repository}{page}"\n' for name, page in pages.items())
    return project.replace("[project.optional-", f"[project.urls]\n{links}\n[project.optional-", 1)


if __name__ == "__main__":
    for name, change in (("README.md", absolute), ("pyproject.toml", with_links)):
        (ROOT / name).write_text(change((ROOT / name).read_text(), *sys.argv[1:3]))
