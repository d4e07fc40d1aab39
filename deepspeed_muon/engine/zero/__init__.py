"""The only modules that read and write attributes of the wrappers that DeepSpeed puts around an optimizer.

Every class of wrapper has a view, which calls the same thing by the same name. A view refers to its wrapper strongly:
make one with :func:`view_of` where it is needed, and do not keep it.

| ZeRO | wrapper | view | its partitions |
|---|---|---|---|
| 0, fp32 | none | :class:`PlainView` | all parameters, whole on every rank |
| 0, half precision | ``FP16_UnfusedOptimizer`` | :class:`HalfView` | whole fp32 copies of all parameters |
| 1 with fp32 gradients of bf16 weights | ``BF16_Optimizer`` | :class:`Bf16View` | as at stages 1 and 2 |
| 1, 2 | ``DeepSpeedZeroOptimizer`` | :class:`Zero12View` | equal parts of a flat buffer for each param group |
| 3 | ``DeepSpeedZeroOptimizer_Stage3`` | :class:`Zero3View` | for each sub-group, a rank's parts of all parameters |

Names of methods that are replaced stand in :mod:`deepspeed_muon.engine.engine_hooks` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_muon.engine.zero.stages import Bf16View, FlatView, Zero3View, Zero12View
from deepspeed_muon.engine.zero.views import HalfView, Memory, PlainView, View, ZeroView
from deepspeed_muon.errors import UnsupportedConfigError
from deepspeed_muon.optimizer import Muon

__all__ = [
    "Bf16View",
    "FlatView",
    "HalfView",
    "Memory",
    "View",
    "Zero3View",
    "Zero12View",
    "ZeroView",
    "view_of",
]

_VIEWS: tuple[tuple[type, Callable[[Any], View]], ...] = (
    (DeepSpeedZeroOptimizer_Stage3, Zero3View),
    (DeepSpeedZeroOptimizer, Zero12View),
    (BF16_Optimizer, Bf16View),
    (FP16_UnfusedOptimizer, HalfView),
    (Muon, PlainView),
)


def view_of(wrapper: Any) -> View:
    """Return the view of what an engine has as its ``optimizer``.

    Raises:
        UnsupportedConfigError: If it is of an unknown class.
    """
    for kind, view in _VIEWS:
        if isinstance(wrapper, kind):
            return view(wrapper)
    raise UnsupportedConfigError(
        f"DeepSpeed wrapped the optimizer in {type(wrapper).__name__}, whose layout is not known here; "
        f"known: ZeRO stages 0 to 3, BF16_Optimizer and FP16_UnfusedOptimizer"
    )
