"""Table of ``benchmarks/optimizer_step.py``."""

from __future__ import annotations

import statistics
from typing import Any

OURS = "ours"
Row = dict[str, Any]


def cells(rows: list[Row]) -> dict[tuple[str, int, int, int], dict[str, Row]]:
    """Group the rows by model, stage, ranks and accumulation."""
    grouped: dict[tuple[str, int, int, int], dict[str, Row]] = {}
    for row in rows:
        key = (row["model"], row["stage"], row["ranks"], row["accumulation"])
        grouped.setdefault(key, {})[row["optimizer"]] = row
    return grouped


def ratio(ours: Row, peer: Row, what: str) -> float | None:
    """Return ours / peer: of times the median of the paired ratios, of bytes and memory the plain one.

    Times that were not measured in turn have no ratio.
    """
    if what not in ours or what not in peer:
        return None
    if isinstance(ours[what], list):
        if ours.get("timed") != peer.get("timed") or len(ours[what]) != len(peer[what]):
            return None
        return statistics.median(a / b for a, b in zip(ours[what], peer[what], strict=True))
    return ours[what] / peer[what] if peer[what] else None


def table(report: dict[str, Any]) -> str:
    """Return all rows as Markdown, with the ratio of this project to each peer."""
    machine = report["machine"]
    lines = [
        "# One optimizer step",
        "",
        f"{machine['name']}, {machine['cores']} cores, AMX: {machine['amx']}, torch {machine['torch']}, DeepSpeed "
        f"{machine['deepspeed']}; bf16 models, one thread a rank, {report['tokens']} tokens a micro-batch. "
        f"Last command: `{report['command']}`.",
        "",
        "Times are medians of the slowest rank; bytes those of the rank that sends most, gradient reduction and "
        "parameter gathers included; memory the growth of the largest rank over the process before the model. `x` "
        "columns are this project / that optimizer, for times the median of paired ratios. Distance: the sine of "
        "the angle between an optimizer's first update and its own iteration in float64, the largest of all matrices.",
        "",
        "| model | stage | ranks | acc. | optimizer | backward + step, ms | x | step, ms | sent, MB | x | peak, MB | x "
        "| distance of the update | Newton-Schulz calls by rank |",
        "|" + "---|" * 14,
    ]
    for (model, stage, ranks, accumulation), found in cells(report["rows"]).items():
        ours = found.get(OURS)
        for name, row in found.items():
            against = {
                what: _number(ratio(ours, row, what)) if ours and name != OURS else ""
                for what in ("total_s", "sent_bytes", "peak_bytes")
            }
            values = [
                model,
                stage,
                ranks,
                accumulation,
                name,
                _scaled(row, "total_s", 1e3),
                against["total_s"],
                _scaled(row, "step_s", 1e3),
                _scaled(row, "sent_bytes", 1e-6),
                against["sent_bytes"],
                _scaled(row, "peak_bytes", 1e-6),
                against["peak_bytes"],
                f"{row['distance']:.3f}" if "distance" in row else "",
                " ".join(str(count) for count in row.get("matrices", [])),
            ]
            lines.append("| " + " | ".join(map(str, values)) + " |")
    return "\n".join(lines) + "\n"


def _scaled(row: Row, what: str, factor: float) -> str:
    if what not in row:
        return ""
    value = statistics.median(row[what]) if isinstance(row[what], list) else row[what]
    return f"{value * factor:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
