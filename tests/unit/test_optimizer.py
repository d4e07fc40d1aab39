"""The optimizer without DeepSpeed: an ordinary torch optimizer."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import re
from decimal import Decimal
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import lr_scheduler
from torch.testing._internal.two_tensor import TwoTensor

import deepspeed_muon
from deepspeed_muon import Muon, MuonError
from deepspeed_muon.reference import ReferenceMuon
from deepspeed_muon.variants import VARIANTS
from tests.support.contract import backward, compare_paths, train_reference
from tests.support.kernels import forced_dtype
from tests.support.models import MATRICES, batch, build, train_alone
from tests.support.oracle import Oracle, matrices_of
from tests.support.rounding import limits
from tests.support.thinning import each_value

SETTINGS = {"muon_lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.1, "eps": 1e-8, "ns_dtype": forced_dtype()}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("rule", "nesterov"),
    each_value(product(("original", "match_rms_adamw", "unit_rms_norm"), (True, False))),
)
def test_matches_the_reference(rule: str, nesterov: bool) -> None:
    ours = build("toy")
    optimizer = Muon(ours, nesterov=nesterov, adjust_lr_fn=rule, **SETTINGS)  # type: ignore[arg-type]
    for step in range(5):
        backward(ours, step, 1)
        optimizer.step()
    start, end, _ = reference(nesterov, rule)
    params = {name: param.detach() for name, param in ours.named_parameters()}
    compare_paths(params, start, end, limits(reference, nesterov, rule))


@functools.lru_cache
def reference(nesterov: bool, rule: str) -> tuple[Any, Any, list[float]]:
    oracle = Oracle(matrices_of(MATRICES["toy"]), nesterov=nesterov, adjust_lr_fn=rule)
    return train_reference(build("toy"), oracle, 1, 5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_does_not_change_a_step(autocast: torch.dtype, ns_dtype: Any, variant: Any) -> None:
    """Autocast chose the dtype of the products: fp32 became bf16, and fp16 became bf16 or the other way round."""
    weights, grads = torch.randn(2, 96, 160, generator=torch.Generator().manual_seed(0)).unbind()

    def step(context: contextlib.AbstractContextManager[Any]) -> torch.Tensor:
        param = nn.Parameter(weights.clone())
        settings: dict[str, Any] = {"include": ["*"], "ns_dtype": ns_dtype, "variant": variant}
        optimizer = Muon([("matrix", param)], lr=0.1, ns_backend="torch", **settings)
        param.grad = grads.clone()
        with context:
            optimizer.step()
        return param.detach() - weights

    update = step(torch.autocast("cpu", autocast))
    assert torch.equal(update, step(contextlib.nullcontext()))
    reference, exact = ReferenceMuon(matrices_of(["matrix"]), muon_lr=0.1, variant=variant), weights.double()
    reference.step({"matrix": exact}, {"matrix": grads.double()})
    error = float((update - (exact - weights)).norm() / (exact - weights).norm())
    assert error < {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}[ns_dtype]


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_of_a_step_were_prepared_when_the_optimizer_was_bound(variant: Any) -> None:
    """MuonEq iterates on fp32, whatever is sent: its kernels were chosen, and would have been captured, in a step."""
    params = [nn.Parameter(torch.randn(shape)) for shape in ((24, 40), (24, 40), (40, 24))]
    optimizer = Muon(
        [(str(number), param) for number, param in enumerate(params)],
        lr=0.1,
        include=["*"],
        variant=variant,
        wire_dtype="bf16",
        ns_backend="torch",
    )
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    # Variants that look at rows do not join a transpose.
    assert [entry["calls"] for entry in optimizer.kernel_report()] == [1] * (
        2 if VARIANTS[variant].transpose_changes_update else 1
    )


def test_missing_gradients_and_nonfinite_ones(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = Muon(model, lr=0.1, weight_decay=0.5)
    before = model[1].weight.detach().clone()
    model[0].weight.grad = torch.ones(4, 4)
    optimizer.step()
    assert torch.equal(model[1].weight, before), "no gradient: not even weight decay"
    before = model[0].weight.detach().clone()
    model[0].weight.grad = torch.full((4, 4), math.nan)
    with caplog.at_level(logging.WARNING):
        optimizer.step()
    assert torch.equal(model[0].weight, before) and optimizer.skipped_steps == 1
    assert "non-finite gradient in 1 parameters (0.weight)" in caplog.text
    strict = Muon(model, lr=0.1, nonfinite_grad="error")
    with pytest.raises(deepspeed_muon.NumericalError, match=r"0\.weight"):
        strict.step()


def test_one_negative_element_counts() -> None:
    """Among zeros it is a gradient, and if it is infinite the step is skipped."""
    layer = nn.Linear(4, 4, bias=False)
    optimizer = Muon(layer, lr=0.1)
    for value, skipped in ((-1.0, 0), (-math.inf, 1)):
        before = layer.weight.detach().clone()
        layer.weight.grad = torch.zeros(4, 4)
        layer.weight.grad[1, 2] = value
        optimizer.step()
        assert torch.equal(layer.weight, before) == bool(skipped) and optimizer.skipped_steps == skipped


def test_grad_scaler() -> None:
    """Torch's GradScaler hands over its scale; the update is that of the unscaled gradient."""
    plain, scaled = build("toy"), build("toy")
    first, second = (Muon(m, **SETTINGS) for m in (plain, scaled))  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain(*batch(0, 0)).backward()
    first.step()
    scaler.scale(scaled(*batch(0, 0))).backward()
    scaler.step(second)
    scaler.update()
    for (name, a), (_, b) in zip(plain.named_parameters(), scaled.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    scaler.scale(scaled(*batch(1, 0)) * math.inf).backward()
    strict = Muon(scaled, nonfinite_grad="error")
    scaler.step(strict)
    scaler.update()
    assert strict.skipped_steps == 1 and scaler.get_scale() == 512.0


def test_grad_scaler_divides_half_precision_gradients_in_fp32() -> None:
    """In fp16 a gradient of 2^-26 is zero."""
    layer = nn.Linear(4, 4, bias=False).half()
    optimizer = Muon(layer, lr=0.02, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    scaler.scale(torch.zeros(()))
    layer.weight.grad = torch.ones(4, 4, dtype=torch.float16)
    scaler.step(optimizer)
    assert torch.equal(optimizer.state[layer.weight]["momentum_buffer"], torch.full((4, 4), 2.0**-27))


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (nn.Module.parameters, "routed by shape alone"),
        (nn.Module.named_parameters, "routed by name and shape alone"),
        (lambda model: model, ""),
    ],
)
def test_missing_facts_of_parameters_are_said(
    caplog: pytest.LogCaptureFixture, params: Any, said: str
) -> None:
    """It is said in the first step: an engine has the model."""
    model = build("toy")
    optimizer = Muon(params(model), lr=0.02)
    assert "routed by" not in caplog.text
    train_alone(model, optimizer, 1)
    assert said in caplog.text and ("routed by" in caplog.text) == bool(said)


def thaw(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer) -> None:
    """Train, and unfreeze the blocks after the first step."""
    for step in range(steps):
        train_alone(model, optimizer, 1, first=step)
        model.requires_grad_(True)


@pytest.mark.parametrize(
    "settings", [{}, {"variant": "normuon"}, {"momentum_dtype": "int8"}], ids=["muon", "normuon", "int8"]
)
def test_a_parameter_unfrozen_later_trains(settings: dict[str, Any]) -> None:
    """It begins with a momentum of zero; the others go on as if nothing had happened.

    The same as with an optimizer for what was frozen, made when it is unfrozen, beside one for the rest.
    """
    model, twin = build("toy"), build("toy")
    model.blocks[0].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Muon(model, lr=0.02, **settings)
    thaw(model, 1, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) == name.startswith("blocks.0."), name
    thaw(model, 2, optimizer)
    early = [p for name, p in twin.named_parameters() if not name.startswith("blocks.0.")]
    first = Muon(early, model=twin, lr=0.02, **settings)
    second = Muon(twin.blocks[0].parameters(), model=twin, lr=0.02, **settings)
    for number, step in enumerate((0, 0, 1)):
        backward(twin, step, 1)
        first.step()
        if number > 0:
            second.step()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert not torch.equal(ours, before[name]), name
        torch.testing.assert_close(ours, theirs, msg=name)


def test_all_frozen_is_an_error_in_the_first_step() -> None:
    """As with torch.optim, it may be unfrozen until then."""
    model = build("toy").requires_grad_(False)
    optimizer = Muon(model)
    with pytest.raises(deepspeed_muon.RoutingError, match=r"none of the \d+ parameters is trainable"):
        optimizer.step()
    train_alone(model.requires_grad_(True), optimizer, 1)


def test_a_copy_has_the_frozen_parameters() -> None:
    model = build("toy")
    model.blocks[0].requires_grad_(False)
    model, optimizer = copy.deepcopy((model, Muon(model, lr=0.02)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    thaw(model, 2, optimizer)
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_replaced_parameter_is_an_error() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = Muon(model)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(16))]
    with pytest.raises(deepspeed_muon.BindingError, match="register"):
        optimizer.step()


def test_a_compiled_loop_runs_the_step_outside_of_its_graph() -> None:
    """Dynamo failed inside of the step with an internal error."""
    weights = []
    for compile_ in (lambda function: function, functools.partial(torch.compile, backend="eager")):
        model = build("toy")
        optimizer = Muon(model, **SETTINGS)  # type: ignore[arg-type]
        train, step = compile_(train_alone), compile_(optimizer.step)
        train(model, optimizer, 2)
        model(*batch(2, 0)).backward()
        step()
        weights.append([param.detach().clone() for param in model.parameters()])
    torch._dynamo.reset()
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("where", [FakeTensorMode(), torch.device("meta")], ids=["FakeTensorMode", "meta"])
def test_tensors_without_data_are_refused(where: contextlib.AbstractContextManager[None]) -> None:
    with where:
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        optimizer = Muon(model, **SETTINGS)  # type: ignore[arg-type]
        model(torch.ones(2, 8)).sum().backward()
        with pytest.raises(
            deepspeed_muon.BindingError, match=r"have no data .* call step\(\) with real tensors"
        ):
            optimizer.step()


# Complex parameters ended in ``NotImplementedError`` inside ``step()``; some with and some without names passed.


ZEROS = torch.zeros(4, 4)


def weight(values: torch.Tensor = ZEROS) -> nn.Parameter:
    return nn.Parameter(values)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ([("freqs", weight(ZEROS.cfloat()))], TypeError, r"freqs of shape \[4, 4\] is complex .*view_as"),
    ([("w.weight", weight()), ("bias", weight(ZEROS[0].cdouble()))], TypeError, "bias of shape"),
    ([weight(ZEROS[0].cfloat())], TypeError, "<unnamed 4> of shape"),
    ([("w", weight(ZEROS.to(torch.float8_e4m3fn)))], TypeError, "torch.float8_e4m3fn, and only float32"),
    ([("w", weight(TwoTensor(ZEROS, ZEROS)))], TypeError, "is a TwoTensor, whose elements"),
    ([("w", weight(ZEROS[:1].expand(4, 4)))], ValueError, "w of shape .* is expanded"),
    ([nn.LazyLinear(3).weight], ValueError, "has no shape yet"),
    ([("w", weight(ZEROS.to_sparse()))], TypeError, "layout torch.sparse_coo"),
    ([("w", weight() * 2)], ValueError, "w of shape .* is computed from other tensors"),
    ([("w", torch.zeros(2, 2, dtype=torch.uint8))], ValueError, "none of the 1 parameters is trainable"),
    (weight(), TypeError, "params is a Parameter, expected"),
    (5, TypeError, "params is a int"),
    ([{"params": 5}], TypeError, "the params of param group 0 are a int"),
    (["w"], TypeError, "entry 0 of param group 0 is a str"),
    ([{"params": {weight(), weight()}}], TypeError, "are a set"),
    ([], ValueError, "empty list"),
    ([{"lr": 1}], ValueError, "no 'params'"),
    ([weight(), {"params": []}], ValueError, "mixes"),
    ([("w", weight()), weight()], ValueError, "entry 1 of param group 0 has none"),
    ([{"params": [weight()]}, {"params": [("w", weight())]}], ValueError, "group 1 has a name, entry"),
    ([{"params": [weight()], "param_names": ["a", "b"]}], ValueError, "2 param_names for 1"),
]


@pytest.mark.parametrize(("params", "also", "said"), REFUSED, ids=[case[2][:30] for case in REFUSED])
def test_refused_when_the_optimizer_is_made(params: Any, also: type[Exception], said: str) -> None:
    """The error is ours, and of the kind that a caller of ``torch.optim`` expects."""
    with pytest.raises(MuonError, match=said) as caught:
        Muon(params, lr=0.1)
    assert isinstance(caught.value, also)


@pytest.mark.parametrize("momentum_dtype", [None, "bf16", "int8"])
def test_a_model_that_is_converted_between_steps(momentum_dtype: str | None) -> None:
    """To float64 the step failed in a kernel that was chosen for float32."""
    model = build("toy")
    optimizer = Muon(model, momentum_dtype=momentum_dtype, **SETTINGS)  # type: ignore[arg-type]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
        before = {name: param.detach().clone().double() for name, param in model.named_parameters()}
        for seed, param in enumerate(model.parameters()):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        optimizer.step()
        widened = torch.promote_types(dtype, torch.float32)
        momentum = {None: widened, "bf16": torch.bfloat16, "int8": torch.int8}[momentum_dtype]
        for name, param in model.named_parameters():
            state = optimizer.state[param]
            assert param.dtype == dtype
            if name in MATRICES["toy"]:
                assert state["momentum_buffer"].dtype == momentum
                # Gradients are the same in every step; the singular values of their orthogonal factor lie between 0.68
                # and 1.2. Weights below 1 in bf16 are rounded by up to 0.002: a tenth of an update.
                scale = 0.02 * math.sqrt(max(1, param.shape[0] / param.shape[1]))
                update = (before[name] * (1 - 0.02 * 0.1) - param.detach().double()) / scale
                assert 0.5 < float(torch.linalg.matrix_norm(update, 2)) < 1.5, (name, dtype)
            else:
                assert state["exp_avg"].dtype == widened
    assert {state["step"] for state in optimizer.state.values()} == {4}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("change", [lambda weight: weight.T.contiguous(), lambda weight: weight[:8]])
def test_a_matrix_of_another_shape_is_refused(change: Any, steps: int) -> None:
    """A transpose was updated as the matrix that it had been; pruned matrices and FSDP's shards were a ValueError."""
    layer = nn.Linear(16, 24)
    optimizer = Muon(layer, muon_lr=0.02, adam_lr=1e-3)
    for _ in range(steps):
        layer(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    layer.weight.data = change(layer.weight.data)
    layer.weight.grad = torch.ones_like(layer.weight)
    before = layer.weight.detach().clone()
    with pytest.raises(deepspeed_muon.BindingError, match=r"parameter weight was \[24, 16\] when"):
        optimizer.step()
    assert torch.equal(layer.weight, before)


HALVES = {"muon_lr": 0.02, "adam_lr": 3e-4}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    "write",
    [
        lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=10),
        lambda o: lr_scheduler.CyclicLR(o, 0.002, 0.02),
        lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=2),
        lambda o: [group.update(lr=0.001) for group in o.param_groups],
        lambda o: [group.update(lr=torch.tensor(0.001)) for group in o.param_groups],
    ],
    ids=["OneCycleLR", "CyclicLR", "SWALR", "a loop", "a tensor"],
)
def test_one_rate_for_both_halves_is_a_warning(
    write: Any, before: int, caplog: pytest.LogCaptureFixture
) -> None:
    """AdamW's half trained at Muon's rate, 67 times its own, in silence; later only the first step was looked at."""
    model = build("toy")
    optimizer = Muon(model, **HALVES)
    train_alone(model, optimizer, before)
    assert "with one rate" not in caplog.text
    schedule = write(optimizer)
    for _ in range(4):
        train_alone(model, optimizer, 1)
        if isinstance(schedule, lr_scheduler.LRScheduler):
            schedule.step()
    assert caplog.text.count("with one rate, 0.0") == 1
    assert "max_lr=[g['lr'] for g in optimizer.param_groups]" in caplog.text


def test_a_loop_over_the_callers_groups_is_a_warning_too(caplog: pytest.LogCaptureFixture) -> None:
    """The rates of two groups differ, and both halves of each have one."""
    model = build("toy")
    named = list(model.named_parameters())
    optimizer = Muon([{"params": named[::2]}, {"params": named[1::2]}], model=model, **HALVES)
    for group in optimizer.param_groups:
        group["lr"] = 5e-4 * (1 + group["caller_group"])
    train_alone(model, optimizer, 1)
    assert "param group 0 with one rate, 0.0005, and" in caplog.text


@pytest.mark.parametrize("rates", [HALVES, {"lr": 0.02}], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.OneCycleLR(o, [g["lr"] for g in o.param_groups], total_steps=10),
        lambda o: lr_scheduler.LambdaLR(o, lambda n: n / 10),  # 0 at first
        lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 - n / 10),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=2, eta_min=1e-5),  # both end there
    ],
    ids=["OneCycleLR", "rising", "falling", "a floor"],
)
def test_schedules_that_keep_the_ratio_are_none(
    make: Any, rates: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    model = build("toy")
    optimizer = Muon(model, **rates)
    schedule = make(optimizer)
    for _ in range(3):
        train_alone(model, optimizer, 1)
        schedule.step()
    assert "with one rate" not in caplog.text


BOTH = "lr 0.0003 trains the matrices and all other parameters"


@pytest.mark.parametrize(
    ("groups", "settings", "warning"),
    [
        ([], {"muon_lr": 0.02}, "what AdamW trains has its default, 0.0003: set adam_lr"),
        ([], {"adam_lr": 1e-3}, "what Muon trains has its default, 0.02: set muon_lr"),
        ([], {"lr": 0.02}, "lr 0.02 trains .* under adjust_lr_fn 'original' .* one rate does not serve both"),
        ([], {"lr": 1e-3, "adjust_lr_fn": "unit_rms_norm"}, "one rate does not serve both"),
        ([], {"lr": 1e-3, "adjust_lr_fn": "spectral"}, "set adjust_lr_fn to 'match_rms_adamw'; else set"),
        ([], {"lr": 1e-3, "adjust_lr_fn": "spectral", "update_scale": 0.2}, None),
        ([], {"lr": 0.02, "adam_lr": 0.02}, None),
        ([], {}, None),
        # One lr for both halves is the same in a group as in the settings, whose rates it overrides.
        ([{"lr": 3e-4}], {}, BOTH),
        ([{"lr": 3e-4}], {"muon_lr": 0.02, "adam_lr": 1e-3}, BOTH),
        ([{"lr": 3e-4}, {"lr": 3e-4}], {"muon_lr": 0.02, "adam_lr": 1e-3}, BOTH),
        ([{"muon_lr": 0.02}], {}, "muon_lr is set alone"),
        ([{"adam_lr": 1e-3}], {}, "adam_lr is set alone"),
        ([{"adam_lr": 1e-3}], {"muon_lr": 0.02}, None),
        ([{"muon_lr": 0.02, "adam_lr": 3e-4}], {"adam_lr": 1e-3}, None),
    ],
    ids=str,
)
def test_rates_that_nobody_chose_are_a_warning(
    groups: list[Any], settings: dict[str, Any], warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("toy")
    named = list(model.named_parameters())
    dealt = [{"params": named[n :: len(groups)], **group} for n, group in enumerate(groups)]
    Muon(dealt or model, **settings)
    assert bool(caplog.records) == (warning is not None)
    assert re.search(warning or "", caplog.text)


def test_one_rate_for_muon_alone_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    Muon([("layers.0.weight", nn.Parameter(torch.ones(4, 4)))], lr=0.02)
    assert not caplog.records


@pytest.mark.parametrize("setting", [{"restore_from": "/a/set"}, {"consolidate_on_save": True}])
def test_checkpoints_of_an_engine_need_one(setting: dict[str, Any]) -> None:
    """Without DeepSpeed both were ignored, and a run that was to go on began anew."""
    layer = nn.Linear(4, 4)
    layer(torch.ones(2, 4)).sum().backward()
    with pytest.raises(deepspeed_muon.ConfigError, match="only with DeepSpeed"):
        Muon(layer, **setting).step()


@pytest.mark.parametrize("momentum_dtype", [None, "int8"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64, "meta"], ids=str)
def test_torchs_defaults_change_nothing(default: torch.dtype | str, momentum_dtype: str | None) -> None:
    """AdamW's count of steps was a number of the default dtype: in bf16 it is wrong from step 257 on."""
    results = []
    for changes in (False, True):
        model = build("toy")
        optimizer = Muon(model, momentum_dtype=momentum_dtype, health=1, **SETTINGS)  # type: ignore[arg-type]
        backward(model, 0, 1)
        try:
            if changes and isinstance(default, str):
                torch.set_default_device(default)
            elif changes:
                torch.set_default_dtype(default)
            for step in range(3):
                optimizer.step()
                for state in optimizer.state.values():
                    state["step"] += 300 * (step == 0)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        results.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("lr", value) for value in (math.nan, math.inf, "0.1", Decimal("0.1"), True, None, torch.ones(2))),
        ("weight_decay", math.nan),
        ("weight_decay", torch.ones(2)),
        ("momentum", 1.5),
        ("adjust_lr_fn", "spectrum"),
    ],
    ids=str,
)
def test_a_setting_that_no_load_takes_is_refused_in_the_step(key: str, value: Any) -> None:
    model = build("toy")
    optimizer = Muon(model, **SETTINGS)  # type: ignore[arg-type]
    for step in range(2):
        backward(model, step, 1)
        before = copy.deepcopy(model.state_dict())
        if step == 0:
            optimizer.step()
        else:
            optimizer.param_groups[0][key] = value
            with pytest.raises(deepspeed_muon.ConfigError, match=rf"param group 0\.{key}"):
                optimizer.step()
            assert all(torch.equal(before[name], param) for name, param in model.state_dict().items())


@pytest.mark.parametrize("rate", [-1e-9, np.array(0.01), torch.tensor(0.01), np.float32(0.01), 1], ids=str)
def test_a_rate_that_is_used_can_be_loaded(rate: Any) -> None:
    """A linear schedule ends below 0 one step past its end; as AdamW does, the step takes it, and so does a load."""
    optimizer = Muon(build("toy"), **SETTINGS)  # type: ignore[arg-type]
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    again = Muon(build("toy"), **SETTINGS)  # type: ignore[arg-type]
    again.load_state_dict(optimizer.state_dict())
    assert [float(group["lr"]) for group in again.param_groups] == [float(rate)] * len(again.param_groups)
