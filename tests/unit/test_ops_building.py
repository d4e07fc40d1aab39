"""Building and loading: never by an import, once for all ranks, never behind a dead process; and running without."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.ops import dispatch, library, toolchain
from tests.support.harness import run_command
from tests.support.native_ops import REPOSITORY

SETTINGS = NsSettings(resolve_schedule("quintic"))


def python(code: str, seconds: float = 250.0, **environment: str) -> None:
    """Run a program in another process; it must end with 0."""
    run_command([sys.executable, "-c", textwrap.dedent(code)], timeout=seconds, env=environment)


def write_source(folder: Path, text: str = 'extern "C" int tiny() { return 7; }\n') -> Path:
    """Return a new folder of sources in another one."""
    (folder / "csrc").mkdir()
    (folder / "csrc" / "tiny.cpp").write_text(text)
    return folder / "csrc"


@pytest.fixture
def without_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(library, "_operators", None)
    monkeypatch.setattr(library, "_failure", None)


def test_importing_neither_builds_nor_loads(tmp_path: Path) -> None:
    code = """
        import sys
        import deepspeed_muon, deepspeed_muon.ops.library
        assert not deepspeed_muon.ops.library.loaded()
        assert "torch.utils.cpp_extension" not in sys.modules
    """
    python(code, TORCH_EXTENSIONS_DIR=str(tmp_path), CXX="no-such-compiler")
    assert not list(tmp_path.iterdir())


@pytest.mark.native
def test_a_built_library_is_loaded_without_tools_of_the_build() -> None:
    """They would cost a process seconds: no program is started, and torch's build code is not imported."""
    library.load()
    code = """
        import sys
        from deepspeed_muon.ops import library
        import torch
        started = []
        sys.addaudithook(lambda event, args: started.append(args) if event == "subprocess.Popen" else None)
        library.load()
        assert torch.ops.deepspeed_muon.unpack_apply_
        assert not started and "torch.utils.cpp_extension" not in sys.modules, started
    """
    python(code)


def test_without_a_compiler_auto_warns_once_and_runs_torch(
    without_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        chosen = dispatch.Orthogonalizer("auto")
        assert dispatch.flat_passes("auto").name == "torch"
        assert dispatch.Orthogonalizer("auto").backend == "auto"
    assert len(caplog.records) == 1 and "no C++ compiler" in caplog.text
    assert chosen(torch.randn(4, 6), settings=SETTINGS).shape == (4, 6)
    assert chosen.report()[0]["ran"].startswith("torch ")


def test_without_a_compiler_ops_is_a_typed_error(without_compiler: None) -> None:
    with pytest.raises(InstallationError, match="no C\\+\\+ compiler: 'no-such-compiler' is not on PATH"):
        dispatch.Orthogonalizer("ops")
    with pytest.raises(InstallationError):
        dispatch.flat_passes("ops")
    assert dispatch.Orthogonalizer("torch")(torch.randn(4, 6), settings=SETTINGS).shape == (4, 6)


@pytest.mark.native
def test_a_broken_source_is_a_typed_error_with_the_compilers_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "CSRC", write_source(tmp_path, "this is not C++;\n"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(InstallationError, match=r"tiny\.cpp:1:1: error"):
        library.build_and_load()


@pytest.mark.native
def test_a_tiny_library_is_built_once_and_a_leftover_lock_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "CSRC", write_source(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = library.library_path(toolchain.machine_spec())
    (path.parent / "build").mkdir(parents=True)
    (path.parent / "build" / "lock").touch()  # what torch leaves when a build is killed
    (path.parent / ".building").touch()
    library.build_and_load()
    assert path.exists()
    stamp = path.stat().st_mtime_ns
    library.build_and_load()
    assert path.stat().st_mtime_ns == stamp


def build_tiny(rank: int, world_size: int, *, folder: str) -> int:
    """Build at the same time as the other ranks; return how often this one compiled."""
    compiled: list[Any] = []
    real, os.environ["TORCH_EXTENSIONS_DIR"] = library._compile, folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "CSRC", Path(folder) / "csrc")
        patch.setattr(library, "_compile", lambda *args: (compiled.append(args), real(*args)))
        dist.barrier()
        library.build_and_load()
    return len(compiled)


@pytest.mark.native
def test_ranks_that_build_at_once_build_once(ranks: Any, tmp_path: Path) -> None:
    write_source(tmp_path)
    assert sum(ranks(3).run(build_tiny, folder=str(tmp_path))) == 1


def test_the_lock_dies_with_its_holder_and_waiting_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        import sys, time
        from pathlib import Path
        from deepspeed_muon.ops import library
        with library._exclusive(Path(sys.argv[1])):
            print("held", flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        assert holder.stdout is not None
        assert any("held" in line for line in holder.stdout)
        monkeypatch.setattr(library, "WAIT_SECONDS", 0.3)
        with pytest.raises(InstallationError, match="DS_MUON_BUILD_TIMEOUT"), library._exclusive(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
        for _ in range(2):  # it is free after use too
            with library._exclusive(tmp_path):
                pass
    finally:
        holder.kill()
        holder.wait()


def test_a_failed_cuda_build_leaves_the_cpu_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU's operators are built alone, and the failed build is not tried again before its folder is removed."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(library, "unavailable_reason", lambda: None)
    with_cuda = toolchain.build_spec(torch_version=torch.__version__, with_cuda=True, capabilities=[(9, 0)])
    monkeypatch.setattr(toolchain, "machine_spec", lambda **_: with_cuda)
    tried: list[bool] = []

    def compile_(spec: toolchain.BuildSpec, target: Path) -> None:
        tried.append(spec.with_cuda)
        if spec.with_cuda:
            raise InstallationError("nvcc: no such file as cuda_runtime.h")
        target.touch()

    loaded: list[Path] = []
    monkeypatch.setattr(library, "_compile", compile_)
    monkeypatch.setattr(library, "_load_library", loaded.append)
    monkeypatch.setattr(library, "_loaded_spec", None)
    monkeypatch.setattr(library, "_failure", None)
    cpu_only = toolchain.build_spec(torch_version=torch.__version__, with_cuda=False)
    for expected in ([True, False], []):
        tried.clear()
        monkeypatch.setattr(library, "_operators", None)
        library.load()
        assert library._loaded_spec is not None and library._loaded_spec.key == cpu_only.key
        assert tried == expected and loaded[-1] == library.library_path(cpu_only)
        assert "cuda_runtime.h" in caplog.text and str(library.build_folder(with_cuda)) in caplog.text
        caplog.clear()


def test_the_toolkit_of_a_script_that_calls_nvcc(tmp_path: Path) -> None:
    real = toolchain.find_nvcc()
    if real is None:
        pytest.skip("needs nvcc")
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    script.chmod(0o755)
    home = Path(toolchain.cuda_home(str(script)))
    assert home != tmp_path and (home / "bin" / "nvcc").exists()


def test_nvcc_of_pip_is_found_behind_that_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path / name))
    programs = [tmp_path / "platlib" / "nvidia" / "cu13" / "bin" / "nvcc", tmp_path / "bin" / "nvcc"]
    for program in programs:
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        assert toolchain.find_nvcc() == str(program)


def test_the_runtime_of_a_toolkit_of_pip_is_linked(tmp_path: Path) -> None:
    """Its wheel has ``lib/libcudart.so.13`` and no other name of it."""
    library, build = tmp_path / "lib" / "libcudart.so.13", tmp_path / "build"
    for folder in (library.parent, build):
        folder.mkdir()

    def link(target: Path, source: str, *flags: str) -> None:
        file = tmp_path / f"{target.name}.c"
        file.write_text(source)
        subprocess.run(["cc", "-shared", "-fPIC", str(file), *flags, "-o", str(target)], check=True)

    assert toolchain.runtime_flags(tmp_path / "without", build) == []
    link(library, "int cudaGetLastError(void) { return 0; }\n", "-Wl,-soname,libcudart.so.13")
    user = "int cudaGetLastError(void); int user(void) { return cudaGetLastError(); }\n"
    for _ in range(2):  # a build that is tried again
        flags = toolchain.runtime_flags(tmp_path, build)
        link(build / "user.so", user, "-Wl,--no-undefined", *flags, "-lcudart")
    library.with_name("libcudart.so").symlink_to(library)
    assert toolchain.runtime_flags(tmp_path, build) == []


def test_the_key_follows_sources_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "one.cpp").write_text("int a;")
    header = tmp_path / "cpu" / "two.h"
    header.write_text("int b;")
    monkeypatch.setattr(toolchain, "CSRC", tmp_path)

    def spec_of(torch_version: str) -> toolchain.BuildSpec:
        return toolchain.build_spec(torch_version=torch_version, with_cuda=False)

    older, newer = spec_of("2.6.0+cpu"), spec_of("2.13.0+cpu")
    assert "-std=c++17" in older.cxx_flags and "-std=c++20" in newer.cxx_flags
    assert older.key == spec_of("2.6.0+cpu").key != newer.key
    header.write_text("int c;")
    assert older.key != spec_of("2.6.0+cpu").key


def test_a_build_without_cuda_has_no_cuda_sources_and_one_with_has_all() -> None:
    plain = toolchain.build_spec(torch_version="2.13.0", with_cuda=False)
    assert plain.sources and not plain.nvcc_flags
    assert not any("cuda" in source for source in plain.sources)
    full = toolchain.build_spec(torch_version="2.13.0", with_cuda=True, capabilities=[(9, 0)])
    assert set(plain.sources) < set(full.sources)
    assert {Path(source).name for source in full.sources} >= {"binding_cuda.cpp", "sym_gemm_sm90.cu"}
    assert "--use_fast_math" not in full.nvcc_flags
    assert "-gencode=arch=compute_90a,code=sm_90a" in full.nvcc_flags


@pytest.mark.parametrize(
    ("capabilities", "arch_list", "names"),
    [
        ([(9, 0)], None, ["90a"]),
        ([(8, 0), (8, 6), (8, 0)], None, ["80", "86"]),
        ([(10, 0), (12, 0)], None, ["100a", "120a"]),
        ([(7, 5)], None, ["80", "90a"]),
        ([], None, ["80", "90a"]),
        ([(8, 0)], "9.0a", ["90a"]),
        ([(8, 0)], "8.0;9.0+PTX", ["80", "90a"]),
        ([], "7.0 8.6", ["86"]),
    ],
)
def test_arch_flags(capabilities: list[tuple[int, int]], arch_list: str | None, names: list[str]) -> None:
    expected = tuple(f"-gencode=arch=compute_{name},code=sm_{name}" for name in names)
    assert toolchain.arch_flags(capabilities, arch_list) == expected


@pytest.mark.full
@pytest.mark.time_limit(3600)
def test_a_cold_build_compiles_each_source_once(tmp_path: Path) -> None:
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    variables = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "built"), "CXX": str(compiler)}
    python("from deepspeed_muon.ops import library; library.load()", 3500.0, **variables)
    commands = [line.split() for line in calls.read_text().splitlines()]
    compiled = [word for words in commands if "-c" in words for word in words if word.endswith(".cpp")]
    assert sorted(compiled) == sorted(toolchain.machine_spec().sources)
