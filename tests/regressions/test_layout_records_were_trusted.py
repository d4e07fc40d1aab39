"""A record with a shape of 2^31 wrote 18.8 GB, one with a gap gave uninitialised memory in a set that verified."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_muon
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.tools.convert import consolidate_files
from tests.support import training
from tests.support.checkpoints import save_ours
from tests.support.layout_records import files_of, inner_state, joined_record, record_of_rank
from tests.support.models import build
from tests.support.thinning import full


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {}
    for stage in (0, 2):
        folders[stage] = tmp_path_factory.mktemp(f"stage{stage}")
        ranks(2).run(save_ours, folder=str(folders[stage]), stage=stage, tag="t")
    return folders


def changed(folder: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Copy a checkpoint with a changed record."""
    (target / "t").mkdir(parents=True)
    record, edited = joined_record(folder), files_of(folder)
    change(record)
    for path in (folder / "t").iterdir():
        if path not in edited:
            os.link(path, target / "t" / path.name)
            continue
        content = copy.deepcopy(torch.load(path, weights_only=False))
        inner_state(content)[RECORD_KEY] = record_of_rank(record, edited.index(path))
        torch.save(content, target / "t" / path.name)
    (target / "latest").write_text("t")
    return target


def matrix(record: dict[str, Any]) -> dict[str, Any]:
    """Return a matrix that lies on one rank, or on every one at stage 0."""
    return next(entry for entry in record["parameters"] if len(entry["record"]["shape"]) == 2)


def of_matrix(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Set keys of a matrix in the record; ``shape`` of its slice too."""

    def change(record: dict[str, Any]) -> None:
        entry = matrix(record)
        for key, value in values.items():
            target = entry["record"] if key in ("shape", "algorithm", "group", "rows", "heads") else entry
            target = entry["tensor_slice"] if key == "name" else target
            target[key] = value
        if "shape" in values:
            reshape(entry, values["shape"])

    return change


def reshape(entry: dict[str, Any], shape: list[int]) -> None:
    """Set the shape of a parameter, of which the ranks have all."""
    entry["record"]["shape"] = shape
    entry["tensor_slice"].update(shape=shape, dim=0, ranges=[[0, shape[0]]])


def placement(*numbers: int) -> dict[str, int]:
    keys = ("numel", "first", "head", "head_offset", "body", "body_offset", "replicas")
    return dict(zip(keys, numbers, strict=True))


def of_record(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Set keys of the record."""
    return lambda record: record.update(values)


def rows(*numbers: int) -> dict[str, int]:
    return dict(zip(("rank", "matrix_offset", "partition_offset", "numel"), numbers, strict=True))


def shortened(record: dict[str, Any]) -> None:
    matrix(record)["placement"]["numel"] -= 1
    matrix(record)["placement"]["head"] -= 1


def twice(record: dict[str, Any]) -> None:
    first, second = (entry["tensor_slice"] for entry in record["parameters"][:2])
    second["name"] = first["name"]


def overlapping(record: dict[str, Any]) -> None:
    first, second = record["parameters"][:2]
    second["partition"] = first["partition"]
    for entry in (first, second):
        numel = math.prod(entry["record"]["shape"])
        entry["placement"] = placement(numel, 0, numel, 0, 1, 0, 0)


def overlapping_in_the_middle(record: dict[str, Any]) -> None:
    """Two parameters of one element on each of three ranks, apart on the first and the last."""
    record["world_size"] = 3
    spreads = ([3, 0, 1, 0, 1, 5, 0], [2, 0, 1, 1, 1, 5, 0])
    for entry, spread in zip(record["parameters"][:2], spreads, strict=True):
        reshape(entry, [spread[0]])
        entry.update(partition=0, placement=placement(*spread))


CHANGES = {
    "huge": of_matrix(shape=[1 << 16, 1 << 15]),
    "two of one name": twice,
    "no parameters": of_record(parameters=None),
    "an empty list of parameters": of_record(parameters=[]),
    "too many ranks": of_record(world_size=1 << 40),
    "version is a text": of_record(version="1"),
    "optimizer is a number": of_record(optimizer=3),
    "negative partition": of_matrix(partition=-1),
    "another group": of_matrix(group=99),
    "unknown algorithm": of_matrix(algorithm="sgd"),
    "negative shape": of_matrix(shape=[-4, -3]),
    "unknown key": of_matrix(heads=1 << 60),
    "name is a number": of_matrix(name=3),
    "huge everywhere": of_matrix(shape=[1 << 31], placement=placement(1 << 31, 0, 1 << 31, 0, 1, 0, 0)),
    # A large parameter of a small run that is read again and again.
    "repeated": of_matrix(shape=[1 << 10], placement=placement(1 << 10, 0, 4, 0, 4, 0, 0)),
    "shortened": shortened,
    "overlapping": overlapping,
    "overlapping in the middle": overlapping_in_the_middle,
    "rows without fragments": of_matrix(rows=5),
    "rows with a gap": of_matrix(row_fragments=[rows(0, 0, 0, 2), rows(0, 3, 2, 1)]),
    "more rows than elements": of_matrix(row_fragments=[rows(0, 0, 0, 1 << 40)]),
    "rows of no rank": of_matrix(row_fragments=[rows(9, 0, 0, 2)]),
    "placement is a text": of_matrix(placement="abc"),
    "placement of another start": of_matrix(placement=placement(12, 7, 12, 0, 1, 0, 0)),
    "negative rows": of_matrix(rows=-1),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("stage", [full(0), 2])
def test_a_record_that_cannot_be(saved: Any, tmp_path: Path, stage: int, name: str) -> None:
    folder = changed(saved[stage], tmp_path / "in", CHANGES[name])
    with pytest.raises(CheckpointError) as caught:
        consolidate_files(folder, tmp_path / "out")
    assert str(folder) in str(caught.value)
    assert not list(tmp_path.glob("out/*"))


def test_a_record_of_another_format(saved: Any, tmp_path: Path) -> None:
    folder = changed(saved[2], tmp_path / "in", of_record(version=1))
    said = r"not of version 5.*with the version of deepspeed_muon that saved it"
    with pytest.raises(CheckpointError, match=said):
        consolidate_files(folder, tmp_path / "out")


def load_it(rank: int, world_size: int, *, folder: str) -> str:
    engine = training.make_engine(training.ds_config(2))
    return training.refusal(lambda: engine.load_checkpoint(folder))


def test_an_engine_names_the_command_for_another_format(ranks: Any, saved: Any, tmp_path: Path) -> None:
    """Of a checkpoint of the version before, which stored row state and int8 momentum in another order."""
    folder = changed(saved[2], tmp_path / "in", of_record(version=4))
    command = f"python -m deepspeed_muon checkpoint consolidate {folder / 't'} "
    for message in ranks(2).run(load_it, folder=str(folder)):
        assert "layout record 4, this version has 5" in message
        assert f"with that version run '{command}" in message


def test_a_tensor_that_says_more_than_it_holds(saved: Any, tmp_path: Path) -> None:
    """A partition of one element that looks like one of four thousand million."""
    folder = changed(saved[2], tmp_path / "in", lambda record: None)
    path = files_of(folder)[0]
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = torch.ones(1).expand(1 << 32)
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="the file holds fewer"):
        consolidate_files(folder, tmp_path / "out")


def without_names(rank: int, world_size: int, *, folder: str) -> list[str]:
    """Save twice with two parameters of one name, which the engine's model does not have; return the warnings."""
    messages = training.heard()
    model = build("toy")
    strangers = [("same", nn.Parameter(torch.zeros(4))) for _ in range(2)]
    pairs = [*model.named_parameters(), *strangers]
    config = training.ds_config(0)
    optimizer = deepspeed_muon.Muon(pairs, **config.pop("optimizer")["params"])
    engine = training.initialize(model, config, optimizer=optimizer)
    training.run_step(engine, 0, rank, world_size, 1)
    engine.save_checkpoint(folder, tag="t")
    engine.save_checkpoint(folder, tag="t")
    matching = [text for text in messages if "layout" in text]
    engine.load_checkpoint(folder, tag="t")
    return matching


def test_a_record_that_cannot_be_written_is_said_once(ranks: Any, tmp_path: Path) -> None:
    """The record was left out in silence, and a reader took the state for that of DeepSpeed's Muon."""
    first, second = ranks(2).run(without_names, folder=str(tmp_path))
    assert len(first) == 1 and not second
    assert "two parameters are called" in first[0] and "engine.load_checkpoint" in first[0]
    with pytest.raises(CheckpointError, match=r"without a record of its layout .two parameters are called"):
        consolidate_files(tmp_path, tmp_path / "out")
