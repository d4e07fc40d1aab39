"""The command ``python -m deepspeed_muon plan MODEL``: what a training run will compute, send and keep."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hjson

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.forecast.live import planned_parameters
from deepspeed_muon.forecast.model_shapes import PRESETS, as_autoep, load_model
from deepspeed_muon.forecast.network import Network, network_seconds
from deepspeed_muon.forecast.predict import exchange_of
from deepspeed_muon.forecast.report import forecast, report
from deepspeed_muon.forecast.settings import PlannedParameter, PlanSettings
from deepspeed_muon.forecast.text import LABELS, render
from deepspeed_muon.plan.hardware import GPUS
from deepspeed_muon.routing.rules import route_parameters

_LARGEST_WORLD = 16384


def add_subcommand(subparsers: Any) -> None:
    """Add the command ``plan`` to what ``ArgumentParser.add_subparsers`` returned; its ``run`` executes it."""
    parser = subparsers.add_parser(
        "plan", help="routes, owners, bytes, memory and predicted times of a model, without GPUs or weights"
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "model",
        nargs="?",
        help=f"{', '.join(PRESETS)}, a Hugging Face config.json, or a folder with one or with a checkpoint",
    )
    model.add_argument("--model", dest="model_option", metavar="MODEL", help="the same")
    parser.add_argument("--world-size", type=int, default=8, help="GPUs, tensor-parallel ones counted (8)")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="ZeRO stage (3)")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share every matrix (1)")
    parser.add_argument(
        "--expert-parallel",
        type=int,
        default=1,
        help="GPUs that the experts of a layer are divided among (1)",
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs that NVLink connects (8)")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100", help="kind of GPU (h100)")
    parser.add_argument("--params", default="{}", help="optimizer.params as JSON, or a DeepSpeed config file")
    parser.add_argument("--efficiency", type=float, default=0.5, help="part of peak TFLOP/s reached (0.5)")
    parser.add_argument(
        "--network-gbit", type=float, metavar="RATE", help="the rate of a node's link: adds times on the wire"
    )
    parser.add_argument(
        "--compute-ms",
        nargs="+",
        default=[],
        metavar="NAME=MS",
        help=f"with --network-gbit: the time of a step on a fast network, measured, by name ({', '.join(LABELS)}); "
        "adds the predicted time of the whole step",
    )
    parser.add_argument("--separate-experts", action="store_true", help="experts as single parameters")
    parser.add_argument("--routes", action="store_true", help="one row for each parameter")
    parser.add_argument("--owners", action="store_true", help="the owner of every matrix (with --json)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="PNG", help="also plot world sizes 1 to 16384 into this file")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    config = _config(arguments.params)
    settings = _settings(arguments, config)
    model = arguments.model or arguments.model_option
    members = load_model(model, separate_experts=arguments.separate_experts)
    if settings.expert_parallel > 1:
        if arguments.separate_experts:
            raise ConfigError("--expert-parallel divides stacks of experts: leave --separate-experts away")
        members = as_autoep(members, settings.expert_parallel)
    routes = route_parameters(members, config)
    parameters = planned_parameters(routes)
    data = report(model, routes, parameters, settings, each_route=arguments.routes, owners=arguments.owners)
    data["network"] = _network(arguments, parameters, settings)
    print(json.dumps(data, indent=1) if arguments.json else render(data))
    if arguments.plot:
        _plot(model, parameters, settings, Path(arguments.plot))
    return 0


def _config(text: str) -> MuonConfig:
    path = Path(text)
    from_file = not text.lstrip().startswith("{")
    try:
        # DeepSpeed reads its files with hjson, so they may have comments.
        content = hjson.loads(path.read_text(encoding="utf-8")) if from_file else json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--params {text!r}: not JSON, nor a file with JSON: {error}") from error
    if from_file and "optimizer" in content:
        content = content["optimizer"].get("params", {})
    return MuonConfig.from_params(content)


def _settings(arguments: argparse.Namespace, config: MuonConfig) -> PlanSettings:
    import torch

    width = config.resolved_wire_dtype(torch.bfloat16).itemsize
    try:
        return PlanSettings(
            world_size=arguments.world_size,
            stage=arguments.stage,
            tensor_parallel=arguments.tensor_parallel,
            expert_parallel=arguments.expert_parallel,
            gpus_per_node=arguments.gpus_per_node,
            gpu=GPUS[arguments.gpu],
            steps=len(config.coefficients()),
            method=config.ns_method,
            ns_dtype=config.ns_settings(torch.device("cuda")).dtype,
            wire_bytes=config.wire_format.bytes_per_element(width),
            direction_bytes=width,
            chunk_numel=config.exchange_chunk_numel,
            overlap=config.exchange_overlap,
            efficiency=arguments.efficiency,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _network(
    arguments: argparse.Namespace, parameters: Sequence[PlannedParameter], settings: PlanSettings
) -> dict[str, Any] | None:
    """Return the times on a network of the given rate, ``None`` if no rate is given."""
    compute: dict[str, float] = {}
    for text in arguments.compute_ms:
        name, _, value = text.partition("=")
        try:
            compute[name] = float(value) / 1e3
        except ValueError:
            name = ""
        if name not in LABELS or not compute[name] >= 0:
            raise ConfigError(f"--compute-ms {text!r}: expected NAME=MS with a name of {', '.join(LABELS)}")
    if arguments.network_gbit is None:
        if compute:
            raise ConfigError("--compute-ms needs --network-gbit")
        return None
    try:
        network = Network(arguments.network_gbit * 1e9)
    except ValueError as error:
        raise ConfigError(f"--network-gbit: {error}") from error
    seconds = network_seconds(parameters, settings, network, exchange_of(parameters, settings), compute)
    return {"bits_per_second": network.rate, "payload": network.payload, "seconds": seconds}


def _plot(model: str, parameters: Sequence[PlannedParameter], settings: PlanSettings, path: Path) -> None:
    """Plot step time, bytes and memory of both optimizers over the number of GPUs."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    worlds = [1 << power for power in range(0, _LARGEST_WORLD.bit_length(), 2)]
    together = settings.tensor_parallel * settings.expert_parallel
    worlds = [world for world in worlds if world % together == 0]
    found = [forecast(parameters, replace(settings, world_size=world)) for world in worlds]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5))
    for name, label in LABELS.items():
        mine = [entry[name] for entry in found]
        axes[0].plot(worlds, [f.seconds["total"] * 1e3 for f in mine], marker="o", label=label)
        axes[1].plot(worlds, [(f.sent_bytes + f.zero_bytes) / 1e9 for f in mine], marker="o", label=label)
        axes[2].plot(worlds, [f.memory["total"] / 1e9 for f in mine], marker="o", label=label)
    titles = ("optimizer step, ms (predicted)", "sent per GPU and step, GB", "memory per GPU, GB")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="GPUs", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f"{model}, ZeRO {settings.stage}, {settings.gpu.name.upper()}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
