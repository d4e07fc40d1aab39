"""Engines of stage 3 that remain in memory after ``engine.destroy()``, with all that they refer to."""

from __future__ import annotations

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from deepspeed_muon.engine.patching import Hook, Original, Workaround
from deepspeed_muon.engine.zero.views import Zero3View

_CACHED = "_PartitionedParameterCoordinator__params_to_release"
"""A method of ZeRO 3's coordinator, whose cache refers to the parameters of every engine."""


def release_destroyed(original: Original, view: Zero3View, *args: object, **kwargs: object) -> None:
    """Destroy the wrapper, then drop what refers to each engine of stage 3 for the length of the program."""
    model = view.module
    original(*args, **kwargs)
    # Setting up the hooks appends the model to this list of the process, and nothing removes it.
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not model]
    # A functools.lru_cache without bound, keyed by coordinator and module. A decorator around it hides it in a closure.
    cached = vars(PartitionedParameterCoordinator)[_CACHED]
    for cell in cached.__closure__ or ():
        cell.cell_contents.cache_clear()


DESTROYED_ENGINES = Workaround(
    defect="an engine of stage 3 stays in memory after engine.destroy(), with all that it refers to",
    first="0.19.2",
    last="0.19.8",
    test="tests/distributed/test_leaves_nothing_behind.py::test_engines_of_ours_leave_nothing",
    hooks=(Hook((Zero3View,), "destroy", release_destroyed),),
    calls=((PartitionedParameterCoordinator, (_CACHED,)),),
)
