"""Consolidated and universal checkpoints of float64 models at ZeRO 0 were rounded to fp32 silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspeed_muon.checkpoint import consolidate
from deepspeed_muon.errors import CheckpointError, ConfigError
from deepspeed_muon.tools.convert import consolidate_files, convert_to_universal
from tests.support import training
from tests.support.models import build


def engine_of(stage: int, **params: Any) -> Any:
    return training.initialize(build("toy").double(), training.ds_config(stage, params=params))


def save(rank: int, world_size: int, *, folder: str, stage: int) -> list[str]:
    """Return why each kind of save is refused."""
    engine = engine_of(stage)
    if (
        stage
    ):  # without ZeRO DeepSpeed refuses to reduce float64 gradients, so only the first weights are saved
        training.run_step(engine, 0, rank, world_size, 1)
    engine.save_checkpoint(f"{folder}/deepspeed", tag="tag")
    return [
        training.refusal(lambda: consolidate(engine, f"{folder}/set"), CheckpointError),
        training.refusal(lambda: engine_of(stage, consolidate_on_save=True), ConfigError),
    ]


def test_saves_are_refused(ranks: Any, tmp_path: Path) -> None:
    for by_call, by_key in ranks(2).run(save, folder=str(tmp_path), stage=0):
        assert "is float64" in by_call and "load_checkpoint" in by_call
        assert "consolidate_on_save" in by_key and "is float64" in by_key
    for convert in (consolidate_files, convert_to_universal):
        with pytest.raises(CheckpointError, match="is float64"):
            convert(tmp_path / "deepspeed" / "tag", tmp_path / convert.__name__)


def test_zero_has_masters_in_fp32(ranks: Any, tmp_path: Path) -> None:
    for messages in ranks(2).run(save, folder=str(tmp_path), stage=1):
        assert messages == ["", ""]
