"""What is changed in one engine whose optimizer is ours, and in the wrapper around it: one table.

Each row replaces a method of that one object. Nothing is undone, because the changes disappear with the engine.
``step`` of a wrapper is replaced once, and :data:`STEP_DUTIES` says what happens before and after it.

Attributes that are no methods are set elsewhere:

- the wrapper's loss scaler and ``check_grad_overflow``: :mod:`deepspeed_muon.engine.loss_scale`;
- the wrapper's ``backup_optimizer`` and, before there is a wrapper, the engine's ``zero_force_ds_cpu_optimizer``:
  :mod:`deepspeed_muon.engine.offload`;
- during one call, the classes that ZeRO's modules compare an optimizer with, ``DeepSpeedCPUAdam`` and
  ``FusedAdam``: :mod:`deepspeed_muon.engine.offload`.
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

from deepspeed_muon.engine import (
    checkpointing,
    gradient_flags,
    idle,
    leaf_modules,
    loss_scale,
    offload,
    running,
    stage0,
)
from deepspeed_muon.engine.memory import Memory, memory_of

__all__ = ["ENGINE_HOOKS", "STEP_DUTIES", "EngineHook", "StepDuty", "hook_engine"]


@dataclass(frozen=True, slots=True)
class EngineHook:
    """A method of an engine or of its wrapper that is replaced.

    Attributes:
        owner: Whose method.
        attribute: Its name.
        function: Is called instead, with the original, the owner, and the arguments of the call.
        applies: Whether an engine needs it.
    """

    owner: Literal["engine", "wrapper"]
    attribute: str
    function: Callable[..., Any]
    applies: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class StepDuty:
    """Something to do before and after a wrapper's step.

    Attributes:
        around: Returns a context manager for a wrapper, in which the step runs.
        applies: Whether an engine needs it.
    """

    around: Callable[[Any], contextlib.AbstractContextManager[None]]
    applies: Callable[[Any], bool]


def _is_any(_: Any) -> bool:
    return True


def _is_wrapped(engine: Any) -> bool:
    return not stage0.is_plain(engine)


def _clips_attention(engine: Any) -> bool:
    return _is_wrapped(engine) and engine.basic_optimizer.qk_clip is not None


@contextlib.contextmanager
def _forget_logits(wrapper: Any) -> Iterator[None]:
    """Clear the attention logits after a step."""
    try:
        yield
    finally:
        wrapper.optimizer.qk_clip.clear()


def _release_destroyed(original: Callable[..., Any], wrapper: Any) -> None:
    """Destroy the wrapper, then drop what refers to each engine of stage 3 for the length of the program."""
    module = wrapper.parameter_offload.module
    original()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [each for each in stack if each is not module]
    cached = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    for cell in cached.__closure__ or ():
        cell.cell_contents.cache_clear()


# Above each row, here and in ENGINE_HOOKS: what would be wrong without it. The first duty begins first and ends last.
STEP_DUTIES = (
    # With nonfinite_grad 'error' ZeRO would skip a step by itself and tell nobody.
    StepDuty(loss_scale.raise_on_overflow, loss_scale.overflow_is_error),
    # ZeRO calls our step several times, or never if the gradients overflowed; the logits are those of one step.
    StepDuty(_forget_logits, _clips_attention),
    # Stage 0 divides by the scale of the next step when it has just grown, and reports the norm of scaled gradients.
    StepDuty(stage0.keep_applied_scale, stage0.is_half),
    # The wrapper does not know that our optimizer skipped the step, so the learning-rate schedule would go on.
    StepDuty(loss_scale.report_skipped_step, _is_wrapped),
    # Gradients outlive the step in buffers: a parameter that gets none would be updated with its last one.
    StepDuty(idle.only_gradients_of_the_step, idle.keeps_gradients),
    # The ranks would exchange flags once for each group, besides ZeRO's overflow check. After the row above: the
    # gradients must be complete.
    StepDuty(gradient_flags.exchange_first, gradient_flags.holds_gradients),
    # ZeRO updates the scale first and unscales by the new one.
    StepDuty(loss_scale.grow_after_step, loss_scale.scale_may_grow),
)


def _step(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the wrapper's step, with its duties around it."""
    with contextlib.ExitStack() as duties:
        for duty in memory_of(wrapper).duties:
            duties.enter_context(duty(wrapper))
        return original(*args, **kwargs)


ENGINE_HOOKS = (
    # The duties would not be done.
    EngineHook("wrapper", "step", _step, _is_wrapped),
    # ZeRO would let the loss scale grow before the step as well; a duty lets it grow afterwards.
    EngineHook("wrapper", "_update_scale", loss_scale.shrink_scale, loss_scale.scale_may_grow),
    # ZeRO would read all gradients twice more and send a message, to learn what the flags say.
    EngineHook("wrapper", "has_overflow", gradient_flags.has_overflow, gradient_flags.holds_gradients),
    # ZeRO 3 adds the first gradient of a parameter to that of the last step if it comes in a later micro-step.
    EngineHook("wrapper", "partition_grads", idle.partition_grads, idle.divides_gradients),
    # ZeRO 3 would add to gradients that the program has thrown away.
    EngineHook("wrapper", "zero_grad", idle.zero_grad, idle.divides_gradients),
    # ZeRO 1 and 2 with offload add the first gradient of a parameter to that of the last step, as ZeRO 3 does.
    EngineHook(
        "wrapper", "copy_grads_in_partition", idle.copy_grads_in_partition, idle.keeps_offloaded_gradients
    ),
    # What a backward pass did not reduce must be zero before anybody reads it.
    EngineHook(
        "wrapper",
        "independent_gradient_partition_epilogue",
        idle.gradient_partition_epilogue,
        idle.keeps_gradients,
    ),
    # ZeRO 1 and 2 would reduce gradients of different experts with each other where ranks run different ones.
    EngineHook(
        "wrapper",
        "reduce_ready_partitions_and_remove_grads",
        leaf_modules.reduce_ready_partitions,
        leaf_modules.has_waiting_gradients,
    ),
    # The gradients that the row above lets wait would never be reduced. After the row for the same method above: zeros
    # must be filled in before DeepSpeed ends the backward pass.
    EngineHook(
        "wrapper",
        "independent_gradient_partition_epilogue",
        leaf_modules.reduce_waiting_gradients,
        leaf_modules.has_waiting_gradients,
    ),
    # Nobody would know which gradients ZeRO 1 reduces by itself; the next row needs it.
    EngineHook(
        "wrapper",
        "reduce_independent_p_g_buckets_and_remove_grads",
        idle.reduce_independent_gradient,
        idle.reduces_last_gradients_only,
    ),
    # ZeRO 1 with overlap_comm leaves out what the last micro-step did not add to.
    EngineHook("wrapper", "reduce_gradients", idle.reduce_gradients, idle.reduces_last_gradients_only),
    # Stage 0 in half precision must divide by the scale that was applied, and its norm leaves experts out.
    EngineHook("wrapper", "unscale_and_clip_grads", stage0.unscale_and_clip_grads, stage0.is_half),
    # Stage 0 in half precision divides by a scale that nobody multiplied the loss with.
    EngineHook("engine", "backward", stage0.backward, stage0.loss_is_not_scaled),
    # The same, for a program that calls backward of the loss itself.
    EngineHook("engine", "scale", stage0.scale, stage0.loss_is_not_scaled),
    # The plain engine throws the norm away, and counts one stage of a pipeline and one rank's experts.
    EngineHook("engine", "clip_fp32_gradients", stage0.clip_fp32_gradients, stage0.is_plain),
    # An engine of stage 3 would stay in memory after engine.destroy(), with all that it holds.
    EngineHook("wrapper", "destroy", _release_destroyed, idle.divides_gradients),
    # Stage 3 moves the state of FusedAdam alone, and the exchange would keep its buffers on the device.
    EngineHook("wrapper", "offload_states", offload.offload_states, offload.can_move),
    # DeepSpeed's loader knows Adam's state only, and reads parameters from places that can be wrong.
    EngineHook(
        "wrapper",
        "_load_universal_checkpoint",
        checkpointing.load_universal_checkpoint,
        checkpointing.loads_universal,
    ),
    # consolidate_on_save would write nothing, and nobody could tell the files of two saves of one step apart.
    EngineHook("engine", "save_checkpoint", running.save_checkpoint, _is_any),
    # Files of two saves would be loaded together. Where another optimizer, stage, number of ranks, order or other
    # routes saved, DeepSpeed would fill matrices with each other's values, or fail on some ranks without the cause.
    # And it changes counters and schedule before a universal checkpoint can be refused.
    EngineHook("engine", "load_checkpoint", checkpointing.load_checkpoint, _is_any),
)


def hook_engine(engine: Any) -> None:
    """Replace what the tables say of one engine.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound. Mutated, and so is its wrapper.
    """
    wrapper = engine.optimizer
    if _is_wrapped(engine):
        duties = [duty.around for duty in STEP_DUTIES if duty.applies(engine)]
        waiting = leaf_modules.waiting_parameters(engine)
        wrapper._deepspeed_muon_memory = Memory(weakref.ref(engine), duties, waiting=waiting)
    # All conditions are asked before anything is replaced.
    for hook in [hook for hook in ENGINE_HOOKS if hook.applies(engine)]:
        _replace_method(engine if hook.owner == "engine" else wrapper, hook.attribute, hook.function)


def _replace_method(owner: Any, attribute: str, function: Callable[..., Any]) -> None:
    """Let ``owner.attribute(...)`` call ``function(original, owner, ...)``.

    The replacement refers to its owner weakly. A bound method would make a cycle, and the owner's memory on the device
    would wait for the garbage collector.

    Args:
        owner: An engine or a wrapper. Mutated.
        attribute: The name of a method.
        function: Gets the original, bound to ``owner``, then ``owner`` and the arguments of the call.
    """
    reference = weakref.ref(owner)
    method = getattr(owner, attribute)
    is_own = isinstance(method, MethodType) and method.__self__ is owner
    plain: Callable[..., Any] = method.__func__ if is_own else method

    def replacement(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        assert owner is not None
        return function(MethodType(plain, owner) if is_own else plain, owner, *args, **kwargs)

    replacement.__name__, replacement.__doc__ = attribute, method.__doc__
    setattr(owner, attribute, replacement)
