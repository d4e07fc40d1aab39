"""Samples of health: what one rank measures in a sampled step, and what all ranks measured, as one summary.

At the end of a sampled step all ranks of the engine add up their reports, also ranks that own nothing, hold nothing or
skipped the step. What is communicated is as long as the report of one rank, however many ranks there are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from deepspeed_muon.monitoring.measure import Sums, combine
from deepspeed_muon.transport.ranks import Ranks

SpanName = Literal["step", "gather", "newton_schulz", "scatter", "sampling"]
Exchanged = Literal["direction", "update"]

_PARTS = ("gather", "newton_schulz", "scatter")
_EXCHANGED: tuple[Exchanged, ...] = ("direction", "update")
# The summary has the mean of these numbers over the sampled matrices.
_MEANS = ("update_rms", "orthogonality_error", "stable_rank", "alignment")
_PREFIX = "Train/Muon/"
# A summary lists so many matrices. A stack of experts is measured in parts, on all of its owners.
_LISTED = 16


@dataclass(slots=True)
class Sample:
    """What one rank measured in one sampled step.

    Attributes:
        matrices: Parameter name to its measurements, for the sampled matrices that the rank owns.
        seconds: Time of each part of the inner step.
        redone: Matrices redone in fp32 since the start.
        failed: Matrices left without an update since the start.
        losses: With int8 communication, of the directions and of the updates that this rank sent: the squared elements
            of what was lost, and of all.
    """

    matrices: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    redone: int = 0
    failed: int = 0
    losses: dict[Exchanged, tuple[float, float]] = field(default_factory=dict)


class StepRecorder:
    """Chooses the steps and matrices to sample, keeps what this rank measured and counted, and the last summary.

    Attributes:
        every: Steps between samples; 0 for none.
        matrices: How many matrices each sample measures, other ones each time.
        check: Whether every result is checked.
        redone: Blocks that failed the check and were right when computed again in fp32.
        failed: Blocks that were wrong in fp32 too and got no update.
    """

    def __init__(self, *, every: int, check: bool) -> None:
        self.every = every
        self.matrices = 4
        self.check = check
        self.redone = 0
        self.failed = 0
        self._device = torch.device("cpu")
        self._steps = 0
        self._summary: dict[str, Any] = {}
        self._total = 0
        self._watched: frozenset[int] = frozenset()
        self._sample: Sample | None = None
        self._parts: dict[str, list[Sums]] = {}
        self._spans: list[tuple[SpanName, torch.Event, torch.Event]] = []

    def reset(self, device: torch.device) -> None:
        """Forget the numbers of all matrices, because the optimizer is bound again, now on ``device``."""
        self._device = device
        self._total = 0

    def reserve(self, count: int) -> int:
        """Reserve numbers for ``count`` matrices; return the first one."""
        first = self._total
        self._total += count
        return first

    @property
    def sampling(self) -> bool:
        """Whether the current step is sampled."""
        return self._sample is not None

    def due(self, number: int) -> bool:
        """Return whether step ``number``, counted from 1, is sampled."""
        return self.every > 0 and number % self.every == 0

    @contextmanager
    def step(self, number: int | None = None, *, ranks: Ranks | None = None) -> Iterator[Sample | None]:
        """Record one optimizer step, and summarise it if it is sampled; yields the sample that it fills, or ``None``.

        Args:
            number: The number of the step, counted from 1 and equal on all ranks; ``None`` counts calls.
            ranks: The ranks to include, all of which must call this; ``None`` for this rank alone.
        """
        self._steps += 1
        number = self._steps if number is None else number
        if not self.due(number):
            yield None
            return
        # The matrices are spread over the model's depth. Each sample takes other ones, so that all have their turn.
        count = min(self.matrices, self._total)
        turn = number // self.every
        self._watched = frozenset((turn + j * self._total // count) % self._total for j in range(count))
        self._sample = sample = Sample()
        try:
            yield sample
            for name, start, end in self._spans:
                end.synchronize()
                sample.seconds[name] = sample.seconds.get(name, 0.0) + start.elapsed_time(end) / 1000.0
            sample.matrices = {name: combine(parts) for name, parts in self._parts.items()}
            sample.redone, sample.failed = self.redone, self.failed
        finally:
            self._sample = None
            self._parts.clear()
            self._spans.clear()
        self._summary = {"step": number, **summarize(sample, ranks or Ranks())}

    def summary(self) -> dict[str, Any]:
        """Return the summary of the last sample; before the first one only the counters of this rank."""
        return dict(self._summary) or {"redone": self.redone, "failed": self.failed}

    def watches(self, number: int) -> bool:
        """Return whether the matrix with this number is measured in this step."""
        return self._sample is not None and number in self._watched

    def keep(self, name: str, part: Sums) -> None:
        """Keep the sums over some blocks of a matrix."""
        self._parts.setdefault(name, []).append(part)

    def keep_loss(self, what: Exchanged, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Keep what the wire loses of some values that this rank sends in a sampled step."""
        assert self._sample is not None
        lost, whole = self._sample.losses.get(what, (0.0, 0.0))
        sent = sent.double()
        error = float((received.double() - sent).square().sum())
        self._sample.losses[what] = (lost + error, whole + float(sent.square().sum()))

    def span(self, name: SpanName) -> AbstractContextManager[None]:
        """Return a context whose duration counts for one part of the step; it costs nothing without a sample."""
        return nullcontext() if self._sample is None else self._timed(name)

    @contextmanager
    def _timed(self, name: SpanName) -> Iterator[None]:
        sample = self._sample
        assert sample is not None
        if self._device.type == "cpu":
            start = time.perf_counter()
            yield
            sample.seconds[name] = sample.seconds.get(name, 0.0) + time.perf_counter() - start
            return
        events = [torch.Event(device=self._device.type, enable_timing=True) for _ in range(2)]
        events[0].record()
        yield
        events[1].record()
        self._spans.append((name, events[0], events[1]))


def summarize(sample: Sample, ranks: Ranks) -> dict[str, Any]:
    """Combine the ranks' samples of one step. Must be called by all ``ranks``.

    Returns:
        ``redone`` and ``failed``; the means of the sampled matrices and the largest ``sigma_max``; ``time_<part>``,
        the mean over ranks of each part's share of the inner step; ``seconds``, the inner step of the slowest rank;
        ``wire_error_direction`` and ``wire_error_update``, the relative quantisation error of all that is sent; and
        ``matrices`` with the numbers of each, at most 16 of them. Keys without a measurement are left out.
    """
    what = "summary of health"
    # The time of sampling does not count.
    total = sample.seconds.get("step", 0.0) - sample.seconds.get("sampling", 0.0)
    measured = sample.matrices.values()
    own: dict[str, float] = {
        "redone": sample.redone,
        "failed": sample.failed,
        "matrices": len(measured),
        **{key: math.fsum(each[key] for each in measured) for key in _MEANS},
        "running": float(total > 0),
        **{part: sample.seconds.get(part, 0.0) / total if total > 0 else 0.0 for part in _PARTS},
    }
    for kind in _EXCHANGED:
        own[f"lost {kind}"], own[f"whole {kind}"] = sample.losses.get(kind, (0.0, 0.0))
    sums = dict(zip(own, ranks.reduce(list(own.values()), "sum", purpose=what), strict=True))
    sigma = max((each["sigma_max"] for each in measured), default=0.0)
    seconds, sigma = ranks.reduce([total, sigma], "max", purpose=what)
    summary: dict[str, Any] = {"redone": int(sums["redone"]), "failed": int(sums["failed"])}
    if count := sums["matrices"]:
        summary |= {key: sums[key] / count for key in _MEANS}
        summary["sigma_max"] = sigma
    if running := sums["running"]:
        summary |= {f"time_{part}": sums[part] / running for part in _PARTS}
        summary["seconds"] = seconds
    for kind in _EXCHANGED:
        if lost := sums[f"lost {kind}"]:
            summary[f"wire_error_{kind}"] = math.sqrt(lost / sums[f"whole {kind}"])
    matrices: dict[str, dict[str, float]] = {}
    for rank, (name, health) in ranks.collect(list(sample.matrices.items()), most=_LISTED, purpose=what):
        # Ranks that share no parameters (experts) can have matrices of the same name.
        matrices[name if name not in matrices else f"{name} (rank {rank})"] = health
    return {**summary, "matrices": matrices}


def monitor_events(summary: dict[str, Any], samples: int) -> list[tuple[str, float, int]]:
    """Return a summary as events of DeepSpeed's monitor: name, value, and the number of training samples so far."""
    return [(_PREFIX + name, float(value), samples) for name, value in summary.items() if name != "matrices"]
