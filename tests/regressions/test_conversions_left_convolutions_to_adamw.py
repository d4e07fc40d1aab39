"""A convolution could not become Muon's in a conversion, and what the new run needed had to be guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_muon import __main__ as cli
from deepspeed_muon.checkpoint import load_index, restore
from deepspeed_muon.tools.deepspeed_reader import convolution_kind, route_saved, settings_to_repeat
from tests.support import training
from tests.support.checkpoints import save_foreign
from tests.support.models import MATRICES, build
from tests.support.thinning import full

NEEDED = "the run that goes on from here needs in optimizer.params: "


def save_adamw(ranks: Any, folder: Path, *, stage: int, kind: str) -> None:
    arguments = {"folder": str(folder / "in"), "optimizer": "AdamW", "stage": stage, "zero": {}, "kind": kind}
    ranks(2).run(save_foreign, **arguments)


def go_on(rank: int, world_size: int, *, folder: str, kind: str, params: Any) -> list[str]:
    engine = training.make_engine(training.ds_config(2, params=params), kind, seed=7)
    restore(engine, folder)
    training.run_step(engine, 1, rank, world_size, 1)
    return [route.name for route in engine.basic_optimizer.routes if route.algorithm == "muon"]


def needed(printed: str) -> dict[str, Any]:
    lines = [line for line in printed.splitlines() if NEEDED in line]
    return json.loads("{" + lines[0].split(NEEDED)[1] + "}") if lines else {}


@pytest.mark.parametrize(("kind", "stage"), [("convolutions", 2), full("convolutions", 0)])
def test_convolutions_go_where_training_sends_them(
    ranks: Any, tmp_path: Path, capsys: Any, kind: str, stage: int
) -> None:
    """The transposed one has as many inputs as outputs, which no file tells from a plain one: it is named."""
    save_adamw(ranks, tmp_path, stage=stage, kind=kind)
    arguments = ["checkpoint", "consolidate", str(tmp_path / "in"), str(tmp_path / "out")]
    assert cli.main([*arguments, "--exclude", "no_matrix.1.weight"]) == 0
    printed = capsys.readouterr().out
    plain = "plain.0.weight, plain.1.weight, plain.2.weight"
    assert f"taken for filters of plain convolutions, by their shapes: {plain};" in printed
    params = needed(printed)
    assert params == {"exclude": ["no_matrix.1.weight"]}
    index = load_index(tmp_path / "out")
    assert any(NEEDED in line for line in index.lossy)
    muon = {name for name, record in index.parameters.items() if record.algorithm == "muon"}
    assert muon == MATRICES[kind]
    for names in ranks(2).run(go_on, folder=str(tmp_path / "out"), kind=kind, params=params):
        assert set(names) == muon


def test_patterns_are_written_out(ranks: Any, tmp_path: Path, capsys: Any) -> None:
    save_adamw(ranks, tmp_path, stage=1, kind="toy")
    arguments = ["checkpoint", "consolidate", str(tmp_path / "in"), str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    assert not needed(capsys.readouterr().out)
    assert cli.main([*arguments, "--exclude", "blocks.1.*"]) == 0
    params = needed(capsys.readouterr().out)
    assert params == {"exclude": ["blocks.1.*"]}
    assert ranks(2).run(go_on, folder=str(tmp_path / "out"), kind="toy", params=params)


@pytest.mark.parametrize(
    ("name", "shape", "bias", "kind"),
    [
        ("conv.weight", (8, 4, 3), (8,), "convolution"),
        ("conv.weight", (8, 4, 3, 3), None, "convolution"),
        ("conv.weight", (4, 8, 3, 3), (8,), "transposed convolution"),
        ("conv.weight", (8, 1, 3), (8,), "grouped convolution"),
        ("conv.weight", (1, 1, 3), (1,), "convolution"),
        ("moe.weight", (8, 32, 512), None, None),
        ("moe.experts.weight", (8, 32, 16), None, None),
        ("stack", (8, 32, 16), None, None),
        ("linear.weight", (8, 4), (8,), None),
    ],
)
def test_hints_of_a_shape(name: str, shape: Any, bias: Any, kind: str | None) -> None:
    shapes = {name: shape} | ({name.replace("weight", "bias"): bias} if bias else {})
    assert convolution_kind(name, shape, shapes) == kind


def test_a_tied_head_is_judged_by_all_of_its_names() -> None:
    shapes = {"decoder.proj.weight": (40, 16), "mlp.weight": (16, 16)}
    aliases = {"decoder.proj.weight": ["lm_head.weight"]}
    assert route_saved(shapes, {})["decoder.proj.weight"].algorithm == "muon"
    assert route_saved(shapes, aliases)["decoder.proj.weight"].algorithm == "adamw"


def test_choices_of_deepspeeds_muon() -> None:
    """It gives position embeddings to Muon; the run that goes on has to say so."""
    algorithms = {"wpe.weight": "muon", "mlp.weight": "adamw", "proj.weight": "muon"}
    shapes = dict.fromkeys(algorithms, (16, 16))
    assert settings_to_repeat(algorithms, route_saved(shapes, {})) == [
        f'{NEEDED}"include": ["wpe.weight"], "exclude": ["mlp.weight"]'
    ]


def test_stacked_experts_without_the_name() -> None:
    """Training knows them by their module. The run is told to leave them alone, unless they are included."""
    shapes = {"turned.up": (3, 8, 16), "experts.up": (3, 8, 16)}
    routes = route_saved(shapes, {})
    assert [routes[name].algorithm for name in shapes] == ["adamw", "muon"]
    algorithms = {name: route.algorithm for name, route in routes.items()}
    assert settings_to_repeat(algorithms, routes) == [f'{NEEDED}"exclude": ["turned.up"]']
    routes = route_saved(shapes, {}, include=["turned.*"])
    assert routes["turned.up"].algorithm == "muon" and routes["turned.up"].heads == 3


@pytest.mark.parametrize("kind", ["toy", "heads", "mixed", "convolutions", "tied", "adapters"])
def test_routes_of_training_and_conversion(kind: str) -> None:
    """By names and shapes alone, all of this project's models but for their grouped and transposed filters."""
    model = build(kind)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    routes = route_saved({name: tuple(p.shape) for name, p in trained.items()}, {})
    muon = {name for name, route in routes.items() if route.algorithm == "muon"}
    guessed = {
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Conv1d, torch.nn.Conv3d, torch.nn.ConvTranspose1d))
    }
    assert {n for n in muon ^ MATRICES[kind] if n.removesuffix(".weight") not in guessed} == set()
