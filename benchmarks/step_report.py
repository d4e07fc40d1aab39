"""Table of ``benchmarks/optimizer_step.py``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.support import Row, median_ratio, table

OURS = "ours"


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
        return median_ratio(ours[what], peer[what])
    return ours[what] / peer[what] if peer[what] else None


def page(report: dict[str, Any]) -> list[str]:
    """Return all rows as Markdown, with the ratio of this project to each peer."""
    machine = report["machine"]
    heads = ["model", "stage", "ranks", "acc.", "optimizer", "backward + step, ms", "x", "step, ms"]
    heads += ["sent, MB", "x", "peak, MB", "x", "distance"]
    return [
        "# One optimizer step",
        "",
        f"{machine['name']}, {machine['cores']} cores, AMX: {machine['amx']}, torch {machine['torch']}, DeepSpeed "
        f"{machine['deepspeed']}; bf16 models, one thread a rank, {report['tokens']} tokens a micro-batch. "
        f"Last command: `{report['command']}`.",
        "",
        "Times are medians of the slowest rank; bytes those of the rank that sends most, gradient reduction and "
        "parameter gathers included; memory the growth of the largest rank over the process before the model. `x` "
        "columns are this project / that optimizer, for times the median of paired ratios. Distance: the sine of the "
        "angle between an optimizer's first update and its own iteration in float64, the largest of all matrices.",
        "",
        *table(heads, lines(report["rows"])),
    ]


def lines(rows: list[Row]) -> Iterator[list[object]]:
    """Yield the cells of each row."""
    for found in cells(rows).values():
        for name, row in found.items():
            line = [row[key] for key in ("model", "stage", "ranks", "accumulation", "optimizer")]
            for what, factor in (
                ("total_s", 1e3),
                ("step_s", 1e3),
                ("sent_bytes", 1e-6),
                ("peak_bytes", 1e-6),
            ):
                value = row.get(what)
                if isinstance(value, list):
                    value = statistics.median(value)
                line.append("" if value is None else f"{value * factor:.1f}")
                if what != "step_s":
                    own = ratio(found[OURS], row, what) if OURS in found and name != OURS else None
                    line.append("" if own is None else f"{own:.2f}")
            line.append(f"{row['distance']:.2g}" if "distance" in row else "")
            yield line
