"""Builds and loads the native library: the interface of DeepSpeed's op builders over torch's extension build.

A digest of sources, flags and torch version names the folder of a build, so that no stale library is ever loaded. One
process builds under a file lock, which the operating system releases if the process dies; the others wait.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.builder import OpBuilder

from deepspeed_muon.errors import OpsUnavailableError
from deepspeed_muon.logs import announce, logger, warn_on_each_machine

from . import toolchain
from .machine import locked
from .toolchain import BuildSpec

PACKAGE = Path(__file__).resolve().parent

# Seconds that a process waits for the build of another. A CPU build takes about 10 s, one with CUDA some minutes.
WAIT_SECONDS = float(os.environ.get("DS_MUON_BUILD_TIMEOUT", "1200"))


class MuonBuilder(OpBuilder):  # type: ignore[misc]  # DeepSpeed has no annotations
    """The op builder of this project, with the interface of DeepSpeed's own (``NAME``, ``load()``, ``builder()``)."""

    BUILD_VAR = "DS_BUILD_MUON"
    NAME = "muon"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(self.NAME if name is None else name)

    def absolute_name(self) -> str:
        """Return the module path of a library that was built ahead of time."""
        return f"deepspeed_muon.ops.{toolchain.prebuilt_name(self.spec())}"

    def spec(self) -> BuildSpec:
        """Return sources and flags of a build on this machine. Compiles nothing and creates no CUDA context."""
        return toolchain.machine_spec(torch)

    def sources(self) -> list[str]:
        """Return the absolute paths of the sources."""
        return list(self.spec().sources)

    def include_paths(self) -> list[str]:
        """Return the absolute include folders."""
        return list(self.spec().include_dirs)

    def cxx_args(self) -> list[str]:
        """Return the host compiler's flags. DeepSpeed's own would spend seconds in py-cpuinfo."""
        return list(self.spec().cxx_flags)

    def nvcc_args(self) -> list[str]:
        """Return nvcc's flags; empty without CUDA."""
        return list(self.spec().nvcc_flags)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the library is built already or can be built here; with ``verbose`` log why not."""
        reason = self.unavailable_reason()
        self.error_log = reason
        if reason is not None and verbose:
            logger.warning("deepspeed_muon: the native ops cannot be built: %s", reason)
        return reason is None

    def unavailable_reason(self) -> str | None:
        """Return why the library can be neither loaded nor built here, or ``None``."""
        if self.built_path() is not None:
            return None
        if sys.platform != "linux":
            return f"the sources are for Linux, this is {sys.platform}"
        if toolchain.cxx_compiler() is None:
            return (
                f"no C++ compiler: {os.environ.get('CXX', 'c++')!r} is not on PATH (install g++, or set CXX)"
            )
        if ninja_folder() is None:
            return "ninja is neither on PATH nor installed beside the interpreter (pip install ninja)"
        return None

    def built_path(self) -> Path | None:
        """Return the library that fits this torch and these sources, if it is built already."""
        spec = self.spec()
        return next(
            (
                path
                for path in (prebuilt_path(spec), library_path(spec))
                if path is not None and path.exists()
            ),
            None,
        )

    def load(self, verbose: bool = False) -> Any:
        """Load the library, build it first if necessary, and return ``torch.ops.deepspeed_muon``.

        Several processes may call it at once.

        Args:
            verbose: Whether to print the compiler's commands.

        Raises:
            OpsUnavailableError: If there is no compiler, the build fails, or the build of another process takes too
                long.
        """
        path = self.built_path()
        if path is None:
            return self.jit_load(verbose)
        _load_library(path)
        return torch.ops.deepspeed_muon

    def jit_load(self, verbose: bool = True) -> Any:
        """Build in the extensions folder and load; see :meth:`load`."""
        if not self.is_compatible():
            raise OpsUnavailableError(f"the native ops cannot be built here: {self.error_log}")
        spec = self.spec()
        try:
            _build(spec, verbose)
        except OpsUnavailableError as error:
            if not spec.with_cuda:
                raise
            warn_on_each_machine(
                "deepspeed_muon: the CUDA kernels cannot be built, so torch's run on the GPU, and the operators for "
                "the CPU are built alone. Remove %s to try again.\n%s",
                build_folder(spec),
                error,
            )
            _build(toolchain.build_spec(torch_version=torch.__version__, with_cuda=False), verbose)
        return torch.ops.deepspeed_muon

    def builder(self) -> Any:
        """Return the setuptools extension for a build ahead of time."""
        return toolchain.setuptools_extension(self.spec(), "deepspeed_muon.ops")


def build_folder(spec: BuildSpec) -> Path:
    """Return the folder of this build, inside ``TORCH_EXTENSIONS_DIR`` or torch's default cache."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"),
        "torch_extensions",
    )
    return Path(root) / "deepspeed_muon" / spec.key


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


def _build(spec: BuildSpec, verbose: bool) -> None:
    """Build a library unless it is there, and load it. A build that failed is not tried again."""
    target = library_path(spec)
    with _exclusive(target.parent) as shared:
        if not shared:
            target = _own_folder(target.parent) / target.name
        failed = target.parent / "failed.txt"
        if not target.exists():
            if failed.exists():
                raise OpsUnavailableError(failed.read_text())
            announce(
                "deepspeed_muon: building its native operators%s into %s, once for this torch and this machine; that "
                "takes a minute or two (`python -m deepspeed_muon report --selftest` builds them ahead)",
                " with CUDA" if spec.with_cuda else "",
                target.parent,
                on_any_rank=True,
            )
            started = time.monotonic()
            try:
                _compile(spec, target, verbose)
                announce("deepspeed_muon: built in %.0f s", time.monotonic() - started, on_any_rank=True)
            except OpsUnavailableError as error:
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
            raise OpsUnavailableError(
                f"the native ops at {path} cannot be loaded ({error}); remove the folder to build them again"
            ) from error
        _loaded.add(path)


def ninja_folder() -> str | None:
    """Return the folder of ninja, or ``None``."""
    found = toolchain.find_program("ninja")
    return str(Path(found).parent) if found else None


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
            raise OpsUnavailableError(
                f"another process has been building the native ops in {folder} for {WAIT_SECONDS:g} s; raise "
                f"DS_MUON_BUILD_TIMEOUT (seconds), or build before the ranks start with "
                f"`python -m deepspeed_muon report --selftest`"
            )
        yield mine is not None


def _compile(spec: BuildSpec, target: Path, verbose: bool) -> None:
    """Compile in a folder below the target's and move the library into place, so that nobody loads half a file."""
    from torch.utils import cpp_extension

    linking: list[str] = []
    work = target.parent / "build"
    work.mkdir(exist_ok=True)
    # torch's own lock is a file that outlives a killed build. While we hold ours it can only be such a leftover.
    (work / "lock").unlink(missing_ok=True)
    path = os.environ.get("PATH", os.defpath)
    ninja = ninja_folder()
    try:
        if ninja is not None and ninja not in path.split(os.pathsep):
            os.environ["PATH"] = f"{path}{os.pathsep}{ninja}"
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
            verbose=verbose,
        )
    except (RuntimeError, OSError) as error:
        raise OpsUnavailableError(f"building the native ops in {work} failed:\n{error}") from error
    finally:
        os.environ["PATH"] = path
    built = work / f"{toolchain.library_name(spec.key)}.so"
    _loaded.add(target)  # torch has just loaded this very library
    os.replace(built, target)
