"""The CUDA kernels as a plain shared library, without torch's extension build: nvcc, ctypes and raw pointers.

It depends on torch only to hold memory, so that the kernels can be tried on a machine that has neither DeepSpeed nor
the torch version of this project.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).resolve().parents[2] / "ops" / "csrc" / "cuda"

OK, BAD_ARGUMENT, SHAPE, MISALIGNED, DTYPE, DEVICE, NOT_COMPILED, DRIVER = 0, -1, -2, -3, -4, -5, -6, -7
"""``enum MuonStatus`` of ops/csrc/include/muon_cuda.h."""

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
"""``enum MuonDtype``."""

FLAT_ROWS = {"momentum_pack": 72, "momentum_pack_int8": 56, "unpack_apply": 102}
"""Fragments of one launch of a flat pass: ``Fragments::kRows`` of ops/csrc/cuda/flat_passes.cu."""

Fragment = tuple[Sequence[Tensor], float]
"""The tensors of a fragment, of one length, and the decay of their momentum or weights."""

Blocks = tuple[int, Tensor]
"""``CodeBlocks`` of ops/csrc/include/code_blocks.h: ``before`` and ``scales``."""


class SymGemm(ctypes.Structure):
    """``struct MuonSymGemm``."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in (*"abcd", "counter")]
        + [(name, ctypes.c_int64) for name in ("batch", "m", "k")]
        + [(f"ld{name}", ctypes.c_int64) for name in "abcd"]
        + [(f"stride_{name}", ctypes.c_int64) for name in "abcd"]
        + [(name, ctypes.c_float) for name in ("alpha", "beta", "diag")]
        + [("dtype", ctypes.c_int32)]
    )


def find_nvcc() -> str | None:
    """Return the compiler, on PATH or in its usual place."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def build(folder: Path, architectures: tuple[str, ...]) -> Path:
    """Compile all CUDA sources for ``architectures`` (such as ``90a``) and link them into one library."""
    nvcc = find_nvcc()
    assert nvcc is not None
    targets = [
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}" for architecture in architectures
    ]
    flags = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC", *targets]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        run([nvcc, *flags, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.cu"))))
    library = folder / "libmuon_cuda.so"
    run([nvcc, "-shared", *targets, "-cudart", "static", *map(str, objects), "-o", str(library)])
    return library


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


class PackRow(ctypes.Structure):
    """``struct MuonPackRow``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("momentum", "grad", "out")),
        ("n", ctypes.c_int64),
        ("decay", ctypes.c_double),
        ("nesterov", ctypes.c_int32),
        ("before", ctypes.c_int32),
        ("scales", ctypes.c_void_p),
    ]


class ApplyRow(ctypes.Structure):
    """``struct MuonApplyRow``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("param", "update")),
        ("n", ctypes.c_int64),
        ("lr_scale", ctypes.c_double),
        ("decay", ctypes.c_double),
    ]


class DivideTransposed(ctypes.Structure):
    """``struct MuonDivideTransposed``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "norms", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "rows", "cols")),
        *((f"stride_{name}", ctypes.c_int64) for name in ("matrix", "row", "col")),
        *((f"{name}_dtype", ctypes.c_int32) for name in ("x", "out")),
    ]


class Squares(ctypes.Structure):
    """``struct MuonSquares``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "sums")),
        *((name, ctypes.c_int64) for name in ("batch", "numel", "parts")),
        ("dtype", ctypes.c_int32),
    ]


def pointers(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses of a fragment's tensors, then their length."""
    return [*(tensor.data_ptr() for tensor in tensors), tensors[0].numel()]


class Kernels:
    """The launchers; each call raises on a CUDA error and returns the status otherwise."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.muon_status_name.restype = ctypes.c_char_p
        pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self.library.muon_momentum_pack.argtypes = [pointer, int64, int32, int32, int32, pointer]
        self.library.muon_unpack_apply.argtypes = [pointer, int64, int32, int32, pointer]
        self.library.muon_divide_transposed.argtypes = [ctypes.POINTER(DivideTransposed), pointer]
        self.library.muon_squares.argtypes = [ctypes.POINTER(Squares), pointer]
        self.library.muon_sym_gemm.argtypes = [ctypes.POINTER(SymGemm), pointer]
        self._counters: dict[torch.device, Tensor] = {}

    def available(self) -> int:
        """Status of the symmetric product on the current device."""
        return int(self.library.muon_sym_gemm_available())

    def name(self, status: int) -> str:
        """Return a status in words."""
        return str(self.library.muon_status_name(status).decode())

    def sym_gemm(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        d: Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        diag: float = 0.0,
    ) -> int:
        """Run the symmetric product into ``d``, all of three dimensions."""
        problem = problem_of(a, b, c, d, self.counter(d.device), alpha=alpha, beta=beta, diag=diag)
        return self._checked(self.library.muon_sym_gemm(ctypes.byref(problem), stream()))

    def counter(self, device: torch.device) -> Tensor:
        """Return the counter of all products on a device, which run one after the other."""
        if device not in self._counters:
            self._counters[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._counters[device]

    def momentum_pack(self, fragments: Sequence[Fragment], *, nesterov: bool) -> int:
        """Run one call over fragments of ``(momentum, gradient, out)``, each with its decay."""
        rows = [(*pointers(tensors), decay, nesterov) for tensors, decay in fragments]
        return self._pass(self.library.muon_momentum_pack, PackRow, rows, fragments)

    def momentum_pack_int8(
        self, fragments: Sequence[Fragment], blocks: Sequence[Blocks], *, nesterov: bool
    ) -> int:
        """Run one call over fragments of ``(codes, gradient, out)``, each with its decay and its blocks."""
        rows = [
            (*pointers(tensors), decay, nesterov, before, scales.data_ptr())
            for (tensors, decay), (before, scales) in zip(fragments, blocks, strict=True)
        ]
        return self._pass(self.library.muon_momentum_pack, PackRow, rows, fragments)

    def unpack_apply(self, fragments: Sequence[Fragment], *, lr_scale: float) -> int:
        """Run one call over fragments of ``(param, update)``, each with its decay."""
        rows = [(*pointers(tensors), lr_scale, decay) for tensors, decay in fragments]
        return self._pass(self.library.muon_unpack_apply, ApplyRow, rows, fragments)

    def divide_transposed(self, x: Tensor, norms: Tensor, out: Tensor) -> int:
        """Run the pass over (batch, rows, cols); ``out`` is contiguous."""
        addresses = [tensor.data_ptr() for tensor in (x, norms, out)]
        problem = DivideTransposed(*addresses, *x.shape, *x.stride(), DTYPES[x.dtype], DTYPES[out.dtype])
        return self._checked(self.library.muon_divide_transposed(ctypes.byref(problem), stream()))

    def squares(self, x: Tensor, sums: Tensor) -> int:
        """Run the pass over ``(batch, numel)``; ``sums`` is ``(batch, parts, 2)``."""
        problem = Squares(x.data_ptr(), sums.data_ptr(), *x.shape, sums.shape[1], DTYPES[x.dtype])
        return self._checked(self.library.muon_squares(ctypes.byref(problem), stream()))

    def _pass(
        self, call: Any, row: Any, rows: Sequence[tuple[Any, ...]], fragments: Sequence[Fragment]
    ) -> int:
        table = (row * len(rows))(*(row(*fields) for fields in rows))
        dtypes = [DTYPES[tensor.dtype] for tensor in fragments[0][0]]
        return self._checked(call(table, len(rows), *dtypes, stream()))

    def _checked(self, status: int) -> int:
        if status > 0:
            raise RuntimeError(f"CUDA error {status}: {self.name(status)}")
        return status


def problem_of(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    d: Tensor,
    counter: Tensor,
    *,
    alpha: float,
    beta: float,
    diag: float,
) -> SymGemm:
    """Describe a product of tensors with unit stride in their last dimension."""
    problem = SymGemm(batch=a.shape[0], m=a.shape[1], k=a.shape[2], alpha=alpha, beta=beta, diag=diag)
    problem.dtype, problem.counter = DTYPES[a.dtype], counter.data_ptr()
    for name, tensor in zip("abcd", (a, b, c, d), strict=True):
        if tensor is not None:
            setattr(problem, name, tensor.data_ptr())
            setattr(problem, f"ld{name}", tensor.stride(1))
            setattr(problem, f"stride_{name}", tensor.stride(0))
    return problem


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream) if torch.cuda.is_available() else 0
