"""Accelerate on the ranks of a pool, without a GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return the mark of tests for which packages of the extra ``hf`` must be installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}: the extra 'hf'")


NEEDS_ACCELERATE = [
    needs("transformers", "accelerate"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate would take the GPU, DeepSpeed the CPU"),
]


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
