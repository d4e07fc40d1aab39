"""AdamW on the partitions that are not Muon's: DeepSpeed's kernel for offloaded ones, else torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.logs import warn_on_each_machine
from deepspeed_muon.math.updates import AdamStep, AdamTensors, adam_step_
from deepspeed_muon.plan.layout import PartitionIndex
from deepspeed_muon.plan.placement import Fragment
from deepspeed_muon.step.step_set import NativeAdam, State, StepContext
from deepspeed_muon.step.tensors import state_of

# Elements that AdamW copies to fp32 at once where it computes on copies: they fit into the cache of a CPU core, and are
# enough to occupy a GPU.
_CPU_BLOCK, _GPU_BLOCK = 1 << 16, 1 << 24


@functools.cache
def _native(make: NativeAdam) -> Callable[..., None] | str:
    """Return DeepSpeed's kernel, or the reason why it cannot be used; cached, so that the warning appears once."""
    try:
        return make()
    except InstallationError as error:
        warn_on_each_machine("deepspeed_muon: torch's AdamW runs on the offloaded partitions: %s", error)
        return str(error)


def torch_step(tensors: Sequence[AdamTensors], *, settings: AdamStep) -> None:
    """Run torch's fused AdamW in place; it needs one dtype, so half-precision tensors are updated on fp32 copies.

    bf16 moments save memory without changing the arithmetic: it is fp32, and every element is rounded once a step, when
    it is written back.
    """
    uniform: list[AdamTensors] = []
    for adam_tensors in tensors:
        param, _, exp_avg, _ = adam_tensors
        if param.dtype == exp_avg.dtype and param.dtype.itemsize >= 4:
            uniform.append(adam_tensors)
            continue
        block = _CPU_BLOCK if param.device.type == "cpu" else _GPU_BLOCK
        for slices in zip(*(tensor.split(block) for tensor in adam_tensors), strict=True):
            p, g, m, v = (tensor.float() for tensor in slices)  # (block,) fp32; a copy only of other dtypes
            adam_step_([(p, g, m, v)], settings=settings)
            for position, updated in ((0, p), (2, m), (3, v)):
                if slices[position].dtype != torch.float32:
                    slices[position].copy_(updated)
    adam_step_(uniform, settings=settings)


class AdamW:
    """Updates the partitions of one step set that are not Muon's; they have one device and one dtype."""

    def __init__(self, context: StepContext) -> None:
        """Choose the kernel: DeepSpeed's for partitions that ZeRO-Offload stores on the CPU, else torch's fused one."""
        step_set, self._policy = context.step_set, context.policy
        self._decoupled = context.config.adam_w_mode
        self._native: Callable[..., None] | None = None
        self._calls = 0
        # Without the fragments of Muon's matrices, of which there can be very many.
        pairs = zip(step_set.partitions, step_set.local_fragments(), strict=True)
        self._local = [(partition, local) for partition, local in pairs if not partition.muon]
        self._kernel, self._reason = "torch_fused", "the partitions are not offloaded to the CPU"
        if not self._local:
            self._kernel, self._reason = "none", "no parameter of this set is AdamW's"
        elif step_set.native_adam is not None and self._local[0][0].tensor.device.type == "cpu":
            native = _native(step_set.native_adam)
            if isinstance(native, str):
                self._reason = native
            else:
                self._native = native
                self._kernel, self._reason = "deepspeed_cpu_adam", "the partitions are offloaded to the CPU"

    def report(self) -> dict[str, Any]:
        """Return which kernel runs, why, and the number of calls."""
        return {"kernel": self._kernel, "reason": self._reason, "calls": self._calls}

    def step(
        self,
        active: Sequence[bool],
        grads: Mapping[PartitionIndex, Tensor],
        groups: Mapping[PartitionIndex, dict[str, Any]],
        state: State,
        flat: Mapping[PartitionIndex, Tensor],
    ) -> None:
        """Update all active parameters; the arguments are those of :meth:`.StepRunner.run`, and the flat weights."""
        # 1. partitions, or what is active of them, with equal settings: one call updates all
        batches: dict[AdamStep, list[AdamTensors]] = {}
        for partition, local in self._local:
            entry = state_of(partition, state, self._policy)
            group = groups[partition.index]
            settings = AdamStep(
                lr=float(group["lr"]),
                betas=(float(group["betas"][0]), float(group["betas"][1])),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                step=int(entry["step"]),
                decoupled=self._decoupled,
                decay_mode=group["weight_decay_mode"],
            )
            param = flat[partition.index]
            grad = grads.get(partition.index)
            # Without a gradient on this rank a parameter may be active through another rank: it decays.
            grad = torch.zeros_like(param) if grad is None else grad
            tensors = (param, grad, entry["exp_avg"].view(-1), entry["exp_avg_sq"].view(-1))
            for offset, numel in _active_ranges(local, active, param.numel()):
                slices = tuple(tensor.narrow(0, offset, numel) for tensor in tensors)
                batches.setdefault(settings, []).append(slices)  # type: ignore[arg-type]
        # 2. the calls
        for settings, batch in batches.items():
            kernel = torch_step  # DeepSpeed's kernel does not know `independent` and `cautious`
            if self._native is not None and settings.decay_mode == "decoupled":
                kernel = self._native
            kernel(batch, settings=settings)
            self._calls += 1


def _active_ranges(
    local: Sequence[tuple[int, Fragment]], active: Sequence[bool], numel: int
) -> list[tuple[int, int]]:
    """Return offset and length of the ranges of a partition whose parameters have a gradient.

    If all parameters have one it is the entire partition, so that one kernel call updates it, padding included: the
    padding remains zero, because its gradient is zero.
    """
    if all(active[number] for number, _ in local):
        return [(0, numel)] if local else []
    ranges: list[tuple[int, int]] = []
    for number, fragment in sorted(local, key=lambda item: item[1].partition_offset):
        if not active[number]:
            continue
        # offset + length of the last range: they are adjacent
        if ranges and sum(ranges[-1]) == fragment.partition_offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + fragment.numel)
        else:
            ranges.append((fragment.partition_offset, fragment.numel))
    return ranges
