"""DeepSpeed's own files, read without an engine: consolidated, converted, universal; and what is wrong with them."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_muon import __main__ as cli
from deepspeed_muon.checkpoint import load_index, restore
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.tools.convert import consolidate_files, convert_to_universal
from tests.support import checkpoints, training
from tests.support.checkpoints import (
    CODES,
    INDEX,
    NORMUON,
    PERSISTENT,
    ROUND,
    SMALL,
    assert_equal,
    converter_options,
    edit,
    engine_for,
    load,
    report_and_go_on,
    save_foreign,
    save_ours,
    tensors_of,
    trained_for,
)
from tests.support.models import MATRICES
from tests.support.snapshots import attempted
from tests.support.thinning import each_value, full, with_settings
from tests.support.training import OFFLOAD


@pytest.fixture(scope="module")
def ours(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], tuple[Path, Any]]:
    """Files of a run at a stage on a number of ranks, and what its first rank reported; a test changes a copy only."""

    @functools.cache
    def saved(stage: int, size: int) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("ours")
        return folder, ranks(size).run(save_ours, folder=str(folder), stage=stage)[0]

    return saved


UNIVERSAL = {"checkpoint": {"load_universal": True}}


def load_universal(
    rank: int, world_size: int, *, folder: str, stage: int, schedule: bool = True, **settings: Any
) -> Any:
    engine = engine_for(stage, seed=7, extra=UNIVERSAL, **settings)
    path, _ = engine.load_checkpoint(folder, load_lr_scheduler_states=schedule)
    assert path is not None
    return report_and_go_on(engine, 2, rank, world_size)


CORE = [
    (0, 2, {}, 1, 3, ROUND),
    (1, 3, ROUND, 3, 2, SMALL),
    (2, 2, OFFLOAD, 3, 4, PERSISTENT),
    (3, 4, SMALL, 2, 3, ROUND),
    full(3, 2, {}, 1, 1, {}),
    full(1, 1, {}, 2, 2, OFFLOAD),
    (2, 4, ROUND, 2, 3, ROUND),
    (3, 3, OFFLOAD, 3, 1, OFFLOAD),
]
SETTINGS = [
    full(0, 2, {}, 3, 3, {}, {"precision": "bf16"}),
    full(0, 2, {}, 3, 3, {}, {"precision": "fp16"}),
    full(3, 2, {}, 2, 3, {}, {"precision": "bf16"}),
    pytest.param(3, 2, {}, 2, 3, {}, {"precision": "fp16"}, marks=pytest.mark.compat),
    full(3, 4, {}, 2, 2, {}, {"params": NORMUON}),
    pytest.param(3, 4, {}, 2, 2, {}, {"params": NORMUON | CODES}, marks=pytest.mark.compat),
]


@pytest.mark.parametrize(
    ("stage", "size", "zero", "to_stage", "to_size", "to_zero", "settings"),
    [*with_settings(each_value(CORE), {}), *SETTINGS],
)
def test_universal_and_offline_consolidation(
    ranks: Any,
    tmp_path: Path,
    stage: int,
    size: int,
    zero: Any,
    to_stage: int,
    to_size: int,
    to_zero: Any,
    settings: dict[str, Any],
) -> None:
    arguments = {"folder": str(tmp_path / "saved"), "stage": stage, "zero": zero, **settings}
    saved = ranks(size).run(save_ours, **arguments)[0]
    convert_to_universal(tmp_path / "saved" / "global_step2", tmp_path / "universal" / "step2")
    consolidate_files(tmp_path / "saved", tmp_path / "set", shard_bytes=4000)
    index = load_index(tmp_path / "set")
    assert index.source["optimizer"] == "deepspeed_muon" and index.source["zero_stage"] == stage
    assert index.source["world_size"] == size
    assert not index.lossy
    to = {"stage": to_stage, "zero": to_zero, **settings}
    universal = ranks(to_size).run(load_universal, folder=str(tmp_path / "universal"), **to)
    to |= {} if to_stage != stage else {"stage": 0, "zero": {}}
    for reports in (universal, ranks(to_size).run(load, folder=str(tmp_path / "set"), **to)):
        for report in reports:
            assert_equal(saved, report, settings)
            assert report["loss"] == reports[0]["loss"]


def test_deepspeeds_converter_names_our_command(ours: Any, tmp_path: Path) -> None:
    """``ds_to_universal.main`` of a process that imported this package names the command for our checkpoints."""
    from deepspeed.checkpoint import ds_to_universal

    source, _ = ours(2, 2)
    options = converter_options(source / "global_step2", tmp_path / "step2", missing_state=False)
    with pytest.raises(CheckpointError, match=r"checkpoint universal --input_folder .*global_step2 --output"):
        ds_to_universal.main(options)
    assert not (tmp_path / "step2").exists()


def refused_universal(rank: int, world_size: int, *, folder: str, stage: int, **settings: Any) -> str:
    """Return why a load was refused, after making sure that it changed nothing."""
    engine = trained_for(rank, world_size, stage, 1, seed=7, extra=UNIVERSAL, **settings)
    message, changed = attempted(engine, lambda: engine.load_checkpoint(folder))
    assert not changed
    return message


def damaged_universal(ranks: Any, folder: Path, *needles: str, stage: int = 3, **arguments: Any) -> None:
    """Fail unless both ranks raise a CheckpointError that says all needles."""
    for message in ranks(2).run(refused_universal, folder=str(folder), stage=stage, **arguments):
        for needle in needles:
            assert needle in message, message


def test_damaged_universal_checkpoints(ranks: Any, ours: Any, tmp_path: Path) -> None:
    source, _ = ours(2, 2)
    convert_to_universal(source / "global_step2", tmp_path / "step2")
    folder = tmp_path / "step2" / "zero"
    file = folder / load_index(folder).parameters["blocks.1.up.weight"].tensors["momentum_buffer"]
    content = file.read_bytes()
    file.write_bytes(content[:-900] + bytes([content[-900] ^ 1]) + content[-899:])
    damaged_universal(ranks, tmp_path, str(file), "checksum", "it holds embed.weight (fp32)")
    file.write_bytes(content[:100])
    damaged_universal(ranks, tmp_path, str(file), "100 bytes", stage=1)
    file.unlink()
    damaged_universal(ranks, tmp_path, str(file), "No such file", stage=2)
    file.write_bytes(content)
    damaged_universal(ranks, tmp_path, "idle.weight is not in the checkpoint", kind="unused")
    damaged_universal(ranks, tmp_path, "goes to adamw", params={"exclude": ["blocks.1.*"]})
    edit(folder / INDEX, lambda content: content["progress"].update(loss_scale={"cur_iter": -3}))
    damaged_universal(ranks, tmp_path, INDEX, "loss_scale")
    with pytest.raises(CheckpointError, match="already holds something"):
        convert_to_universal(source / "global_step2", tmp_path / "step2")


# ------------------------------------------------------------ other optimizers' files


def assert_converted(folder: Path, expected: dict[str, Any], muon: set[str]) -> None:
    """Compare a set with what DeepSpeed says of weights and state; ``muon``: the matrices of its own Muon."""
    tensors = tensors_of(folder)
    assert tensors.keys() == {
        *(f"fp32/{name}" for name in expected["fp32"]),
        *(f"{'momentum_buffer' if name in muon else 'exp_avg'}/{name}" for name in expected["fp32"]),
        *(f"exp_avg_sq/{name}" for name in expected["exp_avg_sq"]),
    }
    for key, values in (("fp32", "fp32"), ("exp_avg", "momentum"), ("exp_avg_sq", "exp_avg_sq")):
        for name, value in expected[values].items():
            tensor = tensors[f"{'momentum_buffer' if key == 'exp_avg' and name in muon else key}/{name}"]
            assert torch.equal(tensor, value.view_as(tensor)), name


def continued(
    rank: int, world_size: int, *, folder: str, kind: str, params: dict[str, Any]
) -> dict[str, Any]:
    """Restore a set into a run with the given settings, and take a step; return what was restored."""
    engine = training.make_engine(training.ds_config(2, params=params), kind, seed=7)
    restore(engine, folder)
    restored = checkpoints.report(engine)
    training.run_step(engine, 3, rank, world_size, 1)
    return restored


@pytest.mark.compat
@pytest.mark.parametrize(
    ("stage", "size", "zero", "kind", "exclude"),
    [
        (0, 2, {}, "toy", []),
        full(1, 2, {}, "tied", []),
        (2, 3, OFFLOAD, "toy", ["blocks.1.*"]),
        (3, 3, SMALL, "convolutions", []),
    ],
)
def test_convert_from_adamw(
    ranks: Any, tmp_path: Path, stage: int, size: int, zero: Any, kind: str, exclude: list[str], capsys: Any
) -> None:
    """A conversion guessed the routes from names and shapes, and the run had to repeat them; now the run decides."""
    arguments = {"optimizer": "AdamW", "stage": stage, "zero": zero, "kind": kind}
    saved = ranks(size).run(save_foreign, folder=str(tmp_path / "in"), **arguments)[0]
    assert cli.main(["checkpoint", "consolidate", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "exp_avg becomes the momentum of the run's matrices" in printed and "decay 0.8" in printed
    assert_converted(tmp_path / "out", saved, set())
    assert cli.main(["routes", str(tmp_path / "out")]) == 2
    assert "the run that restores it chooses them" in capsys.readouterr().err
    arguments = {"folder": str(tmp_path / "out"), "kind": kind, "params": {"exclude": exclude}}
    loaded = ranks(2).run(continued, **arguments)[0]
    assert loaded["steps"] == [2]
    muon = {name for name in MATRICES[kind] if not (exclude and name.startswith("blocks.1."))}
    for key, names, values in (
        ("fp32", saved["fp32"].keys(), saved["fp32"]),
        ("momentum_buffer", muon, saved["momentum"]),
        ("exp_avg", saved["fp32"].keys() - muon, saved["momentum"]),
        ("exp_avg_sq", saved["fp32"].keys() - muon, saved["exp_avg_sq"]),
    ):
        assert loaded[key].keys() == names, key
        for name, value in loaded[key].items():
            assert torch.equal(value.float().view(-1), values[name].view(-1)), (key, name)


@pytest.fixture(scope="module")
def muon_of_stage_3(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Files of DeepSpeed's Muon on three ranks, and what DeepSpeed says of weights and state."""
    folder = tmp_path_factory.mktemp("three")
    return folder, ranks(3).run(save_foreign, folder=str(folder), optimizer="Muon", stage=3, zero=SMALL)[0]


def test_convert_from_deepspeeds_muon(ranks: Any, tmp_path: Path, muon_of_stage_3: Any) -> None:
    folder, saved = muon_of_stage_3
    index = consolidate_files(folder, tmp_path / "out")
    assert index.source["optimizer"] == "DeepSpeed's Muon"
    muon = {name for name, record in index.parameters.items() if record.algorithm == "muon"}
    assert muon == MATRICES["toy"]
    assert_converted(tmp_path / "out", saved, MATRICES["toy"])
    ranks(3).run(load, folder=str(tmp_path / "out"), stage=1)


@pytest.mark.parametrize(("stage", "zero"), each_value([(1, {}), (2, ROUND), (2, OFFLOAD), (2, {})]))
def test_convert_from_deepspeeds_muon_with_full_matrices(
    ranks: Any, tmp_path: Path, muon_of_stage_3: Any, stage: int, zero: Any
) -> None:
    """At stages 1 and 2 it keeps whole matrices on every rank; stage 3 of the same run says what they should be."""
    ranks(3).run(save_foreign, folder=str(tmp_path / "in"), optimizer="Muon", stage=stage, zero=zero)
    consolidate_files(tmp_path / "in", tmp_path / "out")
    tensors = tensors_of(tmp_path / "out")
    for name, expected in muon_of_stage_3[1]["momentum"].items():
        tensor = tensors[f"{'momentum_buffer' if name in MATRICES['toy'] else 'exp_avg'}/{name}"]
        # The same numbers but for the order in which gradients are summed.
        atol = 1e-6 + 1e-4 * float(expected.abs().max())
        assert torch.allclose(tensor, expected, rtol=1e-3, atol=atol), name


def test_a_universal_checkpoint_of_deepspeeds_converter_names_the_command(ranks: Any, tmp_path: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    ranks(2).run(save_foreign, folder=str(tmp_path / "in"), optimizer="AdamW", stage=2, zero={})
    ds_to_universal.main(converter_options(tmp_path / "in" / "global_step2", tmp_path / "step2"))
    (tmp_path / "latest_universal").write_text("step2")
    damaged_universal(ranks, tmp_path, "deepspeed_muon checkpoint universal", stage=1)


# ------------------------------------------------------------ command line and faults


def test_command_line(ours: Any, tmp_path: Path, capsys: Any) -> None:
    source = shutil.copytree(ours(2, 2)[0], tmp_path / "in")
    run = lambda *words: cli.main(["checkpoint", *map(str, words)])  # noqa: E731
    assert run("inspect", source) == 0
    assert "optimizer deepspeed_muon, zero_stage 2, world_size 2" in capsys.readouterr().out
    assert run("consolidate", source, tmp_path / "set", "--shard-bytes", 4000) == 0
    assert run("inspect", tmp_path / "set") == 0
    printed = capsys.readouterr().out
    assert "blocks.0.up.weight" in printed and "momentum_buffer" in printed
    assert run("verify", tmp_path / "set") == 0
    path = next((tmp_path / "set").glob("*.safetensors"))
    os.truncate(path, 500)
    assert run("verify", tmp_path / "set") == 1
    assert path.name in capsys.readouterr().err
    assert run("universal", "--input_folder", source, "--output_folder", tmp_path / "u") == 0
    assert (tmp_path / "latest_universal").read_text() == "u"
    capsys.readouterr()
    for words, said in (
        (["inspect", tmp_path / "u"], "a universal checkpoint"),
        (["consolidate", tmp_path / "set", tmp_path / "again"], "a consolidated set already"),
    ):
        assert run(*words) == 2 and said in capsys.readouterr().err
    (model,) = source.glob("*/mp_rank_00_model_states.pt")
    content = model.read_bytes()
    model.write_bytes(b"saved again")  # into the same file, as torch.save does
    for path in (tmp_path / "u").glob("*_model_states.pt"):
        assert path.read_bytes() == content


def test_missing_rank_file(ours: Any, tmp_path: Path) -> None:
    source = shutil.copytree(ours(3, 3)[0], tmp_path / "in")
    for rank in (0, 1, 2):
        path = source / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        path.rename(tmp_path / "aside")
        with pytest.raises(CheckpointError, match=path.name):
            consolidate_files(source, tmp_path / "out")
        (tmp_path / "aside").rename(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=path.name):
        consolidate_files(source, tmp_path / "out")
    assert not (tmp_path / "out" / "muon_index.json").exists()


class Payload:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("/tmp/deepspeed_muon_was_here",))


def test_pickles_run_no_code(ours: Any, tmp_path: Path) -> None:
    source = shutil.copytree(ours(2, 2)[0], tmp_path / "in")
    path = source / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    torch.save({**content, "extra": Payload()}, path)
    with pytest.raises(CheckpointError, match="trust-pickles"):
        consolidate_files(source, tmp_path / "out")
    assert not os.path.exists("/tmp/deepspeed_muon_was_here")


@pytest.mark.parametrize("latest", ["../../etc", "/etc", "tag/../../etc", "."])
def test_latest_may_not_point_elsewhere(tmp_path: Path, latest: str) -> None:
    (tmp_path / "latest").write_text(latest)
    with pytest.raises(CheckpointError, match="not a folder beside it"):
        consolidate_files(tmp_path, tmp_path / "out")
