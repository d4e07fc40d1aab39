"""An engine that is made by some of the program's ranks: the others run another engine, or none at all.

DeepSpeed allows it through an ``mpu`` object: its own AdamW trained so at stages 0 to 2, while an engine with this
optimizer, or an AdamW engine in a program that had imported this package, waited for ranks that never came.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import deepspeed_muon
import deepspeed_muon.checkpoint
from tests.support import training
from tests.support.models import build
from tests.support.tensor_parallel import SomeRanks
from tests.support.thinning import full

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def engine_of(mpu: Any, config: dict[str, Any], *, seed: int = 0) -> Any:
    return training.initialize(build("toy", seed=seed), config, mpu=mpu)


def two_engines(
    rank: int, world_size: int, *, stage: int, subsets: list[list[int]], params: dict[str, Any]
) -> Any:
    """Train one engine on each part of the ranks, from other weights; ranks in no part do nothing."""
    mpu = SomeRanks(*subsets)
    report: dict[str, Any] = {}
    for number, members in enumerate(subsets):
        if rank in members:
            engine = engine_of(mpu, training.ds_config(stage, clipping=0.5, params=params), seed=number)
            training.train_steps(engine, 3, members.index(rank), len(members))
            weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
            measured = deepspeed_muon.health(engine).get("matrices", {})
            report = {"part": number, "weights": weights, "health": len(measured)}
    return report


@pytest.mark.parametrize(
    ("stage", "subsets"),
    [
        (0, [[0, 2]]),
        (1, [[1, 2], [0]]),
        full(2, [[0, 1]]),
        # DeepSpeed's stage 3 has barriers of all ranks, so all of them must make an engine at the same time.
        (3, [[0, 2], [1]]),
    ],
)
def test_it_trains_as_if_it_were_the_program(ranks: Any, stage: int, subsets: list[list[int]]) -> None:
    """Health is sampled over its ranks; weights are those of a program of as many ranks, bit for bit."""
    params = {"health": 1}
    results = ranks(3).run(two_engines, stage=stage, subsets=subsets, params=params)
    for number, members in enumerate(subsets):
        if len(members) == 1:
            continue  # the pool of one rank would cost seconds
        everybody = {"stage": stage, "subsets": [list(range(len(members)))], "params": params}
        expected = ranks(len(members)).run(two_engines, **everybody)[0]
        for rank in members:
            assert results[rank]["part"] == number and results[rank]["health"] > 0
            training.assert_same_bits(results[rank], expected, "weights")


def refused(rank: int, world_size: int, *, folder: str) -> list[str]:
    """Ask for what needs all ranks of the program: consolidated checkpoints."""
    mpu = SomeRanks([0, 1])
    if rank == 2:
        return []
    config = training.ds_config(2, params={"consolidate_on_save": True})
    said = training.refusal(lambda: engine_of(mpu, config), deepspeed_muon.ConfigError)
    engine = engine_of(mpu, training.ds_config(2))
    calls = (deepspeed_muon.checkpoint.consolidate, deepspeed_muon.checkpoint.restore)
    refusals = (
        training.refusal(lambda call=call: call(engine, folder), deepspeed_muon.CheckpointError)
        for call in calls
    )
    return [said, *refusals]


def test_calls_of_all_ranks_are_refused_with_the_reason(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(3).run(refused, folder=str(tmp_path))[:2]:
        assert len(said) == 3 and all("some of the program's ranks" in message for message in said)
        assert "consolidate_on_save" in said[0]


def foreign_subset(rank: int, world_size: int, *, stage: int) -> Any:
    """An AdamW engine on two of three ranks, in a program that imported this package."""
    mpu = SomeRanks([0, 2])
    if rank == 1:
        return None
    engine = engine_of(mpu, {**training.ds_config(stage), "optimizer": ADAMW})
    return [training.run_step(engine, step, rank, 2, 1) for step in range(2)]


@pytest.mark.parametrize("stage", [0, 1, full(2)])
def test_an_adamw_engine_of_some_ranks_waits_for_nobody(ranks: Any, stage: int) -> None:
    first, idle, last = ranks(3).run(foreign_subset, stage=stage, timeout=60)
    assert idle is None and len(first) == len(last) == 2


def mixed(rank: int, world_size: int, *, stage: int, wait: float) -> Any:
    """Start engines of type Muon, and one of type AdamW on the last rank."""
    mpu = SomeRanks(list(range(world_size)), timeout=2 * wait)
    config = training.ds_config(stage)
    if rank == world_size - 1:
        config["optimizer"] = ADAMW
    store = dist.distributed_c10d._get_default_store()
    usual = store.timeout
    dist.barrier()
    store.set_timeout(timedelta(seconds=wait))
    try:
        engine_of(mpu, config)
    except deepspeed_muon.RankDisagreementError as error:
        return str(error)
    except RuntimeError:
        return "the process group's own time-out"
    finally:
        store.set_timeout(usual)
    return "made"


@pytest.mark.parametrize("stage", [0, full(3)])
def test_another_optimizer_on_one_rank_ends_by_the_timeout(ranks: Any, stage: int) -> None:
    """Ranks of type Muon name those that did not come; the AdamW rank sees what DeepSpeed makes of their absence."""
    *ours, adamw = ranks(3).run(mixed, stage=stage, wait=4.0, timeout=60)
    for message in ours:
        assert "ranks [2] did not start an engine with this optimizer within 4 s" in message
        assert "optimizer.type" in message
    assert adamw == "the process group's own time-out"
