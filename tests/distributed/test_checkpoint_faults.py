"""What goes wrong with consolidated checkpoints: an error on every rank, nothing half-loaded, the last one good."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import inspect
import json
import math
import os
import resource
import shutil
import signal
import struct
import sys
import types
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed_muon.checkpoint import consolidate, load_index, restore
from deepspeed_muon.checkpoint.files import exclusive
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.tools.convert import consolidate_files, verify_folder
from tests.support import training
from tests.support.checkpoints import (
    INDEX,
    edit,
    engine_for,
    on_every_stage,
    save,
    train_step,
    trained_for,
)
from tests.support.snapshots import attempted
from tests.support.thinning import full


@pytest.fixture(scope="module")
def good(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    ranks(2).run(save, folder=str(folder), stage=2)
    return folder


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "damaged"))


def refusals(
    rank: int, world_size: int, *, folders: list[Any], stage: int, params: dict[str, Any] | None = None
) -> list[str]:
    """Return why the restore of each folder was refused, after making sure that it changed nothing."""
    engine = trained_for(rank, world_size, stage, 1, seed=7, params=params)
    messages = []
    for folder in folders:
        message, changed = attempted(engine, lambda folder=folder: restore(engine, folder))
        assert not changed
        messages.append(message)
    train_step(engine, 1, rank, world_size)
    return messages


def largest(folder: Path) -> tuple[Path, str]:
    """Return a shard and a parameter that it holds."""
    path = max(folder.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    parameters = load_index(folder).parameters
    return path, next(name for name, record in parameters.items() if path.name in record.tensors.values())


# Each damages a set and returns what the error must say.


def truncate_shard(folder: Path) -> tuple[str, ...]:
    path, name = largest(folder)
    os.truncate(path, path.stat().st_size - 100)
    return path.name, name, "bytes, expected"


def flip_bit(folder: Path) -> tuple[str, ...]:
    path, name = largest(folder)
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)
    return path.name, name, "checksum"


def remove_shard(folder: Path) -> tuple[str, ...]:
    path, name = largest(folder)
    path.unlink()
    return path.name, name, "No such file"


def remove_index(folder: Path) -> tuple[str, ...]:
    (folder / INDEX).unlink()
    return INDEX, "did not finish"


def transpose_in_index(folder: Path) -> tuple[str, ...]:
    edit(folder / INDEX, lambda content: content["parameters"]["lm_head.weight"]["shape"].reverse())
    return "lm_head.weight has shape [29, 16]", "[16, 29]"


def change_setting(folder: Path) -> tuple[str, ...]:
    edit(folder / INDEX, lambda content: content["groups"][0].update(lr=1e9))
    return "param group 0.lr", "hyperparameters=False"


def put_nan(folder: Path) -> tuple[str, ...]:
    """Make a matrix of momentum NaN, and let the checksum of its file agree."""
    parameters = load_index(folder).parameters
    name, record = next((name, record) for name, record in parameters.items() if record.algorithm == "muon")
    path = folder / record.tensors["momentum_buffer"]
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")  # of the tensors, behind the header
    start += json.loads(content[8:start])[f"momentum_buffer/{name}"]["data_offsets"][0]
    values = struct.pack("<f", math.nan) * record.numel
    path.write_bytes(content[:start] + values + content[start + len(values) :])
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(folder / INDEX, lambda content: content["files"][path.name].update(sha256=sha256))
    return "(momentum_buffer)", "allow_nonfinite=True"


# What a file says of itself, and damage to the text of an index: tests/unit/test_checkpoint_index.py.
DAMAGES = [truncate_shard, flip_bit, remove_shard, remove_index, transpose_in_index, change_setting, put_nan]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_damaged_sets(ranks: Any, good: Path, tmp_path: Path, stage: int) -> None:
    folders = [Path(shutil.copytree(good, tmp_path / damage.__name__)) for damage in DAMAGES]
    needles = [damage(folder) for damage, folder in zip(DAMAGES, folders, strict=True)]
    for messages in ranks(2).run(refusals, folders=list(map(str, folders)), stage=stage):
        for message, expected in zip(messages, needles, strict=True):
            assert all(needle in message for needle in expected), message


def restored_with_nan(rank: int, world_size: int, *, folder: str) -> int:
    engine = engine_for(3, seed=7)
    restore(engine, folder, allow_nonfinite=True)
    return sum(
        bool(state.isnan().all()) for state in training.full_states(engine, "momentum_buffer").values()
    )


def test_a_state_with_nan_is_restored_when_asked_for(ranks: Any, damaged: Path) -> None:
    put_nan(damaged)
    assert ranks(2).run(restored_with_nan, folder=str(damaged)) == [1, 1]


def test_paths_that_name_no_set(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    folders = ["\0", None, *(str(tmp_path / name) for name in ("a" * 300, "file", "loop"))]
    for messages in ranks(2).run(refusals, folders=folders, stage=1):
        assert all(messages), messages
        assert "null" in messages[0] and "too long" in messages[2] and "is no folder" in messages[3], messages


def test_another_routing(ranks: Any, good: Path) -> None:
    arguments = {"folders": [str(good)], "stage": 3, "params": {"exclude": ["blocks.1.*"]}}
    needles = ("blocks.1.down.weight goes to adamw", "in the checkpoint to muon", "include / exclude")
    for (message,) in ranks(2).run(refusals, **arguments):
        assert all(needle in message for needle in needles), message


def only_one_sees_it(rank: int, world_size: int, *, folder: str) -> list[str]:
    return refusals(rank, world_size, folders=[folder if rank else folder + "-nowhere"], stage=1)


def test_a_rank_that_does_not_see_the_checkpoint(ranks: Any, good: Path) -> None:
    messages = ranks(2).run(only_one_sees_it, folder=str(good))
    assert all("-nowhere" in message for (message,) in messages)


# ---------------------------------------------------------------------------------------------- faults while saving


def disk_full(rank: int, world_size: int, *, folder: str, stage: int, limits: list[int]) -> list[str]:
    """Save while rank 0 may not write files beyond a number of bytes: ``write`` fails as on a full disk."""
    engine = trained_for(rank, world_size, stage, 1)
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    messages = []
    for step, limit in enumerate(limits, start=1):
        if rank == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, previous[1]))
        try:
            with pytest.raises(CheckpointError) as caught:
                consolidate(engine, folder, shard_bytes=4000)
        finally:
            with contextlib.suppress(ValueError):
                resource.setrlimit(resource.RLIMIT_FSIZE, previous)
        messages.append(str(caught.value))
        train_step(engine, step, rank, world_size)
    return messages


def test_disk_full(ranks: Any, damaged: Path) -> None:
    """In the header, and in the middle of a file; training goes on, and the old checkpoint is untouched."""
    before = {path.name: path.read_bytes() for path in damaged.iterdir()}
    for messages in ranks(2).run(disk_full, folder=str(damaged), stage=3, limits=[0, 100, 3000]):
        for message, file in zip(messages, (".safetensors",) * 3, strict=True):
            assert file in message and "File too large" in message, messages
    assert before == {path.name: path.read_bytes() for path in damaged.iterdir()}


def test_folder_that_cannot_be_made(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    messages = ranks(2).run(disk_full, folder=str(tmp_path / "file" / "out"), stage=1, limits=[1 << 40])
    assert all("cannot be made" in message for (message,) in messages)


def save_beside_checkpoints(rank: int, world_size: int, *, folder: str) -> list[str]:
    """Save into folders of other checkpoints, then restore from one that is not there."""
    engine, messages = engine_for(1, seed=0), []
    for name in ("trainer_state.json", "model.safetensors", "pytorch_model-00001-of-00002.bin"):
        location = Path(folder, name.partition(".")[0])
        location.mkdir(exist_ok=True)
        (location / name).touch()
        messages.append(
            training.refusal(lambda location=location: consolidate(engine, location), CheckpointError)
        )
        assert [path.name for path in location.iterdir()] == [name]
    consolidate(engine, Path(folder, "model", "muon_consolidated"))
    restore(engine, Path(folder, "model"))
    messages.append(training.refusal(lambda: restore(engine, f"{folder}/gone"), CheckpointError))
    return messages


def test_a_set_does_not_mix_with_another_checkpoint(ranks: Any, tmp_path: Path) -> None:
    """A save into a checkpoint of Hugging Face's Trainer put its files among those of the model."""
    for *refused, gone in ranks(2).run(save_beside_checkpoints, folder=str(tmp_path)):
        assert all("of another checkpoint" in text and "muon_consolidated" in text for text in refused), (
            refused
        )
        assert gone.endswith("gone: no such folder: give the folder of a checkpoint"), gone


def folders_that_are_none(rank: int, world_size: int, *, folder: str) -> list[str]:
    engine = engine_for(1, seed=0)
    messages = [
        training.refusal(lambda: engine.save_checkpoint(f"{folder}/file")),
        training.refusal(lambda: engine.load_checkpoint(folder)),
        training.refusal(lambda: engine.load_checkpoint(folder, tag="another")),
    ]
    engine.save_checkpoint(folder, tag="tag")
    consolidate(engine, folder)
    assert engine.load_checkpoint(folder)[0] is not None, "a set beside the tags is in nobody's way"
    engine = engine_for(1, seed=0, extra={"checkpoint": {"load_universal": True}})
    messages.append(training.refusal(lambda: engine.load_checkpoint(folder, tag="universal")))
    return messages


def test_deepspeeds_files_in_folders_that_are_none(ranks: Any, tmp_path: Path) -> None:
    """Only the first rank raised in a save, and the others waited; a load ended in an AssertionError without a text."""
    (tmp_path / "file").write_text("")
    (tmp_path / "latest").write_text("gone")
    results = ranks(2).run(folders_that_are_none, folder=str(tmp_path), timeout=60)
    for saved, latest, named, universal in results:
        assert "CheckpointError" in saved and "cannot be made" in saved
        assert f"{tmp_path}/gone: no such folder" in latest and f"{tmp_path}/latest" in latest
        assert f"{tmp_path}/another: no such folder" in named
        assert f"{tmp_path}/universal: no such folder" in universal and "latest_universal" in universal


def fail_for_index(source: Path, target: Path, replace: Any = os.replace) -> None:
    """Refuse the rename of an index, as a sticky folder does with the index of another user."""
    if Path(target).name == INDEX:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    replace(source, target)


def save_into(rank: int, world_size: int, *, folder: str, lost: str) -> str:
    """Train and save; return why that failed. ``lost`` says what is wrong with the folder."""
    engine = trained_for(rank, world_size, 1, 1)
    before, location = os.getcwd(), Path(folder)

    def act(reached: str) -> None:
        if reached == "shards written" and rank == 0:
            new = sorted(
                set(location.glob("*.safetensors")) - {location / name for name in load_index(location).files}
            )
            if lost == "half a shard":
                os.truncate(new[-1], new[-1].stat().st_size // 2)

    try:
        if lost == "shared":
            rank_folder = Path(folder if rank == 0 else f"{folder}-{rank}")
            rank_folder.mkdir(exist_ok=True)
            os.chdir(rank_folder.parent if rank == 0 else rank_folder)
            folder = location.name
        replaced = (
            mock.patch.object(os, "replace", fail_for_index) if lost == "index" else contextlib.nullcontext()
        )
        with replaced, on_every_stage(act), pytest.raises(CheckpointError) as caught:
            consolidate(engine, folder, shard_bytes=4000)
    finally:
        os.chdir(before)
    return str(caught.value)


@pytest.mark.parametrize(
    ("lost", "needle"),
    [
        ("shared", "All ranks must share the folder"),
        ("half a shard", "bytes"),
        ("index", "Operation not permitted"),
    ],
)
def test_a_save_whose_files_are_lost_leaves_the_old_set(
    ranks: Any, damaged: Path, lost: str, needle: str
) -> None:
    """Files that are gone are tests/faults/test_saves.py's."""
    before = load_index(damaged)
    messages = ranks(2).run(save_into, folder=str(damaged), lost=lost)
    assert all(needle in message and "untouched" in message for message in messages), messages
    assert verify_folder(damaged) == before
    assert {path.name for path in damaged.iterdir()} == {INDEX, *before.files}


# An interrupt, or a handler of SIGTERM that raises, inside a save left the folder locked by the living process.


def interrupt_every_line(rank: int, world_size: int, *, folder: str, cleaned: int) -> int:
    """Raise a KeyboardInterrupt at every line of a save; return how many there are.

    After every ``cleaned``-th one a whole save leaves its own files alone. A lock that an interrupt left behind would
    be an error in the next save, whole or not.
    """
    engine, location = trained_for(rank, world_size, 1, 1), Path(folder)
    sources = {inspect.getfile(function) for function in (consolidate, exclusive)}
    lines: dict[tuple[str, int], None] = {}
    target: tuple[str, int] | None = None

    def trace_lines(frame: types.FrameType, event: str, _: object) -> Any:
        line = frame.f_code.co_filename, frame.f_lineno
        lines[line] = None
        if line == target and event == "line":
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace_lines

    def save() -> None:
        sys.settrace(lambda frame, *_: trace_lines if frame.f_code.co_filename in sources else None)
        try:
            consolidate(engine, folder, shard_bytes=24_000)
        finally:
            sys.settrace(None)

    save()
    save()  # into a folder with a set
    saved = engine.global_steps
    for number, target in enumerate(list(lines)):
        engine.global_steps += 1
        with contextlib.suppress(KeyboardInterrupt):
            save()
        before, saved = saved, verify_folder(folder).progress.global_steps
        assert saved in (before, engine.global_steps), target
        if number % cleaned == 0:
            consolidate(engine, folder, shard_bytes=24_000)
            saved = engine.global_steps
            assert {path.name for path in location.iterdir()} == {INDEX, *load_index(location).files}, target
    return len(lines)


@pytest.mark.parametrize("cleaned", [8, full(1)])
def test_an_interrupt_on_any_line_leaves_a_set_and_no_lock(ranks: Any, tmp_path: Path, cleaned: int) -> None:
    """At 24 of 172 lines every later save was refused, at one more it ended in an UnboundLocalError."""
    assert ranks(1).run(interrupt_every_line, folder=str(tmp_path / "set"), cleaned=cleaned)[0] > 100


# Two saves into one folder at the same time: the first to finish took the other's shards for leftovers.
#
# It removed them, and the other one's index then named files that were gone.


def save_during_a_save(rank: int, world_size: int, *, folder: str, stage: str, no_locks: int) -> str:
    """Save once more, from DeepSpeed's files, when a save has reached ``stage``; return why that was refused."""
    engine = engine_for(1, seed=0)
    for step in range(2):
        train_step(engine, step, rank, world_size)
        if not step:
            engine.save_checkpoint(f"{folder}-saved")
    message, acted = "", False

    def act(reached: str) -> None:
        nonlocal message, acted
        if reached == stage and rank == 0 and not acted:
            acted = True  # the second save reaches the same stages
            message = training.refusal(lambda: consolidate_files(f"{folder}-saved", folder), CheckpointError)

    error = OSError(no_locks, os.strerror(no_locks))
    locks = mock.patch.object(fcntl, "flock", side_effect=error) if no_locks else contextlib.nullcontext()
    with locks, on_every_stage(act):
        consolidate(engine, folder, shard_bytes=4000)
    return message


@pytest.mark.parametrize(
    ("stage", "no_locks"),
    [
        *product(("start", "shards written", "index written"), (0, errno.ENOLCK)),
        ("start", errno.ENOSYS),  # for which filelock has a soft lock
    ],
)
def test_two_saves_into_one_folder(ranks: Any, tmp_path: Path, stage: str, no_locks: int) -> None:
    """With locks the second is refused; on a file system without them both finish and the last index is whole."""
    folder = tmp_path / "set"
    message = ranks(2).run(save_during_a_save, folder=str(folder), stage=stage, no_locks=no_locks)[0]
    index = verify_folder(folder)
    if not no_locks:
        assert "another save is writing into this folder" in message
        assert {path.name for path in folder.iterdir()} == {"muon_index.json", *index.files}
    else:
        assert not message
    assert index.progress.global_steps == (2 if not no_locks or stage != "index written" else 1)
