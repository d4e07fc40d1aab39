"""Runs orthogonalisation and the flat passes by the configured backend, and records what ran."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.logs import logger
from deepspeed_muon.math.newton_schulz import NsSettings

from . import library, torch_operators
from .autotune import Choice, Tuner
from .candidates import (
    Candidate,
    Problem,
    Replayed,
    candidates_for,
    has_kernel,
    in_fp32,
    index_of,
    problem_of,
)
from .gate import Verdict, cuda_verdict

NsBackend = Literal["auto", "ops", "torch"]

# Dtypes of the native passes.
_NATIVE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Chosen:
    """The candidate that runs a problem, the reason, and the number of calls."""

    candidate: Candidate
    choice: Choice
    calls: int = 0


class Orthogonalizer:
    """Runs :func:`deepspeed_muon.math.newton_schulz.orthogonalize` by the fastest candidate of a backend."""

    def __init__(self, backend: NsBackend, tuner: Tuner | None = None, *, measure: bool = True) -> None:
        """Build and load the native library if the backend needs it.

        Args:
            backend: ``auto`` measures the native operators and torch's code and uses the fastest for each shape;
                without a library it warns once and uses torch's code. ``ops`` uses native operators only. ``torch``
                uses torch's code and loads nothing.
            tuner: Makes the choices; ``None`` for :func:`process_tuner`.
            measure: Whether ``auto`` and ``ops`` choose by measurements, of this or of an earlier process. Otherwise
                they use the kernel that is expected to be the fastest, which is the same in all processes on equal
                machines.

        Raises:
            InstallationError: If the backend is ``ops`` and the library can be neither loaded nor built.
        """
        self.backend = backend
        self._operators = _operators(backend)
        self._tuner = tuner
        self._measure = measure
        self._chosen: dict[Problem, _Chosen] = {}
        self._warned = False  # that a graph could not be captured

    def __call__(self, x: Tensor, *, settings: NsSettings) -> Tensor:
        """Return the approximate polar factor of every matrix of a batch.

        The first call with a shape that was not prepared may measure the candidates, which takes a bounded time. It
        runs no collective.

        Args:
            x: ``(..., rows, cols)``, any floating dtype. Not mutated.
            settings: Polynomial, method and dtype.

        Returns:
            A new tensor of the same shape, in ``settings.dtype``.

        Raises:
            InstallationError: If the backend is ``ops`` and the library has no kernel for this device.
        """
        problem = problem_of(x, settings)
        chosen = self._chosen.get(problem)
        # Not all shapes are known at bind: a step without some gradients has smaller batches.
        if chosen is None:
            chosen = self._chosen[problem] = self._unprepared(problem, x.device)
        chosen.calls += 1
        return chosen.candidate.run(x, settings)

    def prepare(self, x: Tensor, *, settings: NsSettings, device: torch.device) -> _Chosen:
        """Choose what will run tensors like ``x`` on ``device``, and capture its CUDA graph, if it has one.

        A graph that cannot be captured is left out: the same kernels are launched one by one, and a warning says so.

        Args:
            x: Only its shape and dtype are used; it may be on the meta device.
            settings: Polynomial, method and dtype.
            device: Where the tensors will be.
        """
        problem = problem_of(x, settings, device)
        chosen = self._chosen.get(problem)
        if chosen is None:
            chosen = self._chosen[problem] = _Chosen(*self._choose(problem, device))
            self._capture(problem, chosen, device)
        return chosen

    def capture(self, device: torch.device) -> None:
        """Capture the CUDA graphs on ``device`` again that :meth:`release` freed."""
        for problem, chosen in self._chosen.items():
            self._capture(problem, chosen, device)

    def _capture(self, problem: Problem, chosen: _Chosen, device: torch.device) -> None:
        if not isinstance(chosen.candidate.run, Replayed):
            return
        shape = (problem.batch, problem.rows, problem.cols)
        try:
            zeros = torch.zeros(shape, dtype=problem.input_dtype, device=device)
            chosen.candidate.run.capture(zeros, problem.settings)
        except Exception as error:  # a library may raise anything in a capture
            message = (str(error).strip() or type(error).__name__).splitlines()[0]
            chosen.candidate = chosen.candidate.without_graph
            chosen.choice = replace(chosen.choice, reason=f"its graph could not be captured: {message}")
            if not self._warned:
                logger.warning(
                    "deepspeed_muon: no CUDA graph of %s could be captured for %s, so its kernels are launched one by "
                    "one, with the same results: %s",
                    chosen.candidate.name,
                    problem.key(),
                    message,
                )
            self._warned = True

    def _unprepared(self, problem: Problem, device: torch.device) -> _Chosen:
        """Choose for a call in a step, in which nothing is captured: as for a prepared batch of another size."""
        for prepared, chosen in self._chosen.items():
            # On a CPU nothing is ever captured, and every size is measured.
            may_capture = problem.device == "cuda" or isinstance(chosen.candidate.run, Replayed)
            if may_capture and replace(prepared, batch=problem.batch) == problem:
                candidate = chosen.candidate.without_graph
                return _Chosen(candidate, Choice(candidate.name, "as in a batch of another size"))
        candidate, choice = self._choose(problem, device)
        return _Chosen(candidate.without_graph, choice)

    def _choose(self, problem: Problem, device: torch.device) -> tuple[Candidate, Choice]:
        if self.backend == "torch":
            # The configured method, but torch's code uses the standard order for nearly square matrices.
            method = problem.settings.method
            available = {candidate.name: candidate for candidate in candidates_for(problem, None)}
            candidate = available.get(f"torch {method}", available["torch standard"])
            return candidate, Choice(candidate.name, "ns_backend is torch")
        # 1. On a CPU small matrices take so little time that only the calls count, whatever the dtype.
        if self.backend == "auto" and (small := in_fp32(problem)):
            return small, Choice(small.name, "small matrices on a CPU")
        # 2. On a GPU only what passed the self-test of this machine is offered.
        failed = trusted(device).failed
        if self.backend == "ops" and "native" in failed:
            raise InstallationError(
                f"ns_backend is 'ops', but the self-test of this machine failed: {failed['native']}. Use ns_backend "
                f"'auto' or 'torch'"
            )
        candidates = candidates_for(problem, self._operators, without=failed)
        if self.backend == "ops":
            candidates = [candidate for candidate in candidates if candidate.name.startswith("ops ")]
            if not candidates:
                raise InstallationError(
                    f"ns_backend is 'ops', but the native library has no kernel for {problem.device}; "
                    f"`python -m deepspeed_muon report` says why. Use ns_backend 'auto' or 'torch'"
                )
        if problem.batch * problem.rows * problem.cols == 0:
            return candidates[0], Choice(candidates[0].name, "empty")
        # 3. Measure, unless the choice must not depend on it. The first candidate is the expected winner.
        if not self._measure:
            return candidates[0], Choice(
                candidates[0].name,
                "not timed, so that the replicas of other processes choose the same kernel",
            )
        return (self._tuner or process_tuner()).choose(problem, candidates, device)

    def release(self) -> None:
        """Free the memory of CUDA graphs but keep the choices; until :meth:`capture` the kernels run one by one."""
        for chosen in self._chosen.values():
            if isinstance(chosen.candidate.run, Replayed):
                chosen.candidate.run.release()

    def report(self) -> list[dict[str, Any]]:
        """Return one entry for each problem that was prepared or run: its key, candidate, calls, reason and timings."""
        return [
            {
                "problem": problem.key(),
                "ran": chosen.candidate.name,
                "calls": chosen.calls,
                "reason": chosen.choice.reason,
                "milliseconds": dict(chosen.choice.milliseconds),
                "rejected": dict(chosen.choice.rejected),
            }
            for problem, chosen in self._chosen.items()
        ]


@dataclass(frozen=True, slots=True)
class FlatPasses:
    """The elementwise passes over flat partitions, native or in torch.

    Attributes:
        name: The implementation that runs, ``ops`` or ``torch``.
        momentum_pack: ``(bufs, grads, outs, table, rates)``, see :func:`.torch_operators.momentum_pack_`.
        momentum_pack_int8: ``(codes, scales, grads, outs, table, rates, blocks)``, see
            :func:`.torch_operators.momentum_pack_int8_`.
        unpack_apply: ``(params, updates, table, rates)``, see :func:`.torch_operators.unpack_apply_`.
    """

    name: str
    momentum_pack: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], None]
    momentum_pack_int8: Callable[..., None]
    unpack_apply: Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], None]


@functools.cache
def process_tuner() -> Tuner:
    """Return the tuner that all orthogonalizers of this process share."""
    return Tuner(library_key=library.key())


def flat_passes(backend: NsBackend, device: torch.device | str = "cpu", *, int8: bool = False) -> FlatPasses:
    """Return the flat passes of a backend for partitions on ``device``; see :class:`Orthogonalizer`.

    Args:
        backend: ``ops`` uses the native passes, ``auto`` too if there are some for ``device``, ``torch`` those in
            torch.
        device: Where the partitions are.
        int8: Whether momentum is stored in int8: on a GPU the self-test has a separate verdict for that pass.

    Raises:
        InstallationError: If the backend is ``ops`` and there are no native passes for ``device``.
    """
    operators = _operators(backend)
    device_type = torch.device(device).type
    missing = "the native library has none"
    if has_kernel(operators, device_type, "momentum_pack_") and has_kernel(
        operators, device_type, "unpack_apply_"
    ):
        assert operators is not None
        # A library that was built ahead of time may have code for other GPUs only.
        missing = (
            operators.flat_passes_missing(index_of(torch.device(device))) if device_type == "cuda" else ""
        )
        failed = trusted(torch.device(device)).failed
        missing = missing or failed.get("native", failed.get("int8", "") if int8 else "")
        if not missing:
            passes = (operators.momentum_pack_, operators.momentum_pack_int8_, operators.unpack_apply_)
            return FlatPasses("ops", *(operator.default for operator in passes))
    if backend == "ops":
        raise InstallationError(
            f"ns_backend is 'ops', but there are no flat passes for {device_type}: {missing}; "
            f"`python -m deepspeed_muon report` says more. Use ns_backend 'auto' or 'torch'"
        )
    return FlatPasses(
        "torch",
        torch_operators.momentum_pack_,
        torch_operators.momentum_pack_int8_,
        torch_operators.unpack_apply_,
    )


def matrix_norms(backend: NsBackend, device: torch.device | str = "cpu") -> Callable[[Tensor], Tensor]:
    """Return the native or the torch version of :func:`.torch_operators.frobenius_norms` for ``device``.

    On CUDA every backend uses torch's, which is a single kernel there.

    Raises:
        InstallationError: If the backend is ``ops`` and the library can be neither loaded nor built.
    """
    operators = _operators(backend)
    if has_kernel(operators, torch.device(device).type, "frobenius_norms"):
        assert operators is not None
        native: Callable[[Tensor], Tensor] = operators.frobenius_norms.default
        return native
    return torch_operators.frobenius_norms


def largest_magnitudes(tensors: Sequence[Tensor], table: Tensor) -> Tensor:
    """Run :func:`.torch_operators.largest_magnitudes` or its native version, which returns the same."""
    native = library.loaded() and all(
        tensor.device.type == "cpu" and tensor.dtype in _NATIVE for tensor in tensors
    )
    run = library.load().largest_magnitudes.default if native else torch_operators.largest_magnitudes
    magnitudes: Tensor = run(tensors, table)  # (fragments,) fp32
    return magnitudes


def trusted(device: torch.device) -> Verdict:
    """Return what must not run on a device: nothing on a CPU, whose code every run of this project's tests covers."""
    if device.type != "cuda":
        return Verdict()
    return cuda_verdict(index_of(device))


def _operators(backend: NsBackend) -> ModuleType | None:
    if backend == "torch":
        return None
    return library.load() if backend == "ops" else library.try_load()
