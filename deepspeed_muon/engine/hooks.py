"""What is changed in DeepSpeed for the whole process: one table, which ``register`` and ``unregister`` walk.

For an engine with another optimizer every replacement calls DeepSpeed's own function with the same arguments, and adds
no collective: such an engine may exist on some of the ranks only. What is changed in a single engine with our optimizer
stands in :mod:`deepspeed_muon.engine.engine_hooks`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from packaging.version import Version

from deepspeed_muon.engine import checkpointing, configure, running
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

_INSTALLED: dict[Hook, tuple[Any, Any]] = {}
"""Each hook that is in place, with the original and its replacement."""


def is_registered() -> bool:
    """Return whether the config type ``Muon`` means this project's optimizer."""
    return bool(_INSTALLED)


def register() -> None:
    """Let ``"optimizer": {"type": "Muon"}`` mean this project's optimizer in every engine made from now on.

    ``import deepspeed_muon`` calls it. Calling it again does nothing. Existing engines keep their optimizer.

    Raises:
        RegistrationError: If this DeepSpeed is older than :data:`OLDEST`, or lacks a function to replace.
    """
    if _INSTALLED:
        return
    if Version(deepspeed.__version__) < Version(OLDEST):
        raise RegistrationError(
            f"DeepSpeed {deepspeed.__version__} is not supported: with current torch, releases before {OLDEST} lose "
            f"gradients at ZeRO 2 with accumulation or fail in their all-gather, whatever the optimizer; "
            f"run `pip install 'deepspeed>={OLDEST}'`"
        )
    missing = [str(hook) for hook in HOOKS if not hasattr(hook.owner, hook.attribute)]
    if missing:
        raise RegistrationError(
            f"DeepSpeed {deepspeed.__version__} has no {', '.join(missing)}; tested are {OLDEST} and 0.19.8"
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


def _replacement(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return hooked
