"""``engine.offload_states()`` moved masters and momentum away, and the exchange kept its buffers on the device."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

import deepspeed_muon
from tests.support import training
from tests.support.thinning import full


def _bytes(buffers: Any) -> int:
    return sum(memory.numel() for memory in buffers._memory.values())


def moved_away(
    rank: int, world_size: int, *, stage: int, precision: str, momentum: str | None, move: bool
) -> Any:
    """Train, offload all states to the host and take them back, train on; say what the exchange holds meanwhile."""
    params = {"momentum_dtype": momentum}
    engine = training.make_engine(training.ds_config(stage, precision=precision, clipping=0.5, params=params))
    optimizer = deepspeed_muon.muon_optimizer(engine)
    buffers = optimizer.exchange_buffers
    held = []
    for step in range(4):
        training.run_step(engine, step, rank, world_size, 1)
        if move and step % 2 == 0:
            memory = [weakref.ref(each) for each in buffers._memory.values()]
            held.append([_bytes(buffers), len(memory)])
            engine.offload_states()
            held[-1] += [_bytes(buffers), sum(each() is not None for each in memory)]
            engine.reload_states()
    momentum_bytes = training.state_bytes(optimizer.state)["momentum_buffer"]
    report = {"held": held, "bytes": momentum_bytes, **training.outcome(engine)}
    engine.destroy()
    return report


@pytest.mark.parametrize(
    ("stage", "precision", "momentum"),
    [
        full(1, "bf16", None),
        full(2, "bf16", None),
        full(2, "fp32", None),
        full(3, "fp32", None),
        full(3, "bf16", None),
        full(2, "bf16", "bf16"),
        (3, "bf16", "bf16"),
        (2, "bf16", "int8"),
    ],
)
def test_offload_states_changes_nothing(ranks: Any, stage: int, precision: str, momentum: str | None) -> None:
    arguments = {"stage": stage, "precision": precision, "momentum": momentum}
    stayed, moved = (ranks(2).run(moved_away, move=move, **arguments)[0] for move in (False, True))
    for before, buffers, after, alive in moved["held"]:
        # At stages 1 and 2 the matrices of this model lie whole on one rank each, and none travels.
        assert stage < 3 or (before > 0 and buffers > 0)
        assert after == alive == 0
    assert moved["bytes"] == stayed["bytes"] > 0
    training.assert_same_bits(moved, stayed, "params", "momentum")
