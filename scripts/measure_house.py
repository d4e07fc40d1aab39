#!/usr/bin/env python3
"""Counts what makes the package hard to hold in one's head: room by room, and what is above the limits.

    python scripts/measure_house.py [ROOT]

A line of code has a token that is neither a comment nor a docstring. Reads ``deepspeed_muon/`` and ``ops/`` below ROOT
(this repository) as text; nothing of them is imported.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
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


def lines_of_code(text: str, tree: ast.Module) -> int:
    """Return how many lines have a token that is neither a comment nor a part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.ENDMARKER) and token.string.strip():
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def room_of(path: Path) -> str:
    """Return the room of a file, by its path below the root."""
    return path.parts[1] if path.parts[0] == "deepspeed_muon" and len(path.parts) > 2 else path.parts[0]


def circles(graph: grimp.ImportGraph) -> list[str]:
    """Return the sets of modules that import each other, directly or not."""
    reached = {module: graph.find_upstream_modules(module) for module in graph.modules}
    found = {
        frozenset({module, *(other for other in above if module in reached[other])})
        for module, above in reached.items()
    }
    return [", ".join(sorted(each)) for each in found if len(each) > 1]


def room_imports(graph: grimp.ImportGraph) -> set[tuple[str, str]]:
    """Return which room imports which: the packages and modules right below ``deepspeed_muon``, and its front."""
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
    """Print the counts by room, then each file, function and signature above its guide."""
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    rooms: dict[str, Counter[str]] = {}
    long_files: list[str] = []
    long_functions: list[str] = []
    many_parameters: list[str] = []
    for package in ("deepspeed_muon", "ops"):
        for path in sorted((root / package).rglob("*.py")):
            where, text = path.relative_to(root), path.read_text()
            if package == "deepspeed_muon" and where.parts[1] == "ops":
                continue  # a link to the other package
            tree = ast.parse(text)
            found = functions(tree)
            classes = sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
            rooms.setdefault(room_of(where), Counter()).update(
                modules=1,
                code=lines_of_code(text, tree),
                lines=text.count("\n"),
                classes=classes,
                functions=len(found),
            )
            if (count := text.count("\n")) > MAX_FILE_LINES:
                long_files.append(f"{where}: {count} lines")
            for name, node in found:
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long_functions.append(f"{where}: {name}: {length} lines")
                if (count := parameter_count(node)) > MAX_PARAMETERS:
                    many_parameters.append(f"{where}: {name}: {count} parameters")
    columns = ("modules", "code", "lines", "classes", "functions")
    print(f"{'room':16}" + "".join(f"{name:>10}" for name in columns))
    doors = {"deepspeed_muon": "(doors)"}
    for room, counts in [
        *sorted(rooms.items(), key=lambda item: -item[1]["code"]),
        ("all", sum(rooms.values(), Counter())),
    ]:
        print(f"{doors.get(room, room):16}" + "".join(f"{counts[name]:>10}" for name in columns))
    sys.path.insert(0, str(root))
    graph = grimp.build_graph("deepspeed_muon", cache_dir=None)
    round_about = circles(graph)
    arrows = room_imports(graph)
    print(f"rooms: {len({room for arrow in arrows for room in arrow})}, imports between them: {len(arrows)}")
    for title, entries in (
        ("imports upwards", upward(arrows, root)),
        ("circles of modules", round_about),
        (f"files above {MAX_FILE_LINES} lines", long_files),
        (f"functions above {MAX_FUNCTION_LINES} lines", long_functions),
        (f"functions with more than {MAX_PARAMETERS} parameters", many_parameters),
    ):
        print(f"{title}: {len(entries)}")
        for entry in entries:
            print(f"  {entry}")


if __name__ == "__main__":
    main()
