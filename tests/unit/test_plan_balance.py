"""Owners at scale: balanced, the same everywhere, and without a loop over the ranks that hold a matrix."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_muon.plan.chunks import ExchangePlan, build_exchange_plan
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.owners import FLOPS_PER_MOVED_ELEMENT, assign, assign_owners
from deepspeed_muon.plan.placement import Placement, sharded_placement
from deepspeed_muon.tools.plan import sent_by_rank
from tests.support.calls import calls
from tests.support.layouts import ITERATION, MAKERS, fragments_of, matrix_flops

LIMIT = 1.05


@st.composite
def divisible(draw: st.DrawFn) -> tuple[list[float], int]:
    """Costs that come from cutting equal loads at random: an assignment with ratio 1 exists."""
    world = draw(st.integers(2, 9))
    costs: list[float] = []
    for _ in range(world):
        cuts = sorted(draw(st.lists(st.integers(1, 9_999), max_size=5, unique=True)))
        costs += [float(b - a) for a, b in zip([0, *cuts], [*cuts, 10_000], strict=True)]
    return draw(st.permutations(costs)), world


@settings(max_examples=300)
@given(case=divisible(), seed=st.integers(0, 99))
def test_longest_first_is_within_four_thirds_of_the_best(case: tuple[list[float], int], seed: int) -> None:
    """Graham's bound, 4/3 - 1/(3 W), where an assignment with ratio 1 exists; the same on every rank."""
    costs, world = case
    load, again = np.zeros(world), np.zeros(world)
    owners = assign_owners(costs, [None] * len(costs), load=load)
    assert max(load) <= (4 / 3 - 1 / (3 * world)) * 10_000 * (1 + 1e-9)
    for rank in range(world):
        assert load[rank] == pytest.approx(
            sum(c for c, o in zip(costs, owners, strict=True) if o == rank), abs=1e-6
        )
    # One of two ranks holds most of each: nobody else may own it.
    generator = random.Random(seed)
    placements = [Placement(4, generator.randrange(world - 1), 3, 0, 1, 0) for _ in costs]
    owners = assign_owners(costs, placements, load=again)
    assert all(owner in placement.ranks for owner, placement in zip(owners, placements, strict=True))


def test_load_of_earlier_sets_is_evened_out() -> None:
    load = np.array([900.0, 0.0, 300.0])
    assign_owners([100.0] * 12, [None] * 12, load=load)
    assert max(load) == 900.0 and min(load) >= 700.0


def crosses_a_later_boundary(
    index: int, before: int, costs: list[float], holders: list[dict[int, int]]
) -> bool:
    """Return whether a matrix costs the same as the one before, and both lie on two ranks, it on later ones."""
    two = len(holders[index]) == len(holders[before]) == 2 and costs[index] == costs[before]
    return two and min(holders[index]) > min(holders[before])


def owners_by_definition(costs: list[float], placements: list[Placement], load: list[float]) -> list[int]:
    """Return the owners as the docstring of plan/owners.py says, with a loop over all ranks."""
    world, owners = len(load), [-1] * len(costs)
    holders = [{f.rank: f.numel for f in fragments_of(placement)} for placement in placements]
    alone = [index for index, ranks_of in enumerate(holders) if len(ranks_of) == 1]
    for index in alone:
        (owners[index],) = holders[index]
        load[owners[index]] += costs[index]

    def ends(index: int) -> dict[int, float]:
        """Return the ranks that may own a matrix, and when each would begin with it."""
        ranks_of, numel = holders[index], placements[index].numel
        if placements[index].replicated or len(ranks_of) >= max(3, (world + 1) // 2):
            return dict(enumerate(load))
        return {
            rank: load[rank] + FLOPS_PER_MOVED_ELEMENT * (numel - ranks_of.get(rank, 0))
            for rank in range(world)
            if rank in ranks_of or 2 * max(ranks_of.values()) < numel
        }

    order = sorted(set(range(len(costs))) - set(alone), key=lambda index: (-costs[index], index))
    while order:
        together = [order.pop(0)]
        while order and crosses_a_later_boundary(order[0], together[-1], costs, holders):
            together.append(order.pop(0))

        def key(assignment: tuple[int, ...], together: list[int] = together) -> tuple[float, tuple[int, ...]]:
            times = [
                ends(index)[rank] + costs[index] * (1 + (rank in assignment[:number][-1:]))
                for number, (index, rank) in enumerate(zip(together, assignment, strict=True))
            ]
            return sum(times), assignment[::-1]

        for index, owner in zip(together, min(itertools.product(*map(ends, together)), key=key), strict=True):
            owners[index] = owner
            load[owner] += costs[index]
    return owners


@settings(max_examples=300)
@given(
    dims=st.one_of(
        st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12),
        st.lists(st.sampled_from([(4, 5), (10, 2), (3, 3)]), min_size=1, max_size=12),
    ),
    world=st.integers(1, 24),
    kind=st.sampled_from(sorted(MAKERS)),
    before=st.lists(st.integers(0, 3), min_size=24, max_size=24),
)
def test_owners_are_those_of_the_definition(
    dims: list[tuple[int, int]], world: int, kind: str, before: list[int]
) -> None:
    placements = [layout.placement for layout in MAKERS[kind](dims, world)]
    costs = [1e5 * rows * cols for rows, cols in dims]
    load = np.array([1e7 * gigaflops for gigaflops in before[:world]])
    again = load.tolist()
    assert assign_owners(costs, placements, load=load) == owners_by_definition(costs, placements, again)
    assert load.tolist() == again


EXPERTS, LAYERS, ROWS, COLS = 64, 16, 64, 4096


def planned(world: int) -> tuple[int, int, int]:
    """Return the calls and the bytes that planning stacks of experts at ZeRO 3 takes, and the blocks with an owner."""
    numel = EXPERTS * ROWS * COLS
    placement = sharded_placement(0, numel, -(-numel // world))
    stacks = [
        MatrixLayout(f"{layer}", EXPERTS * ROWS, COLS, 0, placement, row_blocks=(ROWS,) * EXPERTS)
        for layer in range(LAYERS)
    ]
    load = np.zeros(world)
    plans: list[ExchangePlan] = []

    def plan() -> None:
        made = assign(stacks, ITERATION, load)
        plans.append(
            build_exchange_plan(made.matrices, made.owners, rank=7, world_size=world, chunk_numel=1 << 22)
        )
        sent_by_rank(made.matrices, made.owners, world)

    tracemalloc.start()
    counted = calls(plan)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return counted, memory, len(plans[0].matrices)


def test_work_and_memory_do_not_grow_with_the_ranks_that_hold_a_matrix() -> None:
    """With 64 times the ranks every expert lies on 64 times as many: 1,024 of 65,536."""
    ranks = (1 << 10, 1 << 16)
    (few, small, matrices), (many, large, same) = map(planned, ranks)
    assert matrices == same == EXPERTS * LAYERS
    assert many <= 1.05 * few
    # What a rank takes of the lists and arrays of the group: its work, its place in the heap, what it sends.
    assert large <= small + 300 * (ranks[1] - ranks[0])


def test_the_work_of_many_matrices_is_even() -> None:
    generator = random.Random(0)
    shapes = [(768, 2048), (2048, 768), (2048, 4096), (512, 2048), (2048, 2048)]
    layouts = MAKERS["sharded"]([generator.choice(shapes) for _ in range(10_000)], 1024)
    load = np.zeros(1024)
    assign_owners(
        [matrix_flops(layout) for layout in layouts], [matrix.placement for matrix in layouts], load=load
    )
    assert load.max() / load.mean() <= LIMIT


def test_stacks_that_nobody_holds_entirely_are_even() -> None:
    """Kimi-k2's experts at stage 3: a block lies on three or four of 1,024 ranks, and a run of them has one owner."""
    world, load = 1024, np.zeros(1024)
    stacks = []
    for layer, (rows, cols) in enumerate([(4096, 7168), (7168, 2048)] * 12):
        numel = 384 * rows * cols
        placement = sharded_placement(0, numel, -(-numel // world))
        stacks.append(MatrixLayout(f"{layer}", 384 * rows, cols, 0, placement, row_blocks=(rows,) * 384))
    assign(stacks, ITERATION, load)
    assert load.max() / load.mean() <= LIMIT
