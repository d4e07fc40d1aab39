"""Sources, flags and name of the native library, for the build at first use and for ``pip install``.

This module imports nothing of the package, because ``setup.py`` loads it by its path, before the package can be
imported.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

CSRC = Path(__file__).resolve().parent / "csrc"

# Architecture-specific targets: code for sm_90 without the "a" cannot use wgmma.
_ARCH_SPECIFIC = {"90": "90a", "100": "100a", "120": "120a"}

# Targets without a device and without TORCH_CUDA_ARCH_LIST.
_DEFAULT_ARCHS = ("80", "90a")

# The first compute capability with mma.sync for bf16.
_OLDEST_ARCH = 80


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """Sources and flags of one build of the native library, and the digests that identify it.

    Attributes:
        sources: Absolute paths of the translation units.
        include_dirs: Absolute paths.
        cxx_flags: Flags of the host compiler.
        nvcc_flags: Flags of nvcc; empty without CUDA.
        with_cuda: Whether CUDA sources are among the sources.
        key: Digest of sources, headers, flags, and the versions of torch, Python and nvcc.
        portable_key: The same without the flags and the version of nvcc. It still depends on whether there are CUDA
            sources. By it a library that ``pip install`` built is found on machines with other GPUs, another nvcc or
            none.
    """

    sources: tuple[str, ...]
    include_dirs: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    nvcc_flags: tuple[str, ...]
    with_cuda: bool
    key: str
    portable_key: str


def library_name(key: str) -> str:
    """Return the file name, without suffix, of the library with this key."""
    return f"muon_ops_{key}"


def architectures(spec: BuildSpec) -> tuple[str, ...]:
    """Return the GPU architectures that a build contains code for, such as ``sm_90a``."""
    return tuple(flag.rpartition("=")[2] for flag in spec.nvcc_flags if "gencode" in flag)


def prebuilt_name(spec: BuildSpec) -> str:
    """Return the file name, without suffix, of a library that ``pip install`` builds: with its GPU architectures."""
    return "_".join((library_name(spec.portable_key), *architectures(spec)))


def cxx_compiler() -> str | None:
    """Return the path of the C++ compiler that torch would use, or ``None``."""
    return shutil.which(os.environ.get("CXX", "c++"))


def find_nvcc() -> str | None:
    """Return the path of nvcc, or ``None``.

    The order is ``CUDA_HOME``, ``CUDA_PATH``, ``PATH``, pip's ``nvidia-cuda-nvcc`` (installed beside the CUDA
    libraries of torch), ``/usr/local/cuda``.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and (nvcc := shutil.which("nvcc", path=str(Path(home) / "bin"))):
            return nvcc
    packages = Path(sysconfig.get_path("platlib"), "nvidia")
    pip_folders = [packages / name / "bin" for name in ("cu13", "cu12", "cuda_nvcc")]
    folders = os.pathsep.join([*map(str, pip_folders), "/usr/local/cuda/bin"])
    return shutil.which("nvcc") or shutil.which("nvcc", path=folders)


@functools.cache
def version_output(program: str | None) -> str:
    """Return what ``program --version`` prints; an empty string without a program, or if it does not run."""
    if program is None:
        return ""
    try:
        return subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def cuda_home(nvcc: str) -> str:
    """Return the folder of the CUDA toolkit of an nvcc, which may be a script that calls another nvcc."""
    dry_run = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, timeout=60, check=False
    )
    # nvcc prints the environment that it would set: #$ TOP=/usr/local/cuda-13.0
    top = re.search(r"^#\$ TOP=(.+)$", dry_run.stderr, flags=re.MULTILINE)
    return os.path.realpath(top[1].strip()) if top else str(Path(nvcc).resolve().parents[1])


def runtime_flags(home: Path, folder: Path) -> list[str]:
    """Return linker flags that find the CUDA runtime of pip's toolkit, which lacks the link ``libcudart.so``.

    Args:
        home: The toolkit.
        folder: Receives that link if the toolkit has none.
    """
    libraries = [path for name in ("lib64", "lib") for path in sorted((home / name).glob("libcudart.so*"))]
    if not libraries or any(path.name == "libcudart.so" for path in libraries):
        return []
    link = folder / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(libraries[-1])
    return [f"-L{folder}"]


def find_program(name: str) -> str | None:
    """Return the path of a program: on ``PATH``, else beside the interpreter, as in a virtual environment."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def build_spec(
    *, torch_version: str, with_cuda: bool, capabilities: Iterable[tuple[int, int]] = ()
) -> BuildSpec:
    """Return the sources, flags and digests of a build.

    Args:
        torch_version: ``torch.__version__`` with its local part, which determines the ABI.
        with_cuda: Whether to compile the CUDA kernels.
        capabilities: Compute capabilities of this machine's devices; ``TORCH_CUDA_ARCH_LIST`` overrides them.
    """
    patterns = ["*.cpp", "cpu/*.cpp"] + (["cuda/*.cpp", "cuda/*.cu"] if with_cuda else [])
    sources = sorted(path for pattern in patterns for path in CSRC.glob(pattern))
    if not with_cuda:
        sources = [path for path in sources if path.name != "binding_cuda.cpp"]
    # The headers of newer torch need C++20.
    major, minor = (int(number) for number in torch_version.split(".")[:2])
    standard = "-std=c++20" if (major, minor) >= (2, 12) else "-std=c++17"
    # No -march=native: the library may be loaded on another processor (a shared home directory, a wheel). Loops that
    # gain from longer vectors are compiled several times and dispatched at run time. OpenMP is compiled in but not
    # linked: its symbols come from the runtime that torch has loaded, so that there is one pool of threads.
    cxx_flags = ("-O3", standard, "-fopenmp", "-fvisibility=hidden", "-Wno-psabi")
    nvcc_flags: tuple[str, ...] = ()
    if with_cuda:
        # --use_fast_math, which DeepSpeed's builders add, would change the rounding of the flat passes.
        targets = arch_flags(capabilities, os.environ.get("TORCH_CUDA_ARCH_LIST"))
        nvcc_flags = ("-O3", standard, "--expt-relaxed-constexpr", "-lineinfo", *targets)
    digest = hashlib.sha256()
    identity = [torch_version, sys.implementation.cache_tag or "", platform.machine(), str(with_cuda)]
    for text in [*identity, *cxx_flags]:
        digest.update(text.encode() + b"\0")
    headers = [CSRC.glob("*.h"), CSRC.glob("cpu/*.h"), CSRC.glob("include/*.h")]
    if with_cuda:
        headers += [CSRC.glob("cuda/*.cuh"), CSRC.glob("cuda/*.h")]
    for path in sorted([*sources, *(path for group in headers for path in group)]):
        digest.update(path.relative_to(CSRC).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    # Up to here the digest is the same on machines with other GPUs and with another nvcc.
    portable_key = digest.hexdigest()[:16]
    digest.update("\0".join(nvcc_flags).encode())
    if with_cuda:
        digest.update(version_output(find_nvcc()).encode())  # an upgrade of nvcc rebuilds
    return BuildSpec(
        sources=tuple(map(str, sources)),
        include_dirs=(str(CSRC), str(CSRC / "include")),
        cxx_flags=cxx_flags,
        nvcc_flags=nvcc_flags,
        with_cuda=with_cuda,
        key=digest.hexdigest()[:16],
        portable_key=portable_key,
    )


def machine_spec(*, needs_nvcc: bool = True) -> BuildSpec:
    """Return the build for this machine; compiles nothing and creates no CUDA context.

    Args:
        needs_nvcc: Whether the build has CUDA kernels only where nvcc can compile them; ``False`` for a library that
            was compiled elsewhere.
    """
    with_cuda = cuda_reason(needs_nvcc=needs_nvcc) is None
    count = torch.cuda.device_count() if with_cuda and not os.environ.get("TORCH_CUDA_ARCH_LIST") else 0
    return build_spec(
        torch_version=torch.__version__,
        with_cuda=with_cuda,
        capabilities=[torch.cuda.get_device_capability(index) for index in range(count)],
    )


def cuda_reason(*, needs_nvcc: bool = True) -> str | None:
    """Return why a build for this machine has no CUDA kernels, or ``None`` if it has them; see :func:`machine_spec`."""
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    if not torch.cuda.is_available() and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return "no CUDA device, and TORCH_CUDA_ARCH_LIST does not say what to build for"
    if needs_nvcc and find_nvcc() is None:
        return "no nvcc on PATH, in CUDA_HOME or from pip (nvidia-cuda-nvcc)"
    return None


def arch_flags(capabilities: Iterable[tuple[int, int]] = (), arch_list: str | None = None) -> tuple[str, ...]:
    """Return the ``-gencode`` flags of nvcc; torch adds none of its own when they are given.

    torch's parser of ``TORCH_CUDA_ARCH_LIST`` takes ``9.0`` literally, which cannot compile wgmma, and DeepSpeed's
    raises on ``9.0a``.

    Args:
        capabilities: Compute capabilities of this machine's devices.
        arch_list: The value of ``TORCH_CUDA_ARCH_LIST``, such as ``"8.0;9.0a+PTX"``; it overrides the devices.
    """
    if arch_list and arch_list.strip():
        # "8.0;9.0a+PTX": 80 and 90a
        wanted = [entry.split("+")[0].replace(".", "") for entry in re.split(r"[;\s,]+", arch_list.strip())]
    else:
        wanted = [f"{major}{minor}" for major, minor in capabilities]
    names = []
    for name in wanted:
        if name.rstrip("af").isdigit() and int(name.rstrip("af")) >= _OLDEST_ARCH:
            names.append(_ARCH_SPECIFIC.get(name, name))
    # 80, 90a, 100a: by number and not by text. The suffixes are a (this architecture) and f (its family).
    chosen = sorted(set(names), key=lambda name: (int(name.rstrip("af")), name)) or list(_DEFAULT_ARCHS)
    return tuple(f"-gencode=arch=compute_{name},code=sm_{name}" for name in chosen)
