"""A killed save left ``latest`` with a tag that has no set, and ``restore`` of the folder found none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspeed_muon.checkpoint.sources import find_consolidated
from deepspeed_muon.errors import CheckpointError
from tests.support import training


def saves(rank: int, world_size: int, *, folder: str) -> None:
    """Save a set at each of two steps."""
    engine = training.make_engine(training.ds_config(1, params={"consolidate_on_save": True}))
    for step in range(2):
        training.run_step(engine, step, rank, world_size, 1)
        engine.save_checkpoint(folder)
    engine.destroy()


def test_the_newest_complete_set_is_found_and_told(
    ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(1).run(saves, folder=str(tmp_path))
    (tmp_path / "latest").write_text("global_step3")
    monkeypatch.setattr("deepspeed_muon.logs.logger.propagate", True)
    for step in (2, 1):
        caplog.clear()
        found = find_consolidated(tmp_path)
        assert found.parent.name == f"global_step{step}"
        (said,) = caplog.messages
        assert (
            "'latest' names 'global_step3', which has no set" in said
            and f"of step {step}, is the newest" in said
        )
        next(found.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError):
        find_consolidated(tmp_path)
