"""Layouts, owners and exchange plans: pure data, checked for every rank at once."""

from __future__ import annotations

import math
import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_muon.math.newton_schulz import orthogonalize_flops, runs_gram
from deepspeed_muon.plan.chunks import BufferPlan, ExchangePlan, build_exchange_plan
from deepspeed_muon.plan.flat_order import order_of_matrices
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.owners import (
    assign_owners,
    split_blocks,
    split_stack,
)
from deepspeed_muon.plan.placement import (
    Floats,
    Fragment,
    Placement,
    flat_placement,
    replicated_placement,
    sharded_placement,
)
from deepspeed_muon.step.orthogonalize import batches
from deepspeed_muon.tools.plan import sent_by_rank
from deepspeed_muon.transport.all_to_all import ChunkExchange, ExchangeBuffers, SentCounts
from deepspeed_muon.variants import VARIANTS
from tests.support.layouts import (
    ITERATION,
    MAKERS,
    flat_layouts,
    fragments_of,
    matrix_flops,
    sent_elements,
    sharded_layouts,
)

shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8)


def owners_of(layouts: list[MatrixLayout], load: Floats) -> list[int]:
    costs = [matrix_flops(layout) for layout in layouts]
    return assign_owners(costs, [layout.placement for layout in layouts], load=load)


def plans(layouts: list[MatrixLayout], world: int, chunk: int = 1 << 20) -> list[ExchangePlan]:
    owners = owners_of(layouts, np.zeros(world))
    return [
        build_exchange_plan(layouts, owners, rank=r, world_size=world, chunk_numel=chunk)
        for r in range(world)
    ]


def elements(buffer: BufferPlan, peer: int, world: int, *, broadcast: bool = False) -> list[tuple[int, int]]:
    """Return matrix and number in it of all elements that a buffer has for a peer; with ``broadcast`` each gets all."""
    splits = [0] * peer + [buffer.numel] if broadcast else buffer.splits(world)
    content = [(-1, -1)] * buffer.numel
    for index, s in buffer.segments:
        for number in range(s.fragments):
            for i in range(s.numel):
                offset = s.buffer_offset + number * s.fragment_distance + i
                assert content[offset] == (-1, -1)
                content[offset] = index, s.matrix_offset + number * s.numel + i
    assert sum(splits) == buffer.numel
    of_peer = content[sum(splits[:peer]) :][: splits[peer]]
    # At the end there may be padding.
    padding = of_peer.count((-1, -1))
    assert padding == 0 or (padding < 8 and len(of_peer) >= 1024 and len(of_peer) % 8 == 0)
    return of_peer[: len(of_peer) - padding]


@settings(max_examples=150)
@given(
    dims=shapes,
    world=st.integers(1, 5),
    kind=st.sampled_from(sorted(MAKERS)),
    chunk=st.sampled_from([1, 30, 10_000]),
)
def test_fragments_are_received_in_the_order_of_sending(
    dims: list[tuple[int, int]], world: int, kind: str, chunk: int
) -> None:
    received_as_sent(plans(MAKERS[kind](dims, world), world, chunk))


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_long_messages_are_aligned(kind: str) -> None:
    """On three ranks ZeRO 3 cut odd lengths, and NCCL copied what did not start at 16 bytes in single bytes."""
    per_rank = plans(MAKERS[kind]([(61, 67), (59, 71), (3, 5), (61, 67), (59, 71)], 3), 3)
    received_as_sent(per_rank)
    for chunk in (chunk for plan in per_rank for chunk in plan.chunks):
        for counts in (chunk.fragment_buffer.counts, chunk.owner_buffer.counts):
            assert not (counts[counts >= 1024] % 8).any()


def received_as_sent(per_rank: list[ExchangePlan]) -> None:
    """Check that what each rank sends to another one is what that one expects, in the same order."""
    world = len(per_rank)
    assert len({plan.digest() for plan in per_rank}) == 1
    assert len({len(plan.chunks) for plan in per_rank}) == 1
    for number in range(len(per_rank[0].chunks)):
        chunks = [plan.chunks[number] for plan in per_rank]
        assert len({(c.kind, c.matrices) for c in chunks}) == 1
        for a in range(world):
            for b in range(world):
                stored, owned = (
                    elements(chunks[a].fragment_buffer, b, world),
                    elements(chunks[b].owner_buffer, a, world, broadcast=chunks[b].kind == "broadcast"),
                )
                assert stored == owned or (a == b and not stored and chunks[b].kind == "broadcast")


@settings(max_examples=100)
@given(dims=shapes, world=st.integers(1, 5), kind=st.sampled_from(sorted(MAKERS)))
def test_every_owner_gets_every_element_once_and_every_holder_its_update(
    dims: list[tuple[int, int]], world: int, kind: str
) -> None:
    layouts = MAKERS[kind](dims, world)
    per_rank = plans(layouts, world)
    gather, scatter = sent_by_rank(layouts, per_rank[0].owners, world)
    for rank, plan in enumerate(per_rank):
        assert gather[rank] == sum(
            chunk.fragment_buffer.remote_numel * (chunk.kind == "all_to_all") for chunk in plan.chunks
        )
        assert gather[rank] + scatter[rank] == sent_elements(plan)
    for index, matrix in enumerate(layouts):
        owner = per_rank[0].owners[index]
        arrives = [
            element
            for chunk in per_rank[owner].chunks
            for peer in range(world)
            if peer != owner or not matrix.placement.replicated
            for element in elements(chunk.owner_buffer, peer, world, broadcast=chunk.kind == "broadcast")
            if element[0] == index
        ]
        stays = matrix.placement.ranks == range(owner, owner + 1)
        if matrix.placement.replicated:
            assert len(arrives) == (world - 1) * matrix.numel
        else:
            assert sorted(i for _, i in arrives) == ([] if stays else list(range(matrix.numel)))
        for rank in range(world):
            sent = (segment for c in per_rank[rank].chunks for segment in c.fragment_buffer.segments)
            segments = [(s.matrix_offset, s.shape[2]) for number, s in sent if number == index]
            fragment = matrix.placement.fragment_on(rank)
            absent = not fragment or stays or (rank == owner and matrix.placement.replicated)
            assert segments == ([] if absent else [(fragment.matrix_offset, fragment.numel)])
        assert sum(index in c.owned for plan in per_rank for c in plan.chunks) == 1


@settings(max_examples=100)
@given(dims=shapes, world=st.integers(2, 6))
def test_a_matrix_on_one_rank_never_moves(dims: list[tuple[int, int]], world: int) -> None:
    layouts = flat_layouts(dims, world)
    per_rank = plans(layouts, world)
    sent = sum(sent_elements(plan) for plan in per_rank)
    straddling = [m for m in layouts if m.placement.only_rank is None]
    assert sent <= 2 * sum(m.numel for m in straddling)
    owners = per_rank[0].owners
    assert sent == 2 * sum(m.numel - m.placement.numel_on(o) for m, o in zip(layouts, owners, strict=True))
    for index, matrix in enumerate(layouts):
        if matrix.placement.only_rank is not None:
            assert owners[index] == matrix.placement.only_rank


@settings(max_examples=60)
@given(dims=shapes, world=st.integers(1, 5), kind=st.sampled_from(sorted(MAKERS)), chunk=st.integers(1, 90))
def test_chunks_are_bounded(dims: list[tuple[int, int]], world: int, kind: str, chunk: int) -> None:
    """What a rank owns, sends and receives is no more than asked, but for one matrix that is larger.

    At stage 0 every rank receives the updates of all: together they stay within the bound.
    """
    for plan in plans(MAKERS[kind](dims, world), world, chunk):
        for exchange in plan.chunks:
            numels = [plan.matrices[index].numel for index in exchange.matrices]
            totals = [0] * world
            for index, numel in zip(exchange.matrices, numels, strict=True):
                totals[plan.owners[index]] += numel
            bound = max(chunk, *numels)
            sent = exchange.fragment_buffer
            assert max(totals) <= bound and sent.remote_numel <= bound
            assert sent.numel - sent.remote_numel <= totals[plan.rank]
            assert exchange.owner_buffer.numel <= (
                totals[plan.rank] if exchange.kind == "all_to_all" else bound
            )
            assert exchange.matrices == tuple(sorted(exchange.matrices))
        assert sorted(i for exchange in plan.chunks for i in exchange.matrices) == list(range(len(dims)))


@pytest.mark.parametrize("world", [2, 4])
def test_chunks_are_many_enough_to_overlap(world: int) -> None:
    """Also where all could be one."""
    layouts = sharded_layouts([(512, 512), (512, 1408)] * 16, world)
    assert all(len(plan.chunks) >= 8 for plan in plans(layouts, world, 1 << 30))


def waves_over_ideal(plan: ExchangePlan, *, sent: bool) -> tuple[float, float]:
    """Return the waves of a rank's symmetric products on an H100, and how many there would be without idle processors.

    A product is tiles of 128 x 128 on and below the diagonal, and a wave 132 of them, which takes as long as its inner
    dimension. The standard iteration has ten products of m x m; the one on the Gram matrix, in half precision, two with
    an inner dimension of n and fourteen.
    """
    context = SimpleNamespace(batch_below=sys.maxsize, variant=VARIANTS["muon"])
    waves = ideal = 0.0
    for chunk in plan.chunks:
        for batch in (
            batches(plan.matrices, context, chunk.owned) if sent or chunk.kind != "all_to_all" else ()
        ):
            short, long = sorted(plan.matrices[batch[0]].logical_shape)
            side = -(-short // 128)
            tiles = len(batch) * side * (side + 1) // 2 / 132
            length = 2 * long + 14 * short if runs_gram(short, long, "gram", halves=True) else 10 * short
            waves, ideal = waves + math.ceil(tiles) * length, ideal + tiles * length
    return waves, ideal


# Width, hidden width and layers of benchmarks/step_ranks.py; with eight chunks of everything, and without joining a
# shape and its transpose, the waves over the ideal of all matrices were 2.94, 1.69, 1.37, 1.21 and 1.00.
@pytest.mark.parametrize(
    ("width", "hidden", "layers", "world", "most"),
    [
        (1024, 2816, 26, 8, 1.29),
        (2048, 5504, 25, 8, 1.21),
        (2048, 5504, 25, 1, 1.13),
        (1024, 2816, 26, 1, 1.11),
        (4096, 11008, 32, 8, 1.01),
    ],
)
def test_batches_that_are_not_sent_fill_a_gpu(
    width: int, hidden: int, layers: int, world: int, most: float
) -> None:
    """At ZeRO 1; a rank also owns one or two matrices that are sent, which run by themselves."""
    dims = ([(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)]) * layers
    order = order_of_matrices(
        [rows * cols for rows, cols in dims], [((1, *shape),) for shape in dims], world, ITERATION
    )
    layouts, bound = flat_layouts([dims[index] for index in order], world), 1 << 26
    per_rank = plans(layouts, world, bound)
    for sent, limit in ((False, 1.2), (True, most)):
        waves, ideal = np.sum([waves_over_ideal(plan, sent=sent) for plan in per_rank], axis=0)
        assert waves / ideal <= limit
    owned = [sum(layouts[index].numel for index in chunk.owned) for plan in per_rank for chunk in plan.chunks]
    assert max(owned) <= bound


def test_all_ranks_work_in_every_chunk() -> None:
    # Layers of four square and three wide matrices on eight ranks, chunks of about one matrix of a layer.
    layouts = sharded_layouts(([(64, 64)] * 4 + [(172, 64)] * 3) * 32, 8)
    plan = plans(layouts, 8, chunk=172 * 64)[0]
    total, serial = [0.0] * 8, 0.0
    for chunk in plan.chunks:
        load = [0.0] * 8
        for index in chunk.matrices:
            load[plan.owners[index]] += matrix_flops(layouts[index])
        serial += max(load)
        total = [a + b for a, b in zip(total, load, strict=True)]
    # One rank after the other would be up to 8; 1 is no waiting at all.
    assert serial <= 1.1 * max(total)


@settings(max_examples=100)
@given(offset=st.integers(0, 40), numel=st.integers(1, 40), partition=st.integers(1, 15))
def test_placements_are_those_of_the_elements(offset: int, numel: int, partition: int) -> None:
    """In a flat buffer that is cut into partitions, and at stage 3, where each rank's shard begins at one offset."""

    def elements_of(placement: Placement) -> list[tuple[int, int]]:
        return [(f.rank, f.partition_offset + i) for f in fragments_of(placement) for i in range(f.numel)]

    flat = flat_placement(offset, numel, partition)
    assert elements_of(flat) == [divmod(offset + element, partition) for element in range(numel)]
    sharded = sharded_placement(offset, numel, partition)
    expected = [(element // partition, offset + element % partition) for element in range(numel)]
    assert elements_of(sharded) == expected


def test_incomplete_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="are not the 3 of its placement"):
        MatrixLayout("m", 2, 2, 0, sharded_placement(0, 3, 3))
    with pytest.raises(ValueError, match="not a placement"):
        Placement(4, 0, 2, 0, 0, 0)
    with pytest.raises(ValueError, match="not a fragment"):
        Fragment(0, 0, 0, 0)


def test_blocks_add_up() -> None:
    placement = sharded_placement(0, 96, 96)
    heads = MatrixLayout("q", 12, 8, 0, placement, row_blocks=(4, 4, 4))
    assert heads.block_shapes[0] == (4, 8) and heads.equal_blocks == 3
    grouped = MatrixLayout("qkv", 12, 8, 0, placement, row_blocks=(8, 2, 2))
    assert grouped.equal_blocks is None
    assert matrix_flops(grouped) == orthogonalize_flops(8, 8) + 2 * orthogonalize_flops(2, 8)
    columns = MatrixLayout(
        "c_attn", 12, 8, 0, placement, row_blocks=(6, 6), col_blocks=(5, 3), transposed=True
    )
    assert columns.block_shapes == ((6, 5), (6, 3), (6, 5), (6, 3))
    narrower = replace(columns, row_blocks=(), col_blocks=())
    assert narrower.block_shapes == ((12, 8),)
    same = pickle.loads(pickle.dumps(columns))
    assert same == columns and hash(same) == hash(columns) and same.block_shapes == columns.block_shapes
    assert columns.equal_blocks is None
    with pytest.raises(ValueError, match=r"blocks .5, 5. x .8,. do not add up"):
        MatrixLayout("q", 12, 8, 0, placement, row_blocks=(5, 5))
    with pytest.raises(ValueError, match=r"blocks .12,. x .8, 0. do not add up"):
        MatrixLayout("q", 12, 8, 0, placement, col_blocks=(8, 0))


def test_stacks_are_cut_between_complete_blocks() -> None:
    """Six blocks of ten elements over ranks of 25: two whole on each end, the third and fourth cross a cut."""
    assert split_blocks(6, 10, flat_placement(0, 60, 25), cost=1.0, limit=0.5) == [
        (0, 2),
        (2, 1),
        (3, 2),
        (5, 1),
    ]
    # Blocks that all cross go together up to the limit; where every rank has all, only the limit counts.
    assert split_blocks(4, 10, flat_placement(0, 40, 5), cost=1.0, limit=2.9) == [(0, 2), (2, 2)]
    assert split_blocks(5, 10, replicated_placement(50, 3), cost=1.0, limit=2.0) == [
        (0, 2),
        (2, 2),
        (4, 1),
    ]


def test_a_stack_is_cut_only_between_blocks_of_int8_momentum() -> None:
    """Of blocks of 96 elements every eighth begins a block of 256 codes."""
    runs = split_blocks(24, 96, replicated_placement(24 * 96, 3), cost=1.0, limit=1.0, divisor=256)
    assert runs == [(0, 8), (8, 8), (16, 8)]
    runs = split_blocks(24, 96, flat_placement(0, 24 * 96, 500), cost=1.0, limit=1.0, divisor=256)
    assert runs == [(0, 16), (16, 8)]
    aligned = split_blocks(9, 256, flat_placement(0, 9 * 256, 600), cost=1.0, limit=1.0, divisor=256)
    assert aligned == split_blocks(9, 256, flat_placement(0, 9 * 256, 600), cost=1.0, limit=1.0)


@settings(max_examples=150)
@given(
    blocks=st.integers(2, 7),
    rows=st.integers(1, 4),
    cols=st.integers(1, 5),
    before=st.integers(0, 30),
    world=st.integers(1, 5),
    kind=st.sampled_from(sorted(MAKERS)),
    limit=st.sampled_from([0.0, 2.0, 1e9]),
)
def test_runs_of_blocks_are_the_stack(
    blocks: int, rows: int, cols: int, before: int, world: int, kind: str, limit: float
) -> None:
    dims = [(1, before)] * bool(before) + [(blocks * rows, cols)]
    stack = replace(MAKERS[kind](dims, world)[-1], row_blocks=(rows,) * blocks)
    pieces = split_stack(stack, cost=float(blocks), limit=limit)
    assert [piece.first_row for piece in pieces] == [
        sum(p.rows for p in pieces[:i]) for i in range(len(pieces))
    ]
    assert sum(len(piece.block_shapes) for piece in pieces) == blocks
    assert all(piece.block_shapes[0] == (rows, cols) for piece in pieces)
    elements = sorted(
        (f.rank, f.partition_offset + i, piece.first_row * cols + f.matrix_offset + i)
        for piece in pieces
        for f in fragments_of(piece.placement)
        for i in range(f.numel)
    )
    assert elements == sorted(
        (f.rank, f.partition_offset + i, f.matrix_offset + i)
        for f in fragments_of(stack.placement)
        for i in range(f.numel)
    )
    # A run that lies whole somewhere never moves; one that does not is small, or one block.
    for piece in pieces if len(pieces) > 1 else []:
        assert piece.placement.only_rank is not None or len(piece.block_shapes) <= max(1, limit)
        if kind != "replicated":
            holders = [piece.placement.rank_of(element) for element in range(piece.numel)]
            assert holders == [f.rank for f in fragments_of(piece.placement) for _ in range(f.numel)]


def test_splits_of_many_chunks_are_computed_once() -> None:
    """With more than 32 chunks they were computed in every step: a cache of 64 of them never had the next one."""
    layouts = sharded_layouts([(4, 4)] * 80, 2)
    plan = build_exchange_plan(layouts, [0, 1] * 40, rank=0, world_size=2, chunk_numel=16)
    assert len(plan.chunks) == 40 and all(chunk.kind == "all_to_all" for chunk in plan.chunks)
    with (
        mock.patch.object(BufferPlan, "splits", autospec=True, side_effect=BufferPlan.splits) as splits,
        mock.patch("deepspeed_muon.transport.all_to_all.start_all_to_all"),
    ):
        buffers, options = ExchangeBuffers(torch.device("cpu")), {"dtype": torch.bfloat16, "number": 0}
        exchange = ChunkExchange(plan, buffers, SentCounts(), None, overlap=True, **options)
        for number in [*range(40)] * 3:
            for direction in ("gather", "scatter"):
                exchange.start(direction, exchange.open(number, number))
    assert splits.call_count == 80
