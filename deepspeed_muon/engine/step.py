"""From a backward pass to the end of a step: the methods of ZeRO's wrappers that are replaced, each by one function.

ZeRO calls the inner step once for each param group (stages 1, 2) or sub-group (stage 3). Before that, ZeRO itself would
read all gradients twice and send a message to find those that are not finite. All gradients of the step are in the
wrapper's buffers already when its ``step`` begins. So the ranks exchange the status of all gradients there, in one
message for each set of process groups, and ZeRO's question is answered from it. The norm is computed there too and read
together with the status, so that the host waits for the device once before a step: where ZeRO looks at the norm, it is
on the CPU. With ``nonfinite_grad: error`` one more message tells all ranks of the engine about updates that were wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_muon.engine.patching import Original
from deepspeed_muon.engine.workarounds.experts import reduce_waiting_gradients
from deepspeed_muon.engine.workarounds.gradients import (
    EARLIER_BACKWARD,
    EARLIER_COUNTED_TWICE,
    STALE_GRADIENTS,
)
from deepspeed_muon.engine.workarounds.loss_scale import (
    OVERFLOW_IN_FP16_ONLY,
    SCALE_GROWS_EARLY,
    UNSCALED_LOSS,
    loss_is_not_scaled,
)
from deepspeed_muon.engine.workarounds.norm import norms_to_clip_by
from deepspeed_muon.engine.zero.views import Bf16View, View, Zero3View, Zero12View, ZeroView, view_of
from deepspeed_muon.errors import NumericalError
from deepspeed_muon.logs import listed, warn
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.transport.ranks import phase


def scales_loss(view: View) -> bool:
    """Return whether ``engine.backward`` must multiply the loss with the scale that the wrapper divides by."""
    return UNSCALED_LOSS.is_needed and loss_is_not_scaled(view)


def backward(
    original: Original, engine: DeepSpeedEngine, loss: Tensor, *args: object, **kwargs: object
) -> object:
    """Run a backward pass; return the unscaled loss."""
    view = view_of(engine.optimizer)
    if (isinstance(view, Zero12View) and EARLIER_BACKWARD.is_needed) or (
        isinstance(view, Bf16View) and EARLIER_COUNTED_TWICE.is_needed
    ):
        # DeepSpeed prepares for a backward pass once after each forward pass, but a second one is a pass of its own.
        view.begin_backward()
    if not scales_loss(view):
        return original(loss, *args, **kwargs)
    scale = float(engine.optimizer.loss_scale)
    unscaled = original(loss.float() * scale, *args, **kwargs)
    return unscaled / scale if isinstance(unscaled, Tensor) else unscaled


def end_backward(original: Original, view: ZeroView, *args: object, **kwargs: object) -> object:
    """End a backward pass so that the buffers hold the gradients of all backward passes of this step, and no others."""
    memory = view.memory
    # 1. Reduce the gradients of leaf modules, in one order on all ranks.
    if isinstance(view, Zero12View) and memory.waiting:
        reduce_waiting_gradients(view)
    # 2. Set aside what earlier backward passes of the step left: DeepSpeed replaces it.
    if isinstance(view, Zero12View) and EARLIER_BACKWARD.is_needed:
        if memory.restart:
            memory.earlier = {}
        elif not view.is_later_phase:
            memory.earlier = view.finished_gradients()
    # 3. DeepSpeed ends the backward pass.
    result = original(*args, **kwargs)
    # 4. Add up.
    if isinstance(view, Zero12View) and EARLIER_BACKWARD.is_needed:
        memory.restart = False
        view.add_gradients(memory.earlier)
    # 5. Give parameters that were not reduced a gradient of zero.
    if view.keeps_gradients and STALE_GRADIENTS.is_needed:
        view.fill_up()
    return result


def zero_grad(original: Original, view: ZeroView, *args: object, **kwargs: object) -> object:
    """Discard earlier gradients in the next backward pass, as DeepSpeed does; a step before it still uses them."""
    view.memory.restart = True
    if view.holds_sums() and not view.memory.warned:
        view.memory.warned = True
        warn(
            "deepspeed_muon: zero_grad between the micro-steps of an accumulation discards nothing at ZeRO 2, which "
            "reduces gradients in every micro-step, but the earlier micro-steps at ZeRO 0, 1 and 3. DeepSpeed clears "
            "gradients after each step: remove the call"
        )
    return original(*args, **kwargs)


def step(original: Original, view: View, *args: object, **kwargs: object) -> object:
    """Take one step of a wrapper. Must be called by all ranks of the engine.

    Raises:
        NumericalError: On all ranks, with ``nonfinite_grad`` ``error``: if DeepSpeed skipped the step and there is no
            dynamic loss scale, or if a matrix got no update in the step before.
    """
    optimizer, wrapper, memory = view.optimizer, view.wrapper, view.memory
    stops_at_nonfinite = optimizer.config.nonfinite_grad == "error"
    drops_stale_gradients = view.keeps_gradients and STALE_GRADIENTS.is_needed
    if memory.frozen:
        _warn_of_unfrozen(view)
    skipped_before = optimizer.skipped_steps
    scale = float(wrapper.loss_scale) if isinstance(view, ZeroView) else 1.0
    memory.norms, memory.partition_norms, memory.clipped_by = [], [], []
    wrapper.overflow = False
    try:
        if isinstance(view, ZeroView):
            # 1. Complete the gradients, for programs that end an accumulation in step().
            if drops_stale_gradients:
                view.fill_up()
            # 2. Exchange their status, and read it and the norms on the CPU. Gradients that a step leaves because it
            #    raises are not added to those of the next one.
            memory.restart, memory.earlier = True, {}
            with phase("norm of the gradients", view.data_parallel_group):
                norms = view.norms()
            memory.norms = optimizer.bound_steps.exchange_flags(view.gradients(), norms)
            memory.partition_norms = memory.norms[: len(view.masters)]
            if stops_at_nonfinite:
                _raise_for_failed_updates(optimizer)
        # 3. Decide about overflow: from the status, through has_overflow below.
        if isinstance(view, Zero3View) and OVERFLOW_IN_FP16_ONLY.is_needed:
            view.look_for_overflow()
        # 4. DeepSpeed unscales, clips and calls the optimizer, or skips the step.
        result = original(*args, **kwargs)
        if isinstance(view, ZeroView):
            optimizer.record_norms({key: norm / scale for key, norm in view.norms_by_algorithm().items()})
        # 5. Raise a dynamic loss scale.
        if SCALE_GROWS_EARLY.is_needed and view.dynamic_scaler() and not wrapper.overflow:
            view.grow_scale()
    finally:
        if isinstance(view, ZeroView):
            optimizer.bound_steps.forget_flags()
            memory.norms = []
            if drops_stale_gradients:
                view.forget_gradients()
        if optimizer.after_step is not None:
            # ZeRO calls the inner step several times, or never after an overflow.
            optimizer.after_step.end_step()
    # 6. Report to the engine what the optimizer skipped, so that the learning-rate schedule waits.
    if optimizer.skipped_steps > skipped_before:
        wrapper.overflow = True
    if wrapper.overflow and stops_at_nonfinite and not view.dynamic_scaler():
        raise NumericalError(
            "a gradient or the global gradient norm is not finite and optimizer.params.nonfinite_grad is 'error'; "
            "DeepSpeed left weights and optimizer state unchanged"
        )
    return result


def _warn_of_unfrozen(view: View) -> None:
    """Warn once of each parameter that was frozen when the wrapper was made and has a gradient now."""
    unfrozen = [name for name, param in view.memory.frozen if param.requires_grad and param.grad is not None]
    if not unfrozen:
        return
    view.memory.frozen = [(name, param) for name, param in view.memory.frozen if name not in unfrozen]
    warn(
        "deepspeed_muon: parameters were unfrozen after deepspeed.initialize and do not train: %s. The wrapper "
        "that deepspeed.initialize made (%s) has copies of what was trained then. Unfreeze them before "
        "deepspeed.initialize, or make a new engine; at ZeRO 0 in fp32 they would train",
        listed(unfrozen, 5),
        type(view.wrapper).__name__,
    )


def _raise_for_failed_updates(optimizer: Muon) -> None:
    """Raise on all ranks for matrices that got no update in the last step, before this one changes any param group."""
    failed = optimizer.bound_steps.take_failures_of_last_step()
    (on_some_rank,) = optimizer.ranks.all_reduce([bool(failed)], "max", purpose="report of failed updates")
    if on_some_rank:
        optimizer.report_failed(failed or ["a matrix of other ranks"], "in the step before")


def has_overflow(original: Original, view: ZeroView, *args: object, **kwargs: object) -> bool:
    """Answer from the exchanged status whether any rank's gradients overflow, where all groups have the same ranks."""
    nonfinite = view.optimizer.bound_steps.any_nonfinite(view.data_parallel_group)
    return bool(original(*args, **kwargs)) if nonfinite is None else view.is_true_of_any(nonfinite)


def norm_groups(original: Original, view: Zero3View, *args: object, **kwargs: object) -> object:
    """Return the norms of ZeRO 3's sub-groups, on the CPU where they were read with the status."""
    return view.memory.norms or original(*args, **kwargs)


def global_norm(original: Original, view: Zero12View, *args: object, **kwargs: object) -> object:
    """Return the norm of ZeRO 1 and 2, on the CPU where it was read with the status."""
    return view.memory.norms[-1] if view.memory.norms else original(*args, **kwargs)


def partition_norm(original: Original, view: ZeroView, *args: object, **kwargs: object) -> Tensor:
    """Let DeepSpeed compute the norm of the next partition's gradients, and record it."""
    norm: Tensor = original(*args, **kwargs)
    view.memory.partition_norms.append(norm)
    return norm


def clip_partition(
    original: Original,
    view: Zero12View,
    grad_groups_flat: Sequence[Tensor],
    total_norm: Tensor,
    *args: object,
    **kwargs: object,
) -> None:
    """Unscale a partition's gradient at ZeRO 1 and 2, and clip it as ``clip`` says."""
    index = view.index_of(grad_groups_flat[0])
    with _norm_to_clip_by(view, index, total_norm) as norm:
        original(grad_groups_flat, norm, *args, **kwargs)


def clip_sub_group(
    original: Original,
    view: Zero3View,
    sub_group_id: int,
    total_norm: Tensor,
    *args: object,
    **kwargs: object,
) -> None:
    """Unscale the gradient of one of ZeRO 3's sub-groups, and clip it as ``clip`` says."""
    with _norm_to_clip_by(view, sub_group_id, total_norm) as norm:
        original(sub_group_id, norm, *args, **kwargs)


@contextlib.contextmanager
def _norm_to_clip_by(view: ZeroView, index: int, total_norm: Tensor) -> Iterator[Tensor]:
    """Yield the norm by which DeepSpeed clips a partition in this context, if ``clip`` lets it clip that one."""
    memory = view.memory
    if not memory.clipped_by:
        norms = norms_to_clip_by(view.optimizer.config.clip, total_norm, view.norms_by_algorithm())
        memory.clipped_by = [norms.get(algorithm) for algorithm in view.algorithms()]
    norm = memory.clipped_by[index]
    with view.without_clipping() if norm is None else contextlib.nullcontext():
        yield total_norm if norm is None else norm
