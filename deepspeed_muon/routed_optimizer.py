"""Param groups that know their algorithm, and state dicts, copies and names of an optimizer that has them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from deepspeed_muon.config.settings import DEFAULT_MUON_LR, MuonConfig
from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.errors import BindingError, RoutingError
from deepspeed_muon.logs import warn
from deepspeed_muon.plan.layout import TensorShards
from deepspeed_muon.routing.param_groups import ParamGroup, RoutedGroups, route_again
from deepspeed_muon.routing.parameters import NamedParameter
from deepspeed_muon.routing.route import Route, order_of_matrices
from deepspeed_muon.routing.rules import warn_of_large_guesses, warn_without_muon
from deepspeed_muon.step.loading import read_state_dict

SMALL_MUON_LR = DEFAULT_MUON_LR / 10
"""A rate below it, given as ``lr`` alone, is taken for one of AdamW's."""


class RoutedOptimizer(torch.optim.Optimizer):
    """An optimizer whose param groups are Muon's or AdamW's; what it does in a step is up to its subclass.

    Attributes:
        config: The settings.
        managed: Whether DeepSpeed runs it.
        state_policy: Dtype of the state.
    """

    _bound: object | None = None
    """What tells it where its parameters are, once it was told."""

    def _begin(self, config: MuonConfig, routed: RoutedGroups, model: nn.Module | None) -> None:
        """Begin unbound; also where a copied or pickled optimizer begins."""
        self.config = config
        self.managed = False
        self.state_policy = StatePolicy(config.momentum_dtype)
        self.routed = routed
        # Kept for the attention layers alone: a model that its optimizer refers to lives longer.
        self._model = model if config.qk_clip is not None else None

    def _setup(self, config: MuonConfig, routed: RoutedGroups, model: nn.Module | None) -> None:
        self._begin(config, routed, model)
        defaults = {**config.group_defaults("muon"), "algorithm": None, "use_muon": None, "lr_ratio": 1.0}
        super().__init__(routed.groups, defaults)
        if not routed.partial:
            warn_without_muon(self.routes)
            warn_of_large_guesses(self.routes)
        if (
            config.muon_lr is None
            and config.adjust_lr_fn == "original"
            and 0 < (config.lr or 0) < SMALL_MUON_LR
        ):
            own = {float(group["lr"]) for group in self.param_groups if group["algorithm"] == "muon"}
            if config.lr in own:
                warn(
                    "deepspeed_muon: the matrices train with lr %g under adjust_lr_fn 'original', where %g is usual, "
                    "so their updates are far smaller than AdamW's would be. For a rate of AdamW set adjust_lr_fn "
                    "to 'match_rms_adamw'; else set muon_lr",
                    config.lr,
                    DEFAULT_MUON_LR,
                )

    @property
    def routes(self) -> list[Route]:
        """Where every parameter goes and why, in the order of the caller's groups."""
        return self.routed.routes

    @property
    def fp32_optimizer_states(self) -> bool:
        """Whether AdamW's moments are fp32; DeepSpeed asks this of the optimizer that it offloads."""
        return not self.state_policy.half_states

    def use_bf16_states(self) -> None:
        """Keep all state in bf16, as DeepSpeed's ``bf16_optimizer_states`` says, save what the settings pin."""
        self.state_policy = StatePolicy(self.config.momentum_dtype, half_states=True)

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, all of it or, with an error, nothing.

        It may be of this optimizer, of ``torch.optim.Muon``, of Keller Jordan's Muon or, for groups of AdamW, of AdamW.
        A parameter without state begins anew, and a setting that is missing keeps its value
        (:mod:`deepspeed_muon.step.loading`). Momentum and moments are converted to the dtypes of this optimizer.

        Args:
            state_dict: From :meth:`state_dict`. Not mutated.

        Raises:
            CheckpointError: If the state is not what these optimizers save, or belongs to other parameters.
            ConfigError: If a setting is unknown or out of range.
            RoutingError: If there are more or fewer groups, or one has another size or another algorithm here.
        """
        state_dict = copy.copy(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        loaded = read_state_dict(
            state_dict, self.param_groups, self.config, self.state_policy, name_of=self._name_of
        )
        self.state = defaultdict(dict, loaded.state)
        self.param_groups = [ParamGroup(settings) for settings in loaded.settings]
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _name_of(self, param: Tensor) -> str | None:
        """Return the name of a parameter, ``None`` in an engine, where it may be a partition of ZeRO."""
        return None if self.managed else self.routed.by_id[id(param)].name

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction; later additions are refused.

        Raises:
            RoutingError: If the optimizer is already made: the new parameters would not be routed or exchanged.
        """
        if self._bound is not None or "algorithm" not in param_group:
            raise RoutingError("param groups cannot be added after the optimizer is made; make a new one")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: groups, state, settings and routes. A copy is unbound and counts from zero.

        Raises:
            BindingError: If DeepSpeed manages the optimizer: its tensors are partitions, which only the engine can
                tell apart.
        """
        if self.managed:
            raise BindingError(
                "an optimizer that DeepSpeed manages cannot be copied or pickled, as its parameters are partitions; "
                "save it with engine.save_checkpoint or deepspeed_muon.checkpoint.consolidate, or take its state_dict()"
            )
        routed = self.routed
        params = {id(param) for group in self.param_groups for param in group["params"]}
        return {
            **super().__getstate__(),
            # Frozen parameters that are in no group stay out of the copy, which has their routes.
            "routes": [
                (routed.members[key] if key in params else None, route, routed.if_trained.get(key))
                for key, route in routed.by_id.items()
            ],
            "routed": replace(routed, groups=[], members={}, if_trained={}, by_id={}),
            "config": self.config,
            "model": self._model,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copied or pickled optimizer."""
        state = dict(state)
        routes: list[tuple[NamedParameter | None, Route, Route | None]] = state.pop("routes")
        # The routes of parameters that the copy does not have get keys that are no object's id.
        keys = [
            -number if member is None else id(member.param) for number, (member, *_) in enumerate(routes, 1)
        ]
        routed = replace(
            state.pop("routed"),
            groups=state["param_groups"],
            members={
                key: member for key, (member, *_) in zip(keys, routes, strict=True) if member is not None
            },
            if_trained={
                key: route for key, (*_, route) in zip(keys, routes, strict=True) if route is not None
            },
            by_id={key: route for key, (_, route, _) in zip(keys, routes, strict=True)},
        )
        self._begin(state.pop("config"), routed, state.pop("model"))
        super().__setstate__(state)

    def reroute(self, model: nn.Module, shards: Mapping[int, TensorShards] | None = None) -> None:
        """Route by what the engine's model tells, in place of what the optimizer was made with; the groups stay.

        Args:
            model: The module whose parameters this optimizer has.
            shards: As for :func:`deepspeed_muon.routing.param_groups.build_groups`.

        Raises:
            RoutingError: If the parameters cannot be divided as asked, or none is trainable.
        """
        self.routed = route_again(self.routed, self.param_groups, self.config, model, shards=shards)

    def release_parameters(self) -> list[tuple[str, Tensor]]:
        """Give up the model's parameters, which ZeRO keeps from now on; return the names and tensors of the frozen."""
        frozen = self.routed.frozen()
        self.routed = replace(self.routed, groups=[], members={}, if_trained={})
        return frozen

    def _warn_of_guesses(self) -> None:
        """Warn of what nobody told about the parameters, where no engine has the model."""
        if self.routed.unnamed:
            warn(
                "deepspeed_muon: parameters without names are routed by shape alone, so an embedding or output head "
                "among them goes to Muon; pass the model or model.named_parameters()"
            )
        elif self.routed.untyped:
            warn(
                "deepspeed_muon: parameters are routed by name and shape alone, since the types of their modules are "
                "not known: an embedding or output head by another name goes to Muon, convolutions and stacked experts "
                "may go to AdamW, and the weights of Conv1D are read as output x input; pass the model, or model=... "
                "beside the parameters"
            )

    def order_parameters(self, ranks: int, *, device: torch.device) -> None:
        """Put the matrices of each Muon param group into the order in which ZeRO 1 or 2 shall flatten them.

        Must be called before ZeRO's wrapper is made, by all ranks alike; nothing is sent. Groups of experts keep their
        order: other ranks divide them.

        Args:
            ranks: How many will divide the groups.
            device: Where the iteration will run, which decides its cost.
        """
        settings = self.config.ns_settings(device)
        for group in self.param_groups:
            if group["algorithm"] == "muon" and not group.get("moe"):
                routes = [self.routed.by_id[id(param)] for param in group["params"]]
                order = order_of_matrices(routes, ranks, settings)
                group["params"] = [group["params"][position] for position in order]
