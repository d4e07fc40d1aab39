"""Mutations of an index, of a layout record and of universal metadata: refused with a typed error, or harmless.

A mutation is what hypothesis makes of a real document: values of other kinds, negative and huge numbers, keys that are
gone or there twice, flipped bits and bytes. Half of the structured ones are sealed again, as by somebody who knows the
checksum. What loads in spite of one must do no harm: every number of the restored state is as it was saved, or the
engine's own checks accept it. A refused one leaves the engine bit-identical.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.checkpoint.index import CheckpointIndex, sealed_json
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY, read_records
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.tools.convert import consolidate_files, convert_to_universal, verify_folder
from tests.support import training
from tests.support.checkpoints import INDEX
from tests.support.snapshots import differences, snapshot
from tests.support.thinning import full

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([-1, 0, 1, 2, 1 << 31, 1 << 50, 1 << 63]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "..", "/etc/passwd", "\0", "\ud800", "x" * 5000, "adamw", "muon"]),
    st.just([]),
    st.just({}),
    st.lists(st.integers(-2, 1 << 40), max_size=5),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything inside a document."""
    found = [path] if path else []
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inside:
        found += places(entry, (*path, key))
    return found


def mutate(document: Any, data: st.DataObject) -> Any:
    """Return a document with one or two values replaced, dropped, doubled or moved."""
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(places(document)))
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        action = data.draw(
            st.sampled_from(["replace", "replace", "replace", "nudge", "drop", "double", "swap"])
        )
        value = parent[path[-1]]
        if action == "nudge" and isinstance(value, (int, float)) and not isinstance(value, bool):
            parent[path[-1]] = value + data.draw(st.sampled_from([-1, 1, 0.5, -value * 2]))
        elif action == "drop":
            del parent[path[-1]]
        elif action == "double":
            if isinstance(parent, list):
                parent.append(copy.deepcopy(value))
            else:
                parent[data.draw(st.sampled_from([f"{path[-1]}x", *map(str, parent)]))] = copy.deepcopy(value)
        elif action == "swap" and len(parent) > 1:
            other = data.draw(
                st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent)))
            )
            parent[path[-1]], parent[other] = parent[other], value
        else:
            parent[path[-1]] = data.draw(VALUES)
        if not places(document):
            break
    return document


def as_text(document: Any, data: st.DataObject) -> bytes:
    """Write a mutated document down, sealed again or with the old checksum."""
    if isinstance(document, dict) and data.draw(st.booleans()):
        try:
            return sealed_json(document)
        except (CheckpointError, ValueError, TypeError):  # NaN, half a surrogate pair
            pass
    return json.dumps(document).encode()


def fuzz(check: Callable[[st.DataObject], None], count: int, number: int) -> None:
    """Run ``check`` on ``count`` examples, the same ones every time."""

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        check(data)

    run()


def save(rank: int, world_size: int, *, folder: str) -> None:
    engine = training.make_engine(training.ds_config(2, precision="fp16"))
    training.run_step(engine, 0, rank, world_size, 1)
    consolidate(engine, os.path.join(folder, "set"))
    engine.save_checkpoint(os.path.join(folder, "saved"), tag="t")


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make one checkpoint of each kind: ``set``, ``saved`` and ``universal``."""
    folder = tmp_path_factory.mktemp("fuzz")
    ranks(1).run(save, folder=str(folder))
    convert_to_universal(folder / "saved", folder / "universal" / "step")
    return folder


def same_state(found: CheckpointIndex, good: CheckpointIndex) -> None:
    """Fail unless every parameter's record says where and what the saved one says."""
    assert found.parameters.keys() == good.parameters.keys()
    for name, record in found.parameters.items():
        kept = good.parameters[name]
        assert (record.shape, record.algorithm, record.tensors) == (kept.shape, kept.algorithm, kept.tensors)
    assert found.files == good.files


@pytest.mark.parametrize("count", [30, full(700)])
def test_layout_records(saved: Path, tmp_path: Path, count: int) -> None:
    """A record that is accepted describes each element once, inside of the partitions; consolidation verifies."""
    path = saved / "saved" / "t" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    inner = content["optimizer_state_dict"]["base_optimizer_state"]
    good = copy.deepcopy(inner[RECORD_KEY])
    shutil.copytree(saved / "saved", tmp_path / "in", copy_function=os.link)
    target = tmp_path / "in" / "t" / path.name
    accepted = 0

    def check(data: st.DataObject) -> None:
        nonlocal accepted
        record = mutate(good, data)
        try:
            read_records([record], "here")
        except CheckpointError:
            return
        accepted += 1
        inner[RECORD_KEY] = record
        target.unlink()
        torch.save(content, target)
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        try:
            consolidate_files(tmp_path / "in", out)
        except CheckpointError:
            assert not list(out.glob("*"))
            return
        index = verify_folder(out)
        numel = sum(record.numel for record in index.parameters.values())
        assert numel <= sum(master.numel() for master in masters)

    masters = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    fuzz(check, count, 2)
    assert accepted < count / 2


def loaded_mutants(
    engine: Any, path: Path, load: Callable[[], Any], accept: Callable[[], None], count: int, number: int
) -> list[str]:
    """Load mutants of a document; return what was wrong: another error, or an engine that a refused one changed.

    Args:
        engine: Trained for a step; destroyed at the end.
        path: The document, restored at the end.
        load: Load what the document belongs to.
        accept: Check what a mutant that was loaded left.
        count: Number of mutants.
        number: Of the seed.
    """
    text = path.read_bytes()
    document = json.loads(text)
    before = snapshot(engine)
    wrong: list[str] = []
    tally = {"refused": 0, "loaded": 0}

    def check(data: st.DataObject) -> None:
        nonlocal before
        mutated = as_text(mutate(document, data), data)
        path.write_bytes(mutated)
        try:
            load()
        except CheckpointError:
            tally["refused"] += 1
            changed = differences(before, snapshot(engine))
            wrong.extend(f"{changed} by {mutated[-300:]!r}" for _ in changed[:1])
            return
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")
            return
        tally["loaded"] += 1
        accept()
        assert float(engine.optimizer.loss_scale) > 0 and engine.global_steps >= 0
        before = snapshot(engine)

    try:
        # As it was: so few mutants are admissible that all of a short run may be refused.
        load()
        tally["loaded"] += 1
        accept()
        before = snapshot(engine)
        fuzz(check, count, number)
    finally:
        path.write_bytes(text)
        engine.destroy()
    return [*wrong, *([] if min(tally.values()) else [f"one-sided: {tally}"])]


def restored(rank: int, world_size: int, *, folder: str, count: int) -> list[str]:
    """Restore mutated sets."""
    engine = training.make_engine(training.ds_config(2, precision="fp16"), seed=7)
    training.run_step(engine, 0, rank, world_size, 1)
    path = Path(folder, "set", INDEX)
    good = verify_folder(path.parent)

    def accept() -> None:
        same_state(verify_folder(path.parent), good)
        for group in engine.basic_optimizer.param_groups:
            assert 0 <= group["lr"] < math.inf and 0 <= group["momentum"] < 1 and group["eps"] > 0

    return loaded_mutants(engine, path, lambda: restore(engine, path.parent), accept, count, 3)


@pytest.mark.parametrize("count", [30, full(400)])
def test_restores_from_mutated_indexes(ranks: Any, saved: Path, count: int) -> None:
    assert ranks(1).run(restored, folder=str(saved), count=count) == [[]]


def restored_universal(rank: int, world_size: int, *, folder: str, count: int) -> list[str]:
    """Load mutated universal checkpoints."""
    extra = {"checkpoint": {"load_universal": True}}
    engine = training.make_engine(training.ds_config(2, precision="fp16", extra=extra), seed=7)
    training.run_step(engine, 0, rank, world_size, 1)
    path = Path(folder, "universal", "step", "zero", INDEX)
    place = os.path.join(folder, "universal")
    return loaded_mutants(engine, path, lambda: engine.load_checkpoint(place), lambda: None, count, 4)


@pytest.mark.parametrize("count", [40, full(200)])
def test_loads_of_mutated_universal_metadata(ranks: Any, saved: Path, count: int) -> None:
    assert ranks(1).run(restored_universal, folder=str(saved), count=count) == [[]]
