"""What is changed in DeepSpeed for the whole process: one table, which ``register`` and ``unregister`` walk.

For an engine with another optimizer every replacement calls DeepSpeed's own function with the same arguments, and adds
no collective: such an engine may exist on some of the ranks only. What is changed in a single engine with our optimizer
stands in :mod:`deepspeed_muon.engine.engine_hooks`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
from deepspeed.checkpoint import ds_to_universal
from deepspeed.ops.adam import fused_adam
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import groups
from packaging.version import Version

from deepspeed_muon.engine import checkpointing, configure, engine_hooks, running
from deepspeed_muon.errors import RegistrationError
from deepspeed_muon.optimizer import Muon


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of DeepSpeed that is replaced. It is undone by putting the original back.

    Attributes:
        owner: The class or module.
        attribute: The function's name in it.
        function: Is called instead, with the original and then with the arguments of the call.
    """

    owner: Any
    attribute: str
    function: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.attribute}"


# The first release that trains right with torch 2.13 and has all functions below: 0.17 and 0.18 lose gradients at
# ZeRO 2 with accumulation, or raise in their own all-gather at stages 1 and 2, with AdamW too.
OLDEST = "0.19.2"
NEWEST = "0.19.8"  # tested

# Above each row: what would be wrong without it.
HOOKS = (
    # DeepSpeed's broadcast aborts or hangs if the ranks' models differ. Ours compares them first.
    Hook(DeepSpeedEngine, "_broadcast_model", configure.broadcast_model),
    # DeepSpeed would communicate before anybody compares the ranks' settings, and our optimizer would not be bound to
    # the wrapper.
    Hook(DeepSpeedEngine, "_configure_optimizer", configure.configure_optimizer),
    # The type Muon would make DeepSpeed's own optimizer.
    Hook(DeepSpeedEngine, "_configure_basic_optimizer", configure.configure_basic_optimizer),
    # Ranks that differ in what AutoEP goes by would make other process groups and wait for each other.
    Hook(DeepSpeedEngine, "_configure_expert_parallel", configure.configure_expert_parallel),
    # DeepSpeed counts heads only for a key of its own, and refuses it where it finds none. Ours are found by other
    # rules too, and checked.
    Hook(deepspeed, "set_optimizer_flags", configure.set_optimizer_flags),
    # Schedulers that write one number into every group would lose the ratio of Muon's rate and AdamW's. And the
    # schedule is the last thing that restore_from fills, so it is loaded here.
    Hook(DeepSpeedEngine, "_configure_lr_scheduler", running.configure_lr_scheduler),
    # DeepSpeed's converter knows Adam's state only.
    Hook(ds_to_universal, "main", checkpointing.convert),
)

# Private names of DeepSpeed that are called or read, and not replaced.
_CALLED = (
    (PartitionedParameterCoordinator, (engine_hooks.RELEASED,)),
    (DeepSpeedEngine, ("_get_ckpt_name", "_get_zero_ckpt_name")),
    (groups, ("_get_expert_parallel_group", "_get_expert_data_parallel_group")),
    (stage3, ("DeepSpeedCPUAdam",)),
    (stage_1_and_2, ("DeepSpeedCPUAdam",)),
    (fused_adam, ("FusedAdam",)),
)

_INSTALLED: dict[Hook, tuple[Any, Any]] = {}
"""Each hook that is in place, with the original and its replacement."""


def is_registered() -> bool:
    """Return whether the config type ``Muon`` means this project's optimizer."""
    return bool(_INSTALLED)


def register() -> None:
    """Let ``"optimizer": {"type": "Muon"}`` mean this project's optimizer in every engine made from now on.

    ``import deepspeed_muon`` calls it. Calling it again does nothing. Existing engines keep their optimizer.

    Raises:
        RegistrationError: If this DeepSpeed is older than :data:`OLDEST`, or :func:`differences` finds some.
    """
    if _INSTALLED:
        return
    if Version(deepspeed.__version__) < Version(OLDEST):
        raise RegistrationError(
            f"DeepSpeed {deepspeed.__version__} is not supported: with current torch, releases before {OLDEST} lose "
            f"gradients at ZeRO 2 with accumulation or fail in their all-gather, whatever the optimizer; "
            f"run `pip install 'deepspeed>={OLDEST}'`"
        )
    if unknown := differences():
        raise RegistrationError(
            f"DeepSpeed {deepspeed.__version__} differs from the tested releases, so Muon could train wrong: "
            f"{'; '.join(unknown)}. Tested are {OLDEST} to {NEWEST}: install one of them, or a newer deepspeed_muon"
        )
    for hook in HOOKS:
        original = getattr(hook.owner, hook.attribute)
        ours = _replacement(original, hook.function)
        setattr(hook.owner, hook.attribute, ours)
        _INSTALLED[hook] = original, ours
    # An optimizer that is not in this list needs zero_allow_untested_optimizer. Other modules hold the list.
    ZERO_SUPPORTED_OPTIMIZERS.append(Muon)


def unregister() -> None:
    """Give the config type ``Muon`` back to DeepSpeed. Existing engines keep their optimizer.

    Raises:
        RegistrationError: If another library replaced one of the functions after this one.
    """
    for hook, (_, ours) in _INSTALLED.items():
        if getattr(hook.owner, hook.attribute) is not ours:
            raise RegistrationError(
                f"{hook} was hooked again after deepspeed_muon.register(); undo that one first"
            )
    while _INSTALLED:
        hook, (original, _) = _INSTALLED.popitem()
        setattr(hook.owner, hook.attribute, original)
    if Muon in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.remove(Muon)
    running.forget_trainer()


def replaced_functions() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the functions of DeepSpeed that some engine replaces: class or module, name, and ours."""
    return [
        *((hook.owner, hook.attribute, hook.function) for hook in HOOKS),
        *((each, hook.attribute, hook.function) for hook in engine_hooks.TABLES for each in hook.classes()),
    ]


def differences() -> list[str]:
    """Return in what this DeepSpeed differs from what the replaced functions expect, a phrase each.

    A replacement takes the parameters that it names, and hands on others if it takes ``*args`` and ``**kwargs``. So
    those that it names must be DeepSpeed's first ones. Parameters that it only hands on may come, go and move.
    """
    replaced = replaced_functions()
    called = [(owner, name) for owner, names in _CALLED for name in names]
    missing = [each for each in (*((each[:2]) for each in replaced), *called) if not hasattr(*each)]
    found = [f"{owner.__name__} has no {name}" for owner, name in missing]
    for owner, name, function in replaced:
        if hasattr(owner, name):
            found += _changed_parameters(owner, name, function)
    return list(dict.fromkeys(found))


def undecorated(function: Any, name: str) -> Any:
    """Return the function of that name which DeepSpeed's decorator for NVTX ranges hides, or ``function`` itself."""
    hidden = (each.cell_contents for each in getattr(function, "__closure__", None) or ())
    return next((each for each in hidden if getattr(each, "__name__", "") == name), function)


def _changed_parameters(owner: Any, name: str, function: Callable[..., Any]) -> list[str]:
    """Return one phrase if ``function`` cannot take what the function of DeepSpeed takes that it replaces."""
    original = undecorated(getattr(owner, name), name)
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


def _replacement(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return hooked
