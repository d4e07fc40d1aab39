"""Orthogonalisation and flat passes by the configured backend, with a record of what ran."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.math.newton_schulz import NsSettings

from . import library, torch_operators
from .autotune import Choice, Tuner
from .candidates import Candidate, Problem, Replayed, candidates_for, has_kernel, in_fp32, problem_of
from .gate import Verdict, cuda_verdict

NsBackend = Literal["auto", "ops", "torch"]

_NATIVE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Chosen:
    """What runs a problem, why, and how often it did."""

    candidate: Candidate
    choice: Choice
    calls: int = 0


class Orthogonalizer:
    """Runs :func:`deepspeed_muon.math.newton_schulz.orthogonalize` by a backend."""

    def __init__(self, backend: NsBackend, tuner: Tuner | None = None, *, measure: bool = True) -> None:
        """Build and load the native library if the backend needs it.

        Args:
            backend: ``auto`` measures the native operators and torch's code and takes the faster for each shape;
                without a library it warns once and runs torch's. ``ops`` takes only native ones. ``torch`` loads
                nothing.
            tuner: Makes the choices; ``None`` for the one of this process.
            measure: Whether ``auto`` and ``ops`` take what is measured, or was by an earlier process. Otherwise they
                take the kernel that is expected to be the fastest: on equal machines the same in all processes.

        Raises:
            InstallationError: If the backend is ``ops`` and the library can be neither loaded nor built.
        """
        self.backend = backend
        self._operators = _operators(backend)
        self._tuner = tuner
        self._measure = measure
        self._chosen: dict[Problem, _Chosen] = {}

    def __call__(self, x: Tensor, *, settings: NsSettings) -> Tensor:
        """Return the approximate polar factor of every matrix of a batch.

        The first call with a shape that was not prepared may measure the candidates (bounded in time; no collective).

        Args:
            x: ``(..., rows, cols)``, any floating dtype. Not mutated.
            settings: Polynomial, method, dtype and eps.

        Returns:
            A new tensor of the same shape, in ``settings.dtype``.

        Raises:
            InstallationError: If the backend is ``ops`` and the library holds no kernel for this device.
        """
        chosen = self.prepare(x, settings=settings, device=x.device)
        chosen.calls += 1
        return chosen.candidate.run(x, settings)

    def prepare(self, x: Tensor, *, settings: NsSettings, device: torch.device) -> _Chosen:
        """Choose what will run tensors like ``x`` on ``device``, unless that is known; see :meth:`__call__`.

        Args:
            x: Only its shape and dtype are looked at; it may be on the meta device.
            settings: Polynomial, method, dtype and eps.
            device: Where the tensors will be.
        """
        problem = problem_of(x, settings, device)
        chosen = self._chosen.get(problem)
        if chosen is None:
            chosen = self._chosen[problem] = _Chosen(*self._choose(problem, device))
        return chosen

    def _choose(self, problem: Problem, device: torch.device) -> tuple[Candidate, Choice]:
        if self.backend == "torch":
            # The configured method, except that torch's code runs square matrices in the standard order.
            method = problem.settings.method
            available = {each.name: each for each in candidates_for(problem, None)}
            candidate = available.get(f"torch {method}", available["torch standard"])
            return candidate, Choice(candidate.name, "ns_backend is torch")
        if self.backend == "auto" and (small := in_fp32(problem)):
            return small, Choice(small.name, "small matrices on a CPU")
        failed = trusted(device).failed
        if self.backend == "ops" and "native" in failed:
            raise InstallationError(
                f"ns_backend is 'ops', but the self-test of this machine failed: {failed['native']}. Use ns_backend "
                f"'auto' or 'torch'"
            )
        candidates = candidates_for(problem, self._operators, without=failed)
        if self.backend == "ops":
            candidates = [each for each in candidates if each.name.startswith("ops ")]
            if not candidates:
                raise InstallationError(
                    f"ns_backend is 'ops', but the native library holds no kernel for {problem.device}; "
                    f"`python -m deepspeed_muon report` says why. Use ns_backend 'auto' or 'torch'"
                )
        if problem.batch * problem.rows * problem.cols == 0:
            return candidates[0], Choice(candidates[0].name, "empty")
        if not self._measure:
            return candidates[0], Choice(
                candidates[0].name, "expected; the replicas of other processes round alike"
            )
        return (self._tuner or process_tuner()).choose(problem, candidates, device)

    def release(self) -> None:
        """Free the memory of recorded graphs. Choices stay; the next call with a shape records it again."""
        for chosen in self._chosen.values():
            if isinstance(chosen.candidate.run, Replayed):
                chosen.candidate.run.release()

    def report(self) -> list[dict[str, Any]]:
        """Return one entry for each problem that was prepared or run: shape, what runs it, why, how often, timings."""
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
    """The elementwise passes over flat partitions, native or torch's.

    Attributes:
        name: ``ops`` or ``torch``, whichever really runs.
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
    """Return the flat passes of a backend for tensors on ``device``; see :class:`Orthogonalizer`.

    Args:
        backend: ``ops`` takes the native passes, ``auto`` too if ``device`` has them, ``torch`` those of torch.
        device: Where the partitions are.
        int8: Whether momentum is in 8 bits: on a GPU that pass has a verdict of its own.

    Raises:
        InstallationError: If the backend is ``ops`` and there are no native passes for ``device``.
    """
    operators = _operators(backend)
    kind = torch.device(device).type
    missing = "the native library holds none"
    if has_kernel(operators, kind, "momentum_pack_") and has_kernel(operators, kind, "unpack_apply_"):
        assert operators is not None
        # A library that was built ahead of time may hold code for other GPUs only.
        missing = operators.flat_passes_missing() if kind == "cuda" else ""
        failed = trusted(torch.device(device)).failed
        missing = missing or failed.get("native", failed.get("int8", "") if int8 else "")
        if not missing:
            passes = (operators.momentum_pack_, operators.momentum_pack_int8_, operators.unpack_apply_)
            return FlatPasses("ops", *(each.default for each in passes))
    if backend == "ops":
        raise InstallationError(
            f"ns_backend is 'ops', but there are no flat passes for {kind}: {missing}; "
            f"`python -m deepspeed_muon report` says more. Use ns_backend 'auto' or 'torch'"
        )
    return FlatPasses(
        "torch",
        torch_operators.momentum_pack_,
        torch_operators.momentum_pack_int8_,
        torch_operators.unpack_apply_,
    )


def matrix_norms(backend: NsBackend, device: torch.device | str = "cpu") -> Callable[[Tensor], Tensor]:
    """Return :func:`.torch_operators.frobenius_norms` or its native counterpart for matrices on ``device``.

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
    """Run :func:`.torch_operators.largest_magnitudes` or its native counterpart, which says the same."""
    native = library.loaded() and all(each.device.type == "cpu" and each.dtype in _NATIVE for each in tensors)
    run = library.load().largest_magnitudes.default if native else torch_operators.largest_magnitudes
    found: Tensor = run(tensors, table)
    return found


def trusted(device: torch.device) -> Verdict:
    """Return what must not run on a device. The code for CPUs is tested in every run of this project's tests."""
    if device.type != "cuda":
        return Verdict()
    return cuda_verdict(torch.cuda.current_device() if device.index is None else device.index)


def _operators(backend: NsBackend) -> Any | None:
    if backend == "torch":
        return None
    return library.load() if backend == "ops" else library.try_load()
