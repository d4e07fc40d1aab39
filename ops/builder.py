"""Builds the native operators, ``torch.ops.deepspeed_muon``, when they are first used, and loads them.

Importing this module builds and loads nothing; the first :func:`load` does. ``torch.utils.cpp_extension`` compiles, and
here is what it lacks: code for ``sm_90a``, no fast math, a single build when many processes start at once, a lock that
ends with its process. A digest of sources, flags and torch's version names the folder of a build, so that a stale
library is never loaded; nothing else is read there.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.logs import announce, warn_on_each_machine

CSRC = Path(__file__).resolve().parent / "csrc"

# Seconds to wait for a build in another process. A CPU build takes about 10 s, one with CUDA up to some minutes.
_WAIT_SECONDS = 1200.0

# Targets of one architecture: code for sm_90 without the "a" cannot use wgmma.
_ARCH_SPECIFIC = {"90": "90a", "100": "100a", "120": "120a"}


def load() -> ModuleType:
    """Return ``torch.ops.deepspeed_muon`` with all operators; the first call builds the library if necessary.

    Any number of threads and processes may call it at once. It runs no collective.

    Raises:
        InstallationError: If there is no compiler, the build fails, or a build in another process takes longer than
            20 minutes. Every later call in this process raises it again.
    """
    outcome = _outcome()
    if isinstance(outcome, InstallationError):
        raise outcome
    return outcome


@functools.cache
def try_load() -> ModuleType | None:
    """Return the operators, or ``None`` if they cannot be loaded; the first call of a process warns."""
    outcome = _outcome()
    if not isinstance(outcome, InstallationError):
        return outcome
    warn_on_each_machine(
        "deepspeed_muon runs its torch code, which is slower: %s\n"
        "`python -m deepspeed_muon report` lists what is missing; ns_backend 'torch' silences this.",
        outcome,
    )
    return None


@functools.cache
def _outcome() -> ModuleType | InstallationError:
    try:
        build_and_load()
    except InstallationError as error:
        return error
    operators: ModuleType = torch.ops.deepspeed_muon
    if torch.cuda.is_available() and not has_kernel(operators, "cuda", "unpack_apply_"):
        warn_on_each_machine(
            "deepspeed_muon: there is a GPU, but %s has no CUDA kernels (%s); torch's and Triton's run instead",
            built_library(),
            cuda_reason() or "their build failed; remove the file to try again",
        )
    return operators


def loaded() -> bool:
    """Return whether the operators are loaded in this process."""
    return hasattr(torch.ops.deepspeed_muon, "unpack_apply_")


def has_kernel(operators: ModuleType | None, device: str, name: str) -> bool:
    """Return whether the loaded library has a kernel of operator ``name`` for a device type."""
    if operators is None or device not in ("cpu", "cuda"):
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"deepspeed_muon::{name}", device.upper()))


def built_library() -> Path | None:
    """Return the library for this machine if it is built, even if there is no nvcc any more."""
    # A library without CUDA kernels will do only if they cannot be built.
    choices = (True,) if cuda_reason() is None else (True, False)
    paths = (library_path(with_cuda=with_cuda) for with_cuda in choices)
    # Not path.exists(), which raises for a folder that may not be entered (HOME of another user).
    return next((path for path in paths if os.path.exists(path)), None)


def library_path(*, with_cuda: bool) -> Path:
    """Return where a library is built: in ``TORCH_EXTENSIONS_DIR``, or in the user's cache."""
    digest = hashlib.sha256(f"{torch.__version__} {platform.machine()}".encode())
    digest.update("\0".join([*cxx_flags(), *(nvcc_flags() if with_cuda else ())]).encode())
    files = [path for path in CSRC.rglob("*") if path.is_file() and (with_cuda or path.parent.name != "cuda")]
    for path in sorted(files):
        digest.update(path.relative_to(CSRC).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    key = digest.hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
    return Path(folder, "deepspeed_muon", key, f"muon_ops_{key}.so")


def unavailable_reason() -> str | None:
    """Return why the library cannot be built on this machine, or ``None`` if it can."""
    if sys.platform != "linux":
        return f"the sources are for Linux, this is {sys.platform}"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return f"no C++ compiler: {os.environ.get('CXX', 'c++')!r} is not on PATH (install g++, or set CXX)"
    if shutil.which("ninja", path=search_path()) is None:
        return "ninja is neither on PATH nor installed beside the interpreter (pip install ninja)"
    return None


def cuda_reason() -> str | None:
    """Return why a build on this machine has no CUDA kernels, or ``None`` if it has them."""
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    if not torch.cuda.is_available() and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return "no CUDA device, and TORCH_CUDA_ARCH_LIST does not say what to build for"
    return None if find_nvcc() else "no nvcc in CUDA_HOME, on PATH or in /usr/local/cuda"


def build_and_load() -> None:
    """Load the library into this process and build it first if necessary; see :func:`load`."""
    from filelock import FileLock, Timeout

    if built := built_library():
        _load_library(built)
        return
    if reason := unavailable_reason():
        raise InstallationError(f"the native ops cannot be built on this machine: {reason}")
    with_cuda = cuda_reason() is None
    path = library_path(with_cuda=with_cuda)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The operating system releases the lock when its process ends.
        with FileLock(path.parent / ".building", timeout=_WAIT_SECONDS):
            if path.exists():  # another process has built it meanwhile
                _load_library(path)
            else:
                _build(path, with_cuda=with_cuda)
    except Timeout as error:
        raise InstallationError(
            f"another process has been building the native ops in {path.parent} for {_WAIT_SECONDS:g} s; end it, or "
            f"build before the ranks start with `python -m deepspeed_muon report --selftest`"
        ) from error
    except (OSError, NotImplementedError) as error:  # the second one without file locks
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise InstallationError(
            f"the native ops cannot be built in {path.parent} ({error}); {'free space there, or ' * is_full}set "
            f"TORCH_EXTENSIONS_DIR to a folder on a local disk that can be written"
        ) from error


def _load_library(path: Path) -> None:
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise InstallationError(
            f"the native ops at {path} cannot be loaded ({error}); remove the folder to build them again"
        ) from error


def _build(path: Path, *, with_cuda: bool) -> None:
    """Compile and load. If the CUDA kernels fail, the library is built without them, so that no process tries again."""
    announce(
        "deepspeed_muon: building its native operators%s into %s, once for this torch and this machine; that takes a "
        "minute or two (`python -m deepspeed_muon report --selftest` builds them ahead)",
        " with CUDA" if with_cuda else "",
        path.parent,
        on_any_rank=True,
    )
    started = time.monotonic()
    try:
        _compile(path, with_cuda=with_cuda)
    except RuntimeError as error:
        if not with_cuda:
            raise InstallationError(f"building the native ops in {path.parent} failed:\n{error}") from error
        warn_on_each_machine("deepspeed_muon: building the CUDA kernels failed:\n%s", error)
        _build(path, with_cuda=False)
        return
    announce("deepspeed_muon: built in %.0f s", time.monotonic() - started, on_any_rank=True)


def _compile(path: Path, *, with_cuda: bool) -> None:
    """Compile in a subfolder, which torch loads, and rename the library, so that no process loads an incomplete one."""
    from torch.utils import cpp_extension

    # A build that was killed leaves a lock, for which torch would wait for ever.
    work = path.parent / "build"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    name = f"{path.stem}{'' if with_cuda else '_cpu'}"
    before = os.environ.get("PATH", os.defpath)
    try:
        os.environ["PATH"] = search_path()  # torch calls ninja by name
        if with_cuda and (nvcc := find_nvcc()):
            cpp_extension.CUDA_HOME = cuda_home(nvcc)  # torch takes a script on PATH for the toolkit's nvcc
        cpp_extension.load(
            name=name,
            sources=[str(source) for source in sources(with_cuda=with_cuda)],
            extra_cflags=cxx_flags(),
            extra_cuda_cflags=nvcc_flags() if with_cuda else None,
            extra_include_paths=[str(CSRC), str(CSRC / "include")],
            build_directory=str(work),
            with_cuda=with_cuda,
            is_python_module=False,
        )
    finally:
        os.environ["PATH"] = before
    os.replace(work / f"{name}.so", path)  # in the same file system, so that it is atomic


def sources(*, with_cuda: bool) -> list[Path]:
    """Return the translation units of a build."""
    patterns = ["*.cpp", "cpu/*.cpp", *(["cuda/*.cpp", "cuda/*.cu"] if with_cuda else [])]
    return sorted(path for pattern in patterns for path in CSRC.glob(pattern))


def cxx_flags() -> list[str]:
    """Return the flags of the host compiler."""
    # The headers of newer torch need C++20.
    major, minor = (int(number) for number in torch.__version__.split(".")[:2])
    # No -march=native: the library may be loaded on another processor (a shared home directory). Loops that gain from
    # longer vectors are compiled several times and dispatched at run time. OpenMP is compiled in but not linked: its
    # symbols come from the runtime that torch has loaded, so there is one pool of threads.
    standard = "-std=c++20" if (major, minor) >= (2, 12) else "-std=c++17"
    return ["-O3", standard, "-fopenmp", "-fvisibility=hidden", "-Wno-psabi"]


def nvcc_flags() -> list[str]:
    """Return the flags of nvcc, with code for this machine's GPUs or for ``TORCH_CUDA_ARCH_LIST``."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    targets = arch_flags(torch.cuda.get_device_capability(index) for index in range(count))
    # Without --use_fast_math, which would change the rounding of the flat passes.
    return ["-O3", cxx_flags()[1], "--expt-relaxed-constexpr", "-lineinfo", *targets]


def arch_flags(capabilities: Iterable[tuple[int, int]]) -> list[str]:
    """Return the ``-gencode`` flags of nvcc; torch adds none of its own when they are given.

    torch takes ``9.0`` literally, which cannot compile wgmma, and DeepSpeed's builders raise on ``9.0a``.

    Args:
        capabilities: Compute capabilities of GPUs; ``TORCH_CUDA_ARCH_LIST``, such as ``8.0;9.0a+PTX``, overrides them.
    """
    names = [f"{major}{minor}" for major, minor in capabilities]
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip():
        names = [entry.split("+")[0].replace(".", "") for entry in re.split(r"[;\s,]+", listed)]
    targets = sorted({_ARCH_SPECIFIC.get(name, name) for name in names})
    return [f"-gencode=arch=compute_{name},code=sm_{name}" for name in targets]


def search_path() -> str:
    """Return PATH with the interpreter's folder at its end: a virtual environment may not be activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def find_nvcc() -> str | None:
    """Return nvcc: of ``CUDA_HOME``, ``CUDA_PATH``, ``PATH`` or ``/usr/local/cuda``."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [*(os.path.join(home, "bin") for home in homes), os.environ.get("PATH", os.defpath)]
    return shutil.which("nvcc", path=os.pathsep.join([*folders, "/usr/local/cuda/bin"]))


@functools.cache
def cuda_home(nvcc: str) -> str:
    """Return the folder of the toolkit that an nvcc belongs to; it may be a script that calls another nvcc."""
    command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
    dry_run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    # nvcc prints the environment that it would set: #$ TOP=/usr/local/cuda-13.0
    top = re.search(r"^#\$ TOP=(.+)$", dry_run.stderr, flags=re.MULTILINE)
    return os.path.realpath(top[1].strip()) if top else str(Path(nvcc).resolve().parents[1])
