"""Offload and masters in half precision: ZeRO's wrappers would take DeepSpeed's own optimizers alone.

Twin-flow (``ratio``) and ``bf16_master_weights_and_grads`` need an optimizer that updates partitions on the CPU and in
half precision. Ours does, but the wrappers compare its class with ``DeepSpeedCPUAdam``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.ops.adam import fused_adam
from deepspeed.runtime.zero import stage3, stage_1_and_2

__all__ = [
    "Admission",
    "can_move",
    "half_states",
    "master_dtype",
    "offload_device",
    "offload_states",
]

_ATTRIBUTE = "_deepspeed_muon_admission"


def offload_device(engine: Any, section: str = "offload_optimizer") -> str:
    """Return where ZeRO offloads to: ``none``, ``cpu`` or ``nvme``.

    Args:
        engine: A ``DeepSpeedEngine``.
        section: ``offload_optimizer`` or ``offload_param``.
    """
    offload = getattr(engine._config.zero_config, section, None)
    device = getattr(offload, "device", None)
    return "none" if device is None else str(getattr(device, "value", device))


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


def can_move(engine: Any) -> bool:
    """Return whether the wrapper can move weights and state to the host."""
    return hasattr(engine.optimizer, "offload_states")


def offload_states(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Release our working memory, and let the wrapper move our optimizer's state.

    Stage 3 moves the state of ``FusedAdam`` only. But it would move whatever tensors a state holds, and it changes the
    data of the fp32 partitions in place, so the optimizer's references to them stay valid. So our class stands in for
    ``FusedAdam`` during the call.
    """
    # First, because the original ends by returning free memory to the device.
    wrapper.optimizer._release_memory()
    with _stands_for(type(wrapper.optimizer), fused_adam, "FusedAdam"):
        return original(*args, **kwargs)
