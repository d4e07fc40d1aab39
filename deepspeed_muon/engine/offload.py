"""Offload to the CPU, and master weights in half precision.

Twin-flow (``ratio``) and ``bf16_master_weights_and_grads`` need an optimizer that updates partitions on the CPU and in
half precision. Ours does, but ZeRO's wrappers look for the class ``DeepSpeedCPUAdam``. AdamW on the CPU is DeepSpeed's
native operator. Offload to NVMe is :mod:`deepspeed_muon.engine.nvme`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from deepspeed.ops.adam import fused_adam
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.offload_states import offload_optimizer_states, reload_optimizer_states
from deepspeed.runtime.zero.utils import get_mapping_to_flat_buffer

from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.engine.patching import Original
from deepspeed_muon.engine.views import View, ZeroView
from deepspeed_muon.errors import InstallationError
from deepspeed_muon.math.updates import AdamStep, AdamTensors
from deepspeed_muon.optimizer import Muon


def offload_device(engine: DeepSpeedEngine, section: str = "offload_optimizer") -> str:
    """Return where ZeRO offloads to: ``none``, ``cpu`` or ``nvme``.

    Args:
        engine: A ``DeepSpeedEngine``.
        section: ``offload_optimizer`` or ``offload_param``.
    """
    offload = getattr(engine._config.zero_config, section)
    return "none" if offload is None else OffloadDeviceEnum(offload.device).value


def master_dtype(engine: DeepSpeedEngine) -> torch.dtype:
    """Return the dtype of the master weights according to the configuration."""
    if engine.bf16_master_weights_and_gradients():
        return torch.bfloat16
    return torch.float16 if engine.fp16_master_weights_and_gradients() else torch.float32


def adopt(engine: DeepSpeedEngine, optimizer: Muon, wrapping: contextlib.ExitStack) -> None:
    """Prepare our optimizer, which is made and not wrapped yet, for ZeRO's wrapper.

    Args:
        engine: The engine whose optimizer is about to be wrapped.
        optimizer: A :class:`deepspeed_muon.optimizer.Muon`.
        wrapping: Undoes, once the wrapper is made, what is replaced only while it is made.
    """
    optimizer.managed = True
    for group in optimizer.param_groups:
        # For groups with this key BF16_Optimizer would plan an exchange of its own. Binding puts the key back.
        group.pop("use_muon", None)
    # DeepSpeed requires client optimizers to be its CPU Adam. Ours calls the operator behind that.
    engine.zero_force_ds_cpu_optimizer = lambda: False
    if engine.bf16_optimizer_states():
        optimizer.state_policy = StatePolicy(optimizer.config.momentum_dtype, half_states=True)
    if offload_device(engine) == "none":
        return
    is_twin_flow = engine._config.zero_config.offload_optimizer.ratio < 1.0
    if is_twin_flow:
        # The wrapper's AdamW adds keys to our groups, so the keys that they have are recorded now.
        group_keys = [(group, frozenset(group)) for group in optimizer.param_groups]
        wrapping.callback(_take_all_sub_groups, engine, optimizer, group_keys)
        for group in optimizer.param_groups:
            group.setdefault("amsgrad", False)
    if is_twin_flow or master_dtype(engine) != torch.float32:
        for module in (stage3, stage_1_and_2):
            wrapping.enter_context(mock.patch.object(module, "DeepSpeedCPUAdam", type(optimizer)))


def _take_all_sub_groups(
    engine: DeepSpeedEngine, optimizer: Muon, group_keys: Sequence[tuple[dict[str, Any], frozenset[str]]]
) -> None:
    """Let our optimizer update the sub-groups that twin-flow leaves on the device, too.

    For them the wrapper has made a ``torch.optim.AdamW`` from our groups, which has added keys to these.
    """
    if engine.optimizer is not None:
        engine.optimizer.backup_optimizer = optimizer
    for group, keys in group_keys:
        for extra in [key for key in group if key not in keys]:
            del group[extra]


def offload_states(original: Original, view: View, *args: object, **kwargs: object) -> object:
    """Release our working memory, and let the wrapper move our optimizer's state.

    Stage 3 moves only two tensors of ``FusedAdam``'s state, and keeps copies of them there. So during the call our
    class stands in for ``FusedAdam``, and the function by which stages 1 and 2 move any state for that of stage 3.
    Stage 3 would also look for the weights in the model's order, and for frozen ones, which are not in its buffer.
    """

    def mapping(_: Any) -> Any:
        return get_mapping_to_flat_buffer([param.ds_tensor for group in view.params for param in group])  # type: ignore[attr-defined]

    # Before the original, which returns free memory to the device at its end.
    view.optimizer._release_memory()
    with (
        mock.patch.object(fused_adam, "FusedAdam", type(view.optimizer)),
        mock.patch.object(stage3, "offload_adam_states", offload_optimizer_states),
        mock.patch.object(stage3, "get_mapping_to_flat_buffer", mapping),
    ):
        return original(*args, **kwargs)


def reload_states(original: Original, view: ZeroView, *args: object, **kwargs: object) -> None:
    """Take back what :func:`offload_states` moved, and capture CUDA graphs again."""
    moved = []  # host tensors, which must not be freed before the original has waited for the copies

    def reload(*args: object, **kwargs: object) -> None:
        moved.append(reload_optimizer_states(*args, **kwargs))

    # Stage 3 would look for copies of FusedAdam's state.
    with mock.patch.object(stage3, "reload_adam_states", reload):
        original(*args, **kwargs)
    view.optimizer._capture_graphs()


class CpuAdam:
    """Calls the operator behind ``DeepSpeedCPUAdam``, without that class's parameters and state."""

    def __init__(self) -> None:
        """Load the operator, building it on first use.

        Raises:
            InstallationError: If it can be neither loaded nor built.
        """
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam
            from deepspeed.ops.op_builder import CPUAdamBuilder

            self._op: Any = CPUAdamBuilder().load()
            # The operator stores its settings under a number, which the class counts.
            self._number = DeepSpeedCPUAdam.optimizer_id
            DeepSpeedCPUAdam.optimizer_id += 1
        except Exception as error:
            raise InstallationError(f"DeepSpeed's cpu_adam operator is not available: {error}") from error
        weakref.finalize(self, self._op.destroy_adam, self._number)

    def __call__(self, tensors: Sequence[AdamTensors], *, settings: AdamStep) -> None:
        """Update parameters and both moments in place; see :func:`deepspeed_muon.math.updates.adam_step_`."""
        numbers = (settings.lr, *settings.betas, settings.eps, settings.weight_decay)
        # For newly stored settings the operator computes the powers of the betas from the number of the step. Otherwise
        # it multiplies those of its last step by the betas, which rounds differently: a resumed run would differ in its
        # last bits.
        self._op.create_adam(self._number, *numbers, settings.decoupled, False)
        for of_param in tensors:
            assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in of_param)
            # True: with bias correction
            self._op.adam_update(self._number, settings.step, *numbers, True, *of_param)
