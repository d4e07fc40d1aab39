"""Many multi-rank tests in a row leave nothing: no file in /dev/shm, no process, no lock, no growing memory."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import nullcontext

import deepspeed
import pytest
import torch

from tests.support import training
from tests.support.harness import RankPool, RanksFailed, run_ranks, session_leftovers
from tests.support.hygiene import stale_locks
from tests.support.native_ops import warm
from tests.support.thinning import full

Pools = Callable[[int], RankPool]

MEGABYTE = 2**20


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))


def usage(rank: int, world_size: int) -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "tensors": sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()),
        "engines": sum(issubclass(type(found), deepspeed.DeepSpeedEngine) for found in gc.get_objects()),
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def train(rank: int, world_size: int, *, engines: int, destroy: bool = True) -> list[dict[str, int]]:
    """Make and destroy engines one after the other; return what this process holds after every fourth."""
    found = []
    for number in range(engines):
        offload = {"offload_optimizer": {"device": "cpu"}} if number % 8 > 4 else {}
        config = training.ds_config(number % 4, zero=offload)
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=number % 8 == 3):
            model = make_model()
        engine = training.initialize(model, config)
        for _ in range(2):  # stage 3 knows the order of modules from the second step on
            engine.backward(engine(torch.randn(4, 256)).square().mean())
            engine.step()
        if destroy:
            engine.destroy()
        del engine, model
        if number % 4 == 3:
            found.append(usage(rank, world_size))
    return found


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


@pytest.mark.compat
@pytest.mark.parametrize("rounds", [1, full(3)])
def test_calls_leave_nothing_in_a_pool_that_goes_on(rounds: int) -> None:
    """Also of engines that a call left alive; the first round pays for what is loaded once."""
    with RankPool(2) as pool:
        pool.run(train, engines=8, destroy=False)
        before = pool.run(usage)
        for _ in range(rounds):
            pool.run(train, engines=8, destroy=False)
        after = pool.run(usage)
    for start, end in zip(before, after, strict=True):
        assert end.pop("memory") - start.pop("memory") < 40 * MEGABYTE
        assert end == start and end["engines"] == end["tensors"] == 0


def fail_in_turn(rank: int, world_size: int, *, how: str) -> int:
    """One multi-rank test as it may go: well, or not."""
    if how == "train":
        train(rank, world_size, engines=4, destroy=False)
    elif how == "raise" and rank == world_size - 1:
        raise ValueError("as asked")
    elif how == "die" and rank == 0:
        os._exit(3)
    elif how == "hang":
        time.sleep(600)
    torch.distributed.barrier()
    return rank


ENDINGS = {"train": 120.0, "raise": 120.0, "die": 120.0, "hang": 2.0}


@pytest.mark.full
@pytest.mark.time_limit(3600)
@pytest.mark.parametrize(("pooled", "fresh"), [(30, 2), (260, 40)])
def test_tests_in_a_row_leave_nothing_behind(ranks: Pools, pooled: int, fresh: int) -> None:
    """Of those that share a pool one in ten fails, of those with processes of their own three in four.

    The latter have the all-reduce operator that writes to /dev/shm.
    """
    extensions = warm()
    ranks(2).run(usage)  # this pool and those of earlier tests may stay
    locks, (_, processes) = stale_locks(extensions), session_leftovers()
    failing = ["raise", "die", "hang"]
    for number in range(pooled):
        if number % 10 < 9:
            assert ranks(2).run(fail_in_turn, how="train") == [0, 1]
            continue
        how = failing[number // 10 % 3]
        with RankPool(2 + number // 10 % 3) as pool, pytest.raises(RanksFailed):
            pool.run(fail_in_turn, how=how, timeout=ENDINGS[how])
    for number in range(fresh):
        how = ["train", *failing][number % 4]
        with nullcontext() if how == "train" else pytest.raises(RanksFailed):
            run_ranks(fail_in_turn, 2, {"how": how}, timeout=ENDINGS[how], shm_all_reduce=True)
    assert stale_locks(extensions) == locks
    files, remaining = session_leftovers()
    assert files == []
    assert set(remaining) <= set(processes)
