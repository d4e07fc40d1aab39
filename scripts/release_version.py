"""Checks that everything which states the version of this package states the same one.

    scripts/release_version.py [TAG]

``deepspeed_muon/version.py`` has it. ``CITATION.cff`` and the newest release of ``CHANGELOG.md`` repeat it, with one
date; a TAG is ``v`` and the version. Between releases it ends with ``.dev0``, and those two have the last release.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def faults(root: Path, tag: str | None = None) -> list[str]:
    """Return what disagrees with the version of the code; a TAG is a release, which nothing may be left out of."""

    def stated(file: str, pattern: str) -> str:
        match = re.search(pattern, (root / file).read_text(), re.M)
        return match[1] if match else "nothing"

    version = stated("deepspeed_muon/version.py", r'^__version__ = "(.*)"')
    date = stated("CITATION.cff", r'^date-released: "(.*)"')
    release = stated("CHANGELOG.md", r"^## \[(\d.*)$")
    wrong = []
    cited = stated("CITATION.cff", r"^version: (.*)")
    is_release = not version.endswith(".dev0")
    if (cited == version) != is_release:
        wrong.append(f"CITATION.cff has version {cited}, version.py {version}")
    if release != f"{cited}] - {date}":
        wrong.append(f"the newest release of CHANGELOG.md is [{release}, expected [{cited}] - {date}")
    if tag is not None and tag != f"v{version}":
        wrong.append(f"the tag is {tag}, version.py has {version}")
    if tag is not None and "## [Unreleased]" in (root / "CHANGELOG.md").read_text():
        wrong.append("CHANGELOG.md still has changes under [Unreleased]")
    return wrong


if __name__ == "__main__":
    problems = faults(ROOT, *sys.argv[1:2])
    print("\n".join(problems) or "one version everywhere")
    sys.exit(bool(problems))
