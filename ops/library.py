"""Builds and loads the native operators, ``torch.ops.deepspeed_muon``, and registers their shape functions.

An import of this module builds and loads nothing: the first :func:`load` does. A digest of sources, flags and torch
version names the folder of a build, so that no stale library is ever loaded. One process builds under a file lock, and
the operating system releases that if the process dies; the others wait.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.logs import announce, warn_on_each_machine

from . import toolchain
from .machine import folder_of, locked
from .toolchain import BuildSpec

PACKAGE = Path(__file__).resolve().parent

# Seconds that a process waits for the build of another. A CPU build takes about 10 s, one with CUDA some minutes.
WAIT_SECONDS = float(os.environ.get("DS_MUON_BUILD_TIMEOUT", "1200"))

_guard = threading.Lock()
_operators: Any = None
_failure: InstallationError | None = None


def load() -> Any:
    """Return ``torch.ops.deepspeed_muon`` with all operators; the first call builds the library if necessary.

    Several processes may call it at once.

    Raises:
        InstallationError: If there is no compiler, the build fails, or the build of another process takes too long;
            every later call of the process raises it again.
    """
    global _operators, _failure
    with _guard:
        if _operators is None:
            if _failure is not None:
                raise _failure
            try:
                build_and_load()
            except InstallationError as error:
                _failure = error
                raise
            _operators = torch.ops.deepspeed_muon
            for name, fake in _FAKES.items():
                torch.library.register_fake(f"deepspeed_muon::{name}", fake)
            if torch.cuda.is_available() and (reason := toolchain.cuda_reason()):
                warn_on_each_machine(
                    "deepspeed_muon: there is a GPU, but its own CUDA kernels are not built (%s); torch's run instead",
                    reason,
                )
        return _operators


def try_load() -> Any | None:
    """Return the operators, or ``None`` if there are none; the first such call of a process warns."""
    known = _failure
    try:
        return load()
    except InstallationError as error:
        if known is None:
            warn_on_each_machine(
                "deepspeed_muon runs its torch code, which is slower: %s\n"
                "`python -m deepspeed_muon report` lists what is missing; ns_backend 'torch' silences this.",
                error,
            )
        return None


def loaded() -> bool:
    """Return whether the operators are loaded in this process."""
    return _operators is not None


def key() -> str:
    """Return the digest of the library that this process has loaded, ``torch`` if none."""
    return "torch" if _operators is None else toolchain.machine_spec().key


def built_path(wanted: BuildSpec) -> Path | None:
    """Return the library that fits this torch and these sources, if it is built already."""
    ahead, here = prebuilt_path(wanted), library_path(wanted)
    return ahead or (here if here.exists() else None)


def unavailable_reason() -> str | None:
    """Return why the library cannot be built here, or ``None``."""
    if sys.platform != "linux":
        return f"the sources are for Linux, this is {sys.platform}"
    if toolchain.cxx_compiler() is None:
        return f"no C++ compiler: {os.environ.get('CXX', 'c++')!r} is not on PATH (install g++, or set CXX)"
    if toolchain.find_program("ninja") is None:
        return "ninja is neither on PATH nor installed beside the interpreter (pip install ninja)"
    return None


def build_and_load() -> None:
    """Load the library into this process, build it first if necessary; see :func:`load`."""
    wanted = toolchain.machine_spec()
    path = built_path(wanted)
    if path is not None:
        return _load_library(path)
    if reason := unavailable_reason():
        raise InstallationError(f"the native ops cannot be built here: {reason}")
    try:
        _build(wanted)
    except InstallationError as error:
        if not wanted.with_cuda:
            raise
        warn_on_each_machine(
            "deepspeed_muon: the CUDA kernels cannot be built, so torch's run on the GPU, and the operators for "
            "the CPU are built alone. Remove %s to try again.\n%s",
            build_folder(wanted),
            error,
        )
        _build(toolchain.build_spec(torch_version=torch.__version__, with_cuda=False))


def build_folder(spec: BuildSpec) -> Path:
    """Return the folder of this build, inside ``TORCH_EXTENSIONS_DIR`` or torch's default cache."""
    return folder_of("TORCH_EXTENSIONS_DIR", "torch_extensions") / "deepspeed_muon" / spec.key


def library_path(spec: BuildSpec) -> Path:
    """Return the path of the library that is built at first use."""
    return build_folder(spec) / f"{toolchain.library_name(spec.key)}.so"


def prebuilt_path(spec: BuildSpec) -> Path | None:
    """Return the library that ``DS_BUILD_MUON=1 pip install`` has built, if it has code for this machine's GPUs."""
    wanted = set(toolchain.architectures(spec))
    for path in sorted(PACKAGE.glob(f"{toolchain.library_name(spec.portable_key)}*.so")):
        if wanted <= {f"sm_{name}" for name in path.stem.split("_sm_")[1:]}:
            return path
    return None


def _build(spec: BuildSpec) -> None:
    """Build a library unless it is there, and load it. A build that failed is not tried again."""
    target = library_path(spec)
    with _exclusive(target.parent) as shared:
        if not shared:
            target = _own_folder(target.parent) / target.name
        failed = target.parent / "failed.txt"
        if not target.exists():
            if failed.exists():
                raise InstallationError(failed.read_text())
            announce(
                "deepspeed_muon: building its native operators%s into %s, once for this torch and this machine; that "
                "takes a minute or two (`python -m deepspeed_muon report --selftest` builds them ahead)",
                " with CUDA" if spec.with_cuda else "",
                target.parent,
                on_any_rank=True,
            )
            started = time.monotonic()
            try:
                _compile(spec, target)
                announce("deepspeed_muon: built in %.0f s", time.monotonic() - started, on_any_rank=True)
            except InstallationError as error:
                if spec.with_cuda:
                    # Minutes in every process of every run, otherwise.
                    failed.write_text(str(error))
                raise
    _load_library(target)


_loaded: set[Path] = set()


def _load_library(path: Path) -> None:
    if path not in _loaded:
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise InstallationError(
                f"the native ops at {path} cannot be loaded ({error}); remove the folder to build them again"
            ) from error
        _loaded.add(path)


@functools.cache
def _own_folder(folder: Path) -> Path:
    """Return a temporary folder for the builds of this process alone, in place of one that cannot be shared."""
    own = Path(tempfile.mkdtemp(prefix="deepspeed_muon_"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    warn_on_each_machine(
        "deepspeed_muon: %s cannot be written, or its file system has no locks, so every process builds the native "
        "operators for itself, in a temporary folder. Set TORCH_EXTENSIONS_DIR to a folder on a local disk",
        folder,
    )
    return own


@contextmanager
def _exclusive(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock; yield whether it can be shared at all. Raise after ``WAIT_SECONDS``."""
    with locked(folder / ".building", WAIT_SECONDS) as mine:
        if mine is False:
            raise InstallationError(
                f"another process has been building the native ops in {folder} for {WAIT_SECONDS:g} s; raise "
                f"DS_MUON_BUILD_TIMEOUT (seconds), or build before the ranks start with "
                f"`python -m deepspeed_muon report --selftest`"
            )
        yield mine is not None


def _compile(spec: BuildSpec, target: Path) -> None:
    """Compile in a folder below the target's and move the library into place, so that nobody loads half a file."""
    from torch.utils import cpp_extension

    linking: list[str] = []
    work = target.parent / "build"
    work.mkdir(exist_ok=True)
    # torch's own lock is a file that outlives a killed build. While we hold ours it can only be such a leftover.
    (work / "lock").unlink(missing_ok=True)
    path = os.environ.get("PATH", os.defpath)
    try:
        if ninja := toolchain.find_program("ninja"):
            os.environ["PATH"] = f"{path}{os.pathsep}{Path(ninja).parent}"
        if spec.with_cuda and (nvcc := toolchain.find_nvcc()):
            # torch takes the parent of the nvcc on PATH, which may be a script that calls another one.
            cpp_extension.CUDA_HOME = toolchain.cuda_home(nvcc)
            linking = toolchain.runtime_flags(Path(cpp_extension.CUDA_HOME), work)
        cpp_extension.load(
            name=toolchain.library_name(spec.key),
            sources=list(spec.sources),
            extra_cflags=list(spec.cxx_flags),
            extra_cuda_cflags=list(spec.nvcc_flags) or None,
            extra_ldflags=linking,
            extra_include_paths=list(spec.include_dirs),
            build_directory=str(work),
            with_cuda=spec.with_cuda,
            is_python_module=False,
            is_standalone=False,
        )
    except (RuntimeError, OSError) as error:
        raise InstallationError(f"building the native ops in {work} failed:\n{error}") from error
    finally:
        os.environ["PATH"] = path
    built = work / f"{toolchain.library_name(spec.key)}.so"
    _loaded.add(target)  # torch has just loaded this very library
    os.replace(built, target)


def _orthogonalize(
    x: Tensor,
    coefficients: Sequence[float],
    method: str,
    restarts: Sequence[int],
    dtype: torch.dtype,
    eps: float,
) -> Tensor:
    # The storage order is kept: of a batch that is stored column by column too.
    if not x.is_contiguous() and x.mT.is_contiguous():
        return x.new_empty(x.mT.shape, dtype=dtype).mT
    return x.new_empty(x.shape, dtype=dtype)


# The operators on tensors without data, for torch.compile.
_FAKES: dict[str, Callable[..., Tensor | None]] = {
    "sym_gemm": lambda a, b, c, alpha, beta, diag: a.new_empty((*a.shape[:-1], a.shape[-2])),
    "orthogonalize": _orthogonalize,
    "divide_transposed": lambda x, norms, dtype: x.new_empty(x.mT.shape, dtype=dtype),
    "frobenius_norms": lambda x: x.new_empty(x.shape[:-2], dtype=torch.float32),
    **dict.fromkeys(("momentum_pack_", "momentum_pack_int8_", "unpack_apply_"), lambda *arguments: None),
    "largest_magnitudes": lambda tensors, table: table.new_empty(table.shape[0], dtype=torch.float32),
}
NAMES = tuple(_FAKES)
