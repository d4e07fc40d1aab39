"""Exchanging one chunk while another is orthogonalised changes neither a bit nor a byte, and uses bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed_muon
from deepspeed_muon.transport.pipeline import MuonPipeline
from tests import training
from tests.models import MATRICES

# The matrices of the toy model have 16 to 768 elements, so this makes one or a few matrices of each rank a chunk.
CHUNK = 90


@pytest.mark.parametrize(
    ("stage", "world", "kind"),
    [(0, 2, "toy"), (1, 3, "mixed"), (2, 4, "toy"), (3, 2, "unused"), (3, 4, "toy"), (3, 3, "mixed")],
)
def test_overlap_changes_nothing(ranks: Any, stage: int, world: int, kind: str) -> None:
    """The same sums in the same order: equal to the last bit, with the same messages."""
    outcomes = []
    for overlap in (False, True):
        params = {"exchange_chunk_numel": CHUNK, "exchange_overlap": overlap, "wire_dtype": "bf16"}
        idle = {"idle_from": 2} if kind == "unused" else {}
        settings = {"stage": stage, "kind": kind, "steps": 3, "params": params, **idle}
        outcomes.append(ranks(world).run(training.train, **settings))
    for plain, overlapped in zip(*outcomes, strict=True):
        for part in ("params", "momentum"):
            for name, expected in plain[part].items():
                assert torch.equal(overlapped[part][name], expected), (part, name)
        for counter in ("bytes_sent", "planned_bytes", "orthogonalized", "losses"):
            assert overlapped[counter] == plain[counter]


def follow(rank: int, world_size: int, *, overlap: bool) -> dict[str, Any]:
    """Train at stage 3 and write down in which order the parts of the last step came, and where its buffers lay."""
    params = {"exchange_chunk_numel": CHUNK, "exchange_overlap": overlap}
    engine = training.make_engine(training.ds_config(3, params=params))
    optimizer = deepspeed_muon.muon_optimizer(engine)
    order: list[str] = []
    places: set[int] = set()
    originals = {name: getattr(MuonPipeline, name) for name in ("_depart", "_compute", "_send_back", "_land")}

    def noted(name: str) -> Any:
        def call(pipeline: MuonPipeline, first: Any, *args: Any) -> Any:
            chunk = getattr(first, "chunk", first)
            order.append(f"{name[1:]} {pipeline.plan.chunks.index(chunk)}")
            result = originals[name](pipeline, first, *args)
            flight = result if name == "_depart" else first
            if name in ("_depart", "_land"):
                places.update((flight.held.data_ptr(), flight.owned.data_ptr()))
            return result

        return call

    for name in originals:
        setattr(MuonPipeline, name, noted(name))
    try:
        for step in range(3):
            order.clear()
            training.run_step(engine, step, rank, world_size, 1)
    finally:
        for name, original in originals.items():
            setattr(MuonPipeline, name, original)
    chunks = max(len(runner.plan.chunks) for runner in optimizer.runners)
    report = {
        "order": list(order),
        "places": len(places - {0}),
        "chunks": chunks,
        "reserved": optimizer.exchange_buffers.reserved_bytes,
    }
    engine.destroy()
    return report


def test_chunks_travel_while_others_are_computed(ranks: Any) -> None:
    for result in ranks(2).run(follow, overlap=True):
        last = result["chunks"] - 1
        assert last >= 3
        expected = ["depart 0"]
        for number in range(last + 1):
            expected += [f"depart {number + 1}"] if number < last else []
            expected += [f"compute {number}", f"send_back {number}"]
            expected += [f"land {number - 1}"] if number else []
        assert result["order"] == [*expected, f"land {last}"]


@pytest.mark.parametrize("overlap", [True, False])
def test_buffers_are_few_and_stay(ranks: Any, overlap: bool) -> None:
    """Three places for a chunk, one without overlap, each of two buffers; none is made anew in a later step."""
    slots = 3 if overlap else 1
    # The largest matrices have 768 elements, and each rank owns one in the same chunk; fp32 on the wire. A rank
    # receives the half of its own that it does not hold and sends its half of the other's: 768 elements together.
    for result in ranks(2).run(follow, overlap=overlap):
        assert 0 < result["places"] <= 2 * slots
        assert 0 < result["reserved"] <= slots * 768 * 4


def test_without_overlap_one_chunk_at_a_time(ranks: Any) -> None:
    for result in ranks(2).run(follow, overlap=False):
        parts = ("depart", "compute", "send_back", "land")
        assert result["order"] == [f"{part} {n}" for n in range(result["chunks"]) for part in parts]


def test_matrices_of_the_model_are_orthogonalized_once(ranks: Any) -> None:
    results = ranks(4).run(training.train, stage=3, steps=1, params={"exchange_chunk_numel": 1})
    assert sum(result["orthogonalized"] for result in results) == len(MATRICES["toy"])
