"""Accelerate on the ranks of a pool, without a GPU."""

from __future__ import annotations

import os


def use_cpu_ranks() -> None:
    """Tell Accelerate of the gloo ranks: without a GPU it would take each of them for a run of its own."""
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def reset_hugging_face() -> None:
    """Drop what Accelerate and transformers keep in module globals, so that the pool's next call starts clean."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
