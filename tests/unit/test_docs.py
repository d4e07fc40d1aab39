"""The documentation quotes the code as it is."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_loop_of_a_step_is_quoted() -> None:
    page = (ROOT / "docs" / "step.md").read_text()
    quoted = re.search(r"```python\n(.*?)\n```", page, re.DOTALL)
    assert quoted is not None
    lines = textwrap.indent(quoted[1], " " * 8, lambda line: bool(line.strip()))
    assert lines in (ROOT / "deepspeed_muon" / "step" / "runner.py").read_text()
