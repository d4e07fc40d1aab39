"""The functions of DeepSpeed that are replaced: two tables, and ``register``.

:data:`HOOKS` are replaced for the whole process, by :func:`register`, and put back by :func:`unregister`. For an engine
with another optimizer they call DeepSpeed's own function with the same arguments, and add no collective: such an engine
may exist on some of the ranks only.

:data:`ENGINE_HOOKS` are replaced in one engine whose optimizer is ours, and in the wrapper around it. They disappear
with the engine. Those that exist because of a defect of DeepSpeed are listed in
:mod:`deepspeed_muon.engine.workarounds`.

Some things are replaced elsewhere: before there is a wrapper, during one call only, or in objects of the wrapper:

- the engine's ``zero_force_ds_cpu_optimizer``, the wrapper's ``backup_optimizer``, the classes that ZeRO's modules
  compare an optimizer with, ``DeepSpeedCPUAdam`` and ``FusedAdam``, and the functions by which stage 3 moves the
  latter's state: :mod:`deepspeed_muon.engine.offload`;
- how ZeRO 3 divides scalars (``Init._zero_init_param``): :mod:`deepspeed_muon.engine.configure`;
- which tag ZeRO 3 loads weights from: :func:`deepspeed_muon.engine.workarounds.checkpoints.load_tag`;
- the swapper of NVMe offload: :mod:`deepspeed_muon.engine.nvme`; a ``GradScaler``: :mod:`deepspeed_muon.engine.views`;
- inputs of leaf modules without a gradient: :func:`deepspeed_muon.engine.workarounds.experts.prepare_inputs`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import deepspeed
from deepspeed.checkpoint import ds_to_universal
from deepspeed.ops.adam import fused_adam
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import groups
from packaging.version import Version

from deepspeed_muon.config.settings import OUR_TYPE
from deepspeed_muon.engine import (
    checkpointing,
    configure,
    muon_of,
    nvme,
    offload,
    running,
    step,
    workarounds,
)
from deepspeed_muon.engine.patching import (
    Hook,
    Original,
    WatchedFunction,
    fingerprints,
    name_of,
    replace_method,
    warn_of_unknown,
)
from deepspeed_muon.engine.views import (
    WRAPPERS,
    Bf16View,
    Memory,
    View,
    Zero3View,
    Zero12View,
    ZeroView,
    read_by,
    view_of,
)
from deepspeed_muon.errors import InstallationError
from deepspeed_muon.logs import warn
from deepspeed_muon.optimizer import Muon


def _configure_optimizer(
    original: Original, engine: DeepSpeedEngine, client_optimizer: Any, *args: Any, **kwargs: Any
) -> object:
    """Make and bind the optimizer of an engine, then replace what a bound one needs."""
    result = configure.configure_optimizer(original, engine, client_optimizer, *args, **kwargs)
    if muon_of(engine) is not None:
        warn_of_unknown(watched_functions)
        hook_engine(engine)
    elif (
        "_deepspeed_muon_switch" in sys.modules
        and client_optimizer is not None
        and engine._config.optimizer_name is None  # engine.optimizer_name() is the class of the client's
    ):
        warn(
            "deepspeed_muon: DEEPSPEED_MUON is set, and this engine trains with the %s that the program passes: its "
            'configuration has no optimizer section. Write "optimizer": {"type": "Muon", ...} into it',
            type(engine.basic_optimizer).__name__,
        )
    return result


# The first release that trains right with torch 2.13 and has all functions below: 0.17 and 0.18 lose gradients at
# ZeRO 2 with accumulation, or raise in their own all-gather at stages 1 and 2, with AdamW too.
OLDEST = "0.19.2"

# Above each row: what would be wrong without it.
HOOKS = (
    # DeepSpeed's broadcast aborts or hangs if the ranks' models differ, and fails for scalars and for weights of other
    # strides (channels_last).
    Hook(DeepSpeedEngine, "_broadcast_model", configure.broadcast_model),
    # The type Muon would make DeepSpeed's own optimizer. It would communicate before anybody compares the ranks'
    # settings, and our optimizer would not be bound to the wrapper.
    Hook(DeepSpeedEngine, "_configure_optimizer", _configure_optimizer),
    # Ranks with different settings of AutoEP would make different process groups and wait for each other.
    Hook(DeepSpeedEngine, "_configure_expert_parallel", configure.configure_expert_parallel),
    # Schedulers that write one number into every group would lose the ratio of Muon's rate to AdamW's. And
    # restore_from would not be read: it needs the schedule, which is made last.
    Hook(DeepSpeedEngine, "_configure_lr_scheduler", running.configure_lr_scheduler),
    # DeepSpeed's converter knows Adam's state only.
    Hook(ds_to_universal, "main", checkpointing.convert),
)


ENGINE_HOOKS = (
    # Defects of DeepSpeed, whatever the optimizer. A later row for the same method calls the earlier one.
    *workarounds.HOOKS,
    # The ranks would not exchange the status of all gradients once, before the first partition is updated.
    Hook((View,), "step", step.step),
    # ZeRO would read all gradients twice more and send a message, to find out what the exchanged status says.
    Hook((ZeroView,), "has_overflow", step.has_overflow),
    # The host would wait for the device again to look at the norm, at ZeRO 1 and 2 once more for each param group.
    Hook((Zero3View,), "_get_norm_groups", step.norm_groups),
    Hook((Zero12View,), "scaled_global_norm", step.global_norm),
    # The norms of Muon's and of AdamW's gradients would not be known, as DeepSpeed combines those of all partitions;
    # and it reads one gradient after another.
    Hook((ZeroView,), "get_grad_norm_direct", step.norm_at_once),
    Hook((ZeroView,), "complete_grad_norm_calculation_for_cpu_offload", step.partition_norm),
    # A sample would not cover the whole step, the wait for other ranks would have no limit, and the monitor would not
    # show AdamW's rate.
    Hook(DeepSpeedEngine, "_take_model_step", running.take_model_step),
    # Stage 3 moves the state of FusedAdam alone, and the exchange would keep its buffers on the device.
    Hook((ZeroView,), "offload_states", offload.offload_states),
    Hook((ZeroView,), "reload_states", offload.reload_states),
    *nvme.HOOKS,
    # DeepSpeed's loader knows Adam's state only, and reads parameters by a mapping that can be wrong.
    Hook((ZeroView, Bf16View), "_load_universal_checkpoint", checkpointing.load_universal_checkpoint),
    # consolidate_on_save would write nothing, and the files of two saves of one step could not be distinguished.
    Hook(DeepSpeedEngine, "save_checkpoint", checkpointing.save_checkpoint),
    # Files of two saves would be loaded together. A checkpoint of another optimizer, stage, number of ranks, order or
    # of other routes would fill matrices with each other's values, or fail on some ranks without naming the cause. And
    # DeepSpeed changes counters and schedule before a universal checkpoint can be refused.
    Hook(DeepSpeedEngine, "load_checkpoint", checkpointing.load_checkpoint),
)  # fmt: skip
"""Above each row: what would be wrong without it."""

# Private names of DeepSpeed that are called or read, and not replaced.
_CALLED = (
    *(row for workaround in workarounds.WORKAROUNDS.values() for row in workaround.calls),
    (DeepSpeedEngine, ("_get_ckpt_name", "_get_zero_ckpt_name", "_load_zero_checkpoint")),
    (Init, ("_convert_to_deepspeed_param", "_zero_init_param")),
    (groups, ("_get_expert_parallel_group", "_get_expert_data_parallel_group")),
    (stage3, ("DeepSpeedCPUAdam",)),
    (stage_1_and_2, ("DeepSpeedCPUAdam",)),
    (fused_adam, ("FusedAdam",)),
)

# Functions whose result or order of calls the replacements take for granted.
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

_INSTALLED: dict[Hook, tuple[Any, Any]] = {}
"""Each hook that is in place, with the original and its replacement."""


def register() -> None:
    """Let ``"optimizer": {"type": "Muon"}`` mean this project's optimizer in every engine made from now on.

    ``import deepspeed_muon`` calls it. Calling it again does nothing. Existing engines keep their optimizer.

    Raises:
        InstallationError: If this DeepSpeed is older than :data:`OLDEST`, or lacks a function that is replaced or
            called.
    """
    if _INSTALLED:
        return
    if Version(deepspeed.__version__) < Version(OLDEST):
        raise InstallationError(
            f"DeepSpeed {deepspeed.__version__} is not supported: with current torch, releases before {OLDEST} lose "
            f"gradients at ZeRO 2 with accumulation or fail in their all-gather, whatever the optimizer; "
            f"run `pip install 'deepspeed>={OLDEST}'`"
        )
    if missing := missing_functions():
        raise InstallationError(
            f"DeepSpeed {deepspeed.__version__} has no {', '.join(missing)}. Tested are "
            f"{', '.join(fingerprints()['releases'])}: install one of them, or a newer deepspeed_muon"
        )
    for hook in HOOKS:
        original = getattr(hook.owner, hook.attribute)
        replacement = _replacement(original, hook.function)
        setattr(hook.owner, hook.attribute, replacement)
        _INSTALLED[hook] = original, replacement
    # An optimizer that is not in this list needs zero_allow_untested_optimizer. Other modules refer to the same list.
    ZERO_SUPPORTED_OPTIMIZERS.append(Muon)
    DEEPSPEED_OPTIMIZERS.append(OUR_TYPE)


def _replacement(original: Original, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: object, **kwargs: object) -> Any:
        return function(original, *args, **kwargs)

    return replacement


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
        DEEPSPEED_OPTIMIZERS.remove(OUR_TYPE)


def watched_functions() -> list[WatchedFunction]:
    """Return the functions of DeepSpeed whose bodies matter: replaced, called or relied on, those that exist."""
    watched = [*_needed_functions(), *_pairs(_RELIED_ON)]
    watched += _pairs((wrapper, sorted(read_by(view))) for wrapper, view in WRAPPERS.items())
    return [pair for pair in dict.fromkeys(watched) if inspect.isroutine(getattr(*pair, None))]


def missing_functions() -> list[str]:
    """Return the functions that are replaced or called, and that this DeepSpeed does not have."""
    return [name_of(*pair) for pair in _needed_functions() if not hasattr(*pair)]


def _needed_functions() -> list[WatchedFunction]:
    """Return the functions that some engine replaces, and those that are called."""
    replaced = [(owner, hook.attribute) for hook in ENGINE_HOOKS for owner in hook.classes()]
    return list(
        dict.fromkeys([*((hook.owner, hook.attribute) for hook in HOOKS), *replaced, *_pairs(_CALLED)])
    )


def _pairs(rows: Iterable[tuple[Any, Iterable[str]]]) -> list[WatchedFunction]:
    return [(owner, name) for owner, names in rows for name in names]


def hook_engine(engine: DeepSpeedEngine) -> None:
    """Replace what :data:`ENGINE_HOOKS` says in one engine.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound. Mutated, and so is its wrapper.
    """
    wrapper = engine.optimizer
    view = view_of(wrapper)
    wrapper._deepspeed_muon_memory = view.memory = Memory(
        weakref.ref(engine), frozen=view.optimizer._release_parameters()
    )
    view.prepare()
    if isinstance(view, Zero3View) and view.swapper is not None:
        nvme.replace_in_swapper(view)
    for workaround in workarounds.NEEDED:
        workaround.prepare(engine, view)
    # A list: all conditions are asked before anything is replaced.
    for hook in [hook for hook in ENGINE_HOOKS if hook.is_needed_by(view)]:
        replace_method(engine if hook.owner is DeepSpeedEngine else wrapper, hook)
