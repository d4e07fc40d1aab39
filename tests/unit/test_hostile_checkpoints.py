"""Indexes and headers that somebody made to cost much are refused with a typed error, in bounded time and memory."""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from deepspeed_muon import __main__ as cli
from deepspeed_muon.checkpoint import consolidate, load_index, restore
from deepspeed_muon.checkpoint.files import load_pickle
from deepspeed_muon.checkpoint.index import FORMAT, INDEX_NAME, sealed_json
from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.tools.convert import consolidate_files, convert_to_universal, verify_folder
from tests.support import training
from tests.support.checkpoints import FILE, write_set

# Of processor time and of memory beyond that of the imported packages. Each refusal takes at most a second of a core;
# thirty times that is exceeded on no machine, but by work that grows with the square of a file.
SECONDS, MEGABYTES = 30, 256


def replace_header(shard: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace the header of a shard, and let size and checksum in the index fit."""
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + length])
    content = len(header).to_bytes(8, "little") + header + content[8 + length :]
    shard.write_bytes(content)
    index = shard.with_name(INDEX_NAME)
    document = json.loads(index.read_text())
    document["files"][FILE] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    index.write_bytes(sealed_json(document))


def outcome(folder: Path) -> str:
    """Verify a set in a child process with limited memory and time; return how that ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = "accepted"
        try:
            with open("/proc/self/statm") as file:
                now = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + (MEGABYTES << 20),) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            verify_folder(folder)
        except CheckpointError as error:
            said = f"refused: {str(error)[:300]}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read().decode()
    _, status = os.waitpid(child, 0)
    return said or f"killed by signal {os.WTERMSIG(status)}"


RECORD = '{"shape":[4,3],"algorithm":"muon","step":3,"group":0,"tensors":{"fp32":"x","momentum_buffer":"x"}}'
BEGIN = f'{{"format":"{FORMAT}","version":1,"versions":{{}},"groups":[],'


def joined(texts: Any) -> str:
    return ",".join(texts)


HOSTILE: dict[str, Callable[[], str]] = {
    "as many parameters as are read": lambda: (
        '"parameters":{' + joined(f'"p{i}":{RECORD}' for i in range(79_000)) + "}}"
    ),
    "depth": lambda: "[" * 30_000_000,
    "a long number": lambda: '"version":' + "1" * 30_000_000 + "}",
    "one key again and again": lambda: '"files":{' + joined('"x":{}' for _ in range(150_000)) + "}}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_indexes(tmp_path: Path, kind: str) -> None:
    (tmp_path / INDEX_NAME).write_text(BEGIN + HOSTILE[kind]())
    assert outcome(tmp_path).startswith("refused")


def test_an_index_of_a_gigabyte(tmp_path: Path) -> None:
    with open(tmp_path / INDEX_NAME, "wb") as file:
        file.truncate(1 << 30)
    assert "larger than" in outcome(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text + b" " * (1 << 20), "its header has"),
        (
            lambda text: text.rstrip()[:-1] + b',"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
            "tensor x of parameter",
        ),
        (lambda text: text.replace(b'"momentum_buffer/w"', b'"fp32/w"'), "is there twice"),
        (lambda text: text.replace(b"[48,96]", b"[0,48]"), "'data_offsets': [0, 48]} by the file's"),
        (lambda text: text.replace(b"F32", b"F64"), "{'dtype': 'F64'"),
        (lambda text: b"[" * 1000, "cannot be read"),
    ],
)
def test_headers(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    replace_header(write_set(tmp_path), change)
    found = outcome(tmp_path)
    assert found.startswith("refused") and message in found, found


def test_escapes_are_shown_as_text(tmp_path: Path, capsys: Any) -> None:
    """In the table of ``inspect``, as JSON, and in errors."""
    write_set(tmp_path, ("a\x1b[31m\x9b31m\nb\u202e",))
    for options in ([], ["--json"]):
        assert not cli.main(["checkpoint", "inspect", str(tmp_path), *options])
    (tmp_path / FILE).unlink()
    assert cli.main(["checkpoint", "verify", str(tmp_path)])
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert "x1b[31m" in text or "u001b[31m" in text
        assert not set(text) & set("\x1b\x9b\u202e")


@pytest.mark.parametrize("path", ["", "a\0b", None, b"folder", 3])
def test_paths_that_name_no_folder(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: consolidate(object(), path),
        lambda: restore(object(), path),
        lambda: consolidate_files(tmp_path, path),
        lambda: convert_to_universal(tmp_path, path),
    ):
        with pytest.raises(CheckpointError, match=r"out_dir|folder"):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["8", 0, -1, True, 2.5])
def test_sizes_that_no_file_has(tmp_path: Path, size: Any) -> None:
    for call in (
        lambda: consolidate(object(), tmp_path, shard_bytes=size),
        lambda: consolidate_files(tmp_path, tmp_path / "out", shard_bytes=size),
    ):
        with pytest.raises(CheckpointError, match="shard_bytes must be"):
            call()


def test_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    write_set(folder)
    assert verify_folder(folder).parameters.keys() == {"w"}
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"udcff") as caught:
        verify_folder(folder)
    str(caught.value).encode()


# ``restore_from: "\0"`` ended in a bare ValueError, a name too long for the file system in a bare OSError.


def test_the_key_may_be_an_object() -> None:
    def restored(**params: Any) -> Any:
        return MuonConfig.from_params(params).restore_from

    short, long = restored(restore_from="a"), restored(restore_from={"path": "a", "progress": False})
    assert (short.path, short.progress, long.path, long.progress) == ("a", True, "a", False)
    assert restored() is None
    again = MuonConfig.from_params({"restore_from": "a"}).model_dump()
    assert restored(**again).path == "a"


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
    return found


def test_odd_paths_on_ranks(ranks: Any, tmp_path: Path) -> None:
    odd_paths(tmp_path)
    for found in ranks(2).run(tried, folder=str(tmp_path)):
        assert [kind for kind, _ in found] == ["CheckpointError"] * 6, found
        assert "null" in found[0][1] and "too long" in found[2][1] and "is no folder" in found[3][1]


class ByName:
    """Pickled as Python 3.11.0 to 3.11.3 pickle members of an enumeration."""

    def __init__(self, kind: Any, name: str) -> None:
        self._reduced = getattr, (kind, name)

    def __reduce__(self) -> Any:
        return self._reduced


def test_of_attributes_only_the_zero_stage_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"zero_stage": ByName(ZeroStageEnum, "gradients")}, path)
    assert load_pickle(path)["zero_stage"] is ZeroStageEnum.gradients
    for kind, name in ((ZeroStageEnum, "__mro__"), (torch.Tensor, "data"), (dict, "fromkeys")):
        torch.save({"zero_stage": ByName(kind, name)}, path)
        with pytest.raises(CheckpointError):
            load_pickle(path)
