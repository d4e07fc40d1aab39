"""The numbers of the health report against float64, and the check of every result."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed_muon
from deepspeed_muon import Muon
from deepspeed_muon.math.coefficients import band_of, resolve_schedule, tolerates_rounding
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize
from deepspeed_muon.monitoring.measure import (
    SIGMA_TOLERANCE,
    combine,
    measure,
    norm_bounds,
    spectrum,
    why_wrong,
)
from deepspeed_muon.monitoring.recorder import Sample, StepRecorder, monitor_events, summarize
from deepspeed_muon.ops.torch_operators import frobenius_norms
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import sharded_placement
from deepspeed_muon.reference import newton_schulz
from deepspeed_muon.step import runner as step_runner
from deepspeed_muon.step.check import DeferredCheck, Result, ResultCheck
from deepspeed_muon.transport.ranks import Ranks, all_ranks
from tests.support.comparisons import close, within
from tests.support.models import build, train_alone
from tests.support.reference_math import reference_health
from tests.support.rounding import iteration_limit

QUINTIC = resolve_schedule("quintic")
SCHEDULES = ("quintic", "polar_express", "polar_express_5", "cans", "deepseekv4")


def with_spectrum(values: Tensor, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Return a matrix with the given singular values and random singular vectors, float64."""
    generator = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(rows, len(values), generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(cols, len(values), generator=generator, dtype=torch.float64))
    return (u * values) @ v.T


INPUTS = {
    "gaussian": lambda: torch.randn(96, 200, generator=torch.Generator().manual_seed(1)).double(),
    "tall": lambda: torch.randn(200, 96, generator=torch.Generator().manual_seed(2)).double(),
    "decaying": lambda: with_spectrum(torch.logspace(0, -4, 128, dtype=torch.float64), 128, 192),
    "low rank": lambda: with_spectrum(torch.linspace(1, 0.5, 20, dtype=torch.float64), 128, 160),
    "rank one": lambda: torch.outer(torch.arange(1.0, 41.0), torch.ones(30)).double(),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_measures_as_the_reference(kind: str) -> None:
    direction = INPUTS[kind]()
    band = band_of(QUINTIC)
    result = newton_schulz(direction, QUINTIC)
    expected = reference_health(direction, result, scale=1.7, low=band.low, high=band.high)
    actual = combine([measure(direction.unsqueeze(0), result.unsqueeze(0), scale=1.7, band=band)])
    # Sums in fp32.
    assert actual["update_rms"] == pytest.approx(expected["update_rms"], rel=1e-5)
    assert actual["alignment"] == pytest.approx(expected["alignment"], rel=1e-5)
    # Eight Lanczos steps from four starts approach the largest eigenvalue from below: (1/k)^2 of the spectrum's width
    # for a dense edge (Saad, Numerical Methods for Large Eigenvalue Problems, sec. 6.6), which is 1.6 % of s^2.
    assert expected["sigma_max"] * 0.98 <= actual["sigma_max"] <= expected["sigma_max"] * 1.00001
    assert expected["stable_rank"] * 0.99999 <= actual["stable_rank"] <= expected["stable_rank"] * 1.04
    # Four probes of m signs estimate a trace with a relative error of sqrt(2 / (4 m)), three times that is 0.2 here;
    # the distance from the band has kinks, which cost the quadrature of 15 degrees a few hundredths.
    assert actual["orthogonality_error"] == pytest.approx(expected["orthogonality_error"], rel=0.2, abs=0.03)


def test_spectrum_is_exact_for_few_values_and_leaves_the_random_state_alone() -> None:
    """Lanczos ends after as many steps as there are distinct eigenvalues."""
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    values = torch.tensor([3.0] * 5 + [1.0] * 3, dtype=torch.float64)
    nodes, weights = spectrum(torch.stack([with_spectrum(values, 8, 11, seed) for seed in range(2)]))
    assert torch.equal(state, torch.random.get_rng_state())
    assert nodes.shape == weights.shape == (2, 4, 8)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, dtype=torch.float64))
    heavy = nodes[weights > 1e-6]
    assert bool(((heavy - 9).abs().minimum((heavy - 1).abs()) < 1e-4).all()), heavy
    close(nodes.amax(dim=-1), torch.full((2, 4), 9.0).double(), rtol=1e-5, atol=0)


def test_column_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(4))
    undivided = combine([measure(x, x.flip(0), scale=1.0, band=band_of(QUINTIC))])
    monkeypatch.setattr("deepspeed_muon.monitoring.measure._CONVERT_NUMEL", 24 * 2 * 7)
    pieces = combine([measure(x, x.flip(0), scale=1.0, band=band_of(QUINTIC))])
    for name in ("update_rms", "orthogonality_error", "sigma_max", "stable_rank", "alignment"):
        assert pieces[name] == pytest.approx(undivided[name], rel=1e-4), name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_right_results_pass(schedule: str, dtype: torch.dtype) -> None:
    """No false alarm: every schedule, dtype and method over spectra from one value to four decades."""
    coefficients = resolve_schedule(schedule)
    if not tolerates_rounding(coefficients, dtype):
        pytest.skip("no configuration may ask for it, see the next test")
    band = band_of(coefficients)
    inputs = [*(make() for make in INPUTS.values()), torch.ones(1, 9), torch.eye(33), 1e-5 * torch.eye(7, 50)]
    for x in inputs:
        for method in ("standard", "gram"):
            settings = NsSettings(coefficients, method, dtype)  # type: ignore[arg-type]
            result = orthogonalize(x.float().unsqueeze(0), settings=settings)
            bounds = norm_bounds(*x.shape, band)
            assert why_wrong(float(frobenius_norms(result)), bounds) is None, (x.shape, method)
            sigma = float(torch.linalg.svdvals(result[0].double()).max())
            assert sigma <= band.high * 1.02, f"the limit of {1 + SIGMA_TOLERANCE} leaves a margin"


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_a_diverging_iteration_is_caught(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    """Cans in bf16, which is refused: rounding puts a singular value above 1, from where it leads to 1e27."""
    cans = resolve_schedule("cans")
    monkeypatch.setattr("deepspeed_muon.config.settings.tolerates_rounding", lambda *_: True)
    weight, optimizer = one_matrix(ns_schedule="cans", ns_dtype="bf16", ns_method=method, ns_backend="torch")
    weight.grad = torch.outer(torch.arange(1.0, 13.0), torch.ones(20))
    optimizer.step()
    # The polynomial's slope at 1 is 8e4: one fp32 rounding of the input (6e-8) is half a percent of the result.
    limit = iteration_limit(weight.grad, torch.float32, coefficients=cans)
    within(error_of(weight, weight.grad, cans), limit, "update")
    assert counters(optimizer) == (1, 0) and "layer.weight (12 x 20)" in caplog.text


@pytest.mark.parametrize(
    ("norm", "said"),
    [(0.0, "outside"), (0.4, "outside"), (7.0, "outside"), (math.inf, "infinity"), (math.nan, "NaN")],
)
def test_failures(norm: float, said: str) -> None:
    bounds = norm_bounds(16, 64, band_of(QUINTIC))
    assert why_wrong(4.0, bounds) is None and said in str(why_wrong(norm, bounds))


def counters(optimizer: Muon) -> tuple[int, int]:
    return optimizer.health()["redone"], optimizer.health()["failed"]


def one_matrix(**kwargs: Any) -> tuple[nn.Parameter, Muon]:
    weight = nn.Parameter(torch.zeros(12, 20))
    return weight, Muon([("layer.weight", weight)], muon_lr=1.0, **kwargs)


def test_a_wrong_result_is_redone_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    weight, optimizer = one_matrix(ns_backend="torch", nesterov=False, momentum=0.0)
    gradient = torch.randn(12, 20, generator=torch.Generator().manual_seed(6))
    for _ in range(2):
        weight.data.zero_()
        weight.grad = 1e20 * gradient
        optimizer.step()
    within(error_of(weight, gradient), iteration_limit(gradient, torch.float32), "update")
    assert counters(optimizer) == (2, 0)
    assert caplog.text.count("layer.weight") == 1 and "redone in fp32" in caplog.text


def test_without_the_check_nothing_is_redone() -> None:
    weight, optimizer = one_matrix(ns_backend="torch", health=False)
    weight.grad = torch.full((12, 20), 1e20)
    optimizer.step()
    assert float(weight.detach().abs().max()) == 0.0 and counters(optimizer) == (0, 0)


@pytest.mark.parametrize("mode", ["skip", "error"])
def test_wrong_in_fp32_too(caplog: pytest.LogCaptureFixture, mode: Any) -> None:
    """An element beyond fp16's range becomes an infinity on an fp16 wire: no iteration can help."""
    weight, optimizer = one_matrix(wire_dtype="fp16", nonfinite_grad=mode, weight_decay=0.5)
    weight.data.fill_(1.0)
    weight.grad = torch.full((12, 20), 1e6)
    expectation = pytest.raises(deepspeed_muon.NumericalError, match=r"layer\.weight were wrong in this step")
    with expectation if mode == "error" else contextlib.nullcontext():
        optimizer.step()
    assert bool((weight == 0.5).all()), "only the decay"
    assert counters(optimizer) == (0, 1)
    assert "layer.weight (12 x 20)" in caplog.text and "wire_dtype fp16" in caplog.text
    weight.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(10))
    optimizer.step()
    assert bool((weight != 0.25).any()) and counters(optimizer) == (0, 1), "said once"


def check_of(*matrices: MatrixLayout, every: int = 0, kind: type[ResultCheck] = ResultCheck) -> ResultCheck:
    recorder = StepRecorder(every=every, check=True)
    return kind(recorder, matrices, ns=NsSettings(QUINTIC), origin=range(len(matrices)))


def error_of(weight: Tensor, gradient: Tensor, coefficients: Any = QUINTIC) -> float:
    """Return how far the step of :func:`one_matrix` from zero is from the orthogonalised gradient."""
    expected = newton_schulz(gradient, coefficients)
    return float((-weight.detach() - expected).norm() / expected.norm())


def result_of(members: list[tuple[int, int]], inputs: Tensor, blocks: Tensor, scale: float = 1.0) -> Result:
    return Result(members, inputs, blocks, [(scale,) * 3])


def test_a_head_without_a_gradient_is_right() -> None:
    """A zero block has a zero result, which no bound excludes; its neighbour is redone."""
    check = check_of(MatrixLayout("q_proj", 12, 9, 0, sharded_placement(0, 108, 108), row_blocks=(4, 4, 4)))
    direction = torch.randn(12, 9, generator=torch.Generator().manual_seed(7))
    direction[4:8] = 0
    blocks = orthogonalize(direction.view(3, 4, 9), settings=NsSettings(QUINTIC))
    right = blocks.clone()
    members = [(0, 0), (0, 1), (0, 2)]
    check.settle(result_of(members, direction.view(3, 4, 9), blocks))
    assert torch.equal(blocks, right) and check.recorder.redone == 0
    blocks[2] *= 3
    check.settle(result_of(members, direction.view(3, 4, 9), blocks))
    assert torch.equal(blocks[:2], right[:2]) and check.recorder.redone == 1
    # Both are fp32, by the Gram and by the standard iteration.
    close(blocks[2], right[2], rtol=0, atol=1e-5)


def test_unequal_blocks_are_measured_and_redone() -> None:
    """A fused projection of 8 and 4 rows, two calls of the iteration; the scale of the second is twice as large."""
    check = check_of(MatrixLayout("kv", 12, 9, 0, sharded_placement(0, 108, 108), row_blocks=(8, 4)), every=1)
    direction = torch.randn(12, 9, generator=torch.Generator().manual_seed(9))
    pieces = direction[:8], direction[8:]
    exact = [newton_schulz(piece, QUINTIC) for piece in pieces]
    blocks = exact[0].float()[None], 5 * exact[1].float()[None]  # the second one is wrong
    results = [result_of([(0, i)], pieces[i][None], blocks[i], scale=3.0 * (1 + i)) for i in (0, 1)]
    with check.recorder.step(1) as sample:
        for result in results:
            check.settle(result)
    for right, result in zip(exact, results, strict=True):
        close(result.blocks[0], right.float(), rtol=0, atol=1e-5)
    assert check.recorder.redone == 1 and sample is not None
    measured = sample.matrices["kv"]
    scaled = torch.cat((3 * exact[0], 6 * exact[1]))
    assert measured["update_rms"] == pytest.approx(float(scaled.square().mean().sqrt()), rel=1e-4)
    first, second = (
        reference_health(u, x, scale=1.0, low=check._band.low, high=check._band.high)
        for u, x in zip(pieces, exact, strict=True)
    )
    # At most eight distinct singular values: eight Lanczos steps find them all.
    assert measured["sigma_max"] == pytest.approx(max(first["sigma_max"], second["sigma_max"]), rel=1e-3)
    assert 2 * measured["stable_rank"] == pytest.approx(
        first["stable_rank"] + second["stable_rank"], rel=1e-3
    )
    cosine = float((scaled * direction).sum() / (scaled.norm() * direction.norm()))
    assert measured["alignment"] == pytest.approx(cosine, rel=1e-4)


def test_on_an_accelerator_the_host_sees_nothing_inside_of_a_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong result is left out by the device alone; the host is told in the next step, and then it is redone."""
    matrices = [MatrixLayout(f"w{i}", 8, 12, 0, sharded_placement(0, 96, 96)) for i in range(3)]
    check = check_of(*matrices, kind=DeferredCheck)
    directions = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(8))
    directions[0] = 0
    right = orthogonalize(directions, settings=NsSettings(QUINTIC))
    members = [(0, 0), (1, 0), (2, 0)]

    def settled(factor: float) -> Tensor:
        blocks = right.clone()
        blocks[2] *= factor
        check.settle(result := result_of(members, directions, blocks))
        return result.updates

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "__bool__", "__float__", "__int__", "cpu", "numpy"):
            patch.setattr(Tensor, name, lambda *_: pytest.fail("the host reads a tensor"))
        first = settled(math.nan)
    assert torch.equal(first[:2], right[:2]) and not first[2].any()
    assert (check.recorder.redone, check.recorder.failed) == (0, 0)
    ((indices, flags),) = check.left_out
    assert indices == [0, 1, 2] and flags.tolist() == [False, False, True]
    with caplog.at_level(logging.WARNING):
        assert check.acknowledge([2]) == [] and check.recorder.failed == 1
    assert "w2 (8 x 12)" in caplog.text and "from now on" in caplog.text
    close(settled(math.nan), right, rtol=0, atol=1e-5)
    assert check.acknowledge([]) == [] and (check.recorder.redone, check.recorder.failed) == (1, 1)
    directions[2] = math.inf
    assert not settled(1.0)[2].any()
    assert check.acknowledge([2]) == ["w2"] and check.recorder.failed == 2, "wrong in fp32 too"
    # Another rank's slice of the same stack as w1 was wrong: w1 runs in fp32, and no log calls it wrong.
    assert check.acknowledge([1]) == []
    settled(1.0)
    assert "w1" not in caplog.text


@pytest.mark.parametrize("mode", ["skip", "error"])
def test_on_an_accelerator_a_matrix_that_stays_wrong_is_logged_in_the_next_step(
    mode: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out in the first step, wrong in fp32 in the second, which the third one tells."""
    monkeypatch.setattr(step_runner, "ResultCheck", DeferredCheck)
    weight = nn.Parameter(torch.zeros(12, 20))
    settings: Any = {"wire_dtype": "fp16", "nonfinite_grad": mode, "weight_decay": 0.5}
    optimizer = Muon([("layer.weight", weight)], muon_lr=1.0, **settings)
    optimizer._bind_to_parameters()
    weight.data.fill_(1.0)
    for _ in range(2):
        weight.grad = torch.full((12, 20), 1e6)
        optimizer.step()
    assert caplog.text.count("layer.weight (12 x 20) was wrong in") == 1
    assert bool((weight == 0.25).all()), "only the decay"
    weight.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(10))
    expectation = pytest.raises(
        deepspeed_muon.NumericalError, match=r"layer\.weight were wrong in the step before"
    )
    with expectation if mode == "error" else contextlib.nullcontext():
        optimizer.step()
    assert bool((weight == 0.25).all()) == (mode == "error")
    assert optimizer.health()["failed"] == 2


def test_samples_take_turns() -> None:
    recorder = StepRecorder(every=3, check=True)
    recorder.matrices = 2
    recorder.reset(torch.device("cpu"))
    assert recorder.reserve(5) == 0 and recorder.reserve(2) == 5
    seen: list[int] = []
    for number in range(1, 25):
        with recorder.step(number) as sample:
            watched = [index for index in range(7) if recorder.watches(index)]
        assert (sample is not None) == recorder.due(number) == (number % 3 == 0)
        assert len(watched) == (2 if number % 3 == 0 else 0)
        seen += watched
    assert set(seen) == set(range(7))


def test_plain_optimizer_reports() -> None:
    model = build("toy")
    optimizer = Muon(model, health=2, ns_dtype="fp32")
    optimizer.recorder.matrices = 100
    assert optimizer.health() == {"redone": 0, "failed": 0, "matrices": {}}
    train_alone(model, optimizer, 3)
    report = optimizer.health()
    assert report["step"] == 2 and len(report["matrices"]) == 8
    assert 0 < report["time_newton_schulz"] < 1 and report["seconds"] > 0
    assert 0 < report["alignment"] <= 1.0001 and 1 <= report["stable_rank"] <= 16


def test_sampling_changes_no_weight() -> None:
    models = [build("toy") for _ in range(2)]
    for model, health in zip(models, (1, False), strict=True):
        train_alone(model, Muon(model, health=health), 2)
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first, second)


def summary_of(rank: int, world_size: int) -> dict[str, object]:
    eye = torch.eye(4).unsqueeze(0)
    health = combine([measure(eye, eye, scale=1.0, band=band_of(QUINTIC))])
    timed = {"step": 4.0, "sampling": 2.0, "gather": 0.5, "newton_schulz": 1.0}
    samples = [
        Sample({"a": health}, timed, 1, 0),
        Sample(redone=2, failed=3),
        Sample({"a": health} | {f"b{n}": health for n in range(20)}, timed),
    ]
    return summarize(samples[rank], all_ranks())


def test_summary_over_ranks(ranks: Any) -> None:
    summary, *rest = ranks(3).run(summary_of)
    assert rest == [summary, summary]
    assert (summary["redone"], summary["failed"]) == (3, 3)
    times = {"time_gather": 0.25, "time_newton_schulz": 0.5, "time_scatter": 0.0, "seconds": 2.0}
    assert summary.items() >= times.items()
    assert len(summary["matrices"]) == 16 and {"a", "a (rank 2)", "b0"} <= set(summary["matrices"])
    assert summary["stable_rank"] == pytest.approx(4.0) and summary["alignment"] == pytest.approx(1.0)
    assert ("Train/Muon/redone", 3.0, 77) in monitor_events({"step": 9, **summary}, 77)
    assert summarize(Sample(), Ranks()) == {"redone": 0, "failed": 0, "matrices": {}}


def run_with_norms(norms: list[float], *, every: int) -> StepRecorder:
    """Return a recorder after steps with these norms of the gradients, clipped to 1."""
    recorder = StepRecorder(every=every, check=True)
    for norm in norms:
        with recorder.step():
            recorder.record_clipping(torch.tensor(norm), 1.0)
    return recorder


def test_the_coefficient_is_the_median_since_the_last_sample() -> None:
    recorder = run_with_norms([100.0] * 10 + [0.5] * 4 + [2.0] * 6, every=10)
    assert recorder.summary()["clip_coefficient"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("norms", "every", "warns"),
    [
        ([1e8] * 20, 20, True),
        ([1.0] * 130 + [1e8] * 25 + [1.0] * 45, 100, True),  # not half of the steps
        ([1.0] * 81 + [1e8] * 20 + [1.0] * 99, 100, True),  # 19 of them before a sample
        ([1.0] * 81 + [1e8] * 19 + [1.0] + [1e8] * 19, 20, False),
        ([1.0] * 980 + [1e8] * 20, 1000, True),
        ([1e8] * 10 + [1.0] * 990 + [1e8] * 10 + [1.0] * 1980, 10, False),
        # Ten before a sample and ten behind it, with ten good ones in between that are dropped.
        ([1.0] * 1000 + [1e8] * 10 + [1.0] * 10 + [1e8] * 10 + [1.0] * 990, 1010, False),
    ],
)
def test_twenty_steps_clipped_to_nothing_are_warned_of_once(
    norms: list[float], every: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run_with_norms(norms + norms, every=every)
    assert caplog.text.count("gradients were clipped to less than 0.0001") == warns


def test_one_replica_logs_the_numbers_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under torch's DDP, without an engine, every rank logged the line and the warning."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for rank in (1, 0):
        monkeypatch.setattr("torch.distributed.get_rank", lambda *_, rank=rank: rank)
        run_with_norms([1e9] * 300, every=50)
        line = "after 200 steps: redone 0, failed 0, clip_coefficient 1e-09 ("
        assert caplog.text.count("were clipped") == capsys.readouterr().err.count(line) == 1 - rank


def test_a_weight_without_a_gradient_is_named_after_200_steps(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.ModuleDict({"hidden": nn.Linear(4, 4), "unused": nn.Linear(4, 4), "late": nn.Linear(4, 4)})
    optimizer = Muon(model, lr=0.01, health=10)
    for step in range(210):
        x = model["hidden"](torch.ones(2, 4))
        (model["late"](x) if step == 150 else x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert capsys.readouterr().err.count("no step had a gradient for unused.weight, unused.bias\n") == 1
