"""Makes the README's relative links absolute, for the page on PyPI; changes ``README.md`` in place.

    scripts/absolute_links.py https://github.com/OWNER/NAME v0.3.0

Pages and files lead to the tag of the repository, pictures to their raw content.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def absolute(text: str, repository: str, tag: str) -> str:
    """Return a page's text with absolute links."""

    def replace(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        kind = "raw" if picture else "blob"
        return f"{picture}[{label}]({repository}/{kind}/{tag}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replace, text)


if __name__ == "__main__":
    README.write_text(absolute(README.read_text(), *sys.argv[1:3]))
