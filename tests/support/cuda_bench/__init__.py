"""Runs the real ``.cu`` files of ``ops/csrc/cuda`` on a CPU: g++ compiles them against the machine in this folder.

Only launches are replaced, and the two headers of PTX instructions. ``machine.h`` says
what is checked. What it cannot show: the memory model of a GPU, the rounding inside of a tensor core, and time.

The binding to torch (:func:`build_binding`) runs on tensors of the CPU; ``c10/cuda`` stands for torch's guards and
streams, and the machine refuses a launch on another device than that of its stream.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.ops.builder import cxx_flags
from tests.support.cuda_library import SOURCES, Blocks, Fragment, Kernels
from tests.support.native_ops import REPOSITORY

MACHINE = Path(__file__).resolve().parent
LIBRARY = "libmuon_bench.so"
ANY_TIME, LATE, EARLY = 0, 1, 2
"""When asynchronous work ends: at any time, only when somebody waits, or as soon as possible."""

_HEADERS = ("ptx.cuh", "ptx_sm90.cuh")
_SHARED = """#include <cuda_runtime.h>
namespace muon { namespace { alignas(1024) [[maybe_unused]] unsigned char shared[256 * 1024]; } }
"""
_FLAGS = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-mf16c",
    "-mfma",
    "-ffp-contract=off",
    "-fno-gnu-unique",  # else all benches of a process share what a function remembers
    "-D__CUDA_ARCH_FEAT_SM90_ALL",
    "-w",
]


class Bench(Kernels):
    """The launchers on the machine; a mistake that it finds is raised."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.folder = path.parent
        self.library.bench_error.restype = ctypes.c_char_p
        self.library.bench_configure.argtypes = [
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_int,
        ]
        self.library.bench_blocks.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        self.library.bench_operand.argtypes = [
            ctypes.c_void_p,
            *5 * [ctypes.c_int64],
            ctypes.c_int,
            ctypes.c_int,
        ]

    def configure(
        self,
        *,
        processors: int = 4,
        major: int = 9,
        mode: int = ANY_TIME,
        seed: int = 1,
        second_major: int = 9,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """Choose the GPU, when asynchronous work ends, and the order of everything.

        Args:
            processors: Multiprocessors.
            major: Compute capability.
            mode: :data:`ANY_TIME`, :data:`LATE` or :data:`EARLY`.
            seed: Of every random choice.
            second_major: Compute capability of the second device; the first one becomes the current one.
            blocks: The first block of each launch that runs, and how many do; ``None`` for all.
        """
        self._counters.clear()  # a launch of which some blocks alone ran left its counter where it was
        self.library.bench_configure(processors, major, mode, seed, second_major)
        if blocks is not None:
            self.library.bench_blocks(*blocks)

    def sym_gemm(self, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, **scalars: float) -> int:
        """Run the kernel, which may access its operands and no other memory."""
        with self._only([a, b] if c is None else [a, b, c], [d, self.counter(d.device)]):
            return super().sym_gemm(a, b, c, d, **scalars)

    def momentum_pack(self, fragments: Sequence[Fragment], **options: Any) -> int:
        """Run the pass; what it takes in vectors lies in the fragments."""
        with self._only_fragments(fragments, 0, 2):
            return super().momentum_pack(fragments, **options)

    def momentum_pack_int8(
        self, fragments: Sequence[Fragment], blocks: Sequence[Blocks], **options: Any
    ) -> int:
        """Run the pass; what it takes in vectors lies in the fragments."""
        with self._only_fragments(fragments, 0, 2):
            return super().momentum_pack_int8(fragments, blocks, **options)

    def unpack_apply(self, fragments: Sequence[Fragment], **options: Any) -> int:
        """Run the pass; what it takes in vectors lies in the fragments."""
        with self._only_fragments(fragments, 0):
            return super().unpack_apply(fragments, **options)

    def divide_transposed(self, x: Tensor, norms: Tensor, out: Tensor) -> int:
        """Run the pass, which may read its matrices, write its result, and access no other memory."""
        with self._only([x], [out]):
            return super().divide_transposed(x, norms, out)

    def squares(self, x: Tensor, sums: Tensor) -> int:
        """Run the pass, which may read its matrices, write its sums, and access no other memory."""
        with self._only([x], [sums]):
            return super().squares(x, sums)

    def _only_fragments(self, fragments: Sequence[Fragment], *written: int) -> AbstractContextManager[None]:
        """Let launches read the first two tensors of each fragment, and write those of these numbers."""
        of_fragments = [tensors for tensors, _ in fragments]
        read = [tensor for tensors in of_fragments for tensor in tensors[:2]]
        return self._only(read, [tensors[number] for tensors in of_fragments for number in written])

    @contextmanager
    def _only(self, read: Iterable[Tensor], written: Iterable[Tensor]) -> Iterator[None]:
        """Let launches access these tensors alone, of one or three dimensions."""
        for tensors, may in ((read, (1, 0)), (written, (0, 1))):
            for tensor in tensors:
                matrices, rows, row = (1, 1, *tensor.shape)[-3:]
                matrix_stride, row_stride = (0, 0, *tensor.stride())[-3:-1]
                sizes = ((row - 1) * tensor.stride(-1) + 1, row_stride, matrix_stride)
                in_bytes = [size * tensor.element_size() for size in sizes]
                self.library.bench_operand(
                    tensor.data_ptr(), in_bytes[0], rows, matrices, *in_bytes[1:], *may
                )
        try:
            yield
        finally:
            self.library.bench_forget()

    def raise_mistake(self) -> None:
        """Raise what the machine has found since it was configured, if anything."""
        if mistake := self.library.bench_error().decode():
            raise AssertionError(mistake)

    def _checked(self, status: int) -> int:
        self.raise_mistake()
        return super()._checked(status)


class Binding:
    """The operators of ``binding_cuda.cpp`` and ``iteration.cpp`` on tensors of the CPU, which count as on device 0."""

    def __init__(self, bench: Bench, operators: Any) -> None:
        self.bench = bench
        self._operators = operators

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(self._operators, name)

        def run(*arguments: Any) -> Any:
            result = operator(*arguments)
            self.bench.raise_mistake()
            return result

        return run


def unavailable() -> str | None:
    """Return why the bench cannot be built here, or ``None``."""
    if platform.machine() != "x86_64":
        return "the bench's fibres are for x86-64"
    return None if shutil.which("g++") else "needs g++"


def unchanged() -> Bench:
    """Return the unchanged kernels, compiled once for each state of the sources by the first process that asks."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(repr((_FLAGS, compiler, torch.__version__)).encode())
    for source in sorted((*MACHINE.rglob("*"), *SOURCES.parent.rglob("*"))):
        if source.suffix in (".cu", ".cuh", ".cpp", ".h", ".py"):
            digest.update(source.read_bytes())
    with _locked(REPOSITORY / ".cache" / "cuda_bench" / digest.hexdigest()[:16]) as folder:
        return Bench(folder / LIBRARY) if (folder / LIBRARY).exists() else build(folder)


def unchanged_binding(bench: Bench) -> Binding:
    """Return the unchanged binding, compiled as :func:`unchanged` kernels are."""
    with _locked(bench.folder / "binding") as folder:
        return build_binding(folder, bench)


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Make a folder, and keep other processes out of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield folder


def build(
    folder: Path,
    mutation: Mapping[str, str] | None = None,
    *,
    beside: Path | None = None,
    only: str | None = None,
) -> Bench:
    """Compile the kernels and the machine into ``folder``.

    Args:
        folder: An empty folder.
        mutation: Text of the sources and what takes its place, to plant a defect; each must be found.
        beside: The folder of another build; what is equal there is not compiled again.
        only: The one source that is compiled with the mutation, where a header has it; the others are taken from
            ``beside``.
    """
    mutation = dict(mutation or {})
    sources = _translated(folder, mutation)

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        if beside is not None and (_equal(source, folder, beside) or only not in (None, source.stem)):
            return beside / target.name
        _compile(["g++", *_FLAGS, f"-I{MACHINE}", "-x", "c++", "-c", str(source)], target)
        return target

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, [*sources, MACHINE / "machine.cpp"]))
    # Of a function in a header the linker takes the first one.
    objects.sort(key=lambda path: path.parent != folder)
    library = folder / LIBRARY
    _compile(["g++", "-shared", *map(str, objects)], library)
    return Bench(library)


BINDING = ("iteration", "binding_cuda")
"""The sources of :func:`build_binding`."""


def build_binding(folder: Path, bench: Bench, mutation: Mapping[str, str] | None = None) -> Binding:
    """Compile the CUDA binding, and the iteration over its products, into ``folder``.

    They are one translation unit, because the headers of torch take most of the time. The operators are registered for
    the CPU, in a namespace of their own, with the schemas of ``binding.cpp``.

    Args:
        folder: An empty folder, or one with this binding.
        bench: Runs the kernels.
        mutation: As for :func:`build`.
    """
    csrc, namespace = SOURCES.parent, f"muon_bench_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    text = "".join((csrc / "cuda" / f"{name}.cpp").read_text() for name in BINDING)
    for old, new in (mutation or {}).items():
        assert old in text, f"not in the sources: {old}"
        text = text.replace(old, new)
    registrations = re.findall(
        r"^TORCH_LIBRARY(?:_IMPL)?\(.*?^}\n", (csrc / "binding.cpp").read_text(), re.DOTALL | re.MULTILINE
    )
    for registration in registrations:
        if "deepspeed_muon, CPU" not in registration:
            text += registration
    text = re.sub(r'(?<=\(|")deepspeed_muon(?=,|::)', namespace, text).replace(", CUDA, m)", ", CPU, m)")
    source, library = folder / "binding.cpp", folder / "libmuon_binding.so"
    if not library.exists():
        source.write_text(text)
        _compile_binding(source, library, bench)
    torch.ops.load_library(str(library))
    return Binding(bench, getattr(torch.ops, namespace))


def _compile_binding(source: Path, library: Path, bench: Bench) -> None:
    from torch.utils import cpp_extension  # slow to import

    (standard,) = (flag for flag in cxx_flags() if flag.startswith("-std"))
    include = [MACHINE, SOURCES.parent, SOURCES, *cpp_extension.include_paths()]
    command = ["g++", standard, "-O1", "-fPIC", "-shared", "-w", str(source)]
    command += [f"-I{path}" for path in include] + [f"-L{path}" for path in cpp_extension.library_paths()]
    _compile(
        [*command, str(bench.folder / LIBRARY), f"-Wl,-rpath,{bench.folder}", "-ltorch_cpu", "-lc10"], library
    )


def _compile(command: Sequence[str], target: Path) -> None:
    """Run a compiler; a target that is there is complete, whatever ended an earlier one."""
    unfinished = target.with_suffix(".unfinished")
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])  # no AssertionError, which would count as a defect found
    unfinished.rename(target)


def _equal(source: Path, folder: Path, beside: Path) -> bool:
    """Return whether a source and all headers of a build are those of another build."""
    if source.parent == MACHINE:
        return True
    files = [source, *folder.glob("*/*.h"), *folder.glob("*/*.cuh")]
    return all(file.read_bytes() == (beside / file.relative_to(folder)).read_bytes() for file in files)


def _translated(folder: Path, mutation: Mapping[str, str]) -> list[Path]:
    """Write the sources with launches as calls of the machine; return those to compile."""
    unused = set(mutation)
    sources: list[Path] = []
    for folder_name, pattern in (("include", "*.h"), ("cuda", "*.cu"), ("cuda", "*.cuh")):
        (folder / folder_name).mkdir(exist_ok=True)
        for source in sorted((SOURCES.parent / folder_name).glob(pattern)):
            if source.name in _HEADERS:
                shutil.copy(MACHINE / source.name, folder / folder_name)
                continue
            text = source.read_text()
            for old, new in mutation.items():
                if old in text:
                    unused.discard(old)
                    text = text.replace(old, new)
            target = folder / folder_name / source.name
            target.write_text(_translate(text) if folder_name == "cuda" else text)
            if source.suffix == ".cu":
                target.write_text(_SHARED + target.read_text())
                sources.append(target)
    assert not unused, f"not in the sources: {unused}"
    return sources


def _translate(text: str) -> str:
    launches = text.count("<<<")
    text, count = re.subn(
        r"(\w+(?:<T>)?)<<<([^>]*?), stream>>>\(", r"bench::start(muon::shared, \2, stream, \1, ", text
    )
    assert count == launches
    assert "asm volatile" not in text
    return text
