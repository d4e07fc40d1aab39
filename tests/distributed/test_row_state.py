"""What NorMuon sends in a step beside Muon. Its kernels are in test_step_launches, the waits in test_plan_counts.

The owner of a matrix stores its row state, so that NorMuon sends nothing more, but for an all-reduce at ZeRO 0.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import deepspeed_muon
from benchmarks.sent_bytes import counting
from deepspeed_muon.variants import normuon
from tests.support import training
from tests.support.thinning import full


def second_step(rank: int, world_size: int, *, stage: int, variant: str) -> dict[str, Any]:
    """Train two steps; count what the optimizer sends in the second one, and the rows that it stores."""
    params = {"variant": variant, "ns_backend": "torch", "ns_dtype": "bf16", "wire_dtype": "bf16"}
    engine = training.make_engine(training.ds_config(stage, params=params))
    optimizer = deepspeed_muon.muon_optimizer(engine)
    training.run_step(engine, 0, rank, world_size, 1)
    optimizer.stats.reset()
    tokens, targets = training.batch(1, rank)
    engine.backward(engine(tokens, targets))
    with counting() as sent:
        engine.step()
    rows = sum(
        report[normuon.MOMENTS].numel() for report in optimizer.state.values() if normuon.MOMENTS in report
    )
    owned = [
        sum(m.output_count for m, owner in zip(r.plan.matrices, r.plan.owners, strict=True) if owner == rank)
        for r in optimizer.runners
    ]
    return {
        "calls": Counter(sent.calls),
        "bytes": sent.total,
        "exchanged": (optimizer.stats.exchanges, optimizer.stats.bytes_sent),
        "rows": rows,
        "owned": sum(owned),
    }


@pytest.mark.parametrize(("stage", "world"), [(1, 2), full(2, 4), full(3, 2), (3, 4)])
def test_normuon_sends_as_much_as_muon(ranks: Any, stage: int, world: int) -> None:
    muon, rows = (
        ranks(world).run(second_step, stage=stage, variant=variant) for variant in ("muon", "normuon")
    )
    for plain, report in zip(muon, rows, strict=True):
        for key in ("calls", "bytes", "exchanged"):
            assert report[key] == plain[key], key
        assert report["rows"] == report["owned"]
    assert any(report["rows"] for report in rows)


@pytest.mark.parametrize("world", [2, full(4)])
def test_without_zero_one_all_reduce_copies_the_rows(ranks: Any, world: int) -> None:
    muon, rows = (ranks(world).run(second_step, stage=0, variant=variant) for variant in ("muon", "normuon"))
    for plain, report in zip(muon, rows, strict=True):
        assert report["calls"] == Counter(plain["calls"]) + Counter({"all-reduce": 1})
        assert report["exchanged"][0] - plain["exchanged"][0] == 1
        assert report["exchanged"][1] - plain["exchanged"][1] == 4 * report["rows"] * 2 * (world - 1) // world
        assert report["rows"] == sum(value["owned"] for value in rows)


STEPS, BETA2 = 4, 0.95


def rows_and_masters(rank: int, world_size: int, *, params: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    engine = training.make_engine(
        training.ds_config(0, params={"variant": "normuon", "beta2": BETA2, **params}), "mixed"
    )
    training.train_steps(engine, STEPS, rank, world_size)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    rows = [entry[normuon.MOMENTS] for entry in optimizer.state.values() if normuon.MOMENTS in entry]
    columns = [
        matrix.numel // matrix.output_count for runner in optimizer.runners for matrix in runner.plan.matrices
    ]
    masters = [param.detach() for param in engine.module.parameters()]
    return {"rows": rows, "masters": masters, "columns": columns}


@pytest.mark.parametrize("params", [{}, {"wire_dtype": "bf16"}])
def test_every_rank_has_the_rows_of_replicated_matrices(ranks: Any, params: dict[str, Any]) -> None:
    first, *rest = ranks(3).run(rows_and_masters, params=params)
    assert first["rows"] and all(rows.any() for rows in first["rows"])
    # A row of an orthogonalised matrix is at most about 1.2 long, and its mean square is averaged over the steps.
    # Moments that are added up over the ranks instead grow threefold in a step.
    mean_square = 1.2**2 / min(first.pop("columns"))
    assert all(rows.max() <= 2 * (1 - BETA2**STEPS) * mean_square for rows in first["rows"])
    for result in rest:
        for key, expected in first.items():
            assert all(map(torch.equal, result[key], expected)), key
