"""Divides the caller's param groups into groups of Muon and groups of AdamW.

ZeRO flattens each param group into one buffer, so a group must not mix the two, nor experts of different
expert-parallel groups. The divided groups keep the caller's settings, for example "no weight decay on norms".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from torch import Tensor, nn

from deepspeed_muon.config.settings import GROUP_KEYS, MuonConfig
from deepspeed_muon.config.values import TORCH_OPTIONS, unknown_key_message
from deepspeed_muon.errors import ConfigError, ParameterTypeError, RoutingError
from deepspeed_muon.math.updates import AdjustLrName, WeightDecayMode
from deepspeed_muon.plan.layout import TensorShards
from deepspeed_muon.routing.parameters import NamedParameter, is_divided, model_parameters_by_name
from deepspeed_muon.routing.route import Algorithm, Route
from deepspeed_muon.routing.rules import route_parameters

ParamsInput = nn.Module | Iterable[Any]

# With these keys the caller's group, or DeepSpeed's tag of a client group, decides the algorithm.
_ALGORITHM_KEYS = ("algorithm", "use_muon")
CALLER_GROUP = "caller_group"
"""Key of a param group with the number of the caller's group that it is a part of."""
_NAMES = {"adjust_lr_fn": get_args(AdjustLrName), "weight_decay_mode": get_args(WeightDecayMode)}


class ParamGroup(dict[str, Any]):
    """A param group whose algorithm is fixed, and whose momentum follows schedulers that cycle it.

    Schedulers with ``cycle_momentum`` (torch's ``OneCycleLR`` and ``CyclicLR``, DeepSpeed's ``OneCycle``) write
    ``betas`` into every group. In Muon's groups the first number becomes ``momentum``, too.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        """Write a setting.

        Raises:
            RoutingError: If it would change the algorithm, which is fixed once the optimizer is made.
            ConfigError: If a rule has no such name.
        """
        if key in _NAMES and value not in _NAMES[key]:
            raise ConfigError(f"param group: {key} is {value!r}; expected one of {', '.join(_NAMES[key])}")
        if key in _ALGORITHM_KEYS and key in self and value != self[key]:
            raise RoutingError(
                f"param group: {key} is {self[key]!r} and cannot become {value!r} once the optimizer is made; use "
                f"'include' or 'exclude', or give the group {key!r} when you make it"
            )
        if key == "betas" and self.get("algorithm") == "muon":
            super().__setitem__("momentum", float(value[0]))
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle all entries at once: one by one, ``betas`` would overwrite ``momentum``."""
        return type(self), (dict(self),)


@dataclass(frozen=True, slots=True)
class RoutedGroups:
    """The result of routing.

    Attributes:
        groups: Param groups for ``torch.optim.Optimizer``, each with ``algorithm``, ``use_muon``, ``caller_group`` and
            all settings. The parts of one caller's group follow each other.
        by_id: ``id(parameter)`` to its route, in the caller's order, also for frozen ones.
        unnamed: Whether some parameter had no name, so that only its shape could decide.
        partial: Whether the parameters are those of one stage of a pipeline.
    """

    groups: list[dict[str, Any]]
    by_id: dict[int, Route]
    unnamed: bool
    partial: bool = False

    @property
    def routes(self) -> list[Route]:
        """The routes in the caller's order."""
        return list(self.by_id.values())


@dataclass(slots=True)
class _CallerGroup:
    number: int
    where: str
    settings: dict[str, Any]
    members: list[NamedParameter]


def build_groups(
    params: ParamsInput,
    config: MuonConfig,
    *,
    model: nn.Module | None = None,
    rates: Mapping[str, Tensor] | None = None,
    shards: Mapping[int, TensorShards] | None = None,
) -> RoutedGroups:
    """Route all parameters and divide every group of the caller into a Muon half and an AdamW half.

    Args:
        params: A module, or an iterable of parameters, of ``(name, parameter)`` pairs, or of param groups of either.
        config: The settings that groups inherit.
        model: The module that the parameters belong to, for names and module types; not needed if ``params`` is a
            module. One stage of a pipeline is not checked as a whole model; the caller does that with
            :func:`deepspeed_muon.routing.rules.check_routes`.
        rates: ``lr``, ``muon_lr`` or ``adam_lr`` if the caller gave it as a tensor: the groups keep the tensor, so
            that later changes of its value count.
        shards: ``id(param)`` of the matrices that tensor parallelism cuts, to how it does. Head counts and sizes of
            parts are those of whole layers.

    Raises:
        ConfigError: If a group's own setting is misspelt or out of range.
        RoutingError: If the parameters cannot be divided as asked, or one cannot be trained here.
    """
    if isinstance(params, nn.Module):
        model, params = params, params.parameters()
    known = model_parameters_by_name(model, shards) if model is not None else {}
    callers = _caller_groups(params, known)
    members = [member for group in callers for member in group.members]
    partial = model is not None and is_divided(model)
    explicit = {
        id(member.param): algorithm
        for group in callers
        if (algorithm := _explicit_algorithm(group.settings)) is not None
        for member in group.members
    }
    routes = route_parameters(members, config, explicit=explicit, partial=partial)
    by_id = {id(member.param): route for member, route in zip(members, routes, strict=True)}
    groups = [half for group in callers for half in _halves(group, by_id, config, rates or {})]
    if not groups:
        raise RoutingError(
            f"none of the {len(routes)} parameters is trainable: requires_grad is False for all of them"
        )
    unnamed = any(not member.names and id(member.param) not in explicit for member in members)
    return RoutedGroups(groups, by_id, unnamed, partial)


def expert_group_name(param: Tensor) -> str | None:
    """Return the expert-parallel group of a parameter of DeepSpeed's experts, ``None`` for any other parameter."""
    return str(param.group_name) if getattr(param, "allreduce", True) is False else None  # type: ignore[attr-defined]


def _caller_groups(params: Iterable[Any], known: Mapping[int, NamedParameter]) -> list[_CallerGroup]:
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise ParameterTypeError(
            f"params is a {type(params).__name__}, expected a module or an iterable of parameters, of (name, "
            f"parameter) pairs or of param groups"
        )
    items = list(params)
    if not items:
        raise RoutingError("the optimizer got an empty list of parameters")
    if not all(isinstance(item, dict) for item in items):
        if any(isinstance(item, dict) for item in items):
            raise RoutingError("params mixes parameters and param groups; pass one or the other")
        items = [{"params": items}]
    groups = []
    named: dict[bool, str] = {}
    seen: set[int] = set()
    for number, item in enumerate(items):
        if "params" not in item:
            raise RoutingError(f"param group {number} has no 'params'")
        entries = item["params"]
        if not isinstance(entries, Iterable):
            raise ParameterTypeError(
                f"the params of param group {number} are a {type(entries).__name__}, expected a list of parameters"
            )
        if isinstance(entries, (set, frozenset)):
            raise ParameterTypeError(
                f"the params of param group {number} are a set, whose order differs between runs and ranks; pass a list"
            )
        entries = [entries] if isinstance(entries, Tensor) else list(entries)
        settings = {key: value for key, value in item.items() if key not in ("params", "param_names")}
        names = item.get("param_names")
        if names is not None and len(names) != len(entries):
            raise RoutingError(
                f"param group {number} has {len(names)} param_names for {len(entries)} parameters"
            )
        members = []
        for position, entry in enumerate(entries):
            name, param = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
            name = names[position] if name is None and names is not None else name
            place = f"entry {position} of param group {number}"
            named.setdefault(name is not None, place)
            members.append(member := _member(name, param, known, place))
            if id(member.param) in seen:
                raise RoutingError(
                    f"parameter {member.name} appears twice in the optimizer's groups; pass it once"
                )
            seen.add(id(member.param))
        groups.append(_CallerGroup(number, f"param group {number}", settings, members))
    if len(named) == 2:
        raise RoutingError(
            f"params has parameters with names and without: {named[True]} has a name, {named[False]} has none. Name "
            f"all of them, as model.named_parameters() does, or none"
        )
    return groups


def _member(name: str | None, param: Any, known: Mapping[int, NamedParameter], place: str) -> NamedParameter:
    if not isinstance(param, Tensor):
        raise ParameterTypeError(
            f"{place} is a {type(param).__name__}, expected a parameter or a (name, parameter) pair"
        )
    if id(param) in known:
        return known[id(param)]
    return NamedParameter((str(name),) if name is not None else (), param)  # type: ignore[arg-type]


def _explicit_algorithm(settings: Mapping[str, Any]) -> Algorithm | None:
    algorithm: Algorithm | None = settings.get("algorithm")
    if algorithm not in (None, "muon", "adamw"):
        raise ConfigError(f"param group: algorithm must be 'muon' or 'adamw', got {algorithm!r}")
    if algorithm is None and settings.get("use_muon") is not None:
        return "muon" if settings["use_muon"] else "adamw"
    return algorithm


def _halves(
    group: _CallerGroup, by_id: Mapping[int, Route], config: MuonConfig, rates: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Return the group's Muon half and AdamW half, if not empty, with all settings.

    DeepSpeed's experts get groups of their own, with the marks that its wrappers expect.
    """
    resolved = _checked_settings(group, config)
    unused = GROUP_KEYS | set(_ALGORITHM_KEYS) | TORCH_OPTIONS.keys()
    extra = {key: value for key, value in group.settings.items() if key not in unused}
    halves: list[dict[str, Any]] = []
    for algorithm, prefix in (("muon", "muon"), ("adamw", "adam")):
        members = [member for member in group.members if by_id[id(member.param)].algorithm == algorithm]
        if not members:
            continue
        settings = resolved.group_defaults(algorithm)
        own_rate = getattr(config, f"{prefix}_lr") is not None
        settings["lr"] = rates.get(f"{prefix}_lr" if own_rate else "lr", settings["lr"])
        for key in ("lr", "weight_decay"):
            own = group.settings.get(f"{prefix}_{key}", group.settings.get(key))
            if own is not None:
                settings[key] = own if isinstance(own, Tensor) else float(own)
        if algorithm == "muon":
            config.check_variant(settings, group.where)
        reference = config.reference_lr
        settings["lr_ratio"] = float(settings["lr"]) / reference if reference else 1.0
        shared: dict[str | None, list[Tensor]] = {}
        for member in members:
            shared.setdefault(expert_group_name(member.param), []).append(member.param)
        for name, params in shared.items():
            marks = {} if name is None else {"name": name, "moe": True}
            kind = {"algorithm": algorithm, "use_muon": algorithm == "muon", CALLER_GROUP: group.number}
            halves.append(ParamGroup({**extra, **settings, **marks, "params": params, **kind}))
    return halves


def _checked_settings(group: _CallerGroup, config: MuonConfig) -> MuonConfig:
    """Validate a group's own settings with the rules of the configuration."""
    for key, value in group.settings.items():
        # Groups of torch's optimizers carry all options of torch, most of them off.
        on = key in TORCH_OPTIONS and value not in (None, False)
        if on or (key not in GROUP_KEYS and difflib.get_close_matches(key, GROUP_KEYS, n=1, cutoff=0.8)):
            raise ConfigError(unknown_key_message(key, GROUP_KEYS, group.where))
    own = {key: value for key, value in group.settings.items() if key in GROUP_KEYS}
    return MuonConfig.from_params({**config.model_dump(), **own}, where=group.where)


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
    return RoutedGroups(routed.groups, renamed, unnamed=False)
