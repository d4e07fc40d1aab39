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

from deepspeed_muon.engine.zero.stages import (
    Bf16View,
    FlatView,
    Zero3View,
    Zero12View,
    ZeroView,
    view_of,
)
from deepspeed_muon.engine.zero.views import HalfView, Memory, View

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
