"""The plan of a training run as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LABELS = {"muon": "deepspeed_muon", "adamw": "AdamW"}
"""What texts and plots call the optimizers of a forecast."""


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
        _row("per rank and step", [LABELS[name] for name in data["step"]]),
    ]
    steps = list(data["step"].values())
    lines.append(_row("  exchange, MB", [f"{s['sent_bytes'] / 1e6:,.1f}" for s in steps]))
    lines.append(_row("  ZeRO's collectives, MB", [f"{s['zero_bytes'] / 1e6:,.1f}" for s in steps]))
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
    lines += _network(data.get("network"))
    lines += ["", *_assumptions(chosen)]
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
        f"{gpu['node_bandwidth'] / 1e9:.0f} GB/s in a node, {gpu['network_bandwidth'] / 1e9:.0f} GB/s between nodes "
        f"({gpu['source']})",
        "chunks travel while others are orthogonalised (exchange_overlap)"
        if chosen["overlap"]
        else "every exchange is waited for: exchange_overlap is false, or its buffers would take more than 1 GiB",
        "buffers are upper bounds; activations are not counted; ZeRO's collectives are no part of the step's time",
    ]


def _network(network: Mapping[str, Any] | None) -> list[str]:
    """Return the times on a network of a given rate."""
    if network is None:
        return []
    seconds = network["seconds"]
    parts = {part: None for each in seconds.values() for part in each}
    lines = [
        "",
        _row(f"at {network['bits_per_second'] / 1e9:g} Gbit/s a node", [LABELS[name] for name in seconds]),
    ]
    for part in parts:
        label = f"  {part.replace('_', ' ').replace('zero', 'ZeRO')}, ms"
        lines.append(_row(label, [_cell(each.get(part), 1e-3) for each in seconds.values()]))
    return lines


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<30}" + "".join(f"{cell:>18}" for cell in cells)


def _cell(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:,.2f}"


def _range(spread: Mapping[str, float], unit: float, suffix: str) -> str:
    low, mean, high = (f"{spread[key] / unit:,.2f}" for key in ("min", "mean", "max"))
    return f"{low} to {high} (mean {mean}){suffix}"
