"""What the plan predicts is what runs: owners, operations and bytes of real ranks, counted while they train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed_muon
from deepspeed_muon.forecast.live import planned_parameters
from deepspeed_muon.forecast.predict import PlanSettings, exchange_of, zero_bytes
from tests.support import training
from tests.support.counting import counted

WIDTH, HIDDEN = 24, (24, 72, 40, 8, 56)


def count_a_step(
    rank: int,
    world_size: int,
    *,
    stage: int,
    method: str,
    kind: str = "toy",
    params: dict[str, Any] | None = None,
    shape: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train two steps and report what the second one did, beside what the planner says of the same model."""
    config = training.ds_config(stage, params={"ns_backend": "torch", "ns_method": method, **(params or {})})
    if shape is None:
        shape = {"width": WIDTH, "hidden": HIDDEN} if kind == "toy" else {}
    engine = training.make_engine(config, kind, **shape)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    training.run_step(engine, 0, rank, world_size, 1)
    optimizer.stats.reset()
    tokens, targets = training.batch(1, rank)
    with counted() as around:
        loss = engine(tokens, targets)
        engine.backward(loss)
    with counted() as inside:
        engine.step()
    settings = PlanSettings(
        world_size,
        stage,
        method=method,
        ns_dtype=torch.float32,
        wire_bytes=4,
        model_bytes=4,
        order=optimizer.config.order,
        share_matrices=optimizer.config.share_matrices if (params or {}).get("share_matrices") else False,
    )
    parameters = planned_parameters(optimizer.routes)
    exchange = exchange_of(parameters, settings)
    owners: dict[str, int] = {}
    for runner in optimizer.runners:
        for matrix, owner in zip(runner.plan.matrices, runner.plan.owners, strict=True):
            owners.setdefault(matrix.name, owner)
    names = [parameter.name for parameter in parameters if parameter.muon]
    # NorMuon's row moments travel on top of what the planner counts.
    moments = [runner._row_moments for runner in optimizer.runners if runner._row_moments is not None]
    rows = 4 * sum(each.plan.sent_elements for each in moments)
    result = {
        "flops": (inside.flops, float(exchange.flops[rank])),
        "exchange": (
            optimizer.stats.bytes_sent - rows,
            4.0 * float(exchange.gather_elements[rank] + exchange.scatter_elements[rank]),
        ),
        "shared": [
            len({m.name for runner in optimizer.runners for m in runner.plan.matrices if m.sharers}),
            len(exchange.shared),
        ],
        "pieces": sum(len(runner.plan.matrices) for runner in optimizer.runners),
        "owners": (owners, dict(zip(names, exchange.owners, strict=True))),
        "zero": (around.zero + inside.zero, zero_bytes(parameters, settings)),
        "collectives": str((around.sent, inside.sent)),
    }
    engine.destroy()
    return result


# Every stage and number of ranks up to four once or twice; the rest, and eight ranks, are the long matrix.
CORE = {(3, 1), (0, 2), (1, 2), (2, 4), (3, 4)}


@pytest.mark.parametrize(
    ("stage", "world"),
    [
        pytest.param(stage, world, marks=() if (stage, world) in CORE else pytest.mark.full)
        for stage in (0, 1, 2, 3)
        for world in (1, 2, 4, 8)
    ],
)
def test_predictions_are_what_runs(ranks: Any, stage: int, world: int) -> None:
    method = "gram" if (stage + world) % 2 else "standard"
    for result in ranks(world).run(count_a_step, stage=stage, method=method):
        counted_owners, predicted_owners = result["owners"]
        assert counted_owners == predicted_owners
        for key in ("flops", "exchange"):
            really, predicted = result[key]
            assert really == predicted, (key, result)
        # ZeRO pads flat buffers and shards, and sends flags and norms: parts of a percent of 14 thousand elements.
        really, predicted = result["zero"]
        assert really == pytest.approx(predicted, rel=0.02), result


@pytest.mark.parametrize(
    ("stage", "world", "kind", "params"),
    [
        (0, 2, "mixed", {}),
        (1, 4, "mixed", {"order": "given"}),
        (2, 3, "heads", {"order": "given", "per_head_muon": True}),
        (3, 2, "mixed", {}),
        (3, 4, "heads", {"per_head_muon": True}),
        (2, 4, "mixed", {"variant": "normuon"}),
        (3, 3, "heads", {"variant": "normuon", "per_head_muon": True}),
    ],
)
def test_stacks_in_pieces(ranks: Any, stage: int, world: int, kind: str, params: dict[str, Any]) -> None:
    """Experts and heads that lie whole on a rank stay there; the planner counts the same."""
    found = ranks(world).run(count_a_step, stage=stage, method="standard", kind=kind, params=params)
    assert found[0]["pieces"] > len(found[0]["owners"][0]), "something is in pieces"
    for result in found:
        counted_owners, predicted_owners = result["owners"]
        assert counted_owners == predicted_owners
        for key in ("flops", "exchange"):
            really, predicted = result[key]
            assert really == predicted, (key, result)
