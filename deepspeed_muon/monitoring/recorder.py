"""Records the health of sampled steps on every rank, and summarises it over ranks.

At the end of a sampled step all ranks of the engine reduce their samples, including ranks that own no matrix, have no
fragment or skipped the step. The message size does not depend on the number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from deepspeed_muon.monitoring.measure import MeasuredBlocks, combine
from deepspeed_muon.transport.ranks import Ranks

SpanName = Literal["step", "gather", "newton_schulz", "scatter", "sampling"]
Exchanged = Literal["direction", "update"]

_PHASES = ("gather", "newton_schulz", "scatter")
_EXCHANGED: tuple[Exchanged, ...] = ("direction", "update")
# The summary averages these measurements over the sampled matrices.
_MEANS = ("update_rms", "orthogonality_error", "stable_rank", "alignment")
_PREFIX = "Train/Muon/"
# The most matrices that a summary lists. A stack of experts appears once for every owner of its blocks.
_LISTED = 16


@dataclass(slots=True)
class Sample:
    """The measurements of one rank in one sampled step.

    Attributes:
        matrices: Measurements by parameter name, for the sampled matrices that the rank owns.
        seconds: Seconds by phase of the inner step.
        redone: Blocks recomputed in fp32 since the start of the process.
        failed: Blocks that got no update since the start of the process.
        losses: With int8 communication, for the directions and the updates that this rank sent: the sum of squares of
            the quantisation error, and that of the values.
        grad_norms: ``grad_norm_muon`` and ``grad_norm_adamw``: the norms of the raw gradients on all ranks.
    """

    matrices: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    redone: int = 0
    failed: int = 0
    losses: dict[Exchanged, tuple[float, float]] = field(default_factory=dict)
    grad_norms: dict[str, float] = field(default_factory=dict)


class StepRecorder:
    """Chooses the steps and matrices to sample, records this rank's measurements, and stores the last summary.

    Attributes:
        every: Steps between samples; 0 disables sampling.
        matrices: The number of matrices to measure in a sample; successive samples rotate through all matrices.
        check: Whether every result is checked.
        redone: Blocks that failed the check and passed it when recomputed in fp32. On an accelerator a block that fails
            gets no update, and its results in later steps, which are computed in fp32, count here.
        failed: Blocks that got no update: on a CPU those that failed the check in fp32 too.
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
        self._sampled_matrices: frozenset[int] = frozenset()
        self._sample: Sample | None = None
        self._sums_by_name: dict[str, list[MeasuredBlocks]] = {}
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
        # A sample's matrices are spread evenly over the model's depth; successive samples shift by one matrix.
        count = min(self.matrices, self._total)
        shift = number // self.every
        self._sampled_matrices = frozenset(
            (shift + j * self._total // count) % self._total for j in range(count)
        )
        self._sample = sample = Sample()
        try:
            yield sample
            for name, start, end in self._spans:
                end.synchronize()
                sample.seconds[name] = sample.seconds.get(name, 0.0) + start.elapsed_time(end) / 1000.0
            sample.matrices = {name: combine(sums) for name, sums in self._sums_by_name.items()}
            sample.redone, sample.failed = self.redone, self.failed
        finally:
            self._sample = None
            self._sums_by_name.clear()
            self._spans.clear()
        self._summary = {"step": number, **summarize(sample, ranks or Ranks())}

    def summary(self) -> dict[str, Any]:
        """Return the last sample's summary, or this rank's counters before the first sample."""
        return dict(self._summary) or {"redone": self.redone, "failed": self.failed}

    def watches(self, number: int) -> bool:
        """Return whether the matrix with this number is measured in the current step."""
        return self._sample is not None and number in self._sampled_matrices

    def keep(self, name: str, sums: MeasuredBlocks) -> None:
        """Record the sums over some blocks of a matrix."""
        self._sums_by_name.setdefault(name, []).append(sums)

    def keep_loss(self, kind: Exchanged, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Record the quantisation error of values that this rank sends; only in a sampled step.

        Args:
            kind: Whether the values are directions or updates.
            sent: The values before quantisation, any shape. Not mutated.
            received: The values that the receivers dequantise, same shape. Not mutated.
        """
        assert self._sample is not None
        lost, total = self._sample.losses.get(kind, (0.0, 0.0))
        sent = sent.double()
        error = float((received.double() - sent).square().sum())
        self._sample.losses[kind] = (lost + error, total + float(sent.square().sum()))

    def span(self, name: SpanName) -> AbstractContextManager[None]:
        """Return a context manager that times a phase of a sampled step, and does nothing in other steps."""
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
        the slowest rank; ``wire_error_direction`` and ``wire_error_update``, the relative quantisation error of all
        sent values; and ``matrices``, the measurements of at most 16 matrices by name. Keys without a measurement are
        absent.
    """
    purpose = "summary of health"
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
    for kind in _EXCHANGED:
        local[f"lost {kind}"], local[f"total {kind}"] = sample.losses.get(kind, (0.0, 0.0))
    sums = dict(zip(local, ranks.all_reduce(list(local.values()), "sum", purpose=purpose), strict=True))
    sigma = max((health["sigma_max"] for health in measured), default=0.0)
    seconds, sigma = ranks.all_reduce([total, sigma], "max", purpose=purpose)
    summary: dict[str, Any] = {"redone": int(sums["redone"]), "failed": int(sums["failed"])}
    if count := sums["matrices"]:
        summary |= {key: sums[key] / count for key in _MEANS}
        summary["sigma_max"] = sigma
    if running := sums["running"]:
        summary |= {f"time_{phase}": sums[phase] / running for phase in _PHASES}
        summary["seconds"] = seconds
    for kind in _EXCHANGED:
        if lost := sums[f"lost {kind}"]:
            summary[f"wire_error_{kind}"] = math.sqrt(lost / sums[f"total {kind}"])
    matrices: dict[str, dict[str, float]] = {}
    for rank, (name, health) in ranks.collect(list(sample.matrices.items()), most=_LISTED, purpose=purpose):
        # Different expert-parallel ranks can have different matrices of one name.
        matrices[name if name not in matrices else f"{name} (rank {rank})"] = health
    return {**summary, **sample.grad_norms, "matrices": matrices}


def monitor_events(summary: dict[str, Any], samples: int) -> list[tuple[str, float, int]]:
    """Return a summary as events of DeepSpeed's monitor: (name, value, training samples consumed).

    The norms of gradients are left out: they are written in every step, beside the rates.
    """
    return [
        (_PREFIX + name, float(value), samples)
        for name, value in summary.items()
        if name != "matrices" and not name.startswith("grad_norm_")
    ]
