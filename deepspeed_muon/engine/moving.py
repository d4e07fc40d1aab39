"""``engine.offload_states``: moving weights and optimizer state to the host between steps, as RLHF trainers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.ops.adam import fused_adam

__all__ = ["can_move", "offload_states"]


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
    known = fused_adam.FusedAdam
    fused_adam.FusedAdam = type(wrapper.optimizer)
    try:
        return original(*args, **kwargs)
    finally:
        fused_adam.FusedAdam = known
