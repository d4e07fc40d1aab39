r"""``restore_from: "\0"`` ended in a bare ValueError, a name too long for the file system in a bare OSError."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from deepspeed_muon.checkpoint import load_index, restore
from deepspeed_muon.checkpoint.consolidate import consolidate_files
from deepspeed_muon.checkpoint.offline import verify_folder
from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import CheckpointError, ConfigError
from tests.support import training


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("\0", "restore_from: holds a NUL character"),
        ({"path": "a\0b"}, "restore_from: holds a NUL character"),
        ("", "restore_from.path"),
        ({}, "restore_from.path"),
        (3, "restore_from: must be a path"),
        (["a"], "restore_from: must be a path"),
        ({"path": "a", "progres": False}, "did you mean 'progress'"),
        ({"path": "a", "progress": "no"}, "restore_from.progress"),
        ({"path": 3}, "restore_from.path"),
    ],
)
def test_the_key(value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MuonConfig.from_params({"restore_from": value})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_key_may_be_an_object() -> None:
    short = MuonConfig.from_params({"restore_from": "run/step1"}).restore_from
    long = MuonConfig.from_params({"restore_from": {"path": "run/step1", "progress": False}}).restore_from
    assert short is not None and short.path == "run/step1" and short.progress
    assert long is not None and long.path == "run/step1" and not long.progress
    assert MuonConfig.from_params({}).restore_from is None
    again = MuonConfig.from_params(MuonConfig.from_params({"restore_from": "x"}).model_dump())
    assert again.restore_from is not None and again.restore_from.path == "x"


def odd_paths(folder: Path) -> list[Any]:
    (folder / "file").write_text("x")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "tagged").mkdir()
    (folder / "tagged" / "latest").write_bytes(b"\xff\xfe")
    (folder / "linked").mkdir()
    (folder / "linked" / "latest").symlink_to("/dev/zero")
    names = ["a" * 300, "/".join(["a"] * 3000), "file", "file/below", "loop", "tagged", "linked", "gone"]
    return ["\0", "\ud800", None, 3, *(str(folder / name) for name in names)]


def test_odd_paths_offline(tmp_path: Path) -> None:
    for path in odd_paths(tmp_path):
        for call in (verify_folder, lambda path: consolidate_files(path, tmp_path / "out")):
            with pytest.raises(CheckpointError):
                call(path)
        if isinstance(path, str):
            with pytest.raises(CheckpointError):
                load_index(path)


def tried(rank: int, world_size: int, *, folder: str) -> list[list[str]]:
    engine = training.make_engine(training.ds_config(1))
    found = []
    for path in ["\0", None, *(os.path.join(folder, name) for name in ("a" * 300, "file", "loop", "tagged"))]:
        try:
            restore(engine, path)  # type: ignore[arg-type]
        except Exception as error:
            found.append([type(error).__name__, str(error)])
    engine.destroy()
    return found


def test_odd_paths_on_ranks(ranks: Any, tmp_path: Path) -> None:
    odd_paths(tmp_path)
    for found in ranks(2).run(tried, folder=str(tmp_path)):
        assert [kind for kind, _ in found] == ["CheckpointError"] * 6, found
        assert "null" in found[0][1] and "too long" in found[2][1] and "is no folder" in found[3][1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(CheckpointError, match="Permission denied"):
        load_index(tmp_path / "closed")
