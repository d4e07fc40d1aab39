"""The harness itself: failures, hangs, deaths, and that a failure does not spread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import RankPool, RanksFailed, run_ranks
from tests.support.hygiene import shm_files
from tests.support.thinning import full

Pools = Callable[[int], RankPool]


def sum_of_ranks(rank: int, world_size: int) -> float:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return float(total)


def raise_on(rank: int, world_size: int, *, bad: int) -> int:
    print(f"rank {rank} speaks")
    if rank == bad:
        raise ValueError(f"no good on rank {rank}")
    return rank


def sleep_on(rank: int, world_size: int, *, bad: int, seconds: float) -> int:
    print(f"rank {rank} speaks", flush=True)
    if rank == bad:
        time.sleep(seconds)
    return rank


def one_collective_too_many(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def group_of_one(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.new_group([0])


def sum_in_new_group(rank: int, world_size: int) -> float:
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    return float(total)


def shm_op_is_on(rank: int, world_size: int) -> bool:
    from deepspeed import comm

    total = torch.ones(8)
    comm.all_reduce(total)
    assert total[0] == world_size
    return comm.comm.cdb.shm_comm_op is not None


def test_an_exception_shows_all_output_and_does_not_spread(ranks: Pools) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(raise_on, bad=1)
    assert list(caught.value.failures) == [1]
    assert caught.value.failures[1].type == "ValueError"
    for text in ("ValueError: no good on rank 1", "rank 0 speaks", "rank 1 speaks", "in raise_on"):
        assert text in str(caught.value)
    assert ranks(2).run(sum_of_ranks) == [1.0, 1.0]


def test_a_hang_is_ended_and_its_stack_is_shown(ranks: Pools) -> None:
    pool = ranks(2)
    pool.run(sum_of_ranks)
    pids = pool.pids
    with pytest.raises(RanksFailed) as caught:
        pool.run(sleep_on, bad=0, seconds=600.0, timeout=2.0)
    assert caught.value.failures[0].type == "Hang"
    assert "in sleep_on" in caught.value.outputs[0]  # written by faulthandler
    assert not any(alive(pid) for pid in pids)


def test_an_unmatched_collective_fails_the_call_that_issued_it(ranks: Pools) -> None:
    with pytest.raises(RanksFailed, match=r"clean-up after .*one_collective_too_many"):
        ranks(2).run(one_collective_too_many, timeout=4.0)


def test_a_group_that_one_rank_makes_alone_does_not_part_the_ranks(ranks: Pools) -> None:
    ranks(2).run(group_of_one)
    assert ranks(2).run(sum_in_new_group) == [2.0, 2.0]


@pytest.mark.compat
@pytest.mark.parametrize("on", [full(False), True])
def test_shm_op_can_be_left_on_and_its_files_are_removed(on: bool) -> None:
    before = shm_files()
    assert run_ranks(shm_op_is_on, 2, shm_all_reduce=on) == [on, on]
    assert shm_files() <= before


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
