#!/usr/bin/env python3
"""Counts how large the package is and how well it reads, layer by layer, and lists imports in the wrong direction.

    python scripts/count_code.py [ROOT]

Reads ``deepspeed_muon/`` and ``ops/`` below ROOT (this repository) as text and imports neither. The columns:

``code``: lines with a token that is neither a comment nor part of a docstring.

``comments``: lines with a comment in 100 lines of code; ``# type:`` and ``# noqa`` are not comments.

``vague``: bindings whose name has a word of ``VAGUE_WORDS``, in 1,000 bindings. A binding is the name of a class,
function or argument, or of a variable or attribute that is assigned (also by a loop, ``with``, ``except``,
``import ... as`` or a comprehension), counted each time. Names are split into words at underscores and capitals:
``own_rows`` and ``OwnRows`` have the word ``own``.

``Any``: ``typing.Any`` in annotations.

``small``: private functions and methods of six lines of code or fewer whose name their module uses once, in a call.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp
from importlinter.api import read_configuration

VAGUE_WORDS = re.compile(
    "each|found|own|held|kept|known|told|what|here|mine|wide|whole|alike|others?|places?|room|parts?|at|ways?"
)
COLUMNS = ("modules", "code", "lines", "classes", "functions", "comments", "vague", "Any", "small")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that belong to a string which is a statement."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def code_and_comment_lines(text: str, tree: ast.AST) -> tuple[set[int], set[int]]:
    """Return the numbers of the lines with code, and of those with a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if not re.match(r"#!|# (type|noqa)\b", token.string):
                comments.add(token.start[0])
        elif token.type != tokenize.ENDMARKER and token.string.strip():
            code.update(range(token.start[0], token.end[0] + 1))
    return code - docstring_lines(tree), comments


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield the name of every binding, as the module's docstring defines them."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case (
                ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield name


def is_vague(name: str) -> bool:
    """Return whether a word of ``name`` says nothing about the thing."""
    return any(VAGUE_WORDS.fullmatch(word.lower()) for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name))


def annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the annotations of arguments, results and variables."""
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if annotation := getattr(node, field, None):
                yield annotation


def small_private_functions(tree: ast.AST, code: set[int]) -> list[str]:
    """Return the private functions that are short enough, and called rarely enough, to stand where they are called."""
    nodes = list(ast.walk(tree))
    uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    uses += Counter(node.attr for node in nodes if isinstance(node, ast.Attribute))
    calls = {
        getattr(node.func, "id", getattr(node.func, "attr", ""))
        for node in nodes
        if isinstance(node, ast.Call)
    }
    return [
        node.name
        for node in nodes
        if isinstance(node, Function) and node.name.startswith("_") and not node.name.endswith("__")
        if node.name in calls and uses[node.name] == 1
        if len(code.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1))) <= 6
    ]


def counts_of(path: Path) -> Counter[str]:
    """Return the counts of one file."""
    text = path.read_text()
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    names = list(bound_names(tree))
    code, comments = code_and_comment_lines(text, tree)
    return Counter(
        {
            "modules": 1,
            "code": len(code),
            "lines": text.count("\n"),
            "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
            "functions": sum(isinstance(node, Function) for node in nodes),
            "comment lines": len(comments),
            "names": len(names),
            "vague names": sum(map(is_vague, names)),
            "Any": sum(
                getattr(node, "id", "") == "Any"
                for annotation in annotations(tree)
                for node in ast.walk(annotation)
            ),
            "small": len(small_private_functions(tree, code)),
        }
    )


def with_rates(counts: Counter[str]) -> dict[str, str]:
    """Return the columns of one row of the table."""
    return {name: str(counts[name]) for name in COLUMNS} | {
        "comments": f"{100 * counts['comment lines'] / (counts['code'] or 1):.1f}",
        "vague": f"{1000 * counts['vague names'] / (counts['names'] or 1):.1f}",
    }


def layer_of(path: Path) -> str:
    """Return the layer of a file, by its path below the root."""
    if path.parts[0] == "deepspeed_muon":
        return path.parts[1] if len(path.parts) > 2 else "(top)"
    return path.parts[0]


def import_cycles(graph: grimp.ImportGraph) -> list[str]:
    """Return the sets of modules that import each other, directly or not."""
    upstream = {module: graph.find_upstream_modules(module) for module in graph.modules}
    cycles = {
        frozenset({module, *(name for name in imported if module in upstream[name])})
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


def print_package(root: Path) -> None:
    """Print the table of the package."""
    counts: dict[str, Counter[str]] = {}
    for package in ("deepspeed_muon", "ops"):
        for path in sorted((root / package).rglob("*.py")):
            relative = path.relative_to(root)
            if relative.parts[:2] != ("deepspeed_muon", "ops"):  # a link to the other package
                counts.setdefault(layer_of(relative), Counter()).update(counts_of(path))
    rows = sorted(counts.items(), key=lambda item: -item[1]["code"])
    print(f"{'layer':16}" + "".join(f"{name:>10}" for name in COLUMNS))
    for layer, of_layer in [*rows, ("all", sum(counts.values(), Counter()))]:
        print(f"{layer:16}" + "".join(f"{text:>10}" for text in with_rates(of_layer).values()))


def print_tests_and_docs(root: Path) -> None:
    """Print the size of the tests and of the documentation."""
    tests = sum((counts_of(path) for path in (root / "tests").rglob("*.py")), Counter[str]())
    pages = [*(root / "docs").rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"]
    words = sum(len(page.read_text().split()) for page in pages if page.exists())
    print(
        f"tests: {tests['code']} lines of code, {tests['lines']} lines in {tests['modules']} files,"
        f" {with_rates(tests)['vague']} vague names in 1,000"
    )
    print(f"docs, README and CONTRIBUTING: {words} words in {len(pages)} files")


def print_imports(root: Path) -> None:
    """Print the imports that run upwards or in a cycle."""
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
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    print_package(root)
    print_tests_and_docs(root)
    print_imports(root)
