"""The command ``python -m deepspeed_muon plan MODEL``: what a training run will compute, send and keep."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hjson
import torch

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.forecast.model_shapes import PRESETS, as_autoep, load_model, with_separate_experts
from deepspeed_muon.forecast.predict import GPUS, Gpu, PlanSettings
from deepspeed_muon.forecast.report import forecast, report
from deepspeed_muon.monitoring.page import pyplot_for
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.rules import route_parameters

_LARGEST_WORLD = 16384

_LABELS = {"muon": "deepspeed_muon", "adamw": "AdamW"}


def add_subcommand(subparsers: Any) -> None:
    """Add the command ``plan`` to what ``ArgumentParser.add_subparsers`` returned; its ``run`` executes it."""
    parser = subparsers.add_parser(
        "plan", help="routes, owners, bytes, memory and predicted times of a model, without GPUs or weights"
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"{', '.join(PRESETS)}, a Hugging Face config.json, or a folder with one or with a checkpoint",
    )
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
        "--network-gbit",
        type=float,
        metavar="RATE",
        help="the rate of all links of a node together (default: one port for each GPU, as in the GPU's server)",
    )
    parser.add_argument("--separate-experts", action="store_true", help="experts as single parameters")
    parser.add_argument("--routes", action="store_true", help="one row for each parameter")
    parser.add_argument("--owners", action="store_true", help="the owner of every matrix (with --json)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="PNG", help="also plot world sizes 1 to 16384 into this file")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    configuration = _configuration(arguments.params)
    config = MuonConfig.from_params(configuration["optimizer"].get("params", {}))
    bf16 = configuration.get("bf16", {})
    settings = PlanSettings(
        world_size=arguments.world_size,
        stage=arguments.stage,
        tensor_parallel=arguments.tensor_parallel,
        expert_parallel=arguments.expert_parallel,
        gpus_per_node=arguments.gpus_per_node,
        gpu=_gpu(arguments),
        config=config,
        master_dtype=torch.bfloat16 if bf16.get("bf16_master_weights_and_grads") else torch.float32,
        half_states=bool(bf16.get("bf16_optimizer_states")),
        efficiency=arguments.efficiency,
    )
    members = load_model(arguments.model)
    if settings.expert_parallel > 1 and arguments.separate_experts:
        raise ConfigError("--expert-parallel divides stacks of experts: leave --separate-experts away")
    if settings.expert_parallel > 1:
        members = as_autoep(members, settings.expert_parallel)
    if arguments.separate_experts:
        members = with_separate_experts(members)
    routes = route_parameters(members, config)
    data = report(arguments.model, routes, settings, each_route=arguments.routes, owners=arguments.owners)
    print(json.dumps(data, indent=1) if arguments.json else render(data))
    if arguments.plot:
        _plot(arguments.model, routes, settings, Path(arguments.plot))
    return 0


def _gpu(arguments: argparse.Namespace) -> Gpu:
    """Return the kind of GPU, with its share of the links of a node if their rate is given."""
    gpu, rate = GPUS[arguments.gpu], arguments.network_gbit
    if rate is None:
        return gpu
    if not rate > 0:  # a NaN too
        raise ConfigError(f"--network-gbit {rate:g}: must be above 0")
    return replace(gpu, network_bandwidth=rate * 1e9 / 8 / max(1, arguments.gpus_per_node))


def _configuration(text: str) -> Mapping[str, Any]:
    """Return the DeepSpeed configuration in a file, or ``optimizer.params`` as one that has nothing else."""
    path = Path(text)
    from_file = not text.lstrip().startswith("{")
    try:
        # DeepSpeed reads its files with hjson, so they may have comments.
        content = hjson.loads(path.read_text(encoding="utf-8")) if from_file else json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--params {text!r}: not JSON, nor a file with JSON: {error}") from error
    return content if "optimizer" in content else {"optimizer": {"params": content}}


def _plot(model: str, routes: Sequence[Route], settings: PlanSettings, path: Path) -> None:
    """Plot step time, bytes and memory of both optimizers over the number of GPUs."""
    pyplot = pyplot_for("--plot")
    worlds = [1 << power for power in range(0, _LARGEST_WORLD.bit_length(), 2)]
    together = settings.tensor_parallel * settings.expert_parallel
    worlds = [world for world in worlds if world % together == 0]
    found = [forecast(routes, replace(settings, world_size=world)) for world in worlds]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5))
    for name, label in _LABELS.items():
        mine = [entry[name] for entry in found]
        axes[0].plot(worlds, [f["seconds"]["total"] * 1e3 for f in mine], marker="o", label=label)
        axes[1].plot(
            worlds, [(f["sent_bytes"] + f["zero_bytes"]) / 1e9 for f in mine], marker="o", label=label
        )
        axes[2].plot(worlds, [f["memory"]["total"] / 1e9 for f in mine], marker="o", label=label)
    titles = ("optimizer step, ms (predicted)", "sent per GPU and step, GB", "memory per GPU, GB")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="GPUs", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f"{model}, ZeRO {settings.stage}, {settings.gpu.name.upper()}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def render(data: Mapping[str, Any]) -> str:
    """Return the plan of :func:`deepspeed_muon.forecast.report.report` as text."""
    chosen = data["settings"]
    lines = [
        f"{data['model']}: {_elements(data['elements'])} parameters; ZeRO {chosen['stage']} on "
        f"{chosen['world_size']} x {chosen['gpu']['name'].upper()}, tensor parallel {chosen['tensor_parallel']}, "
        f"expert parallel {chosen['expert_parallel']}, "
        f"{chosen['gpus_per_node']} GPUs a node",
        "",
        "routes",
    ]
    for row in data["routes"]:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        lines.append(
            f"  {row['algorithm']:<6} {row['tensors']:>6} x {shape:<16} {row['name']}: {row['reason']}"
        )
    owners = data["owners"]
    lines += [
        "",
        "owners",
        f"  {owners['matrices']} matrices, {owners['moving']} of them on several ranks",
        f"  matrices per rank     {_range(owners['matrices_per_rank'], 1, '')}",
        f"  Newton-Schulz         {_range(owners['flops_per_rank'], 1e12, ' TFLOP')} per rank",
        f"  busiest rank          {owners['max_over_mean']:.3f} x the mean",
        f"  exchanged             {_range(data['sent_bytes_per_rank'], 1e6, ' MB')} sent per rank and step",
        "",
        _row("per rank and step", [_LABELS[name] for name in data["step"]]),
    ]
    steps = list(data["step"].values())
    lines.append(_row("  exchange, MB", [f"{s['sent_bytes'] / 1e6:,.1f}" for s in steps]))
    lines.append(_row("  ZeRO's collectives, MB", [f"{s['zero_bytes'] / 1e6:,.1f}" for s in steps]))
    lines.append(_row("  ZeRO's collectives, ms", [_cell(s["zero_seconds"], 1e-3) for s in steps]))
    lines.append(_row("  Newton-Schulz, TFLOP", [f"{s['flops'] / 1e12:,.2f}" for s in steps]))
    for part in data["step"]["muon"]["seconds"]:
        label = (
            "optimizer step"
            if part == "total"
            else part.replace("_", " ").replace("newton schulz", "Newton-Schulz")
        )
        lines.append(_row(f"  {label}, ms", [_cell(s["seconds"].get(part), 1e-3) for s in steps]))
    for part in data["step"]["muon"]["memory"]:
        label = "memory" if part == "total" else f"  {part.replace('_', ' ')}"
        lines.append(_row(f"  {label}, GB", [_cell(s["memory"].get(part), 1e9) for s in steps]))
    gpu, total = chosen["gpu"], data["step"]["muon"]["memory"]["total"]
    lines += [
        f"{'fits' if data['fits'] else 'does not fit'}: {total / 1e9:,.1f} of the {gpu['memory'] / 1e9:.0f} GB of a "
        f"GPU, without activations, ZeRO's buckets and gathered parameters",
        "",
        *_assumptions(chosen),
    ]
    return "\n".join(lines + [f"note: {line}" for line in data["advice"]])


def _elements(count: int) -> str:
    return (
        f"{count / 1e9:,.2f}B" if count >= 1e9 else f"{count / 1e6:,.2f}M" if count >= 1e6 else f"{count:,}"
    )


def _assumptions(chosen: Mapping[str, Any]) -> list[str]:
    gpu = chosen["gpu"]
    return [
        f"times are a model: {chosen['assumed_efficiency']:.0%} of {gpu['flops'] / 1e12:,.0f} TFLOP/s, "
        f"{chosen['assumed_link_efficiency']:.0%} of {gpu['memory_bandwidth'] / 1e12:.2f} TB/s memory, "
        f"{gpu['node_bandwidth'] / 1e9:g} GB/s in a node, {gpu['network_bandwidth'] / 1e9:.3g} GB/s between nodes "
        f"({gpu['source']})",
        "chunks travel while others are orthogonalised (exchange_overlap)"
        if chosen["overlap"]
        else "every exchange is waited for: exchange_overlap is false, or its buffers would take more than 1 GiB",
        "buffers are upper bounds; activations are not counted; ZeRO's collectives are no part of the step's time",
    ]


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<30}" + "".join(f"{cell:>18}" for cell in cells)


def _cell(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:,.2f}"


def _range(spread: Mapping[str, float], unit: float, suffix: str) -> str:
    low, mean, high = (f"{spread[key] / unit:,.2f}" for key in ("min", "mean", "max"))
    return f"{low} to {high} (mean {mean}){suffix}"
