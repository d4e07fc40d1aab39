"""What offload and masters in half precision ask of the inner optimizer, and how ours answers.

Twin-flow (``ratio``) and ``bf16_master_weights_and_grads`` work with any optimizer that updates partitions on the CPU
and in half precision, but ZeRO's wrappers admit ``DeepSpeedCPUAdam`` alone, by its exact type.
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
    "offload_ratio",
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


def offload_ratio(engine: Any) -> float:
    """Return the share of the sub-groups that ``offload_optimizer.ratio`` puts on the CPU (stage 3)."""
    offload = getattr(engine._config.zero_config, "offload_optimizer", None)
    if offload is None or engine.zero_optimization_stage() != 3:
        return 1.0
    return float(getattr(offload, "ratio", 1.0))


def half_states(engine: Any) -> bool:
    """Return whether ``bf16.bf16_optimizer_states`` is set; DeepSpeed 0.16.9 does not have it."""
    return bool(getattr(engine, "bf16_optimizer_states", lambda: False)())


def master_dtype(engine: Any) -> torch.dtype:
    """Return the dtype that the configuration asks the master weights to be kept in."""
    if getattr(engine, "bf16_master_weights_and_gradients", lambda: False)():
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
            # BF16_Optimizer plans an exchange of its own for groups that have it; binding brings it back.
            group.pop("use_muon", None)
        # Asked of client optimizers: ours runs the native CPU Adam by itself.
        engine.zero_force_ds_cpu_optimizer = lambda: False
        if half_states(engine):
            optimizer.keep_half_states()
        if offload_device(engine) == "none":
            return
        if offload_ratio(engine) < 1.0:
            # The wrapper makes a torch.optim.AdamW for the sub-groups on the device out of our groups.
            self._group_keys = [(group, frozenset(group)) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group.setdefault("amsgrad", False)
        if offload_ratio(engine) < 1.0 or master_dtype(engine) != torch.float32:
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
    """Put our class where a module of DeepSpeed looks for one that it compares an optimizer's with."""
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
    """Give up our working memory, and let the wrapper move our optimizer's state.

    Stage 3 moves the state of ``FusedAdam`` only. It moves whatever tensors the state holds, and changes the data of
    the fp32 partitions in place, so that what the optimizer was bound to stays valid. Its check for the class stands in
    for that, and is met for the time of the call.
    """
    # Before the original, which ends with handing what is free back to the device.
    wrapper.optimizer.release_memory()
    with _stands_for(type(wrapper.optimizer), fused_adam, "FusedAdam"):
        return original(*args, **kwargs)
