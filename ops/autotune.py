"""Measures the candidates of a problem, chooses one, and remembers the choice in a file of the machine.

It runs no collective and waits for no other rank's step: the processes of a machine take turns by a file lock, and
read what an earlier one found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.logs import logger
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize
from deepspeed_muon.reference import newton_schulz

from .candidates import BATCH_NUMEL, Candidate, Problem
from .machine import file_for, hardware_name, locked, read_json, write_json

# Seconds for one problem, and for all problems of a process. A choice saves a few percent of many steps, so it must not
# cost more than a step or two.
PROBLEM_SECONDS = 2.0
PROCESS_SECONDS = 20.0

# Timed repetitions of a candidate that is not ruled out by its first.
REPETITIONS = 5

# A candidate whose first timing is this much slower than the best is not timed again.
RULED_OUT = 1.5

# The expected winner stays unless another one is faster by this much: a choice that follows noise would change the
# rounding from run to run for nothing.
WORTH_CHANGING = 0.97

# Relative error against float64 that an orthogonalisation of any spectrum may have. Low-rank and ill-conditioned
# matrices come near it, a Gaussian one uses a tenth of it.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 3e-1, torch.float64: 1e-4}

# Up to this many FLOPs results are compared with float64 on the CPU (tenths of a second), above with torch's code.
_FLOAT64_FLOPS = 2e9


@dataclass(slots=True)
class Choice:
    """Which candidate runs a problem, and why.

    Attributes:
        name: The candidate.
        reason: ``measured``, ``remembered`` (by an earlier process), ``only one``, or why nothing was measured.
        milliseconds: Best time of every candidate that was timed, for at most ``BATCH_NUMEL`` elements.
        rejected: Candidates whose result was wrong, with the reason.
    """

    name: str
    reason: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)


class Tuner:
    """Chooses a candidate for each problem; one instance serves a process."""

    def __init__(self, folder: Path | None = None, *, library_key: str = "torch") -> None:
        """Read and measure nothing yet.

        Args:
            folder: The folder with remembered choices, ``None`` for :func:`cache_folder`.
            library_key: Digest of the native library, so that its next version is measured again.
        """
        self._identity = [hardware_name(), torch.__version__, library_key]
        self._file = file_for("autotune", self._identity, folder)
        self._decided: dict[tuple[str, ...], Choice] = {}
        self._spent = 0.0

    def choose(
        self, problem: Problem, candidates: Sequence[Candidate], device: torch.device
    ) -> tuple[Candidate, Choice]:
        """Return what runs ``problem``, and why; measure if no choice is known. The expected winner comes first.

        A process keeps its choice, stored or not: its next optimizer rounds like this one.

        Raises:
            InstallationError: If every candidate gave a wrong result or failed.
        """
        key = problem.key()
        known = (key, *(each.name for each in candidates))
        choice = self._decided.get(known) or self._decide(key, problem, candidates, device)
        self._decided[known] = choice
        chosen = next((each for each in candidates if each.name == choice.name), None)
        if chosen is None:
            told = "; ".join(f"{name}: {why}" for name, why in choice.rejected.items())
            raise InstallationError(
                f"nothing that ns_backend allows gives a right result for {key} ({told}). Use ns_backend 'auto' or "
                f"'torch', and please report this"
            )
        return chosen, choice

    def _decide(
        self, key: str, problem: Problem, candidates: Sequence[Candidate], device: torch.device
    ) -> Choice:
        if len(candidates) == 1:
            return Choice(candidates[0].name, "only one")
        names = [each.name for each in candidates]
        if known := self._remembered(key, names):
            return known
        if self._spent >= PROCESS_SECONDS:
            return Choice(names[0], f"expected; {PROCESS_SECONDS:g} s of measuring were used up")
        started = time.perf_counter()
        try:
            with locked(self._file.parent / ".measuring", 3 * PROBLEM_SECONDS) as mine:
                if known := self._remembered(key, names):
                    return known
                if mine is False:
                    return Choice(names[0], "expected; other processes were measuring for too long")
                choice = measure(problem, candidates, device)
                if choice.reason == "measured":
                    choices = {**self._read(), key: {**asdict(choice), "candidates": names}}
                    write_json(self._file, {"identity": self._identity, "choices": choices})
                return choice
        finally:
            self._spent += time.perf_counter() - started

    def _read(self) -> dict[str, Any]:
        choices = read_json(self._file).get("choices")
        return choices if isinstance(choices, dict) else {}

    def _remembered(self, key: str, names: Sequence[str]) -> Choice | None:
        entry = self._read().get(key)
        if (
            not isinstance(entry, dict)
            or entry.get("candidates") != list(names)
            or entry["name"] not in names
        ):
            return None
        return Choice(entry["name"], "remembered", entry["milliseconds"], entry["rejected"])


def measure(problem: Problem, candidates: Sequence[Candidate], device: torch.device) -> Choice:
    """Run and time the candidates on a Gaussian batch and return the fastest one whose result is right.

    Args:
        problem: What is to be computed; at most ``BATCH_NUMEL`` elements of its batch are measured.
        candidates: The expected winner first.
        device: Where to run.
    """
    deadline = time.perf_counter() + PROBLEM_SECONDS
    sample = replace(problem, batch=min(problem.batch, max(1, BATCH_NUMEL // (problem.rows * problem.cols))))
    x = torch.randn(sample.batch, sample.rows, sample.cols, generator=torch.Generator().manual_seed(0))
    x = x.to(device=device, dtype=sample.input_dtype)
    choice = Choice("torch standard", "no candidate passed the cross-check")
    times: dict[str, list[float]] = {}
    expected: Tensor | None = None
    tried = 0
    for candidate in candidates:
        tried += 1
        # Calls that compile or record do not count: else the first process, which compiles, would choose among fewer
        # candidates than the second. The next run warms up the rest (oneDNN's kernels, page faults) and gives the
        # result for the cross-check.
        try:
            deadline += sum(_timed(candidate, x, sample.settings)[0] for _ in range(candidate.warm_calls))
            first, result = _timed(candidate, x, sample.settings)
        except Exception as error:  # Triton's are no RuntimeError
            told = str(error).strip() or type(error).__name__
            choice.rejected[candidate.name] = f"failed: {told.splitlines()[0]}"
            continue
        if expected is None:
            if first > PROBLEM_SECONDS / 2:
                return Choice(candidate.name, "expected; one run takes too long to measure others")
            expected = _expected(sample, x)
        error_found = error_of(result, expected)
        if error_found <= TOLERANCE[sample.settings.dtype]:
            times[candidate.name] = [first]
        else:
            choice.rejected[candidate.name] = f"relative error {error_found:.2g}"
        if time.perf_counter() > deadline:
            break
    for name, why in choice.rejected.items():
        logger.warning(
            "deepspeed_muon: %r is not used for %s: %s. Please report this.", name, problem.key(), why
        )
    if times:
        _repeat(candidates, times, x, sample.settings, deadline)
        choice.milliseconds = {name: round(1e3 * min(own[1:] or own), 4) for name, own in times.items()}
        likely, best = next(iter(times)), min(choice.milliseconds, key=choice.milliseconds.__getitem__)
        clearly = choice.milliseconds[best] <= WORTH_CHANGING * choice.milliseconds[likely]
        choice.name = best if clearly else likely
        choice.reason = "measured" if tried == len(candidates) else "measured in part"
    return choice


def _repeat(
    candidates: Sequence[Candidate],
    times: dict[str, list[float]],
    x: Tensor,
    settings: NsSettings,
    deadline: float,
) -> None:
    """Time the candidates that are in ``times`` again, in turns, and append to their lists."""
    for _ in range(REPETITIONS):
        best = min(min(values) for values in times.values())
        for candidate in candidates:
            own = times.get(candidate.name)
            if own is None or (len(own) > 1 and min(own) > RULED_OUT * best):
                continue
            if time.perf_counter() < deadline or len(own) == 1:
                own.append(_timed(candidate, x, settings)[0])


def error_of(result: Tensor, expected: Tensor) -> float:
    """Return the largest relative error (Frobenius) over the batch."""
    difference = torch.linalg.vector_norm(result.to(expected) - expected, dim=(-2, -1))
    return float((difference / torch.linalg.vector_norm(expected, dim=(-2, -1)).clamp(min=1e-30)).max())


def _expected(problem: Problem, x: Tensor) -> Tensor:
    if problem.flops <= _FLOAT64_FLOPS:
        rows = problem.settings.coefficients
        return torch.stack([newton_schulz(matrix, rows) for matrix in x.cpu()]).to(
            device=x.device, dtype=torch.float32
        )
    return orthogonalize(x, settings=replace(problem.settings, method="standard")).float()


def _timed(candidate: Candidate, x: Tensor, settings: NsSettings) -> tuple[float, Tensor]:
    """Return the seconds that one run takes, and its result."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    started = time.perf_counter()
    result = candidate.run(x, settings)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - started, result
