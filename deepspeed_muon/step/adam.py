"""Which kernel runs AdamW on a set of partitions, and why."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.engine.cpu_adam import CpuAdam
from deepspeed_muon.errors import OpsUnavailableError
from deepspeed_muon.logs import warn_on_each_machine
from deepspeed_muon.math.adamw import AdamStep, adam_step_
from deepspeed_muon.ops import in_fp32
from deepspeed_muon.step.state import StatePolicy
from deepspeed_muon.step.step_set import StepSet

__all__ = ["AdamKernel", "choose_adam"]


@dataclass(slots=True)
class AdamKernel:
    """What runs AdamW on some partitions.

    Attributes:
        name: ``deepspeed_cpu_adam``, ``torch_fused``, or ``none`` where there is nothing to update.
        reason: Why.
        run: With the contract of :func:`deepspeed_muon.math.adamw.adam_step_`.
        calls: How often AdamW ran.
        torch_calls: How often torch's kernel ran in place of the native one, which knows no ``weight_decay_mode`` but
            ``decoupled``.
    """

    name: str
    reason: str
    run: Callable[..., None]
    calls: int = 0
    torch_calls: int = 0

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
        if isinstance(run, CpuAdam) and settings.decay_mode != "decoupled":
            run = _torch_step
            self.torch_calls += 1
        run(params, grads, exp_avgs, exp_avg_sqs, settings=settings)
        self.calls += 1


def choose_adam(step_set: StepSet, config: MuonConfig, policy: StatePolicy) -> AdamKernel:
    """Return the kernel for the partitions of a set that are AdamW's.

    Partitions that ZeRO-Offload keeps on the CPU are updated by DeepSpeed's native operator, as they are with
    DeepSpeed's AdamW; everything else, and everything under ``torch_adam``, by torch's fused kernel.

    Args:
        step_set: The partitions. Those of one set are on one device and have one dtype.
        config: The optimizer's settings.
        policy: Dtype of the moments.
    """
    tensors = [partition.tensor for partition in step_set.partitions if not partition.muon]
    if not tensors:
        return AdamKernel("none", "no parameter of this set is AdamW's", adam_step_)
    master = tensors[0].dtype
    moments = policy.dtype("exp_avg", master)
    reason = "the partitions are not offloaded to the CPU"
    if step_set.offloaded and config.torch_adam:
        reason = "optimizer.params.torch_adam is true"
    elif step_set.offloaded and tensors[0].device.type == "cpu":
        native = _native(config.adam_w_mode, master, moments)
        if isinstance(native, CpuAdam):
            return AdamKernel("deepspeed_cpu_adam", "the partitions are offloaded to the CPU", native)
        reason = native
    return AdamKernel("torch_fused", reason, _torch_step)


@functools.cache
def _native(decoupled: bool, master: torch.dtype, moments: torch.dtype) -> CpuAdam | str:
    """Return DeepSpeed's kernel, or why it cannot be used. One serves all partitions; a failure is reported once."""
    try:
        return CpuAdam(decoupled=decoupled, master=master, moments=moments)
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
    """Run torch's kernel. It wants one dtype, so what mixes them runs block by block on fp32 copies."""

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
