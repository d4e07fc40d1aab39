"""Combines the measurements of all ranks into one summary, and into events of DeepSpeed's monitor.

At the end of a sampled step all ranks of the engine add up their reports, also ranks that own nothing, hold nothing or
skipped the step. What travels is as long as the report of one rank, however many ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from deepspeed_muon.monitoring.measure import MatrixHealth
from deepspeed_muon.monitoring.recorder import LocalSample, StepRecorder, Travelling
from deepspeed_muon.transport.members import Members

__all__ = ["HealthLog", "RankReport", "monitor_events", "summarize"]

_PARTS = ("gather", "newton_schulz", "scatter")
_TRAVELLING: tuple[Travelling, ...] = ("direction", "update")
# The summary has the mean of these numbers over the sampled matrices.
_MEANS = ("update_rms", "orthogonality_error", "stable_rank", "alignment")
_PREFIX = "Train/Muon/"
# A summary lists so many matrices. A stack of experts is measured in parts, on all of its owners.
_LISTED = 16


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

    @property
    def total(self) -> float:
        """Seconds of the inner step; the time of sampling does not count."""
        return self.seconds.get("step", 0.0) - self.seconds.get("sampling", 0.0)

    def sums(self) -> dict[str, float]:
        """Return the numbers that are added up over the ranks."""
        found: dict[str, float] = {
            "redone": self.redone,
            "failed": self.failed,
            "matrices": len(self.matrices),
        }
        for key in _MEANS:
            found[key] = math.fsum(getattr(each, key) for each in self.matrices.values())
        found["running"] = float(self.total > 0)
        for part in _PARTS:
            found[part] = self.seconds.get(part, 0.0) / self.total if self.total > 0 else 0.0
        for what in _TRAVELLING:
            found[f"lost {what}"], found[f"whole {what}"] = self.losses.get(what, (0.0, 0.0))
        return found

    def maxima(self) -> dict[str, float]:
        """Return the numbers of which the largest counts."""
        largest = max((each.sigma_max for each in self.matrices.values()), default=0.0)
        return {"seconds": self.total, "sigma_max": largest}


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
            self._summary = {"step": number, **summarize(self._report(sample), members or Members())}

    def _report(self, sample: LocalSample) -> RankReport:
        counters = self._recorder.redone, self._recorder.failed
        return RankReport(sample.matrices, sample.seconds, *counters, sample.losses)


def summarize(report: RankReport, members: Members) -> dict[str, Any]:
    """Combine the ranks' reports of one step. Must be called by all ``members``.

    Returns:
        ``redone`` and ``failed``; the means of the sampled matrices and the largest ``sigma_max``; ``time_<part>``,
        the mean over ranks of each part's share of the inner step; ``seconds``, the inner step of the slowest rank;
        ``wire_error_direction`` and ``wire_error_update``, what the wire changes of all that travels, relative to it;
        and ``matrices`` with the numbers of each, at most 16 of them. Keys without a measurement are left out.
    """
    what = "summary of health"
    own = report.sums()
    sums = dict(zip(own, members.reduce(list(own.values()), "sum", what=what), strict=True))
    own = report.maxima()
    largest = dict(zip(own, members.reduce(list(own.values()), "max", what=what), strict=True))
    summary: dict[str, Any] = {"redone": int(sums["redone"]), "failed": int(sums["failed"])}
    if count := sums["matrices"]:
        summary |= {key: sums[key] / count for key in _MEANS}
        summary["sigma_max"] = largest["sigma_max"]
    if running := sums["running"]:
        summary |= {f"time_{part}": sums[part] / running for part in _PARTS}
        summary["seconds"] = largest["seconds"]
    for travelling in _TRAVELLING:
        if lost := sums[f"lost {travelling}"]:
            summary[f"wire_error_{travelling}"] = math.sqrt(lost / sums[f"whole {travelling}"])
    matrices: dict[str, dict[str, float]] = {}
    for rank, (name, health) in members.collect(list(report.matrices.items()), most=_LISTED, what=what):
        # Ranks that share no parameters (experts) can have matrices of the same name.
        matrices[name if name not in matrices else f"{name} (rank {rank})"] = asdict(health)
    return {**summary, "matrices": matrices}


def monitor_events(summary: dict[str, Any], samples: int) -> list[tuple[str, float, int]]:
    """Return a summary as events of DeepSpeed's monitor: name, value, and the number of training samples so far."""
    return [(_PREFIX + name, float(value), samples) for name, value in summary.items() if name != "matrices"]
