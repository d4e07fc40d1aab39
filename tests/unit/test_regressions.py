"""The table of bugs and their tests names every test module of the folder, and only tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "regressions"


def test_the_table_names_the_tests_that_are_there() -> None:
    named = re.findall(r"`([\w/.]*test_\w+\.py)(?:::(\w+))?`", (FOLDER / "README.md").read_text())
    for file, function in named:
        tree = ast.parse((FOLDER / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not function or function in functions, f"{file}::{function}"
    unnamed = {path.name for path in FOLDER.glob("test_*.py")} - {file for file, _ in named}
    assert not unnamed, f"README.md says of no bug that {sorted(unnamed)} tests it"
