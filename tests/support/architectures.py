"""Architectures of transformers, timm, diffusers and torchvision, small structures, and the table of their routes.

Models have their own sizes but few layers, and are built on the meta device; nothing is downloaded. The first lines of
the table say how it is written anew. Review what changed before you commit it.

The libraries are installed in a folder of their own (:data:`LIBRARIES`), in the versions of ``architectures.txt``, and
only a process that runs this module imports from it: beside a CPU build of torch, transformers and peft fail to import
if they see PyPI's torchvision.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.rules import route_parameters
from tests.support.native_ops import REPOSITORY
from tests.support.structures import BUILDERS

TABLE = REPOSITORY / "tests" / "unit" / "routes_of_architectures.txt"
LIBRARIES = Path(sys.prefix) / "architectures"
"""Where ``make setup`` installs what ``architectures.txt`` lists."""

_CHECKED_ON_IMPORT = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Operators that torchvision asks for at import and does not have if it was built for another build of torch."""

_LIBRARIES_OF_OPERATORS: list[torch.library.Library] = []
"""An operator is gone with the library that defined it."""


@dataclass(frozen=True)
class Architecture:
    """A heading of the table and the lines below it.

    Attributes:
        name: Library and class or model, as in ``transformers.LlamaForCausalLM``.
        settings: What its configuration or its constructor gets, as JSON.
        routes: The lines of its routes.
    """

    name: str
    settings: str
    routes: list[str]

    @property
    def library(self) -> str:
        """The package that has the model."""
        return self.name.partition(".")[0]


def build(name: str, settings: dict[str, Any]) -> nn.Module:
    """Return the model ``LIBRARY.NAME`` on the meta device, with the given settings."""
    library, _, model = name.partition(".")
    module: Any = None if library == "structures" else importlib.import_module(library)
    with torch.device("meta"):
        if library == "transformers":
            kind = getattr(module, model)
            return kind(kind.config_class(**settings))
        if library == "structures":
            return BUILDERS[model]()
        if library == "timm":
            return module.create_model(model, **settings)
        if library == "torchvision":
            builder = module.models.get_model_builder(model)
            # The weights of a backbone would be downloaded.
            keywords = {"weights", "weights_backbone"} & set(inspect.signature(builder).parameters)
            return builder(**dict.fromkeys(keywords), **settings)
        return getattr(module, model)(**settings)


def routes_of(name: str, settings: dict[str, Any]) -> list[str]:
    """Return the routes of an architecture as lines of text: algorithm, reason, names.

    Numbers in names are stars, equal siblings stand in braces, and vectors are only counted.
    """
    return _lines(route_parameters(list(model_parameters_by_name(build(name, settings)).values())))


def _stars(routes: Sequence[Route]) -> dict[tuple[str, ...], str]:
    """Return the last component of every path with stars for numbers, if several beside each other differ in them."""
    numbered: dict[tuple[tuple[str, ...], str], set[str]] = {}
    for route in routes:
        components = tuple(route.name.split("."))
        for i, component in enumerate(components):
            numbered.setdefault((components[:i], re.sub(r"\d+", "*", component)), set()).add(component)
    return {
        (*path, component): starred if len(components) > 1 or component.isdigit() else component
        for (path, starred), components in numbered.items()
        for component in components
    }


def _lines(routes: Sequence[Route]) -> list[str]:
    star = _stars(routes)
    vectors: set[str] = set()
    names: set[str] = set()
    guesses: set[str] = set()
    # By heading, then by what stands before and after the one component in which siblings differ.
    siblings: dict[str, dict[tuple[str, str], dict[str, None]]] = {}
    for route in routes:
        components = route.name.split(".")
        leaf = 2 if components[-1] in ("weight", "bias") and len(components) > 1 else 1
        containers = [star[tuple(components[: i + 1])] for i in range(len(components) - leaf)]
        module = "*" if components[-leaf].isdigit() else components[-leaf]
        rest = components[len(components) - leaf + 1 :]
        starred = ".".join((*containers, module, *rest))
        names.add(starred)
        if not route.certain:
            guesses.add(starred)
        elif len(route.shape) == 1 and route.algorithm == "adamw":
            vectors.add(starred)
            continue
        # The names below say which of them the reason means: "(pos_embed)".
        reason = re.sub(r" \(\S+\)", "", route.reason)
        heading = f"{route.algorithm}, {reason}{'' if route.certain else ' (guess)'}"
        around = ".".join(containers), ".".join(rest)
        siblings.setdefault(heading, {}).setdefault(around, {}).setdefault(module)
    lines = []
    for heading, groups in sorted(siblings.items()):
        lines.append(f"  {heading}:")
        for (before, after), modules in groups.items():
            middle = next(iter(modules)) if len(modules) == 1 else "{" + ",".join(modules) + "}"
            lines.append("    " + ".".join(component for component in (before, middle, after) if component))
    lines.append(f"  adamw, a vector: {len(vectors)} names")
    lines.append(f"  guessed: {len(guesses)} of {len(names)} names")
    return lines


@functools.cache
def read_table() -> tuple[list[str], dict[str, list[Architecture]]]:
    """Return the first lines of the table, and its architectures by section."""
    first, *blocks = (block.strip("\n").split("\n") for block in TABLE.read_text().split("\n\n"))
    sections: dict[str, list[Architecture]] = {}
    for heading, *routes in blocks:
        if heading.startswith("== "):
            section = sections.setdefault(heading.strip("= "), [])
        else:
            name, _, settings = heading.partition(" ")
            section.append(Architecture(name, settings, routes))
    return first, sections


@functools.cache
def architectures() -> dict[str, Architecture]:
    """Return the architectures of the table by name and settings."""
    sections = read_table()[1]
    return {f"{item.name} {item.settings}": item for section in sections.values() for item in section}


@functools.cache
def versions_of_table() -> dict[str, str]:
    """Return the version of every library that the table was made with."""
    line = next(line for line in read_table()[0] if line.startswith("# Made with "))
    return dict(re.findall(r"(\w+) (\d[\w.]*\w)", line))


@functools.cache
def installed_versions() -> dict[str, str | None]:
    """Return the version of each library of the table, ``None`` for one that is not installed."""
    folders = [str(LIBRARIES), *sys.path]
    return {
        library: next(
            (
                distribution.version
                for distribution in importlib.metadata.distributions(name=library, path=folders)
            ),
            None,
        )
        for library in versions_of_table()
    }


def few_architectures() -> set[str]:
    """Return all small structures, and so many architectures that every reason of the table is there twice."""
    # Names stand below their reason, further in.
    reasons = {
        heading: {re.sub(r"\d+", "*", line) for line in item.routes if re.match(r"  \w.*:$", line)}
        for heading, item in architectures().items()
    }
    few = {heading for heading in reasons if heading.startswith("structures.")}
    for _ in range(2):
        missing = set().union(*(reasons[heading] for heading in reasons.keys() - few))
        while missing:
            best = max(reasons.keys() - few, key=lambda heading: (len(reasons[heading] & missing), heading))
            few.add(best)
            missing -= reasons[best]
    return few


def routes_now(headings: Iterable[str]) -> dict[str, list[str]]:
    """Return what :func:`routes_of` gives for architectures whose library is installed, or the error, by heading.

    They are built in a new process.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.support.architectures", *headings]
    answer = subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.PIPE)
    routes: dict[str, list[str]] = json.loads(answer.stdout)
    return routes


def _import_libraries() -> None:
    """Make the folder of libraries importable, torchvision also where its operators do not fit this build of torch."""
    sys.path.insert(0, str(LIBRARIES))
    specification = importlib.util.find_spec("torchvision")
    if specification is None or specification.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(specification.origin).parent / "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _CHECKED_ON_IMPORT:
            library.define(schema)
        _LIBRARIES_OF_OPERATORS.append(library)


def _routes(headings: Iterable[str]) -> dict[str, list[str]]:
    _import_libraries()
    installed = installed_versions()
    routes: dict[str, list[str]] = {}
    for heading in headings:
        architecture = architectures()[heading]
        if installed.get(architecture.library, "") is None:
            continue
        started = time.perf_counter()
        try:
            routes[heading] = routes_of(architecture.name, json.loads(architecture.settings))
        except Exception as error:  # the architecture's own code runs
            routes[heading] = [f"  {type(error).__name__}: {error}"]
        print(f"{time.perf_counter() - started:6.2f} s  {heading[:100]}", file=sys.stderr)
    return routes


def _write() -> None:
    first, sections = read_table()
    routes = _routes(architectures())
    versions = installed_versions()
    blocks = []
    for section, members in sections.items():
        blocks.append(f"== {section} ==")
        for architecture in members:
            heading = f"{architecture.name} {architecture.settings}"
            blocks.append("\n".join([heading, *routes.get(heading, architecture.routes)]))
    made_with = ", ".join(f"{library} {version}" for library, version in versions.items())
    first = [f"# Made with {made_with}." if line.startswith("# Made with") else line for line in first]
    TABLE.write_text("\n\n".join(["\n".join(first), *blocks]) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if sys.argv[1:]:
        print(json.dumps(_routes(sys.argv[1:])))
    else:
        _write()
