"""Which kernels run Newton-Schulz and the flat passes: by one table, :data:`RULE`, or as ``ns_backend`` says.

Nothing is timed here and nothing stored, so that a machine runs the same kernels, and rounds alike, in every run.
``benchmarks/newton_schulz.py`` times the rule beside all other kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.logs import logger
from deepspeed_muon.math.newton_schulz import NsMethod, NsSettings, runs_gram

from . import builder, self_test, torch_operators
from .graphs import Replayed, Run, native_iteration, torch_iteration, triton_products
from .self_test import index_of

NsBackend = Literal["auto", "ops", "torch"]
Kernels = Literal["sm90", "triton", "torch", "ops"]
"""What computes an iteration: this package's kernel for Hopper, Triton's, or torch's code; with ``ns_backend: ops``
also the native iteration over cuBLAS, for problems that have no kernel of this package."""

# Elements of the largest batch: stacking copies its matrices, and the iteration needs three times that memory again.
BATCH_NUMEL = 1 << 26

# Up to this many FLOPs a CUDA graph is replayed: 1.5 ms on an H200, about what the host needs to launch an iteration.
# Above that the GPU takes longer than the host, and a graph would only cost memory.
_GRAPH_UP_TO = 1e12

# The symmetric kernels need sides that are multiples of the first (include/muon_cuda.h), and pay from the second on.
_MULTIPLE, _KERNELS_FROM = 8, 512


@dataclass(frozen=True, slots=True)
class Problem:
    """The shape, dtypes, device and iteration of one orthogonalisation: all that the rule looks at.

    Attributes:
        device: Where it runs.
        input_dtype: Dtype of the input.
        batch: The number of matrices in a call.
        rows: Rows of each matrix.
        cols: Columns of each matrix.
        settings: Polynomial, method and dtype of the iteration.
    """

    device: torch.device
    input_dtype: torch.dtype
    batch: int
    rows: int
    cols: int
    settings: NsSettings

    @classmethod
    def of(cls, x: Tensor, settings: NsSettings, device: torch.device) -> Problem:
        """Return the problem of orthogonalising a tensor like ``x`` on ``device``."""
        if device.type == "cuda" and torch.cuda.is_available():
            device = torch.device("cuda", index_of(device))
        rows, cols = x.shape[-2:]
        return cls(device, x.dtype, x.shape[:-2].numel(), rows, cols, settings)

    @property
    def is_for_kernels(self) -> bool:
        """Whether the symmetric kernels of a GPU run it: in half precision, for sides that they take."""
        is_half = self.settings.dtype in (torch.float16, torch.bfloat16)
        is_aligned = not (self.rows % _MULTIPLE or self.cols % _MULTIPLE)
        is_large = min(self.rows, self.cols) >= _KERNELS_FROM
        return self.device.type == "cuda" and is_half and is_aligned and is_large

    @property
    def flops(self) -> float:
        """Multiplications and additions of the standard iteration over the batch."""
        m, n = sorted((self.rows, self.cols))
        return float(self.batch * len(self.settings.coefficients) * (4 * m * m * n + 2 * m**3))

    def method(self, kernels: Kernels) -> NsMethod:
        """Return ``gram`` or ``standard``; kernels that halve the symmetric products run ``gram`` for more shapes."""
        short, long = sorted((self.rows, self.cols))
        halves = kernels in ("sm90", "triton")
        return "gram" if runs_gram(short, long, self.settings.method, halves=halves) else "standard"

    def __str__(self) -> str:
        settings = self.settings
        names = [str(dtype).removeprefix("torch.") for dtype in (self.input_dtype, settings.dtype)]
        return (
            f"{self.device.type} {names[0]}->{names[1]} {self.batch}x{self.rows}x{self.cols} "
            f"{settings.method}{len(settings.coefficients)}"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the rule.

    Attributes:
        kernels: What computes the iteration.
        problems: For which problems, in words.
        times: The page that has its times, or that there is none.
        fits: Whether it is for a problem.
    """

    kernels: Kernels
    problems: str
    times: str
    fits: Callable[[Problem], bool]


_H200 = "benchmarks/results/gpu-nvidia-h200-2026-11-26.md"
RULE = (
    Row(
        "sm90",
        "Hopper: half precision, sides that are multiples of 8, the short one at least 512",
        f"{_H200}: the fastest of all in 16 batches of 1024 x 1024 to 2048 x 5504; not timed below 1024",
        lambda problem: problem.is_for_kernels,
    ),
    Row(
        "triton",
        "the same on other GPUs, and on Hopper without the native library",
        f"{_H200}: faster than cuBLAS in 10 of 16 batches there; not timed on any other card",
        lambda problem: problem.is_for_kernels,
    ),
    Row(
        "torch",
        "a GPU: all other matrices, by cuBLAS; the same without Triton",
        "not timed",
        lambda problem: problem.device.type != "cpu",
    ),
    Row(
        "torch",
        "a CPU: all matrices",
        "docs/measured.md: native kernels change a whole step by 0.92 to 1.35",
        lambda problem: True,
    ),
)
"""The first row that fits is taken whose kernels this machine has and that pass :mod:`.self_test`."""

OTHER_RULES = (
    "method: gram from a ratio of the sides of 1.3 on with kernels that halve symmetric products, of 2 with torch's; "
    f"else standard ({_H200}: gram won all 10 batches from 2.69 on; below 2.69 it was not timed)",
    f"CUDA graph: batches of at most {_GRAPH_UP_TO:g} FLOPs ({_H200}: as the fastest of 16 batches, within 3 %)",
    "dtype: fp16 on a GPU; on a CPU bf16 where it multiplies bf16 (AMX, AMD's AVX512-BF16), else fp32 "
    "(benchmarks/results/newton_schulz-xeon-avx512.md and -bf16.md: on an Intel without AMX bf16 is slower)",
)
"""What is decided besides kernels, for the report."""


@dataclass(slots=True)
class _Choice:
    """What runs a problem, the number of calls, and why there is no graph although the rule has one."""

    kernels: Kernels
    method: NsMethod
    run: Run
    calls: int = 0
    note: str = ""

    @property
    def name(self) -> str:
        is_replayed = isinstance(self.run, Replayed) and self.run.is_captured
        return f"{self.kernels} {self.method}{' in a CUDA graph' if is_replayed else ''}"


class Orthogonalizer:
    """Runs :func:`deepspeed_muon.math.newton_schulz.orthogonalize` by the kernels of the rule."""

    def __init__(self, backend: NsBackend) -> None:
        """Build and load the native library if the backend needs it.

        Args:
            backend: ``auto`` follows :data:`RULE`; without a library it warns once. ``ops`` has a GPU run the native
                iteration for every shape. ``torch`` runs torch's code and loads nothing.

        Raises:
            InstallationError: If the backend is ``ops`` and the library can be neither loaded nor built.
        """
        self.backend = backend
        self._operators = _operators(backend)
        self._choices: dict[Problem, _Choice] = {}

    def __call__(self, x: Tensor, *, settings: NsSettings) -> Tensor:
        """Return the approximate polar factor of every matrix of a batch.

        Args:
            x: ``(..., rows, cols)``, any floating dtype. Not mutated.
            settings: Polynomial, method and dtype.

        Returns:
            A new tensor of the same shape, in ``settings.dtype``.

        Raises:
            InstallationError: If the backend is ``ops`` and the library has no kernels for this GPU.
        """
        choice = self._choice(Problem.of(x, settings, x.device))
        choice.calls += 1
        return choice.run(x, settings)

    def prepare(self, x: Tensor, *, settings: NsSettings, device: torch.device) -> None:
        """Choose what will run tensors like ``x`` on ``device``, and capture its CUDA graph, if it has one.

        A graph that cannot be captured is left out: the same kernels are launched one by one, and a warning says so.

        Args:
            x: Only its shape and dtype are used; it may be on the meta device.
            settings: Polynomial, method and dtype.
            device: Where the tensors will be.
        """
        problem = Problem.of(x, settings, device)
        self._capture(problem, self._choice(problem, prepared=True))

    def capture(self, device: torch.device) -> None:
        """Capture the CUDA graphs on ``device`` again that :meth:`release` freed."""
        for problem, choice in self._choices.items():
            if problem.device == device:
                self._capture(problem, choice)

    def release(self) -> None:
        """Free the memory of CUDA graphs but keep the choices; until :meth:`capture` the kernels run one by one."""
        for choice in self._choices.values():
            if isinstance(choice.run, Replayed):
                choice.run.release()

    def report(self) -> list[dict[str, Any]]:
        """Return one entry for each problem that was prepared or run: its name, what ran, calls, and why no graph."""
        return [
            {"problem": str(problem), "ran": choice.name, "calls": choice.calls, "note": choice.note}
            for problem, choice in self._choices.items()
        ]

    def _choice(self, problem: Problem, *, prepared: bool = False) -> _Choice:
        choice = self._choices.get(problem)
        if choice is None:
            kernels = self._kernels(problem)
            method = problem.method(kernels)
            run = self._iteration(kernels, method)
            # A step without some of the gradients has smaller batches, which were not prepared and get no graph.
            on_gpu = prepared and problem.device.type == "cuda" and self.backend != "torch"
            if on_gpu and problem.flops <= _GRAPH_UP_TO:
                run = Replayed(run)
            choice = self._choices[problem] = _Choice(kernels, method, run)
        return choice

    def _kernels(self, problem: Problem) -> Kernels:
        if self.backend == "torch":
            return "torch"
        if self.backend == "ops" and problem.device.type == "cuda":
            if reason := self._native_failure(problem.device):
                raise _not_native(f"the native iteration cannot run on this GPU: {reason}")
            return "sm90" if problem.is_for_kernels and self._has("sm90", problem.device) else "ops"
        rows = (row.kernels for row in RULE if row.fits(problem))
        return next(kernels for kernels in rows if self._has(kernels, problem.device))

    def _has(self, kernels: Kernels, device: torch.device) -> bool:
        if kernels == "sm90":
            if self._native_failure(device):
                return False
            assert self._operators is not None
            return bool(self._operators.sym_gemm_kernel(index_of(device)) == "sm90")
        if kernels == "triton":
            return triton_products() is not None and not self_test.failure("Triton's product", device)
        return True

    def _native_failure(self, device: torch.device) -> str:
        """Return why the native iteration cannot run on a GPU, or an empty text."""
        if not builder.has_kernel(self._operators, "cuda", "sym_gemm"):
            return "the library has no CUDA kernels"
        return self_test.failure("symmetric product", device)

    def _iteration(self, kernels: Kernels, method: NsMethod) -> Run:
        if kernels in ("sm90", "ops"):
            assert self._operators is not None
            return native_iteration(method, self._operators)
        return torch_iteration(method, triton_products() if kernels == "triton" else None)

    def _capture(self, problem: Problem, choice: _Choice) -> None:
        if not isinstance(choice.run, Replayed):
            return
        shape = (problem.batch, problem.rows, problem.cols)
        try:
            zeros = torch.zeros(shape, dtype=problem.input_dtype, device=problem.device)
            choice.run.capture(zeros, problem.settings)
        except Exception as error:  # a library may raise anything in a capture
            message = (str(error).strip() or type(error).__name__).splitlines()[0]
            is_first = not any(other.note for other in self._choices.values())
            choice.run, choice.note = choice.run.run, f"its graph could not be captured: {message}"
            if is_first:
                logger.warning(
                    "deepspeed_muon: no CUDA graph of %s could be captured for %s, so its kernels are launched one by "
                    "one, with the same results: %s",
                    choice.name,
                    problem,
                    message,
                )


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


def flat_passes(backend: NsBackend, device: torch.device | str = "cpu") -> FlatPasses:
    """Return the flat passes of a backend for partitions on ``device``; see :class:`Orthogonalizer`.

    Args:
        backend: ``ops`` uses the native passes, ``auto`` too if there are some for ``device``, ``torch`` those in
            torch.
        device: Where the partitions are.

    Raises:
        InstallationError: If the backend is ``ops`` and there are no native passes for ``device``.
    """
    device = torch.device(device)
    operators = _operators(backend)
    is_built = builder.has_kernel(operators, device.type, "unpack_apply_")
    missing = self_test.failure("flat passes", device) if is_built else "the native library has none"
    if operators is not None and not missing:
        passes = (operators.momentum_pack_, operators.momentum_pack_int8_, operators.unpack_apply_)
        return FlatPasses("ops", *(operator.default for operator in passes))
    if backend == "ops":
        raise _not_native(f"there are no flat passes for {device.type}: {missing}")
    return FlatPasses(
        "torch",
        torch_operators.momentum_pack_,
        torch_operators.momentum_pack_int8_,
        torch_operators.unpack_apply_,
    )


def _operators(backend: NsBackend) -> ModuleType | None:
    if backend == "torch":
        return None
    return builder.load() if backend == "ops" else builder.try_load()


def _not_native(why: str) -> InstallationError:
    return InstallationError(
        f"ns_backend is 'ops', but {why}; `python -m deepspeed_muon report` says more. Use ns_backend 'auto' or 'torch'"
    )
