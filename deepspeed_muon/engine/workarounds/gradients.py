"""Gradients of another step, or of some of the backward passes of a step: ZeRO 1, 2 and 3.

**Parameters that get no gradient in a step.** ZeRO 3, and ZeRO 1 and 2 with an offloaded optimizer, keep reduced
gradients in buffers that outlive the step, and write only those that a backward pass reduces. So DeepSpeed goes wrong
in two ways:

- A parameter without a gradient is updated with its last one in every step. That gradient is also part of the norm, and
  if it is infinite, all later steps overflow.
- In an accumulation DeepSpeed copies gradients in the first micro-step and adds them in the later ones. If the first
  gradient of a parameter comes later, it is added to that of the step before. With offload, if its last gradient comes
  before the last micro-step, the sum never reaches the optimizer.

With the workaround the first gradient *of a parameter* in a step is copied and the later ones are added. A parameter
that the last backward pass did not reduce gets a gradient of zero, through the same functions as DeepSpeed's own
gradients, so that all readers of the buffers (overflow check, norm, clipping, ``safe_get_full_grad``) find the right
numbers. Nothing is communicated: the ranks that reduce a parameter together all know whether they did.

**Several backward passes in the last micro-step**, such as one for each of two losses. ZeRO 1 and 2 replace the
gradients of the earlier ones. With the workaround they are added up, as at stages 0 and 3 and in torch.
``BF16_Optimizer`` (ZeRO 1 in bf16 with fp32 sums) adds the weights' gradients to its sums after a backward pass, and
clears them at the first gradient of each forward pass's outputs. So it counts the first of two backward passes after
one forward pass twice, and loses what a forward pass computed (``TiledFusedLogitsLoss``), or the backward pass through
another forward pass's outputs. With the workaround it clears what the sums have, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_muon.engine.patching import Hook, Original, Workaround
from deepspeed_muon.engine.views import Bf16View, View, Zero3View, Zero12View, ZeroView, view_of


def partition_grads(
    original: Original,
    view: Zero3View,
    params_to_release: Sequence[Tensor],
    grad_partitions: Sequence[Tensor],
    *args: object,
    **kwargs: object,
) -> list[Tensor]:
    """Copy first gradients of the step into ZeRO 3's buffer, and add later ones."""
    if view.memory.restart:
        view.memory.restart = False
        view.forget_gradients()
    # DeepSpeed takes a list of parameters: one call for the first gradients, one for later ones.
    calls: dict[bool, tuple[list[Tensor], list[Tensor]]] = {}
    for param, partition in zip(params_to_release, grad_partitions, strict=True):
        params, partitions = calls.setdefault(_is_first(view, param), ([], []))
        params.append(param)
        partitions.append(partition)
    buffers: list[Tensor] = []
    for is_first, call in calls.items():
        with view.in_micro_step(first=is_first):
            buffers += original(*call, *args, **kwargs)
    return buffers


def copy_grads_in_partition(
    original: Original, view: Zero12View, param: Tensor, *args: object, **kwargs: object
) -> object:
    """Copy the first gradient of ``param`` in the step, and add later ones (ZeRO 1 and 2 with offload).

    They are also added to the sum that an earlier backward pass has already written to the master's gradient.
    """
    delivered = view.delivered(param) if EARLIER_BACKWARD.is_needed else None
    is_first = _is_first(view, param)
    if delivered is None:
        with view.in_micro_step(first=is_first):
            return original(param, *args, **kwargs)
    # The original overwrites the master's gradient with that of this backward pass alone.
    earlier = delivered.clone()
    with view.in_micro_step(first=True):
        result = original(param, *args, **kwargs)
    if not view.memory.restart:
        view.add_delivered(param, delivered, earlier)
    return result


def _is_first(view: View, param: Tensor) -> bool:
    """Return whether this is the first gradient of ``param`` in the step, and record that there was one."""
    reduced = view.memory.reduced
    is_first = id(param) not in reduced
    reduced.add(id(param))
    return is_first


def reduce_independent_gradient(
    original: Original, view: Zero12View, param: Tensor, *args: object, **kwargs: object
) -> object:
    """Record that ZeRO 1 reduces the gradient of ``param`` by itself."""
    view.memory.queued.add(id(param))
    return original(param, *args, **kwargs)


def reduce_gradients(
    original: Original, view: Zero12View, pipeline_parallel: bool = False, *args: object, **kwargs: object
) -> object:
    """Reduce what the last micro-step of an accumulation did not add to, then finish the reduction."""
    queued = view.memory.queued | view.memory.waiting
    # A pipeline fills its buckets in the call below, with each layer's gradient over all micro-batches.
    for group_number, params in enumerate(() if pipeline_parallel else view.params):
        for param in params:
            if id(param) not in queued and view.has_gradient(param):
                view.reduce(param, group_number)
    view.memory.queued.clear()
    return original(pipeline_parallel, *args, **kwargs)


def begin_backward(original: Original, engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
    """Prepare for a backward pass; DeepSpeed does so in forward passes only, but several may follow one of these."""
    view = view_of(engine.optimizer)
    assert isinstance(view, (Zero12View, Bf16View))
    view.begin_backward()
    try:
        return original(*args, **kwargs)
    except BaseException:
        view.memory.has_stale_gradients = True  # those of a pass that fails do not count
        raise


def begin_gradients(original: Original, view: Bf16View, *args: object, **kwargs: object) -> None:
    """Clear only stale gradients, where DeepSpeed clears all."""
    view.begin_backward()


def count_gradients(original: Original, view: Bf16View, *args: object, **kwargs: object) -> object:
    """Add the weights' gradients to the sums, and record that they are stale from then on."""
    view.memory.has_stale_gradients = True
    return original(*args, **kwargs)


def add_earlier(original: Original, view: Zero12View, *args: object, **kwargs: object) -> object:
    """Set aside what earlier backward passes of the step left, which DeepSpeed replaces, and add it to the result."""
    memory = view.memory
    if memory.restart:
        memory.earlier = {}
    elif not view.is_later_phase:
        memory.earlier = view.finished_gradients()
    result = original(*args, **kwargs)
    memory.restart = False
    view.add_gradients(memory.earlier)
    return result


def fill_up(original: Original, view: ZeroView, *args: object, **kwargs: object) -> object:
    """End a backward pass, and give parameters that were not reduced a gradient of zero."""
    result = original(*args, **kwargs)
    view.fill_up()
    return result


def zero_grad(original: Original, view: ZeroView, *args: object, **kwargs: object) -> object:
    """Discard earlier gradients in the next backward pass, as DeepSpeed does; a step before that still uses them."""
    view.memory.restart = True
    return original(*args, **kwargs)


def take_step(original: Original, engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
    """Take a step, and forget its gradients."""
    view = view_of(engine.optimizer)
    assert isinstance(view, ZeroView)
    drops_gradients = view.keeps_gradients and STALE_GRADIENTS.is_needed
    if drops_gradients:
        view.fill_up()  # for programs that end an accumulation in step()
    # Gradients that a step leaves because it raises are not added to those of the next one.
    view.memory.restart, view.memory.earlier = True, {}
    try:
        return original(*args, **kwargs)
    finally:
        if drops_gradients:
            view.forget_gradients()


# Shared by the next two workarounds.
_BETWEEN_STEPS = (
    Hook((ZeroView,), "zero_grad", zero_grad),
    Hook(DeepSpeedEngine, "_take_model_step", take_step, lambda view: isinstance(view, ZeroView)),
)

EARLIER_BACKWARD = Workaround(
    defect="ZeRO 1 and 2 use the last one of several backward passes before a step, and take a second backward pass "
    "after one forward pass for a later phase of the first",
    test="tests/distributed/test_several_backward.py::test_gradients_are_added_up[2-forward of each]",
    hooks=(
        Hook(DeepSpeedEngine, "backward", begin_backward, lambda view: isinstance(view, Zero12View)),
        Hook((Zero12View,), "independent_gradient_partition_epilogue", add_earlier),
        *_BETWEEN_STEPS,
    ),
)

STALE_GRADIENTS = Workaround(
    defect="ZeRO 3, and ZeRO 1 and 2 with offload, update a parameter that gets no gradient with its last one, and add "
    "the first gradient of a parameter to that of the step before if it comes in a later micro-step",
    test="tests/distributed/test_idle_parameters.py::test_idle_parameters[3-micro]",
    hooks=(
        Hook((Zero3View,), "partition_grads", partition_grads),
        Hook(
            (Zero12View,), "copy_grads_in_partition", copy_grads_in_partition, attrgetter("keeps_gradients")
        ),
        Hook((ZeroView,), "independent_gradient_partition_epilogue", fill_up, attrgetter("keeps_gradients")),
        *_BETWEEN_STEPS,
    ),
)

CLEARED_BY_FORWARD_PASS = Workaround(
    defect="BF16_Optimizer counts the gradient of the first of two backward passes after one forward pass twice, and "
    "loses gradients of a forward pass, or of one of several whose outputs one backward pass reaches",
    test="tests/distributed/test_several_backward.py::test_gradients_are_added_up[1-bf16-fp32-sums-one forward]",
    hooks=(
        *(
            Hook(DeepSpeedEngine, call, begin_backward, lambda view: isinstance(view, Bf16View))
            for call in ("forward", "backward")
        ),
        Hook((Bf16View,), "backward_prologue", begin_gradients),
        Hook((Bf16View,), "backward_epilogue", count_gradients),
    ),
)

LAST_MICRO_STEP_ONLY = Workaround(
    defect="ZeRO 1 with overlap_comm does not reduce gradients that the last micro-step does not add to",
    test="tests/distributed/test_idle_parameters.py::test_idle_parameters[1-overlap-round-robin-micro]",
    hooks=(
        Hook(
            (Zero12View,), "reduce_independent_p_g_buckets_and_remove_grads", reduce_independent_gradient,
            attrgetter("reduces_last_only"),
        ),
        Hook((Zero12View,), "reduce_gradients", reduce_gradients, attrgetter("reduces_last_only")),
    ),
)  # fmt: skip
