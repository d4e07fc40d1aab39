"""DeepSpeed's native AdamW for partitions that offload keeps on the CPU, checked against a reference before its use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.errors import OpsUnavailableError
from deepspeed_muon.math.updates import AdamStep, reference_adamw_step

__all__ = ["CpuAdam"]

# Number of elements in the check: whole SIMD vectors of every width, and a remainder.
_CHECKED = 1043


class CpuAdam:
    """Calls the operator behind ``DeepSpeedCPUAdam``, without that class's parameters and state."""

    def __init__(self, *, decoupled: bool, master: torch.dtype, moments: torch.dtype) -> None:
        """Load the operator, building it on first use, and compare two steps of it with the reference.

        Args:
            decoupled: AdamW when true, Adam with an L2 term when false.
            master: Dtype of the parameters and gradients that it will get.
            moments: Dtype of both moments.

        Raises:
            OpsUnavailableError: If it can be neither loaded nor built, or its result is not the reference's.
        """
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam
            from deepspeed.ops.op_builder import CPUAdamBuilder

            self._op: Any = CPUAdamBuilder().load()
            # The operator keeps one object for each number, and the class counts them.
            self._number = DeepSpeedCPUAdam.optimizer_id
            DeepSpeedCPUAdam.optimizer_id += 1
            self._decoupled = decoupled
            self._forget_steps(AdamStep(1e-3, (0.9, 0.999), 1e-8, 0.0, 1, decoupled))
        except Exception as error:
            raise OpsUnavailableError(f"DeepSpeed's cpu_adam operator is not available: {error}") from error
        weakref.finalize(self, self._op.destroy_adam, self._number)
        self._check(decoupled, master, moments)

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        settings: AdamStep,
    ) -> None:
        """Update ``params`` and both moments in place; see :func:`deepspeed_muon.math.updates.adam_step_`."""
        self._forget_steps(settings)
        for tensors in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
            assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
            self._op.adam_update(self._number, settings.step, *_numbers(settings), True, *tensors)

    def _forget_steps(self, settings: AdamStep) -> None:
        """Make the operator compute the powers of the betas from the step's number.

        Left to itself it multiplies those of its last step once more, which rounds differently: a resumed run would
        differ from an uninterrupted one in its last bits.
        """
        self._op.create_adam(self._number, *_numbers(settings), self._decoupled, False)

    def _check(self, decoupled: bool, master: torch.dtype, moments: torch.dtype) -> None:
        """Compare two steps on random numbers with the float64 reference."""
        generator = torch.Generator().manual_seed(0)
        param = (0.02 * torch.randn(_CHECKED, generator=generator)).to(master)
        exp_avg, exp_avg_sq = torch.zeros(2, _CHECKED, dtype=moments)
        expected, m, v = param.double(), exp_avg.double(), exp_avg_sq.double()
        error = 0.0
        for step in (1, 2):
            grad = torch.randn(_CHECKED, generator=generator).to(master)
            settings = AdamStep(0.01, (0.9, 0.95), 1e-8, 0.1, step, decoupled)
            expected, m, v = reference_adamw_step(expected, grad, m, v, settings=settings)
            try:
                self([param], [grad], [exp_avg], [exp_avg_sq], settings=settings)
            except RuntimeError as failed:
                raise OpsUnavailableError(
                    f"DeepSpeed's cpu_adam operator does not take {master} with moments in {moments}: {failed}"
                ) from failed
            error = max(error, float((param.double() - expected).abs().max()))
        # Two steps of about 0.01. Each one rounds a parameter of at most 0.1 (half of eps, relative), and its update
        # holds a few roundings of the moments. The error of a wrong formula is of the size of an update.
        unit = torch.finfo(master).eps * 0.1 + torch.finfo(moments).eps * 0.02 * 8
        if not error <= unit:
            raise OpsUnavailableError(
                f"DeepSpeed's cpu_adam operator differs from the reference by {error:.1e} (allowed {unit:.1e})"
            )


def _numbers(settings: AdamStep) -> tuple[float, ...]:
    return (settings.lr, *settings.betas, settings.eps, settings.weight_decay)
