"""Two conversions into one folder wrote into the same temporary folder, and each removed the other's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed_muon.checkpoint import offline
from deepspeed_muon.checkpoint.files import lock, unlock
from deepspeed_muon.checkpoint.sources import ConsolidatedSource
from deepspeed_muon.errors import CheckpointError


def saved_by_adamw(folder: Path) -> None:
    """Write what DeepSpeed saves of a model at stage 0 after one step of AdamW."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    folder.mkdir()
    content = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "global_steps": 1}
    torch.save(content, folder / "mp_rank_00_model_states.pt")


def test_the_second_to_finish_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_by_adamw(tmp_path / "step1")
    out = tmp_path / "out" / "universal"
    write = offline.consolidate_files
    running = []

    def write_with_another_conversion_meanwhile(*args, **reading):  # type: ignore[no-untyped-def]
        index = write(*args, **reading)
        if not running:
            running.append(True)
            offline.convert_to_universal(tmp_path / "step1", out)
        return index

    monkeypatch.setattr(offline, "consolidate_files", write_with_another_conversion_meanwhile)
    with pytest.raises(CheckpointError, match="not empty"):
        offline.convert_to_universal(tmp_path / "step1", out)
    source = ConsolidatedSource(out / "zero")
    assert source.verify(0, 1) == [] and set(source.parameters) == {"weight", "bias"}
    assert sorted(path.name for path in out.parent.iterdir()) == ["latest_universal", "universal"]


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    """Only folders of conversions to the same place, and only those whose lock no living process holds."""
    saved_by_adamw(tmp_path / "step1")
    out = tmp_path / "out" / "universal"
    left, living, other = (
        out.parent / name
        for name in (
            ".universal.0123456789ab.tmp",
            ".universal.aaaaaaaaaaaa.tmp",
            ".universal2.0123456789ab.tmp",
        )
    )
    for folder in (left, living, other):
        (folder / "zero").mkdir(parents=True)
    held = lock(living)
    assert held is not None
    offline.convert_to_universal(tmp_path / "step1", out)
    unlock(held)
    assert not left.exists() and living.exists() and other.exists() and (out / "zero").is_dir()
