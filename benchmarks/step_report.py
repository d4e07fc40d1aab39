"""Table of ``benchmarks/optimizer_step.py``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.support import Row, median_ratio, table_of

OURS, ADAMW = "ours", "DeepSpeed AdamW"
# Column, key of a row, unit, and whether there are columns with ratios.
FIGURES = (
    ("backward + step, ms", "total_s", 1e-3, True),
    ("step, ms", "step_s", 1e-3, False),
    ("whole, ms", "whole_s", 1e-3, True),
    ("sent, MB", "sent_bytes", 1e6, True),
    ("on the link, MB", "link_bytes", 1e6, False),
    ("peak, MB", "peak_bytes", 1e6, True),
)


def cells(rows: list[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Group the rows by model, stage, ranks, accumulation and rate."""
    grouped: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = (*(row[key] for key in ("model", "stage", "ranks", "accumulation")), row.get("rate"))
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
    """Return all rows as Markdown, with the ratios of this project to each peer and of each to AdamW."""
    machine = report["machine"]
    return [
        "# One optimizer step",
        "",
        f"{machine['name']}, {machine['cores']} cores, AMX: {machine['amx']}, torch {machine['torch']}, DeepSpeed "
        f"{machine['deepspeed']}; bf16 models, one thread a rank, {report['tokens']} tokens a micro-batch. "
        f"Last command: `{report['command']}`.",
        "",
        "Times are medians of the slowest rank, whole ones with forward. Bytes are those of the rank that sends most, "
        "gradient reduction and parameter gathers included: as the best algorithm of each collective sends them, and "
        "as the kernel counts them on the busiest link. Memory is the growth of the largest rank over the process "
        "before the model. `x`: this project / that optimizer, for times the median of paired ratios; `/ AdamW`: that "
        "optimizer / AdamW. Predicted: the whole step by `plan`, from that without a limit.",
        "",
        *table_of(list(lines(report["rows"]))),
    ]


def lines(rows: list[Row]) -> Iterator[Row]:
    """Yield the cells of each row."""
    for found in cells(rows).values():
        for name, row in found.items():
            line = {key: row[key] for key in ("model", "stage", "ranks")} | {"acc.": row["accumulation"]}
            if "rate" in row:
                line["Mbit/s"] = "unlimited" if row["rate"] is None else f"{row['rate'] / 1e6:g}"
            line["optimizer"] = name
            for head, what, unit, compared in FIGURES:
                value = row.get(what)
                if value is None:
                    continue
                line[head] = f"{(statistics.median(value) if isinstance(value, list) else value) / unit:.1f}"
                of = head.partition(",")[0]
                pairs = ((f"x, {of}", OURS, name), (f"{of} / AdamW", name, ADAMW))
                for label, own, other in pairs if compared else ():
                    line[label] = ""
                    if own != other and {own, other} <= found.keys():
                        quotient = ratio(found[own], found[other], what)
                        line[label] = "" if quotient is None else f"{quotient:.2f}"
            if "predicted_s" in row:
                off = row["predicted_s"] / statistics.median(row["whole_s"]) - 1
                line["predicted, ms"] = f"{row['predicted_s'] * 1e3:.1f} ({off:+.0%})"
            yield line
