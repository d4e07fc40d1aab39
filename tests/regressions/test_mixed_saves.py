"""Files of different steps in one folder, and ranks at different steps, gave a consolidated set.

The set said the step of rank 0 and held matrices of which one half was newer than the other: an interrupted copy
of a checkpoint, or a tag that was written twice, loaded without a word.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from deepspeed_muon.checkpoint import consolidate
from deepspeed_muon.checkpoint.offline import consolidate_files
from deepspeed_muon.checkpoint.universal import convert_to_universal
from deepspeed_muon.errors import CheckpointError
from tests.support import training
from tests.support.checkpoints import MICROS, engine_for


def save_two_steps(
    rank: int, world_size: int, *, folder: str, stage: int, precision: str, optimizer: str
) -> None:
    extra = {} if optimizer == "Muon" else {"optimizer": {"type": optimizer, "params": {"lr": 1e-3}}}
    config = training.ds_config(stage, precision=precision)
    config.update(extra)
    engine = training.make_engine(config, "toy", seed=0)
    for step in range(2):
        training.run_step(engine, step, rank, world_size, 1)
        engine.save_checkpoint(folder, tag=f"step{step + 1}")
    engine.destroy()


def optimizer_file(rank: int, precision: str) -> str:
    prefix = "" if precision == "fp32" else f"{precision}_"
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_file(rank: int, stage: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"


def refusal(folder: Path, tmp_path: Path) -> str:
    messages = set()
    for convert, name in ((consolidate_files, "set"), (convert_to_universal, "universal")):
        with pytest.raises(CheckpointError) as caught:
            convert(folder, tmp_path / name)
        assert not (tmp_path / name).exists()
        messages.add(str(caught.value))
    (message,) = messages
    return message


CASES = [
    (1, "fp32", "Muon"),
    (2, "bf16", "Muon"),
    (3, "fp32", "Muon"),
    pytest.param(3, "fp32", "AdamW", marks=pytest.mark.full),
    pytest.param(1, "fp32", "AdamW", marks=pytest.mark.full),
    pytest.param(2, "fp16", "Muon", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("stage", "precision", "optimizer"), CASES)
def test_files_of_two_steps_are_refused(
    ranks: Any, tmp_path: Path, stage: int, precision: str, optimizer: str
) -> None:
    saved = tmp_path / "saved"
    ranks(2).run(save_two_steps, folder=str(saved), stage=stage, precision=precision, optimizer=optimizer)
    for step in (1, 2):
        consolidate_files(saved / f"step{step}", tmp_path / f"good{step}")
    # DeepSpeed's bf16 wrappers name their files bf16_, its fp16 wrappers do not name theirs.
    prefix = "bf16" if precision == "bf16" else "fp32"
    swaps = [
        (optimizer_file(0, prefix), "step of partition 0 is 1 in the first, 2 in the second"),
        (optimizer_file(1, prefix), "step of partition 0 is 2 in the first, 1 in the second"),
    ]
    if stage == 3:
        swaps.append((model_file(1, stage), "global_steps is 2 in the first, 1 in the second"))
    if optimizer == "Muon":
        swaps.append((model_file(0, stage), "global_steps is 1 in the first, 2 in the second"))
    for number, (name, needle) in enumerate(swaps):
        mixed = Path(shutil.copytree(saved / "step2", tmp_path / f"mixed{number}"))
        shutil.copy(saved / "step1" / name, mixed / name)
        message = refusal(mixed, tmp_path)
        assert "of different checkpoints" in message and name in message, message
        assert needle in message, message


def test_files_of_more_ranks_than_saved_are_refused(ranks: Any, tmp_path: Path) -> None:
    """A tag that 3 ranks saved and 2 ranks saved again, and one saved in two precisions."""
    arguments = {"stage": 2, "optimizer": "Muon", "precision": "fp32"}
    ranks(2).run(save_two_steps, folder=str(tmp_path / "saved"), **arguments)
    saved = tmp_path / "saved" / "step2"
    first = saved / optimizer_file(0, "fp32")
    shutil.copy(first, saved / optimizer_file(2, "fp32"))
    assert "rank_2" in refusal(saved, tmp_path)
    (saved / optimizer_file(2, "fp32")).unlink()
    shutil.copy(first, saved / optimizer_file(0, "bf16"))
    assert "both are of rank 0" in refusal(saved, tmp_path)


def save_at_two_steps(rank: int, world_size: int, *, folder: str, what: str) -> str:
    engine = engine_for(2, world_size, seed=0, kind="toy")
    training.run_step(engine, 0, rank, world_size, MICROS // world_size)
    if what == "global_steps":
        engine.global_steps += rank
    else:
        for state in engine.basic_optimizer.state.values():
            state["step"] += rank
    with pytest.raises(CheckpointError) as caught:
        consolidate(engine, folder)
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "needle"),
    [
        ("global_steps", "global_steps: ranks [0]: 1; ranks [1]: 2"),
        (
            "step",
            "optimizer steps: ranks [0]: 1 (blocks.1.down.weight, ...); ranks [1]: 2 (blocks.1.down.weight, ...)",
        ),
    ],
)
def test_ranks_at_different_steps_are_refused(ranks: Any, tmp_path: Path, what: str, needle: str) -> None:
    messages = ranks(2).run(save_at_two_steps, folder=str(tmp_path / "set"), what=what)
    assert all(needle in message for message in messages), messages
    assert not list((tmp_path / "set").iterdir())
