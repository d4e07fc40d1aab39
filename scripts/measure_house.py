#!/usr/bin/env python3
"""Counts the package layer by layer: modules, lines, classes, functions, and imports that run the wrong way.

    python scripts/measure_house.py [ROOT]

A line of code has a token that is neither a comment nor part of a docstring. Reads ``deepspeed_muon/`` and ``ops/``
below ROOT (this repository) as text; none of it is imported.
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

COLUMNS = ("modules", "code", "lines", "classes", "functions")


def lines_of_code(text: str, tree: ast.Module) -> int:
    """Return how many lines have a token that is neither a comment nor part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.ENDMARKER) and token.string.strip():
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def counts_of(path: Path) -> Counter[str]:
    """Return the counts of one module."""
    text = path.read_text()
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    return Counter(
        modules=1,
        code=lines_of_code(text, tree),
        lines=text.count("\n"),
        classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
        functions=sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes),
    )


def layer_of(path: Path) -> str:
    """Return the layer of a file, by its path below the root."""
    if path.parts[0] == "deepspeed_muon":
        return path.parts[1] if len(path.parts) > 2 else "(top)"
    return path.parts[0]


def import_cycles(graph: grimp.ImportGraph) -> list[str]:
    """Return the sets of modules that import each other, directly or not."""
    upstream = {module: graph.find_upstream_modules(module) for module in graph.modules}
    cycles = {
        frozenset({module, *(other for other in imported if module in upstream[other])})
        for module, imported in upstream.items()
    }
    return [", ".join(sorted(cycle)) for cycle in cycles if len(cycle) > 1]


def layer_imports(graph: grimp.ImportGraph) -> set[tuple[str, str]]:
    """Return which layer imports which: the packages and modules right below ``deepspeed_muon``, and itself."""
    layers = graph.find_children("deepspeed_muon")
    for layer in layers:
        graph.squash_module(layer)
    return {
        (importer, imported)
        for importer in (*layers, "deepspeed_muon")
        for imported in graph.find_modules_directly_imported_by(importer)
    }


def upward_imports(imports: set[tuple[str, str]], root: Path) -> list[str]:
    """Return the imports that run against the layers of ROOT's pyproject.toml; none where it has no layers."""
    try:
        contracts = read_configuration(str(root / "pyproject.toml"))["contracts_options"]
    except FileNotFoundError:
        return []
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    height = {"deepspeed_muon": len(layers)}
    for level, layer in enumerate(reversed(layers)):
        height |= {f"deepspeed_muon.{name.strip()}": level for name in layer.split(":")}
    # The package itself, which exports the public names, is as high as the topmost layer.
    return [
        f"{importer} -> {imported}"
        for importer, imported in sorted(imports)
        if height[importer] < min(height[imported], len(layers) - 1)
    ]


def main() -> None:
    """Print the counts by layer, then the imports that run upwards or in a cycle."""
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    counts: dict[str, Counter[str]] = {}
    for package in ("deepspeed_muon", "ops"):
        for path in sorted((root / package).rglob("*.py")):
            relative = path.relative_to(root)
            if relative.parts[:2] != ("deepspeed_muon", "ops"):  # a link to the other package
                counts.setdefault(layer_of(relative), Counter()).update(counts_of(path))
    rows = sorted(counts.items(), key=lambda item: -item[1]["code"])
    print(f"{'layer':16}" + "".join(f"{name:>10}" for name in COLUMNS))
    for layer, of_layer in [*rows, ("all", sum(counts.values(), Counter()))]:
        print(f"{layer:16}" + "".join(f"{of_layer[name]:>10}" for name in COLUMNS))
    sys.path.insert(0, str(root))
    graph = grimp.build_graph("deepspeed_muon", cache_dir=None)
    cycles = import_cycles(graph)  # before layer_imports, which squashes the graph
    imports = layer_imports(graph)
    print(f"imports between layers: {len(imports)}")
    for title, entries in (("imports upwards", upward_imports(imports, root)), ("import cycles", cycles)):
        print(f"{title}: {len(entries)}")
        for entry in entries:
            print(f"  {entry}")


if __name__ == "__main__":
    main()
