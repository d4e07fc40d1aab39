#!/usr/bin/env python3
"""Counts what makes the package hard to hold in one's head: modules, lines, long files, functions and signatures.

    python scripts/measure_house.py [ROOT]

Reads ``deepspeed_muon/`` and ``ops/`` below ROOT (this repository) as text; nothing is imported.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8


def functions(tree: ast.AST, prefix: str = "") -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return every function of a module with its dotted name, nested ones included."""
    found: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append((prefix + node.name, node))
        name = getattr(node, "name", None) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else None
        found += functions(node, f"{prefix}{name}." if name else prefix)
    return found


def parameter_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many parameters a function has, ``self`` and ``cls`` left out."""
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    extra = [part for part in (arguments.vararg, arguments.kwarg) if part is not None]
    return len([part for part in named if part.arg not in ("self", "cls")]) + len(extra)


def main() -> None:
    """Print the counts, then each file, function and signature above its guide."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    lines: dict[str, int] = {}
    long_functions: list[str] = []
    many_parameters: list[str] = []
    for package in ("deepspeed_muon", "ops"):
        for path in sorted((root / package).rglob("*.py")):
            where = str(path.relative_to(root))
            text = path.read_text()
            lines[where] = text.count("\n")
            for name, node in functions(ast.parse(text)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long_functions.append(f"{where}: {name}: {length} lines")
                if (count := parameter_count(node)) > MAX_PARAMETERS:
                    many_parameters.append(f"{where}: {name}: {count} parameters")
    flat = [name for name in lines if name.startswith("deepspeed_muon/") and name.count("/") == 1]
    long_files = [f"{name}: {count} lines" for name, count in lines.items() if count > MAX_FILE_LINES]
    for package in ("deepspeed_muon", "ops"):
        own = [count for name, count in lines.items() if name.startswith(f"{package}/")]
        print(f"{package}: {len(own)} modules, {sum(own)} lines")
    print(f"modules flat in deepspeed_muon/: {len(flat)}")
    for title, entries in (
        (f"files above {MAX_FILE_LINES} lines", long_files),
        (f"functions above {MAX_FUNCTION_LINES} lines", long_functions),
        (f"functions with more than {MAX_PARAMETERS} parameters", many_parameters),
    ):
        print(f"{title}: {len(entries)}")
        for entry in entries:
            print(f"  {entry}")


if __name__ == "__main__":
    main()
