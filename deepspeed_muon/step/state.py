"""The optimizer's state, momentum and AdamW's two moments: where it is; and AdamW on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.errors import BindingError, InstallationError
from deepspeed_muon.logs import logger, warn_on_each_machine
from deepspeed_muon.math.updates import AdamStep, AdamTensors, adam_step_
from deepspeed_muon.ops.dispatch import FlatPasses, flat_passes
from deepspeed_muon.plan.placement import Fragment
from deepspeed_muon.step.step_set import BoundPartition, NativeAdam, StepSet
from deepspeed_muon.variants import ROW_STATE
from deepspeed_muon.variants.variant import Variant

State = MutableMapping[Tensor, dict[str, Any]]

STATE_TENSORS = ("momentum_buffer", "exp_avg", "exp_avg_sq")

# Elements of half-precision tensors that AdamW updates at once: few enough for the cache of a CPU core, and enough for
# a launch on a GPU.
_CPU_BLOCK, _GPU_BLOCK = 1 << 16, 1 << 24


def state_of(partition: BoundPartition, state: State, policy: StatePolicy) -> dict[str, Any]:
    """Return the state of a partition for the next step: create what is missing, and count ``step`` up."""
    own = state[partition.tensor]
    for key in ("momentum_buffer",) if partition.muon else ("exp_avg", "exp_avg_sq"):
        if key not in own:
            own[key] = policy.make(key, partition.tensor)
            own.setdefault("step", 0)
        elif not own[key].is_contiguous():  # loaded from an optimizer that keeps the parameter's strides
            own[key] = own[key].contiguous()
    own["step"] += 1
    return own


def follow_parameters(state: State, policy: StatePolicy) -> None:
    """Bring the state to the devices of parameters that were moved or converted, and into the dtypes kept for them.

    Args:
        state: ``optimizer.state``. Mutated.
        policy: The dtypes. To and from 8 bits the step converts.
    """
    for param, entry in state.items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                dtype = policy.dtype(key, param.dtype) if key in STATE_TENSORS else value.dtype
                if torch.int8 in (dtype, value.dtype):
                    dtype = value.dtype
                entry[key] = value.to(device=param.device, dtype=dtype)


def row_state_of(partition: BoundPartition, state: State, variant: Variant, numel: int) -> dict[str, Tensor]:
    """Return what a variant keeps for the ``numel`` rows of a partition on this rank; create what is missing.

    Raises:
        BindingError: If the state was saved with another layout.
    """
    own = state[partition.tensor]
    for key in ROW_STATE.keys() - {each.key for each in variant.state}:
        own.pop(key, None)  # of another variant, from a state dict
    for each in variant.state:
        if each.key not in own:
            # Matrices that never had a gradient have no momentum yet, and nothing of a variant.
            if own["step"] > 1 and numel and own["momentum_buffer"].any():
                logger.warning(
                    "deepspeed_muon: the state of partition %d has no %s after %d steps (saved with another variant?); "
                    "variant %r starts it anew",
                    partition.index,
                    each.key,
                    own["step"] - 1,
                    variant.name,
                )
            own[each.key] = torch.full((numel,), each.start, dtype=each.dtype, device=partition.tensor.device)
        refuse_other_layout(own[each.key], numel, each.label, partition)
    return {each.key: own[each.key] for each in variant.state}


def refuse_other_layout(found: Tensor, numel: int, what: str, partition: BoundPartition) -> None:
    """Raise ``BindingError`` if the state of a partition does not have ``numel`` numbers of a kind."""
    if found.numel() != numel:
        raise BindingError(
            f"the optimizer state holds {found.numel()} {what} of partition {partition.index}, expected {numel}: it "
            f"was saved with another layout. Restore it from a consolidated checkpoint"
        )


def passes_for(partitions: Sequence[BoundPartition], config: MuonConfig, policy: StatePolicy) -> FlatPasses:
    """Return the elementwise passes for the partitions of a step set and their momentum."""
    masters = {each.tensor.dtype for each in partitions}
    device = partitions[0].tensor.device if partitions else torch.device("cpu")
    # Without DeepSpeed there may be float64.
    wide = torch.float64 in masters | {policy.dtype("momentum_buffer", each) for each in masters}
    return flat_passes("torch" if wide else config.ns_backend, device, int8=policy.quantizes_momentum)


@functools.cache
def _native(
    make: NativeAdam, decoupled: bool, master: torch.dtype, moments: torch.dtype
) -> Callable[..., None] | str:
    """Return DeepSpeed's kernel, or why it cannot be used. The cache makes one for all, and one warning."""
    try:
        return make(decoupled=decoupled, master=master, moments=moments)
    except InstallationError as error:
        warn_on_each_machine("deepspeed_muon: torch's AdamW runs on the offloaded partitions: %s", error)
        return str(error)


def torch_step(tensors: Sequence[AdamTensors], *, settings: AdamStep) -> None:
    """Run torch's kernel, which needs one dtype: mixed or half-precision tensors run in parts on fp32 copies.

    State in bf16 only saves memory: the arithmetic stays fp32, and every element is rounded once a step, when it is
    written back.
    """
    plain: list[AdamTensors] = []
    for own in tensors:
        param, _, exp_avg, _ = own
        if param.dtype == exp_avg.dtype and param.dtype.itemsize >= 4:
            plain.append(own)
            continue
        block = _CPU_BLOCK if param.device.type == "cpu" else _GPU_BLOCK
        for parts in zip(*(each.split(block) for each in own), strict=True):
            p, g, m, v = (part.float() for part in parts)
            adam_step_([(p, g, m, v)], settings=settings)
            for position, wide in ((0, p), (2, m), (3, v)):
                if parts[position].dtype != torch.float32:
                    parts[position].copy_(wide)
    adam_step_(plain, settings=settings)


class AdamW:
    """AdamW on the partitions of one step set that are not Muon's, which have one device and one dtype."""

    def __init__(self, step_set: StepSet, config: MuonConfig, policy: StatePolicy) -> None:
        """Choose the kernel.

        DeepSpeed's native operator updates partitions that ZeRO-Offload keeps on the CPU, as with DeepSpeed's AdamW.
        Torch's fused kernel updates everything else.
        """
        self._policy = policy
        self._decoupled = config.adam_w_mode
        self._native: Callable[..., None] | None = None
        self._calls = self._torch_calls = 0
        # Those of Muon's matrices are not kept: there can be very many.
        pairs = zip(step_set.partitions, step_set.local_fragments(), strict=True)
        self._local = [(partition, local) for partition, local in pairs if not partition.muon]
        if not self._local:
            self._kernel, self._reason = "none", "no parameter of this set is AdamW's"
            return
        tensor = self._local[0][0].tensor
        self._kernel, self._reason = "torch_fused", "the partitions are not offloaded to the CPU"
        if step_set.native_adam is not None and tensor.device.type == "cpu":
            moments = policy.dtype("exp_avg", tensor.dtype)
            native = _native(step_set.native_adam, self._decoupled, tensor.dtype, moments)
            if isinstance(native, str):
                self._reason = native
            else:
                self._native = native
                self._kernel, self._reason = "deepspeed_cpu_adam", "the partitions are offloaded to the CPU"

    def report(self) -> dict[str, Any]:
        """Return which kernel runs, why, and how often AdamW ran.

        ``torch_calls`` counts how often torch's kernel ran instead of DeepSpeed's, which only knows the
        ``weight_decay_mode`` ``decoupled``.
        """
        return {
            "kernel": self._kernel,
            "reason": self._reason,
            "calls": self._calls,
            "torch_calls": self._torch_calls,
        }

    def run(
        self,
        active: Sequence[int],
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
        batches: dict[AdamStep, list[AdamTensors]] = {}
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
            run = torch_step
            if self._native is not None and settings.decay_mode == "decoupled":
                run = self._native
            run(parts, settings=settings)
            self._calls += 1
            self._torch_calls += self._native is not None and run is torch_step


def _active_runs(
    local: Sequence[tuple[int, Fragment]], active: Sequence[int], numel: int
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
