"""The optimizer that ZeRO wraps: settings, binding and ``step()``.

It runs on whatever ZeRO hands to an inner optimizer: flat fp32 partitions with flat gradients that are already
reduced, unscaled and clipped. The readers in ``engine/`` say where the matrices lie in them; without DeepSpeed the
parameters themselves are the partitions of a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from typing_extensions import Never, Unpack

from deepspeed_muon.config.keywords import MuonKeywords
from deepspeed_muon.config.settings import RATE_KEYS, MuonConfig, takes_settings
from deepspeed_muon.errors import (
    BindingError,
    ConfigError,
    NumericalError,
)
from deepspeed_muon.logs import warn
from deepspeed_muon.monitoring.recorder import StepRecorder
from deepspeed_muon.ops.dispatch import Orthogonalizer
from deepspeed_muon.plan.layout import TensorShards
from deepspeed_muon.plan.placement import replicated_placement
from deepspeed_muon.qk_clip.clip import QkClip
from deepspeed_muon.routed_optimizer import RoutedOptimizer
from deepspeed_muon.routing.param_groups import CALLER_GROUP, ParamsInput, RoutedGroups, build_groups
from deepspeed_muon.step.bound import BoundSteps, flat_gradients, overlaps
from deepspeed_muon.step.runner import StepResources, StepRunner
from deepspeed_muon.step.state import follow_parameters
from deepspeed_muon.step.step_set import StepSet, read_step_set
from deepspeed_muon.transport.agreement import RankFacts, raise_on_all_ranks
from deepspeed_muon.transport.all_to_all import ExchangeBuffers, StepStats
from deepspeed_muon.transport.ranks import Ranks
from deepspeed_muon.variants import VARIANTS


class Muon(RoutedOptimizer):
    """Muon for hidden matrices, AdamW for everything else, at every ZeRO stage.

    For each matrix ``W`` with gradient ``g`` (after unscaling and clipping)::

        buf <- momentum * buf + (1 - momentum) * g
        u   <- g + momentum * (buf - g)   if nesterov else buf
        W   <- W * (1 - lr * weight_decay) - lr * scale(rows, cols) * orthogonalize(u)

    A ``variant`` turns ``orthogonalize(u)`` into another update (:mod:`deepspeed_muon.variants`), and
    ``weight_decay_mode`` chooses between kinds of decay (:mod:`deepspeed_muon.math.updates`).

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
        *positional: Never,
        model: nn.Module | None = None,
        **settings: Unpack[MuonKeywords],
    ) -> None:
        """Route the parameters and make the param groups.

        A rate that is a tensor of one element stays that tensor in the groups.

        Args:
            params: A module, or an iterable of parameters, of ``(name, parameter)`` pairs, or of param groups of
                either. Frozen ones train once they are unfrozen. Each group is divided into one for Muon and one for
                AdamW, which have its number under ``caller_group``.
            lr, **settings: The keys of ``optimizer.params``.
            model: The module that ``params`` belongs to, if that is no module itself: its names and module types
                tell embeddings, heads and convolutions from hidden matrices. ``deepspeed.initialize`` tells them, too.

        Raises:
            ConfigError: If a setting is unknown or out of range.
            RoutingError: If the parameters cannot be divided as asked.
        """
        if positional:
            raise ConfigError(
                f"Muon takes params and lr by position and got {len(positional)} more: name them, as the order differs "
                f"between Muons: weight_decay, momentum, nesterov, ns_schedule (torch's ns_coefficients), ns_steps, "
                f"adjust_lr_fn; eps is AdamW's here"
            )
        # Dion's Muon has its mesh of devices where the others have the rate.
        second = "lr" if lr is None or isinstance(lr, (Number, str, Tensor)) else "distributed_mesh"
        given: dict[str, Any] = {**settings, second: lr}
        config = MuonConfig.from_params(given)
        rates = {key: given[key] for key in RATE_KEYS if isinstance(given.get(key), Tensor)}
        self._setup(
            config,
            build_groups(params, config, model=model, rates=rates),
            params if isinstance(params, nn.Module) else model,
        )

    @classmethod
    def from_config(
        cls,
        params: ParamsInput,
        config: MuonConfig,
        *,
        model: nn.Module | None = None,
        shards: Mapping[int, TensorShards] | None = None,
    ) -> Muon:
        """Make the optimizer from checked settings, as the DeepSpeed configuration does.

        Args:
            params: As for the constructor.
            config: The settings.
            model: The module that the parameters belong to.
            shards: As for :func:`deepspeed_muon.routing.param_groups.build_groups`.
        """
        self = cls.__new__(cls)
        self._setup(config, build_groups(params, config, model=model, shards=shards), model)
        return self

    def _begin(self, config: MuonConfig, routed: RoutedGroups, model: nn.Module | None) -> None:
        """Begin unbound, with all counters at zero."""
        super()._begin(config, routed, model)
        self.stats = StepStats()
        self.recorder = StepRecorder(every=self.config.health, check=self.config.health > 0)
        self.skipped_steps = 0
        # ``id`` of each param group to its rate in the last step. A schedule changes the groups behind it.
        self.rates_of_step: dict[int, float] = {}
        # Whether the last step was skipped. DeepSpeed's engine reads it where this is what it calls an optimizer.
        self.overflow = False
        self.ranks = Ranks()
        # What checkpoints need of the engine, which sets it: a checkpoint.live.Host.
        self.host: Any = None
        # Without ZeRO and clipping nobody else computes the norm of the raw gradients; an adapter sets this.
        self.measure_norm: Callable[[], Tensor] | None = None
        self._bound: BoundSteps | None = None
        # Parameters of the groups that are frozen by the routes, and so in no step set.
        self._frozen: list[Tensor] = []
        # Each parameter with its dtype and device when the optimizer was bound without DeepSpeed.
        self._bound_as: list[tuple[Tensor, torch.dtype, torch.device]] = []
        self.frozen_on_some_rank = False
        # Caller's groups of which the rates are known to differ, or were warned of.
        self._rates_compared: set[int] = set()
        self._orthogonalize: Orthogonalizer | None = None
        self.qk_clip: QkClip | None = None
        self.step_ends_outside = False

    def is_trained(self, param: Tensor) -> bool:
        """Return whether a tensor of the param groups is updated; ``False`` for what is frozen by the routes."""
        route = self.routed.by_id.get(id(param))
        return route is None or route.algorithm != "frozen"

    @property
    def has_frozen(self) -> bool:
        """Whether the groups hold parameters that are frozen by the routes, and can be trained later."""
        return bool(self._frozen)

    def unfrozen(self) -> list[str]:
        """Return the names of the parameters that were unfrozen since the optimizer was bound."""
        return [self.routed.by_id[id(param)].name for param in self._frozen if param.requires_grad]

    @property
    def runners(self) -> list[StepRunner]:
        """The bound step sets with their exchange plans; empty before the optimizer is bound."""
        return [] if self._bound is None else list(self._bound.runners)

    def health(self) -> dict[str, Any]:
        """Return the last sample and the counters; see :func:`deepspeed_muon.health`."""
        return self.recorder.summary()

    def release_memory(self) -> None:
        """Give up the memory of the exchange and of CUDA graphs between two steps; the next step takes it anew."""
        if self._bound is not None:
            self.exchange_buffers.release()
        if self._orthogonalize is not None:
            self._orthogonalize.release()

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return what runs the Newton-Schulz iteration on this rank and how often it did, one entry for each shape."""
        return [] if self._orthogonalize is None else self._orthogonalize.report()

    def adam_report(self) -> list[dict[str, Any]]:
        """Return what runs AdamW on this rank, why, and how often it ran: one entry for each step set."""
        return [runner.adam.report() for runner in self.runners]

    def bind(
        self,
        step_sets: Sequence[StepSet],
        *,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        """Tell the optimizer where ZeRO keeps its parameters, make the plans and choose kernels; nothing is sent.

        Called after the ZeRO wrapper exists, and again when a parameter was unfrozen or converted. Whoever calls it
        compares :meth:`plan_facts` between the ranks.

        Args:
            step_sets: What each call of ``step()`` will update, from an adapter.
            device: Where the exchange and the iteration run.
            ranks: The ranks of the engine; without them it is this one alone.

        Raises:
            InstallationError: If ``ns_backend`` is ``ops`` and the native library can be neither loaded nor built.
        """
        # Replicas of other processes (DDP) must round like these. Nobody knows who steps, so nothing can be agreed.
        replicas = ranks is None and dist.is_initialized() and dist.get_world_size() > 1
        self._orthogonalize = Orthogonalizer(self.config.ns_backend, measure=not replicas)
        self.ranks = ranks or Ranks()
        self.exchange_buffers = ExchangeBuffers(device)
        self.recorder.reset(device)
        resources = StepResources(
            device,
            self._orthogonalize,
            self.stats,
            self.recorder,
            self.exchange_buffers,
            self.state_policy,
            overlap=overlaps(step_sets, self.config),
        )
        before, self._bound = self._bound, BoundSteps(step_sets, self.config, resources)
        if before is not None:
            self._bound.take_over(before)
        self._frozen = [p for group in self.param_groups for p in group["params"] if not self.is_trained(p)]
        # Kernels are timed now: in the first step the other ranks would wait for the one that measures.
        for runner in self._bound.runners:
            for x in runner.inputs():
                self._orthogonalize.prepare(x, settings=runner.context.ns_settings, device=device)
        for group in self.param_groups:  # hidden from DeepSpeed's wrappers until they are made
            group.setdefault("use_muon", group["algorithm"] == "muon")
        if self.qk_clip is not None:
            self.qk_clip.bind(step_sets, device=device)

    @property
    def bound_steps(self) -> BoundSteps:
        """The bound step sets.

        Raises:
            BindingError: Before :meth:`bind`.
        """
        if self._bound is None:
            raise BindingError("the optimizer is not bound to an engine yet")
        return self._bound

    def attach_qk_clip(self, model: nn.Module) -> None:
        """Find the attention layers that ``qk_clip`` is about, before :meth:`bind`; nothing without that setting.

        Args:
            model: The model that is trained. Those of Hugging Face are made to record their logits.

        Raises:
            ConfigError: If there is no attention layer to clip, or one cannot be clipped.
        """
        if self.config.qk_clip is not None:
            self.qk_clip = QkClip(self.config.qk_clip, model, self.routed.by_id)

    def plan_facts(self) -> RankFacts:
        """Return what this rank derived for the exchange, to be compared with the other ranks."""
        facts = self.bound_steps.facts()
        if self.qk_clip is not None:
            for scope in filter(None, [*facts]):
                fact = f"attention layers of qk_clip on ranks {scope.name}"
                facts.record(fact, self.qk_clip.description(), scope)
        # All ranks enter the exchange of a sampled step, also those that share no parameter.
        facts.record("optimizer.params.health", self.config.health)
        return facts

    @torch.no_grad()
    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter of the current param groups in place.

        Under DeepSpeed ZeRO calls this, once for each flat partition or sub-group. All ranks of the data-parallel
        group must call it.

        Args:
            closure: Recomputes the loss; only without DeepSpeed.

        Returns:
            What ``closure`` returned.

        Raises:
            BindingError: If ZeRO hands over a tensor that was not there when the optimizer was bound; if the last step
                met a block of zeros under a variant that keeps its norm.
            NumericalError: If ``nonfinite_grad`` is ``error``: on every rank, when a gradient is not finite; and when a
                matrix got no update because it was wrong in fp32 too, at the end of this step in a single process
                without DeepSpeed, else on every rank when the next step begins, before it changes anything.
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
        elif not self.managed and self._is_converted():
            self._bind_plain()
            follow_parameters(self.state, self.state_policy)
        elif not self.managed and any(p.requires_grad and p.grad is not None for p in self._frozen):
            self._bind_plain()
        # Under DeepSpeed a step of the engine is several calls, and the engine's hook records all of them together.
        with nullcontext() if self.managed else self.recorder.step(), self.recorder.span("step"):
            self._step_bound()
        return loss

    def _is_converted(self) -> bool:
        """Return whether ``model.double()`` or ``model.to()`` changed a parameter since the optimizer was bound."""
        return any(param.dtype != dtype or param.device != device for param, dtype, device in self._bound_as)

    def warn_of_equal_rates(self) -> None:
        """Warn once if the parts of a caller's group train with one rate, although they were given different ones."""
        parts_of: dict[int, list[dict[str, Any]]] = {}
        for group in self.param_groups:
            parts_of.setdefault(group.get(CALLER_GROUP, 0), []).append(group)
        for number, parts in parts_of.items():
            if number in self._rates_compared:
                continue
            rates = [part["lr"] for part in parts]
            if any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates):
                continue  # the host would wait for the device
            # All of them are 0 at the start of a warm-up.
            if float(rates[0]) == 0.0:
                continue
            if len({float(rate) for rate in rates}) > 1:
                # A schedule that keeps them apart may end at one floor for all (eta_min, min_lr).
                self._rates_compared.add(number)
                continue
            configured = {part["algorithm"]: part["lr_ratio"] * self.config.reference_lr for part in parts}
            if len(set(configured.values())) > 1:
                self._rates_compared.update(parts_of)
                warn(
                    "deepspeed_muon: Muon and AdamW train param group %d with one rate, %g, although muon_lr is %g and "
                    "adam_lr %g: a schedule or the program writes one number into both halves of the group. Give the "
                    "schedule a list, as in max_lr=[g['lr'] for g in optimizer.param_groups]; multiply what the "
                    "program writes by g['lr_ratio']; or write the schedule into the DeepSpeed configuration, where "
                    "it keeps the ratio",
                    number,
                    float(rates[0]),
                    configured["muon"],
                    configured["adamw"],
                )
                return

    def refuse_zero_weights(self) -> None:
        """Raise if the last step met a block of zeros, under a variant that keeps the norms of blocks.

        Must be called by all ranks of the engine.

        Raises:
            BindingError: On all ranks, naming the matrices and the remedy.
        """
        if VARIANTS[self.config.variant].apply is None:
            return
        names = [name for runner in self.runners for name in runner.check.take_zero_weights()]
        with raise_on_all_ranks(BindingError, ranks=self.ranks):
            if names:
                raise BindingError(
                    f"optimizer.params.variant: {self.config.variant!r} keeps the norm of every block, and that of "
                    f"{', '.join(names[:5])} is 0 in some block, where no step can move it: initialise it with other "
                    f"weights, or send it to AdamW with optimizer.params.exclude"
                )

    def _step_bound(self) -> None:
        assert self._bound is not None
        if not self.managed:
            self.refuse_zero_weights()
            self.warn_of_equal_rates()
        # ZeRO hands over one group after the other.
        self.rates_of_step |= {id(group): float(group["lr"]) for group in self.param_groups}
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if self.qk_clip is not None:
            # Before anything that a part of the ranks might skip.
            self.qk_clip.reduce()
        if self.measure_norm is not None:
            self._global_grad_norm = float(self.measure_norm()) / (1.0 if scale is None else float(scale))
        current = [
            (runner, groups, flat_gradients(runner, scale))
            for runner, groups in self._bound.current(self.param_groups, left_out=self._frozen)
        ]
        reports = [self._bound.gradient_status[runner].report(grads) for runner, _, grads in current]
        self.overflow = False
        failed = [name for report in reports for name in report.failed]
        nonfinite = [name for report in reports for name in report.nonfinite]
        if failed:
            self.report_failed(failed, "in the step before")
        if nonfinite:
            self._refuse(nonfinite)
            current = []
        for (runner, groups, grads), report in zip(current, reports, strict=not nonfinite):
            runner.run(report.active, grads, groups, self.state)
            if self.qk_clip is not None:
                with runner.step_set.flat_partitions() as flat:
                    self.qk_clip.apply(runner.context.number, flat)
        if self.qk_clip is not None and not self.step_ends_outside:
            self.qk_clip.clear()
        if not self.managed:
            self.report_failed(
                [n for runner, *_ in current for n in runner.check.take_failed()], "in this step"
            )
            if not any(runner.check.is_deferred for runner in self.runners):
                self.refuse_zero_weights()

    def report_failed(self, names: Sequence[str], when: str) -> None:
        """Raise, if so configured, for matrices that got no update."""
        if names and self.config.nonfinite_grad == "error":
            raise NumericalError(
                f"the updates of {', '.join(names[:5])} were wrong {when}, in fp32 too, and "
                f"optimizer.params.nonfinite_grad is 'error'; the log of the owner's rank says more"
            )

    def _bind_plain(self) -> None:
        """Bind to the parameters themselves: a single process without DeepSpeed."""
        params = [param for group in self.param_groups for param in group["params"]]
        if not {id(param) for param in params} <= self.routed.by_id.keys():
            raise BindingError(
                "DeepSpeed replaced the optimizer's parameters with flat partitions, but did not pass their layout to "
                "the optimizer: pass the Muon itself to deepspeed.initialize, without another optimizer around it, and "
                "call deepspeed_muon.register() before, if you have called unregister()"
            )
        self.routed = self.routed.current()
        if self._bound is None:
            self._warn_of_guesses()
        wanted = [key for key in ("restore_from", "consolidate_on_save") if getattr(self.config, key)]
        if wanted:
            raise ConfigError(f"{', '.join(wanted)}: only with DeepSpeed; load and save state_dict() instead")
        # Tensors on "meta" and those of FakeTensorMode.
        if any(param.untyped_storage().device.type == "meta" for param in params):
            raise BindingError(
                "the parameters have no data (device meta, or FakeTensorMode), so there is nothing to orthogonalise: "
                "call step() with real tensors"
            )
        devices = {param.device for param in params}
        if len(devices) > 1:
            raise BindingError(
                f"without DeepSpeed all parameters must be on one device, found {sorted(map(str, devices))}"
            )
        if self.config.qk_clip is not None and self.qk_clip is None:
            if self._model is None:
                raise ConfigError("qk_clip needs the model: pass model=... to deepspeed_muon.Muon")
            self.attach_qk_clip(self._model)
        # The numbers are those of a state dict, in which frozen parameters have one, too.
        partitions = [
            (
                index,
                param,
                [param],
                [(param, replicated_placement(0, param.numel(), 1))] if param.numel() else [],
            )
            for index, param in enumerate(params)
            if self.is_trained(param)
        ]
        self.bind([read_step_set(partitions, self.routed.by_id)], device=devices.pop())
        self._bound_as = [
            (param, param.dtype, param.device) for group in self.param_groups for param in group["params"]
        ]

    def _refuse(self, nonfinite: Sequence[str]) -> None:
        """Leave everything as it is, or raise, as configured. All ranks come here together."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None:
            found_inf.fill_(1.0)  # a GradScaler's, which skips steps until its scale fits
        where = ", ".join(nonfinite[:5]) + (" ..." if len(nonfinite) > 5 else "")
        message = f"non-finite gradient in {len(nonfinite)} parameters ({where})"
        if self.config.nonfinite_grad == "error" and found_inf is None:
            raise NumericalError(
                f"{message}; optimizer.params.nonfinite_grad is 'error'. Nothing was updated from it"
            )
        self.skipped_steps += 1
        self.overflow = True
        group = self.runners[0].step_set.group
        warn("deepspeed_muon: step skipped, %s (%d so far)", message, self.skipped_steps, group=group)
