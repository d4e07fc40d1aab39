"""An engine's optimizer and its partitions stayed in memory until the garbage collector ran.

Replaced methods referred to the object that they were attributes of, and the optimizer to the wrapper around it. An
AdamW of torch's refers to neither in an engine.
"""

from __future__ import annotations

import gc
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.support import training
from tests.support.models import build
from tests.support.thinning import full


def reached(start: list[Any], watched: dict[str, Any]) -> list[str]:
    """Return which of the watched objects are referred to by ``start``, over any number of others.

    What belongs to modules and classes is left out: it lives as long as the program.
    """
    names = {id(each): name for name, each in watched.items()}
    shared = {id(vars(module)) for module in list(sys.modules.values())}
    seen: set[int] = set()
    found: set[str] = set()
    waiting = list(start)
    while waiting:
        for each in gc.get_referents(waiting.pop()):
            if id(each) in seen or id(each) in shared or isinstance(each, (ModuleType, type)):
                continue
            seen.add(id(each))
            if id(each) in names:
                found.add(names[id(each)])
            else:
                waiting.append(each)
    return sorted(found)


def ties(rank: int, world_size: int, *, stage: int, precision: str) -> dict[str, Any]:
    """Return what an optimizer refers to, and what the replaced methods of its engine and wrapper do."""
    config = training.ds_config(stage, precision=precision, clipping=0.5 if stage else 0.0)
    model = build("toy")
    engine = training.initialize(model, config)
    for step in range(2):
        training.run_step(engine, step, rank, world_size, 1)
    optimizer, wrapper = engine.basic_optimizer, engine.optimizer
    watched = {"engine": engine, "wrapper": wrapper, "optimizer": optimizer}
    replaced = {
        name: value
        for owner in (engine, wrapper)
        for name, value in vars(owner).items()
        if getattr(value, "__module__", "") == "deepspeed_muon.engine.hooks" and callable(value)
    }
    report = {
        "optimizer": reached([optimizer], watched),
        "replaced": {name: reached([value], watched) for name, value in replaced.items()},
    }
    engine.destroy()
    return report


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (0, "fp16"), (1, "bf16"), full(2, "fp16"), (3, "fp32")]
)
def test_nothing_of_ours_refers_to_its_owner(ranks: Any, stage: int, precision: str) -> None:
    report = ranks(1).run(ties, stage=stage, precision=precision)[0]
    assert report["replaced"] and not any(report["replaced"].values()), report
    assert not report["optimizer"], report
