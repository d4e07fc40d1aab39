"""A record with a shape of 2^31 wrote 18.8 GB, one with a gap gave uninitialised memory in a set that verified."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_muon.checkpoint.layout_record import RECORD_KEY
from deepspeed_muon.checkpoint.offline import consolidate_files, verify_folder
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import logger
from tests.support import training


def save(rank: int, world_size: int, *, folder: str, stage: int) -> None:
    engine = training.make_engine(training.ds_config(stage))
    training.run_step(engine, 0, rank, world_size, 1)
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {}
    for stage in (0, 2):
        folders[stage] = tmp_path_factory.mktemp(f"stage{stage}")
        ranks(2).run(save, folder=str(folders[stage]), stage=stage)
    return folders


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("t/*optim_states.pt")) or [folder / "t" / "mp_rank_00_model_states.pt"]


def inner_state(content: Any) -> Any:
    if "optimizer_state_dict" in content:
        content = content["optimizer_state_dict"]
        return content["base_optimizer_state"]
    return content["optimizer"]


def changed(folder: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Copy a checkpoint, with the layout record of every rank changed alike."""
    (target / "t").mkdir(parents=True)
    edited = files_of(folder)
    for path in (folder / "t").iterdir():
        if path not in edited:
            os.link(path, target / "t" / path.name)
            continue
        content = copy.deepcopy(torch.load(path, weights_only=False))
        change(inner_state(content)[RECORD_KEY])
        torch.save(content, target / "t" / path.name)
    (target / "latest").write_text("t")
    return target


def matrix(record: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter that lies on one rank, or in one run at stage 0."""
    return next(entry for entry in record["parameters"] if len(entry["shape"]) == 2 and entry["fragments"])


def huge(record: dict[str, Any]) -> None:
    matrix(record)["shape"] = [1 << 16, 1 << 15]


def huge_everywhere(record: dict[str, Any]) -> None:
    entry = matrix(record)
    entry.update(shape=[1 << 31], fragments=[[0, 0, 0, 1 << 31]], replicated=False)


def repeated(record: dict[str, Any]) -> None:
    """Make a large parameter of a small run that is read again and again."""
    entry = matrix(record)
    entry.update(shape=[1 << 10], replicated=False)
    entry["fragments"] = [[0, 4 * i, 0, 4] for i in range(1 << 8)]


def missing(record: dict[str, Any]) -> None:
    entry = matrix(record)
    entry["fragments"] = entry["fragments"][1:]


def shortened(record: dict[str, Any]) -> None:
    matrix(record)["fragments"][0][3] -= 1


def twice(record: dict[str, Any]) -> None:
    record["parameters"][1]["name"] = record["parameters"][0]["name"]


def doubled(record: dict[str, Any]) -> None:
    entry = matrix(record)
    entry["fragments"] = [*entry["fragments"], entry["fragments"][0]]


def overlapping(record: dict[str, Any]) -> None:
    first, second = (entry for entry in record["parameters"][:2])
    second["partition"] = first["partition"]
    second["fragments"] = [[f[0], f[1], 0, f[3]] for f in second["fragments"]]
    first["fragments"] = [[f[0], f[1], 0, f[3]] for f in first["fragments"]]


def foreign_rank(record: dict[str, Any]) -> None:
    matrix(record)["fragments"][0][0] = 7


def replaced(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        place = record if key in ("parameters", "world_size", "optimizer", "version") else matrix(record)
        place[key] = value

    change.__name__ = f"{key}={str(value)[:20]}"
    return change


CHANGES = [
    huge,
    huge_everywhere,
    repeated,
    missing,
    shortened,
    twice,
    doubled,
    overlapping,
    foreign_rank,
    replaced("parameters", None),
    replaced("parameters", []),
    replaced("parameters", [1]),
    replaced("world_size", 1 << 40),
    replaced("version", "1"),
    replaced("optimizer", 3),
    replaced("fragments", "abc"),
    replaced("fragments", [[0, 0]]),
    replaced("partition", -1),
    replaced("partition", 99),
    replaced("group", 99),
    replaced("algorithm", "sgd"),
    replaced("shape", [-4, -3]),
    replaced("shape", [2.5, 3]),
    replaced("heads", 1 << 60),
    replaced("name", 3),
    replaced("replicated", "no"),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 2])
def test_a_record_that_cannot_be(saved: Any, tmp_path: Path, stage: int, change: Any) -> None:
    folder = changed(saved[stage], tmp_path / "in", change)
    with pytest.raises(CheckpointError) as caught:
        consolidate_files(folder, tmp_path / "out")
    assert str(folder) in str(caught.value)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("stage", [0, 2])
def test_the_record_as_it_was_saved(saved: Any, tmp_path: Path, stage: int) -> None:
    """Whole, and as older releases wrote it: without the keys that came later."""

    def older(record: dict[str, Any]) -> None:
        for entry in record["parameters"]:
            del entry["grid"], entry["transposed"], entry["rows"]

    for number, change in enumerate((lambda record: None, older)):
        folder = changed(saved[stage], tmp_path / f"in{number}", change)
        consolidate_files(folder, tmp_path / f"out{number}")
        verify_folder(tmp_path / f"out{number}")


def test_ranks_whose_records_differ(saved: Any, tmp_path: Path) -> None:
    folder = changed(saved[2], tmp_path / "in", lambda record: None)
    path = files_of(folder)[1]
    content = torch.load(path, weights_only=False)
    inner_state(content)[RECORD_KEY]["parameters"].reverse()
    torch.save(content, path)
    with pytest.raises(
        CheckpointError, match=f"{path.name} are of different checkpoints: layout is another one"
    ):
        consolidate_files(folder, tmp_path / "out")


def stretched(folder: Path) -> None:
    """Let a partition of one element look like four thousand million."""
    path = files_of(folder)[0]
    content = torch.load(path, weights_only=False)
    masters = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    masters[0] = torch.ones(1).expand(1 << 32)
    torch.save(content, path)


def test_a_tensor_that_says_more_than_it_holds(saved: Any, tmp_path: Path) -> None:
    folder = changed(saved[2], tmp_path / "in", lambda record: None)
    stretched(folder)
    with pytest.raises(CheckpointError, match="the file holds fewer"):
        consolidate_files(folder, tmp_path / "out")


def without_names(rank: int, world_size: int, *, folder: str) -> list[str]:
    """Save twice with two parameters of one name; return the warnings."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    engine = training.make_engine(training.ds_config(1))
    routes = engine.basic_optimizer._routed.routes
    routes[1] = routes[0]
    training.run_step(engine, 0, rank, world_size, 1)
    engine.save_checkpoint(folder, tag="t")
    engine.save_checkpoint(folder, tag="t")
    logger.removeHandler(handler)
    engine.load_checkpoint(folder, tag="t")
    engine.destroy()
    return [text for text in records if "layout" in text]


def test_a_record_that_cannot_be_written_is_said_once(ranks: Any, tmp_path: Path) -> None:
    """The record was left out in silence, and a reader took the state for that of DeepSpeed's Muon."""
    first, second = ranks(2).run(without_names, folder=str(tmp_path))
    assert len(first) == 1 and not second
    assert "two parameters are called" in first[0] and "engine.load_checkpoint" in first[0]
    with pytest.raises(CheckpointError, match=r"without a record of its layout .two parameters are called"):
        consolidate_files(tmp_path, tmp_path / "out")
