"""What ``plan`` predicts for ``benchmarks/cluster.py``: the step's time at a rate, from its time without a limit."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.cluster_report import Steps
from benchmarks.step_ranks import MODELS, Decoder
from deepspeed_muon.forecast.predict import PlanSettings, exchange_of
from deepspeed_muon.forecast.report import Network, network_seconds
from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.rules import route_parameters

Row = dict[str, Any]

# The plan's names. It does not know how much of the exchange is hidden.
_NAMES = {
    "ours": "muon",
    "ours, no overlap": "muon",
    "DeepSpeed AdamW": "adamw",
}


def add_predictions(rows: list[Row]) -> None:
    """Give every row ``predicted_s``, the plan's whole step, where its time without a limit was measured."""
    unlimited = {_place(row): row for row in rows if row["rate"] is None}
    for row in rows:
        known = unlimited.get(_place(row))
        if row["rate"] is None or known is None or row["optimizer"] not in _NAMES:
            continue
        seconds = statistics.median(Steps(known).whole)
        row["predicted_s"] = round(_predicted(row, seconds), 6)


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model", "stage", "hosts", "ranks_per_host", "optimizer"))


def _predicted(row: Row, unlimited: float) -> float:
    """Return the seconds of a step at the row's rate, from its seconds without a limit."""
    settings = PlanSettings(
        row["hosts"] * row["ranks_per_host"],
        row["stage"],
        gpus_per_node=row["ranks_per_host"],
        device=torch.device("cpu"),
    )
    routes = _routes(row["model"])
    network = Network(row["rate"], reduce_scatter=False)
    name = _NAMES[row["optimizer"]]
    exchange = exchange_of(routes, settings)
    return network_seconds(routes, settings, network, exchange, {name: unlimited})[name]["whole_step"]


def _routes(model: str) -> list[Route]:
    with torch.device("meta"):
        members = list(model_parameters_by_name(Decoder(MODELS[model])).values())
    return route_parameters(members)
