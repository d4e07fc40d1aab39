"""What is changed in one engine whose optimizer is ours, and in the wrapper around it: three tables.

Each row of :data:`MENDS`, :data:`STEP_HOOKS` and :data:`ENGINE_HOOKS` replaces a method of that one object. Nothing is
undone, because the changes disappear with the engine. :data:`MENDS`, and what else says so, mend defects of DeepSpeed,
which every optimizer has; the others are what our optimizer adds.

Changed elsewhere, because there is no wrapper yet or for the length of one call:

- the engine's ``zero_force_ds_cpu_optimizer``, the wrapper's ``backup_optimizer``, and the classes that ZeRO's modules
  compare an optimizer with, ``DeepSpeedCPUAdam`` and ``FusedAdam``: :mod:`deepspeed_muon.engine.offload`;
- inputs of leaf modules without a gradient, at which ZeRO 3 ends a backward pass before it has begun:
  :func:`deepspeed_muon.engine.gradients.prepare_inputs`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from deepspeed_muon.engine import checkpointing, gradients, nvme, offload, running, scaling
from deepspeed_muon.engine.zero.stages import WRAPPERS, Bf16View, Zero3View, Zero12View, ZeroView, view_of
from deepspeed_muon.engine.zero.swapper import swap_what_fits
from deepspeed_muon.engine.zero.views import HalfView, Memory, Original, PlainView, View

RELEASED = "_PartitionedParameterCoordinator__params_to_release"
"""A method of ZeRO 3's coordinator, whose cache refers to the parameters of every engine."""


@dataclass(frozen=True, slots=True)
class EngineHook:
    """A method of an engine or of its wrapper that is replaced.

    Attributes:
        owner: Whose method.
        attribute: Its name.
        function: Is called instead, with the original, the engine or the view of the wrapper, and the arguments of the
            call.
        kind: Of the views of wrappers whose engines need it, or several kinds. A wrapper's method needs a wrapper in
            any case.
        applies: Whether an engine with such a view needs it.
    """

    owner: Literal["engine", "wrapper"]
    attribute: str
    function: Callable[..., Any]
    kind: type[View] | tuple[type[View], ...] = View
    applies: Callable[[Any], Any] = lambda view: True

    def classes(self) -> list[type]:
        """Return the classes of DeepSpeed whose method it is."""
        if self.owner == "engine":
            return [DeepSpeedEngine, PipelineEngine]
        return [wrapper for wrapper, view in WRAPPERS.items() if issubclass(view, self.kind)]


def _forget_logits(original: Original, view: View, *args: Any, **kwargs: Any) -> Any:
    """Clear the attention logits after a step."""
    assert view.optimizer.qk_clip is not None
    try:
        return original(*args, **kwargs)
    finally:
        view.optimizer.qk_clip.clear()


def _release_destroyed(original: Original, view: Zero3View, *args: Any, **kwargs: Any) -> None:
    """Destroy the wrapper, then drop what refers to each engine of stage 3 for the length of the program."""
    module = view.module
    original(*args, **kwargs)
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [each for each in stack if each is not module]
    cached = vars(PartitionedParameterCoordinator)[RELEASED]
    for cell in cached.__closure__ or ():
        cell.cell_contents.cache_clear()


# Above each row of all tables: what would be wrong without it.
MENDS = (
    # ZeRO lets the loss scale grow before the step, and unscales by the new one. It grows in STEP_HOOKS.
    EngineHook("wrapper", "_update_scale", scaling.shrink_scale, ZeroView, ZeroView.dynamic_scaler),
    # ZeRO 3 adds the first gradient of a parameter to that of the last step if it comes in a later micro-step.
    EngineHook("wrapper", "partition_grads", gradients.partition_grads, Zero3View),
    # ZeRO 3 would add to gradients that the program has thrown away.
    EngineHook("wrapper", "zero_grad", gradients.zero_grad, Zero3View),
    # ZeRO 1 and 2 with offload add the first gradient of a parameter to that of the last step, as ZeRO 3 does.
    EngineHook(
        "wrapper", "copy_grads_in_partition", gradients.copy_grads_in_partition,
        Zero12View, lambda view: view.keeps_gradients,
    ),
    # What a backward pass did not reduce must be zero before anybody reads it.
    EngineHook(
        "wrapper", "independent_gradient_partition_epilogue", gradients.gradient_partition_epilogue,
        ZeroView, lambda view: view.keeps_gradients,
    ),
    # ZeRO 1 and 2 reduce gradients of different experts with each other where ranks run different ones.
    EngineHook(
        "wrapper", "reduce_ready_partitions_and_remove_grads", gradients.reduce_ready_partitions,
        Zero12View, lambda view: view.memory.waiting,
    ),
    # The gradients that the row above lets wait would never be reduced. After the row for the same method above: zeros
    # must be filled in before DeepSpeed ends the backward pass.
    EngineHook(
        "wrapper", "independent_gradient_partition_epilogue", gradients.reduce_waiting_gradients,
        Zero12View, lambda view: view.memory.waiting,
    ),
    # Nobody would know which gradients ZeRO 1 reduces by itself; the next row needs it.
    EngineHook(
        "wrapper", "reduce_independent_p_g_buckets_and_remove_grads", gradients.reduce_independent_gradient,
        Zero12View, lambda view: view.reduces_last_only,
    ),
    # ZeRO 1 with overlap_comm leaves out what the last micro-step did not add to.
    EngineHook(
        "wrapper", "reduce_gradients", gradients.reduce_gradients,
        Zero12View, lambda view: view.reduces_last_only,
    ),
    # Stage 0 in half precision divides by a scale that was not applied, and its norm leaves experts out.
    EngineHook("wrapper", "unscale_and_clip_grads", scaling.unscale_and_clip_grads, HalfView),
    # Stage 0 in half precision divides by a scale that nobody multiplied the loss with.
    EngineHook("engine", "backward", scaling.backward, HalfView, scaling.loss_is_not_scaled),
    # The same, for a program that calls backward of the loss itself.
    EngineHook("engine", "scale", scaling.scale, HalfView, scaling.loss_is_not_scaled),
    # BF16_Optimizer leaves parameters out of norm and clipping that this rank did not use and others did.
    EngineHook("wrapper", "get_grads_for_norm", scaling.grads_for_norm, Bf16View),
    # The plain engine throws the norm away, and counts one stage of a pipeline and one rank's experts.
    EngineHook("engine", "clip_fp32_gradients", scaling.clip_fp32_gradients, PlainView),
    # An engine of stage 3 stays in memory after engine.destroy(), with all that it holds.
    EngineHook("wrapper", "destroy", _release_destroyed, Zero3View),
)  # fmt: skip

# What happens before and after a step. The first row begins last and ends first: each replaces what is there already.
STEP_HOOKS = (
    # A mend: ZeRO updates the scale first and unscales by the new one.
    EngineHook("wrapper", "step", scaling.grow_after_step, ZeroView, ZeroView.dynamic_scaler),
    # The ranks would exchange flags once for each group, besides ZeRO's overflow check. Inside of the next row: the
    # gradients must be complete.
    EngineHook("wrapper", "step", gradients.exchange_flags_first, ZeroView),
    # A mend: gradients outlive the step in buffers, and a parameter that gets none is updated with its last one.
    EngineHook(
        "wrapper", "step", gradients.only_gradients_of_the_step, ZeroView, lambda view: view.keeps_gradients
    ),
    # The wrapper does not know that our optimizer skipped the step, so the learning-rate schedule would go on.
    EngineHook("wrapper", "step", scaling.report_skipped_step),
    # A mend: stage 0 divides by the scale of the next step when it has just grown, and reports the norm of scaled
    # gradients.
    EngineHook("wrapper", "step", scaling.keep_applied_scale, HalfView),
    # ZeRO calls our step several times, or never if the gradients overflowed; the logits are those of one step.
    EngineHook("wrapper", "step", _forget_logits, View, lambda view: view.optimizer.qk_clip),
    # With nonfinite_grad 'error' ZeRO would skip a step by itself and tell nobody.
    EngineHook("wrapper", "step", scaling.raise_on_overflow, View, scaling.overflow_is_error),
)

ENGINE_HOOKS = (
    # ZeRO would read all gradients twice more and send a message, to learn what the flags say.
    EngineHook("wrapper", "has_overflow", gradients.has_overflow, ZeroView),
    # Stage 3 moves the state of FusedAdam alone, and the exchange would keep its buffers on the device.
    EngineHook("wrapper", "offload_states", offload.offload_states, ZeroView),
    # The step would find no gradient: none is swapped, because unaligned ones would not be read.
    EngineHook(
        "wrapper",
        "_optimizer_states_and_gradient_swap_in",
        nvme.swap_in,
        Zero3View,
        lambda view: view.swap_folder,
    ),
    # safe_set_full_grad would change a copy of it.
    EngineHook("wrapper", "_writeback_swap_state", nvme.write_back, Zero3View, lambda view: view.swap_folder),
    # With pipelines masters and state would show buffers of the swapper that hold another sub-group, and a save would
    # write those.
    EngineHook(
        "wrapper",
        "_optimizer_states_and_gradient_swap_out",
        nvme.swap_out,
        Zero3View,
        lambda view: view.swap_folder,
    ),
    # DeepSpeed would write `latest` while some ranks still copy their swap files.
    EngineHook(
        "wrapper", "checkpoint_event_epilogue", nvme.wait_for_copies, Zero3View, lambda view: view.swap_folder
    ),
    # DeepSpeed's loader knows Adam's state only, and reads parameters from places that can be wrong.
    EngineHook(
        "wrapper", "_load_universal_checkpoint", checkpointing.load_universal_checkpoint, (ZeroView, Bf16View)
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

TABLES = (*MENDS, *STEP_HOOKS, *ENGINE_HOOKS)


def hook_engine(engine: Any) -> None:
    """Change what the tables say of one engine.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound. Mutated, and so is its wrapper.
    """
    wrapper = engine.optimizer
    view = view_of(wrapper)
    is_wrapped = not isinstance(view, PlainView)
    if is_wrapped:
        waiting = gradients.waiting_parameters(view, engine.module)
        wrapper._deepspeed_muon_memory = view.memory = Memory(weakref.ref(engine), waiting=waiting)
    if isinstance(view, ZeroView):
        # A mend: with torch_autocast in fp16 the norm is that of scaled gradients, and once it is not finite every
        # later step is skipped. An engine made after such a one would not use its own loss scale.
        view.remove_grad_scaler(is_used=engine.torch_autocast_enabled())
    if isinstance(view, Zero3View) and view.swapper is not None:
        # DeepSpeed would swap rows of variants with the length of the partition, and a bf16 momentum as fp32. After a
        # load it would swap no state at all.
        swap_what_fits(view.swapper, view.optimizer)
    if isinstance(view, Zero12View):
        # ZeRO 1 and 2 in bf16 would look for no gradients that are not finite, and update some partitions of a step.
        view.look_for_overflow()
    # All conditions are asked before anything is replaced.
    needed = [
        hook
        for hook in TABLES
        if (is_wrapped or hook.owner == "engine") and isinstance(view, hook.kind) and hook.applies(view)
    ]
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
