"""What is changed in DeepSpeed: two tables of replaced functions.

:data:`HOOKS` are replaced for the whole process, by :func:`register`, and put back by :func:`unregister`. For an engine
with another optimizer they call DeepSpeed's own function with the same arguments, and add no collective: such an engine
may exist on some of the ranks only.

:data:`ENGINE_HOOKS` are replaced in one engine whose optimizer is ours, and in the wrapper around it. They disappear
with the engine. Rows that say so mend defects of DeepSpeed, which every optimizer has.

Changed elsewhere, because there is no wrapper yet or for the length of one call:

- the engine's ``zero_force_ds_cpu_optimizer``, the wrapper's ``backup_optimizer``, and the classes that ZeRO's modules
  compare an optimizer with, ``DeepSpeedCPUAdam`` and ``FusedAdam``: :mod:`deepspeed_muon.engine.offload`;
- inputs of leaf modules without a gradient, at which ZeRO 3 ends a backward pass before it has begun:
  :func:`deepspeed_muon.engine.gradients.prepare_inputs`.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from types import MethodType
from typing import Any

import deepspeed
from deepspeed.checkpoint import ds_to_universal
from deepspeed.ops.adam import fused_adam
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import groups
from packaging.version import Version

from deepspeed_muon.engine import (
    checkpointing,
    configure,
    fingerprints,
    gradients,
    muon_of,
    offload,
    running,
    scaling,
)
from deepspeed_muon.engine.zero import stages, views
from deepspeed_muon.engine.zero.stages import WRAPPERS, Zero3View, Zero12View, ZeroView, view_of
from deepspeed_muon.engine.zero.views import Bf16View, FlatView, HalfView, Memory, Original, PlainView, View
from deepspeed_muon.errors import InstallationError
from deepspeed_muon.optimizer import Muon


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of DeepSpeed that is replaced.

    Attributes:
        owner: The class or module whose function it is. In :data:`ENGINE_HOOKS` also the kinds of views whose wrapper's
            method it is.
        attribute: The function's name.
        function: Is called instead, with the original, then with the view of the wrapper if the owner is a wrapper, and
            with the arguments of the call.
        applies: In :data:`ENGINE_HOOKS`, whether an engine with such a view needs it.
    """

    owner: Any
    attribute: str
    function: Callable[..., Any]
    applies: Callable[[Any], Any] = lambda view: True

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.attribute}"

    def classes(self) -> list[type]:
        """Return the classes of DeepSpeed whose method a row of :data:`ENGINE_HOOKS` replaces."""
        if self.owner is DeepSpeedEngine:
            return [DeepSpeedEngine, PipelineEngine]
        return [wrapper for wrapper, view in WRAPPERS.items() if issubclass(view, self.owner)]


def _configure_optimizer(
    original: Original, engine: Any, client_optimizer: Any, model_parameters: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make and bind the optimizer of an engine, then replace what a bound one needs."""
    result = configure.configure_optimizer(
        original, engine, client_optimizer, model_parameters, *args, **kwargs
    )
    if muon_of(engine) is not None:
        fingerprints.warn_of_unknown(followed_functions)
        hook_engine(engine)
        if (trainer := running.trainer_callbacks()) is not None:
            # The rate that the Trainer logs is Muon's alone.
            _install(Hook(trainer, "on_log", running.log_in_trainer))
    return result


# The first release that trains right with torch 2.13 and has all functions below: 0.17 and 0.18 lose gradients at
# ZeRO 2 with accumulation, or raise in their own all-gather at stages 1 and 2, with AdamW too.
OLDEST = "0.19.2"

# Above each row: what would be wrong without it.
HOOKS = (
    # DeepSpeed's broadcast aborts or hangs if the ranks' models differ. Ours compares them first. And it takes neither
    # scalars nor weights of other strides (channels_last).
    Hook(DeepSpeedEngine, "_broadcast_model", configure.broadcast_model),
    # The type Muon would make DeepSpeed's own optimizer. It would communicate before anybody compares the ranks'
    # settings, and our optimizer would not be bound to the wrapper.
    Hook(DeepSpeedEngine, "_configure_optimizer", _configure_optimizer),
    # Ranks that differ in what AutoEP goes by would make other process groups and wait for each other.
    Hook(DeepSpeedEngine, "_configure_expert_parallel", configure.configure_expert_parallel),
    # Schedulers that write one number into every group would lose the ratio of Muon's rate and AdamW's. And the
    # schedule is the last thing that restore_from fills, so it is loaded here.
    Hook(DeepSpeedEngine, "_configure_lr_scheduler", running.configure_lr_scheduler),
    # DeepSpeed's converter knows Adam's state only.
    Hook(ds_to_universal, "main", checkpointing.convert),
)

# Conditions of rows below, as attributes of a view.
_HAS_DYNAMIC_SCALE = methodcaller("dynamic_scaler")
_KEEPS_GRADIENTS = attrgetter("keeps_gradients")
_LETS_WAIT = attrgetter("memory.waiting")
_SWAPS = attrgetter("swap_folder")

# Of rows with one method the first begins last and ends first: each replaces what is there already.
ENGINE_HOOKS = (
    # A mend: ZeRO lets the loss scale grow before the step, and unscales by the new one. It grows after the step below.
    Hook((ZeroView, HalfView), "_update_scale", scaling.shrink_scale, _HAS_DYNAMIC_SCALE),
    # A mend: ZeRO 3 adds the first gradient of a parameter to that of the last step if it comes in a later micro-step.
    Hook(Zero3View, "partition_grads", gradients.partition_grads),
    # A mend: ZeRO 3 would add to gradients that the program has thrown away.
    Hook(Zero3View, "zero_grad", gradients.zero_grad),
    # A mend: ZeRO 1 and 2 would take a second backward pass after one forward pass for a later phase of the first.
    Hook(DeepSpeedEngine, "backward", gradients.begin_backward, lambda view: isinstance(view, Zero12View)),
    # A mend: of several backward passes before a step ZeRO 1 and 2 would use the last one only.
    Hook(Zero12View, "independent_gradient_partition_epilogue", gradients.add_to_earlier_backward),
    # The row above would add gradients that the program has thrown away.
    Hook(Zero12View, "zero_grad", gradients.zero_grad),
    # A mend: ZeRO 1 and 2 with offload add the first gradient of a parameter to that of the last step, as ZeRO 3 does.
    # And of several backward passes they would use the last one only.
    Hook(Zero12View, "copy_grads_in_partition", gradients.copy_grads_in_partition, _KEEPS_GRADIENTS),
    # A mend: what a backward pass did not reduce must be zero before anybody reads it.
    Hook(
        ZeroView, "independent_gradient_partition_epilogue", gradients.gradient_partition_epilogue, _KEEPS_GRADIENTS
    ),
    # A mend: ZeRO 1 and 2 reduce gradients of different experts with each other where ranks run different ones.
    Hook(Zero12View, "reduce_ready_partitions_and_remove_grads", gradients.reduce_ready_partitions, _LETS_WAIT),
    # The gradients that the row above lets wait would never be reduced. After the row for the same method above: zeros
    # must be filled in before DeepSpeed ends the backward pass.
    Hook(Zero12View, "independent_gradient_partition_epilogue", gradients.reduce_waiting_gradients, _LETS_WAIT),
    # Nobody would know which gradients ZeRO 1 reduces by itself; the next row needs it.
    Hook(
        Zero12View, "reduce_independent_p_g_buckets_and_remove_grads", gradients.reduce_independent_gradient,
        attrgetter("reduces_last_only"),
    ),
    # A mend: ZeRO 1 with overlap_comm leaves out what the last micro-step did not add to.
    Hook(Zero12View, "reduce_gradients", gradients.reduce_gradients, attrgetter("reduces_last_only")),
    # A mend: stage 0 in half precision divides by a scale that was not applied. Its norm is that of scaled gradients,
    # and leaves experts and shards out.
    Hook(HalfView, "unscale_and_clip_grads", scaling.unscale_and_clip_grads),
    # A mend: stage 0 in half precision divides by a scale that nobody multiplied the loss with.
    Hook(DeepSpeedEngine, "backward", scaling.backward, scaling.loss_is_not_scaled),
    # The same, for a program that calls backward of the loss itself.
    Hook(DeepSpeedEngine, "scale", scaling.scale, scaling.loss_is_not_scaled),
    # A mend: BF16_Optimizer leaves parameters out of norm and clipping that this rank did not use and others did.
    Hook(Bf16View, "get_grads_for_norm", scaling.grads_for_norm),
    # A mend: the plain engine throws the norm away, and counts one stage of a pipeline, one rank's experts, and
    # parameters that the optimizer was not given.
    Hook(DeepSpeedEngine, "clip_fp32_gradients", scaling.clip_fp32_gradients, lambda view: isinstance(view, PlainView)),
    # A mend: an engine of stage 3 stays in memory after engine.destroy(), with all that it holds.
    Hook(Zero3View, "destroy", stages.release_destroyed),
    # A mend: ZeRO updates the scale first and unscales by the new one.
    Hook((ZeroView, HalfView), "step", scaling.grow_after_step, _HAS_DYNAMIC_SCALE),
    # A mend: sub-groups with finite gradients would be updated in a step that is skipped. Inside of the next row: the
    # flags answer.
    Hook(Zero3View, "step", gradients.look_for_overflow_first, views.overlooks_overflow),
    # The ranks would exchange flags once for each group, besides ZeRO's overflow check. Inside of the next row: the
    # gradients must be complete.
    Hook(ZeroView, "step", gradients.exchange_flags_first),
    # A mend: gradients outlive the step in buffers, and a parameter that gets none is updated with its last one.
    Hook(ZeroView, "step", gradients.only_gradients_of_the_step, _KEEPS_GRADIENTS),
    # The wrapper has copied what is trained, so a parameter that is unfrozen later does not train, and nobody is told.
    Hook(View, "step", gradients.warn_of_unfrozen, attrgetter("memory.frozen")),
    # At ZeRO 0 in fp32 a parameter that is unfrozen later would get a gradient and no update. If the ranks unfroze
    # different ones, DeepSpeed's all-reduce would wait forever.
    Hook(
        DeepSpeedEngine, "buffered_allreduce_fallback", configure.take_unfrozen,
        lambda view: isinstance(view, PlainView) and view.optimizer.frozen_on_some_rank,
    ),
    # The wrapper does not know that our optimizer skipped the step, so the learning-rate schedule would go on.
    Hook(View, "step", scaling.report_skipped_step),
    # ZeRO calls our step several times, or never if the gradients overflowed; the logits are those of one step.
    Hook(View, "step", running.forget_logits, attrgetter("optimizer.qk_clip")),
    # With nonfinite_grad 'error' ZeRO would skip a step by itself and tell nobody.
    Hook(View, "step", scaling.raise_on_overflow, scaling.overflow_is_error),
    # A mend: safe_get_full_optimizer_state would know the state of the first param group alone. For others it would
    # raise on ranks with elements, and the others would wait.
    Hook(FlatView, "_lazy_init_hp_params_optimizer_state", views.link_states),
    # A mend: the same after load_checkpoint, which forgets the links to the state.
    Hook(FlatView, "_link_all_hp_params", views.link_params),
    # ZeRO would read all gradients twice more and send a message, to learn what the flags say.
    Hook(ZeroView, "has_overflow", gradients.has_overflow),
    # The host would wait for the device again to look at the norm, at ZeRO 1 and 2 once more for each param group.
    Hook(Zero3View, "_get_norm_groups", gradients.norm_groups),
    Hook(Zero12View, "scaled_global_norm", gradients.global_norm),
    # Stage 3 moves the state of FusedAdam alone, and the exchange would keep its buffers on the device.
    Hook(ZeroView, "offload_states", offload.offload_states),
    # Stage 3 would look for copies of FusedAdam's state.
    Hook(Zero3View, "reload_states", offload.reload_states),
    # A mend: safe_get_full_optimizer_state would raise, or read what was replaced.
    Hook(Zero12View, "reload_states", views.link_reloaded),
    # The step would find no gradient: none is swapped, because unaligned ones would not be read.
    Hook(Zero3View, "_optimizer_states_and_gradient_swap_in", offload.swap_in, _SWAPS),
    # safe_set_full_grad would change a copy of it.
    Hook(Zero3View, "_writeback_swap_state", offload.write_back, _SWAPS),
    # With pipelines masters and state would show buffers of the swapper that hold another sub-group, and a save would
    # write those.
    Hook(Zero3View, "_optimizer_states_and_gradient_swap_out", offload.swap_out, _SWAPS),
    # DeepSpeed would write `latest` while some ranks still copy their swap files.
    Hook(Zero3View, "checkpoint_event_epilogue", offload.wait_for_copies, _SWAPS),
    # A mend: frozen experts would become the first rank's at ZeRO 2.
    Hook(
        DeepSpeedEngine, "load_module_state_dict", checkpointing.load_weights, lambda view: isinstance(view, Zero12View)
    ),
    # DeepSpeed's loader knows Adam's state only, and reads parameters from places that can be wrong.
    Hook((ZeroView, Bf16View), "_load_universal_checkpoint", checkpointing.load_universal_checkpoint),
    # Nobody would sample a whole step, bound the wait for other ranks, or find steps that ended too early.
    Hook(DeepSpeedEngine, "_take_model_step", running.take_model_step),
    # consolidate_on_save would write nothing, and nobody could tell the files of two saves of one step apart.
    Hook(DeepSpeedEngine, "save_checkpoint", checkpointing.save_checkpoint),
    # Files of two saves would be loaded together. Where another optimizer, stage, number of ranks, order or other
    # routes saved, DeepSpeed would fill matrices with each other's values, or fail on some ranks without the cause.
    # And it changes counters and schedule before a universal checkpoint can be refused.
    Hook(DeepSpeedEngine, "load_checkpoint", checkpointing.load_checkpoint),
)  # fmt: skip

# Private names of DeepSpeed that are called or read, and not replaced.
_CALLED = (
    (PartitionedParameterCoordinator, (stages.RELEASED,)),
    (DeepSpeedEngine, ("_get_ckpt_name", "_get_zero_ckpt_name", "_load_zero_checkpoint")),
    (Init, ("_convert_to_deepspeed_param", "_zero_init_param")),
    (groups, ("_get_expert_parallel_group", "_get_expert_data_parallel_group")),
    (stage3, ("DeepSpeedCPUAdam",)),
    (stage_1_and_2, ("DeepSpeedCPUAdam",)),
    (fused_adam, ("FusedAdam",)),
)

# Functions whose order of calls, or whose result, replaced ones take for granted.
_RELIED_ON = (
    (
        DeepSpeedEngine,
        (
            "_backward_epilogue", "_backward_prologue", "_common_checkpoint_state", "_configure_basic_optimizer",
            "_configure_bf16_optimizer", "_configure_fp16_optimizer", "_configure_zero_optimizer", "_load_checkpoint",
            "_save_checkpoint", "_save_zero_checkpoint", "allreduce_gradients", "is_gradient_accumulation_boundary",
            "step", "zero_grad",
        ),
    ),
    (PipelineEngine, ("_exec_optimizer_step", "_exec_reduce_grads")),
    (engine_module, ("get_fp32_state_dict_from_zero_checkpoint",)),
    (stage3, ("offload_adam_states", "reload_adam_states", "get_mapping_to_flat_buffer")),
    (
        DeepSpeedZeroOptimizer,
        ("get_flat_partition", "reset_cpu_buffers", "reduce_ipg_grads", "get_all_grad_tensors"),
    ),
    (DeepSpeedZeroOptimizer_Stage3, ("_optimizer_step", "independent_gradient_partition_epilogue")),
    (BF16_Optimizer, ("step",)),
    (FP16_UnfusedOptimizer, ("step",)),
)  # fmt: skip
# Of stages.py, where a release may lack them.
_OF_SOME_RELEASES = (
    "_get_sub_group_process_group", "_use_compact_grad_partition_buffer", "_wait_for_offload_copies",
)  # fmt: skip

_INSTALLED: dict[Hook, tuple[Any, Any]] = {}
"""Each hook that is in place, with the original and its replacement."""


def is_registered() -> bool:
    """Return whether the config type ``Muon`` means this project's optimizer."""
    return bool(_INSTALLED)


def register() -> None:
    """Let ``"optimizer": {"type": "Muon"}`` mean this project's optimizer in every engine made from now on.

    ``import deepspeed_muon`` calls it. Calling it again does nothing. Existing engines keep their optimizer.

    Raises:
        InstallationError: If this DeepSpeed is older than :data:`OLDEST`, or :func:`differences` finds some.
    """
    if _INSTALLED:
        return
    if Version(deepspeed.__version__) < Version(OLDEST):
        raise InstallationError(
            f"DeepSpeed {deepspeed.__version__} is not supported: with current torch, releases before {OLDEST} lose "
            f"gradients at ZeRO 2 with accumulation or fail in their all-gather, whatever the optimizer; "
            f"run `pip install 'deepspeed>={OLDEST}'`"
        )
    if unknown := differences():
        raise InstallationError(
            f"DeepSpeed {deepspeed.__version__} differs from the tested releases, so Muon could train wrong: "
            f"{'; '.join(unknown)}. Tested are {', '.join(fingerprints.table()['releases'])}: install one of them, or "
            f"a newer deepspeed_muon"
        )
    for hook in HOOKS:
        _install(hook)
    # An optimizer that is not in this list needs zero_allow_untested_optimizer. Other modules hold the list.
    ZERO_SUPPORTED_OPTIMIZERS.append(Muon)


def _install(hook: Hook) -> None:
    """Replace a function for the whole process; nothing if it is in place."""
    if hook in _INSTALLED:
        return
    original = getattr(hook.owner, hook.attribute)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook.function(original, *args, **kwargs)

    setattr(hook.owner, hook.attribute, hooked)
    _INSTALLED[hook] = original, hooked


def unregister() -> None:
    """Give the config type ``Muon`` back to DeepSpeed. Existing engines keep their optimizer.

    Raises:
        InstallationError: If another library replaced one of the functions after this one.
    """
    for hook, (_, ours) in _INSTALLED.items():
        if getattr(hook.owner, hook.attribute) is not ours:
            raise InstallationError(
                f"{hook} was hooked again after deepspeed_muon.register(); undo that one first"
            )
    while _INSTALLED:
        hook, (original, _) = _INSTALLED.popitem()
        setattr(hook.owner, hook.attribute, original)
    if Muon in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.remove(Muon)


def replaced_functions() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the functions of DeepSpeed that some engine replaces: class or module, name, and ours."""
    return [
        *((hook.owner, hook.attribute, hook.function) for hook in HOOKS),
        *((each, hook.attribute, hook.function) for hook in ENGINE_HOOKS for each in hook.classes()),
    ]


def followed_functions() -> list[fingerprints.Followed]:
    """Return the functions of DeepSpeed whose insides matter here: replaced, called or relied on, those that exist."""
    followed = [(owner, name) for owner, name, _ in replaced_functions()]
    followed += [(owner, name) for owner, names in (*_CALLED, *_RELIED_ON) for name in names]
    followed += [
        (wrapper, name)
        for wrapper, view in WRAPPERS.items()
        for name in (*stages._READ[view], *stages._READ_WITH_OFFLOAD, *_OF_SOME_RELEASES)
    ]
    return [pair for pair in dict.fromkeys(followed) if inspect.isroutine(getattr(*pair, None))]


def differences() -> list[str]:
    """Return in what this DeepSpeed differs from what the replaced functions expect, a phrase each.

    A replacement takes the parameters that it names, and hands on others if it takes ``*args`` and ``**kwargs``. So
    those that it names must be DeepSpeed's first ones. Parameters that it only hands on may come, go and move.
    """
    replaced = replaced_functions()
    called = [(owner, name) for owner, names in _CALLED for name in names]
    missing = [each for each in (*(each[:2] for each in replaced), *called) if not hasattr(*each)]
    found = [f"{owner.__name__} has no {name}" for owner, name in missing]
    for owner, name, function in replaced:
        if hasattr(owner, name):
            found += _changed_parameters(owner, name, function)
    return list(dict.fromkeys(found))


def _changed_parameters(owner: Any, name: str, function: Callable[..., Any]) -> list[str]:
    """Return one phrase if ``function`` cannot take what the function of DeepSpeed takes that it replaces."""
    original = fingerprints.function_of(owner, name)
    is_method = isinstance(owner, type)
    taken = list(inspect.signature(original).parameters.values())[is_method:]
    ours = list(inspect.signature(function).parameters.values())[1 + is_method :]
    if any(each.kind is each.VAR_POSITIONAL for each in taken):
        return []  # another library's replacement, which hands on as well
    named = [each.name for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD]
    names = [each.name for each in taken]
    if names[: len(named)] == named and (names == named or len(named) < len(ours)):
        return []
    rest = ", ..." if len(named) < len(ours) else ""
    return [f"{owner.__name__}.{name} takes ({', '.join(names)}), not ({', '.join(named)}{rest})"]


def hook_engine(engine: Any) -> None:
    """Replace what :data:`ENGINE_HOOKS` says in one engine.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound. Mutated, and so is its wrapper.
    """
    wrapper = engine.optimizer
    view = view_of(wrapper)
    is_wrapped = not isinstance(view, PlainView)
    if is_wrapped:
        waiting = gradients.waiting_parameters(view, engine.module)
        frozen = view.optimizer.release_parameters()
        wrapper._deepspeed_muon_memory = view.memory = Memory(
            weakref.ref(engine), waiting=waiting, frozen=frozen
        )
    view.prepare(autocast=engine.torch_autocast_enabled())
    # All conditions are asked before anything is replaced.
    needed = [
        hook
        for hook in ENGINE_HOOKS
        if (hook.owner is DeepSpeedEngine or (is_wrapped and isinstance(view, hook.owner)))
        and hook.applies(view)
    ]
    for hook in needed:
        _replace_method(engine if hook.owner is DeepSpeedEngine else wrapper, hook)


def _replace_method(owner: Any, hook: Hook) -> None:
    """Let a call of the hook's method call its function.

    The replacement refers to its owner weakly. A bound method would make a cycle, and the owner's memory on the device
    would wait for the garbage collector.
    """
    reference, function, has_view = weakref.ref(owner), hook.function, hook.owner is not DeepSpeedEngine
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
