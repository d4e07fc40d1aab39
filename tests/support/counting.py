"""Counts what a step really multiplies and sends, beside what the planner says of the same model."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import deepspeed_muon
from benchmarks.sent_bytes import counting
from deepspeed_muon.tools.plan import PlanSettings, exchange_of, forecast, zero_bytes
from tests.support import training

TOY = {"width": 24, "hidden": (24, 72, 40, 8, 56)}


def count_a_step(
    rank: int,
    world_size: int,
    *,
    stage: int,
    method: str,
    kind: str = "toy",
    params: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train two steps and report what the second one did, beside what the planner says of the same model."""
    config = training.ds_config(stage, params={"ns_backend": "torch", "ns_method": method, **(params or {})})
    engine = training.make_engine(config, kind, **(TOY if kind == "toy" else {}))
    return count_second_step(engine, rank, world_size, stage)


def count_second_step(
    engine: Any, rank: int, world_size: int, stage: int, routes: Any = None, **settings: Any
) -> dict[str, Any]:
    """Train two steps; ``routes`` are those of the whole model where an engine has a share of it."""
    optimizer = deepspeed_muon.muon_optimizer(engine)
    routes = routes or optimizer.routes
    training.run_step(engine, 0, rank, world_size, 1)
    optimizer.stats.reset()
    tokens, targets = training.batch(1, rank)
    with counting() as around:
        loss = engine(tokens, targets)
        engine.backward(loss)
    with counting() as inside, FlopCounterMode(display=False) as flops:
        engine.step()
    device = torch.device("cpu")
    plan = PlanSettings(
        world_size, stage, config=optimizer.config, device=device, model_dtype=torch.float32, **settings
    )
    exchange = exchange_of(routes, plan)
    owners: dict[str, int] = {}
    for runner in optimizer.runners:
        for matrix, owner in zip(runner.plan.matrices, runner.plan.owners, strict=True):
            owners.setdefault(matrix.name, owner)
    names = [route.name for route in routes if route.algorithm == "muon"]
    # The optimizer's own exchange: all-to-alls, and in the step of stage 0 broadcasts.
    ours = inside.bytes["all-to-all"] + (inside.bytes["broadcast"] if stage == 0 else 0)
    return {
        "flops": (flops.get_total_flops(), float(exchange.flops[rank])),
        "exchange": (
            optimizer.stats.bytes_sent,
            4.0 * float(exchange.gather_elements[rank] + exchange.scatter_elements[rank]),
        ),
        "buffers": (
            float(optimizer.exchange_buffers.reserved_bytes),
            forecast(routes, plan, exchange)["muon"]["memory"]["exchange_buffers"],
        ),
        "pieces": sum(len(runner.plan.matrices) for runner in optimizer.runners),
        "owners": (owners, dict(zip(names, exchange.owners, strict=True))),
        "zero": (around.total + inside.total - ours, zero_bytes(routes, plan)),
    }
