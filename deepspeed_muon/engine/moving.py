"""``engine.offload_states``: moving weights and optimizer state to the host between steps, as RLHF trainers do."""

from __future__ import annotations

from typing import Any

__all__ = ["allow_offload_states"]


def allow_offload_states(wrapper: Any) -> None:
    """Let a wrapper move our optimizer's state, and have it give up its working memory with that.

    Stage 3 moves the state of ``FusedAdam`` only. It moves whatever tensors the state holds, and changes the data of
    the fp32 partitions in place, so that what the optimizer was bound to stays valid. Its check for the class stands in
    for that, and is met for the time of the call.

    Args:
        wrapper: The engine's optimizer. Its ``offload_states`` is replaced; wrappers without one are left alone.
    """
    original = getattr(wrapper, "offload_states", None)
    if original is None:
        return

    def offload_states(*args: Any, **kwargs: Any) -> Any:
        from deepspeed.ops.adam import fused_adam

        # Before the original, which ends with handing what is free back to the device.
        wrapper.optimizer.release_memory()
        known = fused_adam.FusedAdam
        fused_adam.FusedAdam = type(wrapper.optimizer)
        try:
            return original(*args, **kwargs)
        finally:
            fused_adam.FusedAdam = known

    wrapper.offload_states = offload_states
