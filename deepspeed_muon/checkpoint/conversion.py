"""Which parameters of another optimizer's checkpoint go to Muon, and what the run that continues it must set.

Training routes parameters by names, shapes and types of modules. Files know no modules, so shapes and biases must
tell which parameters are filters of convolutions. The conversion reports every guess in words.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import torch

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.routing.parameters import NamedParameter
from deepspeed_muon.routing.route import Route, Rule
from deepspeed_muon.routing.rules import route_parameters

__all__ = ["convolution_kind", "repeat_in_run", "route_saved"]

# The longest kernel. A longer last dimension is more likely the input width of stacked matrices.
_MAX_KERNEL = 64


def convolution_kind(name: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Guess the kind of convolution whose filters a parameter is; ``None`` if it seems to be no filters.

    Args:
        name: Dotted name.
        shape: Its shape.
        shapes: Shapes of all parameters, among them the bias beside it.

    Returns:
        A kind of :class:`~deepspeed_muon.routing.parameters.NamedParameter`. Plain filters may be those of a grouped
        convolution with wide groups, and one input may be that of a plain one: shapes do not tell.
    """
    parts = name.split(".")
    if len(shape) not in (3, 4, 5) or parts[-1] != "weight" or "experts" in parts or shape[-1] > _MAX_KERNEL:
        return None
    bias = shapes.get(".".join((*parts[:-1], "bias")))
    if bias is not None and tuple(bias) == (shape[1],) != (shape[0],):
        return "transposed convolution"
    return "grouped convolution" if shape[1] == 1 < shape[0] else "convolution"


def route_saved(
    shapes: Mapping[str, Sequence[int]],
    aliases: Mapping[str, Iterable[str]],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> dict[str, Route]:
    """Route the parameters of a checkpoint as training would, as far as its files tell.

    Args:
        shapes: Name of every trained parameter to its shape, in order.
        aliases: Name to further names of the same parameter.
        include: Patterns of names that go to Muon: filters among them are taken for plain ones, stacks for experts.
        exclude: Patterns of names that stay with AdamW.

    Raises:
        RoutingError: If a pattern matches nothing, or Muon is asked for something that is no matrix.
    """
    kinds = {name: convolution_kind(name, shape, shapes) for name, shape in shapes.items()}
    members = [
        NamedParameter(
            (name, *aliases.get(name, ())),
            torch.nn.Parameter(torch.empty(tuple(shape), device="meta")),
            frozenset(("convolution",) if kinds[name] else ("experts",) if len(shape) == 3 else ()),
        )
        for name, shape in shapes.items()
    ]
    found = {}
    for route in route_parameters(members, MuonConfig(include=tuple(include), exclude=tuple(exclude))):
        kind = kinds[route.name]
        # Where the caller's patterns name a parameter, they decide.
        if route.rule == "hidden" and route.kind == "convolution" and kind != "convolution":
            # A plain convolution can have a single input channel, too.
            rule: Rule = "unsure" if kind == "grouped convolution" else "shape"
            route = Route(route.name, route.shape, "adamw", f"filters of a {kind}", rule=rule)
        elif route.rule == "hidden" and route.kind == "experts" and "experts" not in route.name.split("."):
            reason = "3-dimensional, no experts by name"
            route = Route(route.name, route.shape, "adamw", reason, rule="unsure")
        found[route.name] = route
    return found


def repeat_in_run(
    algorithms: Mapping[str, str],
    shapes: Mapping[str, Sequence[int]],
    aliases: Mapping[str, Iterable[str]],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> list[str]:
    """Say what ``optimizer.params`` of the run that continues must hold, so that its routes are the checkpoint's.

    Args:
        algorithms: Name of every parameter to the algorithm in the checkpoint.
        shapes: As for :func:`route_saved`.
        aliases: As there.
        include: The patterns that were used.
        exclude: The patterns that were used.

    Returns:
        Sentences; none where there is nothing to say.
    """
    routes = route_saved(shapes, aliases, include=include, exclude=exclude)
    wanted = [name for name, kind in algorithms.items() if kind == "muon" != routes[name].algorithm]
    # The files leave these open; training, which sees the modules, may route them to Muon.
    doubtful = {name for name, route in routes.items() if route.rule == "unsure"}
    unwanted = [
        name
        for name, kind in algorithms.items()
        if kind == "adamw" and (routes[name].algorithm == "muon" or name in doubtful)
    ]
    said = []
    settings = {"include": [*include, *wanted], "exclude": [*exclude, *unwanted]}
    if any(settings.values()):
        text = ", ".join(
            f"{json.dumps(key)}: {json.dumps(names)}" for key, names in settings.items() if names
        )
        said.append(f"the run that goes on from here needs in optimizer.params: {text}")
    plain = [name for name, each in routes.items() if each.rule == "hidden" and each.kind == "convolution"]
    plain = [name for name in plain if name not in unwanted]
    if plain:
        said.append(
            f"taken for filters of plain convolutions, by their shapes: {', '.join(plain)}; if the run finds a grouped "
            f"or transposed one among them, convert again with --exclude and its name"
        )
    return said
