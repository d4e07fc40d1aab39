"""``python -m deepspeed_muon rates``, and the table of other frameworks' settings in docs/from_deepspeeds_muon.md."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_muon import MuonConfig
from deepspeed_muon.__main__ import main
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.reference import ReferenceMuon, newton_schulz
from deepspeed_muon.tools.rates import Proposal, carry, propose
from tests.support.comparisons import close
from tests.support.native_ops import REPOSITORY

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}}}
MATCHED = {"adjust_lr_fn": "match_rms_adamw"}
PAGE = (REPOSITORY / "docs" / "rates.md").read_text()


def muon(params: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Muon", "params": params}, **more}


def carried(content: Mapping[str, Any], before: dict[str, float], after: dict[str, float]) -> Proposal:
    proposal = propose(content)
    carry(proposal, before, after)
    return proposal


def test_adamws_settings_and_defaults() -> None:
    proposal = propose(ADAMW)
    given = {"lr": 2e-3, "weight_decay": 0.1}
    assert proposal.params == {**given, **MATCHED, "betas": [0.9, 0.999], "eps": 1e-8}
    assert proposal.reasons.keys() == {"adjust_lr_fn", "betas", "eps"} and not proposal.notes
    auto = propose({"optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto", "eps": None}}})
    assert auto.params == {"lr": "auto", "betas": "auto", **MATCHED, "eps": 1e-8}
    assert propose({"optimizer": {"type": "AdamW"}}).notes == [
        "no rate is set: write the one that was tuned as lr or muon_lr"
    ]


@pytest.mark.parametrize("name", ["Muon", "deepspeed_muon"])
def test_settings_of_muon_stay_and_options_of_deepspeeds_adamw_are_left_out(name: str) -> None:
    given = {"muon_lr": 0.1, "adam_lr": 1e-3}
    params = {**given, "torch_adam": True, "momentum": None}
    proposal = propose({"optimizer": {"type": name, "params": params}})
    assert proposal.params == given and not proposal.reasons
    assert len(proposal.notes) == 1 and proposal.notes[0].startswith("left out: torch_adam, an option")


@pytest.mark.parametrize(
    ("name", "params", "decay"),
    [
        ("AdamW", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, None),
        ("AdamW", {"torch_adam": True, "weight_decay": 0.1}, 0.1),
        ("AdamW", {}, None),
    ],
)
def test_the_default_decay_is_that_of_the_adamw_that_deepspeed_makes(
    name: str, params: dict[str, Any], decay: float | None
) -> None:
    """torch.optim.AdamW decays by 0.01 where nothing is set; DeepSpeed's own does not decay."""
    proposal = propose({"optimizer": {"type": name, "params": {"lr": 1e-3, **params}}})
    assert proposal.params.get("weight_decay") == decay


KERAS = {"learning_rate": 1e-3, "adam_beta_1": 0.9, "rms_rate": 0.2}
NO_SECTION = 'no section "optimizer"'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"optimizer": {"type": "Lion", "params": {}}}, "the type AdamW or Muon, got 'Lion'"),
        ({"optimizer": {"class_name": "Muon", "config": KERAS}}, "the type AdamW or Muon, got None"),
        ({"optimizer": "muon", "lr": 1e-3}, "the type AdamW or Muon, got 'muon'"),
        ({}, NO_SECTION),
        ({"train_batch_size": "auto", "zero_optimization": {"stage": 2}}, NO_SECTION),
        ({"compute_environment": "LOCAL_MACHINE", "deepspeed_config": {}}, NO_SECTION),
        (muon(KERAS), "optimizer.params: unknown key 'adam_beta_1'"),
        (muon({"learning_rate": 1e-3}), "write lr"),
        ({"optimizer": {"type": "AdamW", "params": {"weigth_decay": 0.1}}}, "did you mean 'weight_decay'?"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "optimizer.params.lr: Input should be"),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, "optimizer.params: must be an object"),
    ],
)
def test_unreadable_input(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        propose(content)


def test_json_that_is_nested_too_deeply_is_no_raw_error(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for option in ("rates", "plan llama-7b --params", "plan"):
        assert main([*option.split(), str(tmp_path / "deep.json")]) == 2


def test_odd_values_are_no_raw_errors() -> None:
    scheduler = {"params": {"warmup_max_lr": 1e-3}}
    for content in (
        {**ADAMW, "scheduler": scheduler},
        muon({"lr": 1e-3, "muon_lr": 1.0, "betas": [0.9, 0.95]}, scheduler=scheduler),
    ):
        for mapping in (content["optimizer"]["params"], content["optimizer"], content, scheduler):
            for key, value in list(mapping.items()):
                for odd in ("x", "auto", None, True, -1, 1.5, math.nan, [], [1.5, 2, 3], [None, 0.9], {}):
                    mapping[key] = odd
                    with contextlib.suppress(ConfigError):
                        carried(content, {"width": 256, "tokens": 1e9}, {"width": 512, "tokens": 2e9})
                mapping[key] = value


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ADAMW) + "  // hjson")
    assert main(["rates", str(file)]) == 0
    text = capsys.readouterr().out
    section = json.loads("{" + text[text.index('"optimizer"') :] + "}")
    assert section["optimizer"] == {"type": "Muon", "params": propose(ADAMW).params}
    assert main(["rates", str(tmp_path / "none.json")]) == 2
    assert main(["rates", str(REPOSITORY / "ds_configs" / "1b_8gpus.hjson")]) == 0


def test_the_page_shows_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r'^```json title="(.*?)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL):
        Path(name).write_text(text)
    blocks = re.findall(
        r"^```console\n\$ python -m deepspeed_muon (.*?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    )
    assert blocks
    for arguments, output in blocks:
        assert main(arguments.split()) == 0
        assert capsys.readouterr().out == output


def test_the_rate_of_adamw_is_carried_to_a_wider_model() -> None:
    """Under match_rms_adamw, Muon's rate falls with the width; its product with the decay and AdamW's rate stay."""
    proposal = carried(ADAMW, {"width": 256}, {"width": 1024})
    params = proposal.params
    assert params["muon_lr"] == pytest.approx(2e-3 * 4**-0.65, rel=2e-3) and params["lr"] == 2e-3
    assert params["muon_lr"] * params["muon_weight_decay"] == pytest.approx(2e-3 * 0.1, rel=5e-3)
    assert "adam_lr" not in params
    assert "was the same at all widths" in proposal.reasons["lr"]
    again = carried(muon(params), {"width": 1024}, {"width": 2048}).params
    assert again["muon_lr"] == pytest.approx(params["muon_lr"] * 2**-0.65, rel=2e-3)
    assert again["lr"] == 2e-3


@pytest.mark.parametrize(
    ("params", "muon_lr", "reason"),
    [
        ({}, 0.018, "confirmed by measured runs"),
        ({"variant": "normuon"}, 0.018, "confirmed by measured runs"),
        ({"variant": "muon_eq"}, 0.018, "not measured under muon_eq"),
        ({"variant": "normuon", "adjust_lr_fn": "spectral"}, 0.0127, "not measured under normuon with"),
        ({"adjust_lr_fn": "spectral"}, 0.0127, "confirmed by measured runs"),
        ({"adjust_lr_fn": "unit_rms_norm"}, 0.02, ""),
    ],
    ids=str,
)
def test_rules_over_widths(params: dict[str, Any], muon_lr: float, reason: str) -> None:
    proposal = carried(muon({"muon_lr": 0.02, "adam_lr": 1e-3, **params}), {"width": 256}, {"width": 512})
    assert proposal.params["muon_lr"] == muon_lr
    assert reason in proposal.reasons.get("muon_lr", "")
    assert bool(proposal.notes) == (muon_lr == 0.02)


def test_a_rate_that_nobody_chose_is_not_carried() -> None:
    for content in (muon({}), {"optimizer": {"type": "AdamW"}}):
        proposal = carried(content, {"width": 256}, {"width": 512})
        assert proposal.params.keys().isdisjoint(("lr", "muon_lr"))


def test_muons_rate_does_not_become_adamws() -> None:
    """One lr under "original", carried, remained as "AdamW's rate, as tuned"."""
    proposal = carried(muon({"lr": 0.02}), {"width": 256}, {"width": 512})
    assert proposal.params["muon_lr"] == 0.018 and "choose adam_lr" in proposal.reasons["lr"]


def test_auto_is_not_multiplied() -> None:
    auto = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    proposal = carried(auto, {"width": 256}, {"width": 512})
    assert proposal.params["lr"] == proposal.params["weight_decay"] == "auto"
    assert proposal.params.keys().isdisjoint(("muon_lr", "muon_weight_decay"))
    assert "set muon_lr to 0.637 times the learning rate that fills it in" in proposal.notes[0]
    assert "divide Muon's weight_decay, 'auto', by 0.637" in proposal.notes[1]


@pytest.mark.parametrize(
    ("params", "scheduler", "note"),
    [
        ({"lr": 0.02, **MATCHED}, {"warmup_max_lr": 0.02}, ""),
        ({"muon_lr": 0.02, "adam_lr": 1e-3}, {"warmup_max_lr": 0.02}, "warmup_max_lr, 0.02, stands for muon"),
        ({"muon_lr": 0.02, "adam_lr": 1e-3}, {"cycle_max_lr": [0.02, 1e-3]}, "cycle_max_lr, [0.02, 0.001]"),
        ({"muon_lr": 0.02, "adam_lr": 1e-3}, {"lr_range_test_min_lr": 0.02}, "lr_range_test_min_lr"),
        ({"muon_lr": 0.02, "adam_lr": 1e-3}, {"warmup_num_steps": 9}, ""),
    ],
)
def test_a_schedule_follows_the_rate(params: Any, scheduler: Any, note: str) -> None:
    """A schedule's number is the rate of a group with ``lr``. Once ``lr`` was ``adam_lr``, it undid the carrying."""
    proposal = carried(muon(params, scheduler={"params": scheduler}), {"width": 256}, {"width": 512})
    assert proposal.params.get("lr") == params.get("lr")
    assert [note in text for text in proposal.notes] == ([True] if note else [])


def test_the_law_is_followed_over_the_sizes_that_are_given() -> None:
    content = muon({"muon_lr": 0.02, "adam_lr": 1e-3, "weight_decay": 0.1})
    sizes = {"width": 256, "tokens": 1e9, "batch": 5e5}, {"width": 512, "tokens": 8e9, "batch": 2e6}
    params = carried(content, *sizes).params
    assert params["muon_lr"] == pytest.approx(0.02 * 2**-0.15 * 8**-0.395 * 2, rel=5e-3)
    # The product of rate and decay is kept over widths alone.
    assert params["muon_weight_decay"] == pytest.approx(0.1 * 2**0.15, rel=5e-3)
    params = carried(content, {"tokens": 1e9}, {"tokens": 8e9, "width": 512}).params
    assert params["muon_lr"] == pytest.approx(0.02 * 8**-0.395, rel=5e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--from heigth=3", "--from: must be NAME=NUMBER, as in width=512"),
        ("--to width=big", "--to: must be NAME=NUMBER, as in width=512"),
        ("--from width=8 tokens=1e-300", "and a number of at least 1, got 'tokens=1e-300'"),
        ("--from width=1", "--from and --to both need width: "),
        ("--to width=1", "--from and --to both need width: "),
        ("--from width=1 --to tokens=2", "--from and --to both need tokens, width: "),
        ("--from width=1 --to width=2 tokens=2", "--from and --to both need tokens: "),
        ("--from width=1 width=2 --to width=4", "--from: has two numbers for width"),
    ],
)
def test_sizes_that_cannot_be_read(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ADAMW))
    assert main(["rates", str(tmp_path / "ds.json"), *arguments.split()]) == 2
    assert message in capsys.readouterr().err


# ---- the table of other frameworks: the formula of each, written out from its source, takes the same steps ----

LR, DECAY, MU = 0.03, 0.2, 0.95
Scale = Callable[[int, int, Mapping[str, Any]], float]


def megatron(rows: int, cols: int, theirs: Mapping[str, Any]) -> float:
    scales = {
        "spectral": max(rows, cols) ** 0.5,
        "unit_rms_norm": (rows / cols) ** 0.5,
        "shape_scaling": max(1, rows / cols) ** 0.5,
    }
    return float(theirs.get("muon_extra_scale_factor", 1.0) * scales[theirs["muon_scale_mode"]])


def verl(rows: int, cols: int, theirs: Mapping[str, Any]) -> float:
    beta1 = theirs["betas"][0]
    return math.sqrt((1.0 - beta1) / (1.0 + beta1)) * megatron(rows, cols, theirs)


def named(rows: int, cols: int, theirs: Mapping[str, Any]) -> float:
    """The root of rows over columns, from 1 on, unless a setting names another scale."""
    scales = {"rms_norm": 0.2 * math.sqrt(max(rows, cols)), "spectral_norm": math.sqrt(rows / cols)}
    scales["match_rms_adamw"] = scales["rms_norm"]
    name = theirs.get("adjust_lr", theirs.get("adjust_lr_fn"))
    return scales.get(name, float(max(1, rows / cols) ** 0.5))


# Whether momentum is a mean of the gradients (``lerp_``) or a sum (``mul_().add_()``), Nesterov's, and the scale.
FORMULAS: dict[str, tuple[str, bool, Scale]] = {
    "Megatron-LM": ("mean", False, megatron),
    "verl": ("mean", False, verl),
    "torch": ("mean", True, named),
    "Keller Jordan": ("mean", True, named),
    "DeepSpeed": ("mean", True, named),
    "Dion": ("sum", False, named),
    "Moonlight": ("sum", True, lambda rows, cols, _: named(rows, cols, {"adjust_lr": "rms_norm"})),
    "xtuner": ("sum", True, named),
}


def rows_of_the_page() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return framework, settings there and settings here of every row of the table."""
    page = (REPOSITORY / "docs" / "from_deepspeeds_muon.md").read_text()
    _, _, rows = page.partition("| there | here | what still differs |\n|---|---|---|\n")
    cells = [row.split(" | ") for row in rows.partition("\n\n")[0].splitlines()]

    def settings(cell: str) -> dict[str, Any]:
        return {key: json.loads(value) for key, value in re.findall(r"`(\w+): (.*?)`", cell)}

    return [
        (re.split(r",|$", there.strip("| "))[0], settings(there), settings(ours)) for there, ours, _ in cells
    ]


ROWS = rows_of_the_page()


def test_every_framework_has_a_formula() -> None:
    """But nanochat, from which more differs than settings can say."""
    assert {framework for framework, *_ in ROWS} == {*FORMULAS, "nanochat"} and len(ROWS) == 16


@pytest.mark.parametrize("shape", [(24, 16), (16, 40), (20, 20)])
@pytest.mark.parametrize(
    ("framework", "theirs", "ours"), [row for row in ROWS if row[0] in FORMULAS], ids=str
)
def test_takes_the_same_steps(
    framework: str, theirs: dict[str, Any], ours: dict[str, Any], shape: tuple[int, int]
) -> None:
    config = MuonConfig.from_params(ours)
    if framework == "verl":  # the page rounds its factor
        exact = math.sqrt((1 - 0.9) / (1 + 0.9))
        assert ours["update_scale"] == round(exact, 6)
        ours = {**ours, "update_scale": exact}
    reference = ReferenceMuon(
        {"w": lambda weight: [weight]},
        muon_lr=LR,
        weight_decay=DECAY,
        coefficients=config.coefficients(),
        **{key: value for key, value in ours.items() if key != "ns_schedule"},
    )
    generator = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(shape, generator=generator, dtype=torch.float64)}
    expected = weights["w"].clone()
    # A large first gradient: a momentum that differs gives another direction in later steps.
    grads = [
        scale * torch.randn(shape, generator=generator, dtype=torch.float64) for scale in (9.0, 1.0, 1.0)
    ]
    momentum, nesterov, scale = FORMULAS[framework]
    buf = torch.zeros_like(expected)
    for grad in grads:
        buf = buf + (1 - MU) * (grad - buf) if momentum == "mean" else MU * buf + grad
        direction = grad + MU * (buf - grad if momentum == "mean" else buf) if nesterov else buf
        update = scale(*shape, theirs) * newton_schulz(direction, config.coefficients())
        expected = expected * (1 - LR * DECAY) - LR * update
        reference.step(weights, {"w": grad})
    close(weights["w"], expected, rtol=1e-10, atol=1e-9)
