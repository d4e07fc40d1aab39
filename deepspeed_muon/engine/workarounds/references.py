"""References to parameters, masters and optimizer state: links that are missing, and memory that is not freed.

``safe_get_full_optimizer_state`` finds masters and state by links from the parameters. ZeRO 1 and 2 and
``BF16_Optimizer`` make these once the first partition has its state, before the others have theirs, and do not make
them again after a load or after ``reload_states``. Engines of stage 3 stay in memory after ``engine.destroy()``, with
all that they refer to.
"""

from __future__ import annotations

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from deepspeed_muon.engine.patching import Hook, Original, Workaround
from deepspeed_muon.engine.views import FlatView, Zero3View, Zero12View

_CACHED = "_PartitionedParameterCoordinator__params_to_release"
"""A method of ZeRO 3's coordinator, whose cache refers to the parameters of every engine."""


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


def release_destroyed(original: Original, view: Zero3View, *args: object, **kwargs: object) -> None:
    """Destroy the wrapper, then drop what refers to each engine of stage 3 for the length of the program."""
    model = view.module
    original(*args, **kwargs)
    # The engine's hooks append the model to this list of the process, and nothing removes it.
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not model]
    # A functools.lru_cache without bound, keyed by coordinator and module. A decorator around it hides it in a closure.
    cached = vars(PartitionedParameterCoordinator)[_CACHED]
    for cell in cached.__closure__ or ():
        cell.cell_contents.cache_clear()


EARLY_LINKS = Workaround(
    defect="safe_get_full_optimizer_state has the state of the first param group alone. For others it raises on ranks "
    "with elements, and the other ranks wait",
    test="tests/distributed/test_checkpoint_deepspeed.py::test_deepspeeds_tools[1-fp32]",
    hooks=(Hook((FlatView,), "_lazy_init_hp_params_optimizer_state", link_states),),
)

LOST_LINKS = Workaround(
    defect="load_checkpoint makes the links to the masters again, and drops those to the state; reload_states makes "
    "neither",
    test="tests/distributed/test_checkpoint_deepspeed.py::test_deepspeeds_tools[1-fp32]",
    hooks=(
        Hook((FlatView,), "_link_all_hp_params", link_params),
        Hook((Zero12View,), "reload_states", reload_states),
    ),
)

DESTROYED_ENGINES = Workaround(
    defect="an engine of stage 3 stays in memory after engine.destroy(), with all that it refers to",
    test="tests/distributed/test_leaves_nothing_behind.py::test_engines_of_ours_leave_nothing",
    hooks=(Hook((Zero3View,), "destroy", release_destroyed),),
    calls=((PartitionedParameterCoordinator, (_CACHED,)),),
)
