"""Complex parameters ended in ``NotImplementedError`` inside ``step()``; some with and some without names passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_muon import Muon, MuonError


def param(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype))


def expanded() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, 4).expand(4, 4))


CASES: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: [("freqs", param(4, 4, dtype=torch.complex64))],
        TypeError,
        r"freqs of shape \[4, 4\] is complex \(torch.complex64\).*torch.view_as_complex",
    ),
    (
        lambda: [("w.weight", param(4, 4)), ("bias", param(3, dtype=torch.complex128))],
        TypeError,
        "bias of shape",
    ),
    (lambda: [param(2, dtype=torch.complex64)], TypeError, "<unnamed 2> of shape"),
    (lambda: [("w.weight", expanded())], ValueError, "w.weight of shape .* is expanded"),
    (lambda: [nn.LazyLinear(3).weight], ValueError, "has no shape yet"),
    (lambda: [("w", nn.Parameter(torch.eye(3).to_sparse()))], TypeError, "layout torch.sparse_coo"),
    (lambda: [("w", param(2, 2) * 2)], ValueError, "w of shape .* is computed from other tensors"),
    (lambda: [("w", param(2, 2).requires_grad_(False))], ValueError, "none of the 1 parameters is trainable"),
    (lambda: param(2, 2), TypeError, "params is a Parameter, expected"),
    (lambda: 5, TypeError, "params is a int"),
    (lambda: [{"params": 5}], TypeError, "the params of param group 0 are a int"),
    (lambda: ["w"], TypeError, "entry 0 of param group 0 is a str"),
    (lambda: [{"params": {param(2, 2), param(2, 2)}}], TypeError, "are a set"),
    (lambda: [("w.weight", param(2, 2)), param(3, 3)], ValueError, "entry 1 of param group 0 has none"),
    (
        lambda: [{"params": [param(2, 2)]}, {"params": [("w.weight", param(3, 3))]}],
        ValueError,
        "entry 0 of param group 1 has a name, entry 0 of param group 0 has none",
    ),
    (lambda: [{"params": [param(2, 2)], "param_names": ["a", "b"]}], ValueError, "2 param_names for 1"),
]


@pytest.mark.parametrize(("make", "also", "said"), CASES, ids=[str(case[2])[:30] for case in CASES])
def test_refused_when_the_optimizer_is_made(make: Any, also: type[Exception], said: str) -> None:
    """The error is ours, and of the kind that a caller of ``torch.optim`` expects."""
    with pytest.raises(MuonError, match=said) as caught:
        Muon(make(), lr=0.1)
    assert isinstance(caught.value, also)


def test_frozen_complex_parameters_are_nobodys_business() -> None:
    model = nn.Linear(4, 4)
    model.freqs = nn.Parameter(torch.zeros(4, dtype=torch.complex64), requires_grad=False)
    Muon(model, lr=0.1)
