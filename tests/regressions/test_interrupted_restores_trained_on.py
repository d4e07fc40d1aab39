"""A restore that was interrupted left a mixture of two states, and the engine trained, saved and evaluated it.

Beside it: an interrupt of a save was swallowed by an error of its own cleaning up, and a save in a thread beside a step
ended in an IndexError, or in a set of another step.
"""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.tools.convert import verify_folder
from tests.support.checkpoints import engine_for, train_step, trained_for
from tests.support.models import batch
from tests.support.snapshots import differences, snapshot
from tests.support.thinning import full
from tests.support.training import refusal


def interrupted(rank: int, world_size: int, *, folder: str, stage: int) -> list[str]:
    """Interrupt restores at several points, on one rank or all; return what was wrong."""
    saved = trained_for(rank, world_size, stage, 1)
    consolidate(saved, folder)
    expected = snapshot(saved)
    engine = engine_for(stage, seed=7)
    train_step(engine, 1, rank, world_size)
    scheduler = type(engine.lr_scheduler)
    wrong: list[str] = []
    for owner, method, point, everywhere in (
        (importlib.import_module("deepspeed_muon.checkpoint.restore"), "read_fragment", 1, False),
        (importlib.import_module("deepspeed_muon.checkpoint.restore"), "read_fragment", 4, True),
        (scheduler, "load_state_dict", 1, True),
    ):
        original = getattr(owner, method)
        hit, calls = everywhere or rank == 0, 0

        def interrupting(
            *arguments: Any, original: Any = original, point: int = point, hit: bool = hit
        ) -> None:
            nonlocal calls
            calls += 1
            if calls == point and hit:
                raise KeyboardInterrupt
            original(*arguments)

        with mock.patch.object(owner, method, interrupting):
            said = refusal(lambda: restore(engine, folder), (KeyboardInterrupt, CheckpointError))
        if said.startswith("KeyboardInterrupt") != hit or not said:
            wrong.append(f"{method} {point}: {said}")
        engine.set_gradient_accumulation_boundary(True)
        for call in (
            lambda: engine(*batch(0, 0)),
            lambda: engine.module(*batch(0, 0)),
            engine.step,
            lambda: engine.save_checkpoint(folder + "-saved"),
            lambda: consolidate(engine, folder + "-again"),
        ):
            if "Restore again" not in (said := refusal(call, CheckpointError)):
                wrong.append(f"{method} {point}: went on: {said}")
        engine.set_gradient_accumulation_boundary(None)
        restore(engine, folder)
        wrong += differences(expected, snapshot(engine))
        train_step(engine, 1, rank, world_size)
    return wrong


@pytest.mark.parametrize("stage", [0, full(1), 3])
def test_until_a_restore_has_ended_the_engine_refuses(ranks: Any, tmp_path: Path, stage: int) -> None:
    assert ranks(2).run(interrupted, folder=str(tmp_path / "set"), stage=stage) == [[], []]


def interrupted_save(rank: int, world_size: int, *, folder: str) -> list[Any]:
    """Interrupt a save while its thread ends and still writes; return what came of it, and what was left."""
    engine = engine_for(1, seed=0)
    original = ThreadPoolExecutor.shutdown
    calls = 0

    def shutdown(pool: ThreadPoolExecutor, *arguments: Any, **keywords: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        original(pool, *arguments, **keywords)

    with mock.patch.object(ThreadPoolExecutor, "shutdown", shutdown):
        said = refusal(lambda: consolidate(engine, folder, shard_bytes=2000), BaseException)
    return [said, sorted(path.name for path in Path(folder).glob("*.safetensors*"))]


def test_an_interrupt_of_a_save_is_not_swallowed(ranks: Any, tmp_path: Path) -> None:
    assert ranks(1).run(interrupted_save, folder=str(tmp_path / "set")) == [["KeyboardInterrupt: ", []]]


def saved_in_a_thread(rank: int, world_size: int, *, folder: str) -> str:
    engine = trained_for(rank, world_size, 1, 1)
    said: list[str] = []
    threads = [
        threading.Thread(
            target=lambda call=call: said.append(refusal(lambda: call(engine, folder), CheckpointError))
        )
        for call in (consolidate, restore)
    ]
    for thread in threads:
        thread.start()
    train_step(engine, 1, rank, world_size)
    for thread in threads:
        thread.join()
    consolidate(engine, folder)
    return " and ".join(said)


def test_a_save_in_another_thread_than_the_steps_is_refused(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(2).run(saved_in_a_thread, folder=str(tmp_path)):
        assert said.count("in the thread that calls engine.step") == 2, said
    assert verify_folder(tmp_path).progress.global_steps == 2
