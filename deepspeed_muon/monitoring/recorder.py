"""Records the health of sampled steps on every rank, and summarises it over ranks.

At the end of a sampled step all ranks of the engine reduce their samples, including ranks that own no matrix, have no
fragment or skipped the step. The message size does not depend on the number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from deepspeed_muon.logs import announce, logger
from deepspeed_muon.monitoring.diagnosis import diagnose, line
from deepspeed_muon.monitoring.history import StepHistory
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
# Entries of a summary that are no events: DeepSpeed's monitor has rates and norms of every step.
_NO_EVENTS = ("matrices", "findings", "muon_lr", "adam_lr", "grad_norm_muon", "grad_norm_adamw")
# Steps of the process after which the log says what was measured, and findings that it does not wait for.
_REPORT_AFTER = 200
_REPORTED_AT_ONCE = ("clip_coefficient", "clip_stalled")
# So many elements at a time are converted to fp64, which takes up to 32 bytes for each of them.
_CONVERT_NUMEL = 1 << 24

# Facts that the ranks add up, and those of which the largest counts.
_SIZES = ("sized", "sum_updates", "sum_at_peak", "sum_expected", "sum_weights")
_SUMMED = ("muon_numel", "adamw_numel", *_SIZES)
_LARGEST = (
    *("muon_lr", "adam_lr", "two_rates", "adam_rms", "routers", "adamw_over_weight", "step_seconds"),
    *("skipped", "clipped", "clip_coefficient", "clip_least", "clip_stalled"),
)


@dataclass(slots=True)
class WeightSums:
    """The fragments of a sampled matrix that its owner has itself, of which it measures the weights.

    Attributes:
        group: ``id`` of the matrix's param group.
        inputs: Input features of the layer.
        relative: Whether the rate is relative to the weights (Hyperball).
        squares: The sum of the squared elements.
        numel: The number of elements; 0 if all are on other ranks.
    """

    group: int
    inputs: int
    relative: bool
    squares: float = 0.0
    numel: int = 0

    @property
    def rms(self) -> float:
        """The RMS of the weights; NaN if it is unknown."""
        return math.sqrt(self.squares / self.numel) if self.numel else math.nan


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
        facts: Further numbers by name: what :meth:`deepspeed_muon.optimizer.Muon.run_facts` returns; how the last
            steps ended; and the number of sampled matrices, with the sums of the RMS of their updates (at rate 1, at
            the highest rates so far, and at the expected ones) and of their weights.
    """

    matrices: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    redone: int = 0
    failed: int = 0
    losses: dict[Exchanged, tuple[float, float]] = field(default_factory=dict)
    grad_norms: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)


class StepRecorder:
    """Chooses the steps and matrices to sample, records this rank's measurements, and stores the last summary.

    Attributes:
        every: Steps between samples; 0 disables sampling.
        matrices: The number of matrices to measure in a sample; successive samples rotate through all matrices.
        check: Whether every result is checked.
        redone: Blocks that failed the check and passed it when recomputed in fp32. On an accelerator a block that fails
            gets no update, and its results in later steps, which are computed in fp32, count here.
        failed: Blocks that got no update: on a CPU those that failed the check in fp32 too.
        report_after: The number of this process's steps after which rank 0 logs what was measured.
        history: Rates and outcomes of all steps, recorded before :meth:`step` ends.
    """

    def __init__(self, *, every: int, check: bool) -> None:
        self.every = every
        self.matrices = 4
        self.check = check
        self.redone = 0
        self.failed = 0
        self.report_after = _REPORT_AFTER
        self.history = StepHistory(every)
        self._device = torch.device("cpu")
        self._steps = 0  # that this process took
        self._number = 0  # of the last one
        self._summary: dict[str, Any] = {}
        self._total = 0
        self._sampled_matrices: frozenset[int] = frozenset()
        self._sample: Sample | None = None
        self._sums_by_name: dict[str, list[MeasuredBlocks]] = {}
        self._weights: dict[str, WeightSums] = {}
        self._last_sample: tuple[int, float] | None = None  # value of _steps, and time in seconds
        self._has_reported = False
        self._logged: set[str] = set()  # keys of the findings that were logged
        self._spans: list[tuple[SpanName, torch.Event, torch.Event]] = []

    def reset(self, device: torch.device) -> None:
        """Release all reserved matrix numbers, because the optimizer is bound again, to parameters on ``device``."""
        self._device = device
        self._total = 0

    def resume(self) -> None:
        """Forget rates and the time of the last sample, because a run goes on from a checkpoint or a copy."""
        self.history.resume()
        self._last_sample = None

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
    def step(
        self,
        number: int | None = None,
        *,
        ranks: Ranks | None = None,
        facts: Callable[[], Mapping[str, float]] = dict,
    ) -> Iterator[Sample | None]:
        """Record one optimizer step; in a sampled step yield its sample (else ``None``), and summarise it at the end.

        Args:
            number: The number of the step, from 1 and equal on all ranks; ``None`` counts calls.
            ranks: The ranks to summarise over, all of which must call this; ``None`` for this rank alone.
            facts: Returns what the optimizer knows of the step.
        """
        self._steps += 1
        number = self._steps if number is None else number
        if number - self._number not in (0, 1):  # 0 after a step that raised
            self.resume()
        self._number = number
        if self._last_sample is None:
            self._last_sample = (self._steps, time.perf_counter())
        if not self.due(number):
            yield None
            return
        # 1. Choose the matrices.
        # They are spread evenly over the model's depth; successive samples shift by one matrix: 1, 3, 5, 7 of 8, then
        # 2, 4, 6, 0.
        count = min(self.matrices, self._total)
        shift = number // self.every
        self._sampled_matrices = frozenset(
            (shift + j * self._total // count) % self._total for j in range(count)
        )
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
            sample.facts = {**facts(), **self.history.read_outcomes()}
            self._add_sizes(sample)
            # The mean time of all steps since the last sample, forward and backward pass included.
            (before, then), now = self._last_sample, time.perf_counter()
            if self._steps > before:
                sample.facts["step_seconds"] = (now - then) / (self._steps - before)
            self._last_sample = (self._steps, now)
        finally:
            self._sample = None
            self._sums_by_name.clear()
            self._weights.clear()
            self._spans.clear()
        # 4. Over all ranks. Without an engine each rank has its own sample, and the first one logs it.
        self._summary = {"step": number, **summarize(sample, ranks or Ranks())}
        replica = dist.get_rank() if dist.is_initialized() else 0
        position = replica if ranks is None else ranks.position
        if position == 0:
            self._log()

    def _add_sizes(self, sample: Sample) -> None:
        """Add the sizes of weights and steps to the matrices of the sample, and their sums to its facts."""
        sums = dict.fromkeys(_SIZES, 0.0)
        for name, measured in sample.matrices.items():
            if (weights := self._weights.get(name)) is None or not (peak := self.history.peak(weights.group)):
                continue
            weight = weights.rms
            update = weight if weights.relative else measured["update_rms"]  # the step at rate 1
            if weight > 0:
                step = self.history.rates[weights.group].last * update
                measured["weight_rms"], measured["update_over_weight"] = weight, step / weight
            if not weights.relative:
                # A rate that is far too high lets the weights grow until the ratio looks normal. So they count no more
                # than at the usual initialisation, whose standard deviation is 1 / sqrt(inputs).
                weight = min(weight if weight > 0 else math.inf, weights.inputs**-0.5)
            if math.isfinite(update) and 0 < weight < math.inf:
                # A step is proportional to its rate. In a warm-up, and at the end of a schedule, every step would look
                # too small.
                sums["sized"] += 1
                sums["sum_updates"] += update
                sums["sum_at_peak"] += peak * update
                sums["sum_expected"] += self.history.expected(weights.group) * update
                sums["sum_weights"] += weight
        sample.facts |= sums

    def _log(self) -> None:
        """Log the quantities of the run once, and each finding once."""
        is_report = self._steps >= self.report_after
        if is_report and not self._has_reported:
            self._has_reported = True
            text = "deepspeed_muon: after %d steps: %s"
            announce(text, self._steps, line(self._summary), on_any_rank=True)
        for level, key, sentence in diagnose(self._summary):
            if key not in self._logged and (is_report or key in _REPORTED_AT_ONCE):
                self._logged.add(key)
                text = f'deepspeed_muon: {sentence} See docs/health.md, "{key}"'
                if level == "bad":
                    logger.warning("%s", text)
                else:
                    announce("%s", text, on_any_rank=True)

    def summary(self) -> dict[str, Any]:
        """Return the last sample's summary, or this rank's counters before the first sample."""
        empty = {"redone": self.redone, "failed": self.failed, "matrices": {}, "findings": {}}
        return dict(self._summary) or empty

    def watches(self, number: int) -> bool:
        """Return whether the matrix with this number is measured in the current step."""
        return self._sample is not None and number in self._sampled_matrices

    def keep(self, name: str, sums: MeasuredBlocks) -> None:
        """Record the sums over some blocks of a matrix."""
        self._sums_by_name.setdefault(name, []).append(sums)

    def keep_weights(self, name: str, weights: WeightSums) -> None:
        """Record the weights of some blocks of a matrix that this rank owns."""
        sums = self._weights.setdefault(name, weights)
        if sums is not weights:
            sums.squares += weights.squares
            sums.numel += weights.numel

    def keep_loss(self, kind: Exchanged, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Record the quantisation error of values that this rank sends; only in a sampled step.

        Args:
            kind: Whether the values are directions or updates.
            sent: The values before quantisation, any shape. Not mutated.
            received: The values that the receivers dequantise, same shape. Not mutated.
        """
        assert self._sample is not None
        lost, total = self._sample.losses.get(kind, (0.0, 0.0))
        slices = zip(
            sent.flatten().split(_CONVERT_NUMEL), received.flatten().split(_CONVERT_NUMEL), strict=True
        )
        for sent_slice, received_slice in slices:
            expected = sent_slice.double()
            lost += float((received_slice.double() - expected).square().sum())
            total += float(expected.square().sum())
        self._sample.losses[kind] = (lost, total)

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
        sent values; the other quantities of :data:`~deepspeed_muon.monitoring.diagnosis.QUANTITIES`; ``matrices``, the
        measurements of at most 16 matrices by name; and ``findings``, what is out of its range, by key. Keys without a
        measurement are absent.
    """
    purpose = "summary of health"
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
    for kind in _EXCHANGED:
        local[f"lost {kind}"], local[f"total {kind}"] = sample.losses.get(kind, (0.0, 0.0))
    local |= {key: sample.facts.get(key, 0.0) for key in _SUMMED}
    sums = dict(zip(local, ranks.all_reduce(list(local.values()), "sum", purpose=purpose), strict=True))
    # 2. Maxima over the ranks.
    sigma = max((health["sigma_max"] for health in measured), default=0.0)
    # A fact is negative after the reduction if no rank has it.
    largest = {"seconds": total, "sigma_max": sigma, **{key: sample.facts.get(key, -1.0) for key in _LARGEST}}
    largest = dict(
        zip(largest, ranks.all_reduce(list(largest.values()), "max", purpose=purpose), strict=True)
    )
    # 3. The summary, without the quantities that no rank measured.
    summary: dict[str, Any] = {"redone": int(sums["redone"]), "failed": int(sums["failed"])}
    if count := sums["matrices"]:
        summary |= {key: sums[key] / count for key in _MEANS}
        summary["sigma_max"] = largest["sigma_max"]
    if running := sums["running"]:
        summary |= {f"time_{phase}": sums[phase] / running for phase in _PHASES}
        summary["seconds"] = largest["seconds"]
        if (seconds := largest["step_seconds"]) > 0:
            summary["time_optimizer"] = min(1.0, largest["seconds"] / seconds)
    for kind in _EXCHANGED:
        if lost := sums[f"lost {kind}"]:
            summary[f"wire_error_{kind}"] = math.sqrt(lost / sums[f"total {kind}"])
    shown = [key for key in _LARGEST if key not in ("adam_rms", "step_seconds")]
    summary |= {key: largest[key] for key in shown if largest[key] >= 0}
    if numel := sums["muon_numel"] + sums["adamw_numel"]:
        summary["adamw_share"] = sums["adamw_numel"] / numel
    if count := sums["sized"]:
        summary["update_over_weight"] = sums["sum_at_peak"] / sums["sum_weights"]
        if sums["sum_expected"] > sums["sum_at_peak"]:
            summary["update_over_weight_expected"] = sums["sum_expected"] / sums["sum_weights"]
        if (adam_rms := largest["adam_rms"]) > 0:
            # Both at their highest rates: where these are one it drops out, whatever the matrices' groups have.
            summary["update_over_adamw"] = largest["muon_lr"] * sums["sum_updates"] / count / adam_rms
    # 4. The matrices by name, from all ranks, and the judgement.
    matrices: dict[str, dict[str, float]] = {}
    for rank, (name, health) in ranks.collect(list(sample.matrices.items()), most=_LISTED, purpose=purpose):
        # Different expert-parallel ranks can have different matrices of one name.
        matrices[name if name not in matrices else f"{name} (rank {rank})"] = health
    findings = {finding.key: finding.text for finding in diagnose(summary)}
    return {**summary, **sample.grad_norms, "matrices": matrices, "findings": findings}


def monitor_events(summary: dict[str, Any], samples: int) -> list[tuple[str, float, int]]:
    """Return a summary as events of DeepSpeed's monitor: (name, value, training samples consumed)."""
    return [
        (_PREFIX + name, float(value), samples) for name, value in summary.items() if name not in _NO_EVENTS
    ]
