"""The optimizer that ZeRO wraps: param groups, state and ``step()``.

It runs on whatever ZeRO hands to an inner optimizer: flat fp32 partitions with flat gradients that are already
reduced, unscaled and clipped. The readers in ``engine/`` say where the matrices lie in them; without DeepSpeed the
parameters themselves are the partitions of a single process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_muon.config import RATE_KEYS, MuonConfig, takes_settings
from deepspeed_muon.errors import (
    BindingError,
    ConfigError,
    NonFiniteGradientError,
    OrthogonalizationError,
    RoutingError,
)
from deepspeed_muon.logs import warn
from deepspeed_muon.math.flops import orthogonalize_flops
from deepspeed_muon.monitoring.recorder import StepRecorder
from deepspeed_muon.monitoring.summary import HealthLog
from deepspeed_muon.ops import Orthogonalizer, select
from deepspeed_muon.plan.order import balanced_order
from deepspeed_muon.qk_clip.clip import QkClip
from deepspeed_muon.routing.param_groups import ParamGroup, ParamsInput, RoutedGroups, build_groups
from deepspeed_muon.routing.rules import (
    Route,
    model_parameters_by_name,
    route_parameters,
    warn_without_muon,
)
from deepspeed_muon.step.bound import BoundSteps, flat_gradients
from deepspeed_muon.step.layout_reader import read_whole
from deepspeed_muon.step.runner import PendingUpdates, StepResources, StepRunner
from deepspeed_muon.step.state import STATE_TENSORS, StatePolicy
from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.transport.agreement import RankFacts, group_rank_scope
from deepspeed_muon.transport.buffers import ExchangeBuffers
from deepspeed_muon.transport.context import StepStats
from deepspeed_muon.transport.members import Members
from deepspeed_muon.transport.share_groups import ShareGroups

__all__ = ["Muon"]


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for everything else, at every ZeRO stage.

    For each matrix ``W`` with gradient ``g`` (after unscaling and clipping)::

        buf <- momentum * buf + (1 - momentum) * g
        u   <- g + momentum * (buf - g)   if nesterov else buf
        W   <- W * (1 - lr * weight_decay) - lr * scale(rows, cols) * orthogonalize(u)

    ``variant="normuon"`` normalises the rows of ``orthogonalize(u)`` (:mod:`deepspeed_muon.math.normuon`), and
    ``weight_decay_mode`` chooses between kinds of decay (:mod:`deepspeed_muon.math.weight_decay`).

    A parameter whose gradient is zero on every rank counts as one without a gradient and is left alone, state
    included. ``state[...]["step"]`` counts optimizer steps.
    """

    # torch's GradScaler then sets grad_scale and found_inf on this object for the time of a step, instead of
    # deciding on each rank by itself whether to call step(), which would leave the other ranks waiting.
    _step_supports_amp_scaling = True

    @takes_settings
    def __init__(  # noqa: D417  (takes_settings documents the keys)
        self,
        params: ParamsInput,
        lr: float | Tensor | None = None,
        *,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        """Route the parameters and make the param groups.

        A rate that is a tensor of one element stays that tensor in the groups.

        Args:
            params: A module, or an iterable of parameters, of ``(name, parameter)`` pairs, or of param groups of
                either. Names tell embeddings and heads from hidden matrices: pass ``model`` or
                ``model.named_parameters()`` rather than ``model.parameters()``.
            lr, **settings: The keys of ``optimizer.params``.
            model: The module that ``params`` belongs to, for names and module types.

        Raises:
            ConfigError: If a setting is unknown or out of range.
            RoutingError: If the parameters cannot be divided as asked.
        """
        settings["lr"] = lr
        config = MuonConfig.from_params(settings)
        rates = {key: settings[key] for key in RATE_KEYS if isinstance(settings.get(key), Tensor)}
        self._setup(
            config,
            build_groups(params, config, model=model, rates=rates),
            params if isinstance(params, nn.Module) else model,
        )

    @classmethod
    def from_config(cls, params: ParamsInput, config: MuonConfig, *, model: nn.Module | None = None) -> Muon:
        """Make the optimizer from checked settings, as the DeepSpeed configuration does.

        Args:
            params: As for the constructor.
            config: The settings.
            model: The module that the parameters belong to.
        """
        self = cls.__new__(cls)
        self._setup(config, build_groups(params, config, model=model), model)
        return self

    def _setup(self, config: MuonConfig, routed: RoutedGroups, model: nn.Module | None) -> None:
        self._start(config, routed, model)
        defaults = {**config.group_defaults("muon"), "algorithm": None, "use_muon": None, "lr_ratio": 1.0}
        super().__init__(routed.groups, defaults)
        if routed.unnamed:
            warn(
                "deepspeed_muon: parameters without names are routed by shape alone, so an embedding or output head "
                "among them goes to Muon; pass the model or model.named_parameters()"
            )
        if not routed.partial:
            warn_without_muon(routed.routes)

    def _start(self, config: MuonConfig, routed: RoutedGroups, model: nn.Module | None) -> None:
        """Begin unbound, with all counters at zero."""
        self.config = config
        self.stats = StepStats()
        self.recorder = StepRecorder(**config.health.model_dump())
        self.health_log = HealthLog(self.recorder)
        self.skipped_steps = 0
        # Whether the last step was skipped. DeepSpeed's engine reads it where this is what it calls an optimizer.
        self.overflow = False
        self.managed = False
        self.members = Members()
        # What checkpoints need of the engine, which sets it: a checkpoint.host.Host.
        self.host: Any = None
        # Without ZeRO and clipping nobody else computes the norm of the raw gradients; an adapter sets this.
        self.measure_norm: Callable[[], Tensor] | None = None
        self.state_policy = StatePolicy.of(config)
        self._routed = routed
        self._bound: BoundSteps | None = None
        self._orthogonalize: Orthogonalizer | None = None
        self._pending: PendingUpdates | None = None
        # Kept for the attention layers alone: a model that its optimizer refers to lives longer.
        self._model = model if config.qk_clip is not None else None
        self.qk_clip: QkClip | None = None
        self.step_ends_outside = False

    @property
    def routes(self) -> list[Route]:
        """Where every parameter goes and why, in the order of the caller's groups."""
        return list(self._routed.routes)

    @property
    def runners(self) -> list[StepRunner]:
        """The bound step sets with their exchange plans; empty before the optimizer is bound."""
        return [] if self._bound is None else list(self._bound.runners)

    def health(self) -> dict[str, Any]:
        """Return the last sample and the counters; see :func:`deepspeed_muon.health`."""
        return self.health_log.summary()

    def release_memory(self) -> None:
        """Give up the memory of the exchange and of CUDA graphs between two steps; the next step takes it anew."""
        if self._bound is not None:
            self.exchange_buffers.release()
        if self._orthogonalize is not None:
            self._orthogonalize.release()

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return what really ran the Newton-Schulz iteration on this rank, one entry for each shape."""
        return [] if self._orthogonalize is None else self._orthogonalize.report()

    def adam_report(self) -> list[dict[str, Any]]:
        """Return what runs AdamW on this rank, why, and how often it ran: one entry for each step set."""
        return [
            {
                "kernel": runner.adam.name,
                "reason": runner.adam.reason,
                "calls": runner.adam.calls,
                "torch_calls": runner.adam.torch_calls,
            }
            for runner in self.runners
        ]

    @property
    def fp32_optimizer_states(self) -> bool:
        """Whether AdamW's moments are fp32; DeepSpeed asks this of the optimizer that it offloads."""
        return not self.state_policy.half_states

    def keep_half_states(self) -> None:
        """Keep all state in bf16, as DeepSpeed's ``bf16_optimizer_states`` says, save what the settings pin."""
        self.state_policy = StatePolicy.of(self.config, half_states=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; momentum and moments come into the dtypes that this optimizer keeps them in.

        Args:
            state_dict: From :meth:`state_dict`. Not mutated.

        Raises:
            RoutingError: If a param group was saved as Muon's and is AdamW's here, or the other way round.
        """
        for number, (saved, group) in enumerate(
            zip(state_dict["param_groups"], self.param_groups, strict=False)
        ):
            own = group["algorithm"]
            if saved.get("algorithm", own) != own:
                raise RoutingError(
                    f"param group {number} of the state dict is of {saved['algorithm']} and this optimizer's of {own}: "
                    f"it was saved with other routes. Make the optimizer with the same include, exclude and param "
                    f"groups"
                )
        super().load_state_dict(state_dict)
        # torch casts to the parameter's dtype on the way, and would round fp32 moments of masters in half precision.
        saved_order = [index for group in state_dict["param_groups"] for index in group["params"]]
        own_order = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved_order, own_order, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    kept = key in STATE_TENSORS
                    dtype = self.state_policy.dtype(key, param.dtype) if kept else value.dtype
                    if self.state[param][key].dtype != dtype:
                        self.state[param][key] = value.to(device=param.device, dtype=dtype, copy=True)

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
        params = {id(param): param for group in self.param_groups for param in group["params"]}
        return {
            **super().__getstate__(),
            # Frozen parameters are nowhere in the groups, and stay out of the copy.
            "routes": [(params.get(key), route) for key, route in self._routed.by_id.items()],
            "unnamed": self._routed.unnamed,
            "config": self.config,
            "model": self._model,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copied or pickled optimizer, or the groups and tensors of a loaded state dict.

        Groups that were saved before a setting existed get its value of this configuration.
        """
        state = dict(state)
        if "config" in state:
            routes: list[tuple[Tensor | None, Route]] = state.pop("routes")
            # The copy has no frozen parameters: their routes get keys that are no object's id.
            by_id = {
                -number if param is None else id(param): route
                for number, (param, route) in enumerate(routes, start=1)
            }
            routed = RoutedGroups(
                state["param_groups"], [route for _, route in routes], by_id, state.pop("unnamed")
            )
            self._start(state.pop("config"), routed, state.pop("model"))
        # What a group is was decided when the optimizer was made; a state dict may not say it.
        own = [group["algorithm"] for group in self.__dict__.get("param_groups", state["param_groups"])]
        super().__setstate__(state)
        settings = {**self.config.group_defaults("muon"), "lr_ratio": 1.0}
        self.param_groups = [
            ParamGroup({**settings, **group, "algorithm": algorithm, "use_muon": algorithm == "muon"})
            for group, algorithm in zip(self.param_groups, own, strict=True)
        ]

    def check_names(self, model: nn.Module) -> None:
        """Refuse routes that were made without names and that the model's names contradict.

        Args:
            model: The module whose parameters this optimizer has.

        Raises:
            RoutingError: Naming the first parameter that would change sides.
        """
        if not self._routed.unnamed:
            return
        for member in model_parameters_by_name(model).values():
            route = self._routed.by_id.get(id(member.param))
            if route is None:
                continue
            better = route_parameters([member])[0]
            if better.algorithm != route.algorithm and route.rule != "group":
                raise RoutingError(
                    f"parameter {member.name} of shape {list(better.shape)} was given without its name and went to "
                    f"{route.algorithm}; by name it belongs to {better.algorithm} ({better.reason}). Pass "
                    f"model.named_parameters() to deepspeed_muon.Muon instead of model.parameters()"
                )
        self._adopt_names(model)

    def _adopt_names(self, model: nn.Module) -> None:
        """Replace the shape-made names of unnamed parameters, so that ranks and messages refer to real ones."""
        named = model_parameters_by_name(model)
        renamed = {}
        for key, route in self._routed.by_id.items():
            name = named[key].name if key in named else route.name
            renamed[key] = replace(route, name=name)
        self._routed = RoutedGroups(self._routed.groups, list(renamed.values()), renamed, unnamed=False)

    def route_table(self) -> Mapping[int, Route]:
        """Return ``id(parameter)`` to its route, for the adapters."""
        return self._routed.by_id

    def order_parameters(self, group_sizes: Sequence[int | None], *, device: torch.device) -> None:
        """Put the matrices of each Muon param group into the order in which ZeRO 1 or 2 shall flatten them.

        Must be called before ZeRO's wrapper is made, by all ranks alike; nothing is sent.

        Args:
            group_sizes: For every param group the number of ranks that will divide it, or ``None`` to leave its order.
            device: Where the iteration will run, which decides its cost.
        """
        settings = self.config.ns_settings(device)
        flops = functools.partial(
            orthogonalize_flops,
            steps=len(settings.coefficients),
            method=settings.method,
            dtype=settings.dtype,
        )
        for group, ranks in zip(self.param_groups, group_sizes, strict=True):
            if ranks is None or group["algorithm"] != "muon":
                continue
            routes = [self._routed.by_id[id(param)] for param in group["params"]]
            kinds = [route.kinds_of_blocks() for route in routes]
            order = balanced_order(
                [param.numel() for param in group["params"]],
                [sum(count * flops(rows, cols) for count, rows, cols in kind) for kind in kinds],
                kinds,
                ranks,
            )
            group["params"] = [group["params"][position] for position in order]

    def bind(
        self, step_sets: Sequence[StepSet], *, device: torch.device, members: Members | None = None
    ) -> None:
        """Tell the optimizer where ZeRO keeps its parameters and make the exchange plans; nothing is sent.

        Called once, after the ZeRO wrapper exists. Whoever calls it compares :meth:`plan_facts` between the ranks.

        Args:
            step_sets: What each call of ``step()`` will update, from an adapter.
            device: Where the exchange and the iteration run.
            members: The ranks of the engine; without them it is this one alone.

        Raises:
            ConfigError: If a setting does not fit the number of ranks.
            OpsUnavailableError: If ``ns_backend`` is ``ops`` and the native library can be neither loaded nor built.
        """
        if dist.is_available() and dist.is_initialized():
            self.config.check_world(dist.get_world_size())
        self._orthogonalize = select(self.config.ns_backend)
        self.members = members or Members()
        self.exchange_buffers = ExchangeBuffers(device)
        self.recorder.reset(device)
        resources = StepResources(
            device,
            self._orthogonalize,
            self.stats,
            self.recorder,
            self.exchange_buffers,
            ShareGroups(self.members),
            self.state_policy,
        )
        # QK-clip works on the updated weights, at the end of each call.
        may_stay_pending = self.config.exchange_overlap and self.qk_clip is None
        self._bound = BoundSteps(step_sets, self.config, resources, may_stay_pending=may_stay_pending)
        for group in self.param_groups:  # hidden from DeepSpeed's wrappers until they are made
            group.setdefault("use_muon", group["algorithm"] == "muon")
        if self.qk_clip is not None:
            self.qk_clip.bind(step_sets, device=device)

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups that the bound step sets communicate in."""
        return [] if self._bound is None else self._bound.process_groups()

    def open_share_groups(self) -> None:
        """Make the process groups of ranks that share matrices, after :meth:`bind` and once the plans were compared.

        Must be called by all ranks of the engine.
        """
        if self._bound is not None:
            self._bound.open_share_groups()

    def clip_attention_of(self, model: nn.Module) -> None:
        """Find the attention layers that ``qk_clip`` is about, before :meth:`bind`; nothing without that setting.

        Args:
            model: The model that is trained. Those of Hugging Face are made to record their logits.

        Raises:
            ConfigError: If there is no attention layer to clip, or one cannot be clipped.
        """
        if self.config.qk_clip is not None:
            self.qk_clip = QkClip(self.config.qk_clip, model, self._routed.by_id)

    def plan_facts(self) -> RankFacts:
        """Return what this rank derived for the exchange, to be compared with the other ranks."""
        assert self._bound is not None
        plans = self._bound.facts()
        facts, scopes = dict(plans.facts), dict(plans.scopes)
        if self.qk_clip is not None:
            facts["attention layers of qk_clip"] = self.qk_clip.description()
            shared = {group_rank_scope(runner.step_set.group) for runner in self._bound.runners}
            scopes["attention layers of qk_clip"] = "; ".join(sorted(shared))
        # All ranks enter the exchange of a sampled step, also those that share no parameter.
        facts["optimizer.params.health"] = self.config.health.model_dump_json()
        scopes["optimizer.params.health"] = "all ranks"
        return RankFacts(facts, scopes=scopes)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter of the current param groups in place.

        Under DeepSpeed ZeRO calls this, once for each flat partition or sub-group. All ranks of the data-parallel
        group must call it.

        Args:
            closure: Recomputes the loss; only without DeepSpeed.

        Returns:
            What ``closure`` returned.

        Raises:
            BindingError: If ZeRO hands over a tensor that was not there when the optimizer was bound.
            NonFiniteGradientError: On every rank, when a gradient is not finite and ``nonfinite_grad`` is ``error``.
            OrthogonalizationError: When a matrix got no update because it was wrong in fp32 too, and
                ``nonfinite_grad`` is ``error``: at the end of this step in a single process without DeepSpeed; else on
                every rank when the next step begins, before it changes anything.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._bound is None:
            if self.managed:
                # FP16 wrappers call step() in their constructor, with zero gradients and nothing bound yet.
                return loss
            self._bind_plain()
        # Under DeepSpeed a step of the engine is several calls, and the engine's hook records all of them together.
        with nullcontext() if self.managed else self.health_log.step(), self.recorder.span("step"):
            self._step_bound()
        return loss

    def _step_bound(self) -> None:
        assert self._bound is not None
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if self.qk_clip is not None:
            # Before anything that a part of the ranks might skip.
            self.qk_clip.reduce()
        if self.measure_norm is not None:
            self._global_grad_norm = float(self.measure_norm()) / (1.0 if scale is None else float(scale))
        current = [
            (runner, groups, flat_gradients(runner, scale))
            for runner, groups in self._bound.current(self.param_groups)
        ]
        reports = [runner.inspect_gradients(grads) for runner, _, grads in current]
        pending, self._pending = self._pending, None
        self.overflow = False
        failed = [name for report in reports for name in report.failed]
        nonfinite = [name for report in reports for name in report.nonfinite]
        if pending is not None and (failed or nonfinite):
            # The set before was updated; this one may be left out.
            pending.wait_and_apply()
            pending = None
        if failed:
            self._report_failed(failed, "in the step before")
        if nonfinite:
            self._refuse(nonfinite)
            current = []
        for (runner, groups, grads), report in zip(current, reports, strict=not nonfinite):
            pending = runner.run(report, grads, groups, self.state, previous=pending)
            if self.qk_clip is not None:
                with runner.flat_partitions() as flat:
                    self.qk_clip.apply(runner.context.number, flat)
        self._pending = pending
        if self.qk_clip is not None and not self.step_ends_outside:
            self.qk_clip.clear()
        if not self.managed:
            self._report_failed([n for runner, *_ in current for n in runner.take_failed()], "in this step")

    def _report_failed(self, names: Sequence[str], when: str) -> None:
        """Raise, if so configured, for matrices that got no update."""
        if names and self.config.nonfinite_grad == "error":
            raise OrthogonalizationError(
                f"the updates of {', '.join(names[:5])} were wrong {when}, in fp32 too, and "
                f"optimizer.params.nonfinite_grad is 'error'; the log of the owner's rank says more"
            )

    def check_arrived(self) -> None:
        """Check, when a step of the engine is over, that every call of it was made; the same on all ranks.

        Raises:
            BindingError: If updates were left for a call that did not come.
        """
        if self._pending is None:
            return
        self._pending.wait_and_apply()
        self._pending = None
        raise BindingError(
            "DeepSpeed ended a step without a call for every param group or sub-group, so weights of this step were "
            "gathered before their last updates; set optimizer.params.exchange_overlap to false"
        )

    def _bind_plain(self) -> None:
        """Bind to the parameters themselves: a single process without DeepSpeed."""
        known = set(self._routed.by_id)
        pairs = [(p, p) for group in self.param_groups for p in group["params"]]
        if not {id(param) for param, _ in pairs} <= known:
            raise BindingError(
                "the optimizer's parameters were replaced by flat partitions, but it was not told where they lie: call "
                "deepspeed_muon.register() before deepspeed.initialize"
            )
        devices = {param.device for param, _ in pairs}
        if len(devices) > 1:
            raise BindingError(
                f"without DeepSpeed all parameters must be on one device, found {sorted(map(str, devices))}"
            )
        if self.config.qk_clip is not None:
            if self._model is None:
                raise ConfigError("qk_clip needs the model: pass model=... to deepspeed_muon.Muon")
            self.clip_attention_of(self._model)
        self.bind([read_whole(pairs, self._routed.by_id, None)], device=devices.pop())

    def _refuse(self, nonfinite: Sequence[str]) -> None:
        """Leave everything as it is, or raise, as configured. All ranks come here together."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None:
            found_inf.fill_(1.0)
        where = ", ".join(nonfinite[:5]) + (" ..." if len(nonfinite) > 5 else "")
        message = f"non-finite gradient in {len(nonfinite)} parameters ({where})"
        if self.config.nonfinite_grad == "error":
            raise NonFiniteGradientError(
                f"{message}; optimizer.params.nonfinite_grad is 'error'. Nothing was updated from it"
            )
        self.skipped_steps += 1
        self.overflow = True
        group = self.runners[0].step_set.group
        warn("deepspeed_muon: step skipped, %s (%d so far)", message, self.skipped_steps, group=group)
