"""Divides the caller's param groups into groups of Muon and groups of AdamW.

ZeRO flattens each param group into one buffer, so a group must not mix the two algorithms, nor experts of different
expert-parallel groups. The new groups have the settings of the caller's group, for example no weight decay for norms.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepspeed_muon.config.settings import (
    DEFAULT_ADAM_LR,
    DEFAULT_MUON_LR,
    GROUP_KEYS,
    GroupSettings,
    MuonConfig,
    refuse_misspelt_keys,
)
from deepspeed_muon.config.values import RENAMED, TORCH_OPTIONS, unknown_key_message
from deepspeed_muon.errors import ConfigError, RoutingError
from deepspeed_muon.logs import warn
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.plan.flat_order import order_of_matrices
from deepspeed_muon.plan.layout import TensorShards
from deepspeed_muon.routing.evidence import NamedParameter
from deepspeed_muon.routing.parameters import is_divided, model_parameters_by_name
from deepspeed_muon.routing.route import Algorithm, Route
from deepspeed_muon.routing.rules import current_route, routes_if_trained
from deepspeed_muon.routing.shapes import true_shape

ParamsInput = nn.Module | Iterable[Tensor | tuple[str, Tensor] | GroupSettings]

# Keys by which the caller's group, or DeepSpeed's tag of a client group, decides the algorithm.
_ALGORITHM_KEYS = ("algorithm", "use_muon")
CALLER_GROUP = "caller_group"
"""Key of a param group: the number of the caller's group from which it was made."""
DIVIDED_GROUP = "divided_group"
"""Key of the groups into which DeepSpeed divided a caller's group: that one's number. The optimizer removes it."""


class ParamGroup(dict[str, Any]):
    """A param group whose algorithm is fixed, and whose momentum follows schedulers that cycle it.

    Schedulers with ``cycle_momentum`` (torch's ``OneCycleLR`` and ``CyclicLR``, DeepSpeed's ``OneCycle``) write
    ``betas`` into every group. In Muon's groups the first number also becomes ``momentum``.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        """Write a setting.

        Raises:
            RoutingError: If it would change the algorithm, which is fixed once the optimizer is made.
        """
        if key in _ALGORITHM_KEYS and key in self and value != self[key]:
            raise RoutingError(
                f"param group: {key} is {self[key]!r} and cannot become {value!r} once the optimizer is made; use "
                f"'include' or 'exclude', or give the group {key!r} when you make it"
            )
        # OneCycleLR with cycle_momentum writes betas, because the optimizer has them among its defaults.
        if key == "betas" and self.get("algorithm") == "muon":
            super().__setitem__("momentum", float(value[0]))
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[type[ParamGroup], tuple[GroupSettings]]:
        """Copy and pickle all entries at once: one by one, ``betas`` would overwrite ``momentum``."""
        return type(self), (dict(self),)


@dataclass(slots=True)
class CallerGroup:
    """A param group as the caller passed it.

    Attributes:
        number: Its number among the caller's groups.
        settings: All of its entries but the parameters.
        members: Its parameters; empty once they are in the optimizer's groups.
    """

    number: int
    settings: GroupSettings
    members: list[NamedParameter] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RoutedGroups:
    """The result of routing.

    Attributes:
        groups: Param groups for ``torch.optim.Optimizer``, each with ``algorithm``, ``use_muon``, ``caller_group`` and
            all settings; those made from one caller's group are consecutive. Frozen parameters are in the group of the
            algorithm that trains them once they are unfrozen.
        members: ``id(parameter)`` to its names and layer, in the caller's order.
        if_trained: ``id(parameter)`` to the route that it has, or would have if it were not frozen. Frozen parameters
            that cannot be trained (integers, shapes that Muon refuses) are missing.
        by_id: ``id(parameter)`` to its route, by what was frozen when the routes were made, in the caller's order.
        callers: The caller's groups, without their parameters.
        rates: As for :func:`build_groups`.
        routed_by: What alone could decide, where module types could have decided otherwise and no model was given.
        partial: Whether the parameters are those of one stage of a pipeline.
    """

    groups: list[GroupSettings]
    members: dict[int, NamedParameter]
    if_trained: dict[int, Route]
    by_id: dict[int, Route]
    callers: dict[int, CallerGroup]
    rates: Mapping[str, Tensor]
    routed_by: Literal["", "shape", "name and shape"]
    partial: bool = False

    @property
    def routes(self) -> list[Route]:
        """The routes in the caller's order."""
        return list(self.by_id.values())

    def frozen(self) -> list[tuple[str, Tensor]]:
        """Return name and tensor of the parameters that were frozen when routed, and that could be trained."""
        return [
            (route.name, self.members[key].param)
            for key, route in self.by_id.items()
            if route.algorithm == "frozen" and key in self.if_trained
        ]

    def current(self) -> RoutedGroups:
        """Return the routes according to what is frozen now.

        Raises:
            RoutingError: If no parameter is trainable, or one was unfrozen that cannot be trained.
        """
        by_id = {key: current_route(member, self.if_trained.get(key)) for key, member in self.members.items()}
        if all(route.algorithm == "frozen" for route in by_id.values()):
            raise RoutingError(
                f"none of the {len(by_id)} parameters is trainable: requires_grad is False for all of them"
            )
        return replace(self, by_id=by_id)

    def copied(self, groups: list[GroupSettings]) -> RoutedGroups:
        """Return these routes for a copy of the optimizer with these groups, whose parameters have other ids."""
        key_of = {key: id(member.param) for key, member in self.members.items()}
        return replace(
            self,
            groups=groups,
            members={key_of[key]: member for key, member in self.members.items()},
            if_trained={key_of[key]: route for key, route in self.if_trained.items()},
            by_id={key_of[key]: route for key, route in self.by_id.items()},
        )

    def warn_of_missing_names(self) -> None:
        """Warn if parameters were routed without names or module types, where no engine provides the model."""
        if self.routed_by:
            warn(
                "deepspeed_muon: parameters are routed by %s alone, since the types of their modules are not known: an "
                "embedding or output head may go to Muon, convolutions and stacked experts to AdamW, and the weights "
                "of Conv1D are read as output x input; pass the model, or model=... beside the parameters",
                self.routed_by,
            )


def warn_of_equal_rates(groups: Sequence[GroupSettings], *, reference: float, is_first: bool) -> bool:
    """Warn if a schedule or the program writes one rate into groups that were given different ones.

    Args:
        groups: The optimizer's groups.
        reference: The rate of a group whose ``lr_ratio`` is 1.
        is_first: Whether these are the rates of the first step. In later steps, a rate below all that were given is
            taken for the floor of a schedule, at which groups may meet.

    Returns:
        Whether it warned.
    """
    for number, halves in itertools.groupby(groups, key=lambda group: group.get(CALLER_GROUP, 0)):
        rates = {(float(group["lr"]), group["lr_ratio"]) for group in halves}
        (rate, *different) = {rate for rate, _ in rates}
        floor = 0.0 if is_first else reference * min(ratio for _, ratio in rates)
        if rate > floor and not different and len(rates) > 1:
            warn(
                "deepspeed_muon: Muon and AdamW train param group %d with one rate, %g, and were given two: a "
                "schedule or the program writes one number into both halves of the group. Give the schedule a "
                "list, as in max_lr=[g['lr'] for g in optimizer.param_groups]; multiply what the program writes by "
                "g['lr_ratio']; or write the schedule into the DeepSpeed configuration, where it keeps the ratio",
                number,
                rate,
            )
            return True
    return False


def warn_of_rates(
    config: MuonConfig,
    groups: Sequence[GroupSettings],
    callers: Iterable[CallerGroup],
) -> None:
    """Warn of rates that nobody chose."""
    # 1. By algorithm: the keys that set the rates of its groups (None: a default), each with the rate.
    settings = {caller.number: caller.settings for caller in callers}
    given: dict[str, set[tuple[str | None, float]]] = {"muon": set(), "adamw": set()}
    for group in groups:
        keys = ("muon_lr" if group["algorithm"] == "muon" else "adam_lr", "lr")
        sources = (settings[group[CALLER_GROUP]], vars(config))
        key = next((key for values in sources for key in keys if values.get(key) is not None), None)
        given[group["algorithm"]].add((key, float(group["lr"])))
    # 2. One algorithm's rate is set, and the other trains at a default.
    ends = (("muon", "muon_lr"), ("adamw", "adam_lr"))
    for (algorithm, key), (second, second_key) in (ends, ends[::-1]):
        defaults = [rate for set_key, rate in given[second] if set_key is None]
        if defaults and any(set_key == key for set_key, _ in given[algorithm]):
            warn(
                "deepspeed_muon: %s is set alone, so what %s trains has its default, %g: set %s",
                key,
                "Muon" if second == "muon" else "AdamW",
                defaults[0],
                second_key,
            )
    # 3. One rate is set for both, under a rule whose updates are not about as large as AdamW's at that rate.
    ratio = {"match_rms_adamw": 1.0, "spectral": 5.0}.get(config.adjust_lr_fn, 0.0) * config.update_scale
    shared = [rate for key, rate in given["muon"] & given["adamw"] if key == "lr" and rate]
    if shared and not 0.5 <= ratio <= 2.0:
        warn(
            "deepspeed_muon: lr %g trains the matrices and all other parameters; under adjust_lr_fn %r with "
            "update_scale %g one rate does not serve both. For a rate of AdamW set adjust_lr_fn to 'match_rms_adamw'; "
            "else set muon_lr and adam_lr (defaults %g and %g), in a param group that has an lr there",
            min(shared),
            config.adjust_lr_fn,
            config.update_scale,
            DEFAULT_MUON_LR,
            DEFAULT_ADAM_LR,
        )


def order_for_partitions(
    groups: Sequence[GroupSettings], routes: Mapping[int, Route], ranks: int, settings: NsSettings
) -> None:
    """Order the matrices of Muon's param groups so that ZeRO 1 and 2 give all ranks equal Newton-Schulz work.

    Must be called before the ZeRO wrapper is made, by all ranks; nothing is sent. Groups of experts are not
    reordered, because other ranks partition them.

    Args:
        groups: The param groups. Mutated.
        routes: ``id(parameter)`` to its route.
        ranks: The number of ranks that partition the groups.
        settings: The iteration, which determines the cost of a matrix.
    """
    for group in groups:
        if group["algorithm"] == "muon" and not group.get("moe"):
            matrices = [routes[id(param)] for param in group["params"]]
            kinds = [route.kinds_of_blocks() for route in matrices]
            order = order_of_matrices([route.numel for route in matrices], kinds, ranks, settings)
            group["params"] = [group["params"][position] for position in order]


def build_groups(
    params: ParamsInput,
    config: MuonConfig,
    *,
    model: nn.Module | None = None,
    rates: Mapping[str, Tensor] | None = None,
    shards: Mapping[int, TensorShards] | None = None,
) -> RoutedGroups:
    """Route all parameters and divide every group of the caller into one of Muon and one of AdamW.

    Args:
        params: A module, or an iterable of parameters, of ``(name, parameter)`` pairs, or of param groups of either.
        config: The settings that groups inherit.
        model: The module that the parameters belong to, for names and module types; not needed if ``params`` is a
            module. One stage of a pipeline is not checked as a complete model; the caller does that with
            :func:`deepspeed_muon.routing.rules.check_routes`.
        rates: ``lr``, ``muon_lr`` or ``adam_lr`` if the caller gave it as a tensor: the groups keep the tensor, so
            that later changes of its value count.
        shards: ``id(param)`` to the shards of each matrix that tensor parallelism cuts. Head counts and ``split`` sizes
            in the settings are those of the unsharded layer.

    Raises:
        ConfigError: If a group's own setting is misspelt or out of range.
        RoutingError: If a parameter cannot be trained, or does not divide as the settings say.
    """
    if isinstance(params, nn.Module):
        model, params = params, params.parameters()
    # 1. The caller's groups, with the names and modules that the model gives to their parameters.
    in_model = model_parameters_by_name(model, shards) if model is not None else {}
    callers = _caller_groups(params, in_model)
    members = {id(member.param): member for group in callers for member in group.members}
    # 2. Route all parameters, frozen ones as if they were trained.
    explicit = _explicit_algorithms((group.settings, group.members) for group in callers)
    partial = model is not None and is_divided(model)
    if_trained = _routes_if_trained(members, in_model, config, explicit, partial=partial)
    # 3. Divide the groups by algorithm.
    groups = [g for caller in callers for g in _groups_by_algorithm(caller, if_trained, config, rates or {})]
    if not groups:
        raise RoutingError(
            f"none of the {len(members)} parameters is trainable: requires_grad is False for all of them"
        )
    by_id = {key: current_route(member, if_trained.get(key)) for key, member in members.items()}
    undecided = [member for key, member in members.items() if key not in explicit]
    untyped = model is None and any(len(true_shape(member.param)) > 1 for member in undecided)
    has_names = all(member.names for member in undecided)
    return RoutedGroups(
        groups=groups,
        members=members,
        if_trained=if_trained,
        by_id=by_id,
        # Groups with the same number have the same settings, except for DeepSpeed's marks of experts.
        callers={group.number: CallerGroup(group.number, group.settings) for group in reversed(callers)},
        rates=rates or {},
        routed_by=("name and shape" if has_names else "shape") if untyped else "",
        partial=partial,
    )


def route_again(
    routed: RoutedGroups,
    groups: Sequence[GroupSettings],
    config: MuonConfig,
    model: nn.Module,
    *,
    shards: Mapping[int, TensorShards] | None = None,
) -> RoutedGroups:
    """Route the parameters of an optimizer by the names and modules of a model, and by what is frozen now.

    The groups do not change; :func:`divide_again` divides them.

    Args:
        routed: How the parameters were routed when the optimizer was made.
        groups: The optimizer's groups, whose parameters DeepSpeed may have replaced since.
        config: The optimizer's settings.
        model: The module whose parameters they are.
        shards: As for :func:`build_groups`.

    Raises:
        RoutingError: As for :func:`build_groups`, or if the model has another parameter instead of one.
    """
    in_model = model_parameters_by_name(model, shards)
    params = {id(param): param for group in groups for param in group["params"]}
    _refuse_replaced(routed, params, in_model)
    # 1. The parameters: first those that were routed before, in their order. Frozen parameters that are in no group are
    # listed as long as the model has them.
    order = [key for key in routed.members if key in params or key in in_model]
    order += [key for key in params if key not in routed.members]
    members = {
        key: _with_names_of_both(routed.members.get(key), in_model.get(key), params.get(key)) for key in order
    }
    # 2. Their routes.
    explicit = _explicit_algorithms(
        (routed.callers[group[CALLER_GROUP]].settings, [members[id(param)] for param in group["params"]])
        for group in groups
    )
    if_trained = _routes_if_trained(members, in_model, config, explicit, partial=is_divided(model))
    again = replace(
        routed, by_id={}, members=members, if_trained=if_trained, routed_by="", partial=is_divided(model)
    )
    return again.current()


def divide_again(
    routed: RoutedGroups,
    groups: Sequence[GroupSettings],
    config: MuonConfig,
    *,
    by_dtype: bool,
) -> list[tuple[GroupSettings, list[Tensor]]]:
    """Divide the groups of an optimizer by its routes, so that each has parameters of one algorithm.

    A group that still has parameters stays the same object, because schedulers refer to it. Nothing is changed yet.

    Args:
        routed: The routes.
        groups: The groups.
        config: The optimizer's settings.
        by_dtype: Whether parameters of different dtypes need different groups.

    Returns:
        The groups, each with its new list of parameters.
    """
    divided: list[tuple[float, GroupSettings, list[Tensor]]] = []
    for number, caller in routed.callers.items():
        # 1. Sort the parameters by what needs a group of its own.
        # The groups that were made from this caller's group, by their positions among all groups.
        present = {n: group for n, group in enumerate(groups) if group[CALLER_GROUP] == number}
        # By the same positions: (algorithm, expert-parallel group).
        kinds = {
            n: (group["algorithm"], group["name"] if group.get("moe") else None)
            for n, group in present.items()
        }
        # (algorithm, expert-parallel group, dtype, number of the group of that algorithm and experts) to parameters.
        params_of: dict[tuple[str, str | None, torch.dtype | None, int | None], list[Tensor]] = {}
        for n, group in present.items():
            for param in group["params"]:
                # Parameters that cannot be trained are frozen.
                if id(param) in routed.if_trained and param.requires_grad:
                    kind = routed.if_trained[id(param)].algorithm, expert_group_name(param)
                    fitting = n if kinds[n] == kind else next((m for m in kinds if kinds[m] == kind), None)
                    params_of.setdefault((*kind, param.dtype if by_dtype else None, fitting), []).append(
                        param
                    )
        # 2. Give each kind a group: the one that it has, a copy of a similar one, or a new one. Fractional positions
        # sort a new group behind a similar one, or else before all groups if it is Muon's, behind all if AdamW's. With
        # a single group, AdamW's at position 0, a new one for Muon gets the position -0.5.
        taken: set[int] = set()
        for (algorithm, experts, _, fitting), params in params_of.items():
            if fitting is not None:
                # Where the dtype divides a group further, its first dtype keeps the object.
                group = present[fitting] if fitting not in taken else ParamGroup(present[fitting])
                taken.add(fitting)
                position = float(fitting)
            elif (similar := next((n for n in kinds if kinds[n][0] == algorithm), None)) is not None:
                group, position = ParamGroup(present[similar]), similar + 0.5
            else:
                group = _make_group(caller, algorithm, config, routed.rates)  # type: ignore[arg-type]
                position = min(kinds) - 0.5 if algorithm == "muon" else max(kinds) + 0.5
            if experts is not None and group.get("name") != experts:
                group.update({"name": experts, "moe": True})
            divided.append((position, group, params))
    return [(group, params) for _, group, params in sorted(divided, key=lambda entry: entry[0])]


def expert_group_name(param: Tensor) -> str | None:
    """Return the name of the expert-parallel group of one of DeepSpeed's experts; ``None`` for other parameters."""
    return str(param.group_name) if getattr(param, "allreduce", True) is False else None  # type: ignore[attr-defined]


def _caller_groups(params: Iterable[Any], in_model: Mapping[int, NamedParameter]) -> list[CallerGroup]:
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise RoutingError(
            f"params is a {type(params).__name__}, expected a module or an iterable of parameters, of (name, "
            f"parameter) pairs or of param groups"
        )
    items = list(params)
    if not items:
        raise RoutingError("the optimizer got an empty list of parameters")
    # 1. A list of parameters is one group.
    if not all(isinstance(item, dict) for item in items):
        if any(isinstance(item, dict) for item in items):
            raise RoutingError("params mixes parameters and param groups; pass one or the other")
        items = [{"params": items}]
    # 2. The entries of each group, with their names.
    groups = []
    first_entry: dict[bool, str] = {}  # by whether it has a name
    seen: set[int] = set()
    for number, item in enumerate(items):
        if "params" not in item:
            raise RoutingError(f"param group {number} has no 'params'")
        entries = item["params"]
        # The order of a set differs between runs and ranks.
        if not isinstance(entries, Iterable) or isinstance(entries, (set, frozenset)):
            raise RoutingError(
                f"the params of param group {number} are a {type(entries).__name__}, expected a list of parameters"
            )
        # torch accepts a bare tensor as well
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
            entry_name = f"entry {position} of param group {number}"
            first_entry.setdefault(name is not None, entry_name)
            if not isinstance(param, Tensor):
                raise RoutingError(
                    f"{entry_name} is a {type(param).__name__}, expected a parameter or a (name, parameter) pair"
                )
            names_of_param = () if name is None else (str(name),)
            # The model's names and modules say more than the caller's names.
            member = in_model.get(id(param)) or NamedParameter(names_of_param, param)  # type: ignore[arg-type]
            members.append(member)
            if id(member.param) in seen:
                raise RoutingError(
                    f"parameter {member.name} appears twice in the optimizer's groups; pass it once"
                )
            seen.add(id(member.param))
        groups.append(CallerGroup(settings.pop(DIVIDED_GROUP, number), settings, members))
    if len(first_entry) == 2:
        raise RoutingError(
            f"params has parameters with names and without: {first_entry[True]} has a name, {first_entry[False]} has "
            f"none. Name all of them, as model.named_parameters() does, or none"
        )
    return groups


def _routes_if_trained(
    members: Mapping[int, NamedParameter],
    in_model: Mapping[int, NamedParameter],
    config: MuonConfig,
    explicit: Mapping[int, Algorithm],
    *,
    partial: bool,
) -> dict[int, Route]:
    """Route ``members`` as if none were frozen; those that cannot be trained are missing."""
    unrouted = [name for key, member in in_model.items() if key not in members for name in member.names]
    parameters = list(members.values())
    routes = routes_if_trained(parameters, config, explicit=explicit, partial=partial, unrouted=unrouted)
    return {key: route for key, route in zip(members, routes, strict=True) if route is not None}


def _refuse_replaced(
    routed: RoutedGroups, params: Mapping[int, Tensor], in_model: Mapping[int, NamedParameter]
) -> None:
    """Raise if a parameter of the groups is not in the model, which has another one of that name."""
    names = {name for member in in_model.values() for name in member.names}
    for key in params.keys() & routed.members.keys() - in_model.keys():
        member = routed.members[key]
        if not names.isdisjoint(member.names):
            raise RoutingError(
                f"parameter {member.name} of the optimizer is not the model's, which has another one of that name: it "
                f"was replaced after the optimizer was made. Make the optimizer later: pass a function to "
                f"deepspeed.initialize, optimizer=lambda params: deepspeed_muon.Muon(model, ...)"
            )


def _with_names_of_both(
    of_caller: NamedParameter | None, of_model: NamedParameter | None, param: Tensor | None
) -> NamedParameter:
    """Return a parameter with its names in the engine's model and those that the caller gave.

    Checkpoints and the other ranks use the first name. A caller who made the optimizer from a model inside the engine's
    (which may be a loss around it, ``torch.compile``'s, or a larger model) uses shorter names, in patterns too.
    """
    if of_model is None:
        return of_caller or NamedParameter((), param)  # type: ignore[arg-type]
    if of_caller is None:
        return of_model
    return replace(of_model, names=tuple(dict.fromkeys((*of_model.names, *of_caller.names))))


def _explicit_algorithms(
    callers: Iterable[tuple[GroupSettings, Iterable[NamedParameter]]],
) -> dict[int, Algorithm]:
    """Return ``id(parameter)`` to the algorithm that its group's settings name, for groups that name one."""
    explicit: dict[int, Algorithm] = {}
    for settings, members in callers:
        algorithm: Algorithm | None = settings.get("algorithm")
        if algorithm is None and settings.get("use_muon") is not None:
            algorithm = "muon" if settings["use_muon"] else "adamw"
        if algorithm not in (None, "muon", "adamw"):
            raise ConfigError(f"param group: algorithm must be 'muon' or 'adamw', got {algorithm!r}")
        explicit.update((id(member.param), algorithm) for member in members if algorithm is not None)
    return explicit


def _groups_by_algorithm(
    group: CallerGroup, routes: Mapping[int, Route], config: MuonConfig, rates: Mapping[str, Tensor]
) -> list[GroupSettings]:
    """Return the Muon group and the AdamW group that a caller's group becomes, without empty ones.

    DeepSpeed's experts are in separate groups, with the marks that its wrappers expect.
    """
    _checked_settings(group, config)  # here, to check groups without trainable parameters as well
    groups: list[GroupSettings] = []
    for algorithm in ("muon", "adamw"):
        params_of: dict[str | None, list[Tensor]] = {}  # by expert-parallel group
        for param in (member.param for member in group.members):
            if id(param) in routes and routes[id(param)].algorithm == algorithm:
                params_of.setdefault(expert_group_name(param), []).append(param)
        for name, params in params_of.items():
            marks = {} if name is None else {"name": name, "moe": True}
            settings = _make_group(group, algorithm, config, rates)
            groups.append(ParamGroup({**settings, **marks, "params": params}))
    return groups


def _make_group(
    group: CallerGroup, algorithm: Algorithm, config: MuonConfig, rates: Mapping[str, Tensor]
) -> GroupSettings:
    """Return a group of one algorithm with all settings of a caller's group, and without parameters."""
    replaced = GROUP_KEYS | set(_ALGORITHM_KEYS) | TORCH_OPTIONS.keys()
    extra = {key: value for key, value in group.settings.items() if key not in replaced}
    prefix = "muon" if algorithm == "muon" else "adam"
    # From the general to the specific: the configuration, rates that were given as tensors, the caller's group.
    settings = _checked_settings(group, config).group_defaults(algorithm)
    rate_key = "lr" if getattr(config, f"{prefix}_lr") is None else f"{prefix}_lr"
    settings["lr"] = rates.get(rate_key, settings["lr"])
    for key in ("lr", "weight_decay"):
        # muon_lr, else lr. A tensor is stored as it is, since the caller changes the rate through it.
        value = group.settings.get(f"{prefix}_{key}", group.settings.get(key))
        if value is not None:
            settings[key] = value if isinstance(value, Tensor) else float(value)
    # DeepSpeed's schedulers write one number into all groups. The engine multiplies it by this ratio for each group.
    reference = config.reference_lr
    settings["lr_ratio"] = float(settings["lr"]) / reference if reference else 1.0
    kind = {"algorithm": algorithm, "use_muon": algorithm == "muon", CALLER_GROUP: group.number}
    return ParamGroup({**extra, **settings, "params": [], **kind})


def _checked_settings(group: CallerGroup, config: MuonConfig) -> MuonConfig:
    """Return the configuration with the settings of a caller's group, checked by its rules."""
    where = f"param group {group.number}"
    # Nothing reads these in a group, so another value than the optimizer's would have no effect.
    for key, value in group.settings.items():
        if key in MuonConfig.model_fields and key not in GROUP_KEYS and value != getattr(config, key):
            raise ConfigError(
                f"{where}: {key!r} applies to the whole optimizer, where it is {getattr(config, key)!r}: set it "
                f"in optimizer.params, or as an argument of Muon, and not in a group"
            )
        if key in RENAMED:
            raise ConfigError(unknown_key_message(key, GROUP_KEYS, where))
    refuse_misspelt_keys(group.settings, where, GROUP_KEYS)
    settings = {
        key: value for key, value in group.settings.items() if key in GROUP_KEYS and value is not None
    }
    return MuonConfig.from_params({**config.model_dump(), **settings}, where=where)
