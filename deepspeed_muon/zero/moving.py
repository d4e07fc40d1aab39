"""``engine.offload_states``: moving weights and optimizer state to the host between steps, as RLHF trainers do."""

from __future__ import annotations

from typing import Any

__all__ = ["allow_offload_states"]


def allow_offload_states(wrapper: Any) -> None:
    """Let a stage 3 wrapper move our optimizer's state, which it does for ``FusedAdam`` only.

    It moves whatever tensors the state holds, and changes the data of the fp32 partitions in place, so that what the
    optimizer was bound to stays valid. Its check for the class stands in for that, and is met for the time of the call.

    Args:
        wrapper: The engine's optimizer. Its ``offload_states`` is replaced; wrappers without one are left alone.
    """
    original = getattr(wrapper, "offload_states", None)
    if original is None:
        return

    def offload_states(*args: Any, **kwargs: Any) -> Any:
        from deepspeed.ops.adam import fused_adam

        known = fused_adam.FusedAdam
        fused_adam.FusedAdam = type(wrapper.optimizer)
        try:
            return original(*args, **kwargs)
        finally:
            fused_adam.FusedAdam = known

    wrapper.offload_states = offload_states
