"""Files of different steps in one folder, and ranks at different steps, gave a consolidated set.

The set said the step of rank 0 and held matrices of which one half was newer than the other: an interrupted copy
of a checkpoint, or a tag that was written twice, loaded without a word. Two saves of the same step were mixed even by
``engine.load_checkpoint``, and a flipped bit of a file became a set that verifies.
"""

from __future__ import annotations

import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed_muon.checkpoint import consolidate
from deepspeed_muon.engine import checkpointing
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.tools.convert import consolidate_files, convert_to_universal
from tests.support import training
from tests.support.checkpoints import engine_for, train_step, trained_for
from tests.support.snapshots import attempted
from tests.support.thinning import full


def save_two_steps(rank: int, world_size: int, *, folder: str, stage: int) -> None:
    """Save AdamW's checkpoints, which have no random id of the save."""
    config = training.ds_config(stage)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    engine = training.make_engine(config, "toy", seed=0)
    for step in range(2):
        training.run_step(engine, step, rank, world_size, 1)
        engine.save_checkpoint(folder, tag=f"step{step + 1}")


def optimizer_file(rank: int, precision: str) -> str:
    prefix = "" if precision == "fp32" else f"{precision}_"
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_file(rank: int, stage: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"


def refusal(folder: Path, tmp_path: Path) -> str:
    messages = set()
    for convert, name in ((consolidate_files, "set"), (convert_to_universal, "universal")):
        with pytest.raises(CheckpointError) as caught:
            convert(folder, tmp_path / name)
        assert not (tmp_path / name).exists()
        messages.add(str(caught.value))
    (message,) = messages
    return message


@pytest.mark.parametrize("stage", [3, full(1)])
def test_files_of_two_steps_are_refused(ranks: Any, tmp_path: Path, stage: int) -> None:
    saved = tmp_path / "saved"
    ranks(2).run(save_two_steps, folder=str(saved), stage=stage)
    for step in (1, 2):
        consolidate_files(saved / f"step{step}", tmp_path / f"good{step}")
    swaps = [
        (optimizer_file(0, "fp32"), "step of partition 0 is 1 in the first, 2 in the second"),
        (optimizer_file(1, "fp32"), "step of partition 0 is 2 in the first, 1 in the second"),
    ]
    if stage == 3:
        swaps.append((model_file(1, stage), "global_steps is 2 in the first, 1 in the second"))
    for number, (name, needle) in enumerate(swaps):
        mixed = Path(shutil.copytree(saved / "step2", tmp_path / f"mixed{number}"))
        shutil.copy(saved / "step1" / name, mixed / name)
        message = refusal(mixed, tmp_path)
        assert "of different saves" in message and name in message, message
        assert needle in message, message


def test_files_of_more_ranks_than_saved_are_refused(ranks: Any, tmp_path: Path) -> None:
    """A tag that 3 ranks saved and 2 ranks saved again, and one saved in two precisions."""
    ranks(2).run(save_two_steps, folder=str(tmp_path / "saved"), stage=2)
    saved = tmp_path / "saved" / "step2"
    first = saved / optimizer_file(0, "fp32")
    shutil.copy(first, saved / optimizer_file(2, "fp32"))
    assert "rank_2" in refusal(saved, tmp_path)
    (saved / optimizer_file(2, "fp32")).unlink()
    shutil.copy(first, saved / optimizer_file(0, "bf16"))
    assert "both are of rank 0" in refusal(saved, tmp_path)


def save_two_runs(rank: int, world_size: int, *, folder: str, stage: int, precision: str) -> list[float]:
    """Save two runs, at the same step and tag; return what their client state is when it is loaded."""
    results = []
    for seed in (0, 1):
        engine = engine_for(stage, seed=seed, precision=precision)
        train_step(engine, seed, rank, world_size)
        engine.save_checkpoint(f"{folder}/{seed}", tag="t", client_state={"seed": seed})
        results.append(engine.load_checkpoint(f"{folder}/{seed}")[1])
    assert [state.pop("seed") for state in results] == [0, 1]
    assert not any("muon" in key for state in results for key in state)
    return []


def load_mixed(rank: int, world_size: int, *, folder: str, stage: int, precision: str) -> str:
    """Return why a checkpoint is refused, after making sure that the engine is as it was."""
    engine = trained_for(rank, world_size, stage, 1, seed=7, precision=precision)
    message, changed = attempted(engine, lambda: engine.load_checkpoint(folder))
    assert not changed
    train_step(engine, 1, rank, world_size)
    return message


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (3, "fp32"), full(2, "fp16")])
def test_files_of_two_runs_of_one_step_are_refused(
    ranks: Any, tmp_path: Path, stage: int, precision: str
) -> None:
    """A file of each rank, also where the wrapper, as those of bf16, puts its name into the file's."""
    arguments = {"stage": stage, "precision": precision}
    ranks(2).run(save_two_runs, folder=str(tmp_path), **arguments)
    first, second = tmp_path / "0", tmp_path / "1"
    consolidate_files(first, tmp_path / "good")
    prefix = "bf16" if precision == "bf16" else "fp32"
    for name in (optimizer_file(0, prefix), optimizer_file(1, prefix), model_file(0, stage)):
        content = (first / "t" / name).read_bytes()
        shutil.copy(second / "t" / name, first / "t" / name)
        message = refusal(first, tmp_path)
        assert "of different saves" in message and "save is" in message and name in message, message
        for message in ranks(2).run(load_mixed, folder=str(first), **arguments):
            assert "one save" in message, message
        (first / "t" / name).write_bytes(content)
    # A flipped bit, in the state of a rank and in the model.
    for name in (optimizer_file(1, prefix), model_file(0, stage)):
        path = first / "t" / name
        content = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        sizes = struct.unpack_from("<HH", content, largest.header_offset + 26)
        start = largest.header_offset + 30 + sum(sizes)
        for position in (start, start + largest.file_size // 2, start + largest.file_size - 1):
            path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
            message = refusal(first, tmp_path)
            assert str(path) in message and "CRC-32" in message, message
        path.write_bytes(content)
    convert_to_universal(first / "t", tmp_path / "universal")


def save_of_two_steps(rank: int, world_size: int, *, folder: str, counter: str) -> str:
    engine = trained_for(rank, world_size, 2, 1)
    if counter == "global_steps":
        engine.global_steps += rank
    else:
        for state in engine.basic_optimizer.state.values():
            state["step"] += rank
    return training.refusal(lambda: consolidate(engine, folder), CheckpointError)


OF_MATRICES = "(blocks.1.down.weight, ...)"


@pytest.mark.parametrize(
    ("counter", "needle"),
    [
        ("global_steps", "global_steps: ranks [0]: 1; ranks [1]: 2"),
        ("step", f"optimizer steps: ranks [0]: 1 {OF_MATRICES}; ranks [1]: 2 {OF_MATRICES}"),
    ],
)
def test_ranks_of_different_steps_are_refused(ranks: Any, tmp_path: Path, counter: str, needle: str) -> None:
    messages = ranks(2).run(save_of_two_steps, folder=str(tmp_path / "set"), counter=counter)
    assert all(needle in message for message in messages), messages
    assert not list((tmp_path / "set").iterdir())


def load_while_another_save_ends(
    rank: int, world_size: int, *, folder: str, stage: int, **options: Any
) -> tuple[str, int, bool]:
    """Replace ``latest`` between this package's checks and DeepSpeed's load."""
    engine = trained_for(rank, world_size, stage, steps=1)
    engine.save_checkpoint(folder, tag="first")
    masters = training.full_masters(engine)
    train_step(engine, 1, rank, world_size)
    engine.save_checkpoint(folder, tag="second", save_latest=False)
    engine = engine_for(stage, seed=7)
    take = checkpointing.SettingsSnapshot

    def take_and_replace_latest(*args: Any) -> Any:
        Path(folder, "latest").write_text("second")
        return take(*args)

    with mock.patch.object(checkpointing, "SettingsSnapshot", take_and_replace_latest):
        path, _ = engine.load_checkpoint(folder, **options)
    loaded = training.full_masters(engine)
    return path, engine.global_steps, all(torch.equal(loaded[name], masters[name]) for name in masters)


@pytest.mark.parametrize(
    ("stage", "options"), [(1, {}), (3, {"load_optimizer_states": False}), full(0, {}), full(3, {})]
)
def test_the_tag_that_was_checked_is_loaded(
    ranks: Any, tmp_path: Path, stage: int, options: dict[str, Any]
) -> None:
    for path, steps, is_first in ranks(2).run(
        load_while_another_save_ends, folder=str(tmp_path), stage=stage, **options
    ):
        assert "/first/" in path and steps == 1 and is_first
