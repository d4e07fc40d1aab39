"""The config keys: consolidating with every save of DeepSpeed's, restoring before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import deepspeed_muon
from deepspeed_muon.checkpoint.deepspeed_files import find_tag_folder
from deepspeed_muon.checkpoint.restore import find_consolidated
from deepspeed_muon.errors import CheckpointError
from tests.support import training
from tests.support.checkpoints import assert_equal, engine_for, report_and_go_on, save_ours
from tests.support.harness import RanksFailed

SAVING = {"consolidate_on_save": True}


def restored_by_config(rank: int, world_size: int, *, folder: str, stage: int) -> Any:
    engine = engine_for(stage, seed=7, params={"restore_from": folder})
    return report_and_go_on(engine, 2, rank, world_size)


@pytest.mark.compat
@pytest.mark.parametrize(("stage", "to_stage", "tag"), [(2, 3, None), (3, 0, "best"), (0, 1, None)])
def test_config_keys(ranks: Any, tmp_path: Path, stage: int, to_stage: int, tag: str | None) -> None:
    saved = ranks(2).run(save_ours, folder=str(tmp_path), stage=stage, tag=tag, params=SAVING)[0]
    folder = tmp_path / (tag or "global_step2") / "muon_consolidated"
    assert (folder / "muon_index.json").is_file()

    def check(where: Path) -> None:
        assert_equal(saved, ranks(3).run(restored_by_config, folder=str(where), stage=to_stage)[0])

    check(tmp_path)
    if tag:
        check(folder.parent)
        check(folder)
    if stage:
        # As a save that was killed may leave it.
        (tmp_path / "latest").write_text("another" if tag else "")
        check(tmp_path)


def test_off_by_default(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(save_ours, folder=str(tmp_path), stage=1)
    assert not list(tmp_path.rglob("muon_consolidated"))


def test_restore_from_nothing_is_an_error(ranks: Any, tmp_path: Path) -> None:
    """A run that silently starts afresh would be worse."""
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(restored_by_config, folder=str(tmp_path / "gone"), stage=1)
    failures = caught.value.failures
    assert {failure.type for failure in failures.values()} == {deepspeed_muon.CheckpointError.__name__}
    said = f"optimizer.params.restore_from: {tmp_path}/gone: no such folder: give the folder of a checkpoint"
    assert [failure.message for failure in failures.values()] == [said] * 2


# A killed save left ``latest`` with a tag that has no set, and ``restore`` of the folder found none.


def saves(rank: int, world_size: int, *, folder: str) -> None:
    """Save a set at each of two steps."""
    engine = training.make_engine(training.ds_config(1, params=SAVING))
    for step in range(2):
        training.run_step(engine, step, rank, world_size, 1)
        engine.save_checkpoint(folder)


def test_the_newest_complete_set_is_taken_and_named(
    ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(1).run(saves, folder=str(tmp_path))
    (tmp_path / "latest").write_text("global_step3")
    monkeypatch.setattr("deepspeed_muon.logs.logger.propagate", True)
    for step in (2, 1):
        caplog.clear()
        newest = find_consolidated(tmp_path)
        assert newest.parent.name == f"global_step{step}"
        (said,) = caplog.messages
        assert "'latest' names 'global_step3', which has no set" in said
        assert f"of step {step}, is the newest" in said
        next(newest.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError):
        find_consolidated(tmp_path)


@pytest.mark.parametrize("tag", ["epoch=1/step 2", "v1..2"])
def test_a_tag_may_have_slashes(tmp_path: Path, tag: str) -> None:
    """The set of a tag with a slash was not found, or the set of an earlier tag was taken in its place."""
    for name in ("earlier", tag):
        (tmp_path / name / "muon_consolidated").mkdir(parents=True)
        (tmp_path / name / "muon_consolidated" / "muon_index.json").touch()
    (tmp_path / "latest").write_text(tag)
    assert find_consolidated(tmp_path) == tmp_path / tag / "muon_consolidated"
    assert find_tag_folder(tmp_path) == tmp_path / tag
