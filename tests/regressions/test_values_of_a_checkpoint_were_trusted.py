"""Rates below zero, a loss scale of NaN, flipped bits, links, pipes and NaN in an index restored without a word."""

from __future__ import annotations

import json
import math
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_muon import __main__ as cli
from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.checkpoint.index import is_json, parse_sealed
from deepspeed_muon.checkpoint.restore import checked_settings
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.tools.convert import consolidate_files, verify_folder
from tests.support import training
from tests.support.checkpoints import FILE, INDEX, edit, write_set
from tests.support.snapshots import attempted
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


def write(folder: Path, momentum: torch.Tensor | None = None) -> Path:
    """Write a set of one matrix; return the path of its index."""
    loss_scale = {"cur_scale": 256.0, "cur_iter": 3, "last_overflow_iter": -1}
    write_set(folder, momentum=momentum, groups=[GROUP], loss_scale=loss_scale)
    return folder / INDEX


def refused(folder: Path, *needles: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        verify_folder(folder)
    for needle in needles:
        assert needle in str(caught.value), str(caught.value)


def test_good_values_are_read(tmp_path: Path) -> None:
    write(tmp_path)
    assert verify_folder(tmp_path).groups == [GROUP]
    assert checked_settings([GROUP], "here")[0]["betas"] == (0.9, 0.95)


SETTINGS = [
    *(("lr", value) for value in (-1, "0.1", None, True)),
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
def test_settings_pass_the_checks_of_the_configuration(tmp_path: Path, key: str, value: Any) -> None:
    edit(write(tmp_path), lambda content: content["groups"][0].update({key: value}))
    refused(tmp_path, f"param group 0.{key}", "hyperparameters=False")


LOSS_SCALE = [
    ("cur_scale", 0),
    ("cur_iter", -3),
    ("cur_iter", 1.5),
    ("last_overflow_iter", -2),
    ("surprise", 1),
]
COUNTERS = product(["global_steps", "global_samples", "skipped_steps"], [-1, 1.5, "3", True, 1 << 62])


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        *(("loss_scale", *case) for case in LOSS_SCALE),
        *each_value(("", *case) for case in COUNTERS),
    ],
)
def test_progress(tmp_path: Path, section: str, key: str, value: Any) -> None:
    def change(content: dict[str, Any]) -> None:
        progress = content["progress"]
        (progress[section] if section else progress)[key] = value

    edit(write(tmp_path), change)
    refused(tmp_path, key)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """And each byte that is gone or doubled, and each cut. What loads, such as another blank, says the same."""
    text = write(tmp_path).read_bytes()
    good = parse_sealed(text, INDEX)
    loaded = 0
    for at, byte in enumerate(text):
        before, after = text[:at], text[at + 1 :]
        middles = [bytes([byte ^ 1 << bit]) for bit in range(8)] + [b"", bytes([byte, byte])]
        for damaged in (before, *(before + middle + after for middle in middles)):
            try:
                found = parse_sealed(damaged, INDEX)
            except CheckpointError:
                continue
            assert found == good, damaged
            loaded += len(damaged) == len(text)
    assert loaded < len(text) / 10


def test_a_schedule_with_numbers_for_keys_is_not_json() -> None:
    """MultiStepLR keeps its milestones by number; as text it found none of them after a restore and never decayed."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert not is_json(torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]).state_dict())
    assert is_json(torch.optim.lr_scheduler.StepLR(optimizer, 2).state_dict())


def test_removing_the_checksum_is_found(tmp_path: Path) -> None:
    path = write(tmp_path)
    content = json.loads(path.read_text())
    checksum = content.pop("sha256")
    path.write_text(json.dumps(content))
    refused(tmp_path, "checksum is missing")
    path.write_text(json.dumps({**content, "sha256": checksum, "version": 2}))
    refused(tmp_path, "version 2; this release reads version 1")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"lr": 0.1', b'"lr": NaN'),
        (b'"lr": 0.1', b'"lr": 1e999'),
        (b'"lr": 0.1', b'"lr": 0.2, "lr": 0.1'),
        (b'"w": {', b'"w": {}, "w": {'),
        (b'"version": 1', b'"version": 1, "version": 1'),
    ],
)
def test_what_json_allows_and_a_checkpoint_does_not(tmp_path: Path, old: bytes, new: bytes) -> None:
    """Two parameters of one name: the last one won. A rate of NaN came through."""
    path = write(tmp_path)
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    refused(tmp_path, INDEX)


@pytest.mark.time_limit(20)
@pytest.mark.parametrize("name", [INDEX, FILE])
@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "device"])
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    write(tmp_path)
    path = tmp_path / name
    path.rename(tmp_path / "elsewhere")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    refused(tmp_path, name, "not a regular file")


@pytest.mark.time_limit(20)
def test_a_pipe_instead_of_deepspeeds_latest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "latest")
    with pytest.raises(CheckpointError, match="not a regular file"):
        consolidate_files(tmp_path, tmp_path / "out")


def test_verify_names_tensors_that_are_not_finite(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path, torch.tensor([0.0] * 11 + [math.nan]))
    refused(tmp_path, "1 tensors hold an infinity or NaN: w (momentum_buffer)", "allow_nonfinite")
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "w (momentum_buffer)" in capsys.readouterr().err
    assert cli.main(["checkpoint", "verify", "--allow-nonfinite", str(tmp_path)]) == 0


def saved(rank: int, world_size: int, *, folder: str, stage: int, diverges: bool = False) -> None:
    engine = training.make_engine(training.ds_config(stage))
    training.run_step(engine, 0, rank, world_size, 1)
    optimizer = engine.basic_optimizer
    for partition in (p for runner in optimizer.runners for p in runner.step_set.partitions):
        for key in ("momentum_buffer", "exp_avg"):
            state = optimizer.state[partition.tensor].get(key)
            if state is not None and rank == 0 and diverges:
                state.view(-1)[0] = math.inf if partition.muon else math.nan
    consolidate(engine, folder)


def restored(rank: int, world_size: int, *, folder: str, stage: int, options: dict[str, bool]) -> Any:
    """Report why a set is refused; then restore it with options, and report what the engine has."""
    engine = training.make_engine(training.ds_config(stage), seed=7)
    training.run_step(engine, 0, rank, world_size, 1)
    message, changed = attempted(engine, lambda: restore(engine, folder))
    restore(engine, folder, **options)
    found = [bool(torch.isfinite(state).all()) for state in training.full_states(engine, "exp_avg").values()]
    rates = [group["lr"] for group in engine.basic_optimizer.param_groups]
    return {"message": message, "changed": changed, "finite": found, "rates": rates}


def test_a_state_with_nan_is_restored_only_when_asked_for(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(saved, folder=str(tmp_path), stage=2, diverges=True)
    options = {"allow_nonfinite": True}
    for result in ranks(2).run(restored, folder=str(tmp_path), stage=3, options=options):
        assert "allow_nonfinite=True" in result["message"] and "(exp_avg)" in result["message"], result
        assert "(momentum_buffer)" in result["message"]
        assert not result["changed"] and not all(result["finite"])


def test_bad_settings_are_refused_by_restore(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(saved, folder=str(tmp_path), stage=1)
    edit(tmp_path / INDEX, lambda content: content["groups"][0].update(lr=-1))
    options = {"hyperparameters": False}
    for result in ranks(2).run(restored, folder=str(tmp_path), stage=1, options=options):
        assert "param group 0.lr" in result["message"] and not result["changed"], result
        assert result["rates"] == [0.02, 3e-3]
