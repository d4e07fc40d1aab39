"""Engines that were destroyed leave nothing: no tensor, group, thread or file."""

from __future__ import annotations

import gc
import os
import sys
from types import ModuleType
from typing import Any

import deepspeed
import pytest
import torch

from tests.support import training
from tests.support.harness import RankPool
from tests.support.models import build
from tests.support.thinning import full

MEGABYTE = 2**20


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))


def usage(rank: int, world_size: int) -> dict[str, int]:
    """What this process holds now."""
    for _ in range(2):  # what a finalizer of the first collection lets go of needs another one
        gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "tensors": sum(issubclass(type(instance), torch.Tensor) for instance in gc.get_objects()),
        "engines": sum(
            issubclass(type(instance), deepspeed.DeepSpeedEngine) for instance in gc.get_objects()
        ),
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def train(rank: int, world_size: int, *, engines: int) -> list[dict[str, int]]:
    """Make and destroy engines one after the other; return what this process holds after every fourth."""
    counts = []
    for number in range(engines):
        offload = training.OFFLOAD if number % 8 > 4 else {}
        config = training.ds_config(number % 4, zero=offload)
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=number % 8 == 3):
            model = make_model()
        engine = training.initialize(model, config)
        for _ in range(2):  # stage 3 knows the order of modules from the second step on
            engine.backward(engine(torch.randn(4, 256)).square().mean())
            engine.step()
        engine.destroy()
        del engine, model
        if number % 4 == 3:
            counts.append(usage(rank, world_size))
    return counts


def test_engines_of_ours_leave_nothing() -> None:
    """In one program, without the clean-up between two calls of a pool; the first eight pay for what is loaded once."""
    with RankPool(2) as pool:
        results = pool.run(train, engines=20)
    for _, start, *later in results:
        for end in later:
            assert {**end, "memory": 0} == {**start, "memory": 0}
        # An engine holds about 8 MB; there were 12.
        assert later[-1]["memory"] - start["memory"] < 40 * MEGABYTE
        assert start["engines"] == start["tensors"] == 0


# An engine's optimizer and its partitions stayed in memory until the garbage collector ran.
#
# Replaced methods referred to the object that they were attributes of, and the optimizer to the wrapper around it. An
# AdamW of torch's refers to neither in an engine.


def reached(start: list[Any], watched: dict[str, Any]) -> list[str]:
    """Return which of the watched objects are referred to by ``start``, over any number of others.

    What belongs to modules and classes is left out: it lives as long as the program.
    """
    names = {id(referent): name for name, referent in watched.items()}
    shared = {id(vars(module)) for module in list(sys.modules.values())}
    seen: set[int] = set()
    names_reached: set[str] = set()
    waiting = list(start)
    while waiting:
        for referent in gc.get_referents(waiting.pop()):
            if id(referent) in seen or id(referent) in shared or isinstance(referent, (ModuleType, type)):
                continue
            seen.add(id(referent))
            if id(referent) in names:
                names_reached.add(names[id(referent)])
            else:
                waiting.append(referent)
    return sorted(names_reached)


def ties(rank: int, world_size: int, *, stage: int, precision: str) -> dict[str, Any]:
    """Return what an optimizer refers to, and what the replaced methods of its engine and wrapper do."""
    config = training.ds_config(stage, precision=precision, clipping=0.5 if stage else 0.0)
    model = build("toy")
    engine = training.initialize(model, config)
    training.train_steps(engine, 2, rank, world_size)
    optimizer, wrapper = engine.basic_optimizer, engine.optimizer
    watched = {"engine": engine, "wrapper": wrapper, "optimizer": optimizer}
    replaced = {
        name: value
        for owner in (engine, wrapper)
        for name, value in vars(owner).items()
        if getattr(value, "__module__", "") == "deepspeed_muon.engine.patching" and callable(value)
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
