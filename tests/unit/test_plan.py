"""Layouts, owners and exchange plans: pure data, checked for every rank at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_muon.plan.exchange import ExchangePlan, build_exchange_plan
from deepspeed_muon.plan.layout import (
    Fragment,
    MatrixLayout,
    flat_fragments,
    replicated_fragments,
    sharded_fragments,
)
from deepspeed_muon.plan.owners import assign_owners, matrix_flops

shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8)


def flat_layouts(dims: list[tuple[int, int]], world: int) -> list[MatrixLayout]:
    total = sum(r * c for r, c in dims)
    per_rank = -(-total // world)
    layouts, offset = [], 0
    for number, (rows, cols) in enumerate(dims):
        layouts.append(
            MatrixLayout(f"m{number}", rows, cols, 0, flat_fragments(offset, rows * cols, per_rank))
        )
        offset += rows * cols
    return layouts


def sharded_layouts(dims: list[tuple[int, int]], world: int) -> list[MatrixLayout]:
    layouts, offset = [], 0
    for number, (rows, cols) in enumerate(dims):
        shard = -(-rows * cols // world)
        layouts.append(
            MatrixLayout(f"m{number}", rows, cols, 0, sharded_fragments(offset, rows * cols, shard))
        )
        offset += shard
    return layouts


def replicated_layouts(dims: list[tuple[int, int]], world: int) -> list[MatrixLayout]:
    return [
        MatrixLayout(f"m{i}", r, c, i, replicated_fragments(0, r * c, world), replicated=True)
        for i, (r, c) in enumerate(dims)
    ]


MAKERS = {"flat": flat_layouts, "sharded": sharded_layouts, "replicated": replicated_layouts}


def plans(layouts: list[MatrixLayout], world: int, chunk: int = 1 << 20) -> list[ExchangePlan]:
    owners = assign_owners(layouts, world)
    return [
        build_exchange_plan(layouts, owners, rank=r, world_size=world, chunk_numel=chunk)
        for r in range(world)
    ]


@settings(max_examples=150, deadline=None)
@given(
    dims=shapes,
    world=st.integers(1, 5),
    kind=st.sampled_from(sorted(MAKERS)),
    chunk=st.sampled_from([1, 30, 10_000]),
)
def test_what_one_rank_sends_another_receives_in_the_same_order(
    dims: list[tuple[int, int]], world: int, kind: str, chunk: int
) -> None:
    per_rank = plans(MAKERS[kind](dims, world), world, chunk)
    assert len({plan.digest() for plan in per_rank}) == 1
    assert len({len(plan.chunks) for plan in per_rank}) == 1
    for number in range(len(per_rank[0].chunks)):
        chunks = [plan.chunks[number] for plan in per_rank]
        assert len({(c.gathers, c.scatters, c.matrices) for c in chunks}) == 1
        for a in range(world):
            for b in range(world):
                assert chunks[a].gather_send_splits[b] == chunks[b].gather_recv_splits[a]
                assert chunks[a].scatter_send_splits[b] == chunks[b].scatter_recv_splits[a]
                for out, into in (("outgoing", "incoming"), ("updates_out", "updates_in")):
                    holder, owner = (a, b) if out == "outgoing" else (b, a)
                    sent = [
                        (s.matrix, s.fragment)
                        for s in getattr(chunks[a], out)
                        if s.fragment.rank == holder and per_rank[a].owners[s.matrix] == owner
                    ]
                    got = [
                        (s.matrix, s.fragment)
                        for s in getattr(chunks[b], into)
                        if s.fragment.rank == holder and per_rank[b].owners[s.matrix] == owner
                    ]
                    assert sent == got


@settings(max_examples=100, deadline=None)
@given(dims=shapes, world=st.integers(1, 5), kind=st.sampled_from(sorted(MAKERS)))
def test_every_owner_gets_every_element_once_and_every_holder_its_update(
    dims: list[tuple[int, int]], world: int, kind: str
) -> None:
    layouts = MAKERS[kind](dims, world)
    per_rank = plans(layouts, world)
    for index, matrix in enumerate(layouts):
        owner = per_rank[0].owners[index]
        own = [f for f in matrix.fragments if f.rank == owner]
        incoming = [s.fragment for c in per_rank[owner].chunks for s in c.incoming if s.matrix == index]
        covered = sorted((f.matrix_offset, f.numel) for f in own + incoming)
        assert sum(numel for _, numel in covered) == matrix.numel
        for rank in range(world):
            held = sorted((f.matrix_offset, f.numel) for f in matrix.fragments if f.rank == rank)
            returned = sorted(
                (s.fragment.matrix_offset, s.fragment.numel)
                for c in per_rank[rank].chunks
                for s in c.updates_in
                if s.matrix == index
            )
            assert returned == ([] if rank == owner else held)
        assert sum(index in c.owned for plan in per_rank for c in plan.chunks) == 1


@settings(max_examples=100, deadline=None)
@given(dims=shapes, world=st.integers(2, 6))
def test_a_matrix_on_one_rank_never_moves(dims: list[tuple[int, int]], world: int) -> None:
    layouts = flat_layouts(dims, world)
    per_rank = plans(layouts, world)
    sent = sum(plan.sent_elements for plan in per_rank)
    straddling = [m for m in layouts if m.whole_on() is None]
    assert sent <= 2 * sum(m.numel for m in straddling)
    owners = per_rank[0].owners
    assert sent == 2 * sum(m.numel - m.held_by(o) for m, o in zip(layouts, owners, strict=True))
    for index, matrix in enumerate(layouts):
        if matrix.whole_on() is not None:
            assert owners[index] == matrix.whole_on()


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_sharded_ownership_is_balanced(world: int) -> None:
    layouts = sharded_layouts([(64, 64)] * (world * 3) + [(64, 256)] * world, world)
    load = [0.0] * world
    assign_owners(layouts, world, load=load)
    assert max(load) / (sum(load) / world) <= 1.05
    assert sum(load) == pytest.approx(sum(matrix_flops(m) for m in layouts))


def test_load_of_other_partitions_counts() -> None:
    layouts = sharded_layouts([(64, 64)], 3)
    assert assign_owners(layouts, 3, load=[5e9, 0.0, 5e9]) == (1,)


def test_incomplete_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="do not cover"):
        MatrixLayout("m", 2, 2, 0, (Fragment(0, 0, 0, 3),))
    with pytest.raises(ValueError, match="do not cover"):
        MatrixLayout("m", 2, 2, 0, (Fragment(0, 0, 0, 3), Fragment(1, 2, 0, 2)))
    with pytest.raises(ValueError, match="not a fragment"):
        Fragment(0, 0, 0, 0)


def test_heads_divide_rows() -> None:
    layout = MatrixLayout("q", 12, 8, 0, (Fragment(0, 0, 0, 96),), heads=3)
    assert layout.block_shape == (4, 8)
    with pytest.raises(ValueError, match="heads"):
        MatrixLayout("q", 12, 8, 0, (Fragment(0, 0, 0, 96),), heads=5)
