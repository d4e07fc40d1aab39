"""The plan of a training run as plain data: routes, owners, balance, bytes, memory and predicted times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch.distributed as dist

from deepspeed_muon.engine import muon_optimizer
from deepspeed_muon.forecast.predict import (
    LINK_EFFICIENCY,
    SUB_GROUP_NUMEL,
    Exchange,
    PlanSettings,
    divisions,
    exchange_of,
    zero_bytes,
)
from deepspeed_muon.math.quantizer import BLOCK
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.order import flat_partition_numel
from deepspeed_muon.plan.owners import sent_by_rank
from deepspeed_muon.routing.route import Route, totals_of
from deepspeed_muon.step.state import StatePolicy
from deepspeed_muon.transport.exchange import SLOTS

# Seconds that each further peer adds to an all-to-all: the order of magnitude of NCCL over InfiniBand.
_MESSAGE_SECONDS = 3e-6
# Bytes that are read and written for one element. AdamW reads gradient, weight and both moments, and writes the last
# three and the low-precision copy. Muon has two passes: momentum and pack (14), unpack and apply (10).
_ADAMW_TRAFFIC = 30.0
_MUON_TRAFFIC = 24.0


def forecast(
    routes: Sequence[Route], settings: PlanSettings, exchange: Exchange | None = None
) -> dict[str, dict[str, Any]]:
    """Predict what the busiest rank does and keeps in a step of this project's Muon, and of AdamW.

    Args:
        routes: Of all parameters.
        settings: Stage, ranks and hardware.
        exchange: From :func:`~deepspeed_muon.forecast.predict.exchange_of`; computed if absent.

    Returns:
        Of ``muon`` and ``adamw``: ``sent_bytes`` in Muon's own exchange; ``zero_bytes`` in ZeRO's collectives, and
        their ``zero_seconds`` if nothing is hidden behind computation; ``flops`` of Newton-Schulz; ``seconds`` by part
        without ZeRO's collectives, and ``memory``, bytes by part without activations, each with a ``total``.
    """
    exchange = exchange or exchange_of(routes, settings)
    kept, muon, other = _kept(routes, settings)
    zero = zero_bytes(routes, settings)
    collectives = {"zero_bytes": zero, "zero_seconds": _ring_seconds(settings, zero)}
    work = float(exchange.flops.max())
    gather, scatter = exchange.gather_elements, exchange.scatter_elements
    one_way = _exchange_seconds(settings, max(gather.max(), scatter.max()) * settings.wire_bytes, exchange)
    bandwidth = settings.gpu.memory_bandwidth * LINK_EFFICIENCY
    seconds = {
        "gather": one_way if settings.stage else 0.0,
        "newton_schulz": work / (settings.gpu.flops * settings.efficiency),
        "scatter": one_way,
        "momentum_and_apply": _MUON_TRAFFIC * muon / bandwidth,
        "adamw": _ADAMW_TRAFFIC * other / bandwidth,
    }
    memory = kept | _state(muon, other, settings) | _buffers(routes, settings, exchange, partition=muon)
    return {
        "muon": {
            "sent_bytes": float((gather + scatter).max()) * settings.wire_bytes,
            **collectives,
            "flops": work,
            "seconds": _total(seconds),
            "memory": _total(memory),
        },
        "adamw": {
            "sent_bytes": 0.0,
            **collectives,
            "flops": 0.0,
            "seconds": _total({"adamw": _ADAMW_TRAFFIC * (muon + other) / bandwidth}),
            "memory": _total(kept | _state(0, muon + other, settings)),
        },
    }


def _total(parts: dict[str, float]) -> dict[str, float]:
    parts = {key: float(value) for key, value in parts.items()}
    return {**parts, "total": math.fsum(parts.values())}


def _ring_seconds(settings: PlanSettings, nbytes: float) -> float:
    """Return the time of collectives in which each rank sends so many bytes around a ring."""
    rate = settings.gpu.node_bandwidth
    if settings.world_size > settings.gpus_per_node:
        # A ring passes every link once, and the GPUs of a node share its links.
        rate = min(rate, settings.gpus_per_node * settings.gpu.network_bandwidth)
    return nbytes / (rate * LINK_EFFICIENCY)


def _exchange_seconds(settings: PlanSettings, nbytes: float, exchange: Exchange) -> float:
    if settings.world_size == 1 or not exchange.moving:
        return 0.0
    # At stages 1 and 2 a rank exchanges with the neighbours that share its straddling matrices.
    peers = settings.world_size - 1 if settings.stage in (0, 3) else 2 * settings.tensor_parallel
    node = (1 - exchange.leaving) * nbytes / settings.gpu.node_bandwidth
    network = exchange.leaving * nbytes / settings.gpu.network_bandwidth
    seconds = max(node, network) / LINK_EFFICIENCY
    return seconds + _MESSAGE_SECONDS * min(peers, settings.world_size - 1)


def _kept(routes: Sequence[Route], settings: PlanSettings) -> tuple[dict[str, float], int, int]:
    """Return the bytes of weights, gradients and masters of a rank, and the elements of its partitions.

    The elements are Muon's and AdamW's, ZeRO's padding included.
    """
    kept = {"weights": 0.0, "gradients": 0.0, "master_weights": 0.0}
    elements = {"muon": 0, "adamw": 0}
    model, master = settings.model_dtype.itemsize, settings.master_dtype.itemsize
    for _, local, inside in divisions(routes, settings):
        for algorithm in elements:
            numels = [each.numel for each in local if each.algorithm == algorithm]
            own = sum(numels)
            if settings.stage == 3:
                own = sum(-(-numel // inside.world_size) for numel in numels)
            elif settings.stage:
                own = flat_partition_numel(own, inside.world_size)
            whole = own * (inside.world_size if settings.stage in (1, 2) else 1)
            kept["weights"] += model * whole
            kept["gradients"] += model * (whole if settings.stage == 1 else own)
            kept["master_weights"] += master * own
            elements[algorithm] += own
    return kept, elements["muon"], elements["adamw"]


def _state(muon: int, other: int, settings: PlanSettings) -> dict[str, float]:
    """Return the bytes that an optimizer with so many elements of Muon and of AdamW keeps and is given.

    ZeRO gives it the gradient in the dtype of the masters, one param group or sub-group at a time.
    """
    policy = StatePolicy(settings.config.momentum_dtype, settings.half_states)
    master, largest = settings.master_dtype, max(muon, other)
    momentum = policy.dtype("momentum_buffer", master).itemsize + policy.quantizes_momentum * 4 / BLOCK
    return {
        "gradient_copy": master.itemsize
        * (min(largest, SUB_GROUP_NUMEL) if settings.stage == 3 else largest),
        "momentum": momentum * muon,
        "moments": 2 * policy.dtype("exp_avg", master).itemsize * other,
    }


def _buffers(
    routes: Sequence[Route], settings: PlanSettings, exchange: Exchange, *, partition: float
) -> dict[str, float]:
    """Return upper bounds of the bytes that Muon's step needs besides.

    ``partition`` are Muon's elements in a rank's partition.
    """
    chunk = exchange.largest_chunk if exchange.moving else 0
    # Of one chunk, but for those that are written into the send buffer: at stage 3 all except a rank's own share.
    local = min(partition, float(exchange.largest_chunk))
    if settings.stage == 3 and exchange.moving:
        local = chunk / (settings.world_size // settings.tensor_parallel)
    blocks = {
        (rows, cols)
        for route in routes
        if route.algorithm == "muon"
        for _, rows, cols in route.kinds_of_blocks()
    }
    block = max((rows * cols for rows, cols in blocks), default=0)
    iteration = settings.iteration.dtype.itemsize * max(
        (iteration_numel(*shape) for shape in blocks), default=0
    )
    # Without overlap the directions of a block lie in a buffer that was sent.
    waiting = exchange.overlap * settings.direction_bytes * min(chunk, block)
    return {
        "directions": settings.direction_bytes * local,
        "exchange_buffers": float(int(2 * (SLOTS if exchange.overlap else 1) * settings.wire_bytes * chunk)),
        "iteration": float(iteration + waiting),
    }


def iteration_numel(rows: int, cols: int) -> int:
    """Return the elements that orthogonalising one matrix takes: at most four products of Gram size, or two of each."""
    gram = min(rows, cols) ** 2
    return rows * cols + max(rows * cols + 2 * gram, 4 * gram)


def route_rows(routes: Sequence[Route], *, each: bool = False) -> list[dict[str, Any]]:
    """Return the routing table: one row for equal parameters of all layers, or for ``each`` parameter."""
    rows: dict[Any, dict[str, Any]] = {}
    for route in routes:
        name = route.name if each else ".".join("*" if c.isdigit() else c for c in route.name.split("."))
        row = rows.setdefault(
            (name, route.shape, route.algorithm, route.reason),
            {
                "name": name,
                "shape": list(route.shape),
                "algorithm": route.algorithm,
                "reason": route.reason,
                "tensors": 0,
                "elements": 0,
            },
        )
        row["tensors"] += 1
        row["elements"] += route.numel
    return list(rows.values())


def report(
    model: str,
    routes: Sequence[Route],
    settings: PlanSettings,
    *,
    each_route: bool = False,
    owners: bool = False,
) -> dict[str, Any]:
    """Return the plan as plain data that JSON can hold.

    Args:
        model: Its name in the report.
        routes: Of every parameter.
        settings: Stage, ranks and hardware.
        each_route: Whether every parameter has its own row, instead of one row for equal parameters of all layers.
        owners: Whether to list the owner of every matrix.
    """
    exchange = exchange_of(routes, settings)
    muon = [route for route in routes if route.algorithm == "muon"]
    counts = np.bincount(np.asarray(exchange.owners, dtype=np.int64), minlength=settings.world_size)
    totals = totals_of(routes)
    step = forecast(routes, settings, exchange)
    sent = (exchange.gather_elements + exchange.scatter_elements) * settings.wire_bytes
    data: dict[str, Any] = {
        "model": model,
        "elements": sum(entry["elements"] for entry in totals.values()),
        "algorithms": totals,
        "settings": _settings(settings, overlap=exchange.overlap),
        "routes": route_rows(routes, each=each_route),
        "owners": {
            "matrices": len(muon),
            "moving": exchange.moving,
            "matrices_per_rank": _range(counts),
            "flops_per_rank": _range(exchange.flops),
            "max_over_mean": exchange.balance,
        },
        "sent_bytes_per_rank": _range(sent),
        "step": step,
        "fits": step["muon"]["memory"]["total"] <= settings.gpu.memory,
        "advice": _advice(muon, settings, exchange),
    }
    if owners:
        data["owners"]["of"] = {route.name: owner for route, owner in zip(muon, exchange.owners, strict=True)}
    return data


def _settings(settings: PlanSettings, *, overlap: bool) -> dict[str, Any]:
    iteration = settings.iteration
    return {
        "world_size": settings.world_size,
        "stage": settings.stage,
        "tensor_parallel": settings.tensor_parallel,
        "expert_parallel": settings.expert_parallel,
        "gpus_per_node": settings.gpus_per_node,
        "gpu": asdict(settings.gpu),
        "ns_steps": len(iteration.coefficients),
        "ns_method": iteration.method,
        "ns_dtype": str(iteration.dtype).removeprefix("torch."),
        "wire_bytes": settings.wire_bytes,
        "model_bytes": settings.model_dtype.itemsize,
        "exchange_chunk_numel": settings.config.exchange_chunk_numel,
        "overlap": overlap,
        "assumed_efficiency": settings.efficiency,
        "assumed_link_efficiency": LINK_EFFICIENCY,
    }


def _range(values: Any) -> dict[str, float]:
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}


def _advice(muon: Sequence[Route], settings: PlanSettings, exchange: Exchange) -> list[str]:
    """Return sentences about idle ranks and uneven work."""
    lines = []
    idle = int((exchange.flops == 0).sum())
    if idle:
        lines.append(f"{idle} of {settings.world_size} ranks have nothing to orthogonalise")
    elif exchange.balance > 1.05:
        lines.append(f"the busiest rank has {exchange.balance:.2f} times the mean of the work")
    stacked = max((route.heads for route in muon), default=0)
    if settings.tensor_parallel > 1 and stacked >= 8 and exchange.balance > 1.05:
        lines.append(
            f"under tensor parallelism stacks of up to {stacked} experts have one owner each: --separate-experts shows "
            f"the plan of a model that keeps them as parameters of their own"
        )
    return lines


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
