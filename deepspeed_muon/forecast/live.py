"""The plan of a running engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

from deepspeed_muon.engine import muon_optimizer
from deepspeed_muon.forecast.report import route_rows
from deepspeed_muon.plan.exchange import sent_by_rank
from deepspeed_muon.plan.layout import MatrixLayout


def plan_report(engine: Any) -> dict[str, Any]:
    """Return routes, owners, work and bytes of every rank of an engine, from its exchange plans, as plain data.

    ``python -m deepspeed_muon plan`` predicts the same without an engine, with memory and times. The ranks of a step
    set are those among which its plan is made: all, or those that hold the same experts. ``own_bytes_per_step`` are
    those that this rank sends, a variant's row state included; ``exchange_buffer_bytes`` those of its buffers.

    Args:
        engine: A ``DeepSpeedEngine`` made with this optimizer.
    """
    optimizer = muon_optimizer(engine)
    config = optimizer.config
    sets = []
    for runner in optimizer._runners:
        plan, group = runner.plan, runner.step_set.group
        wire_bytes = config.wire_format.bytes_per_element(runner.context.comm_dtype.itemsize)
        flops = np.zeros(plan.world_size)
        np.add.at(flops, np.asarray(plan.owners, dtype=np.int64), runner.assignment.work)
        gather, scatter = sent_by_rank(plan.matrices, plan.owners, plan.world_size)
        sets.append(
            {
                "world_size": plan.world_size,
                "ranks": [0] if group is None else dist.get_process_group_ranks(group),
                "chunks": len(plan.chunks),
                "matrices": [
                    {"name": matrix.name, "owner": owner, "moved_elements": _moved(matrix, owner)}
                    for matrix, owner in zip(plan.matrices, plan.owners, strict=True)
                ],
                "flops_per_rank": flops.tolist(),
                "sent_bytes_per_rank": ((gather + scatter) * wire_bytes).tolist(),
                "max_over_mean": float(flops.max() / flops.mean()) if flops.any() else 1.0,
            }
        )
    return {
        "routes": route_rows(optimizer.routes, each=True),
        "step_sets": sets,
        "own_bytes_per_step": sum(runner.wire_bytes_per_step for runner in optimizer._runners),
        "exchange_buffer_bytes": optimizer.exchange_buffers.reserved_bytes,
    }


def _moved(matrix: MatrixLayout, owner: int) -> int:
    """Return how many elements of a matrix travel in one direction."""
    if matrix.replicated:
        return matrix.numel * (len(matrix.placement.ranks) - 1)
    return matrix.numel - matrix.placement.held_by(owner)
