"""The only modules that read and write attributes of the wrappers that DeepSpeed puts around an optimizer.

Every class of wrapper has a view, which calls the same thing by the same name. A view refers to its wrapper strongly:
make one with :func:`~.stages.view_of` where it is needed, and do not keep it.

| ZeRO | wrapper | view | its partitions |
|---|---|---|---|
| 0, fp32 | none | ``PlainView`` | all parameters, whole on every rank |
| 0, half precision | ``FP16_UnfusedOptimizer`` | ``HalfView`` | whole fp32 copies of all parameters |
| 1 with fp32 gradients of bf16 weights | ``BF16_Optimizer`` | ``Bf16View`` | as at stages 1 and 2 |
| 1, 2 | ``DeepSpeedZeroOptimizer`` | ``Zero12View`` | equal parts of a flat buffer for each param group |
| 3 | ``DeepSpeedZeroOptimizer_Stage3`` | ``Zero3View`` | for each sub-group, a rank's parts of all parameters |

Names of methods that are replaced stand in :mod:`deepspeed_muon.engine.hooks` too.
"""
