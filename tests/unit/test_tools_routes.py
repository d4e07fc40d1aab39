"""``python -m deepspeed_muon routes``: the table of any model as text and JSON, and errors that say what to do."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deepspeed_muon.__main__ import main
from deepspeed_muon.routing.route import Route
from deepspeed_muon.tools import routes as routes_table
from deepspeed_muon.tools.model_shapes import PRESETS

MODELS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(8, 100, bias=False)


def needs_values():
    return nn.Linear(int(torch.ones(8).sum()), 4)


def needs_arguments(width):
    return nn.Linear(width, 4)


def makes_none():
    return None


instance = Model()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a module ``models_of_test`` importable, as one in the folder of the command is."""
    (tmp_path / "models_of_test.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "models_of_test", raising=False)
    return "models_of_test"


def table_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["routes", *arguments, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def algorithms(data: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["algorithm"] for row in data["routes"]}


@pytest.mark.parametrize("name", ["Model", "instance"])
def test_the_model_of_a_function(name: str, models: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON and as text, with a row for all layers."""
    data = table_of(capsys, f"{models}:{name}")
    weights = {"embed.weight": "adamw", "lm_head.weight": "adamw"}
    layers = {f"layers.*.{layer}.weight": "muon" for layer in ("up", "down")}
    biases = {f"layers.*.{layer}.bias": "adamw" for layer in ("up", "down")}
    assert algorithms(data) == {**weights, **layers, **biases}
    assert data["algorithms"]["adamw"] == {"tensors": 6, "elements": 2 * 800 + 2 * 40}
    assert main(["routes", f"{models}:{name}"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "layers.*.up.weight 2 32x8 muon yes hidden matrix" in text
    assert "muon 4 parameters 1,024 elements 37.87%" in text and "guessed 0 parameters" in text


def test_settings_are_those_of_training(
    models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configuration file, with what the Trainer fills in, and further patterns."""
    params = {"lr": "auto", "exclude": ["*down.weight"]}
    (tmp_path / "ds_config.json").write_text(json.dumps({"optimizer": {"type": "Muon", "params": params}}))
    options = ["--params", "ds_config.json", "--exclude", "layers.0.up.weight", "--include", "lm_head.weight"]
    data = table_of(capsys, f"{models}:Model", "--all", *options)
    counts = Counter(algorithms(data).values())
    assert counts == {"muon": 2, "adamw": 8}
    assert algorithms(data)["lm_head.weight"] == algorithms(data)["layers.1.up.weight"] == "muon"


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_that_needs_values(device: str, models: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["routes", f"{models}:needs_values", "--device", device])
    printed = capsys.readouterr()
    if device == "cpu":
        assert status == 0 and "4x8" in printed.out
    else:
        assert status == 2 and "build it with --device cpu" in printed.err


GUESSED = [
    Route("a.0.weight", (4, 4), "muon", "hidden matrix"),
    Route("a.1.weight", (4, 4), "muon", "hidden matrix"),
    Route("table", (4, 2), "adamw", "a bare table", certain=False),
]


def test_guesses_are_marked_and_counted() -> None:
    data = routes_table.table("m", GUESSED)
    assert data["guesses"] == {"tensors": 1, "elements": 8}
    assert [row["certain"] for row in data["routes"]] == [True, False]
    text = " ".join(routes_table.render(data).split())
    assert "table 1 4x2 adamw guess a bare table" in text
    assert "guessed 1 parameters 8 elements 20.00%" in text
    assert "include or exclude" in text


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("models_of_test:absent", "has no attribute 'absent'. Run the command in the folder of the module"),
        ("no_such_module:build", "No module named 'no_such_module'. Run the command in the folder"),
        ("models_of_test:needs_arguments", "write a function that needs none and returns the model"),
        ("models_of_test:makes_none", "returned a NoneType, expected a torch.nn.Module"),
        ("no/such/model", "for a model on the Hub pass its config.json"),
    ],
)
def test_errors_are_one_line_with_a_remedy(
    model: str, said: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["routes", model]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1 and message.startswith("deepspeed_muon routes: ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--include nothing.*", "include: pattern 'nothing.*' matches no parameter name"),
        ("--include *.bias", "remove it from the pattern"),
    ],
)
def test_settings_that_cannot_be(
    options: str, said: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["routes", f"{models}:Model", *options.split()]) == 2
    assert said in capsys.readouterr().err


def test_models_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A preset, its config.json, the model_type and the class have one table, but for their sizes."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["llama-7b"]))
    sources = ("llama-7b", str(tmp_path), str(tmp_path / "config.json"), "llama", "LlamaForCausalLM")
    tables = [algorithms(table_of(capsys, source)) for source in sources]
    assert all(table == tables[0] for table in tables)
    assert tables[0]["lm_head.weight"] == "adamw"
    assert tables[0]["model.layers.*.mlp.up_proj.weight"] == "muon"
