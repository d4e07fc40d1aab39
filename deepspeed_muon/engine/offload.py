"""Offload and masters in half precision: ZeRO's wrappers would take DeepSpeed's own optimizers alone.

Twin-flow (``ratio``) and ``bf16_master_weights_and_grads`` need an optimizer that updates partitions on the CPU and in
half precision. Ours does, but the wrappers compare its class with ``DeepSpeedCPUAdam``. AdamW on the CPU is DeepSpeed's
native operator, checked against a reference before its use.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.ops.adam import fused_adam
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import Tensor

from deepspeed_muon.engine.zero.views import Original, View
from deepspeed_muon.errors import OpsUnavailableError
from deepspeed_muon.math.updates import AdamStep, reference_adamw_step

# Number of elements in the check of the native AdamW: whole SIMD vectors of every width, and a remainder.
_CHECKED = 1043

_ATTRIBUTE = "_deepspeed_muon_admission"


def offload_device(engine: Any, section: str = "offload_optimizer") -> str:
    """Return where ZeRO offloads to: ``none``, ``cpu`` or ``nvme``.

    Args:
        engine: A ``DeepSpeedEngine``.
        section: ``offload_optimizer`` or ``offload_param``.
    """
    offload = getattr(engine._config.zero_config, section)
    return "none" if offload is None else OffloadDeviceEnum(offload.device).value


def half_states(engine: Any) -> bool:
    """Return whether ``bf16.bf16_optimizer_states`` is set."""
    return bool(engine.bf16_optimizer_states())


def master_dtype(engine: Any) -> torch.dtype:
    """Return the dtype that the configuration asks the master weights to be kept in."""
    if engine.bf16_master_weights_and_gradients():
        return torch.bfloat16
    return torch.float16 if engine.fp16_master_weights_and_gradients() else torch.float32


class Admission(contextlib.ExitStack):
    """Lets ZeRO's wrappers take our optimizer where they ask for ``DeepSpeedCPUAdam``, while they are made.

    A context manager that puts everything back, except for what :meth:`settle` needs.
    """

    def __init__(self, engine: Any) -> None:
        """Make this the engine's admission until the context ends.

        Args:
            engine: The engine whose optimizer is about to be wrapped.
        """
        super().__init__()
        self._engine = engine
        self._group_keys: list[tuple[dict[str, Any], frozenset[str]]] = []
        setattr(engine, _ATTRIBUTE, self)
        self.callback(delattr, engine, _ATTRIBUTE)

    @classmethod
    def of(cls, engine: Any) -> Admission:
        """Return the admission in whose context the engine's wrapper is being made."""
        found: Admission = getattr(engine, _ATTRIBUTE)
        return found

    def adopt(self, optimizer: Any) -> None:
        """Prepare our optimizer, once it is made and before it is wrapped.

        Args:
            optimizer: A :class:`deepspeed_muon.optimizer.Muon`.
        """
        engine = self._engine
        optimizer.managed = True
        for group in optimizer.param_groups:
            # BF16_Optimizer plans an exchange of its own for groups with this key. Binding puts it back.
            group.pop("use_muon", None)
        # DeepSpeed demands its CPU Adam of client optimizers. Ours runs it by itself.
        engine.zero_force_ds_cpu_optimizer = lambda: False
        if half_states(engine):
            optimizer._keep_half_states()
        if offload_device(engine) == "none":
            return
        is_twin_flow = engine._config.zero_config.offload_optimizer.ratio < 1.0
        if is_twin_flow:
            # The wrapper makes a torch.optim.AdamW of our groups for the sub-groups on the device.
            self._group_keys = [(group, frozenset(group)) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group.setdefault("amsgrad", False)
        if is_twin_flow or master_dtype(engine) != torch.float32:
            for module in (stage3, stage_1_and_2):
                self.enter_context(_stands_for(type(optimizer), module, "DeepSpeedCPUAdam"))

    def settle(self, wrapper: Any, optimizer: Any) -> None:
        """Give our optimizer inside the wrapper the sub-groups that twin-flow leaves on the device."""
        if self._group_keys:
            wrapper.backup_optimizer = optimizer
        for group, keys in self._group_keys:
            for extra in [key for key in group if key not in keys]:
                del group[extra]


@contextlib.contextmanager
def _stands_for(ours: type, module: Any, name: str) -> Iterator[None]:
    """Put our class in the place of one with which a module of DeepSpeed compares an optimizer's."""
    known = getattr(module, name)
    setattr(module, name, ours)
    try:
        yield
    finally:
        setattr(module, name, known)


def offload_states(original: Original, view: View, *args: Any, **kwargs: Any) -> Any:
    """Release our working memory, and let the wrapper move our optimizer's state.

    Stage 3 moves the state of ``FusedAdam`` only. But it would move whatever tensors a state holds, and it changes the
    data of the fp32 partitions in place, so the optimizer's references to them stay valid. So our class stands in for
    ``FusedAdam`` during the call.
    """
    # First, because the original ends by returning free memory to the device.
    view.optimizer._release_memory()
    with _stands_for(type(view.optimizer), fused_adam, "FusedAdam"):
        return original(*args, **kwargs)


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
