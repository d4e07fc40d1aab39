"""The optimizer that ZeRO wraps: param groups, state and ``step()``.

It runs on whatever ZeRO hands to an inner optimizer: flat fp32 partitions with flat gradients that are already
reduced, unscaled and clipped. Where the matrices lie in them comes from the adapters in ``zero/``; without DeepSpeed
the parameters themselves are the partitions of a single process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepspeed_muon.config import MuonConfig, WireDtypeName
from deepspeed_muon.errors import BindingError, NonFiniteGradientError, RoutingError
from deepspeed_muon.math.coefficients import NsScheduleName
from deepspeed_muon.math.newton_schulz import NsDtypeName, NsMethod
from deepspeed_muon.math.scaling import AdjustLrName
from deepspeed_muon.ops import NsBackend, Orthogonalizer, select
from deepspeed_muon.param_groups import ParamsInput, RoutedGroups, build_groups
from deepspeed_muon.routing import Route, model_parameters_by_name, route_parameters
from deepspeed_muon.step import GradientReport, StepRunner, group_rank_scope
from deepspeed_muon.transport.agreement import Claim
from deepspeed_muon.transport.pipeline import StepStats
from deepspeed_muon.zero.binding import StepSet, read_whole

__all__ = ["Muon"]

logger = logging.getLogger("deepspeed_muon")


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for everything else, at every ZeRO stage.

    For each matrix ``W`` with gradient ``g`` (after unscaling and clipping)::

        buf <- momentum * buf + (1 - momentum) * g
        u   <- g + momentum * (buf - g)   if nesterov else buf
        W   <- W * (1 - lr * weight_decay) - lr * scale(rows, cols) * orthogonalize(u)

    A parameter whose gradient is zero on every rank counts as one without a gradient and is left alone, state
    included. ``state[...]["step"]`` counts optimizer steps.
    """

    # torch's GradScaler then sets grad_scale and found_inf on this object for the time of a step, instead of
    # deciding on each rank by itself whether to call step(), which would leave the other ranks waiting.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsInput,
        lr: float | None = None,
        *,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        muon_weight_decay: float | None = None,
        adam_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        ns_method: NsMethod = "gram",
        ns_steps: int | None = None,
        ns_schedule: NsScheduleName | Sequence[tuple[float, float, float]] = "quintic",
        ns_dtype: NsDtypeName = "auto",
        ns_eps: float = 1e-12,
        ns_backend: NsBackend = "auto",
        adjust_lr_fn: AdjustLrName = "original",
        wire_dtype: WireDtypeName = "auto",
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        min_muon_params: int = 0,
        nonfinite_grad: Literal["skip", "error"] = "skip",
        per_head_muon: bool = False,
        torch_adam: bool = False,
        adam_w_mode: bool = True,
        exchange_chunk_numel: int = 1 << 26,
        model: nn.Module | None = None,
    ) -> None:
        """Route the parameters and make the param groups.

        Args:
            params: A module, or an iterable of parameters, of ``(name, parameter)`` pairs, or of param groups of
                either. Names tell embeddings and heads from hidden matrices: pass ``model`` or
                ``model.named_parameters()`` rather than ``model.parameters()``.
            lr: Rate of both halves, where ``muon_lr`` and ``adam_lr`` say nothing else.
            muon_lr: Rate of the matrices (0.02).
            adam_lr: Rate of all other parameters (3e-4).
            momentum: Decay of the gradient's moving average, in [0, 1).
            nesterov: Blend the gradient in once more.
            weight_decay: Decoupled weight decay of both halves.
            muon_weight_decay: Weight decay of the matrices.
            adam_weight_decay: Weight decay of all other parameters.
            betas: Decay of AdamW's moments.
            eps: AdamW's epsilon.
            ns_method: ``gram`` (rectangular matrices iterate on their Gram matrix) or ``standard``.
            ns_steps: Newton-Schulz steps; 5, or the length of the table.
            ns_schedule: Name of a polynomial schedule, or own ``(a, b, c)`` triples.
            ns_dtype: Dtype of the iteration.
            ns_eps: Lower bound of the norm that a matrix is divided by.
            ns_backend: ``auto`` measures native and torch code and takes the faster; ``ops`` and ``torch`` pin it.
            adjust_lr_fn: Scale of the orthogonalised update.
            wire_dtype: Dtype in which fragments travel between ranks.
            include: Name patterns that go to Muon although a rule would not send them.
            exclude: Name patterns that go to AdamW.
            min_muon_params: Fewer Muon matrices than this are an error.
            nonfinite_grad: Skip a step with an infinity or NaN in a gradient, or raise.
            per_head_muon: Orthogonalise attention heads separately (DeepSpeed tags the head counts).
            torch_adam: Accepted for DeepSpeed's configurations; torch's fused kernels run in any case.
            adam_w_mode: Decoupled weight decay (AdamW) rather than an L2 term (Adam).
            exchange_chunk_numel: Bound, in elements, of what is exchanged at once.
            model: The module that ``params`` belongs to, for names and module types.

        Raises:
            ConfigError: If a setting is out of range.
            RoutingError: If the parameters cannot be divided as asked.
        """
        given = {name: value for name, value in locals().items() if name in MuonConfig.model_fields}
        config = MuonConfig.from_params(given)
        self._setup(config, build_groups(params, config, model=model))

    @classmethod
    def from_config(cls, params: ParamsInput, config: MuonConfig, *, model: nn.Module | None = None) -> Muon:
        """Make the optimizer from checked settings, as the DeepSpeed configuration does.

        Args:
            params: As for the constructor.
            config: The settings.
            model: The module that the parameters belong to.
        """
        self = cls.__new__(cls)
        self._setup(config, build_groups(params, config, model=model))
        return self

    def _setup(self, config: MuonConfig, routed: RoutedGroups) -> None:
        self.config = config
        self.stats = StepStats()
        self.skipped_steps = 0
        self.managed = False
        self.records_global_norm = False
        self._routed = routed
        self._runners: list[StepRunner] = []
        self._runner_of: dict[int, StepRunner] = {}
        self._orthogonalize: Orthogonalizer | None = None
        defaults = {**config.adam_defaults(), **config.muon_defaults(), "algorithm": None, "lr_ratio": 1.0}
        super().__init__(routed.groups, defaults)
        if routed.unnamed:
            logger.warning(
                "deepspeed_muon: parameters without names are routed by shape alone, so an embedding or output head "
                "among them goes to Muon; pass the model or model.named_parameters()"
            )

    @property
    def routes(self) -> list[Route]:
        """Where every parameter goes and why, in the order of the caller's groups."""
        return list(self._routed.routes)

    @property
    def runners(self) -> list[StepRunner]:
        """The bound step sets with their exchange plans; empty before the optimizer is bound."""
        return list(self._runners)

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return what really ran the Newton-Schulz iteration on this rank, one entry for each shape."""
        return [] if self._orthogonalize is None else self._orthogonalize.report()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction; later additions are refused.

        Raises:
            RoutingError: If the optimizer is already made: the new parameters would not be routed or exchanged.
        """
        if self._runners or "algorithm" not in param_group:
            raise RoutingError("param groups cannot be added after the optimizer is made; make a new one")
        super().add_param_group(param_group)

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
            better = route_parameters([member], require_muon=False)[0]
            if better.algorithm != route.algorithm and route.reason != "the caller's param group says so":
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

    def bind(self, step_sets: Sequence[StepSet], *, device: torch.device) -> None:
        """Tell the optimizer where ZeRO keeps its parameters and make the exchange plans; nothing is sent.

        Called once, after the ZeRO wrapper exists. Whoever calls it compares :meth:`plan_claim` between the ranks.

        Args:
            step_sets: What each call of ``step()`` will update, from an adapter.
            device: Where the exchange and the iteration run.

        Raises:
            OpsUnavailableError: If ``ns_backend`` is ``ops`` and the native library can be neither loaded nor built.
        """
        self._orthogonalize = select(self.config.ns_backend)
        loads: dict[str, list[float]] = {}
        runners = []
        for step_set in step_sets:
            load = loads.setdefault(group_rank_scope(step_set.group), [0.0] * step_set.world_size)
            runners.append(
                StepRunner(
                    step_set,
                    self.config,
                    device=device,
                    orthogonalize=self._orthogonalize,
                    stats=self.stats,
                    load=load,
                )
            )
        self._runners = runners
        self._runner_of = {
            id(partition.tensor): runner for runner in runners for partition in runner.step_set.partitions
        }

    def plan_claim(self) -> Claim:
        """Return what this rank derived for the exchange, to be compared with the other ranks."""
        facts = {}
        for number, runner in enumerate(self._runners):
            facts[f"plan of step set {number}"] = runner.plan.digest()
            facts[f"matrices of step set {number}"] = ", ".join(m.name for m in runner.step_set.matrices)
        groups = {group_rank_scope(runner.step_set.group) for runner in self._runners}
        return Claim(facts, scope="; ".join(sorted(groups)))

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
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._runners:
            if self.managed:
                # FP16 wrappers call step() in their constructor, with zero gradients and nothing bound yet.
                return loss
            self._bind_plain()
        for runner, groups in self._current():
            grads = self._gradients(runner)
            report = runner.inspect_gradients(grads)
            if report.nonfinite:
                self._refuse(report)
                continue
            runner.run(report, grads, groups, self.state)
        return loss

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
        self.bind([read_whole(pairs, self._routed.by_id, None)], device=devices.pop())

    def _current(self) -> list[tuple[StepRunner, dict[int, dict[str, Any]]]]:
        """Return the step sets that the current param groups hold, each with its group of every partition."""
        group_of: dict[int, dict[str, Any]] = {
            id(p): group for group in self.param_groups for p in group["params"]
        }
        unknown = [key for key in group_of if key not in self._runner_of]
        if unknown:
            shapes = [
                tuple(p.shape) for group in self.param_groups for p in group["params"] if id(p) in unknown
            ]
            raise BindingError(
                f"ZeRO handed over tensors of shapes {shapes} that were not in its groups when the optimizer was "
                f"bound; were the optimizer's tensors replaced after deepspeed.initialize?"
            )
        current = []
        for runner in self._runners:
            partitions = runner.step_set.partitions
            present = [partition for partition in partitions if id(partition.tensor) in group_of]
            if not present:
                continue
            if len(present) < len(partitions):
                raise BindingError(
                    f"ZeRO handed over {len(present)} of {len(partitions)} partitions that belong to one step"
                )
            current.append((runner, {p.index: group_of[id(p.tensor)] for p in partitions}))
        return current

    def _gradients(self, runner: StepRunner) -> dict[int, Tensor]:
        """Return the gradients of a step set, divided by the scale of a torch GradScaler if one is at work."""
        grads = {}
        for partition in runner.step_set.partitions:
            grad = partition.tensor.grad
            if grad is not None:
                if grad.is_sparse:
                    raise BindingError(
                        "sparse gradients are not supported; use sparse=False in the embedding"
                    )
                grads[partition.index] = grad
        if self.records_global_norm:
            total = torch.nn.utils.get_total_norm(grads.values()) if grads else torch.zeros(())
            self._global_grad_norm = float(total)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            inverse = 1.0 / scale.double()
            grads = {index: grad * inverse.to(grad.device, grad.dtype) for index, grad in grads.items()}
        return grads

    def _refuse(self, report: GradientReport) -> None:
        """Leave everything as it is, or raise, as configured. All ranks come here together."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None:
            found_inf.fill_(1.0)
        where = ", ".join(report.nonfinite[:5]) + (" ..." if len(report.nonfinite) > 5 else "")
        message = f"non-finite gradient in {len(report.nonfinite)} parameters ({where})"
        if self.config.nonfinite_grad == "error":
            raise NonFiniteGradientError(
                f"{message}; optimizer.params.nonfinite_grad is 'error'. Nothing was updated from it"
            )
        self.skipped_steps += 1
        logger.warning("deepspeed_muon: step skipped, %s (%d so far)", message, self.skipped_steps)
