"""Matrices that ranks share: who shares what, how it is cut, and in which chunks it travels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_muon.forecast.predict import exchange_of
from deepspeed_muon.forecast.settings import PlannedParameter, PlanSettings
from deepspeed_muon.math.flops import orthogonalize_flops
from deepspeed_muon.plan.exchange import build_exchange_plan
from deepspeed_muon.plan.hardware import GPUS
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.sharing import Shareable, SharingRule, Speeds, choose_sharers, cut_for_sharers
from deepspeed_muon.plan.spread import fragments_of
from tests.support.layouts import MAKERS

FREELY = SharingRule(8, 5, "gram", torch.float16, None)
ON_H100 = SharingRule(8, 5, "gram", torch.float16, Speeds.of(GPUS["h100"]))

sides = st.sampled_from([1, 2, 3, 8, 17, 64])


def chosen(
    shapes: list[tuple[int, int]],
    world: int,
    *,
    rule: SharingRule = FREELY,
    node: int = 8,
    load: list[float] | None = None,
) -> tuple[dict[int, tuple[int, ...]], list[float]]:
    load = [0.0] * world if load is None else load
    costs = [rule.cost(rows, cols, 1) for rows, cols in shapes]
    matrices = [Shareable(rows, cols) for rows, cols in shapes]
    nodes = [rank // node for rank in range(world)]
    return choose_sharers(matrices, costs, load=load, nodes=nodes, rule=rule), load


@settings(max_examples=200, deadline=None)
@given(
    shapes=st.lists(st.tuples(sides, sides), min_size=1, max_size=6),
    world=st.integers(1, 13),
    node=st.integers(1, 5),
    most=st.integers(1, 8),
)
def test_sharers_are_several_ranks_of_one_node(
    shapes: list[tuple[int, int]], world: int, node: int, most: int
) -> None:
    rule = SharingRule(most, 5, "gram", torch.float16, None)
    found, load = chosen(shapes, world, rule=rule, node=node)
    expected = [0.0] * world
    for index, ranks in found.items():
        assert 2 <= len(ranks) <= min(most, node, world, shapes[index][0])
        assert len(set(ranks)) == len(ranks) and len({rank // node for rank in ranks}) == 1
        for rank in ranks:
            expected[rank] += rule.cost(*shapes[index], len(ranks))
    assert load == pytest.approx(expected)


def test_what_is_shared() -> None:
    """One matrix for eight ranks, one that dominates, and none where all have about the same to do."""
    assert chosen([(4096, 4096)], 8, rule=ON_H100)[0] == {0: tuple(range(8))}
    dominating = chosen([(8192, 8192), *[(1024, 1024)] * 8], 8, rule=ON_H100)[0]
    assert list(dominating) == [0] and len(dominating[0]) > 4
    assert chosen([(4096, 4096)] * 32, 8, rule=ON_H100)[0] == {}
    # Latency: an H100 is done with this one before ranks could meet.
    assert chosen([(256, 256)], 8, rule=ON_H100)[0] == {}
    assert chosen([(256, 256)], 8)[0] == {0: tuple(range(8))}
    # Two matrices for three ranks: if the first two shared both, it would take longer than one on each of two ranks.
    assert len(chosen([(64, 64)] * 2, 3, node=3)[0]) <= 1


def test_the_cost_of_sharing_falls_with_ranks_but_not_below_the_gram_products() -> None:
    for rows, cols in ((4096, 4096), (4096, 16384), (16384, 4096)):
        costs = [ON_H100.cost(rows, cols, ranks) for ranks in (1, 2, 4, 8)]
        assert costs == sorted(costs, reverse=True)
        assert costs[0] == orthogonalize_flops(rows, cols, method="gram", dtype=torch.float16)
        assert costs[-1] > costs[0] / 8


@settings(max_examples=100, deadline=None)
@given(
    dims=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    world=st.integers(2, 5),
    kind=st.sampled_from(sorted(MAKERS)),
    chunk=st.sampled_from([1, 30, 10_000]),
    data=st.data(),
)
def test_shared_rows_travel_like_matrices_and_together(
    dims: list[tuple[int, int]], world: int, kind: str, chunk: int, data: st.DataObject
) -> None:
    matrices: list[MatrixLayout] = []
    owners: list[int] = []
    for matrix in MAKERS[kind](dims, world):
        count = data.draw(st.integers(1, min(world, matrix.rows)))
        ranks = data.draw(st.permutations(range(world)))[:count]
        parts = cut_for_sharers(matrix, sorted(ranks))
        assert sum(part.rows for part in parts) == matrix.rows
        assert all(part.logical_shape == (matrix.rows, matrix.cols) for part in parts)
        assert all(part.scale_shape == matrix.scale_shape for part in parts)
        held = sum(part.spread.held_by(rank) for part in parts for rank in range(world))
        assert held == matrix.numel * (world if matrix.replicated else 1)
        matrices += parts
        owners += sorted(ranks)
    plans = [
        build_exchange_plan(matrices, owners, rank=rank, world_size=world, chunk_numel=chunk)
        for rank in range(world)
    ]
    assert len({plan.digest() for plan in plans}) == 1
    chunk_of = {i: number for number, c in enumerate(plans[0].chunks) for i in c.matrices}
    assert sorted(chunk_of) == list(range(len(matrices)))
    for index, matrix in enumerate(matrices):
        together = [i for i, other in enumerate(matrices) if other.name == matrix.name]
        assert len({chunk_of[i] for i in together}) == 1
        mixed = {bool(matrices[i].sharers) for i in plans[0].chunks[chunk_of[index]].matrices}
        assert len(mixed) == 1, "shared matrices have chunks of their own"
    for number in range(len(plans[0].chunks)):
        cut = [plan.chunks[number] for plan in plans]
        for a in range(world):
            for b in range(world):
                held, owned = cut[a].held_buffer.splits(world), cut[b].owned_buffer.splits(world)
                assert held[b] == owned[a]
            owned = sum(matrices[i].numel for i in cut[a].owned)
            assert owned <= chunk or len(cut[a].owned) == 1


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_plan_counts_what_the_layouts_say(stage: int) -> None:
    """The closed forms of the planner against the fragments that it stands for."""
    world, dims = 4, [(64, 48), (48, 64), (8, 8)]
    parameters = [PlannedParameter(f"m{i}", r * c, True, ((1, r, c),)) for i, (r, c) in enumerate(dims)]
    settings_ = PlanSettings(world, stage, share_matrices=3, order="given")
    exchange = exchange_of(parameters, settings_)
    assert len(exchange.shared) == 2
    maker = {0: "replicated", 1: "flat", 3: "sharded"}[stage]
    gather, scatter = [0.0] * world, [0.0] * world
    for index, layout in enumerate(MAKERS[maker](dims, world)):
        ranks = exchange.shared.get(index, (exchange.owners[index],))
        parts = cut_for_sharers(layout, ranks)
        for part, rank in zip(parts, ranks, strict=True):
            for fragment in fragments_of(part.spread):
                if fragment.rank != rank:
                    gather[fragment.rank] += 0 if part.replicated else fragment.numel
                    scatter[rank] += fragment.numel
    assert exchange.scatter_elements.tolist() == scatter
    assert exchange.gather_elements.tolist() == gather
    assert math.fsum(exchange.flops) >= sum(FREELY.cost(r, c, 1) for r, c in dims)
