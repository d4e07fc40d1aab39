"""The run that all others are compared with: the float64 reference on a model, with DeepSpeed's clipping."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_muon.reference import ReferenceMuon
from tests.support import rounding

Views = Callable[[Tensor], Sequence[Tensor]]
"""Maps a parameter to views of the matrices that are orthogonalised, each with a row for every output."""

Grid = tuple[list[int], list[int], bool]
"""Heights and widths of the blocks of a parameter, and whether it is stored as input x output."""


def matrices_of(
    names: Collection[str],
    *,
    heads: Mapping[str, int] | None = None,
    experts: Collection[str] = (),
    grids: Mapping[str, Grid] | None = None,
) -> dict[str, Views]:
    """Return ``ReferenceMuon.matrices`` for the parameters ``names``, each of which is one matrix by default.

    Args:
        names: The parameters of Muon; all dimensions but the first are inputs.
        heads: The number of blocks for those that consist of blocks of equally many rows.
        experts: Those that are stacks of matrices.
        grids: The blocks of those that consist of a grid; a stack counts as its matrices one below the other.
    """
    heads, grids = heads or {}, grids or {}
    return {
        name: _grid_of(*grids[name])
        if name in grids
        else list
        if name in experts
        else _bands_of(heads.get(name, 1))
        for name in names
    }


def _bands_of(count: int) -> Views:
    return lambda weight: weight.flatten(1).chunk(count)


def _grid_of(rows: list[int], cols: list[int], transposed: bool) -> Views:
    def views(weight: Tensor) -> list[Tensor]:
        bands = weight.reshape(-1, weight.shape[-1]).split(rows)
        blocks = [block for band in bands for block in band.split(cols, 1)]
        return [block.T for block in blocks] if transposed else blocks

    return views


@dataclass
class Oracle(ReferenceMuon):
    """The reference with the settings of the tests, on the gradients of a float64 model.

    Inside of :func:`tests.support.rounding.making` it makes a random error wherever the fast path rounds.

    Attributes:
        clipping: ``gradient_clipping``.
        norms: Those of the raw gradients in each step: of ``all``, and by algorithm.
        store_momentum: Rounds the momentum of a parameter, by name, to the dtype in which it is stored between steps.
        store_moments: Does the same for AdamW's moments.
    """

    adam_lr: float = 3e-3
    weight_decay: float = 0.1
    eps: float = 1e-8
    clipping: float = 0.0
    norms: list[dict[str, float]] = field(default_factory=list)
    store_momentum: Callable[[str, Tensor], Tensor] = lambda name, momentum: momentum
    store_moments: Callable[[Tensor], Tensor] = lambda moment: moment

    @torch.no_grad()
    def update(self, model: nn.Module) -> float:
        """Apply one step to ``model`` from its ``.grad`` and return the norm of the raw gradients."""
        errors = rounding.current()
        if errors:
            errors.restore_weights()
        if errors and not self.steps:
            for param in model.parameters():
                param.copy_(param.to(errors.arithmetic.start))
        grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        if errors:
            # Each micro-batch's, then the sum over micro-batches and ranks and their mean.
            dtype = errors.arithmetic.gradients
            grads = {
                name: errors.rounded(errors.rounded(grad, dtype), dtype, times=3)
                for name, grad in grads.items()
            }
        algorithm_of = {name: "muon" if name in self.matrices else "adamw" for name in grads}
        squares = {name: float(grad.square().sum()) for name, grad in grads.items()}
        norms = {"all": math.sqrt(sum(squares.values()))}
        for algorithm in ("muon", "adamw"):
            norms[algorithm] = math.sqrt(
                sum(squares[name] for name in grads if algorithm_of[name] == algorithm)
            )
        # DeepSpeed divides by (norm + 1e-6) / limit where that exceeds 1.
        factor = max(1.0, (norms["all"] + 1e-6) / self.clipping) if self.clipping else 1.0
        if errors:
            # A sum of some thousand squares in blocks, and the root.
            norms = {
                key: float(errors.rounded(torch.tensor(norm, dtype=torch.float64), times=64))
                for key, norm in norms.items()
            }
        self.norms.append(norms)
        weights = {name: model.get_parameter(name).double() for name in grads}
        self.step(weights, {name: grad / factor for name, grad in grads.items()})
        for name, weight in weights.items():
            model.get_parameter(name).copy_(weight)
        return norms["all"]

    def direction(self, name: str, grad: Tensor) -> Tensor:
        """Round the momentum and the direction that is made of it."""
        u, key = super().direction(name, grad), (name, "momentum_buffer")
        momentum = self.state[key]
        if errors := rounding.current():
            momentum, u = errors.rounded(momentum, times=2), errors.rounded(u, times=2)
            if errors.arithmetic.momentum == torch.int8:
                momentum = momentum + errors.random(momentum, float(momentum.abs().max()) / 254)
            else:
                momentum = errors.rounded(momentum, errors.arithmetic.momentum)
        self.state[key] = self.store_momentum(name, momentum)
        return u

    def running_mean(self, key: tuple[object, ...], beta: float, value: Tensor) -> Tensor:
        """Round AdamW's moments."""
        mean = super().running_mean(key, beta, value)
        if key[-1] in ("exp_avg", "exp_avg_sq"):
            if errors := rounding.current():
                mean = errors.rounded(mean, times=2)
            self.state[key] = self.store_moments(mean)
        return mean

    def apply(self, weight: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
        """Round decay, step and the result; the update has some roundings of its own."""
        super().apply(weight, update, lr, weight_decay)
        if errors := rounding.current():
            after = weight + lr * (update - errors.rounded(update, times=8))
            weight.copy_(errors.rounded(errors.rounded(after, times=3), errors.arithmetic.masters))


Cuts = tuple[tuple[str, tuple[int, ...]], ...]
"""Names of matrices, each with the elements at which the fragment of another rank begins, hashable for a cache."""


def cuts_in(*results: dict[str, Any]) -> Cuts:
    """Return the entries ``cuts`` of the reports of ranks, which are those of :func:`.training.cuts_of`."""
    merged = {name: tuple(cuts) for result in results for name, cuts in result["cuts"].items()}
    return tuple(sorted(merged.items()))


def stored_in_8_bits(cuts: Cuts) -> Callable[[str, Tensor], Tensor]:
    """Return :attr:`Oracle.store_momentum` for int8 blocks that end where the fragments of ZeRO do."""
    cuts_by_name = dict(cuts)
    return lambda name, momentum: in_8_bits(momentum, cuts_by_name[name])


def in_8_bits(momentum: Tensor, cuts: Collection[int] = ()) -> Tensor:
    """Return what int8 stores of a momentum: blocks of 256 that also end at ``cuts``, scales of 17 significant bits."""
    bounds = sorted({*range(0, momentum.numel(), 256), *cuts, momentum.numel()})
    blocks = []
    for block in momentum.reshape(-1).split([stop - start for start, stop in itertools.pairwise(bounds)]):
        scale = float(block.abs().max()) / 127
        mantissa, exponent = math.frexp(scale)
        scale = math.ldexp(math.floor(mantissa * 2**17), exponent - 17)
        codes = [round(value / scale) if scale else 0 for value in block.tolist()]
        blocks.append(torch.tensor([code * scale for code in codes], dtype=torch.float64))
    return torch.cat(blocks).view(momentum.shape)
