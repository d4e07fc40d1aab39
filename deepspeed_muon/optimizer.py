"""The optimizer: Muon for hidden matrices, AdamW for everything else.

It steps whatever tensors it is bound to. Without DeepSpeed these are the parameters themselves. Under DeepSpeed they
are this rank's ZeRO partitions: flat fp32 tensors whose gradients are already reduced, unscaled and clipped, and
``engine/`` passes :meth:`Muon._bind` a description of the fragments in them.

:meth:`Muon.step` compares the gradients' status between the ranks and decides whether there is a step. The update of
one step set is :meth:`StepRunner.run` in :mod:`deepspeed_muon.step.runner`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import StateDict
from typing_extensions import Never, Unpack

from deepspeed_muon.config.keywords import MuonKeywords
from deepspeed_muon.config.settings import (
    RATE_KEYS,
    GroupSettings,
    MuonConfig,
    refuse_unusable,
    takes_settings,
)
from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.errors import BindingError, ConfigError, NumericalError, RoutingError
from deepspeed_muon.logs import warn
from deepspeed_muon.monitoring.recorder import StepRecorder
from deepspeed_muon.ops.dispatch import Orthogonalizer
from deepspeed_muon.plan.layout import PartitionIndex, TensorShards
from deepspeed_muon.routing.param_groups import (
    ParamGroup,
    ParamsInput,
    RoutedGroups,
    build_groups,
    warn_of_equal_rates,
    warn_of_rates,
)
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.rules import warn_of_large_guesses, warn_without_muon
from deepspeed_muon.step.bound import BoundSteps
from deepspeed_muon.step.loading import converted, read_state_dict
from deepspeed_muon.step.runner import StepRunner
from deepspeed_muon.step.step_set import StepContext, StepSet, step_set_of_parameters
from deepspeed_muon.transport.agreement import RankFacts
from deepspeed_muon.transport.all_to_all import ExchangeBuffers, SentCounts, overlap_fits
from deepspeed_muon.transport.ranks import Ranks


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Multiply in the dtypes of the tensors, also in a step that is taken inside of ``torch.autocast``."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


class StepHook(Protocol):
    """What an optimizer has as :attr:`Muon.after_step`; its ``str`` must be equal on all ranks."""

    def bind(self, step_sets: Sequence[StepSet], *, device: torch.device) -> None:
        """Take what every call of :meth:`Muon.step` will update; communication is from ``device``."""

    def __call__(self, updated: Sequence[StepSet]) -> None:
        """Change weights of step sets that were updated, none in a skipped step. Called by all ranks of the step."""

    def end_step(self) -> None:
        """Forget the step, also one that was skipped or raised."""


STEP_HOOKS: dict[str, Callable[[Muon, nn.Module | None], StepHook]] = {}
"""Key of the settings to what makes its hook for an optimizer and its model. ``qk_clip/`` adds the only one."""


@takes_settings
class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for everything else, at every ZeRO stage.

    For each matrix ``W`` with gradient ``g`` (after unscaling and clipping)::

        buf <- momentum * buf + (1 - momentum) * g
        u   <- g + momentum * (buf - g)   if nesterov else buf
        W   <- W * (1 - lr * weight_decay) - lr * update_scale * scale(rows, cols) * orthogonalize(u)

    A ``variant`` turns ``orthogonalize(u)`` into another update (:mod:`deepspeed_muon.variants`), and
    ``weight_decay_mode`` chooses between kinds of decay (:mod:`deepspeed_muon.math.updates`).

    For every other parameter ``p``, in step ``t`` of its step set::

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g**2
        p <- p * (1 - lr * weight_decay) - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    A parameter whose gradient is zero on every rank counts as one without a gradient and is left alone, state
    included. ``state[...]["step"]`` counts optimizer steps.

    Args:
        params: A module, or an iterable of parameters, of ``(name, parameter)`` pairs, or of param groups of either.
            Frozen ones train once they are unfrozen, with DeepSpeed only if that is before
            ``deepspeed.initialize``. Each group is divided into one for Muon and one for AdamW, which have its number
            under ``caller_group``.
        model: The module that ``params`` belongs to, if that is no module itself: its names and module types
            distinguish embeddings, heads and convolutions from hidden matrices. ``deepspeed.initialize`` passes it,
            too.
        lr, **settings: The keys of ``optimizer.params``.

    A rate that is given as a tensor of one element is stored in the param groups as that tensor.

    Raises:
        ConfigError: If a setting is unknown or out of range.
        RoutingError: If the parameters cannot be divided as asked.
    """

    # torch's GradScaler then sets grad_scale and found_inf on this object for the time of a step, instead of
    # deciding on each rank by itself whether to call step(), which would leave the other ranks waiting.
    _step_supports_amp_scaling = True

    exchange_buffers: ExchangeBuffers

    def __init__(
        self,
        params: ParamsInput,
        lr: float | Tensor | None = None,
        *positional: Never,
        model: nn.Module | None = None,
        **settings: Unpack[MuonKeywords],
    ) -> None:
        """Route the parameters and make the param groups; the class documents the arguments."""
        if positional:
            raise ConfigError(
                f"Muon takes params and lr by position and got {len(positional)} more: name them, as the order differs "
                f"between Muons: weight_decay, momentum, nesterov, ns_schedule (torch's ns_coefficients), ns_steps, "
                f"adjust_lr_fn; eps is AdamW's here"
            )
        values: dict[str, object] = {**settings, "lr": lr}
        config = MuonConfig.from_params(values)
        rates = {key: rate for key in RATE_KEYS if isinstance(rate := values.get(key), Tensor)}
        routed = build_groups(params, config, model=model, rates=rates)
        self._initialize(config, routed, params if isinstance(params, nn.Module) else model)

    @torch.no_grad()
    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter of the current param groups in place.

        ZeRO calls this once for each step set. Where one call updates everything (stage 0, ``BF16_Optimizer``), experts
        have step sets of their own. All ranks of the engine must call it.

        Args:
            closure: Recomputes the loss; only without DeepSpeed.

        Returns:
            What ``closure`` returned.

        Raises:
            BindingError: If ZeRO passes a tensor that was not there when the optimizer was bound.
            NumericalError: If ``nonfinite_grad`` is ``error``: on every rank, when a gradient is not finite; and when a
                matrix got no update because it was wrong in fp32 too, at the end of this step on the CPU in a single
                process without DeepSpeed, else on every rank when the next step begins, before it changes anything.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Binds in the first step, and again after parameters were converted or unfrozen.
        if not self.managed:
            self._bind_to_parameters()
        elif self._bound is None:
            # DeepSpeed's FP16 wrappers call step() in their constructor, with zero gradients and nothing bound yet.
            return loss
        # Under DeepSpeed the engine records all calls that make up one of its steps together.
        recorded = nullcontext() if self.managed else self.recorder.step()
        with _without_autocast(), recorded:
            try:
                with self.recorder.span("step"):
                    self._step_current_sets()
            finally:
                if self.after_step is not None and not self.step_ends_outside:
                    self.after_step.end_step()
        return loss

    def _step_current_sets(self) -> None:
        """Update the step sets of which ZeRO left the partitions in the param groups: all of them without ZeRO."""
        bound = self._bound_steps
        # 1. What concerns the whole step. The engine calls the checks once for all calls of a step.
        if not self.managed:
            self._check_settings()
        # A GradScaler's. DeepSpeed's wrappers have unscaled the gradients.
        loss_scale: Tensor | None = getattr(self, "grad_scale", None)
        measured = {} if self.measure_norms is None else self.measure_norms()
        norms = [norm.to(self.exchange_buffers.device) for norm in measured.values()]

        # 2. The flat gradients of each step set, and what all ranks know about them. ZeRO's wrappers exchanged it.
        current = [
            (runner, groups, runner.step_set.flat_gradients(loss_scale))
            for runner, groups in bound.current(self.param_groups, frozen=self._frozen)
        ]
        if any(bound.gradient_flags[runner].flags is None for runner, *_ in current):
            grads_of = {index: [grad] for _, _, grads in current for index, grad in grads.items()}
            norms = bound.gradient_flags.exchange(grads_of, norms, [runner for runner, *_ in current])
        if measured:
            # The gradients were measured as they are stored: times the scale.
            divisor = 1.0 if loss_scale is None else float(loss_scale)
            unscaled = {key: norm / divisor for key, norm in zip(measured, norms, strict=True)}
            self._global_grad_norm = float(unscaled.pop("all"))
            self._record_norms(unscaled)
        reports = [bound.gradient_flags[runner].report() for runner, *_ in current]

        # 3. Raise or skip where a gradient is not finite, or an update of the step before was unrecoverable.
        self.overflow = False
        unrecoverable = [name for report in reports for name in report.unrecoverable]
        self._raise_for_unrecoverable(unrecoverable, "in the step before")
        nonfinite = [name for report in reports for name in report.nonfinite]
        if nonfinite:
            self._skip(nonfinite)
            current, reports = [], []  # nothing is updated

        # 4. Muon: momentum, all-to-all to the owners, orthogonalisation, all-to-all back, and
        #    W <- W (1 - lr wd) - lr scale O (step/runner.py). AdamW for the other partitions of the set.
        for (runner, groups, grads), report in zip(current, reports, strict=True):
            runner.run(report.active, grads, groups, self.state)
        if self.after_step is not None:
            self.after_step([runner.step_set for runner, *_ in current])

        # 5. Errors that a single process knows at once, on the CPU; all others are reported in the next step.
        if not self.managed:
            unrecoverable = [name for runner, *_ in current for name in runner.check.take_unrecoverable()]
            self._raise_for_unrecoverable(unrecoverable, "in this step")

    def _skip(self, nonfinite: Sequence[str]) -> None:
        """Skip the step, or raise, because gradients of some parameters are not finite. All ranks get here together."""
        names = ", ".join(nonfinite[:5]) + (" ..." if len(nonfinite) > 5 else "")
        message = f"non-finite gradient in {len(nonfinite)} parameters ({names})"
        scales_loss = getattr(self, "found_inf", None) is not None  # a GradScaler, which lowers its scale
        if self.config.nonfinite_grad == "error" and not scales_loss:
            raise NumericalError(
                f"{message}; optimizer.params.nonfinite_grad is 'error'. Nothing was updated from it"
            )
        self.skipped_steps += 1
        self.overflow = True
        group = self.runners[0].step_set.group
        warn("deepspeed_muon: step skipped, %s (%d so far)", message, self.skipped_steps, group=group)

    def _raise_for_unrecoverable(self, names: Sequence[str], when: str) -> None:
        """Raise ``NumericalError`` for unrecoverable updates (``step/check.py``) if ``nonfinite_grad`` is ``error``."""
        if names and self.config.nonfinite_grad == "error":
            raise NumericalError(
                f"the updates of {', '.join(names[:5])} were wrong {when}, in fp32 too, and "
                f"optimizer.params.nonfinite_grad is 'error'; the log of the owner's rank says more"
            )

    # Construction, and what programs read

    @classmethod
    def from_config(
        cls,
        params: ParamsInput,
        config: MuonConfig,
        *,
        model: nn.Module | None = None,
        shards: Mapping[int, TensorShards] | None = None,
    ) -> Muon:
        """Make the optimizer from checked settings, as the engine does for ``optimizer.params`` of its configuration.

        ``shards`` are those of :func:`deepspeed_muon.routing.param_groups.build_groups`.
        """
        self = cls.__new__(cls)
        self._initialize(config, build_groups(params, config, model=model, shards=shards), model)
        return self

    def _initialize(self, config: MuonConfig, routed: RoutedGroups, model: nn.Module | None) -> None:
        self._reset(config, routed, model)
        defaults = {**config.group_defaults("muon"), "algorithm": None, "use_muon": None, "lr_ratio": 1.0}
        super().__init__(routed.groups, defaults)
        if not routed.partial:
            warn_without_muon(self.routes)
            warn_of_large_guesses(self.routes)
        warn_of_rates(config, self.param_groups, routed.callers.values())

    def _reset(self, config: MuonConfig, routed: RoutedGroups, model: nn.Module | None) -> None:
        """Set the attributes, but groups and state, of an optimizer that is not bound and took no step."""
        self.config = config
        # The algorithm of every parameter, and the groups that the caller gave.
        self.routed = routed
        # Whether DeepSpeed runs the optimizer. Its engine then calls the methods below "For the engine".
        self.managed = False
        self.state_policy = StatePolicy(config.momentum_dtype)
        self.stats = SentCounts()
        self.recorder = StepRecorder(every=config.health, check=config.health > 0)
        # The ranks of the engine; this one alone without DeepSpeed.
        self.ranks = Ranks()
        # Whether the last step was skipped. DeepSpeed reads it where it steps this optimizer without a wrapper.
        self.overflow = False
        self.skipped_steps = 0
        # Returns the norm of the raw gradients, where neither ZeRO nor clipping computes it, followed in a sampled step
        # by the norms of each algorithm.
        self.measure_norms: Callable[[], dict[str, Tensor]] | None = None
        # Norms of the raw gradients in the last step, of all ranks; None where DeepSpeed mixes the algorithms up.
        self.norms_by_algorithm: dict[str, Tensor] | None = {}
        # What changes weights after their update; None without a setting of STEP_HOOKS.
        self.after_step: StepHook | None = None
        # Whether the engine says where a step ends, which is several calls of step().
        self.step_ends_outside = False
        # For hooks only: a model that its optimizer refers to lives longer.
        self._model = model if any(getattr(config, key) is not None for key in STEP_HOOKS) else None
        # Whether a step had a rate that is not 0, and whether one rate for Muon and AdamW was reported.
        self._had_rates = self._reported_equal_rates = False
        # See refuse_unusable.
        self._checked_settings: dict[int, tuple[object, ...]] = {}
        self._orthogonalizer: Orthogonalizer | None = None
        self._bound: BoundSteps | None = None
        # The runner of each step set, with its exchange plan; empty before the optimizer is bound.
        self.runners: list[StepRunner] = []
        # Tensors of the param groups that are in no step set, because their routes say frozen.
        self._frozen: list[Tensor] = []
        # Without DeepSpeed: each parameter with its dtype, device and shape when the optimizer was bound.
        self._bound_as: list[tuple[Tensor, tuple[torch.dtype, torch.device, torch.Size]]] = []

    def __dir__(self) -> list[str]:
        """Offer to completion what programs use; the rest serves the engine and checkpoints."""
        public = ("adam_report", "health", "kernel_report", "routes")
        return [*dir(torch.optim.Optimizer), "defaults", "param_groups", "state", *public]

    @property
    def routes(self) -> list[Route]:
        """The algorithm of every parameter and the reason for it, in the order of the caller's groups."""
        return self.routed.routes

    def health(self) -> dict[str, Any]:
        """Return the last sample and the counters; see :func:`deepspeed_muon.health`."""
        return self.recorder.summary()

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return what runs the Newton-Schulz iteration on this rank and how often it did, one entry for each shape."""
        return [] if self._orthogonalizer is None else self._orthogonalizer.report()

    def adam_report(self) -> list[dict[str, Any]]:
        """Return what runs AdamW on this rank, why, and how often it ran: one entry for each step set."""
        return [runner.adam.report() for runner in self.runners]

    # Binding

    def _bind_to_parameters(self) -> None:
        """Bind to the parameters themselves, without DeepSpeed: at first, after a conversion, and after unfreezing."""
        # 1. Is the binding still valid?
        is_converted = any((p.dtype, p.device, p.shape) != bound_as for p, bound_as in self._bound_as)
        unfrozen = any(param.requires_grad and param.grad is not None for param in self._frozen)
        if self._bound is not None and not is_converted and not unfrozen:
            return
        params = [param for group in self.param_groups for param in group["params"]]
        if not {id(param) for param in params} <= self.routed.by_id.keys():
            raise BindingError(
                "DeepSpeed replaced the optimizer's parameters with flat partitions, but did not pass their layout to "
                "the optimizer: pass the Muon itself to deepspeed.initialize, without another optimizer around it, and "
                "call deepspeed_muon.register() before, if you have called unregister()"
            )
        for key, member in self.routed.members.items():
            route, shape = self.routed.if_trained.get(key), member.param.shape
            # AdamW takes any shape until it has state.
            if route and shape != route.shape and (route.algorithm == "muon" or member.param in self.state):
                raise BindingError(
                    f"parameter {member.name} was {list(route.shape)} when the optimizer was made, and is {[*shape]} "
                    f"now: make a new one when weights change their shapes. FSDP cuts them: use DDP or DeepSpeed"
                )
            if member.awaits_shards and self.config.matrices:
                raise RoutingError(
                    f"parameter {member.name}, {tuple(member.param.shape)}, is marked as a shard of tensor "
                    f"parallelism, and optimizer.params.matrices divides whole matrices: only an engine of "
                    f"deepspeed.initialize says how it is cut"
                )
        # 2. What is frozen may have changed; what only an engine can do is refused.
        self.routed = self.routed.current()
        if self._bound is None:
            self.routed.warn_of_missing_names()
        if self.config.restore_from or self.config.consolidate_on_save:
            raise ConfigError("restore_from and consolidate_on_save: only with DeepSpeed; use state_dict()")
        # 3. Every parameter is a partition of its own. Its number is that in a state dict, which counts frozen
        # parameters, too.
        numbered = {PartitionIndex(n): param for n, param in enumerate(params) if self._is_trained(param)}
        step_set, device = step_set_of_parameters(params, numbered, self.routed.by_id)
        self._attach_step_hook(self._model)
        self._bind([step_set], device=device)
        self._bound_as = [(param, (param.dtype, param.device, param.shape)) for param in params]
        # model.half() and model.to(device) convert the parameters in place and leave the state behind.
        if is_converted:
            for param, entry in self.state.items():
                entry.update(converted(entry, param, self.state_policy))

    def _bind(
        self, step_sets: Sequence[StepSet], *, device: torch.device, ranks: Ranks | None = None
    ) -> None:
        """Bind the optimizer to the tensors that ``step()`` will update; nothing is sent.

        Makes the exchange plans and chooses kernels. Called once the ZeRO wrapper exists (without DeepSpeed in the
        first step), and again when a parameter was unfrozen or converted. Exchange and iteration run on ``device``;
        ``ranks`` are those of the engine, which compares their :meth:`_plan_facts`.

        Raises:
            InstallationError: If ``ns_backend`` is ``ops`` and the native library can be neither loaded nor built.
        """
        # 1. What the step sets share, and their plans.
        self._orthogonalizer = Orthogonalizer(self.config.ns_backend)
        self.ranks = ranks or Ranks()
        self.exchange_buffers = ExchangeBuffers(device)
        self.recorder.reset(device)
        overlap = self.config.exchange_overlap and all(
            overlap_fits(step_set.matrices, self.config.resolved_wire_dtype(step_set.model_dtype))
            for step_set in step_sets
        )
        contexts = [
            StepContext(
                number,
                step_set,
                self.config,
                device,
                self._orthogonalizer,
                self.stats,
                self.recorder,
                self.exchange_buffers,
                self.state_policy,
                overlap,
            )
            for number, step_set in enumerate(step_sets)
        ]
        self._bound = BoundSteps(contexts)
        self.runners = self._bound.runners
        self._frozen = [p for group in self.param_groups for p in group["params"] if not self._is_trained(p)]
        # 2. Kernels, and their CUDA graphs, whose memory is taken now and not in a step.
        with _without_autocast():
            for runner in self.runners:
                for x in runner.inputs():
                    self._orthogonalizer.prepare(x, settings=runner.context.ns_settings, device=device)
        for group in self.param_groups:  # hidden from DeepSpeed's wrappers until they are made
            group.setdefault("use_muon", group["algorithm"] == "muon")
        if self.after_step is not None:
            self.after_step.bind(step_sets, device=device)

    # State dicts, copies and param groups

    @_disable_dynamo
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict, all of it or, with an error, nothing; it is not mutated.

        It may be of this optimizer, of ``torch.optim.Muon``, of Keller Jordan's Muon or, for groups of AdamW, of AdamW
        (:mod:`deepspeed_muon.step.loading`). Momentum and moments are converted to the dtypes of this optimizer.

        Raises:
            CheckpointError: If the state is not what these optimizers save, or belongs to other parameters.
            ConfigError: If a setting is unknown or out of range.
            RoutingError: If there are more or fewer groups, or one has another size or another algorithm here.
        """
        state_dict = copy.copy(state_dict)  # hooks may change its entries
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        # Under DeepSpeed the params of the groups are partitions, which have padding and no name.
        names = None if self.managed else {key: route.name for key, route in self.routed.by_id.items()}
        settings, state = read_state_dict(
            state_dict, self.param_groups, self.config, self.state_policy, names=names
        )
        # Not by torch's load_state_dict, which casts floating-point state to the dtype of the parameter.
        self.state = defaultdict(dict, state)
        self.param_groups = [ParamGroup(of_group) for of_group in settings]
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def add_param_group(self, param_group: GroupSettings) -> None:
        """Add a group during construction; later a RoutingError, as it would not be routed or exchanged."""
        if self._bound is not None or "algorithm" not in param_group:
            raise RoutingError("param groups cannot be added after the optimizer is made; make a new one")
        super().add_param_group(param_group)

    def __getstate__(self) -> StateDict:
        """Return what a copy needs: groups, state, settings and routes. A copy is unbound and counts from zero.

        Raises BindingError if DeepSpeed manages the optimizer: only the engine finds the parameters in its partitions.
        """
        if self.managed:
            raise BindingError(
                "an optimizer that DeepSpeed manages cannot be copied or pickled, as its parameters are partitions; "
                "save it with engine.save_checkpoint or deepspeed_muon.checkpoint.consolidate, or take its state_dict()"
            )
        # A copy of a bound optimizer would share its buffers; it binds itself in its first step.
        return {**super().__getstate__(), "routed": self.routed, "config": self.config, "model": self._model}

    def __setstate__(self, state: StateDict) -> None:
        """Take the state of a copied or pickled optimizer."""
        state = dict(state)
        routed: RoutedGroups = state.pop("routed")
        self._reset(state.pop("config"), routed.copied(state["param_groups"]), state.pop("model"))
        super().__setstate__(state)

    # For the engine

    @property
    def _bound_steps(self) -> BoundSteps:
        """The bound step sets; a BindingError before :meth:`_bind`."""
        if self._bound is None:
            raise BindingError("the optimizer is not bound to an engine yet")
        return self._bound

    def _check_settings(self) -> None:
        """Raise a ConfigError for a setting in the param groups that cannot be used, saved or loaded.

        Warn once if Muon and AdamW train a group of the caller with one rate and were given two.
        """
        try:
            refuse_unusable(self.param_groups, self.config, self._checked_settings)
        except ConfigError as error:
            if not self.managed:
                raise
            self._bound_steps.gradient_flags.refusal = error  # the ranks raise together
            return
        if not self._reported_equal_rates and any(float(group["lr"]) for group in self.param_groups):
            self._reported_equal_rates = warn_of_equal_rates(
                self.param_groups, reference=self.config.reference_lr, is_first=not self._had_rates
            )
            self._had_rates = True

    def _record_norms(self, norms: Mapping[str, Tensor]) -> None:
        """Record the norms of the step's raw gradients by algorithm, unless DeepSpeed mixes the algorithms up."""
        if self.norms_by_algorithm is not None:
            self.norms_by_algorithm = dict(norms)

    @property
    def fp32_optimizer_states(self) -> bool:
        """Whether AdamW's moments are fp32; DeepSpeed asks this of the optimizer that it offloads."""
        return not self.state_policy.half_states

    def _is_trained(self, param: Tensor) -> bool:
        """Return whether a tensor of the param groups is updated; ``False`` if its route says frozen."""
        route = self.routed.by_id.get(id(param))
        return route is None or route.algorithm != "frozen"

    def _release_parameters(self) -> list[tuple[str, Tensor]]:
        """Drop the model's parameters, which the engine has from now on; return name and tensor of the frozen ones."""
        frozen = self.routed.frozen()
        self.routed = replace(self.routed, groups=[], members={}, if_trained={})
        return frozen

    def _release_memory(self) -> None:
        """Free the communication buffers and CUDA graphs between two steps.

        The next step allocates the buffers again; :meth:`_capture_graphs` captures the graphs.
        """
        if self._bound is not None:
            self.exchange_buffers.release()
        if self._orthogonalizer is not None:
            self._orthogonalizer.release()

    def _capture_graphs(self) -> None:
        """Capture the CUDA graphs again that :meth:`_release_memory` freed."""
        if self._orthogonalizer is not None and self._bound is not None:
            with _without_autocast():
                self._orthogonalizer.capture(self.exchange_buffers.device)

    def _attach_step_hook(self, model: nn.Module | None) -> None:
        """Make what a setting of :data:`STEP_HOOKS` asks for, before :meth:`_bind`, unless it is made.

        Raises ConfigError if the setting does not work with the model that is trained.
        """
        for key, make in STEP_HOOKS.items():
            if self.after_step is None and getattr(self.config, key) is not None:
                self.after_step = make(self, model)

    def _plan_facts(self) -> RankFacts:
        """Return what this rank derived for the exchange, to be compared with the other ranks."""
        facts = self._bound_steps.facts()
        if self.after_step is not None:
            for scope in filter(None, [*facts]):
                facts.record(f"what runs after a step on ranks {scope.name}", str(self.after_step), scope)
        # All ranks enter the exchange of a sampled step, also those that share no parameter.
        facts.record("optimizer.params.health", self.config.health)
        return facts
