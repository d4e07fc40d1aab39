"""Runs the real ``.cu`` files of ``ops/csrc/cuda`` on a CPU: g++ compiles them against the machine in this folder.

Only launches and the text of one instruction are replaced, and the two headers of PTX instructions. ``machine.h`` says
what is checked. What it cannot show: the memory model of a GPU, the rounding inside of a tensor core, and time.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.cuda_library import SOURCES, Kernels

HERE = Path(__file__).resolve().parent
ANY_TIME, LATE, EARLY = 0, 1, 2
"""When asynchronous work ends: at any time, only when somebody waits, or as soon as possible."""

_HEADERS = ("ptx.cuh", "ptx_sm90.cuh")
_SHARED = """#include <cuda_runtime.h>
namespace muon { namespace { alignas(1024) [[maybe_unused]] unsigned char shared[2 * 256 * 1024]; } }
"""
_FLAGS = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-mf16c",
    "-mfma",
    "-ffp-contract=off",
    "-D__CUDA_ARCH_FEAT_SM90_ALL",
    "-w",
]


class Bench(Kernels):
    """The launchers on the machine; a mistake that it finds is raised."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.folder = path.parent
        self.library.bench_error.restype = ctypes.c_char_p
        self.library.bench_configure.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_uint64]

    def configure(self, *, processors: int = 4, major: int = 9, mode: int = ANY_TIME, seed: int = 1) -> None:
        """Choose the GPU, when asynchronous work ends, and the order of everything."""
        self.library.bench_configure(processors, major, mode, seed)

    def _checked(self, status: int) -> int:
        if found := self.library.bench_error().decode():
            raise AssertionError(found)
        return super()._checked(status)


def unavailable() -> str | None:
    """Return why the bench cannot be built here, or ``None``."""
    if platform.machine() != "x86_64":
        return "the bench's fibres are for x86-64"
    return None if shutil.which("g++") else "needs g++"


def build(folder: Path, mutation: Mapping[str, str] | None = None, *, beside: Path | None = None) -> Bench:
    """Compile the kernels and the machine into ``folder``.

    Args:
        folder: An empty folder.
        mutation: Text of the sources and what takes its place, to plant a defect; each must be found.
        beside: The folder of another build; what is equal there is not compiled again.
    """
    mutation = dict(mutation or {})
    sources = _translated(folder, mutation)

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        if beside is not None and _equal(source, folder, beside):
            return beside / target.name
        command = ["g++", *_FLAGS, f"-I{HERE}", "-x", "c++", "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return target

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, [*sources, HERE / "machine.cpp"]))
    library = folder / "libmuon_bench.so"
    subprocess.run(["g++", "-shared", *map(str, objects), "-o", str(library)], check=True, timeout=120)
    return Bench(library)


def _equal(source: Path, folder: Path, beside: Path) -> bool:
    """Return whether a source and all headers of a build are those of another build."""
    if source.parent == HERE:
        return True
    files = [source, *folder.glob("*/*.h"), *folder.glob("*/*.cuh")]
    return all(file.read_bytes() == (beside / file.relative_to(folder)).read_bytes() for file in files)


def _translated(folder: Path, mutation: Mapping[str, str]) -> list[Path]:
    """Write the sources with launches and ``mma.sync`` as calls of the machine; return those to compile."""
    unused = set(mutation)
    found: list[Path] = []
    for part, pattern in (("include", "*.h"), ("cuda", "*.cu"), ("cuda", "*.cuh")):
        (folder / part).mkdir(exist_ok=True)
        for source in sorted((SOURCES.parent / part).glob(pattern)):
            if source.name in _HEADERS:
                shutil.copy(HERE / source.name, folder / part)
                continue
            text = source.read_text()
            for old, new in mutation.items():
                if old in text:
                    unused.discard(old)
                    text = text.replace(old, new)
            target = folder / part / source.name
            target.write_text(_translate(text) if part == "cuda" else text)
            if source.suffix == ".cu":
                target.write_text(_SHARED + target.read_text())
                found.append(target)
    assert not unused, f"not in the sources: {unused}"
    return found


def _translate(text: str) -> str:
    launches = text.count("<<<")
    cluster = 2 if "__cluster_dims__(2, 1, 1)" in text else 1
    text, count = re.subn(
        r"(\w+(?:<T>)?)<<<([^>]*?), stream>>>\(", rf"bench::start<{cluster}>(muon::shared, \2, \1, ", text
    )
    assert count == launches
    text = re.sub(
        r'asm volatile\(\s*"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\..*?"r"\(b1\)\);',
        lambda match: f"bench::multiply_16x8x16(d, a, b0, b1, {str(match[1] == 'f16').lower()});",
        text,
        flags=re.DOTALL,
    )
    assert "asm volatile" not in text
    return text
