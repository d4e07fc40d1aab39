#!/usr/bin/env python3
"""Counts what makes the package hard to hold in one's head: modules, lines, imports, long files, functions, signatures.

    python scripts/measure_house.py [ROOT]

Reads ``deepspeed_muon/`` and ``ops/`` below ROOT (this repository) as text; nothing of them is imported.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import grimp
from importlinter.api import read_configuration

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


def room_imports(root: Path) -> set[tuple[str, str]]:
    """Return which room imports which: the packages and modules right below ``deepspeed_muon``, and its front."""
    sys.path.insert(0, str(root))
    graph = grimp.build_graph("deepspeed_muon", cache_dir=None)
    rooms = graph.find_children("deepspeed_muon")
    for room in rooms:
        graph.squash_module(room)
    return {
        (importer, imported)
        for importer in (*rooms, "deepspeed_muon")
        for imported in graph.find_modules_directly_imported_by(importer)
    }


def upward(arrows: set[tuple[str, str]], root: Path) -> list[str]:
    """Return the imports that run against the layers of ROOT's pyproject.toml; none where it has no layers."""
    try:
        contracts = read_configuration(str(root / "pyproject.toml"))["contracts_options"]
    except FileNotFoundError:
        return []
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    height = {"deepspeed_muon": len(layers)}
    for level, layer in enumerate(reversed(layers)):
        height |= {f"deepspeed_muon.{name.strip()}": level for name in layer.split(":")}
    # The front is as high as the other doors.
    return [
        f"{importer} -> {imported}"
        for importer, imported in sorted(arrows)
        if height[importer] < min(height[imported], len(layers) - 1)
    ]


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
    arrows = room_imports(root)
    print(f"rooms: {len({room for arrow in arrows for room in arrow})}, imports between them: {len(arrows)}")
    for title, entries in (
        ("imports upwards", upward(arrows, root)),
        (f"files above {MAX_FILE_LINES} lines", long_files),
        (f"functions above {MAX_FUNCTION_LINES} lines", long_functions),
        (f"functions with more than {MAX_PARAMETERS} parameters", many_parameters),
    ):
        print(f"{title}: {len(entries)}")
        for entry in entries:
            print(f"  {entry}")


if __name__ == "__main__":
    main()
