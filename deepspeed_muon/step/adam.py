"""AdamW for the parameters that are not Muon's: the choice of its kernel, and its step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.errors import OpsUnavailableError
from deepspeed_muon.logs import warn_on_each_machine
from deepspeed_muon.math.updates import AdamStep, adam_step_
from deepspeed_muon.ops import in_fp32
from deepspeed_muon.plan.placement import Fragment
from deepspeed_muon.step.state import State, StatePolicy, state_of
from deepspeed_muon.step.step_set import NativeAdam, StepSet


@dataclass(slots=True)
class AdamKernel:
    """The kernel that runs AdamW on some partitions.

    Attributes:
        name: ``deepspeed_cpu_adam``, ``torch_fused``, or ``none`` if there is nothing to update.
        reason: Why this kernel was chosen.
        run: Called like :func:`deepspeed_muon.math.updates.adam_step_`.
        native: Whether it is DeepSpeed's.
        calls: How often AdamW ran.
        torch_calls: How often torch's kernel ran instead of the native one, which only knows the
            ``weight_decay_mode`` ``decoupled``.
    """

    name: str
    reason: str
    run: Callable[..., None]
    native: bool = False
    calls: int = 0
    torch_calls: int = 0

    def report(self) -> dict[str, Any]:
        """Return name, reason and counts."""
        return {
            "kernel": self.name,
            "reason": self.reason,
            "calls": self.calls,
            "torch_calls": self.torch_calls,
        }

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        settings: AdamStep,
    ) -> None:
        """Update ``params`` and both moments in place."""
        if not params:
            return
        run = self.run
        if self.native and settings.decay_mode != "decoupled":
            run = _torch_step
            self.torch_calls += 1
        run(params, grads, exp_avgs, exp_avg_sqs, settings=settings)
        self.calls += 1


def _choose_adam(step_set: StepSet, config: MuonConfig, policy: StatePolicy) -> AdamKernel:
    """Return the kernel for AdamW's partitions of a set, which have one device and one dtype.

    DeepSpeed's native operator updates partitions that ZeRO-Offload keeps on the CPU, as with DeepSpeed's AdamW.
    Torch's fused kernel updates everything else.
    """
    tensors = [partition.tensor for partition in step_set.partitions if not partition.muon]
    if not tensors:
        return AdamKernel("none", "no parameter of this set is AdamW's", adam_step_)
    master = tensors[0].dtype
    moments = policy.dtype("exp_avg", master)
    reason = "the partitions are not offloaded to the CPU"
    make = step_set.native_adam
    if make is not None and tensors[0].device.type == "cpu":
        native = _native(make, config.adam_w_mode, master, moments)
        if not isinstance(native, str):
            return AdamKernel(
                "deepspeed_cpu_adam", "the partitions are offloaded to the CPU", native, native=True
            )
        reason = native
    return AdamKernel("torch_fused", reason, _torch_step)


@functools.cache
def _native(
    make: NativeAdam, decoupled: bool, master: torch.dtype, moments: torch.dtype
) -> Callable[..., None] | str:
    """Return DeepSpeed's kernel, or why it cannot be used. The cache makes one for all, and one warning."""
    try:
        return make(decoupled=decoupled, master=master, moments=moments)
    except OpsUnavailableError as error:
        warn_on_each_machine("deepspeed_muon: torch's AdamW runs on the offloaded partitions: %s", error)
        return str(error)


def _torch_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    settings: AdamStep,
) -> None:
    """Run torch's kernel, which needs one dtype: mixed or half-precision tensors run in parts on fp32 copies."""

    def step(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor) -> None:
        adam_step_([param], [grad], [exp_avg], [exp_avg_sq], settings=settings)

    plain: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        if param.dtype == exp_avg.dtype and param.dtype.itemsize >= 4:
            plain.append((param, grad, exp_avg, exp_avg_sq))
        else:
            in_fp32(step, [param, exp_avg, exp_avg_sq], [grad])
    if plain:
        columns = [list(column) for column in zip(*plain, strict=True)]
        adam_step_(*columns, settings=settings)


class AdamUpdates:
    """AdamW on the partitions of one step set that are not Muon's."""

    def __init__(self, step_set: StepSet, config: MuonConfig, policy: StatePolicy) -> None:
        self.kernel = _choose_adam(step_set, config, policy)
        self._policy = policy
        self._decoupled = config.adam_w_mode
        # Those of Muon's matrices are not kept: there can be very many.
        pairs = zip(step_set.partitions, step_set.local_fragments(), strict=True)
        self._local = [(partition, local) for partition, local in pairs if not partition.muon]

    def run(
        self,
        active: Sequence[bool],
        grads: Mapping[int, Tensor],
        groups: Mapping[int, dict[str, Any]],
        state: State,
        flat: Mapping[int, Tensor],
    ) -> None:
        """Update all parameters that have a gradient; communicates nothing.

        Args:
            active: One flag for each layout of the set.
            grads: Partition index to its gradient, flat.
            groups: Partition index to the param group with its rates.
            state: ``optimizer.state``; mutated.
            flat: Partition index to this rank's flat weights; mutated.
        """
        batches: dict[AdamStep, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
        for partition, local in self._local:
            own = state_of(partition, state, self._policy)
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
            self.kernel(params, gradients, exp_avgs, exp_avg_sqs, settings=settings)


def _active_runs(
    local: Sequence[tuple[int, Fragment]], active: Sequence[bool], numel: int
) -> list[tuple[int, int]]:
    """Return offset and length of the parts of a partition whose parameters have a gradient.

    If all of them have one it is the whole partition, so that one kernel serves all. The padding may run along: its
    gradient is zero, and so it stays zero.
    """
    if all(active[number] for number, _ in local):
        return [(0, numel)] if local else []
    runs: list[tuple[int, int]] = []
    for number, fragment in sorted(local, key=lambda item: item[1].partition_offset):
        if not active[number]:
            continue
        if runs and sum(runs[-1]) == fragment.partition_offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + fragment.numel)
        else:
            runs.append((fragment.partition_offset, fragment.numel))
    return runs
