"""``python -m deepspeed_muon plan``: shapes without weights, text, JSON, and errors that say what to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_muon.__main__ import main
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize, orthogonalize_flops
from deepspeed_muon.routing.evidence import NamedParameter
from deepspeed_muon.routing.rules import route_parameters
from deepspeed_muon.tools.model_shapes import PRESETS, from_config, load_model
from deepspeed_muon.tools.plan import PlanSettings, report
from tests.support.native_ops import REPOSITORY

pytest.importorskip("transformers")

PlanOf = Callable[..., dict[str, Any]]


def frozen() -> torch.nn.Module:
    return torch.nn.Linear(4, 4).requires_grad_(False)


def ends() -> None:
    sys.exit(0)


def interrupted() -> None:
    raise KeyboardInterrupt


def elements(parameters: list[NamedParameter]) -> int:
    return sum(item.param.numel() for item in parameters)


@pytest.mark.parametrize("steps", [1, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (56, 8), (1, 9)])
def test_operations_are_those_that_are_run(shape: tuple[int, int], dtype: torch.dtype, steps: int) -> None:
    for method in ("gram", "standard"):
        settings = NsSettings(resolve_schedule("quintic", steps), method, dtype)
        with FlopCounterMode(display=False) as counter:
            orthogonalize(torch.randn(1, *shape), settings=settings)
        expected = orthogonalize_flops(*shape, settings)
        assert counter.get_total_flops() == expected


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("llama-7b", 6.74), ("llama-70b", 68.98), ("qwen3-30b-a3b", 30.53), ("kimi-k2", 1026.4)],
)
def test_presets_have_the_size_of_the_models(preset: str, billions: float) -> None:
    assert elements(load_model(preset)) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_json(plan_of: PlanOf) -> None:
    data = plan_of("llama-7b", "--world-size", "16", "--stage", "3", "--owners")
    muon = data["algorithms"]["muon"]
    assert muon == {"tensors": 224, "elements": 32 * (4 * 4096**2 + 3 * 4096 * 11008)}
    assert data["owners"]["max_over_mean"] <= 1.05
    assert len(data["owners"]["of"]) == 224 and set(data["owners"]["of"].values()) == set(range(16))
    # The bound of docs/how_it_works.md: 2 directions of N/W (W-1)/W elements, two bytes each.
    bound = 2 * 2 * muon["elements"] / 16 * 15 / 16
    assert data["sent_bytes_per_rank"]["mean"] == pytest.approx(bound, rel=1e-3)
    ours, adamw = data["step"]["muon"], data["step"]["adamw"]
    assert sum(ours["memory"][key] - adamw["memory"][key] for key in ("momentum", "moments")) < 0
    assert adamw["sent_bytes"] == 0


def test_experts_of_autoep_are_divided_before_zero_divides_them(plan_of: PlanOf) -> None:
    """With as many expert-parallel ranks as ranks every expert is whole where it is, and none of it is sent."""
    command = ("qwen3-30b-a3b", "--world-size", "16", "--expert-parallel")
    plans = {expert_parallel: plan_of(*command, expert_parallel) for expert_parallel in (1, 8, 16)}
    shapes = {tuple(row["shape"]) for row in plans[8]["routes"] if "experts" in row["name"]}
    assert shapes == {(128, 768, 2048), (128, 2048, 768)}
    assert plans[8]["elements"] == plans[1]["elements"] == plans[16]["elements"]
    sent = {expert_parallel: data["sent_bytes_per_rank"]["mean"] for expert_parallel, data in plans.items()}
    stacks = 48 * 128 * 3 * 768 * 2048
    dense = plans[1]["algorithms"]["muon"]["elements"] - stacks
    # At stage 3 each of n ranks holds an n-th of every matrix and sends 1 - 1/n of that, both ways, two bytes each.
    assert sent[16] == pytest.approx(2 * 2 * dense / 16 * 15 / 16, rel=1e-3)
    assert sent[8] == sent[16], "each of two ranks holds 8 of 16 experts, whole ones"
    weights = [data["step"]["muon"]["memory"]["weights"] for data in plans.values()]
    assert weights[0] == weights[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("no-such-model", "is none of a preset"),
        ("LlamaForCausallM", "names no model; did you mean 'LlamaForCausalLM'?"),
        ("Trainer", "'Trainer' is none of a preset"),
        ("tests.unit.test_tools_plan:ends", "SystemExit: 0. It is called without arguments"),
        ("tests", "'tests': a folder without config.json"),
        ("tests/conftest.py", "name a function in it, conftest:FUNCTION"),
        ("mine/model.py:build", "run the command in the folder of mine/model.py, and write model:build"),
        ("llama-7b --world-size 0", "--world-size 0: must be at least 1"),
        ("llama-7b --gpu h10", "did you mean 'h100'? another one needs --flops, --memory, --bandwidth"),
        ("llama-7b --memory nan", "--memory nan: must be above 0 and finite"),
        ("tests.unit.test_tools_plan:frozen", "has no parameter to train"),
        ("llama-7b --params pyproject.toml", "pyproject.toml: not readable JSON"),
        ("llama-7b --world-size 6 --tensor-parallel 4", "tensor-parallel groups of 4"),
        ("llama-7b --params {'ns_step':3}", "did you mean 'ns_steps'"),
        ("llama-7b --params {'optimizer':{},'bf16':true}", "bf16 must be an object, got True"),
        ("llama-7b --params {'optimizer':{'type':'AdamW'}}", "optimizer.type is 'AdamW', not Muon"),
        ("llama-7b --params no-such-file.json", "no-such-file.json: No such file"),
        ("llama-7b --efficiency 5", "--efficiency 5: a fraction of the peak is above 0 and at most 1"),
        ("llama-7b --world-size 100000000000", "--world-size 100000000000: plans are made for at most"),
        ("qwen3-30b-a3b --expert-parallel 3 --world-size 6", "128 experts of"),
        ("llama-7b --expert-parallel 2", "no stacks of experts"),
        ("qwen3-30b-a3b --expert-parallel 2 --tensor-parallel 2", "tensor parallelism"),
    ],
)
def test_errors_say_the_remedy(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments.replace("'", '"').split()]) == 2
    assert said in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tests.unit.test_tools_plan:interrupted"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "deepspeed_muon plan: interrupted"


@pytest.mark.parametrize("text", ["", "zero_optimization: {stage: 2}", "compute_environment: LOCAL_MACHINE"])
def test_a_file_without_an_optimizer_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty file was the defaults, and the Trainer's usual file had unknown keys."""
    (tmp_path / "file").write_text(text)
    assert main(["plan", "llama-7b", "--params", str(tmp_path / "file")]) == 2
    assert 'has no section "optimizer"' in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted((REPOSITORY / "ds_configs").iterdir()), ids=lambda file: file.name)
def test_every_example_of_a_configuration_can_be_planned(file: Path) -> None:
    """The Trainer's, which leaves rates to it as "auto", was refused."""
    assert main(["plan", "llama-7b", "--params", str(file)]) == 0


def test_configurations_that_no_model_has_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A DeepSpeed configuration as model blamed transformers."""
    for content, said in (
        ({"optimizer": {}}, "no model_type"),
        ({**PRESETS["llama-7b"], "hidden_act": "no such"}, "cannot build this model of model_type 'llama'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert main(["plan", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err


def test_the_first_example_of_the_page_fits_its_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "plan.md").read_text()
    first = next(line for line in page.splitlines() if line.startswith("python -m deepspeed_muon plan "))
    assert main(first.split()[3:]) == 0
    assert "\nfits: " in capsys.readouterr().out


@pytest.mark.parametrize("installed", [True, False])
def test_a_missing_transformers_is_said(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown architecture, and any configuration without transformers."""
    if not installed:
        monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"come from transformers.*deepspeed-muon\[hf\].*MODULE:FUNCTION"):
        from_config({"model_type": "mamba9" if installed else "llama"})


def test_tensor_parallel_divides_work_and_memory() -> None:
    routes = route_parameters(load_model("llama-7b"))
    for stage in (1, 3):
        data = report("m", routes, PlanSettings(32, stage, tensor_parallel=4))
        assert data["owners"]["max_over_mean"] <= 1.3
        weights = data["step"]["muon"]["memory"]["weights"]
        assert weights == pytest.approx(2 * data["elements"] / (4 if stage == 1 else 32))


@pytest.mark.parametrize(("stage", "ranks_with_all"), [(1, 1), (3, 8)])
def test_frozen_weights_take_memory_and_are_gathered(stage: int, ranks_with_all: int) -> None:
    """The base of adapters was left out: ``fits`` was said of weights that fill the memory of two GPUs."""
    routes = route_parameters(load_model("llama-7b"))
    settings = PlanSettings(8, stage)
    frozen = [replace(route, algorithm="frozen") for route in routes[:-10]] + [*routes[-10:]]
    trained, adapters = (report("m", model, settings)["step"]["muon"] for model in (routes, frozen))
    elements = sum(route.numel for route in routes)
    for step in (trained, adapters):
        assert step["memory"]["weights"] == pytest.approx(2 * elements / ranks_with_all, rel=1e-3)
    # At stage 3 the weights are gathered for forward and backward, and gradients are reduced for what is trained.
    frozen_numel = sum(route.numel for route in routes[:-10])
    spared = trained["zero_bytes"] - adapters["zero_bytes"]
    assert spared == pytest.approx((1 if stage == 3 else 3) * 2 * frozen_numel * 7 / 8)
