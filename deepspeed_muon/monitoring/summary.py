"""Combines the measurements of all ranks into one summary, and into events of DeepSpeed's monitor.

At the end of a sampled step all ranks of the engine gather their reports. Ranks that own nothing, hold nothing or
skipped the step take part too, with empty reports.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from deepspeed_muon.monitoring.measure import MatrixHealth
from deepspeed_muon.monitoring.recorder import LocalSample, StepRecorder, Travelling
from deepspeed_muon.transport.members import Members

__all__ = ["HealthLog", "RankReport", "monitor_events", "summarize"]

_PARTS = ("gather", "newton_schulz", "scatter")
# The summary has the mean of these numbers over the sampled matrices.
_MEANS = ("update_rms", "orthogonality_error", "stable_rank", "alignment")
_PREFIX = "Train/Muon/"


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank contributes to a summary.

    Attributes:
        matrices: Parameter name to its measurements, for the sampled matrices that the rank owns.
        seconds: Time of each part of the inner step.
        redone: Matrices redone in fp32 since the start.
        failed: Matrices left without an update since the start.
        losses: What the wire lost; see :class:`~deepspeed_muon.monitoring.recorder.LocalSample`.
    """

    matrices: dict[str, MatrixHealth]
    seconds: dict[str, float]
    redone: int
    failed: int
    losses: dict[Travelling, tuple[float, float]] = field(default_factory=dict)


class HealthLog:
    """Runs the recorder around steps and keeps the last summary."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._steps = 0
        self._summary: dict[str, Any] = {}

    def summary(self) -> dict[str, Any]:
        """Return the summary of the last sample; before the first one only the counters of this rank."""
        if self._summary:
            return dict(self._summary)
        return {"redone": self._recorder.redone, "failed": self._recorder.failed}

    @contextmanager
    def step(self, number: int | None = None, *, members: Members | None = None) -> Iterator[None]:
        """Record one optimizer step, and summarise it if it is sampled.

        Args:
            number: The number of the step, counted from 1 and equal on all ranks; ``None`` counts calls.
            members: The ranks to include, all of which must call this; ``None`` for this rank alone.
        """
        self._steps += 1
        number = self._steps if number is None else number
        with self._recorder.step(number) as sample:
            yield
        if sample is not None:
            reports = (members or Members()).gather(self._report(sample), what="summary of health")
            self._summary = {"step": number, **summarize(list(reports.values()))}

    def _report(self, sample: LocalSample) -> RankReport:
        counters = self._recorder.redone, self._recorder.failed
        return RankReport(sample.matrices, sample.seconds, *counters, sample.losses)


def summarize(reports: Sequence[RankReport]) -> dict[str, Any]:
    """Combine the ranks' reports of one step, in the order of the ranks.

    Returns:
        ``redone`` and ``failed``; the means of the sampled matrices and the largest ``sigma_max``; ``time_<part>``,
        the mean over ranks of each part's share of the inner step; ``seconds``, the inner step of the slowest rank;
        ``wire_error_direction`` and ``wire_error_update``, what the wire changes of all that travels, relative to it;
        and ``matrices`` with the numbers of each. Keys without a measurement are left out.
    """
    matrices: dict[str, dict[str, float]] = {}
    for rank, report in enumerate(reports):
        for name, health in report.matrices.items():
            # Ranks that share no parameters (experts) can have matrices of the same name.
            matrices[name if name not in matrices else f"{name} (rank {rank})"] = asdict(health)
    summary: dict[str, Any] = {
        "redone": sum(report.redone for report in reports),
        "failed": sum(report.failed for report in reports),
    }
    if matrices:
        for key in _MEANS:
            summary[key] = sum(each[key] for each in matrices.values()) / len(matrices)
        summary["sigma_max"] = max(each["sigma_max"] for each in matrices.values())
    # The time of sampling does not count.
    totals = [r.seconds.get("step", 0.0) - r.seconds.get("sampling", 0.0) for r in reports]
    running = [(report, total) for report, total in zip(reports, totals, strict=True) if total > 0]
    if running:
        for part in _PARTS:
            shares = [report.seconds.get(part, 0.0) / total for report, total in running]
            summary[f"time_{part}"] = sum(shares) / len(shares)
        summary["seconds"] = max(totals)
    for what in ("direction", "update"):
        losses = [report.losses[what] for report in reports if what in report.losses]
        if lost := math.fsum(each[0] for each in losses):
            summary[f"wire_error_{what}"] = math.sqrt(lost / math.fsum(each[1] for each in losses))
    return {**summary, "matrices": matrices}


def monitor_events(summary: dict[str, Any], samples: int) -> list[tuple[str, float, int]]:
    """Return a summary as events of DeepSpeed's monitor: name, value, and the number of training samples so far."""
    return [
        (_PREFIX + name, float(value), samples)
        for name, value in summary.items()
        if name not in ("step", "matrices")
    ]
