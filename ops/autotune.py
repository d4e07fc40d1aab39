"""Times the candidates of a problem, chooses the fastest correct one, and caches the choice in a file.

The file is for one type of processor and GPU and one version of all software; machines that share the cache folder
share it if these are equal. It runs no collective and waits for no other rank's step: the processes of a machine
measure in turn under a file lock, and read the choices of earlier ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.logs import logger
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize
from deepspeed_muon.reference import newton_schulz

from .candidates import BATCH_NUMEL, Candidate, Problem, Replayed
from .machine import (
    SELF_TEST_SECONDS,
    file_for,
    hardware_name,
    is_current,
    lock_file,
    locked,
    read_json,
    software_identity,
    transient_until,
    write_json,
)

# Budget in seconds of one problem, and of all problems of a process. A choice saves a few percent of every step, so it
# must not cost more than a step or two.
PROBLEM_SECONDS = 2.0
PROCESS_SECONDS = 20.0

# How long a process waits in all for others that measure: as long as for the self-test, since one that gave up would
# choose other kernels than the one that measures.
LOCK_SECONDS = 2 * SELF_TEST_SECONDS + 30

# To add a choice to the file of all machines that share the folder.
_SECONDS_TO_WRITE = 5.0

# What a candidate raises because of the moment, not because of the problem.
MAY_SUCCEED_LATER = (torch.OutOfMemoryError, MemoryError, OSError)

_T = TypeVar("_T")

# Timed repetitions of a candidate whose first timing does not rule it out.
REPETITIONS = 5

# A candidate that is slower than the best by this factor is not timed again.
RULED_OUT = 1.5

# Another candidate replaces the expected winner only if it takes at most this fraction of its time: a choice that
# follows noise would change the rounding from run to run for nothing.
WORTH_CHANGING = 0.97

# Bound of the relative error against float64, for any spectrum, by the dtype whose rounding the products have. Low-rank
# and ill-conditioned matrices come close to it; a Gaussian one has a tenth of it.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 3e-1, torch.float64: 1e-4}

# Up to this many FLOPs the reference is float64 on the CPU (tenths of a second), above that it is torch's code.
_FLOAT64_FLOPS = 2e9


@dataclass(slots=True)
class Choice:
    """Which candidate runs a problem, and why.

    Attributes:
        name: Name of the candidate.
        reason: ``measured``, ``measured in part`` (the time was up), ``remembered`` (from an earlier process), ``only
            one``, or why nothing was measured.
        milliseconds: Candidate to its best time for a batch of at most ``BATCH_NUMEL`` elements.
        rejected: Candidate to why it must not run: its error, or what it raised.
        transient: Whether a candidate raised, which may not happen again (the device was out of memory).
    """

    name: str
    reason: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    transient: bool = False


class Tuner:
    """Chooses a candidate for each problem; a process has one instance, :func:`.dispatch.process_tuner`."""

    def __init__(self, folder: Path | None = None, *, library_key: str = "torch") -> None:
        """Create a tuner; it reads and measures nothing yet.

        Args:
            folder: Where choices are cached; ``None`` for :func:`~deepspeed_muon.ops.machine.cache_folder`.
            library_key: Digest of the native library: another build is measured again.
        """
        self._identity = [hardware_name(), *software_identity(), library_key]
        self._file = file_for("autotune", self._identity, folder)
        # Key of the problem and names of its candidates to the choice.
        self._choices: dict[tuple[str, ...], Choice] = {}
        self._seconds_spent = 0.0  # measuring
        self._seconds_waited = 0.0  # for other processes that measure

    def choose(
        self, problem: Problem, candidates: Sequence[Candidate], device: torch.device
    ) -> tuple[Candidate, Choice]:
        """Return the candidate that runs ``problem``, and the reason; measure if there is no choice yet.

        The process keeps every choice, cached in the file or not, so that its next optimizer rounds like this one.

        Args:
            problem: What is to be computed.
            candidates: The expected winner first.
            device: Where to measure.

        Raises:
            InstallationError: If every candidate gave a wrong result or failed.
        """
        problem_key = problem.key()
        choice_key = (problem_key, *(candidate.name for candidate in candidates))
        choice = self._choices.get(choice_key) or self._decide(problem_key, problem, candidates, device)
        self._choices[choice_key] = choice
        chosen = next((candidate for candidate in candidates if candidate.name == choice.name), None)
        if chosen is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.rejected.items())
            raise InstallationError(
                f"nothing that ns_backend allows gives a right result for {problem_key} ({reasons}). Use ns_backend "
                f"'auto' or 'torch', and please report this"
            )
        return chosen, choice

    def _decide(
        self, key: str, problem: Problem, candidates: Sequence[Candidate], device: torch.device
    ) -> Choice:
        if len(candidates) == 1:
            return Choice(candidates[0].name, "only one")
        names = [candidate.name for candidate in candidates]
        if choice := self._cached(key, names):
            return choice
        if self._seconds_spent >= PROCESS_SECONDS:
            return Choice(names[0], f"expected; {PROCESS_SECONDS:g} s of measuring were used up")
        lock, seconds = lock_file(self._file.parent, "measuring"), LOCK_SECONDS - self._seconds_waited
        started = time.perf_counter()
        # Another process that measures may have finished this problem, and hold the lock again for the next one.
        with locked(lock, seconds, until=lambda: self._cached(key, names)) as acquired:
            self._seconds_waited += time.perf_counter() - started
            if choice := self._cached(key, names):
                return choice
            if acquired is False:
                return Choice(names[0], f"expected; another process was measuring for {LOCK_SECONDS:g} s")
            started = time.perf_counter()
            choice = measure(problem, candidates, device)
            self._seconds_spent += time.perf_counter() - started
            # A choice for which the time was up is not cached: the next process may measure all candidates.
            if choice.reason == "measured":
                # One in which a candidate had no memory is cached for as long as the ranks of a job take to start.
                until = transient_until() if choice.transient else None
                entry = {**asdict(choice), "candidates": names, "until": until}
                # Machines that share the folder measure at the same time, but add their entries one after the other.
                with locked(self._file.with_suffix(".lock"), _SECONDS_TO_WRITE):
                    choices = {**self._read(), key: entry}
                    write_json(self._file, {"identity": self._identity, "choices": choices})
            return choice

    def _read(self) -> dict[str, Any]:
        choices = read_json(self._file).get("choices")
        return choices if isinstance(choices, dict) else {}

    def _cached(self, key: str, names: Sequence[str]) -> Choice | None:
        entry = self._read().get(key)
        if (
            not isinstance(entry, dict)
            or entry.get("candidates") != list(names)
            or entry["name"] not in names
            or not is_current(entry.get("until"))
        ):
            return None
        return Choice(entry["name"], "remembered", entry["milliseconds"], entry["rejected"])


def measure(problem: Problem, candidates: Sequence[Candidate], device: torch.device) -> Choice:
    """Time the candidates on a Gaussian batch and choose the fastest one whose result is correct.

    Args:
        problem: What is to be computed; its batch is cut to at most ``BATCH_NUMEL`` elements.
        candidates: The expected winner first.
        device: Where to run.

    Returns:
        The choice; ``torch standard`` if no candidate is correct, with the reasons in ``rejected``.
    """
    deadline = time.perf_counter() + PROBLEM_SECONDS
    sample = replace(problem, batch=min(problem.batch, max(1, BATCH_NUMEL // (problem.rows * problem.cols))))
    # (batch, rows, cols), with the same values in every process.
    x = torch.randn(sample.batch, sample.rows, sample.cols, generator=torch.Generator().manual_seed(0))
    x = x.to(device=device, dtype=sample.input_dtype)
    choice = Choice("torch standard", "no candidate passed the cross-check")
    times: dict[str, list[float]] = {}
    expected: Tensor | None = None
    tried = 0
    for candidate in candidates:
        tried += 1
        # 1. warm up and cross-check. Calls that compile or record do not count against the deadline: otherwise the
        # first process, which compiles, would choose among fewer candidates than the second. The next run warms up the
        # rest (oneDNN's kernels, page faults) and gives the result for the cross-check.
        try:
            deadline += sum(_timed(candidate.run, x, sample.settings)[0] for _ in range(candidate.warm_calls))
            if isinstance(candidate.run, Replayed):
                deadline += _timed(candidate.run.capture, x, sample.settings)[0]
            first, result = _timed(candidate.run, x, sample.settings)
        except Exception as error:  # Triton's errors are not RuntimeErrors
            message = str(error).strip() or type(error).__name__
            choice.rejected[candidate.name] = f"failed: {message.splitlines()[0]}"
            choice.transient |= isinstance(error, MAY_SUCCEED_LATER)
            continue
        if expected is None:
            if first > PROBLEM_SECONDS / 2:
                return Choice(candidate.name, "expected; one run takes too long to measure others")
            expected = _expected(sample, x)
        relative_error = error_of(result, expected)
        if relative_error <= TOLERANCE[sample.rounds_as]:
            times[candidate.name] = [first]
        else:
            choice.rejected[candidate.name] = f"relative error {relative_error:.2g}"
        if time.perf_counter() > deadline:
            break
    for name, reason in choice.rejected.items():
        logger.warning(
            "deepspeed_muon: %r is not used for %s: %s. Please report this.", name, problem.key(), reason
        )
    if times:
        # 2. repeat, and choose by the best time of each candidate without its first, which warmed up
        _repeat(candidates, times, x, sample.settings, deadline)
        choice.milliseconds = {
            name: round(1e3 * min(seconds[1:] or seconds), 4) for name, seconds in times.items()
        }
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
    """Time the candidates in ``times`` again, in turns so that a busy moment hits all, and append to their lists."""
    for _ in range(REPETITIONS):
        best = min(min(seconds) for seconds in times.values())
        for candidate in candidates:
            seconds = times.get(candidate.name)
            if seconds is None or (len(seconds) > 1 and min(seconds) > RULED_OUT * best):
                continue
            # The first timing warmed up, so every candidate gets a second one even after the deadline.
            if time.perf_counter() < deadline or len(seconds) == 1:
                seconds.append(_timed(candidate.run, x, settings)[0])


def error_of(result: Tensor, expected: Tensor) -> float:
    """Return the largest relative error (Frobenius norm) of the matrices of a batch ``(..., rows, cols)``."""
    difference = torch.linalg.vector_norm(result.to(expected) - expected, dim=(-2, -1))
    return float((difference / torch.linalg.vector_norm(expected, dim=(-2, -1)).clamp(min=1e-30)).max())


def _expected(problem: Problem, x: Tensor) -> Tensor:
    """Return the reference result for ``x`` in fp32."""
    if problem.flops <= _FLOAT64_FLOPS:
        rows = problem.settings.coefficients
        return torch.stack([newton_schulz(matrix, rows) for matrix in x.cpu()]).to(
            device=x.device, dtype=torch.float32
        )
    return orthogonalize(x, settings=replace(problem.settings, method="standard")).float()


def _timed(run: Callable[[Tensor, NsSettings], _T], x: Tensor, settings: NsSettings) -> tuple[float, _T]:
    """Return the seconds that one run takes, kernels included, and its result."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    started = time.perf_counter()
    result = run(x, settings)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - started, result
