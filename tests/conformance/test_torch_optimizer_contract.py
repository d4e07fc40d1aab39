"""What programs may expect of any ``torch.optim.Optimizer``: inputs, state dicts, hooks, closures, gradients."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_muon
from deepspeed_muon import BindingError, ConfigError, Muon, MuonError, RoutingError
from tests.support import training
from tests.support.comparisons import within
from tests.support.models import build, train_alone

# Every input of torch's own table for Muon and AdamW (torch.testing._internal.common_optimizers, CPU), in our words;
# a text is what the refusal says.
INPUTS: dict[str, dict[str, Any] | tuple[dict[str, Any], str]] = {
    "default": {},
    "non-default lr": {"lr": 0.01},
    "Tensor lr": {"lr": torch.tensor(0.001)},
    "non-default weight_decay": {"weight_decay": 0.2},
    "nonzero weight_decay": {"weight_decay": 0.1},
    "non-default momentum": {"momentum": 0.8},
    "passing alternative ns_steps": {"ns_steps": 6},
    "passing alternative ns_coefficients": {"ns_schedule": [(3.4, -4.7, 2.0)] * 5},
    "maximize": ({"weight_decay": 0.1, "maximize": True}, "negate the loss"),
    "amsgrad": ({"weight_decay": 0.1, "amsgrad": True}, "'amsgrad' is an option of torch's"),
    # Further arguments of torch's constructors.
    "ns_coefficients": ({"ns_coefficients": (3.4, -4.7, 2.0)}, r"write ns_schedule: \[\[a, b, c\], \.\.\.\]"),
    "foreach": ({"foreach": True}, "'foreach' is an option of torch's"),
    "fused": ({"fused": True}, "'fused' is an option of torch's"),
    "capturable": ({"capturable": True}, "'capturable' is an option of torch's"),
    "differentiable": ({"differentiable": True}, "'differentiable' is an option of torch's"),
    "negative lr": ({"lr": -1.0}, "lr: Input should be greater than or equal to 0"),
}


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).to(dtype)


def loss_of(net: nn.Module, step: int = 0) -> torch.Tensor:
    dtype = next(net.parameters()).dtype
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
    return net(x).square().mean()


def run(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("name", INPUTS)
def test_every_input_of_torchs_table(name: str) -> None:
    """It lowers the loss, or an error of ours, which is a ``ValueError`` as torch's is, says what to write instead."""
    entry = INPUTS[name]
    net = model()
    if isinstance(entry, tuple):
        with pytest.raises(ConfigError, match=entry[1]) as caught:
            Muon(net, **entry[0])
        assert isinstance(caught.value, ValueError)
        return
    before = float(loss_of(net).detach())
    run(net, Muon(net, **{"adam_lr": 1e-3, **entry}), steps=3)
    assert float(loss_of(net).detach()) < before


def test_state_dict_goes_through_a_file() -> None:
    """Loaded with ``weights_only``, at any step, before and after the first one."""
    for steps in (0, 2):
        net = model()
        optimizer = Muon(net, lr=0.02, variant="normuon")
        run(net, optimizer, steps)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        duplicate = copy.deepcopy(net)
        fresh = Muon(duplicate, lr=0.5, variant="normuon")
        fresh.load_state_dict(saved)
        run(net, optimizer, 2, steps)
        run(duplicate, fresh, 2, steps)
        assert equal(net, duplicate)
        assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_hooks_run_once_and_in_order() -> None:
    net = model()
    optimizer = Muon(net)
    seen: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before step")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after step")),
        optimizer.register_state_dict_pre_hook(lambda *_: seen.append("before state_dict")),
        optimizer.register_state_dict_post_hook(lambda o, state: seen.append("after state_dict")),
        optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append("before load")),
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append("after load")),
    ]
    run(net, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [
        "before step",
        "after step",
        "before state_dict",
        "after state_dict",
        "before load",
        "after load",
    ]
    for handle in handles:
        handle.remove()
    run(net, optimizer)
    assert len(seen) == 6


def test_closure() -> None:
    """It is called once, with gradients on, and its value comes back."""
    net, twin = model(), model()
    optimizer = Muon(net)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return loss

    returned = optimizer.step(closure)
    run(twin, Muon(twin))
    assert calls == [True] and torch.equal(returned, loss_of(model())) and equal(net, twin)
    assert Muon(model()).step() is None


def test_zero_grad() -> None:
    net = model()
    optimizer = Muon(net)
    loss_of(net).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(float(param.grad.abs().max()) == 0.0 for param in net.parameters())
    before = copy.deepcopy(net)
    optimizer.step()
    assert equal(net, before), "a zero gradient is none"
    optimizer.zero_grad()
    assert all(param.grad is None for param in net.parameters())
    optimizer.step()
    assert equal(net, before)


def test_gradients_that_torch_refuses_too() -> None:
    net = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    optimizer = Muon(net)
    net(torch.tensor([1, 2])).sum().backward()
    before = copy.deepcopy(net)
    with pytest.raises(BindingError, match="sparse"):
        optimizer.step()
    assert equal(net, before)


def test_groups_come_with_the_constructor() -> None:
    net = model()
    optimizer = Muon(net)
    with pytest.raises(RoutingError, match="make a new one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    with pytest.raises(MuonError):
        optimizer.add_param_group([nn.Parameter(torch.zeros(2, 2))])
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_parameters_of_several_dtypes(dtype: torch.dtype) -> None:
    """They stay in their dtype, and go where fp32 ones go, as far as their own rounding lets them."""
    net, exact = model(dtype), model(dtype).float()
    settings: dict[str, Any] = {
        "lr": 0.02,
        "adam_lr": 3e-3,
        "eps": 1e-8,
        "ns_dtype": "fp32",
        "wire_dtype": "fp32",
    }
    optimizers = Muon(net, **settings), Muon(exact, **settings)
    for step in range(3):
        loss_of(exact, step).backward()
        for param, source in zip(net.parameters(), exact.parameters(), strict=True):
            param.grad = source.grad.to(dtype)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Each of three steps rounds weight and gradient once: 2 * 3 halves of a unit, at weights below 1; the rest is the
    # direction's own change, for which as much is allowed again. fp64 meets fp32's 1e-5.
    bound = max(6 * torch.finfo(dtype).eps, 1e-5)
    for param, expected in zip(net.parameters(), exact.parameters(), strict=True):
        assert param.dtype == dtype
        within(float((param - expected).detach().double().abs().max()), bound, "weights")


# ``copy.deepcopy`` and ``pickle`` of a ``Muon`` ended in an ``AttributeError``: no attribute ``config``.

SETTINGS: dict[str, Any] = {"lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.1, "ns_dtype": "fp32"}


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_copy_goes_on_like_the_original(copied: Any, steps: int) -> None:
    """Before the first step and after some, the copy of model and optimizer takes the same next step."""
    model = build("toy")
    optimizer = Muon(model, variant="normuon", **SETTINGS)
    train_alone(model, optimizer, steps)
    optimizer.param_groups[0]["lr"] = 0.05
    duplicate, twin = copied((model, optimizer))
    assert isinstance(twin, Muon) and twin.config == optimizer.config and twin.routes == optimizer.routes
    assert not {id(p) for p in model.parameters()} & {id(p) for g in twin.param_groups for p in g["params"]}
    train_alone(model, optimizer, 2, first=steps)
    train_alone(duplicate, twin, 2, first=steps)
    assert equal(model, duplicate)


def test_with_qk_clip_the_copy_watches_the_copied_model() -> None:
    from tests.support.attention_models import MODELS

    torch.manual_seed(0)
    model = MODELS["grouped"]()
    optimizer = Muon(model, qk_clip={"threshold": 2.0}, **SETTINGS)
    train_alone(model, optimizer, 1)
    duplicate, twin = copy.deepcopy((model, optimizer))
    train_alone(model, optimizer, 1, first=1)
    train_alone(duplicate, twin, 1, first=1)
    assert (
        twin.after_step is not optimizer.after_step and twin.after_step.report == optimizer.after_step.report
    )
    assert twin.after_step.report.clipped > 0
    assert equal(model, duplicate)


def managed(rank: int, world_size: int) -> str:
    """Copy the optimizer of an engine."""
    optimizer = deepspeed_muon.muon_optimizer(training.make_engine(training.ds_config(2), "single"))
    return training.refusal(lambda: copy.deepcopy(optimizer), BindingError)


def test_a_managed_one_says_why_not(ranks: Any) -> None:
    assert all("engine.save_checkpoint" in said for said in ranks(2).run(managed))
