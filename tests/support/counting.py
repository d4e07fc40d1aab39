"""Counts what one process really sends in collectives other than all-to-alls, and what it multiplies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import deepspeed_muon
from deepspeed_muon.tools.plan import PlanSettings, exchange_of, forecast, zero_bytes
from tests.support import training
from tests.support.collectives import groups_in, tensors_in

# Collectives of at most so many bytes are flags, norms and loss scales, not parameters or gradients.
SMALL = 64


@dataclass
class Counts:
    """Bytes sent by this rank, as a ring algorithm sends them, by collective; and floating-point operations."""

    sent: dict[str, float] = field(default_factory=dict)
    flops: int = 0

    @property
    def zero(self) -> float:
        """Bytes of all collectives but all-to-alls, which are the optimizer's own."""
        return sum(self.sent.values())


# torch's operators, whatever function of torch or DeepSpeed calls them (all_gather_into_tensor and its newer name
# all_gather_single are one): which argument a ring divides among the ranks, and how often it goes round.
_OPERATORS = {
    "allreduce_": (0, 2),
    "allreduce_coalesced_": (0, 2),
    "reduce_": (0, 1),
    "broadcast_": (0, 1),
    "allgather_": (0, 1),
    "_allgather_base_": (0, 1),
    "allgather_into_tensor_coalesced_": (0, 1),
    "reduce_scatter_": (1, 1),
    "_reduce_scatter_base_": (1, 1),
    "reduce_scatter_tensor_coalesced_": (1, 1),
}


class _Collectives(TorchDispatchMode):
    """Adds what the collectives of this thread send to ``counts``."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("c10d::")
        if func.namespace == "c10d" and name in _OPERATORS:
            argument, rounds = _OPERATORS[name]
            size = sum(t.numel() * t.element_size() for t in tensors_in(args[argument]))
            ranks = groups_in(args)[0].size()
            if size > SMALL:
                sent = self.counts.sent
                sent[name] = sent.get(name, 0.0) + rounds * size * (ranks - 1) / ranks
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count inside of the block. The collectives run as always."""
    counts = Counts()
    with FlopCounterMode(display=False) as flops, _Collectives(counts):
        yield counts
    counts.flops = flops.get_total_flops()


WIDTH = 24


HIDDEN = (24, 72, 40, 8, 56)


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
    return count_second_step(training.make_engine(config, kind, **shape), rank, world_size, stage)


def count_second_step(
    engine: Any, rank: int, world_size: int, stage: int, routes: Any = None, **settings: Any
) -> dict[str, Any]:
    """Train two steps; ``routes`` are those of the whole model where an engine has a share of it."""
    optimizer = deepspeed_muon.muon_optimizer(engine)
    routes = routes or optimizer.routes
    training.run_step(engine, 0, rank, world_size, 1)
    optimizer.stats.reset()
    tokens, targets = training.batch(1, rank)
    with counted() as around:
        loss = engine(tokens, targets)
        engine.backward(loss)
    with counted() as inside:
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
    # Broadcasts in the step of stage 0 are the optimizer's own exchange.
    broadcasts = inside.sent.get("broadcast_", 0.0) if stage == 0 else 0.0
    return {
        "flops": (inside.flops, float(exchange.flops[rank])),
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
        "zero": (around.zero + inside.zero - broadcasts, zero_bytes(routes, plan)),
        "collectives": str((around.sent, inside.sent)),
    }
