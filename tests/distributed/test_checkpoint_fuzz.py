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
import operator
import os
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.checkpoint.index import sealed_json
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


def positions(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything inside a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [position for key, entry in inside for position in positions(entry, (*path, key))]
    return [path, *below] if path else below


def mutate(document: Any, data: st.DataObject) -> Any:
    """Return a document with one or two values replaced, dropped, doubled or moved."""
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 2))):
        if not (inside := positions(document)):
            break
        *above, last = data.draw(st.sampled_from(inside))
        parent = reduce(operator.getitem, above, document)
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        value = parent[last]
        match data.draw(
            st.sampled_from(["replace", "replace", "replace", "nudge", "drop", "double", "swap"])
        ):
            case "nudge" if isinstance(value, (int, float)) and not isinstance(value, bool):
                parent[last] = value + data.draw(st.sampled_from([-1, 1, 0.5, -value * 2]))
            case "drop":
                del parent[last]
            case "double" if isinstance(parent, list):
                parent.append(copy.deepcopy(value))
            case "double":
                parent[data.draw(st.sampled_from([f"{last}x", *map(str, keys)]))] = copy.deepcopy(value)
            case "swap" if len(parent) > 1:
                second = data.draw(st.sampled_from(keys))
                parent[last], parent[second] = parent[second], value
            case _:
                parent[last] = data.draw(VALUES)
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


def loaded_mutants(rank: int, world_size: int, *, folder: str, kind: str, count: int) -> list[str]:
    """Load mutants of an index; return what was wrong: another error, or an engine that a refused one changed."""
    is_set = kind == "set"
    extra = None if is_set else {"checkpoint": {"load_universal": True}}
    engine = training.make_engine(training.ds_config(2, precision="fp16", extra=extra), seed=7)
    training.run_step(engine, 0, rank, world_size, 1)
    path = Path(folder, "set" if is_set else "universal/step/zero", INDEX)
    text, good = path.read_bytes(), verify_folder(path.parent)
    wrong: list[str] = []
    tally = {"refused": 0, "loaded": 0}

    def load() -> dict[str, Any]:
        if is_set:
            restore(engine, path.parent)
        else:
            engine.load_checkpoint(os.path.join(folder, "universal"))
        tally["loaded"] += 1
        if is_set:
            # Every parameter's record says where and what the saved one says.
            index = verify_folder(path.parent)
            assert index.parameters.keys() == good.parameters.keys() and index.files == good.files
            for name, record in index.parameters.items():
                for field in ("shape", "algorithm", "tensors"):
                    assert getattr(record, field) == getattr(good.parameters[name], field)
            for group in engine.basic_optimizer.param_groups:
                assert 0 <= group["lr"] < math.inf and 0 <= group["momentum"] < 1 and group["eps"] > 0
        assert float(engine.optimizer.loss_scale) > 0 and engine.global_steps >= 0
        return snapshot(engine)

    # As it was: so few mutants are admissible that all of a short run may be refused.
    before = load()

    def check(data: st.DataObject) -> None:
        nonlocal before
        mutated = as_text(mutate(json.loads(text), data), data)
        path.write_bytes(mutated)
        try:
            before = load()
        except CheckpointError:
            tally["refused"] += 1
            changed = differences(before, snapshot(engine))
            wrong.extend(f"{changed} by {mutated[-300:]!r}" for _ in changed[:1])
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")

    try:
        fuzz(check, count, 3 if is_set else 4)
    finally:
        path.write_bytes(text)
        engine.destroy()
    return [*wrong, *([] if min(tally.values()) else [f"one-sided: {tally}"])]


@pytest.mark.parametrize(
    ("kind", "count"), [("set", 30), full("set", 400), ("universal", 40), full("universal", 200)]
)
def test_loads_of_mutated_indexes(ranks: Any, saved: Path, kind: str, count: int) -> None:
    assert ranks(1).run(loaded_mutants, folder=str(saved), kind=kind, count=count) == [[]]
