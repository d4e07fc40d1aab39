"""``python -m deepspeed_muon plan MODEL``: predicts a run's computation, communication and memory."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import hjson
import numpy as np
import torch

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.config.values import StatePolicy, shown
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.ops.torch_operators import BLOCK
from deepspeed_muon.plan.placement import Floats, Ints
from deepspeed_muon.routing.route import Route, rows_of, totals_of
from deepspeed_muon.routing.rules import route_parameters
from deepspeed_muon.tools import predict
from deepspeed_muon.tools.command_line import Output
from deepspeed_muon.tools.model_shapes import (
    as_autoep,
    did_you_mean,
    load_model,
    read_object,
    with_separate_experts,
)
from deepspeed_muon.tools.predict import GPUS, LINK_EFFICIENCY, SUB_GROUP_NUMEL, Exchange, Gpu, PlanSettings
from deepspeed_muon.transport.all_to_all import SLOTS

_OPTIMIZERS = {"muon": "deepspeed_muon", "adamw": "AdamW"}

# Fields of PlanSettings that are options of the command with the same names.
_OPTIONS = ("world_size", "stage", "tensor_parallel", "expert_parallel", "gpus_per_node")

# Seconds that each peer adds to an all-to-all: the order of magnitude of NCCL over InfiniBand.
_MESSAGE_SECONDS = 3e-6
# Bytes read and written per element. AdamW reads the gradient, the weight and both moments, and writes the last three
# and the low-precision copy. Muon has two passes: momentum and pack (14), unpack and apply (10).
_ADAMW_TRAFFIC = 30.0
_MUON_TRAFFIC = 24.0


class StepForecast(TypedDict):
    """The busiest rank's step and memory with one optimizer.

    ``sent_bytes`` are those of Muon's exchange, ``zero_bytes`` those of ZeRO's collectives, which take ``zero_seconds``
    if nothing overlaps with them. ``flops`` are those of Newton-Schulz. ``seconds`` by phase are without ZeRO's
    collectives, ``memory``, bytes by purpose, is without activations; both have a ``total``.
    """

    sent_bytes: float
    flops: float
    seconds: dict[str, float]
    memory: dict[str, float]
    zero_bytes: float
    zero_seconds: float


def forecast(
    routes: Sequence[Route], settings: PlanSettings, exchange: Exchange | None = None
) -> dict[str, StepForecast]:
    """Predict the step and the memory of the busiest rank, with this project's ``muon`` and with ``adamw`` alone.

    Args:
        routes: The routes of all parameters.
        settings: Stage, parallel sizes and hardware.
        exchange: From :func:`~deepspeed_muon.tools.predict.exchange_of`; computed if absent.
    """
    exchange = exchange or predict.exchange_of(routes, settings)
    # 1. What both optimizers have in common.
    parameters, muon_numel, adamw_numel = predict.parameter_bytes(routes, settings)
    zero = predict.zero_bytes(routes, settings)
    zero_seconds = _ring_seconds(settings, zero)
    # 2. Muon's step. Gather and scatter are both counted with the bytes of the larger one.
    flops = float(exchange.flops.max())
    gather, scatter = exchange.gather_elements, exchange.scatter_elements
    exchange_seconds = _exchange_seconds(
        settings, max(gather.max(), scatter.max()) * settings.wire_bytes, exchange
    )
    bandwidth = settings.gpu["memory_bandwidth"] * LINK_EFFICIENCY
    muon = StepForecast(
        sent_bytes=float((gather + scatter).max()) * settings.wire_bytes,
        flops=flops,
        seconds={
            "gather": exchange_seconds if settings.stage else 0.0,  # at stage 0 every rank has the gradients
            "newton_schulz": flops / (settings.gpu["flops"] * settings.efficiency),
            "scatter": exchange_seconds,
            "momentum_and_apply": _MUON_TRAFFIC * muon_numel / bandwidth,
            "adamw": _ADAMW_TRAFFIC * adamw_numel / bandwidth,
        },
        memory=parameters
        | _state(muon_numel, adamw_numel, settings)
        | _buffers(routes, settings, exchange, partition=muon_numel),
        zero_bytes=zero,
        zero_seconds=zero_seconds,
    )
    # 3. AdamW for all parameters, to compare.
    adamw = StepForecast(
        sent_bytes=0.0,
        flops=0.0,
        seconds={"adamw": _ADAMW_TRAFFIC * (muon_numel + adamw_numel) / bandwidth},
        memory=parameters | _state(0, muon_numel + adamw_numel, settings),
        zero_bytes=zero,
        zero_seconds=zero_seconds,
    )
    for step in (muon, adamw):
        for terms in (step["seconds"], step["memory"]):
            terms["total"] = math.fsum(terms.values())
    return {"muon": muon, "adamw": adamw}


def _ring_seconds(settings: PlanSettings, nbytes: float) -> float:
    """Return the time of collectives in which each rank sends ``nbytes`` around a ring."""
    rate = settings.gpu["node_bandwidth"]  # of one GPU
    if settings.world_size > settings.gpus_per_node:
        # A ring uses every link between nodes once, and the GPUs of a node share its links.
        rate = min(rate, settings.gpus_per_node * settings.gpu["network_bandwidth"])
    return nbytes / (rate * LINK_EFFICIENCY)


def _exchange_seconds(settings: PlanSettings, nbytes: float, exchange: Exchange) -> float:
    """Return the time of one all-to-all in which the busiest rank sends ``nbytes``."""
    if settings.world_size == 1 or not exchange.sent_matrices:
        return 0.0
    # At stages 1 and 2 a rank exchanges only with the neighbours that have fragments of the same matrices.
    peers = settings.world_size - 1 if settings.stage in (0, 3) else 2 * settings.tensor_parallel
    # Both networks work at the same time, so the slower one decides.
    node = (1 - exchange.internode_fraction) * nbytes / settings.gpu["node_bandwidth"]
    network = exchange.internode_fraction * nbytes / settings.gpu["network_bandwidth"]
    seconds: float = max(node, network) / LINK_EFFICIENCY
    return seconds + _MESSAGE_SECONDS * min(peers, settings.world_size - 1)


def _state(muon: int, adamw: int, settings: PlanSettings) -> dict[str, float]:
    """Return the bytes of the optimizer's state and input, for the numbers of elements of Muon and of AdamW.

    The input is the gradient in the dtype of the master weights, which ZeRO passes for one param group, at stage 3 one
    sub-group, at a time.
    """
    policy = StatePolicy(settings.config.momentum_dtype, settings.half_states)
    master, largest = settings.master_dtype, max(muon, adamw)
    # bytes of an element; int8 has an fp32 scale for each block of 256
    momentum = policy.dtype("momentum_buffer", master).itemsize + policy.quantizes_momentum * 4 / BLOCK
    return {
        "gradient_copy": master.itemsize
        * (min(largest, SUB_GROUP_NUMEL) if settings.stage == 3 else largest),
        "momentum": momentum * muon,
        "moments": 2 * policy.dtype("exp_avg", master).itemsize * adamw,
    }


def _buffers(
    routes: Sequence[Route], settings: PlanSettings, exchange: Exchange, *, partition: float
) -> dict[str, float]:
    """Return upper bounds on the bytes of the buffers in Muon's step; ``partition`` is Muon's elements on a rank."""
    chunk = exchange.largest_chunk if exchange.sent_matrices else 0
    # Directions of one chunk that are not sent: at stage 3 only the owner's own fragments, 1 / W of the chunk on W
    # data-parallel ranks.
    local = min(partition, float(exchange.largest_chunk))
    if settings.stage == 3 and exchange.sent_matrices:
        local = chunk / (settings.world_size // settings.tensor_parallel)
    muon = [route for route in routes if route.algorithm == "muon"]
    blocks = {(rows, cols) for route in muon for _, rows, cols in route.kinds_of_blocks()}
    block = max((rows * cols for rows, cols in blocks), default=0)
    largest = max((predict.iteration_numel(*shape) for shape in blocks), default=0)
    # Without overlap the directions of a block reuse a buffer that has been sent.
    waiting = exchange.overlap * settings.wire_bytes * min(chunk, block)
    return {
        "directions": settings.wire_bytes * local,
        "exchange_buffers": float(int(2 * (SLOTS if exchange.overlap else 1) * settings.wire_bytes * chunk)),
        "iteration": float(settings.iteration.dtype.itemsize * largest + waiting),
    }


def report(
    model: str,
    routes: Sequence[Route],
    settings: PlanSettings,
    *,
    owners: bool = False,
) -> dict[str, Any]:
    """Return the plan as data that can be serialised to JSON.

    Args:
        model: The model's name in the report.
        routes: The routes of all parameters.
        settings: Stage, parallel sizes and hardware.
        owners: Whether to list the owner of every matrix.
    """
    exchange = predict.exchange_of(routes, settings)
    names = [route.name for route in routes if route.algorithm == "muon"]
    counts = np.bincount(np.asarray(exchange.owners, dtype=np.int64), minlength=settings.world_size)
    step = forecast(routes, settings, exchange)
    sent = (exchange.gather_elements + exchange.scatter_elements) * settings.wire_bytes
    return {
        "model": model,
        "elements": sum(route.numel for route in routes),
        "algorithms": totals_of(routes),
        "settings": {
            **{key: getattr(settings, key) for key in (*_OPTIONS, "gpu", "wire_bytes")},
            "overlap": exchange.overlap,
            "assumed_efficiency": settings.efficiency,
            "assumed_link_efficiency": LINK_EFFICIENCY,
        },
        "routes": rows_of(routes, per_parameter=False),
        "owners": {
            "matrices": len(names),
            "moving": exchange.sent_matrices,
            "matrices_per_rank": _range(counts),
            "flops_per_rank": _range(exchange.flops),
            "max_over_mean": exchange.balance,
            **({"of": dict(zip(names, exchange.owners, strict=True))} if owners else {}),
        },
        "sent_bytes_per_rank": _range(sent),
        "step": step,
        "fits": step["muon"]["memory"]["total"] <= settings.gpu["memory"],
    }


def _range(values: Floats | Ints) -> dict[str, float]:
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}


def render(data: Mapping[str, Any]) -> str:
    """Return the data of :func:`report` as text."""
    chosen, owners, forecasts = data["settings"], data["owners"], data["step"]
    gpu, steps = chosen["gpu"], list(forecasts.values())
    lines = [
        f"{data['model']}: {_elements(data['elements'])} parameters; ZeRO {chosen['stage']} on "
        f"{chosen['world_size']} x {gpu['name'].upper()}, tensor parallel {chosen['tensor_parallel']}, "
        f"expert parallel {chosen['expert_parallel']}, {chosen['gpus_per_node']} GPUs a node",
    ]
    lines.append(f"\nowners\n  {owners['matrices']} matrices, {owners['moving']} of them on several ranks")
    for label, spread, unit in (
        ("matrices per rank", owners["matrices_per_rank"], 1),
        ("Newton-Schulz per rank, TFLOP", owners["flops_per_rank"], 1e12),
        ("sent per rank, MB", data["sent_bytes_per_rank"], 1e6),
    ):
        low, mean, high = (f"{spread[key] / unit:,.2f}" for key in ("min", "mean", "max"))
        lines.append(f"  {label:<29} {low} to {high} (mean {mean})")
    lines.append(f"  {'busiest rank':<29} {owners['max_over_mean']:.3f} x the mean\n")
    lines.append(f"{'per rank and step':<30}" + "".join(f"{_OPTIMIZERS[name]:>18}" for name in forecasts))
    rows: list[tuple[str, list[float | None], float]] = [
        ("exchange, MB", [step["sent_bytes"] for step in steps], 1e6),
        ("ZeRO's collectives, MB", [step["zero_bytes"] for step in steps], 1e6),
        ("ZeRO's collectives, ms", [step["zero_seconds"] for step in steps], 1e-3),
        ("Newton-Schulz, TFLOP", [step["flops"] for step in steps], 1e12),
    ]
    for kind, total, suffix, unit in (
        ("seconds", "optimizer step", "ms", 1e-3),
        ("memory", "memory", "GB", 1e9),
    ):
        for name in forecasts["muon"][kind]:
            label = (
                total if name == "total" else name.replace("_", " ").replace("newton schulz", "Newton-Schulz")
            )
            rows.append((f"{label}, {suffix}", [step[kind].get(name) for step in steps], unit))
    for label, values, unit in rows:
        cells = ("-" if value is None else f"{value / unit:,.2f}" for value in values)
        lines.append(f"  {label:<28}" + "".join(f"{cell:>18}" for cell in cells))
    overlap = "communication overlaps with Newton-Schulz (exchange_overlap)"
    if not chosen["overlap"]:
        overlap = "every exchange is waited for: exchange_overlap is false, or its buffers would take more than 1 GiB"
    return "\n".join(
        [
            *lines,
            f"{'fits' if data['fits'] else 'does not fit'}: {forecasts['muon']['memory']['total'] / 1e9:,.1f} of the "
            f"{gpu['memory'] / 1e9:.0f} GB of a GPU, without activations, ZeRO's buckets and gathered parameters",
            f"\ntimes are a model: {chosen['assumed_efficiency']:.0%} of {gpu['flops'] / 1e12:,.0f} TFLOP/s, "
            f"{chosen['assumed_link_efficiency']:.0%} of {gpu['memory_bandwidth'] / 1e12:.2f} TB/s memory, "
            f"{gpu['node_bandwidth'] / 1e9:g} GB/s in a node, {gpu['network_bandwidth'] / 1e9:.3g} GB/s between nodes "
            f"({gpu['source']})",
            overlap,
            "buffers are upper bounds; activations and CUDA graphs are not counted",
            "ZeRO's collectives are no part of the step's time",
        ]
    )


def _elements(count: int) -> str:
    for unit, suffix in ((1e9, "B"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:,.2f}{suffix}"
    return str(count)


def run(arguments: argparse.Namespace) -> Output:
    """Run the command ``plan``."""
    configuration = read_configuration(arguments.params)
    bf16 = configuration.get("bf16", {})
    settings = PlanSettings(
        **{name: getattr(arguments, name) for name in _OPTIONS},
        gpu=_gpu(arguments),
        config=optimizer_config(configuration),
        master_dtype=torch.bfloat16 if bf16.get("bf16_master_weights_and_grads") else torch.float32,
        half_states=bool(bf16.get("bf16_optimizer_states")),
        efficiency=arguments.efficiency,
    )
    members = load_model(arguments.model)
    if settings.expert_parallel > 1:
        if arguments.separate_experts:
            raise ConfigError("--expert-parallel divides stacks of experts: remove --separate-experts")
        members = as_autoep(members)
    if arguments.separate_experts:
        members = with_separate_experts(members)
    routes = route_parameters(members, settings.config)
    if all(route.algorithm == "frozen" for route in routes):
        raise ConfigError(f"{arguments.model}: has no parameter to train")
    data = report(arguments.model, routes, settings, owners=arguments.owners)
    return Output(data, render(data))


def _gpu(arguments: argparse.Namespace) -> Gpu:
    """Return the GPU's figures: those of the table, and those that options give."""
    figures = ("flops", "memory", "bandwidth")
    given = {name: getattr(arguments, name) for name in (*figures, "network_gbit")}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if not 0 < value < math.inf:  # also false for NaN
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be above 0 and finite")
    name = arguments.gpu.lower()
    if name not in GPUS and (absent := [f"--{figure}" for figure in figures if figure not in given]):
        raise ConfigError(
            f"--gpu {arguments.gpu}: not among {', '.join(GPUS)}{did_you_mean(name, GPUS) or ';'} another one needs "
            f"{', '.join(absent)}"
        )
    gpu: Gpu = {**GPUS.get(name, GPUS["h100"]), "name": name}
    if "flops" in given:
        gpu["flops"] = given["flops"] * 1e12
    if "memory" in given:
        gpu["memory"] = given["memory"] * 1e9
    if "bandwidth" in given:
        gpu["memory_bandwidth"] = given["bandwidth"] * 1e9
    if name not in GPUS:
        gpu["source"] = "given by options; links as in a DGX H100"
    elif given:
        gpu["source"] += f"; {', '.join(given)} given by options"
    if "network_gbit" in given:
        # Gb/s of a node to bytes per second and GPU
        gpu["network_bandwidth"] = given["network_gbit"] * 1e9 / 8 / max(1, arguments.gpus_per_node)
    return gpu


def optimizer_config(configuration: Mapping[str, Any]) -> MuonConfig:
    """Return the settings of a DeepSpeed configuration's optimizer, with defaults for those that are "auto"."""
    params = configuration["optimizer"].get("params")
    if isinstance(params, Mapping):  # the values that the Trainer fills in do not affect routes and forecasts
        params = {key: value for key, value in params.items() if value != "auto"}
    return MuonConfig.from_params(params)


def read_configuration(text: str) -> Mapping[str, Any]:
    """Return the DeepSpeed configuration that the option ``--params`` gives.

    Args:
        text: ``optimizer.params`` as JSON, or the path of a DeepSpeed configuration or of such an object.

    Raises:
        ConfigError: If it cannot be read.
    """
    if text.lstrip().startswith("{"):
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--params {text!r}: not JSON: {error}") from error
    else:
        content = read_object(Path(text), hjson.loads)  # DeepSpeed's configuration files may have comments
        if "optimizer" not in content and not content.keys() & MuonConfig.model_fields.keys():
            raise ConfigError(
                f'--params: {text} has no section "optimizer", and is not optimizer.params either. Leave --params out '
                f"for the defaults, or add the section"
            )
    configuration = content if "optimizer" in content else {"optimizer": {"params": content}}
    for name in ("optimizer", "bf16"):
        if not isinstance(configuration.get(name, {}), Mapping):
            raise ConfigError(f"--params: {name} must be an object, got {shown(configuration[name])}")
    return configuration
