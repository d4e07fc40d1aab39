"""Records the health of sampled steps on every rank, and summarises it over ranks.

At the end of a sampled step all ranks of the engine reduce their samples, including ranks that own no matrix, have no
fragment or skipped the step. The message size does not depend on the number of ranks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from deepspeed_muon.logs import announce, listed, logger
from deepspeed_muon.monitoring.measure import MeasuredBlocks, combine
from deepspeed_muon.transport.ranks import Ranks, global_rank

SpanName = Literal["step", "gather", "newton_schulz", "scatter", "sampling"]

_PHASES = ("gather", "newton_schulz", "scatter")
# The summary averages these measurements over the sampled matrices.
_MEANS = ("update_rms", "orthogonality_error", "stable_rank", "alignment")
_PREFIX = "Train/Muon/"
# The most matrices that a summary lists. A stack of experts appears once for every owner of its blocks.
_LISTED = 16
# Entries of a summary that are no events: DeepSpeed's monitor has the norms of every step.
_NO_EVENTS = ("matrices", "grad_norm_muon", "grad_norm_adamw")
# Steps of the process after which the log says what was measured.
_REPORT_AFTER = 200
# A run is warned of so many steps in a row whose gradients are multiplied by less than this.
_STALLED_STEPS, _STALLED_COEFFICIENT = 20, 1e-4
# However rare samples are, no more norms are stored.
_MOST_CLIPPINGS = 1000


@dataclass(slots=True)
class Sample:
    """The measurements of one rank in one sampled step.

    Attributes:
        matrices: Measurements by parameter name, for the sampled matrices that the rank owns.
        seconds: Seconds by phase of the inner step.
        redone, failed: The counters of :class:`StepRecorder`.
        grad_norms: ``grad_norm_muon`` and ``grad_norm_adamw``: the norms of the raw gradients on all ranks.
        clip_coefficient: The median factor by which gradients were clipped since the last sample; -1 if nothing clips.
    """

    matrices: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    redone: int = 0
    failed: int = 0
    grad_norms: dict[str, float] = field(default_factory=dict)
    clip_coefficient: float = -1.0


class StepRecorder:
    """Chooses the steps and matrices to sample, records this rank's measurements, and stores the last summary.

    Attributes:
        every: Steps between samples; 0 disables sampling.
        matrices: The number of matrices to measure in a sample; successive samples rotate through all matrices.
        check: Whether every result is checked.
        redone: Blocks that were redone (:mod:`deepspeed_muon.step.check`), without those that were at once found wrong
            again.
        failed: Blocks that were left out. Both count from the start of the process.
    """

    def __init__(self, *, every: int, check: bool) -> None:
        self.every = every
        self.matrices = 4
        self.check = check
        self.redone = 0
        self.failed = 0
        self._device = torch.device("cpu")
        self._steps = 0  # that this process took
        self._summary: dict[str, Any] = {}
        self._total = 0
        self._sampled: frozenset[int] = frozenset()  # numbers of the matrices to measure
        self._sample: Sample | None = None
        self._sums_by_name: dict[str, list[MeasuredBlocks]] = {}
        # By matrix: the sum of the squared weights, their number, and the learning rate.
        self._weights: dict[str, tuple[float, int, float]] = {}
        # Steps since the last sample: the norm of the gradients, and the norm to which they are clipped.
        self._clippings: deque[tuple[Any, float]] = deque(maxlen=_MOST_CLIPPINGS if every else 0)
        # Steps in a row below _STALLED_COEFFICIENT: the last ones, and the most.
        self._stalled = self._longest_stall = 0
        self._has_reported = self._has_warned = False
        self._has_gradient: dict[str, bool] = {}  # by parameter: whether a step had one
        self._spans: list[tuple[SpanName, torch.Event, torch.Event]] = []

    def reset(self, device: torch.device) -> None:
        """Release all reserved matrix numbers, because the optimizer is bound again, to parameters on ``device``."""
        self._device = device
        self._total = 0

    def reserve(self, count: int) -> int:
        """Reserve consecutive numbers for ``count`` matrices and return the first."""
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
        """Record one optimizer step; in a sampled step yield its sample (else ``None``), and summarise it at the end.

        Args:
            number: The number of the step, from 1 and equal on all ranks; ``None`` counts calls.
            ranks: The ranks to summarise over, all of which must call this; ``None`` for this rank alone.
        """
        self._steps += 1
        number = self._steps if number is None else number
        if not self.due(number):
            yield None
            return
        # 1. Choose the matrices.
        # They are spread evenly over the model's depth; successive samples shift by one matrix: 1, 3, 5, 7 of 8, then
        # 2, 4, 6, 0.
        count = min(self.matrices, self._total)
        shift = number // self.every
        self._sampled = frozenset((shift + j * self._total // count) % self._total for j in range(count))
        # 2. The optimizer steps, and calls the methods below while this generator is suspended.
        self._sample = sample = Sample()
        try:
            yield sample
            # 3. What this rank measured.
            for name, start, end in self._spans:
                end.synchronize()
                sample.seconds[name] = sample.seconds.get(name, 0.0) + start.elapsed_time(end) / 1000.0
            sample.matrices = {name: combine(sums) for name, sums in self._sums_by_name.items()}
            sample.redone, sample.failed = self.redone, self.failed
            sample.clip_coefficient = self._read_clippings()
            for matrix, (squares, numel, rate) in self._weights.items():
                if squares > 0 and (measured := sample.matrices.get(matrix)) is not None:
                    rms = math.sqrt(squares / numel)
                    measured |= {"weight_rms": rms, "update_over_weight": rate * measured["update_rms"] / rms}
        finally:
            self._sample = None
            self._sums_by_name.clear()
            self._weights.clear()
            self._spans.clear()
        # 4. Over all ranks. Without an engine each rank has its own sample, and the first one logs it.
        self._summary = {"step": number, **summarize(sample, ranks or Ranks())}
        if (global_rank() if ranks is None else ranks.position) == 0:
            self._log()

    def record_clipping(self, norm: Any, limit: float) -> None:
        """Record a step that was not skipped, before its sample ends.

        Args:
            norm: The norm of the gradients, a number or a tensor, which is read in the next sampled step.
            limit: The norm to which the gradients are clipped.
        """
        if len(self._clippings) == _MOST_CLIPPINGS:
            self._stalled = 0  # a step in between is dropped
        self._clippings.append((norm, limit))

    def _read_clippings(self) -> float:
        """Return the median factor by which gradients were clipped since the last sample. Reads norms on a device."""
        factors = []
        for norm, limit in self._clippings:
            factors.append(min(1.0, limit / (float(norm) + 1e-6)))  # as DeepSpeed and torch do
            self._stalled = self._stalled + 1 if factors[-1] < _STALLED_COEFFICIENT else 0
            self._longest_stall = max(self._longest_stall, self._stalled)
        self._clippings.clear()
        return statistics.median(factors) if factors else -1.0

    def record_gradients(self, names: Sequence[str], statuses: Sequence[int]) -> None:
        """Record which parameters of a step set have a gradient: the status of those without one is 0."""
        if self.every and not self._has_reported:
            for name, status in zip(names, statuses, strict=True):
                self._has_gradient[name] = status > 0 or self._has_gradient.get(name, False)

    def _log(self) -> None:
        """Log once what was measured and what never had a gradient, and once that gradients are clipped to nothing."""
        if self._steps >= _REPORT_AFTER and not self._has_reported:
            self._has_reported = True
            numbers = {
                name: value for name, value in self._summary.items() if name not in ("step", "matrices")
            }
            text = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
            text += " (docs/health.md says what these are)"
            if unused := [name for name, has_gradient in self._has_gradient.items() if not has_gradient]:
                text += f"; no step had a gradient for {listed(unused, 5)}"
            announce("deepspeed_muon: after %d steps: %s", self._steps, text, on_any_rank=True)
        if self._longest_stall >= _STALLED_STEPS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "deepspeed_muon: gradients were clipped to less than %g of their size in %d steps in a row, so that "
                "AdamW's parameters may stand still: the loss is summed, one layer explodes, or gradient_clipping is "
                "far too small",
                _STALLED_COEFFICIENT,
                self._longest_stall,
            )

    def summary(self) -> dict[str, Any]:
        """Return the last sample's summary, or this rank's counters before the first sample."""
        return dict(self._summary) or {"redone": self.redone, "failed": self.failed, "matrices": {}}

    def watches(self, number: int) -> bool:
        """Return whether the matrix with this number is measured in the current step."""
        return self._sample is not None and number in self._sampled

    def keep(self, name: str, sums: MeasuredBlocks) -> None:
        """Record the sums over some blocks of a matrix."""
        self._sums_by_name.setdefault(name, []).append(sums)

    def keep_weights(self, name: str, weights: torch.Tensor, rate: float) -> None:
        """Record weights of a matrix, or of some slices of it, any shape, and its learning rate."""
        squares, numel, _ = self._weights.get(name, (0.0, 0, rate))
        self._weights[name] = (squares + float(weights.float().norm()) ** 2, numel + weights.numel(), rate)

    @contextmanager
    def span(self, name: SpanName) -> Iterator[None]:
        """Time a phase of a sampled step, and do nothing in other steps."""
        sample = self._sample
        if sample is None:
            yield
            return
        if self._device.type == "cpu":
            start = time.perf_counter()
            yield
            sample.seconds[name] = sample.seconds.get(name, 0.0) + time.perf_counter() - start
            return
        # Device events are read at the end of the step, so that no phase waits for the device.
        events = [torch.Event(device=self._device.type, enable_timing=True) for _ in range(2)]
        events[0].record()
        yield
        events[1].record()
        self._spans.append((name, events[0], events[1]))


def summarize(sample: Sample, ranks: Ranks) -> dict[str, Any]:
    """Combine the ranks' samples of one step. Must be called by all ``ranks``.

    Returns:
        ``redone`` and ``failed``, summed over ranks; means over the sampled matrices and the largest ``sigma_max``;
        ``time_<phase>``, the mean over ranks of the phase's fraction of the inner step; ``seconds``, the inner step of
        the slowest rank; ``clip_coefficient``; and ``matrices``, the measurements of at most 16 matrices by name. Keys
        without a measurement are absent.
    """
    purpose = "summary of health"

    def reduce(values: dict[str, float], how: Literal["sum", "max"]) -> dict[str, float]:
        return dict(zip(values, ranks.all_reduce(list(values.values()), how, purpose=purpose), strict=True))

    # 1. Sums over the ranks. A rank without a measurement contributes 0 to the sum and to the count that divides it.
    # Sampling itself is excluded from the time of the step.
    total = sample.seconds.get("step", 0.0) - sample.seconds.get("sampling", 0.0)
    measured = sample.matrices.values()
    local: dict[str, float] = {
        "redone": sample.redone,
        "failed": sample.failed,
        "matrices": len(measured),
        **{key: math.fsum(health[key] for health in measured) for key in _MEANS},
        "running": float(total > 0),
        **{phase: sample.seconds.get(phase, 0.0) / total if total > 0 else 0.0 for phase in _PHASES},
    }
    ratios = [health["update_over_weight"] for health in measured if "update_over_weight" in health]
    local |= {"sized": len(ratios), "update_over_weight": math.fsum(ratios)}
    sums = reduce(local, "sum")
    # 2. Maxima over the ranks.
    sigma = max((health["sigma_max"] for health in measured), default=0.0)
    largest = reduce(
        {"seconds": total, "sigma_max": sigma, "clip_coefficient": sample.clip_coefficient}, "max"
    )
    # 3. The summary, without the quantities that no rank measured.
    summary: dict[str, Any] = {"redone": int(sums["redone"]), "failed": int(sums["failed"])}
    if count := sums["matrices"]:
        summary |= {key: sums[key] / count for key in _MEANS}
        summary["sigma_max"] = largest["sigma_max"]
    if running := sums["running"]:
        summary |= {f"time_{phase}": sums[phase] / running for phase in _PHASES}
        summary["seconds"] = largest["seconds"]
    if sized := sums["sized"]:
        summary["update_over_weight"] = sums["update_over_weight"] / sized
    if (coefficient := largest["clip_coefficient"]) >= 0:
        summary["clip_coefficient"] = coefficient
    # 4. The matrices by name, from all ranks.
    matrices: dict[str, dict[str, float]] = {}
    for rank, (name, health) in ranks.collect(list(sample.matrices.items()), most=_LISTED, purpose=purpose):
        # Different expert-parallel ranks can have different matrices of one name.
        matrices[name if name not in matrices else f"{name} (rank {rank})"] = health
    return {**summary, **sample.grad_norms, "matrices": matrices}


def monitor_events(summary: dict[str, Any], samples: int) -> list[tuple[str, float, int]]:
    """Return a summary as events of DeepSpeed's monitor: (name, value, training samples consumed)."""
    return [
        (_PREFIX + name, float(value), samples) for name, value in summary.items() if name not in _NO_EVENTS
    ]
