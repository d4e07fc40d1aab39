"""One step of one set of partitions: agree on gradients, momentum, exchange, apply; AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.errors import BindingError
from deepspeed_muon.math.adamw import AdamStep, adam_step_
from deepspeed_muon.math.scaling import update_scale
from deepspeed_muon.ops import flat_passes
from deepspeed_muon.plan.exchange import ExchangePlan, build_exchange_plan
from deepspeed_muon.plan.layout import Fragment, MatrixLayout, ParameterLayout
from deepspeed_muon.plan.owners import assign_owners
from deepspeed_muon.transport.agreement import gather_flags, gradient_flags
from deepspeed_muon.transport.pipeline import MuonPipeline, Orthogonalize, StepStats
from deepspeed_muon.zero.binding import BoundPartition, StepSet

__all__ = ["GradientReport", "StepRunner"]

State = MutableMapping[Tensor, dict[str, Any]]
Run = tuple[int, int]  # offset and length inside a partition


@dataclass(frozen=True, slots=True)
class GradientReport:
    """What all ranks of a group know about this step's gradients.

    Attributes:
        active: Whether any rank has a non-zero gradient, one flag per matrix and then per other parameter.
        nonfinite: Names of the parameters whose gradient holds an infinity or NaN on some rank.
    """

    active: tuple[bool, ...]
    nonfinite: tuple[str, ...]


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
    ) -> None:
        """Make the exchange plan; nothing is sent.

        Args:
            step_set: Partitions and layouts.
            config: The optimizer's settings.
            device: Where the exchange and the iteration run; the partitions may be elsewhere (offload).
            orthogonalize: Runs the Newton-Schulz iteration.
            stats: Counters to increase.
            load: Newton-Schulz cost that each rank carries from other sets; updated.
        """
        self.step_set = step_set
        self.device = device
        self._wire_dtype = config.resolved_wire_dtype(step_set.model_dtype)
        self._decoupled = config.adam_w_mode
        owners = assign_owners(
            step_set.matrices, step_set.world_size, steps=len(config.coefficients()), load=load
        )
        self.plan: ExchangePlan = build_exchange_plan(
            step_set.matrices,
            owners,
            rank=step_set.rank,
            world_size=step_set.world_size,
            chunk_numel=config.exchange_chunk_numel,
        )
        self._pipeline = MuonPipeline(
            self.plan,
            group=step_set.group,
            device=device,
            wire_dtype=self._wire_dtype,
            ns_settings=config.ns_settings(device),
            orthogonalize=orthogonalize,
            stats=stats,
        )
        # The native passes are for fp32; without DeepSpeed the parameters may be in half precision themselves.
        self._passes = {
            partition.index: flat_passes(
                config.ns_backend if partition.tensor.dtype == torch.float32 else "torch",
                partition.tensor.device,
            )
            for partition in step_set.partitions
            if partition.muon
        }
        self._local: list[list[tuple[int, Fragment]]] = [[] for _ in step_set.partitions]
        position = {partition.index: number for number, partition in enumerate(step_set.partitions)}
        self._layouts: tuple[MatrixLayout | ParameterLayout, ...] = (*step_set.matrices, *step_set.others)
        for number, layout in enumerate(self._layouts):
            for fragment in layout.fragments:
                if fragment.rank == step_set.rank:
                    self._local[position[layout.partition]].append((number, fragment))

    @property
    def wire_bytes_per_step(self) -> int:
        """Bytes that this rank sends in one step when every matrix has a gradient."""
        return self.plan.sent_elements * self._wire_dtype.itemsize

    def inspect_gradients(self, grads: Mapping[int, Tensor]) -> GradientReport:
        """Find out, together with the group, which parameters have a gradient and whether all are finite.

        Must be called by all ranks of the group.

        Args:
            grads: Partition index to its gradient; a missing one counts as zero.
        """
        names = [layout.name for layout in self._layouts]
        flags = [[0, 0] for _ in names]
        numbers: list[int] = []
        views: list[Tensor] = []
        for partition, local in zip(self.step_set.partitions, self._local, strict=True):
            grad = grads.get(partition.index)
            if grad is not None:
                flat = grad.reshape(-1)
                numbers.extend(number for number, _ in local)
                views.extend(flat.narrow(0, f.partition_offset, f.numel) for _, f in local)
        if views:
            for number, (nonzero, nonfinite) in zip(numbers, gradient_flags(views).tolist(), strict=True):
                flags[number] = [flags[number][0] | nonzero, flags[number][1] | nonfinite]
        rows = flags
        if self.step_set.world_size > 1:
            sent = torch.tensor(flags, dtype=torch.uint8, device=self.device)
            rows = gather_flags(sent, group=self.step_set.group).tolist()
        return GradientReport(
            active=tuple(bool(row[0]) for row in rows),
            nonfinite=tuple(name for name, row in zip(names, rows, strict=True) if row[1]),
        )

    def run(
        self,
        report: GradientReport,
        grads: Mapping[int, Tensor],
        groups: Mapping[int, dict[str, Any]],
        state: State,
    ) -> None:
        """Update all partitions of the set in place.

        Must be called by all ranks of the group with the same report.

        Args:
            report: The outcome of :meth:`inspect_gradients`.
            grads: Partition index to its gradient, fp32, shaped like the partition.
            groups: Partition index to the param group with its rates.
            state: The optimizer's state; created where missing. Mutated.
        """
        self._run_muon(report.active, grads, groups, state)
        self._run_adam(report.active, grads, groups, state)

    def _run_muon(
        self,
        active: Sequence[bool],
        grads: Mapping[int, Tensor],
        groups: Mapping[int, dict[str, Any]],
        state: State,
    ) -> None:
        directions: dict[int, Tensor] = {}
        flat: dict[int, Tensor] = {}
        for partition, local in zip(self.step_set.partitions, self._local, strict=True):
            if not partition.muon:
                continue
            own = state[partition.tensor]
            if "momentum_buffer" not in own:
                own["momentum_buffer"] = torch.zeros_like(partition.tensor, requires_grad=False)
                own["step"] = 0
            own["step"] += 1
            flat[partition.index] = _flat(partition.tensor)
            runs = _active_runs(local, active, flat[partition.index].numel())
            group = groups[partition.index]
            directions[partition.index] = self._directions(
                partition, own["momentum_buffer"], grads, group, runs
            )

        def direction(index: int, fragment: Fragment) -> Tensor:
            partition = self.step_set.matrices[index].partition
            return directions[partition].narrow(0, fragment.partition_offset, fragment.numel)

        def apply(index: int, fragment: Fragment, update: Tensor) -> None:
            matrix = self.step_set.matrices[index]
            group = groups[matrix.partition]
            rate = float(group["lr"])
            scale = update_scale(group["adjust_lr_fn"], *matrix.block_shape)
            decay = 1.0 - rate * float(group["weight_decay"])
            target = flat[matrix.partition].narrow(0, fragment.partition_offset, fragment.numel)
            self._passes[matrix.partition].unpack_apply(target, update.to(target.device), rate * scale, decay)

        self._pipeline.run(active=active[: len(self.step_set.matrices)], direction=direction, apply=apply)

    def _directions(
        self,
        partition: BoundPartition,
        momentum_buffer: Tensor,
        grads: Mapping[int, Tensor],
        group: Mapping[str, Any],
        runs: Sequence[Run],
    ) -> Tensor:
        """Update the momentum and return the direction of the whole partition in the wire dtype, flat."""
        buf = _flat(momentum_buffer)
        pack = self._passes[partition.index].momentum_pack
        complete = runs == [(0, buf.numel())]
        out = (torch.empty if complete else torch.zeros)(
            buf.numel(), dtype=self._wire_dtype, device=buf.device
        )
        grad = grads.get(partition.index)
        grad = torch.zeros_like(buf) if grad is None else grad.reshape(-1)
        for offset, numel in runs:
            part = (tensor.narrow(0, offset, numel) for tensor in (buf, grad, out))
            pack(*part, float(group["momentum"]), bool(group["nesterov"]))
        return out

    def _run_adam(
        self,
        active: Sequence[bool],
        grads: Mapping[int, Tensor],
        groups: Mapping[int, dict[str, Any]],
        state: State,
    ) -> None:
        batches: dict[AdamStep, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
        for partition, local in zip(self.step_set.partitions, self._local, strict=True):
            if partition.muon:
                continue
            own = state[partition.tensor]
            if "exp_avg" not in own:
                own["exp_avg"] = torch.zeros_like(partition.tensor, requires_grad=False)
                own["exp_avg_sq"] = torch.zeros_like(partition.tensor, requires_grad=False)
                own["step"] = 0
            own["step"] += 1
            group = groups[partition.index]
            settings = AdamStep(
                lr=float(group["lr"]),
                betas=(float(group["betas"][0]), float(group["betas"][1])),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                step=int(own["step"]),
                decoupled=self._decoupled,
            )
            param = _flat(partition.tensor)
            grad = grads.get(partition.index)
            grad = torch.zeros_like(param) if grad is None else grad.reshape(-1)
            tensors = (param, grad, _flat(own["exp_avg"]), _flat(own["exp_avg_sq"]))
            for offset, numel in _active_runs(local, active, param.numel()):
                part = tuple(tensor.narrow(0, offset, numel) for tensor in tensors)
                batches.setdefault(settings, []).append(part)  # type: ignore[arg-type]
        for settings, parts in batches.items():
            params, gradients, exp_avgs, exp_avg_sqs = (list(column) for column in zip(*parts, strict=True))
            adam_step_(params, gradients, exp_avgs, exp_avg_sqs, settings=settings)


def _flat(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view that shares memory with ``tensor``."""
    try:
        return tensor.detach().view(-1)
    except RuntimeError as error:
        raise BindingError(
            f"a parameter of shape {tuple(tensor.shape)} is not contiguous (strides {tensor.stride()}); "
            f"call .contiguous() on its data before the optimizer is made"
        ) from error


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


def group_rank_scope(group: dist.ProcessGroup | None) -> str:
    """Return a text that is equal on the ranks of one process group and differs between groups."""
    return "world" if group is None else ",".join(map(str, dist.get_process_group_ranks(group)))
