"""Routes the parameters of a checkpoint, whose files contain names and shapes but no modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.routing.algorithm import Structure, claims_of_model
from deepspeed_muon.routing.evidence import Layer, NamedParameter
from deepspeed_muon.routing.route import Route, Rule
from deepspeed_muon.routing.rules import route_parameters

# The largest kernel. A larger last dimension is more likely the input width of stacked matrices.
_MAX_KERNEL = 64


def convolution_kind(name: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Guess the kind of convolution that a parameter belongs to; ``None`` if it does not look like filters.

    Args:
        name: Dotted name.
        shape: Its shape.
        shapes: Name to shape of all parameters, among them the bias beside it.

    Returns:
        A kind of :class:`~deepspeed_muon.routing.evidence.Layer`. By its shape a convolution with several wide
        groups looks like one without groups, and a grouped convolution like one with a single input channel.
    """
    *path, last = name.split(".")
    if len(shape) not in (3, 4, 5) or last != "weight" or "experts" in path or shape[-1] > _MAX_KERNEL:
        return None
    # The bias has an element for each output: dimension 0 of a convolution, 1 of a transposed one (in, out, *kernel).
    bias = shapes.get(".".join((*path, "bias")))
    if bias is not None and tuple(bias) == (shape[1],) != (shape[0],):
        return "transposed convolution"
    # (channels, 1, *kernel) are the filters of a depthwise convolution
    return "grouped convolution" if shape[1] == 1 < shape[0] else "convolution"


def route_saved(
    shapes: Mapping[str, Sequence[int]],
    aliases: Mapping[str, Iterable[str]],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> dict[str, Route]:
    """Route the parameters of a checkpoint as training would, as far as its files allow.

    Training routes parameters by names, shapes and types of modules. Files contain no modules, so the filters of
    convolutions are recognised by their shapes and biases.

    Args:
        shapes: Name of every trained parameter to its shape, in order.
        aliases: Name to further names of the same parameter.
        include: Patterns of names for Muon: filters among them count as those of ordinary convolutions, stacks as
            experts.
        exclude: Patterns of names for AdamW.

    Raises:
        RoutingError: If a pattern matches nothing, or an included parameter is not a matrix.
    """
    kinds = {name: convolution_kind(name, shape, shapes) for name, shape in shapes.items()}
    members = [
        NamedParameter(
            (name, *aliases.get(name, ())),
            torch.nn.Parameter(torch.empty(tuple(shape), dtype=torch.float32, device="meta")),
            Layer("convolution") if kinds[name] else Layer("experts") if len(shape) == 3 else None,
        )
        for name, shape in shapes.items()
    ]
    claims = claims_of_model(members, Structure())
    members = [replace(member, claims=tuple(claims.get(id(member.param), ()))) for member in members]
    route_of = {}
    for route in route_parameters(members, MuonConfig(include=tuple(include), exclude=tuple(exclude))):
        kind = kinds[route.name]
        # Correct the routes that no pattern of the caller decided.
        if route.rule == "hidden" and route.kind == "convolution" and kind != "convolution":
            # An ordinary convolution can have a single input channel, too.
            rule: Rule = "unsure" if kind == "grouped convolution" else "shape"
            route = Route(route.name, route.shape, "adamw", f"filters of a {kind}", rule=rule, certain=False)
        elif route.rule == "hidden" and route.kind == "experts" and "experts" not in route.name.split("."):
            reason = "3-dimensional, no experts by name"
            route = Route(route.name, route.shape, "adamw", reason, rule="unsure", certain=False)
        route_of[route.name] = route
    return route_of
