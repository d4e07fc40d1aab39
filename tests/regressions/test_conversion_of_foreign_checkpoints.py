"""DeepSpeed's ``ds_to_universal`` in a program that imports this package: only our checkpoints are converted by us.

Any checkpoint that could not be read was taken for AdamW's, and one that only this package could not read, or that
held DeepSpeed's own Muon, took our way and failed with our errors.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

import deepspeed_muon
from tests.support.checkpoints import converter_options, save_other, save_ours
from tests.support.thinning import full

TAG = "global_step2"


def convert(main: Any, source: Path, target: Path) -> str:
    """Return the error of a conversion, or an empty text."""
    try:
        main(converter_options(source, target))
    except BaseException as error:
        return f"{type(error).__name__}: {error}".replace(str(target), "TARGET")
    return ""


def both_ways(source: Path, folder: Path) -> tuple[str, str]:
    """Convert with the hook that the import installs, and with DeepSpeed's own function."""
    hooked, own = ds_to_universal.main, ds_to_universal.main.__wrapped__
    return convert(hooked, source, folder / "hooked"), convert(own, source, folder / "own")


@pytest.mark.parametrize(
    "damage", ["truncated", "empty folder", *(full(each) for each in ("class", "missing"))]
)
def test_a_damaged_foreign_checkpoint_gives_deepspeeds_error(ranks: Any, tmp_path: Path, damage: str) -> None:
    source = tmp_path / "in" / TAG
    if damage == "empty folder":
        source.mkdir(parents=True)
    else:
        ranks(2).run(save_other, folder=str(tmp_path / "in"), optimizer="AdamW", stage=2, zero={})
        files = sorted(source.glob("*_optim_states.pt"))
        if damage == "truncated":
            for file in files:
                file.write_bytes(file.read_bytes()[:1000])
        elif damage == "class":
            torch.save({"optimizer_state_dict": types.SimpleNamespace()}, files[0])
        else:
            files[0].unlink()
    hooked, own = both_ways(source, tmp_path)
    assert hooked == own and hooked != "" and "deepspeed_muon" not in hooked


@pytest.mark.full
def test_deepspeeds_muon_is_deepspeeds_to_convert(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save_other, folder=str(tmp_path / "in"), optimizer="Muon", stage=2, zero={})
    hooked, own = both_ways(tmp_path / "in" / TAG, tmp_path)
    assert hooked == own
    assert not (tmp_path / "hooked" / "zero" / "muon_index.json").exists()


@pytest.mark.full
def test_a_sound_foreign_checkpoint_gives_the_same_files(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save_other, folder=str(tmp_path / "in"), optimizer="AdamW", stage=2, zero={})
    assert both_ways(tmp_path / "in" / TAG, tmp_path) == ("", "")
    found = [
        sorted(path.relative_to(tmp_path / way) for path in (tmp_path / way).rglob("*.pt"))
        for way in ("hooked", "own")
    ]
    assert found[0] == found[1] and found[0]
    for path in (path for path in found[0] if path.parts[0] == "zero" and path.stem != "optimizer_state"):
        first, second = (torch.load(tmp_path / way / path, weights_only=False) for way in ("hooked", "own"))
        if isinstance(first, dict):
            first, second = first["param"], second["param"]
        assert torch.equal(torch.as_tensor(first), torch.as_tensor(second)), path


def test_ours_with_a_damaged_file_is_still_ours(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save_ours, folder=str(tmp_path / "in"), stage=2)
    first, *_ = sorted((tmp_path / "in" / TAG).glob("*_optim_states.pt"))
    first.write_bytes(first.read_bytes()[:1000])
    said = convert(ds_to_universal.main, tmp_path / "in" / TAG, tmp_path / "out")
    assert said.startswith(deepspeed_muon.CheckpointError.__name__) and first.name in said
