"""What one rank measures and counts: which steps and matrices are sampled, how long each part of a step takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch

from deepspeed_muon.monitoring.measure import MatrixHealth, Sums, combine

__all__ = ["LocalSample", "SpanName", "StepRecorder"]

SpanName = Literal["step", "gather", "newton_schulz", "scatter", "sampling"]


@dataclass(slots=True)
class LocalSample:
    """What this rank measured in one sampled step.

    Attributes:
        matrices: Parameter name to what was measured, for the sampled matrices that this rank owns.
        seconds: Time of each part of the inner step on this rank.
    """

    matrices: dict[str, MatrixHealth] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class StepRecorder:
    """Decides which steps and matrices are sampled, and keeps what was measured and counted on this rank.

    Attributes:
        redone: Results that failed the check and were right when computed again in fp32: matrices, or blocks of them
            that are orthogonalised separately.
        failed: Results that were wrong in fp32 too, so that there was no update.
    """

    def __init__(self, *, every: int, matrices: int, check: bool) -> None:
        """Start without samples.

        Args:
            every: Steps between samples; 0 for none.
            matrices: How many matrices each sample measures.
            check: Whether every result is checked.
        """
        self.every = every
        self.matrices = matrices
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
        """Forget all watches, because the optimizer is bound anew.

        Args:
            device: Where the exchange and the iteration run.
        """
        self._device = device
        self._total = 0

    def reserve(self, count: int) -> int:
        """Give ``count`` matrices their numbers; return the first one."""
        first = self._total
        self._total += count
        return first

    @property
    def sampling(self) -> bool:
        """Whether the step that is under way is sampled."""
        return self._sample is not None

    def due(self, number: int) -> bool:
        """Return whether step ``number``, counted from 1, is sampled: equal on ranks with equal settings."""
        return self.every > 0 and number % self.every == 0

    @contextmanager
    def step(self, number: int) -> Iterator[LocalSample | None]:
        """Record during one optimizer step of all param groups; yields what will be filled, if it is sampled.

        Args:
            number: Of the step, counted from 1.
        """
        if not self.due(number):
            yield None
            return
        # Spread over the model's depth, and another set each time, so that all matrices have their turn.
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
        """Return whether a matrix, by its number, is to be measured in this step."""
        return self._sample is not None and number in self._watched

    def keep(self, name: str, part: Sums) -> None:
        """Keep what was measured of some blocks of a matrix."""
        self._parts.setdefault(name, []).append(part)

    def span(self, name: SpanName) -> AbstractContextManager[None]:
        """Return a context whose duration counts for one part of the step; free of cost where nothing is sampled."""
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
