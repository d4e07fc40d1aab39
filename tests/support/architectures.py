"""Architectures of transformers with their own sizes but few layers, and the table of their routes.

The table says of each class what its configuration gets. Models are built on the meta device; nothing is downloaded.
After a change of the rules, ``python -m tests.support.architectures`` writes the routes anew; read what changed before
you commit it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.routing.rules import route_parameters

TABLE = Path(__file__).resolve().parents[1] / "unit" / "routes_of_architectures.txt"


def build(name: str, settings: dict[str, Any]) -> nn.Module:
    """Return a model of the class ``name`` on the meta device, with the given settings of its configuration."""
    import transformers

    kind = getattr(transformers, name)
    with torch.device("meta"):
        return kind(kind.config_class(**settings))


def routes_of(name: str, settings: dict[str, Any]) -> list[str]:
    """Return the routes of an architecture as lines of text: algorithm, reason, names.

    Numbers in names are stars, equal siblings stand in braces, and vectors are only counted.
    """
    routes = route_parameters(list(model_parameters_by_name(build(name, settings)).values()))
    vectors = set()
    found: dict[tuple[str, str], dict[tuple[str, str], dict[str, None]]] = {}
    for route in routes:
        parts = ["*" if part.isdigit() else part for part in route.name.split(".")]
        if len(route.shape) == 1 and route.algorithm != "frozen":
            assert route.reason == "a vector", route
            vectors.add(".".join(parts))
            continue
        last = 1 if parts[-1] not in ("weight", "bias") or len(parts) == 1 else 2
        around = ".".join(parts[:-last]), ".".join(parts[len(parts) - last + 1 :])
        siblings = found.setdefault((route.algorithm, route.reason), {}).setdefault(around, {})
        siblings.setdefault(parts[-last])
    lines = []
    for (algorithm, reason), groups in sorted(found.items(), key=lambda item: item[0]):
        lines.append(f"  {algorithm}, {reason}:")
        for (before, after), names in groups.items():
            middle = next(iter(names)) if len(names) == 1 else "{" + ",".join(names) + "}"
            lines.append("    " + ".".join(part for part in (before, middle, after) if part))
    return [*lines, f"  adamw, a vector: {len(vectors)} names"]


def table() -> dict[str, tuple[str, list[str]]]:
    """Return by class its settings as JSON and the lines of its routes."""
    blocks = (block.strip("\n").split("\n") for block in TABLE.read_text().split("\n\n"))
    heads = ((head.partition(" "), routes) for head, *routes in blocks if not head.startswith("=="))
    return {name: (settings, routes) for (name, _, settings), routes in heads}


def _write() -> None:
    text = TABLE.read_text()
    for name, (settings, routes) in table().items():
        head = f"{name} {settings}"
        text = text.replace(
            "\n".join([head, *routes]), "\n".join([head, *routes_of(name, json.loads(settings))])
        )
    TABLE.write_text(text)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _write()
