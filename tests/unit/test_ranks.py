"""What the ranks of an engine tell each other, also where rows and columns of a grid reach all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from deepspeed_muon.transport.ranks import Ranks, all_ranks

ITEMS: list[list[str]] = [[], ["a"], ["b", "c"], ["d", "e"]]


def heard(rank: int, world_size: int, *, grid: bool, most: int) -> Any:
    members = all_ranks()
    if grid:
        groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
        members = Ranks.of([group for ranks, group in groups.items() if rank in ranks])
    collected = members.collect(ITEMS[rank], most=most, purpose="test")
    numbers = [members.all_reduce([float(rank), -0.5], how, purpose="test") for how in ("sum", "max", "min")]  # type: ignore[arg-type]
    result = [members.position, collected, numbers, members.all_reduce([1, rank], "sum", purpose="test")]
    if grid:
        for group in groups.values():
            if dist.get_rank(group) >= 0:
                dist.destroy_process_group(group)
    return result


@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("most", [0, 2, 3, 16])
def test_items_numbers_and_sums(ranks: Any, grid: bool, most: int) -> None:
    items = [[1, "a"], [2, "b"], [2, "c"], [3, "d"], [3, "e"]]
    numbers = [[6.0, -2.0], [3.0, -0.5], [0.0, -0.5]]
    expected = [[rank, items[:most], numbers, [4, 6]] for rank in range(4)]
    assert ranks(4).run(heard, grid=grid, most=most) == expected


def heard_alone(rank: int, world_size: int) -> Any:
    """Return what an engine of this rank alone collects and gathers, while other ranks of the program run."""
    return [*Ranks().collect(["a"], most=1, purpose="test"), *Ranks().all_gather("a", purpose="test").items()]


def test_a_rank_alone_has_its_global_number(ranks: Any) -> None:
    """The collected items were those of rank 0, the gathered ones of the rank itself."""
    assert ranks(2).run(heard_alone) == [[[0, "a"], [0, "a"]], [[1, "a"], [1, "a"]]]


def test_a_single_rank() -> None:
    alone = Ranks()
    assert alone.collect(["a", "b"], most=1, purpose="test") == [(0, "a")]
    assert alone.all_reduce([2.0], "max", purpose="test") == [2.0] and alone.all_reduce(
        [3], "sum", purpose="test"
    ) == [3]
