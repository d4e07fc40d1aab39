"""The plan of a training run as plain data: routes, owners, balance, bytes, memory and predicted times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from deepspeed_muon.forecast.predict import Exchange, PlanSettings, divisions, exchange_of, zero_bytes
from deepspeed_muon.routing.route import Route
from deepspeed_muon.transport.exchange import SLOTS

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
    routes: Sequence[Route], settings: PlanSettings, exchange: Exchange | None = None
) -> dict[str, Forecast]:
    """Predict a step of this project's Muon and of AdamW.

    Args:
        routes: Of all parameters.
        settings: Stage, ranks and hardware.
        exchange: From :func:`~deepspeed_muon.forecast.predict.exchange_of`; computed if absent.

    Returns:
        ``muon`` and ``adamw``.
    """
    exchange = exchange or exchange_of(routes, settings)
    kept, muon, other = _kept(routes, settings)
    zero = zero_bytes(routes, settings)
    work = float(exchange.flops.max())
    gather, scatter = exchange.gather_elements, exchange.scatter_elements
    sent = float((gather + scatter).max()) * settings.wire_bytes
    one_way = _exchange_seconds(settings, max(gather.max(), scatter.max()) * settings.wire_bytes, exchange)
    bandwidth = settings.gpu.memory_bandwidth * settings.link_efficiency
    seconds = {
        "gather": one_way if settings.stage else 0.0,
        "newton_schulz": work / (settings.gpu.flops * settings.efficiency),
        "scatter": one_way,
        "momentum_and_apply": _MUON_TRAFFIC * muon / bandwidth,
        "adamw": _ADAMW_TRAFFIC * other / bandwidth,
    }
    all_adamw = {"adamw": _ADAMW_TRAFFIC * (muon + other) / bandwidth}
    kept_by_adamw = {**kept, "optimizer_state": 8.0 * (muon + other)}
    memory = {**kept, "optimizer_state": 4.0 * muon + 8.0 * other}
    memory |= _buffers(routes, settings, exchange, partition=muon)
    return {
        "muon": Forecast(sent, zero, work, _total(seconds), _total(memory)),
        "adamw": Forecast(0.0, zero, 0.0, _total(all_adamw), _total(kept_by_adamw)),
    }


@dataclass(frozen=True, slots=True)
class Network:
    """The links between nodes.

    Attributes:
        rate: Bits a second that a node can send, and receive at the same time.
        payload: The part of them that is data. The default is that of TCP over Ethernet: 1448 of 1514 bytes.
        reduce_scatter: Whether the backend has one. gloo has none: torch runs an all-reduce, of twice the bytes.
    """

    rate: float
    payload: float = 1448 / 1514
    reduce_scatter: bool = True

    def __post_init__(self) -> None:
        if not self.rate > 0:  # a NaN too
            raise ValueError(f"a rate of {self.rate:g} bits a second: it must be above 0")

    def seconds(self, nbytes: float) -> float:
        """Return the time that a node takes to send so many bytes."""
        return 8.0 * nbytes / (self.rate * self.payload)


def network_seconds(
    routes: Sequence[Route],
    settings: PlanSettings,
    network: Network,
    exchange: Exchange,
    compute: Mapping[str, float] | None = None,
) -> dict[str, dict[str, float]]:
    """Predict the time on the wire, and the whole step if its time on a network without a limit is known.

    Nothing is taken as hidden behind computation, so the whole step is an upper bound where collectives overlap.

    Args:
        routes: Of all parameters.
        settings: Stage and ranks; ``gpus_per_node`` ranks share a node's link.
        network: The links.
        exchange: From :func:`~deepspeed_muon.forecast.predict.exchange_of`.
        compute: Seconds of forward, backward and step on a network without a limit, by optimizer.

    Returns:
        For ``muon`` and ``adamw`` the seconds of ``exchange`` and ``zero_collectives`` on
        the wire; with ``compute`` that and the ``whole_step`` too.
    """
    zero = zero_bytes(routes, settings)
    if settings.stage == 3 and not network.reduce_scatter:
        for _, local, inside in divisions(routes, settings):
            gradients = sum(route.numel for route in local) * settings.model_dtype.itemsize
            zero += gradients * (inside.world_size - 1) / inside.world_size
    # What one rank receives in one direction, it sends in the other.
    one_way = max(exchange.gather_elements.max(), exchange.scatter_elements.max()) * settings.wire_bytes
    ranks = min(settings.gpus_per_node, settings.world_size)
    own = ranks * exchange.leaving * float(one_way) * (2.0 if settings.stage else 1.0)
    # A ring passes every link once, however many ranks a node has.
    several_nodes = settings.world_size > settings.gpus_per_node
    found = {}
    for name, nbytes in {"muon": own, "adamw": 0.0}.items():
        seconds = {
            "exchange": network.seconds(nbytes) if several_nodes else 0.0,
            "zero_collectives": network.seconds(zero) if several_nodes else 0.0,
        }
        if compute is not None and name in compute:
            seconds["compute"] = compute[name]
            seconds["whole_step"] = sum(seconds.values())
        found[name] = seconds
    return found


def _total(parts: dict[str, float]) -> dict[str, float]:
    parts = {key: float(value) for key, value in parts.items()}
    return {**parts, "total": math.fsum(parts.values())}


def _exchange_seconds(settings: PlanSettings, nbytes: float, exchange: Exchange) -> float:
    if settings.world_size == 1 or not exchange.moving:
        return 0.0
    # At stages 1 and 2 a rank exchanges with the neighbours that share its straddling matrices.
    peers = settings.world_size - 1 if settings.stage in (0, 3) else 2 * settings.tensor_parallel
    node = (1 - exchange.leaving) * nbytes / settings.gpu.node_bandwidth
    network = exchange.leaving * nbytes / settings.gpu.network_bandwidth
    seconds = max(node, network) / settings.link_efficiency
    return seconds + _MESSAGE_SECONDS * min(peers, settings.world_size - 1)


def _kept(routes: Sequence[Route], settings: PlanSettings) -> tuple[dict[str, float], float, float]:
    """Return the bytes of weights, gradients and fp32 masters of a rank, and its elements of Muon and of AdamW."""
    kept = {"weights": 0.0, "gradients": 0.0, "master_weights": 0.0}
    elements = {"muon": 0.0, "adamw": 0.0}
    for _, local, inside in divisions(routes, settings):
        numel, ranks = sum(route.numel for route in local), inside.world_size
        kept["weights"] += numel * settings.model_dtype.itemsize / (ranks if settings.stage == 3 else 1)
        kept["gradients"] += numel * settings.model_dtype.itemsize / (ranks if settings.stage >= 2 else 1)
        kept["master_weights"] += 4.0 * numel / (ranks if settings.stage else 1)
        for route in local:
            elements[route.algorithm] += route.numel / (ranks if settings.stage else 1)
    return kept, elements["muon"], elements["adamw"]


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
    totals: dict[str, dict[str, int]] = {}
    for route in routes:
        entry = totals.setdefault(route.algorithm, {"tensors": 0, "elements": 0})
        entry["tensors"] += 1
        entry["elements"] += route.numel
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
        "step": {name: asdict(found) for name, found in step.items()},
        "advice": _advice(muon, settings, exchange, step["muon"].memory["total"]),
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
        "assumed_link_efficiency": settings.link_efficiency,
    }


def _range(values: Any) -> dict[str, float]:
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}


def _advice(muon: Sequence[Route], settings: PlanSettings, exchange: Exchange, memory: float) -> list[str]:
    """Return sentences about idle ranks, uneven work, and memory that does not suffice."""
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
    if memory > settings.gpu.memory:
        lines.append(
            f"{memory / 1e9:.0f} GB per GPU without activations, more than the {settings.gpu.memory / 1e9:.0f} GB of a "
            f"{settings.gpu.name.upper()}"
        )
    return lines
