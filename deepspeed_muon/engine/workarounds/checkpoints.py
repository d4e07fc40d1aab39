"""What DeepSpeed loads of its own checkpoints: the wrong weights, or none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any
from unittest import mock

from deepspeed import zero
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from deepspeed_muon.engine.patching import Hook, Original, Workaround
from deepspeed_muon.engine.views import View, Zero3View, Zero12View


def load_weights(
    original: Original,
    engine: DeepSpeedEngine,
    checkpoint: Mapping[str, Any],
    *args: object,
    **kwargs: object,
) -> object:
    """Load the weights of ZeRO 1 and 2 from the state dict alone.

    It has the frozen ones too, and among them the experts of each rank.
    """
    return original({**checkpoint, FROZEN_PARAM_FRAGMENTS: None}, *args, **kwargs)


def load_module_only(original: Original, engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
    """Load with ``load_optimizer_states=False`` where the weights alone are asked for."""
    call = inspect.signature(DeepSpeedEngine.load_checkpoint).bind(engine, *args, **kwargs)
    if call.arguments.get("load_module_only", False) and not engine.load_universal_checkpoint():
        call.arguments["load_optimizer_states"] = False
    return original(*call.args[1:], **call.kwargs)


def load_tag(
    original: Original,
    engine: DeepSpeedEngine,
    load_dir: object,
    tag: str | None,
    *args: object,
    **kwargs: object,
) -> object:
    """Load, and make ZeRO 3 read the weights of the given tag if it loads them without the optimizer's state."""
    load = functools.partial(get_fp32_state_dict_from_zero_checkpoint, tag=tag)
    with mock.patch.object(engine_module, "get_fp32_state_dict_from_zero_checkpoint", load):
        return original(load_dir, tag, *args, **kwargs)


class _GatheredScalars(GatheredParameters):  # type: ignore[misc]  # DeepSpeed has no types
    """Broadcasts scalars as vectors: DeepSpeed views what it broadcasts as bytes."""

    def __exit__(self, *exc: object) -> None:
        if self.enabled:
            for param in self.params:
                param.data = param.data.reshape(-1) if param.data.dim() == 0 else param.data
        super().__exit__(*exc)


def load_scalars(original: Original, engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
    """Load the weights, scalars among them, into the gathered parameters of ZeRO 3."""
    with mock.patch.object(zero, "GatheredParameters", _GatheredScalars):
        return original(*args, **kwargs)


def _is_stage_3(view: View) -> bool:
    return isinstance(view, Zero3View)


FROZEN_EXPERTS = Workaround(
    defect="from ZeRO 2 on a load writes over the frozen weights of each rank, experts among them, what the first rank "
    "has under the same name",
    test="tests/distributed/test_experts.py::test_resume_is_bit_identical[autoep-2-settings4]",
    hooks=(
        Hook(
            DeepSpeedEngine, "load_module_state_dict", load_weights, lambda view: isinstance(view, Zero12View)
        ),
    ),
)

MODULE_ONLY = Workaround(
    defect="ZeRO 3 gathers its weights to load into them only where load_optimizer_states is False: with "
    "load_module_only alone it loads nothing and reports success",
    test="tests/distributed/test_deepspeed_features.py::test_loading_weights[3-False-options5]",
    hooks=(Hook(DeepSpeedEngine, "load_checkpoint", load_module_only, _is_stage_3),),
)

TAG_OF_LATEST = Workaround(
    defect="without the optimizer's state ZeRO 3 loads the weights of the tag that `latest` names, not the given one",
    test="tests/distributed/test_deepspeed_features.py::test_loading_weights[3-True-options4]",
    hooks=(Hook(DeepSpeedEngine, "load_checkpoint", load_tag, _is_stage_3),),
)

SCALAR_WEIGHTS = Workaround(
    defect="ZeRO 3 cannot broadcast a scalar that a load without the optimizer's state has filled",
    test="tests/distributed/test_deepspeed_features.py::test_a_scalar_is_clipped_and_loaded[3]",
    hooks=(Hook(DeepSpeedEngine, "load_module_state_dict", load_scalars, _is_stage_3),),
)
