"""What is changed in one engine whose optimizer is ours, and in the wrapper around it: four tables.

:data:`ADJUSTMENTS` are made once. Each row of :data:`MENDS` and :data:`ENGINE_HOOKS` replaces a method of that one
object. ``step`` of a wrapper is replaced once, and :data:`STEP_DUTIES` says what happens before and after it. Nothing
is undone, because the changes disappear with the engine.

:data:`MENDS`, and rows of other tables that say so, mend defects of DeepSpeed, which every optimizer has; the others
are what our optimizer adds.

Changed elsewhere, because there is no wrapper yet or for the length of one call:

- the engine's ``zero_force_ds_cpu_optimizer``, the wrapper's ``backup_optimizer``, and the classes that ZeRO's modules
  compare an optimizer with, ``DeepSpeedCPUAdam`` and ``FusedAdam``: :mod:`deepspeed_muon.engine.offload`;
- inputs of leaf modules without a gradient, at which ZeRO 3 ends a backward pass before it has begun:
  :func:`deepspeed_muon.engine.gradients.prepare_inputs`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from deepspeed_muon.engine import checkpointing, gradients, offload, running, scaling
from deepspeed_muon.engine.zero import Bf16View, HalfView, Memory, View, Zero3View, view_of


def _is_wrapped(view: View) -> bool:
    return view.wrapper is not view.optimizer


def _is_half(view: View) -> bool:
    return isinstance(view, HalfView)


def _is_zero3(view: View) -> bool:
    return isinstance(view, Zero3View)


@dataclass(frozen=True, slots=True)
class EngineHook:
    """A method of an engine or of its wrapper that is replaced.

    Attributes:
        owner: Whose method.
        attribute: Its name.
        function: Is called instead, with the original, the engine or the view of the wrapper, and the arguments of the
            call.
        applies: Whether an engine with such a wrapper needs it; ``None`` if every engine does.
    """

    owner: Literal["engine", "wrapper"]
    attribute: str
    function: Callable[..., Any]
    applies: Callable[[View], bool] | None = None


@dataclass(frozen=True, slots=True)
class StepDuty:
    """Something to do before and after a wrapper's step.

    Attributes:
        around: Returns a context manager for the view of a wrapper, in which the step runs.
        applies: Whether an engine with such a wrapper needs it.
    """

    around: Callable[[Any], contextlib.AbstractContextManager[None]]
    applies: Callable[[View], bool]


@contextlib.contextmanager
def _forget_logits(view: View) -> Iterator[None]:
    """Clear the attention logits after a step."""
    try:
        yield
    finally:
        assert view.optimizer.qk_clip is not None
        view.optimizer.qk_clip.clear()


def _step(original: Callable[..., Any], view: View, *args: Any, **kwargs: Any) -> Any:
    """Take the wrapper's step, with its duties around it."""
    with contextlib.ExitStack() as duties:
        for duty in view.memory.duties:
            duties.enter_context(duty(view))
        return original(*args, **kwargs)


def _release_destroyed(original: Callable[..., Any], view: Zero3View) -> None:
    """Destroy the wrapper, then drop what refers to each engine of stage 3 for the length of the program."""
    module = view.module
    original()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [each for each in stack if each is not module]
    cached = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    for cell in cached.__closure__ or ():
        cell.cell_contents.cache_clear()


# Above each row of all tables: what would be wrong without it.
ADJUSTMENTS = (
    # A mend: with torch_autocast in fp16 the norm is that of scaled gradients, and once it is not finite every later
    # step is skipped. An engine made after such a one would not use its own loss scale.
    scaling.use_deepspeed_scaler,
    # ZeRO 1 and 2 in bf16 would look for no gradients that are not finite, and update some partitions of a step only.
    scaling.look_for_overflow,
)

# The first duty begins first and ends last.
STEP_DUTIES = (
    # With nonfinite_grad 'error' ZeRO would skip a step by itself and tell nobody.
    StepDuty(scaling.raise_on_overflow, scaling.overflow_is_error),
    # ZeRO calls our step several times, or never if the gradients overflowed; the logits are those of one step.
    StepDuty(_forget_logits, lambda view: view.optimizer.qk_clip is not None),
    # A mend: stage 0 divides by the scale of the next step when it has just grown, and reports the norm of scaled
    # gradients.
    StepDuty(scaling.keep_applied_scale, _is_half),
    # The wrapper does not know that our optimizer skipped the step, so the learning-rate schedule would go on.
    StepDuty(scaling.report_skipped_step, _is_wrapped),
    # A mend: gradients outlive the step in buffers, and a parameter that gets none is updated with its last one.
    StepDuty(gradients.only_gradients_of_the_step, lambda view: view.keeps_gradients),
    # The ranks would exchange flags once for each group, besides ZeRO's overflow check. After the row above: the
    # gradients must be complete.
    StepDuty(gradients.exchange_flags_first, lambda view: view.holds_gradients),
    # A mend: ZeRO updates the scale first and unscales by the new one.
    StepDuty(scaling.grow_after_step, lambda view: view.scale_may_grow),
)

MENDS = (
    # ZeRO lets the loss scale grow before the step as well; a duty lets it grow afterwards.
    EngineHook("wrapper", "_update_scale", scaling.shrink_scale, lambda view: view.scale_may_grow),
    # ZeRO 3 adds the first gradient of a parameter to that of the last step if it comes in a later micro-step.
    EngineHook("wrapper", "partition_grads", gradients.partition_grads, _is_zero3),
    # ZeRO 3 would add to gradients that the program has thrown away.
    EngineHook("wrapper", "zero_grad", gradients.zero_grad, _is_zero3),
    # ZeRO 1 and 2 with offload add the first gradient of a parameter to that of the last step, as ZeRO 3 does.
    EngineHook(
        "wrapper",
        "copy_grads_in_partition",
        gradients.copy_grads_in_partition,
        lambda view: view.keeps_gradients and not _is_zero3(view),
    ),
    # What a backward pass did not reduce must be zero before anybody reads it.
    EngineHook(
        "wrapper",
        "independent_gradient_partition_epilogue",
        gradients.gradient_partition_epilogue,
        lambda view: view.keeps_gradients,
    ),
    # ZeRO 1 and 2 reduce gradients of different experts with each other where ranks run different ones.
    EngineHook(
        "wrapper",
        "reduce_ready_partitions_and_remove_grads",
        gradients.reduce_ready_partitions,
        lambda view: bool(view.memory and view.memory.waiting),
    ),
    # The gradients that the row above lets wait would never be reduced. After the row for the same method above: zeros
    # must be filled in before DeepSpeed ends the backward pass.
    EngineHook(
        "wrapper",
        "independent_gradient_partition_epilogue",
        gradients.reduce_waiting_gradients,
        lambda view: bool(view.memory and view.memory.waiting),
    ),
    # Nobody would know which gradients ZeRO 1 reduces by itself; the next row needs it.
    EngineHook(
        "wrapper",
        "reduce_independent_p_g_buckets_and_remove_grads",
        gradients.reduce_independent_gradient,
        lambda view: view.reduces_last_only,
    ),
    # ZeRO 1 with overlap_comm leaves out what the last micro-step did not add to.
    EngineHook(
        "wrapper",
        "reduce_gradients",
        gradients.reduce_gradients,
        lambda view: view.reduces_last_only,
    ),
    # Stage 0 in half precision divides by a scale that was not applied, and its norm leaves experts out.
    EngineHook("wrapper", "unscale_and_clip_grads", scaling.unscale_and_clip_grads, _is_half),
    # Stage 0 in half precision divides by a scale that nobody multiplied the loss with.
    EngineHook("engine", "backward", scaling.backward, scaling.loss_is_not_scaled),
    # The same, for a program that calls backward of the loss itself.
    EngineHook("engine", "scale", scaling.scale, scaling.loss_is_not_scaled),
    # BF16_Optimizer leaves parameters out of norm and clipping that this rank did not use and others did.
    EngineHook(
        "wrapper",
        "get_grads_for_norm",
        scaling.grads_for_norm,
        lambda view: isinstance(view, Bf16View),
    ),
    # The plain engine throws the norm away, and counts one stage of a pipeline and one rank's experts.
    EngineHook(
        "engine",
        "clip_fp32_gradients",
        scaling.clip_fp32_gradients,
        lambda view: not _is_wrapped(view),
    ),
    # An engine of stage 3 stays in memory after engine.destroy(), with all that it holds.
    EngineHook("wrapper", "destroy", _release_destroyed, _is_zero3),
)

ENGINE_HOOKS = (
    # The duties would not be done.
    EngineHook("wrapper", "step", _step, _is_wrapped),
    # ZeRO would read all gradients twice more and send a message, to learn what the flags say.
    EngineHook("wrapper", "has_overflow", gradients.has_overflow, lambda view: view.holds_gradients),
    # Stage 3 moves the state of FusedAdam alone, and the exchange would keep its buffers on the device.
    EngineHook(
        "wrapper",
        "offload_states",
        offload.offload_states,
        lambda view: hasattr(view.wrapper, "offload_states"),
    ),
    # DeepSpeed's loader knows Adam's state only, and reads parameters from places that can be wrong.
    EngineHook(
        "wrapper",
        "_load_universal_checkpoint",
        checkpointing.load_universal_checkpoint,
        lambda view: hasattr(view.wrapper, "_load_universal_checkpoint"),
    ),
    # Nobody would sample a whole step, bound the wait for other ranks, or find steps that ended too early.
    EngineHook("engine", "_take_model_step", running.take_model_step),
    # consolidate_on_save would write nothing, and nobody could tell the files of two saves of one step apart.
    EngineHook("engine", "save_checkpoint", checkpointing.save_checkpoint),
    # Files of two saves would be loaded together. Where another optimizer, stage, number of ranks, order or other
    # routes saved, DeepSpeed would fill matrices with each other's values, or fail on some ranks without the cause.
    # And it changes counters and schedule before a universal checkpoint can be refused.
    EngineHook("engine", "load_checkpoint", checkpointing.load_checkpoint),
)


def hook_engine(engine: Any) -> None:
    """Change what the tables say of one engine.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound. Mutated, and so is its wrapper.
    """
    for adjust in ADJUSTMENTS:
        adjust(engine)
    wrapper = engine.optimizer
    view = view_of(wrapper)
    if _is_wrapped(view):
        waiting = gradients.waiting_parameters(view, engine.module)
        wrapper._deepspeed_muon_memory = view.memory = Memory(weakref.ref(engine), waiting=waiting)
        view.memory.duties = [duty.around for duty in STEP_DUTIES if duty.applies(view)]
    # All conditions are asked before anything is replaced.
    needed = [hook for hook in (*MENDS, *ENGINE_HOOKS) if hook.applies is None or hook.applies(view)]
    for hook in needed:
        _replace_method(engine if hook.owner == "engine" else wrapper, hook)


def _replace_method(owner: Any, hook: EngineHook) -> None:
    """Let a call of the hook's method call its function.

    The replacement refers to its owner weakly. A bound method would make a cycle, and the owner's memory on the device
    would wait for the garbage collector.
    """
    reference, function, has_view = weakref.ref(owner), hook.function, hook.owner == "wrapper"
    method = getattr(owner, hook.attribute)
    is_own = isinstance(method, MethodType) and method.__self__ is owner
    plain: Callable[..., Any] = method.__func__ if is_own else method

    def replacement(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        assert owner is not None
        original = MethodType(plain, owner) if is_own else plain
        return function(original, view_of(owner) if has_view else owner, *args, **kwargs)

    replacement.__name__, replacement.__doc__ = hook.attribute, method.__doc__
    setattr(owner, hook.attribute, replacement)
