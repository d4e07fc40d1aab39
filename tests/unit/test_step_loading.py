"""State dicts of this optimizer and of others: continued, or refused as a whole with what to do."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_muon import CheckpointError, ConfigError, Muon, MuonError, RoutingError

TORCH_MUON = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9"
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def matrices(net: nn.Sequential) -> list[nn.Parameter]:
    return [net[0].weight, net[2].weight]


def vectors(net: nn.Sequential) -> list[nn.Parameter]:
    return [net[0].bias, net[2].bias]


def steps(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, numbers: range) -> list[torch.Tensor]:
    """Step with gradients that depend on nothing but the number of the step, and return what changed."""
    before = [param.detach().clone() for param in params]
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return [param.detach() - start for param, start in zip(params, before, strict=True)]


def muon_of(net: nn.Sequential, **settings: Any) -> Muon:
    """Return an optimizer with a group of matrices, which any Muon could have."""
    return Muon([{"params": matrices(net), "algorithm": "muon"}], **{"lr": 0.02, **settings})


def snapshot(optimizer: Muon) -> Any:
    return copy.deepcopy(
        (optimizer.state_dict(), [dict(group, params=0) for group in optimizer.param_groups])
    )


def same(one: Any, second: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, second)
    if isinstance(one, dict):
        return one.keys() == second.keys() and all(same(value, second[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(second) and all(map(same, one, second))
    return bool(one == second)


def keller(momentum: list[torch.Tensor], **more: Any) -> dict[str, Any]:
    """Return a state dict as Keller Jordan's Muon saves it."""
    group = {"params": [*range(len(momentum))], "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, **more}
    return {"param_groups": [group], "state": {n: {"momentum_buffer": m} for n, m in enumerate(momentum)}}


@TORCH_MUON
def test_torchs_muon_goes_on() -> None:
    """The next updates are those of a run that was ours from the beginning, and the settings are torch's."""
    theirs, ours, uninterrupted = model(), model(), model()
    saver = torch.optim.Muon(matrices(theirs), lr=0.05, weight_decay=0.0, momentum=0.9)
    steps(matrices(theirs), saver, range(3))
    loader, uncut = muon_of(ours), muon_of(uninterrupted, lr=0.05, momentum=0.9)
    saved = saver.state_dict()
    before = copy.deepcopy(saved)
    loader.load_state_dict(saved)
    assert same(saved, before), "loading changes nothing that was saved"
    (group,) = loader.param_groups
    assert (group["lr"], group["momentum"], group["adjust_lr_fn"]) == (0.05, 0.9, "original")
    assert group["eps"] == 1e-10 and "ns_steps" not in group
    steps(matrices(uninterrupted), uncut, range(3))
    expected, actual = (
        steps(matrices(uninterrupted), uncut, range(3, 5)),
        steps(matrices(ours), loader, range(3, 5)),
    )
    # The same fp32 mean by lerp and by ours: an ulp or two, which five steps of the iteration multiply by up to
    # 3.4445 ** 5 for the smallest singular values.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@TORCH_MUON
def test_torchs_muon_with_another_iteration_is_refused() -> None:
    net = model()
    saver = torch.optim.Muon(matrices(net), ns_steps=4)
    steps(matrices(net), saver, range(1))
    with pytest.raises(ConfigError, match=r"make it with ns_schedule=\[\[3.4445, -4.775, 2.0315\]\] \* 4"):
        muon_of(model()).load_state_dict(saver.state_dict())
    muon_of(model(), ns_steps=4).load_state_dict(saver.state_dict())


def test_keller_jordans_muon_goes_on() -> None:
    uninterrupted, ours = model(), model()
    uncut, loader = muon_of(uninterrupted), muon_of(ours, lr=0.5)
    steps(matrices(uninterrupted), uncut, range(3))
    loader.load_state_dict(
        keller([uncut.state[param]["momentum_buffer"].clone() for param in matrices(uninterrupted)])
    )
    expected = steps(matrices(uninterrupted), uncut, range(3, 5))
    actual = steps(matrices(ours), loader, range(3, 5))
    # The weights differ, so the sum rounds differently: one ulp of weights below 0.5.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)
    assert [state["step"] for state in loader.state.values()] == [2, 2]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_adamws_group_goes_on(kind: type[torch.optim.Optimizer]) -> None:
    theirs, ours = model(), model()
    saver = kind(vectors(theirs), lr=3e-3, betas=(0.8, 0.9), weight_decay=0.1, fused=True)  # type: ignore[call-arg]
    steps(vectors(theirs), saver, range(2))
    loader = Muon(
        [{"params": vectors(ours), "algorithm": "adamw"}], lr=1.0, adam_w_mode=kind is torch.optim.AdamW
    )
    loader.load_state_dict(copy.deepcopy(saver.state_dict()))
    (group,) = loader.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (3e-3, (0.8, 0.9), 1e-8) and "amsgrad" not in group
    for param, source in zip(vectors(ours), vectors(theirs), strict=True):
        param.data.copy_(source)
    expected, actual = steps(vectors(theirs), saver, range(2, 4)), steps(vectors(ours), loader, range(2, 4))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-8)  # the same formula, fused and not
    assert loader.state[vectors(ours)[0]]["step"] == 4
    if kind is torch.optim.Adam:
        with pytest.raises(ConfigError, match="make it with adam_w_mode=False"):
            Muon([{"params": vectors(ours), "algorithm": "adamw"}]).load_state_dict(saver.state_dict())


def test_missing_state_begins_anew() -> None:
    """Parameters without state, and settings that the saved group does not have."""
    net = model()
    optimizer = muon_of(net, nesterov=False, betas=(0.7, 0.8))
    saved = keller([torch.ones(8, 6)])
    saved["param_groups"][0] = {"params": [0, 1], "lr": 0.3, "momentum": 0.5}
    optimizer.load_state_dict(saved)
    loaded = {"lr": 0.3, "momentum": 0.5, "nesterov": False, "betas": (0.7, 0.8)}
    assert optimizer.param_groups[0].items() >= loaded.items()
    assert [*optimizer.state] == [net[0].weight]
    steps(matrices(net), optimizer, range(1))
    assert [optimizer.state[param]["step"] for param in matrices(net)] == [1, 1]


def both() -> Muon:
    net = model()
    groups = [{"params": matrices(net), "use_muon": True}, {"params": vectors(net), "use_muon": False}]
    optimizer = Muon(groups, muon_lr=0.02, adam_lr=3e-4)
    steps([*matrices(net), *vectors(net)], optimizer, range(2))
    return optimizer


def of_keller_with_adam() -> dict[str, Any]:
    """AdamW's group first, as Keller Jordan's MuonWithAuxAdam and DeepSpeed's have it."""
    moments = {n: {"exp_avg": torch.zeros(8), "exp_avg_sq": torch.ones(8), "step": 5} for n in (0, 1)}
    return {
        "param_groups": [
            {"params": [0, 1], "use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10},
            {"params": [2, 3], "use_muon": True, "lr": 0.02, "momentum": 0.95},
        ],
        "state": moments | {n: {"momentum_buffer": torch.zeros(8, 8)} for n in (2, 3)},
    }


def saved_by(kind: type[torch.optim.Optimizer], stepped: int, **settings: float) -> dict[str, Any]:
    """Return the state dict of another optimizer with the groups of :func:`both`."""
    net = model()
    optimizer = kind([{"params": matrices(net)}, {"params": vectors(net)}], **settings)  # type: ignore[call-arg]
    steps([*matrices(net), *vectors(net)], optimizer, range(stepped))
    return optimizer.state_dict()


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        saved = copy.deepcopy(both().state_dict())
        change(saved)
        return saved

    return make


def in_group(number: int, **values: Any) -> Callable[[], dict[str, Any]]:
    return edited(lambda saved: saved["param_groups"][number].update(values))


def in_state(number: int, **values: Any) -> Callable[[], dict[str, Any]]:
    return edited(lambda saved: saved["state"][number].update(values))


def without(number: int, key: str) -> Callable[[], dict[str, Any]]:
    return edited(lambda saved: saved["state"][number].pop(key))


CUT_OUT, INT8 = torch.ones(6, 8), torch.ones(8, 6, dtype=torch.int8)

REFUSED: list[tuple[Callable[[], Any], type[MuonError], str]] = [
    (of_keller_with_adam, RoutingError, "param group 0 .* is of adamw, and this optimizer's of muon"),
    (lambda: saved_by(torch.optim.AdamW, 1), RoutingError, "param group 0 .* is of adamw, and this"),
    (lambda: saved_by(torch.optim.AdamW, 0), RoutingError, "param group 0 .* is of adamw, and this"),
    (lambda: saved_by(torch.optim.SGD, 2, lr=0.1, momentum=0.9), CheckpointError, "SGD .* 1 - momentum"),
    (edited(lambda saved: saved["param_groups"].reverse()), RoutingError, "is of adamw, and this"),
    (in_group(0, use_muon=False), RoutingError, "param group 0 .* is of muon and adamw"),
    # Settings are checked as those of a configuration are.
    (in_group(0, lr=math.nan), ConfigError, r"param group 0 of the state dict\.lr: must be a number from"),
    (in_group(1, lr=None), ConfigError, r"lr: must be a number .* \(got None\)"),
    (in_group(0, lr=torch.ones(2)), ConfigError, "lr: must be a number"),
    (in_group(0, adjust_lr_fn=None), ConfigError, "adjust_lr_fn"),
    (in_group(1, betas=(0.9,)), ConfigError, r"betas\.1: Field required"),
    (in_group(0, weigth_decay=0.1), ConfigError, "unknown key 'weigth_decay'; did you mean 'weight_decay'"),
    (in_group(1, amsgrad=True), ConfigError, "'amsgrad' is an option of torch's"),
    (in_group(0, lr_ratio=-1), ConfigError, "lr_ratio: must be a number from 0 to inf"),
    (without(0, "momentum_buffer"), CheckpointError, "<unnamed 8x6>: its state has no 'momentum_buffer'"),
    (without(2, "step"), CheckpointError, "has no 'step', which adamw needs; remove its entry"),
    (without(3, "exp_avg_sq"), CheckpointError, "has no 'exp_avg_sq'"),
    (in_state(2, max_exp_avg_sq=torch.ones(8)), CheckpointError, "'max_exp_avg_sq', which is none of"),
    (in_state(0, exp_avg=torch.ones(8, 6)), CheckpointError, "has 'exp_avg', which is none of muon's"),
    (in_state(0, momentum_buffer=CUT_OUT), CheckpointError, r"shape \[6, 8\], and the parameter \[8, 6\]"),
    (in_state(0, momentum_buffer=None), CheckpointError, "'momentum_buffer' is None, expected a tensor"),
    (in_state(0, momentum_buffer=INT8), CheckpointError, "without 'momentum_scale'"),
    (in_state(0, momentum_buffer=torch.full((8, 6), math.nan)), CheckpointError, "an infinity or NaN"),
    (in_state(2, exp_avg=torch.full((8,), math.inf)), CheckpointError, "an infinity or NaN"),
    (in_state(2, step=math.nan), CheckpointError, "'step' is nan, expected a count"),
    (in_state(2, step=-1), CheckpointError, "'step' is -1, expected a count"),
    (in_state(0, momentum_scale=torch.ones(1)), CheckpointError, "with 'momentum_scale'"),
    (edited(lambda saved: saved.pop("state")), CheckpointError, "has 'state' and 'param_groups'"),
    (lambda: None, CheckpointError, "has 'state' and 'param_groups'"),
    (edited(lambda saved: saved["param_groups"].pop()), RoutingError, r"have \[2\] parameters, .*\[2, 2\]"),
    (edited(lambda saved: saved["param_groups"][0]["params"].pop()), RoutingError, r"have \[1, 2\] param"),
]


@pytest.mark.parametrize(("make", "kind", "said"), REFUSED, ids=[case[2][:40] for case in REFUSED])
def test_refused_entirely(make: Callable[[], Any], kind: type[MuonError], said: str) -> None:
    """With a typed error when it is loaded, and nothing of it is taken."""
    optimizer = both()
    before = snapshot(optimizer)
    with pytest.raises(kind, match=said):
        optimizer.load_state_dict(make())
    assert same(snapshot(optimizer), before)
    steps([param for group in optimizer.param_groups for param in group["params"]], optimizer, range(2, 3))


def test_a_sum_of_gradients_is_not_taken_for_a_mean() -> None:
    """Older Muons save a sum under the same key; their groups show it by what else they have."""
    saved = keller([torch.ones(8, 6), torch.ones(6, 8)], nesterov=True, ns_steps=5)
    with pytest.raises(CheckpointError, match=r"has nesterov, ns_steps, .* set 'algorithm' to 'muon'"):
        muon_of(model()).load_state_dict(saved)
    saved["param_groups"][0]["algorithm"] = "muon"
    del saved["param_groups"][0]["ns_steps"]
    muon_of(model()).load_state_dict(saved)


def test_errors_name_the_parameter() -> None:
    net = model()
    optimizer = Muon(net, lr=0.02, include=["2.weight"])
    steps([*net.parameters()], optimizer, range(1))
    saved = optimizer.state_dict()
    del saved["state"][1]["momentum_buffer"]
    said = r"param group 0 of the state dict, parameter 2\.weight: .*no 'momen"
    with pytest.raises(CheckpointError, match=said):
        optimizer.load_state_dict(saved)


def test_keys_of_schedulers_are_loaded() -> None:
    """Some of their keys look like misspelt settings."""
    net = model()
    optimizer = Muon(net, lr=0.02)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, [g["lr"] for g in optimizer.param_groups], total_steps=5)
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(max_momentum=0.9, base_momentum=0.8, swa_lr=0.1, tag="body")
    fresh = Muon(model(), lr=0.02)
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0].items() >= {"max_momentum": 0.9, "tag": "body", "min_lr": 8e-08}.items()


def test_a_hook_that_changes_the_state_is_followed() -> None:
    """What it returned was overwritten with what was passed, where dtypes differ."""
    net = model().bfloat16()
    optimizer = Muon(net, lr=0.02, include=["2.weight"])
    steps([*net.parameters()], optimizer, range(1))

    def zero(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state_dict)
        changed["state"][0]["momentum_buffer"].zero_()
        return changed

    optimizer.register_load_state_dict_pre_hook(zero)
    optimizer.load_state_dict(optimizer.state_dict())
    momentum = [optimizer.state[param]["momentum_buffer"] for param in matrices(net)]
    assert momentum[0].dtype == torch.float32 and [bool(m.any()) for m in momentum] == [False, True]


def test_8_bit_momentum_before_the_first_gradient_loads() -> None:
    """A step without gradients left codes without scales, which the loader refused."""
    net = model()
    optimizer = muon_of(net, momentum_dtype="int8")
    optimizer.step()
    fresh = muon_of(net, momentum_dtype="int8")
    fresh.load_state_dict(optimizer.state_dict())
    moved = steps(matrices(net), fresh, range(1))
    assert all(bool(change.any()) for change in moved)
