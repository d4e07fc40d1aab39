"""Table of ``benchmarks/cluster.py``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.support import Row, median_ratio, table_of


class Steps:
    """The figures of one row: one optimizer at one rate, over all steps and ranks."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self._at = {name: number for number, name in enumerate(row["fields"])}

    def of(self, *names: str, over: Callable[[Sequence[float]], float] = max) -> list[float]:
        """Return for each step the sum of some fields, by default of the rank with most."""
        return [
            over([sum(own[self._at[name]] for name in names) for own in step]) for step in self.row["samples"]
        ]

    @property
    def whole(self) -> list[float]:
        """Seconds of forward, backward and step."""
        return self.of("forward_s", "backward_s", "step_s")

    @property
    def backward_and_step(self) -> list[float]:
        """Seconds of backward and step."""
        return self.of("backward_s", "step_s")

    @property
    def exposed(self) -> list[float]:
        """Exposed wait of the mean rank, no more than the cores were idle."""
        idle = self.of("idle_s")
        return [
            max(0.0, min(pair))
            for pair in zip(self.of("exposed_s", over=statistics.fmean), idle, strict=True)
        ]

    @property
    def exposed_step(self) -> float:
        """The part of the mean rank's exposed wait inside ``engine.step()``, at the median."""
        return max(0.0, statistics.median(self.of("exposed_step_s", over=statistics.fmean)))

    @property
    def idle(self) -> float:
        """The part of the time in which a core had nothing to do, over all cores."""
        return sum(self.of("idle_s")) / (self.row["cores"] * sum(self.whole))

    @property
    def counted_bytes(self) -> int:
        """Bytes that the rank that sends most handed to collectives, in their best algorithms."""
        return max(sum(sum(phase["bytes"].values()) for phase in phases) for phases in self.row["counts"])

    @property
    def link_bytes(self) -> float:
        """Bytes that the kernel sent on the link that sent most."""
        return statistics.median(self.of("sent_bytes"))

    @property
    def calls(self) -> dict[str, int]:
        """Collectives of a step by kind."""
        found: dict[str, int] = {}
        for phase in self.row["counts"][0]:
            for kind, count in phase["calls"].items():
                found[kind] = found.get(kind, 0) + count
        return found


def rate_text(rate: float | None) -> str:
    if rate is None:
        return "unlimited"
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, first and third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def page(report: dict[str, Any]) -> list[str]:
    """Return all rows as Markdown."""
    machine = report["machine"]
    adamw = {_cell(row): Steps(row) for row in report["rows"] if row["optimizer"] == "DeepSpeed AdamW"}
    return [
        "# A step on a network of a limited rate",
        "",
        f"{machine['name']}, {machine['cores']} cores, torch {machine['torch']}, DeepSpeed {machine['deepspeed']}; "
        f"bf16 models, one thread a rank, {report['tokens']} tokens a micro-batch. "
        f"Last command: `{report['command']}`.",
        "",
        "Times are medians (quartiles) of the slowest rank. Whole: forward, backward and step. Sent: by the kernel's "
        "count on the busiest link, and as counted at the process group. Collectives: of a step, AR all-reduce, AG "
        "all-gather, RS reduce-scatter, AA all-to-all, BC broadcast. Exposed wait: of the mean rank. Cores idle: of "
        "all cores.",
        "",
        *table_of([_cells(row, adamw.get(_cell(row))) for row in report["rows"]]),
    ]


def _cell(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model", "stage", "hosts", "rate"))


def _cells(row: Row, adamw: Steps | None) -> Row:
    steps = Steps(row)
    whole = quartiles(steps.whole)
    predicted = error = ""
    if row.get("predicted_s"):
        predicted = f"{row['predicted_s'] * 1e3:.0f}"
        error = f"{row['predicted_s'] / whole[0] - 1:+.0%}"
    exposed = statistics.median(steps.exposed)
    return {
        **{key: row[key] for key in ("model", "stage", "hosts")},
        "rate": rate_text(row["rate"]),
        "optimizer": row["optimizer"],
        "whole, ms": _milliseconds(whole),
        "whole / AdamW's": _ratio(steps.whole, adamw and adamw.whole),
        "backward and step, ms": _milliseconds(quartiles(steps.backward_and_step)),
        "backward and step / AdamW's": _ratio(steps.backward_and_step, adamw and adamw.backward_and_step),
        "predicted, ms": predicted,
        "error": error,
        "step, ms": _milliseconds(quartiles(steps.of("step_s"))),
        "exposed wait, ms": f"{exposed * 1e3:.0f}",
        "of whole": f"{exposed / whole[0]:.0%}",
        "in step, ms": f"{steps.exposed_step * 1e3:.0f}",
        "cores idle": f"{steps.idle:.0%}",
        "sent, MB": f"{steps.link_bytes / 1e6:.2f}",
        "counted, MB": f"{steps.counted_bytes / 1e6:.2f}",
        "collectives": _calls(steps.calls),
    }


def _ratio(own: list[float], other: list[float] | None) -> str:
    """Return the ratio of what was measured in turn."""
    return f"{median_ratio(own, other):.2f}" if other is not None and len(own) == len(other) else ""


def _milliseconds(values: tuple[float, float, float]) -> str:
    middle, low, high = (f"{value * 1e3:.0f}" for value in values)
    return f"{middle} ({low}-{high})"


_SHORT = {
    "all-reduce": "AR",
    "all-gather": "AG",
    "reduce-scatter": "RS",
    "all-to-all": "AA",
    "broadcast": "BC",
    "reduce": "R",
    "send": "S",
}


def _calls(calls: dict[str, int]) -> str:
    shown = [f"{calls[kind]} {short}" for kind, short in _SHORT.items() if calls.get(kind)]
    return f"{sum(calls.get(kind, 0) for kind in _SHORT)}: {', '.join(shown)}"
