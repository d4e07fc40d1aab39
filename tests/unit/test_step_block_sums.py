"""Spans of fragments, and a variant that keeps the norm of its matrices, in one process."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from deepspeed_muon import BindingError, ConfigError, Muon, MuonConfig
from deepspeed_muon.ops.dispatch import flat_passes
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import Placement, flat_placement
from deepspeed_muon.reference import ReferenceMuon
from deepspeed_muon.step.block_sums import BlockSums, spans_of
from deepspeed_muon.step.tables import Rates, Step
from deepspeed_muon.variants.hyperball import apply
from tests.support.comparisons import close, relative, within
from tests.support.oracle import Oracle, matrices_of
from tests.support.rounding import iteration_limit

GRIDS = [((5,), (4,)), ((2, 3), (4,)), ((5,), (1, 3)), ((1, 2, 2), (2, 1, 1)), ((5,), (1, 1, 1, 1))]


def block_of(rows: tuple[int, ...], cols: tuple[int, ...]) -> Tensor:
    """Return the number of the block of each element of a grid."""
    numbers = torch.arange(len(rows) * len(cols)).view(len(rows), len(cols))
    return numbers.repeat_interleave(torch.tensor(rows), 0).repeat_interleave(torch.tensor(cols), 1)


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_spans_cover_every_fragment_once(rows: tuple[int, ...], cols: tuple[int, ...]) -> None:
    """Every range of a 5 x 4 matrix, and every grid of blocks: each element is in the span of its own block."""
    blocks = block_of(rows, cols)
    matrix = MatrixLayout("m", 5, 4, 0, flat_placement(0, 20, 20), row_blocks=rows, col_blocks=cols)
    for start in range(20):
        for stop in range(start + 1, 21):
            fragment = torch.full((stop - start,), -1)
            for first, height, widths in spans_of(matrix, start, stop):
                row = torch.cat([torch.full((width,), block) for block, width in widths])
                span = fragment.narrow(0, first, height * len(row)).view(height, -1)
                assert (span == -1).all() and span.numel()
                span.copy_(row)
            assert torch.equal(fragment, blocks.view(-1)[start:stop])


def step_of(weights: Tensor, *, active: bool = True) -> Step:
    """Return a step on one partition with one matrix, of learning rate 1."""
    one = torch.ones(1, 2, dtype=torch.float64)
    mask = None if active else torch.tensor([False])
    return Step(mask, Rates(one, one, None, [], []), [weights], [], [], None, flat_passes("torch"))


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_a_fragment_is_updated_by_the_rates_of_its_blocks(
    rows: tuple[int, ...], cols: tuple[int, ...]
) -> None:
    """Fragments that start and end anywhere, three elements into the partition and two into the updates."""
    blocks = block_of(rows, cols).view(-1)
    steps = 0.1 * torch.arange(1, len(rows) * len(cols) + 1, dtype=torch.float64)
    decays = 1 - steps / 3
    context: Any = SimpleNamespace(tensor_group=None, group=None, world_size=1, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    dtypes = (
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    )
    for number, (start, stop) in enumerate(itertools.combinations(range(1, 21), 2)):
        numel, (dtype, sent) = stop - start, dtypes[number % 3]
        matrix = MatrixLayout(
            "m", 5, 4, 0, Placement(20, 0, start, 0, numel, 3), row_blocks=rows, col_blocks=cols
        )
        plan: Any = SimpleNamespace(matrices=(matrix,), rank=1)
        sums = BlockSums(plan, [0], torch.tensor([(0, 3, 1, 2, numel, 0)]), context, context.device)
        before = torch.randn(numel + 5, generator=generator, dtype=torch.float64).to(dtype)
        update = torch.randn(numel + 2, generator=generator, dtype=torch.float64).to(sent)
        weights, expected = before.clone(), before.double()
        sums.apply(lambda *_: (steps, decays), step_of(weights), [torch.empty(0), update])
        rate, decay = steps[blocks[start:stop]], decays[blocks[start:stop]]
        expected[3:-2] = decay * before[3:-2].double() - rate * update[2:].double()
        # Three roundings in fp32 or float64 of numbers below 8, and that of the result, which is eps / 2.
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        close(weights.double(), expected, rtol=torch.finfo(dtype).eps, atol=3 * 8 * eps)
        assert torch.equal(weights[:3], before[:3]) and torch.equal(weights[-2:], before[-2:])
        update.fill_(torch.nan)  # nothing reads that of a matrix without a gradient
        unchanged = weights.clone()
        sums.apply(lambda *_: (steps, decays), step_of(weights, active=False), [torch.empty(0), update])
        assert torch.equal(weights, unchanged)


def test_sums_give_the_rates_of_the_formula() -> None:
    """Also where the update is zero, where the weights are, and where the step would make them zero."""
    generator = torch.Generator().manual_seed(3)
    weights, updates = torch.randn(2, 6, 4, 5, generator=generator, dtype=torch.float64)
    updates[1] = 0
    weights[3] = 0
    updates[4] = 7 * weights[4]
    weights[5], updates[5] = 0, 0
    weights[5, 0, 0], updates[5, 0, 0] = 2, 1
    sums = tuple((a * b).sum((1, 2)) for a, b in ((weights, weights), (weights, updates), (updates, updates)))
    rates = torch.tensor([0.1, 0.1, 0.3, 0.1, 1.0, 1.0], dtype=torch.float64)
    step, decay = apply(sums, rates)  # type: ignore[arg-type]
    for unmoved in (1, 3, 4, 5):
        assert (step[unmoved], decay[unmoved]) == (0, 1)
    for i in (0, 2, 3, 5):
        reference = ReferenceMuon({}, variant="hyperball", muon_lr=float(rates[i]))
        with mock.patch("deepspeed_muon.reference.newton_schulz", return_value=updates[i]):
            expected = weights[i] - rates[i] * reference.update_of(weights[i], updates[i])
        close(decay[i] * weights[i] - step[i] * updates[i], expected, rtol=1e-12, atol=1e-14)


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


@pytest.mark.parametrize("momentum_dtype", [None, "bf16"])
def test_the_norm_stays(momentum_dtype: str | None) -> None:
    """Against the reference, with a schedule; a matrix without a gradient keeps its weights."""
    model = model_of()
    weight = model.layer.weight
    other, start = copy.deepcopy(model).double(), weight.detach().clone()
    optimizer = Muon(model, **SETTINGS, momentum_dtype=momentum_dtype)
    oracle = Oracle(matrices_of(["layer.weight"]), variant="hyperball")
    for step in range(6):
        optimizer.param_groups[0]["lr"] = oracle.muon_lr = 0.1 / (1 + step)
        train(model, optimizer, 1, first=step)
        other.layer.weight.grad = weight.grad.double()
        oracle.update(other)
    # The iteration in fp32, whose direction is about that of the last gradient; momentum in bf16 is rounded by 2^-9.
    limit = 0.05 if momentum_dtype else iteration_limit(weight.grad, torch.float32)
    within(relative(weight.detach(), other.layer.weight.detach(), start), limit, "path")
    close(weight.norm(), start.norm(), rtol=1e-6, atol=0)
    assert optimizer.state[weight].keys() == {"momentum_buffer", "step"}
    before = weight.detach().clone()
    weight.grad = torch.zeros(8, 6)
    optimizer.step()
    assert torch.equal(weight, before)


def test_masters_in_half_precision_have_no_trend() -> None:
    """Rounding of 48 weights changes their norm by chance: 2^-9 / sqrt(3 * 48) a step, 10 times that in 100 steps."""
    model = model_of().bfloat16()
    start = float(model.layer.weight.detach().double().norm())
    optimizer = Muon(model, **{**SETTINGS, "muon_lr": 0.01})
    train(model, optimizer, 100)
    # Three standard deviations.
    assert float(model.layer.weight.detach().double().norm()) == pytest.approx(start, rel=3 * 2**-9 * 10 / 12)


def test_weights_that_are_put_in_keep_their_norm() -> None:
    """A step is as long as the rate says, relative to the weights that it meets."""
    model = model_of()
    optimizer = Muon(model, **SETTINGS)
    train(model, optimizer, 2)
    with torch.no_grad():
        model.layer.weight.mul_(5)
    put_in = model.layer.weight.detach().clone()
    train(model, optimizer, 1, first=2)
    after = model.layer.weight.detach()
    close(after.norm(), put_in.norm(), rtol=1e-6, atol=0)
    # A chord of the ball: between the step and, where it points along the weights, less.
    assert 0.03 < float((after - put_in).norm() / put_in.norm()) < 0.11


def test_state_of_other_variants_is_dropped() -> None:
    model = model_of()
    saved = Muon(model, variant="normuon", ns_backend="torch")
    train(model, saved, 2)
    optimizer = Muon(model, **SETTINGS)
    optimizer.load_state_dict(saved.state_dict())
    train(model, optimizer, 2, first=2)
    assert optimizer.state[model.layer.weight].keys() == {"momentum_buffer", "step"}


def test_weights_of_zero_are_refused() -> None:
    """Before the first step; zeros that are written later stay, and nobody is asked again."""
    model = model_of(0.0)
    optimizer = Muon(model, **SETTINGS)
    said = r"'hyperball' keeps the norm .* layer\.weight is 0 in some block, .*exclude"
    for _ in range(2):
        with pytest.raises(BindingError, match=said):
            train(model, optimizer, 1)
    assert not model.layer.weight.any() and not optimizer.state
    nn.init.ones_(model.layer.weight)
    train(model, optimizer, 1)
    nn.init.zeros_(model.layer.weight)
    train(model, optimizer, 1)
    assert not model.layer.weight.any()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight_decay": 0.1}, r"optimizer\.params\.weight_decay: 0\.1 .* set muon_weight_decay to 0"),
        ({"muon_weight_decay": 0.1}, r"weight_decay: 0\.1 with variant 'hyperball'"),
        ({"adjust_lr_fn": "match_rms_adamw"}, r"adjust_lr_fn: .* no scale applies"),
        ({"update_scale": 0.2}, r"update_scale: 0\.2 .* multiply muon_lr by the factor"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MuonConfig.from_params({"variant": "hyperball", **settings})
    MuonConfig.from_params(
        {"variant": "hyperball", "weight_decay": 0.1, "muon_weight_decay": 0.0, "qk_clip": {}}
    )


def test_param_groups_are_held_to_it_too() -> None:
    """When they are made, and when a schedule or another run's settings change them."""
    model = model_of()
    weight = model.layer.weight
    with pytest.raises(ConfigError, match=r"param group 0\.weight_decay: 0\.1 with variant 'hyperball'"):
        Muon([{"params": [("layer.weight", weight)], "weight_decay": 0.1}], muon_weight_decay=0.0, **SETTINGS)
    for key in ("weight_decay", "update_scale"):
        optimizer = Muon(model, **SETTINGS)
        train(model, optimizer, 1)
        optimizer.param_groups[0][key] = 0.2
        for _ in range(2):  # a caller that goes on would train by the rates of the step before
            with pytest.raises(ConfigError, match=rf"{key} 0\.2 .* hyperparameters=False"):
                train(model, optimizer, 1)


@pytest.mark.parametrize("is_of_group", [False, True])
def test_adamws_decay_is_not_that_of_the_matrices(is_of_group: bool) -> None:
    """Neither in a param group nor in a state dict, where a schedule may have changed it."""
    model = nn.Module()
    model.layer = nn.Linear(6, 8)
    matrix, vector = [("layer.weight", model.layer.weight)], [("layer.bias", model.layer.bias)]
    groups = [{"params": matrix}, {"params": vector, "algorithm": "adamw", "weight_decay": 0.1}]
    optimizer = Muon(groups, variant="hyperball") if is_of_group else Muon(model, **SETTINGS)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][1]["weight_decay"] = 0.05
    optimizer.load_state_dict(state_dict)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.05]
    state_dict["param_groups"][0]["weight_decay"] = 0.1
    with pytest.raises(ConfigError, match=r"weight_decay: 0\.1 with variant 'hyperball'"):
        optimizer.load_state_dict(state_dict)
