"""DeepSpeed's own checkpoints and tools with our optimizer: resuming at the same topology, and reading from outside."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import deepspeed_muon
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY
from deepspeed_muon.tools.convert import consolidate_files
from tests.support import snapshots, training
from tests.support.checkpoints import (
    CODES,
    NORMUON,
    ROUND,
    SMALL,
    STATES,
    engine_for,
    report,
    train_step,
    trained_for,
)
from tests.support.engines import BF16_MASTERS, BF16_STATES
from tests.support.models import MATRICES, build
from tests.support.thinning import each_value, full, with_settings
from tests.support.training import FP32_SUMS, OFFLOAD

SCALE = {"initial_scale_power": 33, "loss_scale_window": 2, "hysteresis": 1}
"""fp16 overflows at once and steps are skipped, then the scale grows again every two steps."""


def resumed(rank: int, world_size: int, *, stage: int, folder: str, phase: str, **settings: Any) -> Any:
    """Train and save in the middle (``whole``), or load in a new engine and train the remaining steps (``rest``)."""
    engine = engine_for(stage, seed=0 if phase == "whole" else 7, **settings)
    if phase == "rest":
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
    scales, rates, losses = [], [], []
    # An fp16 scale takes ten steps to come down to gradients that do not overflow.
    saved_after, steps = (10, 18) if (settings["extra"] or {}).get("fp16") == SCALE else (3, 6)
    for step in range(steps) if phase == "whole" else range(saved_after, steps):
        losses.append(training.run_step(engine, step, rank, world_size, 1))
        scales.append(float(getattr(engine.optimizer, "loss_scale", 1.0)))
        rates.append([float(group["lr"]) for group in engine.basic_optimizer.param_groups])
        if phase == "whole" and step == saved_after - 1:
            engine.save_checkpoint(folder)
    result = report(engine)
    rest = slice(saved_after - steps, None)
    result.update(
        scales=scales[rest], all_rates=rates[rest], losses=losses[rest], skipped=engine.skipped_steps
    )
    return result


CASES = [
    (0, "fp32", {}, {}),
    (0, "bf16", {}, {}),
    (2, "fp16", {}, {}),
    (3, "fp32", SMALL, {}),
    (1, "fp32", OFFLOAD, {}),
    (2, "bf16", OFFLOAD, {}),
    (3, "bf16", OFFLOAD, {}),
    (3, "fp32", {**OFFLOAD, "offload_param": {"device": "cpu"}}, {}),
    (2, "fp32", ROUND, {}),
    (3, "fp32", {"pipeline_loading_checkpoint": True}, {}),
    (0, "fp16", {}, {"fp16": SCALE}),
    (1, "fp16", {}, {"fp16": SCALE}),
    (2, "fp16", OFFLOAD, {"fp16": SCALE}),
    (3, "fp16", {}, {"fp16": SCALE}),
    (1, "bf16", {}, FP32_SUMS),
]


@pytest.mark.parametrize(
    ("stage", "precision", "zero", "extra", "params"),
    [
        *with_settings(each_value(CASES), {}),
        (2, "fp32", OFFLOAD, {}, NORMUON),
        full(3, "fp32", SMALL, {}, NORMUON),
        full(0, "fp32", {}, {}, NORMUON),
        full(1, "bf16", {}, {}, NORMUON),
        (3, "fp32", SMALL, {}, {"momentum_dtype": "bf16"}),
        full(1, "bf16", OFFLOAD, {}, {"momentum_dtype": "bf16"}),
        (2, "bf16", OFFLOAD, {}, CODES),
        full(1, "bf16", {}, FP32_SUMS, CODES),
        full(3, "fp32", SMALL, {}, CODES),
        full(2, "bf16", OFFLOAD, BF16_MASTERS, {}),
        (3, "bf16", {}, BF16_STATES, {}),
    ],
)
def test_resume_is_bit_identical(
    ranks: Any, tmp_path: Path, stage: int, precision: str, zero: Any, extra: Any, params: Any
) -> None:
    settings = {"precision": precision, "zero": zero, "extra": extra, "params": params}
    arguments = {"stage": stage, "folder": str(tmp_path), **settings}
    uninterrupted = ranks(2).run(resumed, phase="whole", **arguments)
    rest = ranks(2).run(resumed, phase="rest", **arguments)
    for rank in range(2):
        for key in ("scales", "all_rates", "losses", "steps", "global_steps", "skipped"):
            assert uninterrupted[rank][key] == rest[rank][key], key
        training.assert_same_bits(
            rest[rank], uninterrupted[rank], "fp32", *STATES, *(["rows"] if params == NORMUON else [])
        )
    if extra.get("fp16") == SCALE:
        assert uninterrupted[0]["skipped"] > 0 and len(set(uninterrupted[0]["scales"])) > 1, "the scale moved"


class Rising(lr_scheduler.LRScheduler):
    """A warm-up before another schedule, which is an attribute and so part of ``state_dict()``, with its optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.then = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        if self.last_epoch < 3:
            return [base * (self.last_epoch + 1) / 3 for base in self.base_lrs]
        self.then.step()
        return self.then.get_last_lr()


def nested_schedule(rank: int, world_size: int, *, stage: int, folder: str) -> Any:
    """Train on after a save, in the engine that saved and in one that loads; return the rates and masters of both."""
    results = []
    for seed in (0, 7):
        config = training.ds_config(stage)
        engine = training.initialize(build("toy", seed=seed), config, lr_scheduler=Rising)
        if seed == 0:
            training.train_steps(engine, 4, rank, world_size)
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        for step in range(4, 6):
            training.run_step(engine, step, rank, world_size, 1)
        rates = [group["lr"] for group in engine.basic_optimizer.param_groups]
        results.append((rates, training.full_masters(engine)))
    return results


@pytest.mark.parametrize("stage", [full(0), full(1), 3])
def test_a_schedule_within_a_schedule(ranks: Any, tmp_path: Path, stage: int) -> None:
    """The rank that writes the schedule raised, as the optimizer cannot be pickled, and the others waited for it."""
    saved, loaded = ranks(2).run(nested_schedule, stage=stage, folder=str(tmp_path))[0]
    assert saved[0] == loaded[0]
    for name, master in saved[1].items():
        assert torch.equal(master, loaded[1][name]), name


@pytest.mark.parametrize("stage", [full(0), 2, full(3)])
def test_saves_that_are_no_archives(ranks: Any, tmp_path: Path, stage: int) -> None:
    """Of ``checkpoint_serialization`` false: neither the engine nor the command read them."""
    settings = {
        "stage": stage,
        "folder": str(tmp_path),
        "extra": {"checkpoint": {"checkpoint_serialization": False}},
    }
    uninterrupted = ranks(2).run(resumed, phase="whole", **settings)
    rest = ranks(2).run(resumed, phase="rest", **settings)
    for rank in range(2):
        training.assert_same_bits(rest[rank], uninterrupted[rank], "fp32", *STATES)
    assert consolidate_files(tmp_path, tmp_path / "set").progress.global_steps == 3


def tools(rank: int, world_size: int, *, stage: int, folder: str, precision: str) -> Any:
    """Compare what DeepSpeed's tools say of a parameter with our own layouts; write through them too."""
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    engine = trained_for(rank, world_size, stage, precision=precision)
    masters, momentum = training.full_masters(engine), training.full_states(engine, "momentum_buffer")
    moments = training.full_states(engine, "exp_avg")
    for name, param in engine.module.named_parameters():
        assert torch.equal(safe_get_full_fp32_param(param).double(), masters[name]), name
        if name in MATRICES["toy"]:
            read = safe_get_full_optimizer_state(param, "momentum_buffer")
            assert torch.equal(read.double(), momentum[name]), name
            safe_set_full_optimizer_state(param, read * 2, "momentum_buffer")
        else:
            # ZeRO 1 and 2 linked the state of the first param group alone, and ranks without elements hung.
            read = safe_get_full_optimizer_state(param, "exp_avg")
            assert torch.equal(read.double(), moments[name]), name
        safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 3)
    for name, tripled in training.full_masters(engine).items():
        assert torch.equal(tripled.float(), masters[name].float() * 3), name
    for name, doubled in training.full_states(engine, "momentum_buffer").items():
        assert torch.equal(doubled.float(), momentum[name].float() * 2), name
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "half.bin")
    result = training.full_masters(engine)
    train_step(engine, 2, rank, world_size)
    engine.load_checkpoint(folder)
    for name, param in engine.module.named_parameters():
        # ZeRO 1 and 2 forgot in a load where the state is, and ranks without elements hung.
        if name in MATRICES["toy"]:
            read = safe_get_full_optimizer_state(param, "momentum_buffer")
            assert torch.equal(read.double(), momentum[name] * 2), name
    return result


@pytest.mark.compat
@pytest.mark.parametrize(("stage", "precision"), each_value(product((1, 2, 3), ("fp32", "bf16", "bf16acc"))))
def test_deepspeeds_tools(ranks: Any, tmp_path: Path, stage: int, precision: str) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    masters = ranks(2).run(tools, stage=stage, folder=str(tmp_path), precision=precision)[0]
    read = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert read.keys() == masters.keys()
    for name, master in masters.items():
        assert torch.equal(read[name].double(), master), name
    if stage < 3:  # at stage 3 it needs stage3_gather_16bit_weights_on_model_save
        assert (tmp_path / "half.bin").is_file()


def gathered_model(rank: int, world_size: int, *, folder: str) -> Any:
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = trained_for(rank, world_size, 3, 1, precision="bf16", zero=zero)
    assert engine.save_16bit_model(folder, "half.bin")
    return training.full_masters(engine)


def test_save_16bit_model_of_stage_3(ranks: Any, tmp_path: Path) -> None:
    masters = ranks(2).run(gathered_model, folder=str(tmp_path))[0]
    half = torch.load(tmp_path / "half.bin", weights_only=True)
    for name, master in masters.items():
        assert torch.equal(half[name], master.float().bfloat16()), name


def load_damaged(rank: int, world_size: int, *, stage: int, folder: str, missing: bool) -> str:
    """Save, damage the state of rank 1, and return the error of the load."""
    engine = trained_for(rank, world_size, stage)
    engine.save_checkpoint(folder, tag="saved")
    if rank == 1:
        file = Path(engine._get_zero_ckpt_name(folder, "saved"))
        content = torch.load(file, weights_only=False)
        wrapper = content["optimizer_state_dict"]
        optimizer = wrapper["optimizer_state_dict"] if stage == 3 else wrapper["base_optimizer_state"]
        for state in optimizer["state"].values():
            state["step"] = "three"
        torch.save(content, file)
        if missing:
            file.unlink()
    torch.distributed.barrier()
    return training.refusal(lambda: engine.load_checkpoint(folder, tag="saved"))


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_damaged_state_of_one_rank_is_refused_by_all(
    ranks: Any, tmp_path: Path, stage: int, missing: bool
) -> None:
    """The other ranks went on, and waited for the one that had raised."""
    first, second = ranks(2).run(load_damaged, stage=stage, folder=str(tmp_path), missing=missing)
    assert first.startswith("CheckpointError") and second.startswith("CheckpointError"), (first, second)
    assert ("no such file" if missing else "three") in second


def load_refused(
    rank: int, world_size: int, *, stage: int, folder: str, offload: bool, precision: str
) -> Any:
    """Return what a load says into an engine of another precision, or one whose states were moved away."""
    saver = trained_for(rank, world_size, stage)
    saver.save_checkpoint(folder, tag="saved")
    deepspeed_muon.consolidate(saver, f"{folder}/set")
    engine = engine_for(stage, seed=7, precision=precision)
    before = snapshots.tensors_of(engine)
    if offload:
        engine.offload_states()
        said = training.refusal(lambda: deepspeed_muon.restore(engine, f"{folder}/set"))
        if stage == 3:
            said += training.refusal(lambda: engine.load_checkpoint(folder, tag="saved"))
        engine.reload_states()
    else:
        said = training.refusal(lambda: engine.load_checkpoint(folder, tag="saved"))
    assert not snapshots.changed(before, snapshots.tensors_of(engine))
    train_step(engine, 0, rank, world_size)
    return said


@pytest.mark.parametrize(("stage", "precision"), each_value(product((0, 1, 2, 3), ("bf16", "fp16"))))
def test_a_save_of_another_precision_is_refused(
    ranks: Any, tmp_path: Path, stage: int, precision: str
) -> None:
    """It said that files are missing, or raised a KeyError after the weights had been replaced."""
    arguments = {"stage": stage, "folder": str(tmp_path), "offload": False, "precision": precision}
    for said in ranks(2).run(load_refused, **arguments):
        assert said.startswith("CheckpointError") and "in float32" in said and "restore_from" in said
        assert {"bf16": "bfloat16", "fp16": "float16"}[precision] in said


@pytest.mark.parametrize("stage", [full(1), 2, 3])
def test_a_load_while_states_are_offloaded_is_refused(ranks: Any, tmp_path: Path, stage: int) -> None:
    """It ended in an IndexError after masters and state had been written."""
    arguments = {"stage": stage, "folder": str(tmp_path), "offload": True, "precision": "fp32"}
    for said in ranks(2).run(load_refused, **arguments):
        assert said.count("call engine.reload_states()") == (2 if stage == 3 else 1)


def load_nan(rank: int, world_size: int, *, folder: str, stage: int) -> tuple[str, list[str]]:
    """Save optimizer state with a NaN on one rank; return what the load says, and what it changed."""
    engine = trained_for(rank, world_size, stage)
    for state in engine.basic_optimizer.state.values() if rank == 0 else ():
        next(value for value in state.values() if torch.is_tensor(value)).view(-1)[0] = math.nan
    engine.save_checkpoint(folder, tag="t")
    engine = trained_for(rank, world_size, stage, 1, seed=7)
    return snapshots.attempted(engine, lambda: engine.load_checkpoint(folder))


@pytest.mark.parametrize("stage", [0, full(1), 3])
def test_state_with_nan_changes_nothing(ranks: Any, tmp_path: Path, stage: int) -> None:
    """It was said only after DeepSpeed had replaced the weights."""
    for said, changed in ranks(2).run(load_nan, folder=str(tmp_path), stage=stage):
        assert "holds an infinity or NaN" in said and "load_optimizer_states=False" in said
        assert not changed


def save_refused(rank: int, world_size: int, *, folder: str) -> list[str]:
    """Return what saves say while one rank has a rate that no load takes."""
    engine = trained_for(rank, world_size, 2)
    if rank == 0:
        engine.basic_optimizer.param_groups[0]["lr"] = math.nan
    saves = (
        lambda: engine.save_checkpoint(folder, tag="saved"),
        lambda: deepspeed_muon.consolidate(engine, f"{folder}/set"),
    )
    refusals = [training.refusal(save) for save in saves]
    assert engine.basic_optimizer.state_dict()[RECORD_KEY]["save"] is None, "no save is running"
    return refusals


def test_a_rate_that_no_load_takes_is_not_saved(ranks: Any, tmp_path: Path) -> None:
    for refusals in ranks(2).run(save_refused, folder=str(tmp_path)):
        assert all("param group 0.lr: must be a number from" in said for said in refusals), refusals
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
