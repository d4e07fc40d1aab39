"""The tables of planted defects: of the package (``scripts/planted_defects.py``) and of the CUDA kernels."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def planted(name: str) -> dict[str, list[dict[str, str]]]:
    """Return the tables of a file beside this folder."""
    return tomllib.loads(Path(__file__).resolve().parents[1].joinpath(name).read_text())
