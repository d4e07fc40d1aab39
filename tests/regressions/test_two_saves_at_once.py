"""Two saves into one folder at the same time: the first to finish took the other's shards for leftovers.

It removed them, and the other one's index then named files that were gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from deepspeed_muon.checkpoint import consolidate
from deepspeed_muon.checkpoint.consolidate import consolidate_files
from deepspeed_muon.checkpoint.offline import verify_folder
from deepspeed_muon.errors import CheckpointError
from tests.support.checkpoints import at_every_stage, engine_for, train_step


def save_during_a_save(rank: int, world_size: int, *, folder: str, stage: str, locks: bool) -> str:
    """Save once more, from DeepSpeed's files, when a save has reached ``stage``; return why that was refused."""
    engine = engine_for(1, seed=0, kind="toy")
    for step in range(2):
        train_step(engine, step, rank, world_size)
        if not step:
            engine.save_checkpoint(f"{folder}-saved")
    message, acted = "", False

    def act(reached: str) -> None:
        nonlocal message, acted
        if reached == stage and rank == 0 and not acted:
            acted = True  # the second save reaches the same stages
            try:
                consolidate_files(f"{folder}-saved", folder)
            except CheckpointError as error:
                message = str(error)

    original = fcntl.flock

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    try:
        if not locks:
            fcntl.flock = no_locks
        with at_every_stage(act):
            consolidate(engine, folder, shard_bytes=4000)
    finally:
        fcntl.flock = original
    engine.destroy()
    return message


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("stage", ["start", "shards written", "index written"])
def test_neither_of_two_saves_destroys_the_other(ranks: Any, tmp_path: Path, stage: str, locks: bool) -> None:
    """With locks the second is refused; on a file system without them both finish and the last index is whole."""
    folder = tmp_path / "set"
    message = ranks(2).run(save_during_a_save, folder=str(folder), stage=stage, locks=locks)[0]
    index = verify_folder(folder)
    if locks:
        assert "another save is writing into this folder" in message
        assert {path.name for path in folder.iterdir()} == {"muon_index.json", *index.files}
    else:
        assert not message
    assert index.progress.global_steps == (2 if locks or stage != "index written" else 1)
