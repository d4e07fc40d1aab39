"""The plan of a training run as plain data: routes, owners, balance, bytes, memory and predicted times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from deepspeed_muon.forecast.predict import (
    Exchange,
    exchange_of,
    zero_bytes,
)
from deepspeed_muon.forecast.settings import PlannedParameter, PlanSettings, divisions
from deepspeed_muon.monitoring.check import WINDOW_NUMEL
from deepspeed_muon.plan.chunks import chunk_limit
from deepspeed_muon.plan.exchange import ExchangePlan
from deepspeed_muon.plan.placement import fragments_of
from deepspeed_muon.transport.exchange import SLOTS, overlap_fits

# Seconds that each further peer adds to an all-to-all: the order of magnitude of NCCL over InfiniBand.
_MESSAGE_SECONDS = 3e-6
# Bytes that are read and written for one element. AdamW reads gradient, weight and both moments, and writes the last
# three and the low-precision copy. Muon has two passes: momentum and pack (14), unpack and apply (10).
_ADAMW_TRAFFIC = 30.0
_MUON_TRAFFIC = 24.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the busiest rank does and keeps in a step of one optimizer.

    Attributes:
        sent_bytes: Sent in Muon's own exchange.
        zero_bytes: Sent in ZeRO's collectives.
        flops: Newton-Schulz operations.
        seconds: Predicted times by part, and their ``total``, without ZeRO's collectives.
        memory: Bytes by part, and their ``total``, without activations.
    """

    sent_bytes: float
    zero_bytes: float
    flops: float
    seconds: Mapping[str, float]
    memory: Mapping[str, float]


def forecast(
    parameters: Sequence[PlannedParameter], settings: PlanSettings, exchange: Exchange | None = None
) -> dict[str, Forecast]:
    """Predict a step of this project's Muon and of AdamW.

    Args:
        parameters: All parameters that are trained.
        settings: Stage, ranks and hardware.
        exchange: From :func:`~deepspeed_muon.forecast.predict.exchange_of`; computed if absent.

    Returns:
        ``muon`` and ``adamw``.
    """
    exchange = exchange or exchange_of(parameters, settings)
    muon, other = _partition(parameters, settings)
    zero = zero_bytes(parameters, settings)
    work = float(exchange.flops.max())
    gather, scatter = exchange.gather_elements, exchange.scatter_elements
    sent = float((gather + scatter).max()) * settings.wire_bytes
    one_way = _exchange_seconds(settings, max(gather.max(), scatter.max()) * settings.wire_bytes, exchange)
    flat = {
        "momentum_and_apply": _memory_seconds(settings, _MUON_TRAFFIC * muon),
        "adamw": _memory_seconds(settings, _ADAMW_TRAFFIC * other),
    }
    all_adamw = {"adamw": _memory_seconds(settings, _ADAMW_TRAFFIC * (muon + other))}
    kept = _kept(parameters, settings)
    kept_by_adamw = {**kept, "optimizer_state": 8.0 * (muon + other)}
    kept["optimizer_state"] = 4.0 * muon + 8.0 * other
    seconds = {
        "gather": one_way if settings.stage else 0.0,
        "newton_schulz": work / (settings.gpu.flops * settings.efficiency),
        "scatter": one_way,
    }
    memory = {**kept, **_buffers(parameters, settings, exchange)}
    return {
        "muon": Forecast(sent, zero, work, _total({**seconds, **flat}), _total(memory)),
        "adamw": Forecast(0.0, zero, 0.0, _total(all_adamw), _total(kept_by_adamw)),
    }


def _total(parts: dict[str, float]) -> dict[str, float]:
    parts = {key: float(value) for key, value in parts.items()}
    return {**parts, "total": math.fsum(parts.values())}


def _memory_seconds(settings: PlanSettings, nbytes: float) -> float:
    return nbytes / (settings.gpu.memory_bandwidth * settings.link_efficiency)


def _link_seconds(settings: PlanSettings, nbytes: float, leaving: float) -> float:
    """Return the time of sending so many bytes, of which the part ``leaving`` goes to other nodes."""
    node = (1 - leaving) * nbytes / settings.gpu.node_bandwidth
    network = leaving * nbytes / settings.gpu.network_bandwidth
    return max(node, network) / settings.link_efficiency


def _exchange_seconds(settings: PlanSettings, nbytes: float, exchange: Exchange) -> float:
    if settings.world_size == 1 or not exchange.moving:
        return 0.0
    # At stages 1 and 2 a rank exchanges with the neighbours that share its straddling matrices.
    peers = settings.world_size - 1 if settings.stage in (0, 3) else 2 * settings.tensor_parallel
    seconds = _link_seconds(settings, nbytes, exchange.leaving)
    return seconds + _MESSAGE_SECONDS * min(peers, settings.world_size - 1)


def _kept(parameters: Sequence[PlannedParameter], settings: PlanSettings) -> dict[str, float]:
    """Return the bytes of weights, gradients and fp32 masters of a rank."""
    kept = {"weights": 0.0, "gradients": 0.0, "master_weights": 0.0}
    for _, local, inside in divisions(parameters, settings):
        numel = sum(parameter.numel for parameter in local) / settings.tensor_parallel
        ranks = inside.data_parallel
        kept["weights"] += numel * settings.model_bytes / (ranks if settings.stage == 3 else 1)
        kept["gradients"] += numel * settings.model_bytes / (ranks if settings.stage >= 2 else 1)
        kept["master_weights"] += 4.0 * numel / (ranks if settings.stage else 1)
    return kept


def _buffers(
    parameters: Sequence[PlannedParameter], settings: PlanSettings, exchange: Exchange
) -> dict[str, float]:
    """Return upper bounds of the bytes that Muon's step needs besides, from the chunk size and the largest matrix."""
    largest = max((p.numel // p.stack for p in parameters if p.muon), default=0)
    partition, _ = _partition(parameters, settings)
    overlap = overlaps(parameters, settings)
    chunk = 0
    if exchange.moving:
        sizes = (p.numel // p.stack // settings.tensor_parallel for p in parameters if p.muon)
        chunk = largest_chunk(float(exchange.owned_elements.max()), sizes, settings.chunk_numel)
    # Of one chunk, but for those that are written into the send buffer: at stage 3 all except a rank's own share.
    local = min(partition, float(max(settings.chunk_numel, largest)))
    if settings.stage == 3 and exchange.moving:
        local = chunk / settings.data_parallel
    blocks = {(rows, cols) for p in parameters if p.muon for _, rows, cols in p.blocks}
    block = max((rows * cols for rows, cols in blocks), default=0)
    # Directions and results that wait for their check; without overlap the directions lie in a buffer that was sent.
    waiting = min(chunk, block + 2 * WINDOW_NUMEL)
    iteration = settings.ns_dtype.itemsize * (
        max((iteration_numel(*shape) for shape in blocks), default=0) + max(0, waiting - block)
    )
    return {
        "directions": settings.direction_bytes * local,
        "exchange_buffers": float(int(2 * (SLOTS if overlap else 1) * settings.wire_bytes * chunk)),
        "iteration": float(iteration + overlap * settings.direction_bytes * waiting),
    }


def _partition(parameters: Sequence[PlannedParameter], settings: PlanSettings) -> tuple[float, float]:
    """Return Muon's elements in a rank's partition, and all others in it."""
    muon = others = 0.0
    for _, local, inside in divisions(parameters, settings):
        share = settings.tensor_parallel * (inside.data_parallel if settings.stage else 1)
        muon += sum(p.numel for p in local if p.muon) / share
        others += sum(p.numel for p in local if not p.muon) / share
    return muon, others


def overlaps(parameters: Sequence[PlannedParameter], settings: PlanSettings) -> bool:
    """Return whether chunks travel while others are orthogonalised, decided as the running optimizer does."""
    sizes = (p.numel // p.stack // settings.tensor_parallel for p in parameters if p.muon)
    return settings.overlap and overlap_fits(max(sizes, default=0), settings.wire_bytes)


def largest_chunk(owned: float, sizes: Iterable[int], bound: int) -> int:
    """Return the elements that an owner has in the largest chunk.

    Args:
        owned: Elements of all matrices that one rank owns.
        sizes: Elements of every matrix that may travel.
        bound: ``exchange_chunk_numel``.
    """
    largest = max(sizes, default=0)
    return int(min(max(owned, largest), max(chunk_limit(int(owned), bound), largest)))


def iteration_numel(rows: int, cols: int) -> int:
    """Return the elements that orthogonalising one matrix takes: at most four products of Gram size, or two of each."""
    gram = min(rows, cols) ** 2
    return rows * cols + max(rows * cols + 2 * gram, 4 * gram)


def _route_rows(routes: Sequence[Any], *, each: bool = False) -> list[dict[str, Any]]:
    """Return the routing table: one row for equal parameters of all layers, or for ``each`` parameter."""
    rows: dict[Any, dict[str, Any]] = {}
    for route in routes:
        numel = math.prod(route.shape)
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
        row["elements"] += numel
    return list(rows.values())


def report(
    model: str,
    routes: Sequence[Any],
    parameters: Sequence[PlannedParameter],
    settings: PlanSettings,
    *,
    each_route: bool = False,
    owners: bool = False,
) -> dict[str, Any]:
    """Return the plan as plain data that JSON can hold.

    Args:
        model: Its name in the report.
        routes: ``name``, ``shape``, ``algorithm`` and ``reason`` of every parameter.
        parameters: The same parameters without the frozen ones, for counting.
        settings: Stage, ranks and hardware.
        each_route: Whether every parameter has its own row, instead of one row for equal parameters of all layers.
        owners: Whether to list the owner of every matrix.
    """
    exchange = exchange_of(parameters, settings)
    muon = [parameter for parameter in parameters if parameter.muon]
    counts = np.bincount(np.asarray(exchange.owners, dtype=np.int64), minlength=settings.world_size)
    totals: dict[str, dict[str, int]] = {}
    for route in routes:
        entry = totals.setdefault(route.algorithm, {"tensors": 0, "elements": 0})
        entry["tensors"] += 1
        entry["elements"] += math.prod(route.shape)
    step = forecast(parameters, settings, exchange)
    sent = (exchange.gather_elements + exchange.scatter_elements) * settings.wire_bytes
    data: dict[str, Any] = {
        "model": model,
        "elements": sum(entry["elements"] for entry in totals.values()),
        "algorithms": totals,
        "settings": _settings(settings, overlap=overlaps(parameters, settings)),
        "routes": _route_rows(routes, each=each_route),
        "owners": {
            "matrices": len(muon),
            "moving": exchange.moving,
            "matrices_per_rank": _spread(counts),
            "flops_per_rank": _spread(exchange.flops),
            "max_over_mean": exchange.balance,
        },
        "sent_bytes_per_rank": _spread(sent),
        "step": {name: asdict(found) for name, found in step.items()},
        "advice": _advice(parameters, settings, exchange, step["muon"].memory["total"]),
    }
    if owners:
        data["owners"]["of"] = {p.name: owner for p, owner in zip(muon, exchange.owners, strict=True)}
    return data


def live_report(
    routes: Sequence[Any],
    plans: Sequence[ExchangePlan],
    *,
    wire_bytes: float,
    work: Sequence[Sequence[float]],
    ranks: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Return the plan of a bound optimizer as plain data.

    Args:
        routes: As for :func:`report`.
        plans: The exchange plans of one rank; their owners and layouts are those of all ranks.
        wire_bytes: Bytes of an element of the exchange.
        work: The Newton-Schulz operations of each matrix of each plan.
        ranks: The ranks among which each plan is made: all, or those that hold the same experts.
    """
    sets = []
    for plan, costs, members in zip(plans, work, ranks, strict=True):
        flops, sent = np.zeros(plan.world_size), np.zeros(plan.world_size)
        rows: list[dict[str, Any]] = []
        for matrix, owner, cost in zip(plan.matrices, plan.owners, costs, strict=True):
            flops[owner] += cost
            elsewhere = [fragment for fragment in fragments_of(matrix.placement) if fragment.rank != owner]
            for fragment in elsewhere:
                if not matrix.replicated:
                    sent[fragment.rank] += fragment.numel
                sent[owner] += fragment.numel
            moved = sum(fragment.numel for fragment in elsewhere)
            rows.append({"name": matrix.name, "owner": owner, "moved_elements": moved})
        sets.append(
            {
                "world_size": plan.world_size,
                "ranks": list(members),
                "chunks": len(plan.chunks),
                "matrices": rows,
                "flops_per_rank": flops.tolist(),
                "sent_bytes_per_rank": (sent * wire_bytes).tolist(),
                "max_over_mean": float(flops.max() / flops.mean()) if flops.any() else 1.0,
            }
        )
    return {"routes": _route_rows(routes, each=True), "step_sets": sets}


def _settings(settings: PlanSettings, *, overlap: bool) -> dict[str, Any]:
    gpu = settings.gpu
    return {
        "world_size": settings.world_size,
        "stage": settings.stage,
        "tensor_parallel": settings.tensor_parallel,
        "expert_parallel": settings.expert_parallel,
        "gpus_per_node": settings.gpus_per_node,
        "gpu": asdict(gpu),
        "ns_steps": settings.steps,
        "ns_method": settings.method,
        "ns_dtype": str(settings.ns_dtype).removeprefix("torch."),
        "wire_bytes": settings.wire_bytes,
        "model_bytes": settings.model_bytes,
        "exchange_chunk_numel": settings.chunk_numel,
        "overlap": overlap,
        "assumed_efficiency": settings.efficiency,
        "assumed_link_efficiency": settings.link_efficiency,
    }


def _spread(values: Any) -> dict[str, float]:
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}


def _advice(
    parameters: Sequence[PlannedParameter],
    settings: PlanSettings,
    exchange: Exchange,
    memory: float,
) -> list[str]:
    """Return sentences about idle ranks, uneven work, and memory that does not suffice."""
    lines = []
    idle = int((exchange.flops == 0).sum())
    if idle:
        lines.append(f"{idle} of {settings.world_size} ranks have nothing to orthogonalise")
    elif exchange.balance > 1.05:
        lines.append(f"the busiest rank has {exchange.balance:.2f} times the mean of the work")
    stacked = max((sum(count for count, _, _ in p.blocks) for p in parameters if p.muon), default=0)
    if settings.tensor_parallel > 1 and stacked >= 8 and exchange.balance > 1.05:
        lines.append(
            f"under tensor parallelism stacks of up to {stacked} experts have one owner each: --separate-experts shows "
            f"the plan of a model that keeps them as parameters of their own"
        )
    if memory > settings.gpu.memory:
        lines.append(
            f"{memory / 1e9:.0f} GB per GPU without activations, more than the {settings.gpu.memory / 1e9:.0f} GB of a "
            f"{settings.gpu.name.upper()}"
        )
    return lines
