"""Checkpoints that another optimizer, stage, number of ranks or configuration saved: what they bring, what is said."""

from __future__ import annotations

import functools
import re
import shlex
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, LambdaLR

import deepspeed_muon
from deepspeed_muon import __main__ as cli
from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.tools.convert import consolidate_files, convert_to_universal
from tests.support import snapshots, training
from tests.support.checkpoints import (
    SMALL,
    converter_options,
    engine_for,
    save_foreign,
    save_ours,
    train_step,
)
from tests.support.thinning import full

WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.5, "warmup_num_steps": 20, "warmup_type": "linear"},
}


def settings(engine: Any) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in group.items() if k != "params"} for group in engine.basic_optimizer.param_groups
    ]


def restored(rank: int, world_size: int, *, folder: str, stage: int, schedule: bool) -> dict[str, Any]:
    """Restore a set and take a step; return the settings before and after, and the rates of the run's schedule."""
    engine = engine_for(stage, seed=7, extra=None if schedule else {"scheduler": {}})
    before = settings(engine)
    restore(engine, folder)
    after, rates = settings(engine), engine.lr_scheduler and engine.lr_scheduler.get_lr()
    train_step(engine, 2, rank, world_size)
    return {"before": before, "after": after, "rates": rates, "steps": engine.global_steps}


@pytest.mark.parametrize(
    ("optimizer", "stage", "to_stage", "schedule"),
    [full("AdamW", 2, 0, False), ("AdamW", 0, 3, True), full("AdamW", 3, 1, True), ("Muon", 3, 2, False)],
)
def test_a_converted_set_brings_no_settings(
    ranks: Any, tmp_path: Path, optimizer: str, stage: int, to_stage: int, schedule: bool
) -> None:
    """The documented way from AdamW ran both halves at AdamW's rate, with its decay and betas."""
    arguments = {"folder": str(tmp_path / "in"), "optimizer": optimizer, "stage": stage, "zero": {}}
    ranks(2).run(save_foreign, extra={"scheduler": WARMUP} if schedule else None, **arguments)
    assert cli.main(["checkpoint", "consolidate", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    for result in ranks(2).run(restored, folder=str(tmp_path / "out"), stage=to_stage, schedule=schedule):
        if schedule:
            # The run's own schedule after two of its eight steps to 0.01; AdamW's half has 0.15 of that.
            before, after = ([group.pop("lr") for group in result[key]] for key in ("before", "after"))
            assert before == [0, 0] and after == result["rates"] == pytest.approx([0.00125, 0.0001875])
        assert result["after"] == result["before"] and result["steps"] == 3


def scheduled(rank: int, world_size: int, *, folder: str, kind: str) -> dict[str, Any]:
    """Save a run with one of torch's schedulers after two steps; restore it twice with another rate."""
    made = {
        "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
        "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 8),
        "CosineAnnealingWarmRestarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 8),
    }[kind]
    report: dict[str, Any] = {}
    for rate in (0.02, 0.04):
        engine = training.make_engine(training.ds_config(1, params={"muon_lr": rate}))
        engine.lr_scheduler = made(engine.basic_optimizer)
        if rate == 0.02:
            training.train_steps(engine, 2, rank, world_size)
            report["saved"] = [group["lr"] for group in engine.basic_optimizer.param_groups]
            consolidate(engine, folder)
        else:
            load = functools.partial(restore, engine, folder, hyperparameters=False)
            report["refused"] = training.refusal(load, CheckpointError)
            report["restored"] = [group["lr"] for group in engine.basic_optimizer.param_groups]
            report["bases"] = engine.lr_scheduler.base_lrs
    return report


@pytest.mark.parametrize("kind", ["LambdaLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts"])
def test_a_schedule_goes_on_with_the_configured_rates(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Without the saved settings, the state of torch's schedulers brought the saved rates nevertheless."""
    for report in ranks(2).run(scheduled, folder=str(tmp_path), kind=kind):
        assert report["bases"] == [0.04, 3e-3]
        if kind == "CosineAnnealingWarmRestarts":
            assert "scheduler=False" in report["refused"] and report["restored"] == [0.04, 3e-3]
        else:
            assert report["restored"] == pytest.approx([2 * report["saved"][0], report["saved"][1]])


def attempted(engine: Any, folder: str, by: str) -> dict[str, Any]:
    """Load; return the warning, or the refusal and whether anything was changed."""
    lines = training.heard()
    options = {"hyperparameters": False} if by == "restore without settings" else {}
    load = engine.load_checkpoint if by == "load_checkpoint" else functools.partial(restore, engine)
    refused, changed = snapshots.attempted(engine, lambda: load(folder, **options))
    lines = [line for line in lines if "replaced" in line]
    return {"lines": lines, "refused": refused, "unchanged": not changed}


def loaded(
    rank: int, world_size: int, *, folder: str, stage: int, by: str = "load_checkpoint", **given: Any
) -> dict[str, Any]:
    """Load into a new engine."""
    engine = engine_for(stage, seed=7, **given)
    return attempted(engine, folder, by)


def loaded_twice(
    rank: int, world_size: int, *, folder: str, stage: int, **given: Any
) -> list[dict[str, Any]]:
    """Restore into a new engine, then load into the same."""
    engine = engine_for(stage, seed=7, **given)
    return [attempted(engine, folder, by) for by in ("restore", "load_checkpoint")]


def run_command_in(message: str) -> str:
    """Run the command that a message names; return the path that it gives restore_from."""
    command = re.search(r"'python -m deepspeed_muon (.*?)' and set", message)
    path = re.search(r'"restore_from": "(.*?)"', message)
    assert command and path, message
    assert cli.main(shlex.split(command.group(1))) == 0
    return path.group(1)


@pytest.mark.parametrize(
    ("kind", "stage", "to_stage", "size"),
    [
        ("AdamW", 2, 2, 2),
        full("AdamW", 0, 0, 2),
        full("AdamW", 3, 3, 2),
        full("AdamW", 1, 3, 3),
        ("Muon", 2, 1, 2),
        full("Muon", 3, 3, 2),
        full("ours", 1, 3, 2),
        full("ours", 3, 0, 2),
        ("ours", 0, 2, 3),
        full("ours", 3, 3, 3),
        full("ours", 2, 2, 1),
    ],
)
def test_a_foreign_checkpoint_names_the_command(
    ranks: Any, tmp_path: Path, kind: str, stage: int, to_stage: int, size: int
) -> None:
    """DeepSpeed blamed parameter_alignment, raised an empty AssertionError, or loaded other shapes in silence."""
    folder = str(tmp_path / "a run")
    if kind == "ours":
        ranks(2).run(save_ours, folder=folder, stage=stage)
    else:
        ranks(2).run(save_foreign, folder=folder, optimizer=kind, stage=stage, zero={})
    saver = {"ours": "deepspeed_muon", "Muon": "DeepSpeed's Muon"}.get(kind, kind)
    said = f"saved by {saver} at ZeRO stage {stage} on 2 data-parallel ranks"
    foreign = ranks(size).run(loaded_twice, folder=folder, stage=to_stage)
    for result in (case for both in foreign for case in both):
        assert said in result["refused"] and result["unchanged"], result
        assert "checkpoint consolidate " in result["refused"]
    path = run_command_in(foreign[0][1]["refused"])
    for by_restore, by_deepspeed in ranks(size).run(loaded_twice, folder=path, stage=to_stage):
        assert not by_restore["refused"] and not by_restore["unchanged"]
        assert "consolidated set, which engine.load_checkpoint does not read" in by_deepspeed["refused"]


@pytest.mark.parametrize("stage", [0, full(2), 3])
def test_routes_that_changed_are_named(ranks: Any, tmp_path: Path, stage: int) -> None:
    """The message said "another order (order was 'balanced') than this engine's ('balanced')"."""
    saved = {"exclude": ["blocks.1.up.weight"]}
    ranks(2).run(save_ours, folder=str(tmp_path), stage=stage, params=saved)
    for result in ranks(2).run(loaded, folder=str(tmp_path), stage=stage, params={"exclude": ["blocks.0.*"]}):
        assert result["unchanged"]
        assert "blocks.0.up.weight went to muon, and goes to adamw now (exclude" in result["refused"], result
        assert "blocks.1.up.weight went to adamw, and goes to muon now" in result["refused"]
        assert '"include": [], "exclude": ["blocks.1.up.weight"]' in result["refused"]


def test_a_universal_checkpoint_names_its_key(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save_ours, folder=str(tmp_path), stage=1)
    convert_to_universal(tmp_path / "global_step2", tmp_path / "universal")
    (tmp_path / "latest").write_text("universal")
    for both in ranks(2).run(loaded_twice, folder=str(tmp_path), stage=1):
        for result in both:
            assert '"checkpoint": {"load_universal": true}' in result["refused"] and result["unchanged"]


def test_a_universal_checkpoint_of_adamw_brings_no_settings(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save_foreign, folder=str(tmp_path / "in"), optimizer="AdamW", stage=2, zero={})
    convert_to_universal(tmp_path / "in" / "global_step2", tmp_path / "universal")
    extra = {"checkpoint": {"load_universal": True}, "scheduler": {}}
    for result in ranks(2).run(loaded, folder=str(tmp_path), stage=1, extra=extra):
        assert not result["lines"] and not result["refused"] and not result["unchanged"]


def loaded_without_state(rank: int, world_size: int, *, folder: str, options: dict[str, bool]) -> list[float]:
    """Load a universal checkpoint into an fp16 run with another rate and loss scale; return both."""
    extra = {"checkpoint": {"load_universal": True}}
    engine = training.make_engine(
        training.ds_config(2, precision="fp16", params={"muon_lr": 0.5}, extra=extra)
    )
    engine.optimizer.loss_scaler.cur_scale = 64.0
    engine.load_checkpoint(folder, **options)
    return [engine.basic_optimizer.param_groups[0]["lr"], float(engine.optimizer.loss_scale)]


def test_a_universal_checkpoint_without_state_brings_no_settings(ranks: Any, tmp_path: Path) -> None:
    """Rates and loss scale of the saved run replaced those of this one."""
    constant = {"precision": "fp16", "extra": {"scheduler": {}}}
    ranks(2).run(save_ours, folder=str(tmp_path / "in"), stage=2, **constant)
    convert_to_universal(tmp_path / "in" / "global_step2", tmp_path / "universal" / "step")
    for options, expected in (({"load_module_only": True}, [0.5, 64.0]), ({}, [0.02, 256.0])):
        arguments = {"folder": str(tmp_path / "universal"), "options": options}
        assert ranks(2).run(loaded_without_state, **arguments) == [expected] * 2


@pytest.mark.parametrize(
    ("stage", "by", "mode"), [(1, "load_checkpoint", "cautious"), (0, "restore", "independent")]
)
def test_a_setting_that_this_run_refuses(ranks: Any, tmp_path: Path, stage: int, by: str, mode: str) -> None:
    """A load replaced weights and counters before it refused a saved setting, or took what this run refuses."""
    saved = {"weight_decay_mode": mode}
    ranks(2).run(save_ours, folder=str(tmp_path / "files"), stage=stage, params=saved)
    consolidate_files(tmp_path / "files", tmp_path / "set")
    folder = str(tmp_path / ("set" if by == "restore" else "files"))
    arguments = {"folder": folder, "stage": stage, "params": {"adam_w_mode": False}}
    for result in ranks(2).run(loaded, by=by, **arguments):
        assert "weight_decay_mode" in result["refused"] and result["unchanged"], result
        assert "hyperparameters=False" in result["refused"], result
    if by == "restore":
        for result in ranks(2).run(loaded, **{**arguments, "by": "restore without settings"}):
            assert not result["refused"] and not result["unchanged"], result


def test_sub_groups_of_another_size_are_refused(ranks: Any, tmp_path: Path) -> None:
    """DeepSpeed pairs the sub-groups by their numbers."""
    ranks(2).run(save_ours, folder=str(tmp_path), stage=3, zero=SMALL)
    for result in ranks(2).run(loaded, folder=str(tmp_path), stage=3):
        assert "sub_group_size" in result["refused"] and result["unchanged"]


@pytest.mark.parametrize("stage", [0, full(1), 3])
def test_replaced_settings_are_named_once(ranks: Any, tmp_path: Path, stage: int) -> None:
    """``load_checkpoint`` keeps what was saved, and said nothing."""
    folder, constant = str(tmp_path), {"scheduler": {}}
    ranks(2).run(save_ours, folder=folder, stage=stage, extra=constant)
    edited = {"muon_lr": 0.04, "nesterov": False, "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}
    clipped = {**constant, "gradient_clipping": 0.25}
    first, second = ranks(2).run(loaded, folder=folder, stage=stage, extra=clipped, params=edited)
    (line,) = first["lines"]
    # Stages 0 and 3 keep the configured one.
    assert ("gradient_clipping is 0.5, configured 0.25" in line) == (stage == 1), line
    assert not second["lines"] and not first["refused"]
    for expected in (
        "muon_lr is 0.02, configured 0.04",
        "nesterov is True, configured False",
        "weight_decay is 0.1, configured 0.2",
        "adjust_lr_fn is 'original', configured 'match_rms_adamw'",
        f'call deepspeed_muon.restore(engine, "{folder}/global_step2_consolidated", hyperparameters=False)',
    ):
        assert line.count(expected) == 1, line
    assert line.count(", configured ") == 4 + (stage == 1) and "adam_lr" not in line and "\n" not in line
    consolidate_files(folder, f"{folder}/set")
    both = {"folder": f"{folder}/set", "by": "restore", "stage": stage, "extra": constant}
    (again,) = ranks(2).run(loaded, params=edited, **both)[0]["lines"]
    assert again.count(", configured ") == 4 and "hyperparameters=False" in again
    for same in ({"folder": folder, "stage": stage, "extra": constant}, both):
        for result in ranks(2).run(loaded, **same):
            assert not result["lines"] and not result["refused"]


@pytest.mark.parametrize("stage", [0, 2])
def test_rates_that_a_schedule_moved_were_not_replaced(ranks: Any, tmp_path: Path, stage: int) -> None:
    """DeepSpeed's schedulers go on from the configured rates."""
    ranks(2).run(save_ours, folder=str(tmp_path), stage=stage)
    for result in ranks(2).run(loaded, folder=str(tmp_path), stage=stage):
        assert not result["lines"] and not result["refused"]
    first, _ = ranks(2).run(
        loaded, folder=str(tmp_path), stage=stage, params={"momentum": 0.9, "muon_lr": 0.01}
    )
    assert "momentum is 0.95, configured 0.9. To" in first["lines"][0]


# DeepSpeed's ``ds_to_universal`` in a program that imports this package: only our checkpoints are refused.
#
# Any checkpoint that could not be read was taken for AdamW's, and one that only this package could not read, or that
# held DeepSpeed's own Muon, took our way and failed with our errors.

TAG = "global_step2"


def convert(main: Any, source: Path, target: Path) -> str:
    """Return the error of a conversion, or an empty text."""
    said = training.refusal(lambda: main(converter_options(source, target)), BaseException)
    return said.replace(str(target), "TARGET")


def convert_twice(source: Path, folder: Path) -> tuple[str, str]:
    """Convert with the hook that the import installs, and with DeepSpeed's own function."""
    hooked, original = ds_to_universal.main, ds_to_universal.main.__wrapped__
    return convert(hooked, source, folder / "hooked"), convert(original, source, folder / "own")


@pytest.mark.parametrize(
    "damage", ["truncated", "empty folder", *(full(case) for case in ("class", "missing"))]
)
def test_a_damaged_foreign_checkpoint_gives_deepspeeds_error(ranks: Any, tmp_path: Path, damage: str) -> None:
    source = tmp_path / "in" / TAG
    if damage == "empty folder":
        source.mkdir(parents=True)
    else:
        ranks(2).run(save_foreign, folder=str(tmp_path / "in"), optimizer="AdamW", stage=2, zero={})
        files = sorted(source.glob("*_optim_states.pt"))
        if damage == "truncated":
            for file in files:
                file.write_bytes(file.read_bytes()[:1000])
        elif damage == "class":
            torch.save({"optimizer_state_dict": types.SimpleNamespace()}, files[0])
        else:
            files[0].unlink()
    hooked, original = convert_twice(source, tmp_path)
    assert hooked == original and hooked != "" and "deepspeed_muon" not in hooked


def test_ours_with_a_damaged_file_is_still_ours(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save_ours, folder=str(tmp_path / "in"), stage=2)
    first, *_ = sorted((tmp_path / "in" / TAG).glob("*_optim_states.pt"))
    first.write_bytes(first.read_bytes()[:1000])
    said = convert(ds_to_universal.main, tmp_path / "in" / TAG, tmp_path / "out")
    assert said.startswith(deepspeed_muon.CheckpointError.__name__) and "saved by this Muon" in said
