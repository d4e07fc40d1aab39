"""Builds and loads the native operators, ``torch.ops.deepspeed_muon``.

Importing this module builds and loads nothing; the first :func:`load` does. The folder of a build is named by a digest
of sources, flags and torch version, so that a stale library is never loaded. One process builds under a file lock,
which the operating system releases if that process dies. The processes that wait load the same file, also those of
other machines that share the folder, which is in the user's home by default.
"""

from __future__ import annotations

import atexit
import errno
import functools
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.logs import announce, warn_on_each_machine

from . import toolchain
from .machine import folder_of, locked
from .toolchain import BuildSpec

PACKAGE = Path(__file__).resolve().parent

# Seconds to wait for a build in another process. A CPU build takes about 10 s, one with CUDA some minutes.
WAIT_SECONDS = float(os.environ.get("DS_MUON_BUILD_TIMEOUT", "1200"))

_guard = threading.Lock()
_operators: ModuleType | None = None
_loaded_spec: BuildSpec | None = None  # the build of _operators
_failure: InstallationError | None = None


def load() -> ModuleType:
    """Return ``torch.ops.deepspeed_muon`` with all operators; the first call builds the library if necessary.

    Any number of threads and processes may call it at once. It runs no collective.

    Raises:
        InstallationError: If there is no compiler, the build fails, or a build in another process takes longer than
            ``WAIT_SECONDS``. Every later call in this process raises it again.
    """
    global _operators, _loaded_spec, _failure
    with _guard:
        if _operators is None:
            if _failure is not None:
                raise _failure
            try:
                _loaded_spec = build_and_load()
            except InstallationError as error:
                _failure = error
                raise
            _operators = torch.ops.deepspeed_muon
            has_cuda_kernels = _loaded_spec.with_cuda
            if not has_cuda_kernels and torch.cuda.is_available() and (reason := toolchain.cuda_reason()):
                warn_on_each_machine(
                    "deepspeed_muon: there is a GPU, but the CUDA kernels are not built (%s); torch's kernels run "
                    "instead",
                    reason,
                )
        return _operators


def try_load() -> ModuleType | None:
    """Return the operators, or ``None`` if they cannot be loaded; the first such call of a process warns."""
    earlier_failure = _failure
    try:
        return load()
    except InstallationError as error:
        if earlier_failure is None:
            warn_on_each_machine(
                "deepspeed_muon runs its torch code, which is slower: %s\n"
                "`python -m deepspeed_muon report` lists what is missing; ns_backend 'torch' silences this.",
                error,
            )
        return None


def loaded() -> bool:
    """Return whether the operators are loaded in this process."""
    return _operators is not None


def has_kernel(operators: ModuleType | None, device: str, name: str) -> bool:
    """Return whether the loaded library has a kernel of operator ``name`` for a device type."""
    if operators is None or device not in ("cpu", "cuda"):
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"deepspeed_muon::{name}", device.upper()))


def built_library() -> tuple[Path, BuildSpec] | None:
    """Return the library for this machine and its build, from ``pip install`` or an earlier first use, or ``None``."""
    machine = toolchain.machine_spec()
    # What ``pip install`` compiled needs no nvcc.
    for spec in (toolchain.machine_spec(needs_nvcc=False), machine):
        if (path := prebuilt_path(spec)) is not None:
            # Flags and nvcc of this machine say nothing about it, so its content is its key.
            return path, replace(spec, key=hashlib.sha256(path.read_bytes()).hexdigest()[:16])
    path = library_path(machine)
    return (path, machine) if path.exists() else None


def unavailable_reason() -> str | None:
    """Return why the library cannot be built on this machine, or ``None`` if it can."""
    if sys.platform != "linux":
        return f"the sources are for Linux, this is {sys.platform}"
    if toolchain.cxx_compiler() is None:
        return f"no C++ compiler: {os.environ.get('CXX', 'c++')!r} is not on PATH (install g++, or set CXX)"
    if toolchain.find_program("ninja") is None:
        return "ninja is neither on PATH nor installed beside the interpreter (pip install ninja)"
    return None


def build_and_load() -> BuildSpec:
    """Load the library into this process and build it first if necessary; see :func:`load`.

    Returns:
        The build that was loaded: the one for the CPU alone if the CUDA kernels cannot be built.
    """
    if (built := built_library()) is not None:
        path, spec = built
        _load_library(path)
        return spec
    spec = toolchain.machine_spec()
    if reason := unavailable_reason():
        raise InstallationError(f"the native ops cannot be built on this machine: {reason}")
    try:
        _build(spec)
    except InstallationError as error:
        if not spec.with_cuda:
            raise
        warn_on_each_machine(
            "deepspeed_muon: the CUDA kernels cannot be built, so torch's kernels run on the GPU, and only the "
            "operators for the CPU are built. Remove %s to try again.\n%s",
            build_folder(spec),
            error,
        )
        spec = toolchain.build_spec(torch_version=torch.__version__, with_cuda=False)
        _build(spec)
    return spec


def build_folder(spec: BuildSpec) -> Path:
    """Return the folder of this build, inside ``TORCH_EXTENSIONS_DIR`` or torch's default cache."""
    return folder_of("TORCH_EXTENSIONS_DIR", "torch_extensions") / "deepspeed_muon" / spec.key


def library_path(spec: BuildSpec) -> Path:
    """Return the path of the library that the first use builds."""
    return build_folder(spec) / f"{toolchain.library_name(spec.key)}.so"


def prebuilt_path(spec: BuildSpec) -> Path | None:
    """Return the library that ``DS_BUILD_MUON=1 pip install`` built, if it has code for the GPUs of this machine."""
    needed = set(toolchain.architectures(spec))
    for path in sorted(PACKAGE.glob(f"{toolchain.library_name(spec.portable_key)}*.so")):
        # The end of the file name lists the architectures: muon_ops_KEY_sm_80_sm_90a.so.
        if needed <= {f"sm_{name}" for name in path.stem.split("_sm_")[1:]}:
            return path
    return None


def _build(spec: BuildSpec) -> None:
    """Load the library, built first if it is missing. A CUDA build that failed is not tried again in its folder."""
    target = library_path(spec)
    try:
        # Under the lock: another process may have built it while this one waited.
        with _exclusive(target.parent) as shared:
            if not shared:
                target = _process_folder(target.parent) / target.name
            failed = target.parent / "failed.txt"
            if not target.exists():
                if failed.exists():
                    raise InstallationError(failed.read_text())
                announce(
                    "deepspeed_muon: building its native operators%s into %s, once for this torch and this machine; "
                    "that takes a minute or two (`python -m deepspeed_muon report --selftest` builds them ahead)",
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
                        # Otherwise every process of every run would spend minutes on it.
                        _record_failure(failed, str(error))
                    raise
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise InstallationError(
            f"the native ops cannot be built in {target.parent} ({error}); "
            + ("free space there, or set" if is_full else "set")
            + " TORCH_EXTENSIONS_DIR to another folder that can be written"
        ) from error
    _load_library(target)


def _record_failure(file: Path, message: str) -> None:
    try:
        file.write_text(message)
    except OSError as error:
        # An empty file would stand for a failure without a reason.
        with suppress(OSError):
            file.unlink()
        raise InstallationError(
            f"{message}\nThis cannot be recorded in {file} ({error}), so the next process tries again; free space "
            f"there, or set TORCH_EXTENSIONS_DIR to a folder on another disk"
        ) from error


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
def _process_folder(folder: Path) -> Path:
    """Return a temporary folder for the builds of this process alone, because ``folder`` cannot be shared."""
    temporary = Path(tempfile.mkdtemp(prefix="deepspeed_muon_"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    warn_on_each_machine(
        "deepspeed_muon: %s cannot be written, or its file system has no locks, so every process builds the native "
        "operators for itself, in a temporary folder. Set TORCH_EXTENSIONS_DIR to a folder on a local disk",
        folder,
    )
    return temporary


@contextmanager
def _exclusive(folder: Path) -> Iterator[bool]:
    """Hold the build lock of a folder; yield whether the folder can be shared at all. Raise after ``WAIT_SECONDS``."""
    with locked(folder / ".building", WAIT_SECONDS) as acquired:
        if acquired is False:
            raise InstallationError(
                f"another process has been building the native ops in {folder} for {WAIT_SECONDS:g} s; raise "
                f"DS_MUON_BUILD_TIMEOUT (seconds), or build before the ranks start with "
                f"`python -m deepspeed_muon report --selftest`"
            )
        yield acquired is not None


def _compile(spec: BuildSpec, target: Path) -> None:
    """Compile in a subfolder and rename the library to ``target``, so that no process loads an incomplete file."""
    from torch.utils import cpp_extension

    linker_flags: list[str] = []
    work = target.parent / "build"
    work.mkdir(exist_ok=True)
    # torch's lock file survives a killed build. Under our lock no build can run, so it is such a leftover.
    (work / "lock").unlink(missing_ok=True)
    path = os.environ.get("PATH", os.defpath)
    try:
        # torch calls ninja by name, and a virtual environment that is not activated has it beside the interpreter.
        if ninja := toolchain.find_program("ninja"):
            os.environ["PATH"] = f"{path}{os.pathsep}{Path(ninja).parent}"
        if spec.with_cuda and (nvcc := toolchain.find_nvcc()):
            # torch would take the parent folder of the nvcc on PATH, which may be a script that calls another nvcc.
            cpp_extension.CUDA_HOME = toolchain.cuda_home(nvcc)
            linker_flags = toolchain.runtime_flags(Path(cpp_extension.CUDA_HOME), work)
        cpp_extension.load(
            name=toolchain.library_name(spec.key),
            sources=list(spec.sources),
            extra_cflags=list(spec.cxx_flags),
            extra_cuda_cflags=list(spec.nvcc_flags) or None,
            extra_ldflags=linker_flags,
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
    os.replace(built, target)  # in the same folder, so that it is atomic
