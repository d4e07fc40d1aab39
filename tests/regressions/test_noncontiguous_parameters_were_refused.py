"""``channels_last`` models and transposed weights ended in "is not contiguous"; torch's optimizers take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_muon import Muon
from tests.support import training
from tests.support.models import Toy

SETTINGS: dict[str, Any] = {"lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.1, "ns_dtype": "fp32"}


def transposed(value: torch.Tensor) -> torch.Tensor:
    return value.t().contiguous().t()


def interleaved(value: torch.Tensor) -> torch.Tensor:
    spaced = value.new_zeros(*value.shape[:-1], 2 * value.shape[-1])
    spaced[..., ::2] = value
    return spaced[..., ::2]


def padded(value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(value, (0, 3))[..., :-3]


def channels_last(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous(memory_format=torch.channels_last)


LAYOUTS = {
    "conv.weight": channels_last,  # Muon: out x (in * kernel)
    "grouped.weight": channels_last,  # AdamW
    "proj.weight": transposed,
    "view.weight": interleaved,
    "gain": interleaved,
}


def model(layouts: dict[str, Any]) -> nn.Module:
    """Return a bag of parameters, those of ``layouts`` with other strides."""
    torch.manual_seed(0)
    bag = nn.Module()
    bag.conv = nn.Conv2d(4, 8, 3, bias=False)
    bag.grouped = nn.Conv2d(4, 8, 3, groups=2, bias=False)
    bag.proj = nn.Linear(6, 10, bias=False)
    bag.view = nn.Linear(6, 10, bias=False)
    bag.gain = nn.Parameter(torch.randn(12))
    for name, change in layouts.items():
        param = bag.get_parameter(name)
        param.data = change(param.detach())
        assert not param.is_contiguous()
    return bag


def set_gradients(bag: nn.Module, step: int, *, strided: bool) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, param in bag.named_parameters():
        grad = torch.randn(param.shape, generator=generator)
        # As autograd leaves them: in the parameter's layout.
        param.grad = LAYOUTS[name](grad) if strided else grad


@pytest.mark.parametrize("variant", [{}, {"variant": "normuon", "weight_decay_mode": "cautious"}])
def test_the_same_bits_as_contiguous_ones(variant: dict[str, Any]) -> None:
    """In place: whoever holds the memory of a parameter sees the update."""
    ours, theirs = model(LAYOUTS), model({})
    pointers = {name: (p.data_ptr(), p.stride()) for name, p in ours.named_parameters()}
    first, second = (Muon(net, **SETTINGS, **variant) for net in (ours, theirs))
    for step in range(3):
        set_gradients(ours, step, strided=step != 1)
        set_gradients(theirs, step, strided=False)
        first.step()
        second.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert (a.data_ptr(), a.stride()) == pointers[name], name


def test_strided_state_is_loaded() -> None:
    """As torch's optimizers save it for such parameters."""
    ours, theirs = model(LAYOUTS), model(LAYOUTS)
    first, second = Muon(ours, **SETTINGS), Muon(theirs, **SETTINGS)
    set_gradients(ours, 0, strided=True)
    set_gradients(theirs, 0, strided=True)
    first.step()
    second.step()
    saved = second.state_dict()
    name_of = {param: name for name, param in theirs.named_parameters()}
    names = (name_of[param] for group in second.param_groups for param in group["params"])
    for index, name in enumerate(names):
        saved["state"][index] = {
            key: LAYOUTS[name](value) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in saved["state"][index].items()
        }
    second.load_state_dict(saved)
    for net, optimizer in ((ours, first), (theirs, second)):
        set_gradients(net, 1, strided=True)
        optimizer.step()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def strided_engine(rank: int, world_size: int, *, stage: int, strided: bool) -> dict[str, torch.Tensor]:
    """Train a model, some weights of which are rows of a wider matrix: DeepSpeed itself refuses other strides."""
    torch.manual_seed(0)
    toy = Toy(hidden=(16, 8), thin=False)
    if strided:
        for block in toy.blocks:
            block.up.weight.data = padded(block.up.weight.detach())
    engine = training.initialize(toy, training.ds_config(stage))
    training.train_steps(engine, 2, rank, world_size)
    return training.full_masters(engine)


@pytest.mark.parametrize("stage", [0, 2])
def test_under_deepspeed(ranks: Any, stage: int) -> None:
    plain, strided = (ranks(1).run(strided_engine, stage=stage, strided=s)[0] for s in (False, True))
    training.assert_same_bits({"masters": strided}, {"masters": plain})


# A gradient that is a strided view stopped ``step()``: "momentum_pack_: grad must be a contiguous ... tensor".


def stepped(grad: Tensor) -> Tensor:
    return grad.repeat_interleave(2, dim=0)[::2]


def expanded(grad: Tensor) -> Tensor:
    return grad.flatten()[:1].expand(grad.shape)


VIEWS = {"t": transposed, "[::2]": stepped, "expand": expanded}


def updated(view: Any, backend: str, *, contiguous: bool) -> list[Tensor]:
    """Return a matrix of one row (of which any view is flat), a larger one and AdamW's vector after two steps."""
    torch.manual_seed(0)
    params = {
        "thin.weight": nn.Parameter(torch.randn(1, 24)),
        "wide.weight": nn.Parameter(torch.randn(12, 24)),
        "wide.bias": nn.Parameter(torch.randn(24)),
    }
    optimizer = Muon(params.items(), lr=0.1, ns_backend=backend, include=["thin.*"])
    for _ in range(2):
        for param in params.values():
            grad = view(torch.randn_like(param))
            param.grad = grad.contiguous() if contiguous else grad
        optimizer.step()
    return [param.detach() for param in params.values()]


@pytest.mark.parametrize("backend", [pytest.param("ops", marks=pytest.mark.native), "torch"])
@pytest.mark.parametrize("view", list(VIEWS))
def test_without_deepspeed(view: str, backend: str) -> None:
    strided, expected = (updated(VIEWS[view], backend, contiguous=contiguous) for contiguous in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(strided, expected, strict=True))
