"""At stage 0 on several machines an update crosses the link between two of them once; the numbers stay the same."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import deepspeed_muon
from tests.support import training
from tests.support.contract import compare

# Machines of two ranks each, and one machine of all ranks, where owners send their updates to every rank themselves.
SEVERAL, ONE = {"ranks_per_node": 2}, {"ranks_per_node": 4}


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("toy", {"exchange_overlap": True, "exchange_chunk_numel": 90}),
        ("mixed", {"exchange_overlap": False, "wire_dtype": "bf16"}),
        ("unused", {"exchange_overlap": True}),
        ("toy", {"exchange_overlap": False, "wire_dtype": "int8"}),
        ("toy", {"exchange_overlap": True, "variant": "normuon"}),
    ],
)
def test_equal_to_the_last_bit(ranks: Any, kind: str, params: dict[str, Any]) -> None:
    idle = {"idle_from": 2} if kind == "unused" else {}
    settings = {"stage": 0, "kind": kind, "steps": 3, **idle}
    several, one = (
        ranks(4).run(training.train, params={**params, **nodes}, **settings) for nodes in (SEVERAL, ONE)
    )
    for relayed, plain in zip(several, one, strict=True):
        for part in ("params", "momentum"):
            for name, expected in plain[part].items():
                assert torch.equal(relayed[part][name], expected), (part, name)
        assert relayed["losses"] == plain["losses"]
        if kind != "unused":
            assert relayed["bytes_sent"] == relayed["planned_bytes"]
    # The same copies reach the same ranks, one turn later for most.
    assert sum(r["bytes_sent"] for r in several) == sum(r["bytes_sent"] for r in one)


def test_matches_the_reference(ranks: Any) -> None:
    """With shared matrices and accumulation, too."""
    params = {**SEVERAL, "share_matrices": 2, "exchange_chunk_numel": 1000}
    results = ranks(4).run(training.train, stage=0, kind="wide", params=params, accumulation=2, clipping=0.5)
    compare(results, "wide", 8, 0.5)


def found_machines(rank: int, world_size: int, *, local: list[str], stage: int) -> Any:
    """Start an engine where the launcher says these numbers of ranks on each machine."""
    before = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")}
    os.environ.update(dict.fromkeys(before, local[rank]))
    try:
        engine = training.make_engine(training.ds_config(stage, params={}))
        plans = [runner.plan for runner in deepspeed_muon.muon_optimizer(engine).runners]
        training.run_step(engine, 0, rank, world_size, 1)
        engine.destroy()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    relays = any(chunk.relay is not None for plan in plans for chunk in plan.chunks)
    return [plans[0].machines and [plans[0].machines.count, plans[0].machines.ranks], relays]


@pytest.mark.parametrize(
    ("local", "stage", "expected"),
    [
        (["2"] * 4, 0, [[2, 2], True]),
        (["2"] * 4, 3, [[2, 2], False]),  # every fragment crosses once already
        (["4"] * 4, 0, [None, False]),
        (["3", "3", "3", "1"], 0, [None, False]),  # machines of different size
        (["many"] * 4, 0, [None, False]),
    ],
)
def test_the_launcher_says_how_many_ranks_a_machine_has(
    ranks: Any, local: list[str], stage: int, expected: Any
) -> None:
    assert ranks(4).run(found_machines, local=local, stage=stage) == [expected] * 4
