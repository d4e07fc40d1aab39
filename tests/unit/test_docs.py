"""The documentation quotes the code as it is, its links lead somewhere, and its index names every page."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from deepspeed_muon.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def test_the_loop_of_a_step_is_quoted() -> None:
    page = (ROOT / "docs" / "step.md").read_text()
    quoted = re.search(r"```python\n(.*?)\n```", page, re.DOTALL)
    assert quoted is not None
    lines = textwrap.indent(quoted[1], " " * 8, lambda line: bool(line.strip()))
    assert lines in (ROOT / "deepspeed_muon" / "step" / "runner.py").read_text()


def links(page: Path) -> list[str]:
    """Return the relative links of a page, without what follows ``#``."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    found = (target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose))
    return [target for target in found if target and "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_exist(page: Path) -> None:
    assert not [target for target in links(page) if not (page.parent / target).exists()]


def test_the_index_names_every_page() -> None:
    folder = ROOT / "docs"
    pages = {str(page.relative_to(folder)) for page in folder.rglob("*.md")}
    assert pages - {"README.md"} <= set(links(folder / "README.md"))


def test_the_citation_names_the_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
