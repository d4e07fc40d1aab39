"""Chooses the steps and matrices to sample, and keeps the measurements, times and counters of one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch

from deepspeed_muon.monitoring.measure import MatrixHealth, Sums, combine

__all__ = ["LocalSample", "SpanName", "StepRecorder", "Travelling"]

SpanName = Literal["step", "gather", "newton_schulz", "scatter", "sampling"]
Travelling = Literal["direction", "update"]


@dataclass(slots=True)
class LocalSample:
    """What this rank measured in one sampled step.

    Attributes:
        matrices: Its sampled matrices by name.
        seconds: The time of each part.
        losses: On a wire that loses, of the directions and of the updates that this rank sent: the squared elements of
            what was lost, and of all.
    """

    matrices: dict[str, MatrixHealth] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    losses: dict[Travelling, tuple[float, float]] = field(default_factory=dict)


class StepRecorder:
    """Chooses the steps and matrices to sample, and keeps what this rank measured and counted.

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
        self._total = 0
        self._watched: frozenset[int] = frozenset()
        self._sample: LocalSample | None = None
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
    def step(self, number: int) -> Iterator[LocalSample | None]:
        """Record one optimizer step, ``number`` counted from 1; yields the sample that it fills, or ``None``."""
        if not self.due(number):
            yield None
            return
        # The matrices are spread over the model's depth. Each sample takes other ones, so that all have their turn.
        count = min(self.matrices, self._total)
        turn = number // self.every
        self._watched = frozenset((turn + j * self._total // count) % self._total for j in range(count))
        self._sample = sample = LocalSample()
        try:
            yield sample
            self._close_spans(sample)
            sample.matrices = {name: combine(parts) for name, parts in self._parts.items()}
        finally:
            self._sample = None
            self._parts.clear()
            self._spans.clear()

    def watches(self, number: int) -> bool:
        """Return whether the matrix with this number is measured in this step."""
        return self._sample is not None and number in self._watched

    def keep(self, name: str, part: Sums) -> None:
        """Keep the sums over some blocks of a matrix."""
        self._parts.setdefault(name, []).append(part)

    def keep_loss(self, what: Travelling, sent: torch.Tensor, received: torch.Tensor) -> None:
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

    def _close_spans(self, sample: LocalSample) -> None:
        for name, start, end in self._spans:
            end.synchronize()
            sample.seconds[name] = sample.seconds.get(name, 0.0) + start.elapsed_time(end) / 1000.0
