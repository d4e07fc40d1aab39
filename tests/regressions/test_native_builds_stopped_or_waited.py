"""A home that cannot be written ended training; a file system without locks made it wait; old builds stayed.

``failed.txt`` of a build survived an upgrade of nvcc, and a wheel with code for other GPUs meant cuBLAS in silence.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.ops import library, machine, toolchain


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the compiler; return the libraries that were made."""
    made: list[Path] = []

    def compile_(spec: toolchain.BuildSpec, target: Path) -> None:
        target.touch()
        made.append(target)

    monkeypatch.setattr(library, "_compile", compile_)
    monkeypatch.setattr(library, "_load_library", lambda path: None)
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: pytest.fail("it waits for nobody"))
    return made


@pytest.mark.native
def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    for _ in range(2):
        library.build_and_load()
    (own,) = compiled
    assert own.exists() and tmp_path not in own.parents
    assert len(caplog.records) == 1 and "temporary folder" in caplog.text


def test_a_full_disk_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ns_backend: auto`` ended training with an OSError in the place of a warning."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(library, "unavailable_reason", lambda: None)
    full = OSError(errno.EDQUOT, "Disk quota exceeded")

    def mkdir(folder: Path, *arguments: Any, **options: Any) -> None:
        if folder.name == "build":
            raise full
        os.makedirs(folder, exist_ok=True)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(InstallationError, match=r"quota exceeded.*; free space there, or set TORCH_EXT"):
        library.build_and_load()


def test_a_failure_that_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it leave an empty ``failed.txt``: that would end later builds without a reason."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(library, "unavailable_reason", lambda: None)
    with_cuda = toolchain.build_spec(torch_version=torch.__version__, with_cuda=True, capabilities=[(9, 0)])
    monkeypatch.setattr(toolchain, "machine_spec", lambda **_: with_cuda)

    def compile_(spec: toolchain.BuildSpec, target: Path) -> None:
        raise InstallationError("the compiler failed")

    def write_text(file: Path, text: str) -> None:
        file.touch()
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(library, "_compile", compile_)
    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(InstallationError, match="the compiler failed"):
        library.build_and_load()
    assert "the compiler failed" in caplog.text and "quota exceeded" in caplog.text
    assert str(library.build_folder(with_cuda)) in caplog.text and "TORCH_EXTENSIONS_DIR" in caplog.text
    assert not list(tmp_path.rglob("failed.txt"))


def refusing(code: int) -> Any:
    def flock(file: Any, operation: int) -> None:
        raise OSError(code, "no")

    return flock


@pytest.mark.native
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Path], code: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(code))
    with machine.locked(tmp_path / "lock", 60.0) as mine:
        assert mine is None
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / str(code)))
    library.build_and_load()
    assert len(compiled) == 1 and tmp_path not in compiled[0].parents


def test_who_waits_asks_less_and_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system gets a request for every try."""
    pauses: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(fcntl, "flock", refusing(errno.EWOULDBLOCK))
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with machine.locked(tmp_path / "lock", 100.0) as mine:
        assert mine is False
    assert max(pauses) == 1.0 and len(pauses) < 120 and sum(pauses) == pytest.approx(100.0)


def test_another_nvcc_is_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for release in ("12.4", "13.0"):
        monkeypatch.setattr(toolchain, "version_output", lambda _, release=release: release)
        spec = toolchain.build_spec(torch_version=torch.__version__, with_cuda=True, capabilities=[(9, 0)])
        keys.add(spec.key)
        plain = toolchain.build_spec(torch_version=torch.__version__, with_cuda=False)
        assert plain.key == plain.portable_key
    assert len(keys) == 2


def test_other_gpus_are_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    specs = [
        toolchain.build_spec(torch_version=torch.__version__, with_cuda=True, capabilities=capabilities)
        for capabilities in ([(8, 0)], [(9, 0)], [(8, 0), (9, 0)])
    ]
    assert len({spec.key for spec in specs}) == 3 and len({spec.portable_key for spec in specs}) == 1


def test_a_library_for_other_gpus_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(*capabilities: tuple[int, int]) -> toolchain.BuildSpec:
        return toolchain.build_spec(torch_version="2.13.0", with_cuda=True, capabilities=capabilities)

    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(library, "PACKAGE", tmp_path)
    (tmp_path / f"{toolchain.prebuilt_name(spec((8, 0)))}.so").touch()
    assert library.prebuilt_path(spec((8, 0))) is not None
    assert library.prebuilt_path(spec((9, 0))) is None
    (tmp_path / f"{toolchain.prebuilt_name(spec((8, 0), (9, 0)))}.so").touch()
    assert library.prebuilt_path(spec((9, 0))) is not None


def test_a_prebuilt_library_with_cuda_needs_no_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel from a development image had no CUDA kernels in an image without nvcc: the CPU's were built instead."""
    monkeypatch.setattr(library, "PACKAGE", tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    loaded: list[Path] = []
    monkeypatch.setattr(library, "_load_library", loaded.append)
    # 1. Built where there is an nvcc.
    with monkeypatch.context() as patched:
        patched.setattr(toolchain, "find_nvcc", lambda: "/usr/bin/true")
        prebuilt = tmp_path / f"{toolchain.prebuilt_name(toolchain.machine_spec())}.so"
    assert prebuilt.stem.endswith("_sm_90a")
    # 2. Loaded where there is none.
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    keys = []
    for content in (b"a", b"b"):
        prebuilt.write_bytes(content)
        spec = library.build_and_load()
        assert loaded[-1] == prebuilt and spec.with_cuda
        keys.append(spec.key)
    assert len({*keys, toolchain.machine_spec().key}) == 3
    # 3. One without CUDA is loaded, too, but not where nvcc could compile the kernels.
    prebuilt.unlink()
    without = tmp_path / f"{toolchain.prebuilt_name(toolchain.machine_spec())}.so"
    without.touch()
    assert not library.build_and_load().with_cuda and loaded[-1] == without
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: "/usr/bin/true")
    assert library.built_library() is None
