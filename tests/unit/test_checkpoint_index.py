"""Sets and paths are untrusted: what is damaged, made up or costly is refused with a typed error, in bounded time."""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
from collections.abc import Callable
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import nn
from torch.optim import lr_scheduler

from deepspeed_muon import __main__ as cli
from deepspeed_muon.checkpoint import consolidate, load_index, restore
from deepspeed_muon.checkpoint.files import exclusive, load_pickle
from deepspeed_muon.checkpoint.index import (
    FORMAT,
    ConsolidatedSource,
    parse_sealed,
    saved_schedule,
    sealed_json,
)
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.tools.convert import consolidate_files, convert_to_universal, verify_folder
from tests.support.checkpoints import FILE, INDEX, edit, save_as_deepspeed, write_set
from tests.support.thinning import each_value

GROUP = {
    "lr": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "adjust_lr_fn": "original",
    "beta2": 0.95,
    "weight_decay_mode": "decoupled",
    "lr_ratio": 1.0,
    "initial_lr": 0.1,
    "algorithm": "muon",
}
W = ("parameters", "w")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A set of one matrix of 4 x 3."""
    loss_scale = {"cur_scale": 256.0, "cur_iter": 3, "last_overflow_iter": -1}
    write_set(tmp_path / "set", groups=[GROUP], loss_scale=loss_scale)
    return tmp_path / "set"


def refused(folder: Path, *needles: str, read: Callable[[Path], Any] = verify_folder) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    for needle in needles:
        assert needle in str(caught.value), str(caught.value)


def set_entry(folder: Path, path: tuple[Any, ...], value: Any) -> None:
    """Change an entry of the index, as somebody who knows how it is sealed."""
    edit(
        folder / INDEX, lambda content: reduce(dict.__getitem__, path[:-1], content).update({path[-1]: value})
    )


def test_the_example_is_accepted(folder: Path) -> None:
    index = verify_folder(folder)
    assert index.groups == [GROUP] and index.parameters["w"].numel == 12


# ---------------------------------------------------------------------------------------------- the index


@pytest.mark.parametrize(
    "name",
    ["../muon-0123456789ab-00000.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", FILE + "\n"],
)
def test_file_names_stay_inside(folder: Path, name: str) -> None:
    def change(content: dict[str, Any]) -> None:
        content["files"] = {name: content["files"][FILE]}
        content["parameters"]["w"]["tensors"] = {"fp32": name, "momentum_buffer": name}

    edit(folder / INDEX, change)
    refused(folder, INDEX, "not the name of a shard", read=load_index)


ROWS = {"tensors": dict.fromkeys(("fp32", "momentum_buffer", "row_second_moment"), FILE), "step": 3}
"""With NorMuon's rows: as many as the record says, there if and only if it says so, and never more than elements."""


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        *(
            ((*W, "shape"), shape, "w")
            for shape in ([1 << 40] * 2, [-4, -3], [0, 3], [4.5, 3], ["4", 3], [1] * 65, [True, 12], None)
        ),
        ((*W, "shape"), [1000, 1000], "its tensors need"),
        (("format",), "pytorch", "format"),
        (("extra",), 1, "extra"),
        ((*W, "algorithm"), "sgd", "algorithm"),
        ((*W, "step"), -1, "step"),
        ((*W, "step"), 10**30, "step"),
        ((*W, "group"), 1, "param group 1"),
        ((*W, "tensors"), {"fp32": FILE}, "holds"),
        ((*W, "tensors"), {"fp32": FILE, "momentum_buffer": FILE.replace("00000", "00001")}, "not among"),
        ((*W, "tensors"), {"fp32": FILE, "momentum_buffer": FILE, "exp_avg": FILE}, "holds"),
        (("files", FILE, "sha256"), "abc", "sha256"),
        (("files", FILE, "bytes"), -1, "bytes"),
        (("files", FILE, "bytes"), 95, "its tensors need 96"),
        ((*W, "rows"), 4, "holds"),
        (W, ROWS | {"rows": 4}, "holds"),
        (W, ROWS | {"row_keys": ["row_second_moment"]}, "holds"),
        (W, ROWS | {"rows": 13, "row_keys": ["row_second_moment"]}, "13 rows of moments do not fit"),
        (W, ROWS | {"rows": 4, "row_keys": ["other"]}, "row_keys"),
        (W, ROWS | {"rows": 4, "row_keys": ["row_second_moment"] * 2}, "row_keys"),
    ],
    ids=str,
)
def test_inconsistencies(folder: Path, path: tuple[str, ...], value: Any, said: str) -> None:
    """Refused before a file is opened."""
    if path == W:
        value = {"shape": [4, 3], "algorithm": "muon", "group": 0, **value}
    set_entry(folder, path, value)
    refused(folder, INDEX, said, read=load_index)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, '{"format": 1}', "\x00"])
def test_not_an_index(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    refused(folder, INDEX)


SETTINGS = [
    *(("lr", value) for value in (1e5, "0.1", None, True)),
    *(("betas", value) for value in ([2, 3], [0.9], [True, False])),
    *(
        ("initial_lr", -1),
        ("lr_ratio", "x"),
        ("weight_decay", -0.1),
        ("momentum", 5),
        ("eps", 0),
        ("beta2", 1),
    ),
    *(("adjust_lr_fn", "mystery"), ("nesterov", 2), ("weight_decay_mode", "sideways")),
]


@pytest.mark.parametrize(("key", "value"), SETTINGS)
def test_settings_pass_the_checks_of_the_configuration(folder: Path, key: str, value: Any) -> None:
    edit(folder / INDEX, lambda content: content["groups"][0].update({key: value}))
    refused(folder, f"param group 0.{key}", "hyperparameters=False")


COUNTERS = product(["global_steps", "global_samples", "skipped_steps"], [-1, 1.5, "3", True, 1 << 62])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("cur_scale", 0), ("cur_iter", -3), ("cur_iter", 1.5), ("last_overflow_iter", -2), ("surprise", 1)),
        *each_value(COUNTERS),
    ],
)
def test_progress(folder: Path, key: str, value: Any) -> None:
    """Counters, and the state of the loss scale."""
    is_counter = key.startswith(("global", "skipped"))
    set_entry(folder, ("progress", *(() if is_counter else ("loss_scale",)), key), value)
    refused(folder, key)


def test_every_flipped_bit_is_refused(folder: Path) -> None:
    """And each byte that is gone or doubled, and each cut. What loads, such as another blank, says the same."""
    text = (folder / INDEX).read_bytes()
    good = parse_sealed(text, INDEX)
    loaded = 0
    for position, byte in enumerate(text):
        before, after = text[:position], text[position + 1 :]
        middles = [bytes([byte ^ 1 << bit]) for bit in range(8)] + [b"", bytes([byte, byte])]
        for damaged in (before, *(before + middle + after for middle in middles)):
            try:
                content = parse_sealed(damaged, INDEX)
            except CheckpointError:
                continue
            assert content == good, damaged
            loaded += len(damaged) == len(text)
    assert loaded < len(text) / 10


def test_a_missing_checksum_is_refused(folder: Path) -> None:
    path = folder / INDEX
    content = json.loads(path.read_text())
    checksum = content.pop("sha256")
    path.write_text(json.dumps(content))
    refused(folder, "checksum is missing")
    path.write_text(json.dumps({**content, "sha256": checksum, "version": 2}))
    refused(folder, "version 2; this release reads version 3")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"lr": 0.1', b'"lr": NaN', "NaN is not a finite number"),
        (b'"lr": 0.1', b'"lr": 1e999', "1e999 is not a finite number"),
        (b'"lr": 0.1', b'"lr": 0.2, "lr": 0.1', "the key 'lr' is there 2 times"),
        (b'"w": {', b'"w": {}, "w": {', "the key 'w' is there 2 times"),
        (b'"version": 3', b'"version": 3, "version": 3', "the key 'version' is there 2 times"),
    ],
)
def test_json_that_no_checkpoint_may_have(folder: Path, old: bytes, new: bytes, said: str) -> None:
    """Two parameters of one name: the last one won. A rate of NaN came through. The checksum is right."""
    text, seal, _ = (folder / INDEX).read_bytes().rpartition(b',\n "sha256": "')
    assert old in text
    text = text.replace(old, new, 1)
    (folder / INDEX).write_bytes(text + seal + hashlib.sha256(text).hexdigest().encode() + b'"\n}\n')
    refused(folder, INDEX, said)


# ---------------------------------------------------------------------------------------------- what costs much

# Of processor time and of memory beyond that of the imported packages. Each refusal takes at most a second of a core;
# thirty times that is exceeded on no machine, but by work that grows with the square of a file.
SECONDS, MEGABYTES = 30, 256


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
HOSTILE: dict[str, Callable[[], str]] = {
    "parameters": lambda: '"parameters":{' + ",".join(f'"p{i}":{RECORD}' for i in range(79_000)) + "}}",
    "depth": lambda: "[" * 30_000_000,
    "a long number": lambda: '"version":' + "1" * 30_000_000 + "}",
    "one key again and again": lambda: '"files":{' + ",".join(['"x":{}'] * 150_000) + "}}",
}


@pytest.mark.parametrize("kind", [*HOSTILE, "a gigabyte"])
def test_indexes(tmp_path: Path, kind: str) -> None:
    path = tmp_path / INDEX
    if kind == "a gigabyte":
        path.touch()
        os.truncate(path, 1 << 30)
    else:
        path.write_text(f'{{"format":"{FORMAT}","version":3,"versions":{{}},"groups":[],' + HOSTILE[kind]())
    said = outcome(tmp_path)
    assert said.startswith("refused") and ("larger than" in said or kind != "a gigabyte"), said


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + b" " * (1 << 20),
        lambda text: text.rstrip()[:-1] + b',"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
        lambda text: text.replace(b'"momentum_buffer/w"', b'"fp32/w"'),
        lambda text: text.replace(b"[48,96]", b"[0,48]"),
        lambda text: text.replace(b"F32", b"F64"),
        lambda text: b"[" * 1000,
    ],
)
def test_headers(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Of a shard whose size and checksum in the index fit."""
    content = (folder / FILE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + length])
    content = len(header).to_bytes(8, "little") + header + content[8 + length :]
    (folder / FILE).write_bytes(content)
    record = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    set_entry(folder, ("files", FILE), record)
    said = outcome(folder)
    assert said.startswith("refused") and FILE in said and "by the index; it holds w (fp32)" in said, said


def test_a_sparse_file_is_not_read_to_its_end(folder: Path) -> None:
    """Its size is that of the index, but its tensors are smaller; the checksum of 128 GB took minutes."""
    os.truncate(folder / FILE, 128 << 30)
    set_entry(folder, ("files", FILE, "bytes"), 128 << 30)
    assert "its tensors have" in outcome(folder)


# ---------------------------------------------------------------------------------------------- files and paths


@pytest.mark.time_limit(20)
@pytest.mark.parametrize("name", [INDEX, FILE])
@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "device"])
def test_only_regular_files_are_read(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = folder / name
    path.rename(tmp_path / "elsewhere")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere" if kind == "link" else "/dev/zero")
    refused(folder, name, "not a regular file")


def test_verify_names_tensors_that_are_not_finite(tmp_path: Path, capsys: Any) -> None:
    write_set(tmp_path, momentum=torch.tensor([0.0] * 11 + [math.nan]), groups=[GROUP])
    refused(tmp_path, "1 tensors hold an infinity or NaN: w (momentum_buffer)", "allow_nonfinite")
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "w (momentum_buffer)" in capsys.readouterr().err
    assert cli.main(["checkpoint", "verify", "--allow-nonfinite", str(tmp_path)]) == 0


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


@pytest.mark.time_limit(20)
def test_odd_paths_offline(tmp_path: Path) -> None:
    """A NUL in ``restore_from`` ended in a bare ValueError, a name too long for the file system in an OSError."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("tagged", "linked", "piped"):
        (tmp_path / name).mkdir()
    (tmp_path / "tagged" / "latest").write_bytes(b"\xff\xfe")
    (tmp_path / "linked" / "latest").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "piped" / "latest")
    names = ("a" * 300, "/".join(["a"] * 3000), "file", "file/below", "loop", "tagged", "linked", "gone")
    for path in ("\0", "\ud800", None, 3, *(str(tmp_path / name) for name in (*names, "piped"))):
        for call in (verify_folder, lambda path: consolidate_files(path, tmp_path / "out"), load_index):
            if call is not load_index or isinstance(path, str):
                with pytest.raises(CheckpointError):
                    call(path)


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


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_said_to_be(tmp_path: Path, kept: float) -> None:
    """``Invalid argument`` was all that was said of it."""
    path = tmp_path / "file.pt"
    torch.save({"weight": torch.ones(1000)}, path)
    os.truncate(path, int(kept * path.stat().st_size))
    with pytest.raises(CheckpointError, match=r"file\.pt: its end is cut off"):
        load_pickle(path)


def test_a_schedule_of_rates_in_tensors_is_saved() -> None:
    """It was left out of the set, with a warning, and began anew after a restore."""
    optimizer = Muon(nn.Linear(4, 6), muon_lr=torch.tensor(0.5), adam_lr=torch.tensor(0.25))
    saved = saved_schedule(lr_scheduler.CosineAnnealingLR(optimizer, 6).state_dict())
    assert saved is not None and saved["base_lrs"] == saved["_last_lr"] == [0.5, 0.25]


# ---------------------------------------------------------------------------------------------- without an engine


def test_only_files_of_ours_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is written that no reader takes: such a save ended well, and its set could not be restored."""
    save_as_deepspeed(nn.Linear(4, 3), tmp_path / "step1")
    folder = tmp_path / "set"
    consolidate_files(tmp_path / "step1", folder)
    stay = {"model.safetensors", "muon-notes.safetensors"}
    for name in (*stay, FILE, f".{FILE}.0123456789ab.tmp"):
        (folder / name).write_text("")
    index = consolidate_files(tmp_path / "step1", folder)
    assert {path.name for path in folder.iterdir()} == stay | {INDEX, *index.files}
    monkeypatch.setattr("deepspeed_muon.checkpoint.index.MAX_BYTES", 1000)
    with pytest.raises(CheckpointError, match="bytes, more than the 1000 that are read"):
        sealed_json({"parameters": {str(number): {} for number in range(100)}})


def test_leftovers_of_a_killed_conversion_are_removed(tmp_path: Path) -> None:
    """Only folders of conversions to the same place, and only if no living process holds the lock."""
    save_as_deepspeed(nn.Linear(4, 3), tmp_path / "step1")
    out = tmp_path / "out" / "universal"
    names = (".universal.0123456789ab.tmp", ".universal2.0123456789ab.tmp")
    killed, of_another = folders = [out.parent / name for name in names]
    for folder in folders:
        (folder / "zero").mkdir(parents=True)
    with (
        exclusive(out.parent / ".universal.lock", "busy"),
        pytest.raises(CheckpointError, match="another process is making"),
    ):
        convert_to_universal(tmp_path / "step1", out)
    assert killed.exists() and not out.exists()
    convert_to_universal(tmp_path / "step1", out)
    assert not killed.exists() and of_another.exists() and (out / "zero").is_dir()


def test_a_name_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    """The temporary file of ``latest_universal`` stayed beside it."""
    save_as_deepspeed(nn.Linear(4, 3), tmp_path / "step1")
    (tmp_path / "latest_universal").mkdir()
    with pytest.raises(CheckpointError, match="latest_universal"):
        convert_to_universal(tmp_path / "step1", tmp_path / "u")
    assert {path.name for path in tmp_path.iterdir()} == {"step1", "u", "latest_universal"}


def test_a_set_of_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """Each file is read again after all of them were opened."""
    model = nn.ParameterDict({f"p{number:02d}": torch.full((12,), float(number)) for number in range(80)})
    save_as_deepspeed(model, tmp_path / "step1")
    index = consolidate_files(tmp_path / "step1", tmp_path / "set", shard_bytes=48)
    assert len(index.files) >= 80
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Descriptors are given out from the lowest free one on: as many as these are free below the limit.
    free = sorted(set(range(4096)) - {int(name) for name in os.listdir("/proc/self/fd")})[:32]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1, limits[1]))
    try:
        source = ConsolidatedSource(tmp_path / "set")
        assert source.verify(0, 1) == []
        values = [source.read(name, "fp32", 5, 1).item() for name in model]
        source.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert values == [float(value[5]) for value in model.state_dict().values()]
