"""The input of a forecast from a routing table, and the plan of a running engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from deepspeed_muon.engine import muon_optimizer
from deepspeed_muon.forecast.report import live_report
from deepspeed_muon.forecast.settings import PlannedParameter
from deepspeed_muon.routing.route import Route


def planned_parameters(routes: Sequence[Route]) -> list[PlannedParameter]:
    """Return the trained parameters of a routing table, for counting, in the table's order."""
    found = []
    for route in routes:
        if route.algorithm == "frozen":
            continue
        blocks: tuple[tuple[int, int, int], ...] = ()
        stack = 1
        if route.algorithm == "muon":
            blocks = route.kinds_of_blocks()
            if not route.col_blocks and len(set(route.row_blocks)) == 1:
                stack = len(route.row_blocks)
        numel = math.prod(route.shape)
        stacked = len(route.shape) == 3 and "experts" in route.name.split(".")
        experts = route.shape[0] if stacked else 0
        found.append(PlannedParameter(route.name, numel, route.algorithm == "muon", blocks, stack, experts))
    return found


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [0] if group is None else dist.get_process_group_ranks(group)


def plan_report(engine: Any) -> dict[str, Any]:
    """Return routes, owners, work and bytes of every rank of an engine, from its exchange plans, as plain data.

    ``python -m deepspeed_muon plan`` predicts the same without an engine, with memory and times.

    Args:
        engine: A ``DeepSpeedEngine`` made with this optimizer.
    """
    optimizer = muon_optimizer(engine)
    dtypes = {runner.step_set.model_dtype for runner in optimizer._runners}
    config = optimizer.config
    width = max((config.resolved_wire_dtype(dtype).itemsize for dtype in dtypes), default=0)
    return live_report(
        optimizer.routes,
        [runner.plan for runner in optimizer._runners],
        wire_bytes=config.wire_format.bytes_per_element(width),
        work=[runner.assignment.work for runner in optimizer._runners],
        ranks=[_ranks(runner.step_set.group) for runner in optimizer._runners],
    )
