"""The model's names for parameters that were routed without names."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from deepspeed_muon.errors import RoutingError
from deepspeed_muon.routing.param_groups import RoutedGroups
from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.routing.rules import route_parameters

__all__ = ["with_names_of"]


def with_names_of(model: nn.Module, routed: RoutedGroups) -> RoutedGroups:
    """Return routes with the model's names in place of those made from shapes.

    Ranks compare names, and messages refer to them. Routes that were made with names are returned as they are.

    Args:
        model: The module whose parameters were routed.
        routed: Their groups and routes.

    Raises:
        RoutingError: Naming the first parameter that would go elsewhere by its name.
    """
    if not routed.unnamed:
        return routed
    named = model_parameters_by_name(model)
    members = [member for key, member in named.items() if key in routed.by_id]
    for member, better in zip(members, route_parameters(members), strict=True):
        route = routed.by_id[id(member.param)]
        if better.algorithm != route.algorithm and route.rule != "group":
            raise RoutingError(
                f"parameter {member.name} of shape {list(better.shape)} was given without its name and went to "
                f"{route.algorithm}; by name it belongs to {better.algorithm} ({better.reason}). Pass "
                f"model.named_parameters() to deepspeed_muon.Muon instead of model.parameters()"
            )
    renamed = {
        key: replace(route, name=named[key].name) if key in named else route
        for key, route in routed.by_id.items()
    }
    return RoutedGroups(routed.groups, list(renamed.values()), renamed, unnamed=False)
