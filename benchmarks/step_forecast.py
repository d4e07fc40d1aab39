"""What ``plan`` predicts for steps on links of a limited rate, from their time without a limit."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.step_ranks import members_of
from benchmarks.support import Row
from deepspeed_muon.routing.rules import route_parameters
from deepspeed_muon.tools.plan import PlanSettings, exchange_of, zero_bytes

# Whether an optimizer sends directions and updates. The plan does not know how much of that is hidden.
_EXCHANGES = {"ours": True, "ours, no overlap": True, "DeepSpeed AdamW": False}

# The part of what a link carries that is data: that of TCP over Ethernet.
_PAYLOAD = 1448 / 1514


def add_predictions(rows: list[Row]) -> None:
    """Give every row ``predicted_s``, the plan's whole step, where its time without a limit was measured."""
    unlimited = {_place(row): row for row in rows if row["rate"] is None}
    for row in rows:
        known = unlimited.get(_place(row))
        # Of a step with accumulation the plan does not know what ZeRO sends.
        if row["rate"] is None or known is None or row["accumulation"] > 1:
            continue
        if row["optimizer"] not in _EXCHANGES:
            continue
        seconds = statistics.median(known["whole_s"])
        row["predicted_s"] = round(_predicted(row, seconds), 6)


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model", "stage", "ranks", "accumulation", "optimizer"))


def _predicted(row: Row, unlimited: float) -> float:
    """Return the seconds of a step at the row's rate, from its seconds without a limit."""
    settings = PlanSettings(row["ranks"], row["stage"], gpus_per_node=1, device=torch.device("cpu"))
    routes = route_parameters(members_of(row["model"]))
    sent = zero_bytes(routes, settings)
    if settings.stage == 3:
        # gloo has no reduce-scatter: torch runs an all-reduce, of twice the bytes.
        gradients = sum(route.numel for route in routes) * settings.model_dtype.itemsize
        sent += gradients * (settings.world_size - 1) / settings.world_size
    if _EXCHANGES[row["optimizer"]]:
        exchange = exchange_of(routes, settings)
        # What one rank receives in one direction, it sends in the other.
        one_way = max(exchange.gather_elements.max(), exchange.scatter_elements.max()) * settings.wire_bytes
        sent += exchange.internode_fraction * float(one_way) * (2.0 if settings.stage else 1.0)
    return unlimited + (8 * sent / (row["rate"] * _PAYLOAD) if row["ranks"] > 1 else 0.0)
