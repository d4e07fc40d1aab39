"""``python -m deepspeed_muon routes MODEL``: which algorithm updates each parameter of a model, and why."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_muon.checkpoint.index import INDEX_NAME, load_index
from deepspeed_muon.errors import CheckpointError, ConfigError
from deepspeed_muon.routing.route import Route, rows_of, totals_of
from deepspeed_muon.routing.rules import route_parameters
from deepspeed_muon.tools.command_line import Output
from deepspeed_muon.tools.model_shapes import load_model
from deepspeed_muon.tools.plan import optimizer_config, read_configuration

_HEADINGS = ("parameter", "number", "shape", "algorithm", "certain", "reason")


def run(arguments: argparse.Namespace) -> Output:
    """Run the command ``routes``."""
    settings = ("params", "include", "exclude")
    if (Path(arguments.model) / INDEX_NAME).is_file():
        given = [f"--{key}" for key in settings if getattr(arguments, key) not in ([], "{}")]
        if given:
            raise ConfigError(
                f"{arguments.model}: a consolidated set, which has its routes: leave out {given[0]}"
            )
        routes = _routes_of_set(arguments.model)
    else:
        config = optimizer_config(read_configuration(arguments.params))
        # Patterns of the command line are added to those of --params.
        config = config.model_copy(
            update={key: (*getattr(config, key), *getattr(arguments, key)) for key in settings[1:]}
        )
        routes = route_parameters(load_model(arguments.model, arguments.device), config)
    data = table(arguments.model, routes, per_parameter=arguments.all)
    if arguments.guesses:
        guesses = [row for row in data["routes"] if not row["certain"]]
        data["routes"] = sorted(guesses, key=lambda row: row["elements"], reverse=True)
    return Output(data, render(data))


def _routes_of_set(folder: str) -> list[Route]:
    """Return the routes of a consolidated set, which records the algorithms; one from AdamW gets those of the run."""
    index = load_index(folder)
    if index.source.get("optimizer") == "AdamW":
        raise CheckpointError(
            f"{folder}: a set from AdamW has no routes: the run that restores it chooses them; name the model"
        )
    return [
        Route(name, record.shape, record.algorithm, "recorded in the set")
        for name, record in index.parameters.items()
    ]


def table(model: str, routes: Sequence[Route], *, per_parameter: bool = False) -> dict[str, Any]:
    """Return the routes and their counts as data that can be serialised to JSON.

    Args:
        model: The model's name in the table.
        routes: The routes of all parameters.
        per_parameter: Whether every parameter has a row, instead of one row for equal parameters of all layers.
    """
    guessed = [route for route in routes if not route.certain]
    return {
        "model": model,
        "tensors": len(routes),
        "elements": sum(route.numel for route in routes),
        "algorithms": totals_of(routes),
        "guesses": {"tensors": len(guessed), "elements": sum(route.numel for route in guessed)},
        "routes": rows_of(routes, per_parameter=per_parameter),
    }


def render(data: Mapping[str, Any]) -> str:
    """Return the data of :func:`table` as text."""
    cells = [
        (
            row["name"],
            str(row["tensors"]),
            "x".join(map(str, row["shape"])) or "scalar",
            row["algorithm"],
            "yes" if row["certain"] else "guess",
            row["reason"],
        )
        for row in data["routes"]
    ]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (_HEADINGS, *cells)
    ]
    lines.append(f"\n{data['model']}: {_count(data, data)}")
    lines += [f"  {name:<8} {_count(total, data)}" for name, total in data["algorithms"].items()]
    lines.append(f"  {'guessed':<8} {_count(data['guesses'], data)}")
    if data["guesses"]["tensors"]:
        lines.append("Correct a wrong guess with a pattern in include or exclude.")
    return "\n".join(lines)


def _count(total: Mapping[str, int], of: Mapping[str, int]) -> str:
    fraction = total["elements"] / max(1, of["elements"])
    return f"{total['tensors']:>6,} parameters  {total['elements']:>17,} elements  {fraction:7.2%}"
