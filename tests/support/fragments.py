"""Calls of the flat passes of ``ops/`` on a single fragment: a whole tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def one_row(numel: int) -> Tensor:
    """Return the table of one fragment that is all of its tensors."""
    return torch.tensor([(0, 0, 0, 0, numel, 0)])


def rates(first: float, second: float) -> Tensor:
    """Return the rates of one matrix."""
    return torch.tensor([(first, second)], dtype=torch.float64)


def momentum_pack(
    run: Callable[..., None], buf: Tensor, grad: Tensor, out: Tensor, momentum: float, nesterov: bool
) -> None:
    """Run a ``momentum_pack`` of any backend; ``buf`` and ``out`` are mutated."""
    run([buf], [grad], [out], one_row(buf.numel()), rates(momentum, float(nesterov)))


def unpack_apply(
    run: Callable[..., None], param: Tensor, update: Tensor, lr_scale: float, decay: float
) -> None:
    """Run an ``unpack_apply`` of any backend; ``param`` is mutated."""
    run([param], [update], one_row(param.numel()), rates(lr_scale, decay))
