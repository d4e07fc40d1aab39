"""Updates of replicated matrices travel across machines first, then inside them: checked for every rank at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_muon.forecast.predict import exchange_of
from deepspeed_muon.forecast.settings import PlannedParameter, PlanSettings
from deepspeed_muon.plan.exchange import Chunk, build_exchange_plan
from deepspeed_muon.plan.relay import Machines
from deepspeed_muon.plan.wire import CODED, PLAIN, WireFormat
from tests.support.layouts import replicated_layouts


def delivered(chunks: list[Chunk], machines: Machines) -> list[np.ndarray]:
    """Return the held buffer of every rank after both turns; each unit is ``matrix * 1000 + unit``."""
    sent = []
    for chunk in chunks:
        buffer = np.full(chunk.owned_buffer.numel, -1)
        for s in chunk.owned_buffer.segments:
            for copy in range(s.count):
                start = s.buffer_offset + copy * s.stride
                assert (buffer[start : start + s.units] == -1).all()
                buffer[start : start + s.units] = 1000 * s.matrix + np.arange(s.units)
        assert (buffer >= 0).all()
        sent.append(buffer)
    parts = []
    for rank, chunk in enumerate(chunks):
        relay = chunk.relay
        assert relay is not None and relay.across == machines.across(rank)
        arriving = []
        for peer, units in zip(relay.across, relay.received, strict=True):
            theirs = chunks[peer].relay
            assert theirs is not None and theirs.own_units == units
            place = theirs.across.index(rank)
            arriving.append(sent[peer][place * units :][:units])
        parts.append(np.concatenate(arriving))
    held = []
    for rank, chunk in enumerate(chunks):
        relay = chunk.relay
        assert relay is not None and relay.inside == machines.inside(rank)
        assert [len(parts[peer]) for peer in relay.inside] == list(relay.parts)
        held.append(np.concatenate([parts[peer] for peer in relay.inside]))
    return held


@settings(max_examples=100, deadline=None)
@given(
    dims=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8),
    machines=st.builds(Machines, st.integers(2, 4), st.integers(2, 3)),
    chunk=st.sampled_from([1, 30, 10_000]),
    wire=st.sampled_from([PLAIN, CODED, WireFormat(5)]),
    data=st.data(),
)
def test_every_rank_gets_every_update(
    dims: list[tuple[int, int]], machines: Machines, chunk: int, wire: WireFormat, data: st.DataObject
) -> None:
    world = machines.count * machines.ranks
    layouts = replicated_layouts(dims, world)
    owners = [data.draw(st.integers(0, world - 1)) for _ in layouts]
    plans = [
        build_exchange_plan(
            layouts, owners, rank=r, world_size=world, chunk_numel=chunk, wire=wire, machines=machines
        )
        for r in range(world)
    ]
    assert len({plan.digest() for plan in plans}) == 1
    seen = set()
    for number in range(len(plans[0].chunks)):
        chunks = [plan.chunks[number] for plan in plans]
        assert all(chunk.scatters and not chunk.gathers for chunk in chunks)
        held = delivered(chunks, machines)
        for rank, each in enumerate(chunks):
            assert len(held[rank]) == each.held_buffer.numel
            for s in each.held_buffer.segments:
                found = held[rank][s.buffer_offset : s.buffer_offset + s.units]
                assert (found == 1000 * s.matrix + np.arange(s.units)).all()
            others = {index for index in each.matrices if owners[index] != rank}
            assert {s.matrix for s in each.held_buffer.segments} == others
            assert set(each.owned) == set(each.matrices) - others
        seen.update(chunks[0].matrices)
    assert seen == set(range(len(layouts)))
    for plan in plans:
        wanted = {machines.across(plan.rank), machines.inside(plan.rank)}
        assert plan.subgroups() == wanted


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0, 0, 1, 1], Machines(2, 2)),
        ([0] * 4 + [1] * 4 + [2] * 4, Machines(3, 4)),
        (None, None),
        ([0, 0, 0, 0], None),  # one machine
        ([0, 1, 2, 3], None),  # nobody to relay to inside
        ([0, 0, 1], None),
        ([0, 1, 0, 1], None),
        ([0, 0, 0, 1, 1], None),
    ],
)
def test_regular_machines(nodes: list[int] | None, expected: Machines | None) -> None:
    assert Machines.of(nodes) == expected


def test_the_forecast_counts_what_crosses_the_link() -> None:
    """Sixteen ranks on two machines: an update leaves its machine once instead of eight times."""
    matrices = [PlannedParameter(f"{n}", 64 * 64, True, ((1, 64, 64),)) for n in range(32)]
    flat = exchange_of(matrices, PlanSettings(16, 0, gpus_per_node=16, share_matrices=False))
    relayed = exchange_of(matrices, PlanSettings(16, 0, gpus_per_node=8, share_matrices=False))
    own = flat.scatter_elements / 15
    assert flat.leaving == 0.0
    assert own.sum() == 32 * 64 * 64
    # Two matrices each: one copy to the other machine; then seven copies of those that both machines had.
    assert (relayed.scatter_elements == own + 7 * 2 * own).all()
    assert relayed.leaving == pytest.approx(1 / 15)
