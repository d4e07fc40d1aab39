"""Building and loading: never by an import, once for all ranks, never behind a dead process; and running without."""

from __future__ import annotations

import errno
import logging
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.ops import builder, dispatch
from tests.support.native_ops import REPOSITORY

SETTINGS = NsSettings(resolve_schedule("quintic"))


def write_tiny(folder: Path) -> None:
    (folder / "csrc").mkdir()
    (folder / "csrc" / "tiny.cpp").write_text('extern "C" int tiny() { return 7; }\n')


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty folder for builds, for a process that has loaded nothing, of sources of one line."""
    write_tiny(tmp_path)
    monkeypatch.setattr(builder, "CSRC", tmp_path / "csrc")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
    forget = [builder.try_load.cache_clear, builder._outcome.cache_clear]
    for function in forget:
        function()
    yield tmp_path / "builds"
    for function in forget:
        function()


def test_without_a_compiler_auto_warns_once_and_runs_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        orthogonalizer = dispatch.Orthogonalizer("auto")
        assert dispatch.flat_passes("auto").name == "torch"
        assert dispatch.Orthogonalizer("auto").backend == "auto"
    assert len(caplog.records) == 1 and "no C++ compiler" in caplog.text
    assert orthogonalizer(torch.randn(4, 6), settings=SETTINGS).shape == (4, 6)
    with pytest.raises(InstallationError, match="no C\\+\\+ compiler: 'no-such-compiler' is not on PATH"):
        dispatch.Orthogonalizer("ops")
    with pytest.raises(InstallationError):
        dispatch.flat_passes("ops")
    assert dispatch.Orthogonalizer("torch")(torch.randn(4, 6), settings=SETTINGS).shape == (4, 6)


@pytest.mark.native
def test_a_broken_source_is_a_typed_error_with_the_compilers_output(folder: Path) -> None:
    (builder.CSRC / "tiny.cpp").write_text("this is not C++;\n")
    with pytest.raises(InstallationError, match=r"tiny\.cpp:1:1: error"):
        builder.build_and_load()


@pytest.mark.native
def test_a_library_is_built_once_despite_leftovers_of_a_killed_build(folder: Path) -> None:
    path = builder.library_path(with_cuda=False)
    (path.parent / "build").mkdir(parents=True)
    (path.parent / "build" / "lock").touch()  # torch would wait for it for ever
    (path.parent / ".building").touch()
    builder.build_and_load()
    stamp = path.stat().st_mtime_ns
    builder.build_and_load()
    assert path.stat().st_mtime_ns == stamp


def build_tiny(rank: int, world_size: int, *, folder: str) -> int:
    """Build at the same time as the other ranks; return how often this one compiled."""
    compiled: list[Any] = []
    compile_ = builder._compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", folder)
        patch.setattr(builder, "CSRC", Path(folder).parent / "csrc")
        patch.setattr(
            builder,
            "_compile",
            lambda *arguments, **options: (compiled.append(arguments), compile_(*arguments, **options)),
        )
        dist.barrier()
        builder.build_and_load()
    return len(compiled)


@pytest.mark.native
def test_ranks_that_build_together_build_once(ranks: Any, tmp_path: Path) -> None:
    """Only the ranks have another folder: a pool that starts builds DeepSpeed's operators into that of this process."""
    write_tiny(tmp_path)
    folder = tmp_path / "builds"
    assert sum(ranks(2).run(build_tiny, folder=str(folder))) == 1


def test_the_lock_dies_with_its_holder_and_waiting_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = builder.library_path(with_cuda=False).parent / ".building"
    lock.parent.mkdir(parents=True)
    code = """
        import sys, time
        from filelock import FileLock
        with FileLock(sys.argv[1]):
            print("held", flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(lock)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    monkeypatch.setattr(builder, "unavailable_reason", lambda: None)
    monkeypatch.setattr(builder, "_build", lambda path, *, with_cuda: path.touch())
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        monkeypatch.setattr(builder, "_WAIT_SECONDS", 0.3)
        with pytest.raises(InstallationError, match="another process has been building"):
            builder.build_and_load()
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
        builder.build_and_load()
        assert builder.library_path(with_cuda=False).exists()
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "free space there, or set TORCH_EXT"),
        (OSError(errno.EROFS, "Read-only file system"), r"\(.*Read-only.*\); set TORCH_EXT"),
        (NotImplementedError("no file locks"), "set TORCH_EXTENSIONS_DIR to a folder on a local disk"),
    ],
    ids=str,
)
def test_a_folder_that_cannot_be_used_is_a_typed_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, remedy: str
) -> None:
    """``ns_backend: auto`` ended training with an OSError in the place of a warning."""

    def build(path: Path, *, with_cuda: bool) -> None:
        raise fault

    monkeypatch.setattr(builder, "unavailable_reason", lambda: None)
    monkeypatch.setattr(builder, "_build", build)
    with pytest.raises(InstallationError, match=remedy):
        builder.load()
    assert builder.try_load() is None


def test_a_folder_that_cannot_be_entered_is_a_typed_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container whose HOME belongs to another user ended training with a PermissionError in place of a warning."""
    # Root enters every folder: a name too long for the file system cannot be looked up either.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder.parent / ("x" * 300)))
    monkeypatch.setattr(builder, "unavailable_reason", lambda: None)
    with pytest.raises(InstallationError, match="set TORCH_EXTENSIONS_DIR"):
        builder.load()
    assert builder.try_load() is None


def test_a_failed_cuda_build_leaves_the_cpu_operators(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU's operators are built in its place, so that it is not tried again before the file is removed."""
    tried: list[bool] = []

    def compile_(path: Path, *, with_cuda: bool) -> None:
        tried.append(with_cuda)
        if with_cuda:
            raise RuntimeError("nvcc: no such file as cuda_runtime.h")
        path.touch()

    with_cuda(monkeypatch, nvcc=True)
    monkeypatch.setattr(builder, "unavailable_reason", lambda: None)
    monkeypatch.setattr(builder, "_compile", compile_)
    monkeypatch.setattr(builder, "_load_library", lambda path: None)
    for expected in ([True, False], []):
        tried.clear()
        builder.build_and_load()
        assert tried == expected and builder.built_library() == builder.library_path(with_cuda=True)
    assert "cuda_runtime.h" in caplog.text


def with_cuda(monkeypatch: pytest.MonkeyPatch, *, nvcc: bool) -> None:
    """Have this process build for sm_90a, with nvcc or without."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(builder, "find_nvcc", lambda: "/usr/bin/true" if nvcc else None)


def test_a_built_library_with_cuda_needs_no_nvcc(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a development image had no CUDA kernels in an image without nvcc: the CPU's were built instead."""
    with_cuda(monkeypatch, nvcc=True)
    cpu, cuda = (builder.library_path(with_cuda=cuda) for cuda in (False, True))
    cpu.parent.mkdir(parents=True)
    cpu.touch()
    assert builder.built_library() is None, "nvcc can build the CUDA kernels"
    with_cuda(monkeypatch, nvcc=False)
    assert builder.built_library() == cpu
    cuda.parent.mkdir(parents=True)
    cuda.touch()
    assert builder.built_library() == cuda


def test_the_toolkit_of_a_script_that_calls_nvcc(tmp_path: Path) -> None:
    real = builder.find_nvcc()
    if real is None:
        pytest.skip("needs nvcc")
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    script.chmod(0o755)
    home = Path(builder.cuda_home(str(script)))
    assert home != tmp_path and (home / "bin" / "nvcc").exists()


def test_the_key_follows_sources_flags_and_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    paths = [builder.library_path(with_cuda=cuda) for cuda in (False, True)]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    paths.append(builder.library_path(with_cuda=True))
    header = builder.CSRC / "include" / "two.h"
    header.parent.mkdir()
    for content in ("int b;", "int c;"):
        header.write_text(content)
        paths.append(builder.library_path(with_cuda=False))
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    assert "-std=c++17" in builder.cxx_flags()
    paths.append(builder.library_path(with_cuda=False))
    assert len(set(paths)) == 6


def test_a_build_without_cuda_has_no_cuda_sources_and_one_with_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    plain, full = (builder.sources(with_cuda=cuda) for cuda in (False, True))
    assert plain and not any(source.parent.name == "cuda" for source in plain) and set(plain) < set(full)
    assert {source.name for source in full} >= {"binding_cuda.cpp", "sym_gemm_sm90.cu"}
    assert "--use_fast_math" not in builder.nvcc_flags()
    assert "-gencode=arch=compute_90a,code=sm_90a" in builder.nvcc_flags()


@pytest.mark.parametrize(
    ("capabilities", "listed", "names"),
    [
        ([(9, 0)], "", ["90a"]),
        ([(8, 0), (8, 6), (8, 0)], "", ["80", "86"]),
        ([(10, 0), (12, 0)], "", ["100a", "120a"]),
        ([(8, 0)], "9.0a", ["90a"]),
        ([(8, 0)], "8.0;9.0+PTX", ["80", "90a"]),
    ],
)
def test_arch_flags(
    capabilities: list[tuple[int, int]], listed: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    expected = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    assert builder.arch_flags(capabilities) == expected
