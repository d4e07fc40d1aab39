"""Links from parameters to masters and optimizer state, by which ``safe_get_full_optimizer_state`` finds them.

ZeRO 1 and 2 and ``BF16_Optimizer`` make them after the first partition has its state, before the others have theirs,
and do not make them again after a load or after ``reload_states``.
"""

from __future__ import annotations

from deepspeed_muon.engine.patching import Hook, Original, Workaround
from deepspeed_muon.engine.zero.views import FlatView, Zero12View


def link_states(original: Original, view: FlatView, *args: object, **kwargs: object) -> None:
    """Link the parameters to their optimizer state once every partition has one, not after the first one's step."""
    if all(view.optimizer.state.get(master) for master in view.masters):
        original(*args, **kwargs)


def link_params(original: Original, view: FlatView, *args: object, **kwargs: object) -> None:
    """Link the parameters to their masters, and to their optimizer state again."""
    original(*args, **kwargs)
    view.link_states_again()


def reload_states(original: Original, view: Zero12View, *args: object, **kwargs: object) -> None:
    """Take the state back, and link the parameters again."""
    original(*args, **kwargs)
    view.link_params()


EARLY_LINKS = Workaround(
    defect="safe_get_full_optimizer_state has the state of the first param group alone. For others it raises on ranks "
    "with elements, and the other ranks wait",
    first="0.19.2",
    last="0.19.8",
    test="tests/distributed/test_checkpoint_deepspeed.py::test_deepspeeds_tools[1-fp32]",
    hooks=(Hook((FlatView,), "_lazy_init_hp_params_optimizer_state", link_states),),
)

LOST_LINKS = Workaround(
    defect="load_checkpoint makes the links to the masters again, and drops those to the state; reload_states makes "
    "neither",
    first="0.19.2",
    last="0.19.8",
    test="tests/distributed/test_checkpoint_deepspeed.py::test_deepspeeds_tools[1-fp32]",
    hooks=(
        Hook((FlatView,), "_link_all_hp_params", link_params),
        Hook((Zero12View,), "reload_states", reload_states),
    ),
)
