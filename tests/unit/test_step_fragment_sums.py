"""Pieces of fragments inside of blocks, and a variant that keeps the norm of its matrices, in one process."""

from __future__ import annotations

import copy
import itertools
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepspeed_muon import BindingError, ConfigError, Muon, MuonConfig
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import flat_placement
from deepspeed_muon.plan.rows import first_elements, pieces_of, unit_count
from deepspeed_muon.variants import VARIANTS
from deepspeed_muon.variants.hyperball import RADIUS, apply
from deepspeed_muon.variants.muown import MAGNITUDE
from deepspeed_muon.variants.variant import UnitRates
from tests.support.comparisons import close, within
from tests.support.reference import Oracle, iteration_limit, relative


@pytest.mark.parametrize(
    ("rows", "cols"),
    [((5,), (4,)), ((2, 3), (4,)), ((5,), (1, 3)), ((1, 2, 2), (2, 1, 1)), ((5,), (1, 1, 1, 1))],
)
@pytest.mark.parametrize("units", ["blocks", "rows", "columns"])
def test_pieces_cover_every_fragment_once(rows: tuple[int, ...], cols: tuple[int, ...], units: str) -> None:
    """Every range of a 5 x 4 matrix, and every grid of blocks: each element is in the piece of its own unit."""
    blocks = torch.empty(5, 4, dtype=torch.int64)
    by_rows, transposed = units != "blocks", units == "columns"
    placement = flat_placement(0, 20, 20)
    matrix = MatrixLayout("m", 5, 4, 0, placement, row_blocks=rows, col_blocks=cols, transposed=transposed)
    tops, lefts = ([*itertools.accumulate(sizes, initial=0)] for sizes in (rows, cols))
    for stripe, place in itertools.product(range(len(rows)), range(len(cols))):
        block = blocks[tops[stripe] : tops[stripe + 1], lefts[place] : lefts[place + 1]]
        if units == "columns":
            block.copy_(stripe * 4 + torch.arange(lefts[place], lefts[place + 1]))
        elif units == "rows":
            block.copy_(torch.arange(tops[stripe], tops[stripe + 1]).unsqueeze(-1) * len(cols) + place)
        else:
            block.fill_(stripe * len(cols) + place)
    if by_rows:
        count = unit_count(matrix, rows=True)
        firsts = first_elements(matrix, np.arange(count))
        assert [int(blocks.view(-1)[first]) for first in firsts] == list(range(count))
    for start in range(20):
        for stop in range(start + 1, 21):
            fragment = torch.full((3 + stop - start,), -1)
            for piece in pieces_of(matrix, start, stop, rows=by_rows):
                view = fragment.as_strided(piece.shape, (piece.stride, 1), 3 + piece.start)
                assert (view == -1).all() and view.numel()
                units = torch.from_numpy(piece.units)
                view.copy_(units if piece.steps[1] else units.unsqueeze(-1))
            assert torch.equal(fragment[3:], blocks.view(-1)[start:stop]) and (fragment[:3] == -1).all()


def of_rate(rates: torch.Tensor) -> UnitRates:
    """Return rates without decay, of the first step."""
    ones = torch.ones_like(rates)
    return UnitRates(rates, ones, rates, 0.9 * ones, 0.95 * ones, 1e-8 * ones, ones)


def test_sums_give_the_factors_of_the_formula() -> None:
    """Also where the weights have left the ball, where the update is zero, and in the first step."""
    generator = torch.Generator().manual_seed(3)
    weights, updates = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    updates[1] = 0
    state = {RADIUS: torch.tensor([0.0, 2.0, 3.0], dtype=torch.float64)}
    sums = tuple((a * b).sum((1, 2)) for a, b in ((weights, weights), (weights, updates), (updates, updates)))
    rates = torch.tensor([0.1, 0.1, 0.3], dtype=torch.float64)
    keep, move = apply(sums, state, of_rate(rates))  # type: ignore[arg-type]
    assert state[RADIUS][0] == weights[0].norm() and state[RADIUS][1:].tolist() == [2.0, 3.0]
    assert (keep[1], move[1]) == (1, 0)
    for i in (0, 2):
        radius = state[RADIUS][i]
        moved = weights[i] - rates[i] * radius * updates[i] / updates[i].norm()
        expected = radius * moved / moved.norm()
        close(keep[i] * weights[i] + move[i] * updates[i], expected, rtol=1e-12, atol=1e-14)


def model_of(fill: float | None = None) -> nn.Module:
    torch.manual_seed(4)
    model = nn.Module()
    model.layer = nn.Linear(6, 8, bias=False)
    if fill is not None:
        nn.init.constant_(model.layer.weight, fill)
    return model


SETTINGS: dict[str, Any] = {
    "variant": "hyperball",
    "muon_lr": 0.1,
    "ns_dtype": "fp32",
    "ns_backend": "torch",
    "adam_weight_decay": 0.1,
}


def train(model: nn.Module, optimizer: Muon, steps: int, *, first: int = 0) -> None:
    for step in range(first, first + steps):
        torch.manual_seed(step)
        model.layer.weight.grad = torch.randn(8, 6).to(model.layer.weight.dtype)
        optimizer.step()


def train_beside_reference(
    model: nn.Module, optimizer: Muon, oracle: Oracle, *, momentum_dtype: str | None
) -> None:
    """Take six steps of a schedule with both, and compare the weights."""
    other, start = copy.deepcopy(model).double(), model.layer.weight.detach().clone()
    for step in range(6):
        optimizer.param_groups[0]["lr"] = oracle.lr = 0.1 / (1 + step)
        train(model, optimizer, 1, first=step)
        other.layer.weight.grad = model.layer.weight.grad.double()
        oracle.update(other)
    error = relative(model.layer.weight.detach(), other.layer.weight.detach(), start)
    # The iteration in fp32, whose direction is about that of the last gradient; momentum in bf16 is rounded by 2^-9.
    last = iteration_limit(model.layer.weight.grad, torch.float32)
    within(error, last if momentum_dtype is None else 0.05, "path")


def check_that_a_zero_gradient_changes_nothing(model: nn.Module, optimizer: Muon) -> None:
    before = model.layer.weight.detach().clone()
    model.layer.weight.grad = torch.zeros(8, 6)
    optimizer.step()
    assert torch.equal(model.layer.weight, before)


@pytest.mark.parametrize("momentum_dtype", [None, "bf16"])
def test_the_norm_stays(momentum_dtype: str | None) -> None:
    """Against the reference, with a schedule; a matrix without a gradient keeps its weights."""
    model = model_of()
    start = model.layer.weight.detach().clone()
    optimizer = Muon(model, **SETTINGS, momentum_dtype=momentum_dtype)
    oracle = Oracle({"layer.weight"}, variant="hyperball")
    train_beside_reference(model, optimizer, oracle, momentum_dtype=momentum_dtype)
    close(model.layer.weight.norm(), start.norm(), rtol=1e-6, atol=0)
    kept = optimizer.state[model.layer.weight][RADIUS]
    close(kept, start.norm().expand(8), rtol=1e-6, atol=0)
    check_that_a_zero_gradient_changes_nothing(model, optimizer)


def test_masters_in_half_precision_do_not_drift() -> None:
    """Their rounding changes the norm in every step, and the next step takes it from the state."""
    model = model_of().bfloat16()
    start = float(model.layer.weight.detach().double().norm())
    optimizer = Muon(model, **{**SETTINGS, "muon_lr": 0.01})
    train(model, optimizer, 100)
    # 48 weights are rounded by 2^-9 each after the last step.
    assert float(model.layer.weight.detach().double().norm()) == pytest.approx(start, rel=2**-9)


def test_another_variant_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    """A state dict of NorMuon: its row moments go, the radius is that of the loaded weights."""
    model = model_of()
    saved = Muon(model, variant="normuon", ns_backend="torch")
    train(model, saved, 2)
    optimizer = Muon(model, **SETTINGS)
    optimizer.load_state_dict(saved.state_dict())
    norm = model.layer.weight.detach().norm().clone()
    with caplog.at_level(logging.WARNING):
        train(model, optimizer, 2, first=2)
    state = optimizer.state[model.layer.weight]
    assert "row_second_moment" not in state and caplog.text.count("has no radius") == 1
    close(state[RADIUS], norm.expand(8), rtol=1e-6, atol=0)


def test_a_first_step_without_gradients_loses_no_state(caplog: pytest.LogCaptureFixture) -> None:
    """The second step said that the state was saved with another variant."""
    model = model_of()
    optimizer = Muon(model, **SETTINGS)
    with caplog.at_level(logging.WARNING):
        check_that_a_zero_gradient_changes_nothing(model, optimizer)
        train(model, optimizer, 1)
    assert "has no radius" not in caplog.text


def test_weights_of_zero_are_refused_before_anything_changes() -> None:
    model = model_of(0.0)
    optimizer = Muon(model, **SETTINGS)
    with pytest.raises(BindingError, match=r"'hyperball' keeps the norm .* layer\.weight is 0 .*exclude"):
        train(model, optimizer, 1)
    assert not model.layer.weight.any()


@pytest.mark.parametrize("momentum_dtype", [None, "bf16"])
@pytest.mark.parametrize("nesterov", [None, True])
def test_magnitudes_and_directions_of_rows(momentum_dtype: str | None, nesterov: bool | None) -> None:
    """Against the reference: a schedule, decay, a row that starts as zeros, magnitudes that change their sign."""
    given = {} if nesterov is None else {"nesterov": nesterov}
    model = model_of()
    with torch.no_grad():
        model.layer.weight[2] = 0
        model.layer.weight[3:] *= 0.05
    settings = {**SETTINGS, "variant": "muown", "weight_decay": 0.1, "eps": 1e-8}
    optimizer = Muon(model, **settings, momentum_dtype=momentum_dtype, **given)
    oracle = Oracle({"layer.weight"}, variant="muown", nesterov=nesterov)
    train_beside_reference(model, optimizer, oracle, momentum_dtype=momentum_dtype)
    state = optimizer.state[model.layer.weight]
    magnitudes = oracle.kept["layer.weight", 0][MAGNITUDE]
    assert (magnitudes < 0).any() and (magnitudes > 0).any()
    close(state[MAGNITUDE].abs(), model.layer.weight.detach().norm(dim=1), rtol=1e-6, atol=0)
    check_that_a_zero_gradient_changes_nothing(model, optimizer)


def test_magnitudes_outlive_masters_in_half_precision() -> None:
    """Steps of a magnitude that bf16 would lose add up in the state."""
    model = model_of().bfloat16()
    optimizer = Muon(model, **{**SETTINGS, "variant": "muown", "muon_lr": 1e-4})
    train(model, optimizer, 100)
    state = optimizer.state[model.layer.weight]
    assert state[MAGNITUDE].dtype == torch.float32
    # Six weights of a row are rounded by 2^-9 each after the last step.
    norms = model.layer.weight.detach().double().norm(dim=1)
    close(state[MAGNITUDE].double().abs(), norms, rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("variant", "settings", "said"),
    [
        (
            "hyperball",
            {"weight_decay": 0.1},
            r"optimizer\.params\.weight_decay: 0\.1 .* set muon_weight_decay to 0",
        ),
        ("hyperball", {"muon_weight_decay": 0.1}, r"weight_decay: 0\.1 with variant 'hyperball'"),
        ("hyperball", {"adjust_lr_fn": "match_rms_adamw"}, r"adjust_lr_fn: .* no scale applies"),
        ("hyperball", {"qk_clip": {}}, r"qk_clip: .* undo the clip"),
        (
            "muown",
            {"weight_decay_mode": "cautious"},
            r"weight_decay_mode: 'cautious' with variant 'muown': .* unset it",
        ),
        ("muown", {"qk_clip": {}}, r"qk_clip: .* undo the clip"),
    ],
)
def test_what_does_not_fit_is_refused(variant: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MuonConfig.from_params({"variant": variant, **settings})


def test_what_fits_is_taken() -> None:
    MuonConfig.from_params({"variant": "hyperball", "weight_decay": 0.1, "muon_weight_decay": 0.0})
    assert not MuonConfig.from_params({"variant": "muown"}).nesterov


def test_param_groups_are_held_to_it_too() -> None:
    """When they are made, and when a schedule or another run's settings change them."""
    model = model_of()
    weight = model.layer.weight
    with pytest.raises(ConfigError, match=r"param group 0\.weight_decay: 0\.1 with variant 'hyperball'"):
        Muon([{"params": [("layer.weight", weight)], "weight_decay": 0.1}], muon_weight_decay=0.0, **SETTINGS)
    optimizer = Muon(model, **SETTINGS)
    optimizer.param_groups[0]["weight_decay"] = 0.2
    with pytest.raises(ConfigError, match=r"weight_decay 0\.2 .* hyperparameters=False"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_variant_is_one_short_file(name: str) -> None:
    """Its functions, its float64 reference and its registration."""
    from importlib import import_module

    path = import_module(f"deepspeed_muon.variants.{name}").__file__
    assert path is not None
    with open(path) as file:
        assert len(file.readlines()) < 150
