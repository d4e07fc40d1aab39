"""One step of one set of partitions: agree on gradients, momentum, exchange, apply; AdamW for the rest."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.errors import BindingError, UnsupportedConfigError
from deepspeed_muon.logs import logger
from deepspeed_muon.math.adamw import AdamStep
from deepspeed_muon.math.scaling import update_scale
from deepspeed_muon.math.weight_decay import cautious_apply_, decay_factor
from deepspeed_muon.monitoring.check import PipelineWatch
from deepspeed_muon.monitoring.recorder import StepRecorder
from deepspeed_muon.monitoring.results import Finish
from deepspeed_muon.ops import FlatPasses, flat_passes, in_fp32, matrix_norms, widened
from deepspeed_muon.plan.exchange import ExchangePlan, build_exchange_plan
from deepspeed_muon.plan.layout import Fragment, MatrixLayout
from deepspeed_muon.plan.rows import ROW_STATE_KEY, row_layouts
from deepspeed_muon.step.adam import AdamKernel, choose_adam
from deepspeed_muon.step.assignment import assign
from deepspeed_muon.step.momentum import Directions, MomentumSource
from deepspeed_muon.step.state import StatePolicy
from deepspeed_muon.step.step_set import BoundPartition, StepSet
from deepspeed_muon.transport.agreement import gather_flags, gradient_flags, group_rank_scope
from deepspeed_muon.transport.buffers import ExchangeBuffers
from deepspeed_muon.transport.pipeline import (
    Arrival,
    MuonPipeline,
    Orthogonalize,
    StepCalls,
    StepStats,
)
from deepspeed_muon.transport.row_moments import RowMoments
from deepspeed_muon.transport.shared import SharedMatrices, ShareGroups
from deepspeed_muon.transport.tensor_parallel import TensorParallelExchange

__all__ = ["GradientReport", "StepRunner"]

State = MutableMapping[Tensor, dict[str, Any]]
Run = tuple[int, int]  # offset and length inside a partition


@dataclass(frozen=True, slots=True)
class GradientReport:
    """What all ranks of a group know about this step's gradients.

    Attributes:
        active: Whether any rank has a non-zero gradient, one flag per matrix and then per other parameter.
        nonfinite: Names of the parameters whose gradient holds an infinity or NaN on some rank.
        failed: Names of the matrices that got no update in the step before, because it was wrong in fp32 too.
    """

    active: tuple[bool, ...]
    nonfinite: tuple[str, ...]
    failed: tuple[str, ...]


class StepRunner:
    """Executes the step of one :class:`StepSet`."""

    def __init__(
        self,
        step_set: StepSet,
        config: MuonConfig,
        *,
        device: torch.device,
        orthogonalize: Orthogonalize,
        stats: StepStats,
        load: list[float],
        recorder: StepRecorder,
        buffers: ExchangeBuffers,
        share_groups: ShareGroups,
        policy: StatePolicy | None = None,
        leaves_late: bool = False,
        meets_others: bool = False,
        number: int = 0,
    ) -> None:
        """Make the exchange plan; nothing is sent.

        Args:
            step_set: Partitions and layouts.
            config: The optimizer's settings.
            device: Where the exchange and the iteration run; the partitions may be elsewhere (offload).
            orthogonalize: Runs the Newton-Schulz iteration.
            stats: Counters to increase.
            load: Newton-Schulz cost that each rank carries from other sets; updated.
            buffers: Memory of the exchange, shared with other sets.
            share_groups: Process groups of ranks that share matrices, shared with other sets.
            policy: Dtype of the state; ``None`` for what the settings say.
            recorder: Health of the optimizer's steps.
            leaves_late: Whether the last updates may arrive during the call that updates the next set.
            meets_others: Whether those of the set before may.
            number: Of the set, for errors.
        """
        self.step_set = step_set
        self._refresh = step_set.refresh if leaves_late else None
        self.policy = policy or StatePolicy.of(config)
        self.device = device
        self._wire_dtype = config.resolved_wire_dtype(step_set.model_dtype)
        self._decoupled = config.adam_w_mode
        iteration = config.ns_settings(device)
        self.assignment = assign(
            step_set, config, device=device, load=load, can_open_groups=share_groups.can_open
        )
        self.plan: ExchangePlan = build_exchange_plan(
            self.assignment.matrices,
            self.assignment.owners,
            rank=step_set.rank,
            world_size=step_set.world_size,
            chunk_numel=config.exchange_chunk_numel,
        )
        self._watch = PipelineWatch(
            recorder,
            self.plan.matrices,
            device=device,
            ns=iteration,
            norms=matrix_norms(config.ns_backend, device),
        )
        self.shared = SharedMatrices(
            self.plan.matrices,
            rank=step_set.rank,
            group=step_set.group,
            groups=share_groups,
            ns_settings=iteration,
            wire_dtype=self._wire_dtype,
            watch=self._watch,
        )
        self._pipeline = MuonPipeline(
            self.plan,
            group=step_set.group,
            device=device,
            wire_dtype=self._wire_dtype,
            ns_settings=iteration,
            orthogonalize=orthogonalize,
            stats=stats,
            buffers=buffers,
            overlap=config.exchange_overlap,
            tensor_parallel=self._tensor_parallel(config, orthogonalize, stats),
            shared=self.shared,
            watch=self._watch,
            leaves_late=leaves_late,
            meets_others=meets_others,
            number=number,
        )
        self._row_moments = (
            RowMoments(self.plan, group=step_set.group, device=device, stats=stats)
            if config.variant == "normuon"
            else None
        )
        self._passes = {
            partition.index: self._passes_for(partition, config)
            for partition in step_set.partitions
            if partition.muon
        }
        self.adam: AdamKernel = choose_adam(step_set, config, self.policy)
        self._local: list[list[tuple[int, Fragment]]] = [[] for _ in step_set.partitions]
        position = {partition.index: number for number, partition in enumerate(step_set.partitions)}
        self._layouts = step_set.layouts
        for number, layout in enumerate(self._layouts):
            for fragment in layout.fragments:
                if fragment.rank == step_set.rank:
                    self._local[position[layout.partition]].append((number, fragment))

    def _tensor_parallel(
        self, config: MuonConfig, orthogonalize: Orthogonalize, stats: StepStats
    ) -> TensorParallelExchange | None:
        """Return the exchange with the tensor-parallel ranks, if there are any."""
        if self.step_set.tensor_group is None:
            return None
        for key, wanted, why in (
            ("variant", config.variant != "muon", "its state belongs to whole rows, which are cut"),
            (
                "consolidate_on_save",
                config.consolidate_on_save,
                "only DeepSpeed's own checkpoints know shards",
            ),
        ):
            if wanted:
                raise UnsupportedConfigError(
                    f"optimizer.params.{key} is not supported with tensor parallelism: {why}; unset it"
                )
        return TensorParallelExchange(
            self.plan.matrices,
            group=self.step_set.tensor_group,
            mode=config.tensor_parallel_mode,
            device=self.device,
            wire_dtype=self._wire_dtype,
            ns_settings=config.ns_settings(self.device),
            orthogonalize=orthogonalize,
            chunk_numel=config.exchange_chunk_numel,
            stats=stats,
            watch=self._watch,
        )

    def _passes_for(self, partition: BoundPartition, config: MuonConfig) -> FlatPasses:
        """Return the elementwise passes for the dtypes of a partition and of its momentum."""
        master = partition.tensor.dtype
        momentum = self.policy.dtype("momentum_buffer", master)
        if torch.float64 in (master, momentum):
            return flat_passes("torch", partition.tensor.device)  # without DeepSpeed
        passes = flat_passes(config.ns_backend, partition.tensor.device)
        return passes if master == momentum == torch.float32 else widened(passes)

    @property
    def wire_bytes_per_step(self) -> int:
        """Bytes that this rank sends in one step when every matrix has a gradient, to data-parallel ranks alone."""
        rows = 0 if self._row_moments is None else self._row_moments.plan.sent_elements
        return self.plan.sent_elements * self._wire_dtype.itemsize + rows * torch.float32.itemsize

    def flagged_parameters(self) -> str:
        """Return names and elements of all parameters in the order of the flags, which ranks exchange by position."""
        return ", ".join(f"{layout.name} ({layout.numel})" for layout in self._layouts)

    def skips_with(self, ranks: str) -> bool:
        """Return whether this set skips its steps together with ``ranks``, as :func:`group_rank_scope` writes them."""
        wider = self.step_set.wider_group
        return wider is not None and group_rank_scope(wider) == ranks

    def inspect_gradients(self, grads: Mapping[int, Tensor]) -> GradientReport:
        """Find out, together with the group, which parameters have a gradient and whether all are finite.

        Must be called by all ranks of the group.

        Args:
            grads: Partition index to its gradient, flat and contiguous; a missing one counts as zero.
        """
        names = [layout.name for layout in self._layouts]
        failed_last = set(self.take_failed())
        flags = [[0, 0, int(name in failed_last)] for name in names]
        numbers: list[int] = []
        views: list[Tensor] = []
        for partition, local in zip(self.step_set.partitions, self._local, strict=True):
            grad = grads.get(partition.index)
            if grad is not None:
                numbers.extend(number for number, _ in local)
                views.extend(grad.narrow(0, f.partition_offset, f.numel) for _, f in local)
        if views:
            for number, (nonzero, nonfinite) in zip(numbers, gradient_flags(views).tolist(), strict=True):
                flags[number][0] |= nonzero
                flags[number][1] |= nonfinite
        rows = flags
        # Over both groups: a shard without a gradient must take part where other shards of its matrix have one.
        groups = [self.step_set.group] if self.step_set.world_size > 1 else []
        if self.step_set.tensor_group is not None:
            groups.append(self.step_set.tensor_group)
        if groups:
            sent = torch.tensor(flags, dtype=torch.uint8, device=self.device)
            for group in groups:
                sent = gather_flags(sent, group=group)
            rows = sent.tolist()
        nonfinite = tuple(name for name, row in zip(names, rows, strict=True) if row[1])
        failed = tuple(name for name, row in zip(names, rows, strict=True) if row[2])
        if self.step_set.wider_group is not None:
            bad = torch.tensor([bool(nonfinite), bool(failed)], dtype=torch.uint8, device=self.device)
            others = gather_flags(bad, group=self.step_set.wider_group).tolist()
            nonfinite = nonfinite or ("a parameter of other ranks",) * others[0]
            failed = failed or ("a matrix of other ranks",) * others[1]
        return GradientReport(tuple(bool(row[0]) for row in rows), nonfinite, failed)

    def take_failed(self) -> list[str]:
        """Return, once, the names of the matrices of which this rank left updates out."""
        failed = {self.assignment.origin[index] for index in self._watch.failed_last}
        self._watch.failed_last.clear()
        return [self.step_set.matrices[number].name for number in sorted(failed)]

    def run(
        self,
        report: GradientReport,
        grads: Mapping[int, Tensor],
        groups: Mapping[int, dict[str, Any]],
        state: State,
        *,
        before: Arrival | None = None,
    ) -> Arrival | None:
        """Update all partitions of the set in place.

        Must be called by all ranks of the group with the same report.

        Args:
            report: The outcome of :meth:`inspect_gradients`.
            grads: Partition index to its gradient, flat and contiguous.
            groups: Partition index to the param group with its rates.
            state: The optimizer's state; created where missing. Mutated.
            before: Updates of the set before that are still on their way; they are landed.

        Returns:
            Updates of this set that are still on their way, if it was made with ``leaves_late``; they refresh the
            weights of the forward pass themselves.
        """

        def others() -> None:
            self._run_adam(report.active, grads, groups, state, flat)
            if before is not None:
                before.land()

        first_slot = 0 if before is None else before.next_slot
        with self.flat_partitions() as flat:
            return self._run_muon(
                report.active, grads, groups, state, flat, meanwhile=others, first_slot=first_slot
            )

    @property
    def row_layouts(self) -> tuple[MatrixLayout, ...]:
        """Where NorMuon's row moments lie, one layout for each matrix of the set; empty without NorMuon."""
        return () if self._row_moments is None else row_layouts(self.step_set.matrices)

    @contextlib.contextmanager
    def flat_partitions(self) -> Iterator[dict[int, Tensor]]:
        """Give this rank's tensor of each partition as a flat one in row-major order, by index, to be written to.

        ZeRO's partitions are views. A whole parameter that is not contiguous (``channels_last``, a transpose) is
        copied, and what was written to the copy goes into the parameter's own memory at the end.
        """
        flat = {p.index: p.tensor.detach().contiguous().view(-1) for p in self.step_set.partitions}
        yield flat
        for partition in self.step_set.partitions:
            if not partition.tensor.is_contiguous():
                partition.tensor.detach().copy_(flat[partition.index].view(partition.tensor.shape))

    def _own_state(self, partition: BoundPartition, state: State) -> dict[str, Any]:
        """Return the state of a partition, made if it is not there."""
        own = state[partition.tensor]
        for key in ("momentum_buffer",) if partition.muon else ("exp_avg", "exp_avg_sq"):
            if key not in own:
                own[key] = self.policy.make(key, partition.tensor)
                own.setdefault("step", 0)
            elif not own[key].is_contiguous():  # loaded from an optimizer that keeps the parameter's strides
                own[key] = own[key].contiguous()
        return own

    def _run_muon(
        self,
        active: Sequence[bool],
        grads: Mapping[int, Tensor],
        groups: Mapping[int, dict[str, Any]],
        state: State,
        flat: Mapping[int, Tensor],
        meanwhile: Callable[[], None],
        first_slot: int,
    ) -> Arrival | None:
        sources: dict[int, MomentumSource] = {}
        for partition in self.step_set.partitions:
            if not partition.muon:
                continue
            own = self._own_state(partition, state)
            own["step"] += 1
            group, grad = groups[partition.index], grads.get(partition.index)
            sources[partition.index] = MomentumSource(
                own["momentum_buffer"].view(-1),
                grad,
                float(group["momentum"]),
                bool(group["nesterov"]),
                self._passes[partition.index].momentum_pack,
            )
        matrices = self.plan.matrices
        directions = Directions(matrices, sources, rank=self.step_set.rank, wire_dtype=self._wire_dtype)

        def scale_of(index: int, number: int) -> float:
            matrix = matrices[index]
            block = matrix.blocks()[number]
            rule = groups[matrix.partition]["adjust_lr_fn"]
            shape = matrix.scale_shape if matrix.is_cut else matrix.layer_shape(block.rows, block.cols)
            return update_scale(rule, *shape)

        def apply(index: int, fragment: Fragment, update: Tensor) -> None:
            matrix = matrices[index]
            group = groups[matrix.partition]
            rate = float(group["lr"])
            scale = update_scale(group["adjust_lr_fn"], *matrix.scale_shape)
            mode, decay = group["weight_decay_mode"], float(group["weight_decay"])
            target = flat[matrix.partition].narrow(0, fragment.partition_offset, fragment.numel)
            update = update.to(target.device)
            if mode == "cautious":
                cautious = functools.partial(cautious_apply_, lr_scale=rate * scale, decay=rate * decay)
                if target.dtype.itemsize < 4:
                    in_fp32(cautious, [target], [update])
                else:
                    cautious(target, update)
            else:
                factor = decay_factor(mode, lr=rate, weight_decay=decay)
                self._passes[matrix.partition].unpack_apply(target, update, rate * scale, factor)

        def relative_scales(index: int) -> list[float]:
            matrix = matrices[index]
            rule = groups[matrix.partition]["adjust_lr_fn"]
            scales = [update_scale(rule, *matrix.layer_shape(b.rows, b.cols)) for b in matrix.blocks()]
            return [scale / scales[0] for scale in scales]

        self._watch.scale_of = scale_of
        with self._normalized_rows(active, groups, state) as finish:
            return self._pipeline.run(
                active=[active[origin] for origin in self.assignment.origin],
                calls=StepCalls(directions, apply, relative_scales, finish),
                meanwhile=meanwhile,
                first_slot=first_slot,
                refresh=self._refresh,
            )

    @contextlib.contextmanager
    def _normalized_rows(
        self, active: Sequence[bool], groups: Mapping[int, dict[str, Any]], state: State
    ) -> Iterator[Finish | None]:
        """Bring NorMuon's row moments to the owners, and back when the matrices are done."""
        rows = self._row_moments
        if rows is None or not any(active[: len(self.step_set.matrices)]):
            yield None
            return
        kept = {p.index: self._kept_moments(p, state[p.tensor]) for p in self.step_set.partitions if p.muon}

        rows.gather(kept, beta2=[float(groups[matrix.partition]["beta2"]) for matrix in self.plan.matrices])
        yield rows
        rows.scatter(kept)

    def _kept_moments(self, partition: BoundPartition, own: dict[str, Any]) -> Tensor:
        """Return the partition's row moments from the state, made where they are missing."""
        assert self._row_moments is not None
        numel = self._row_moments.numel(partition.index)
        if ROW_STATE_KEY not in own:
            if own["step"] > 1 and numel:
                logger.warning(
                    "deepspeed_muon: the state of partition %d has no %s after %d steps (saved with variant 'muon'?); "
                    "NorMuon starts it from zero",
                    partition.index,
                    ROW_STATE_KEY,
                    own["step"] - 1,
                )
            own[ROW_STATE_KEY] = torch.zeros(numel, dtype=torch.float32, device=partition.tensor.device)
        kept: Tensor = own[ROW_STATE_KEY]
        if kept.numel() != numel:
            raise BindingError(
                f"the optimizer state holds {kept.numel()} row moments of partition {partition.index} on rank "
                f"{self.step_set.rank}, expected {numel}: it was saved with another layout. Restore it from a "
                f"consolidated checkpoint"
            )
        return kept

    def _run_adam(
        self,
        active: Sequence[bool],
        grads: Mapping[int, Tensor],
        groups: Mapping[int, dict[str, Any]],
        state: State,
        flat: Mapping[int, Tensor],
    ) -> None:
        batches: dict[AdamStep, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
        for partition, local in zip(self.step_set.partitions, self._local, strict=True):
            if partition.muon:
                continue
            own = self._own_state(partition, state)
            own["step"] += 1
            group = groups[partition.index]
            settings = AdamStep(
                lr=float(group["lr"]),
                betas=(float(group["betas"][0]), float(group["betas"][1])),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                step=int(own["step"]),
                decoupled=self._decoupled,
                decay_mode=group["weight_decay_mode"],
            )
            param = flat[partition.index]
            grad = grads.get(partition.index)
            grad = torch.zeros_like(param) if grad is None else grad
            tensors = (param, grad, own["exp_avg"].view(-1), own["exp_avg_sq"].view(-1))
            for offset, numel in _active_runs(local, active, param.numel()):
                part = tuple(tensor.narrow(0, offset, numel) for tensor in tensors)
                batches.setdefault(settings, []).append(part)  # type: ignore[arg-type]
        for settings, parts in batches.items():
            params, gradients, exp_avgs, exp_avg_sqs = (list(column) for column in zip(*parts, strict=True))
            self.adam(params, gradients, exp_avgs, exp_avg_sqs, settings=settings)


def _active_runs(local: Sequence[tuple[int, Fragment]], active: Sequence[bool], numel: int) -> list[Run]:
    """Return the parts of a partition whose parameters have a gradient.

    When all of them do it is the whole partition, padding included (its gradient is zero, and so stays everything
    that is computed from it): one kernel instead of one for each parameter.
    """
    if all(active[number] for number, _ in local):
        return [(0, numel)] if local else []
    runs: list[Run] = []
    for number, fragment in sorted(local, key=lambda item: item[1].partition_offset):
        if not active[number]:
            continue
        if runs and sum(runs[-1]) == fragment.partition_offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + fragment.numel)
        else:
            runs.append((fragment.partition_offset, fragment.numel))
    return runs
