"""The independent oracle of the distributed tests: one process, float64.

It trains the same model on the global batch with the definition of the Muon step written out once more. Of the package
it takes the variants' float64 references alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from deepspeed_muon.variants import VARIANTS
from deepspeed_muon.variants.variant import Reference, ReferenceRates

QUINTIC = (3.4445, -4.7750, 2.0315)


def polar(u: Tensor, steps: int = 5) -> Tensor:
    """Five quintic Newton-Schulz steps on singular values, through the definition by matrix products."""
    # Of a gradient of zero, as that of an expert without a token in its first steps, the factor is zero.
    x = u.double() / u.double().norm().clamp_min(1e-300)
    a, b, c = QUINTIC
    for _ in range(steps):
        if x.shape[0] <= x.shape[1]:
            s = x @ x.T
            x = a * x + b * (s @ x) + c * (s @ (s @ x))
        else:
            s = x.T @ x
            x = a * x + b * (x @ s) + c * ((x @ s) @ s)
    return x


@dataclass
class Oracle:
    """Muon on matrices, AdamW on the rest, of one float64 model."""

    muon: set[str]
    lr: float = 0.02
    adam_lr: float = 3e-3
    momentum: float = 0.95
    # Unset: that of the variant.
    nesterov: bool = True
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clipping: float = 0.0
    scale: Callable[[int, int], float] = lambda r, c: math.sqrt(max(1.0, r / c))
    heads: dict[str, int] = field(default_factory=dict)
    experts: set[str] = field(default_factory=set)
    variant: str = "muon"
    # Of the variant; each has its default.
    settings: dict[str, float] = field(default_factory=dict)
    decay_mode: str = "decoupled"
    # Name to rows, columns and whether the weight is input x output; 3-D weights are stacked to one matrix first.
    cuts: dict[str, tuple[list[int], list[int], bool]] = field(default_factory=dict)
    keep: Callable[[Tensor], Tensor] = lambda buf: buf
    keep_moments: Callable[[Tensor], Tensor] = lambda moment: moment
    step: int = 0
    state: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    # Name and number of a block to what the variant keeps.
    kept: dict[tuple[object, ...], dict[str, Tensor]] = field(default_factory=dict)

    def update(self, model: nn.Module) -> float:
        """Apply one step to ``model`` from its ``.grad`` and return the norm of the raw gradients."""
        self.step += 1
        grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
        # DeepSpeed divides by (norm + 1e-6) / limit where that exceeds 1.
        factor = max(1.0, (norm + 1e-6) / self.clipping) if self.clipping else 1.0
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name in grads:
                    update = self._muon if name in self.muon else self._adamw
                    update(name, param, grads[name] / factor)
        return norm

    def _muon(self, name: str, param: Tensor, grad: Tensor) -> None:
        variant = VARIANTS[self.variant]
        (buf,) = self.state.get(name, (torch.zeros_like(grad),))
        buf = self.momentum * buf + (1 - self.momentum) * grad
        u = (1 - self.momentum) * grad + self.momentum * buf if self.nesterov else buf
        self.state[name] = (self.keep(buf),)
        update = self._by_block(name, variant.reference, param, u)
        decay = 0.0 if variant.apply is not None else self.weight_decay
        self._apply(param, update, self.lr, decay)

    def _by_block(self, name: str, function: Reference, weights: Tensor, other: Tensor) -> Tensor:
        """Return what a variant's function makes of each block, put together."""
        if name in self.cuts:
            flat = (each.reshape(-1, each.shape[-1]) for each in (weights, other))
            return self._cut(name, function, *flat, *self.cuts[name]).view(weights.shape)
        blocks = [
            list(each) if name in self.experts else self._heads(name, each) for each in (weights, other)
        ]
        pairs = enumerate(zip(*blocks, strict=True))
        found = [self._block((name, number), function, *pair) for number, pair in pairs]
        return torch.cat(found).view(weights.shape)

    def _heads(self, name: str, whole: Tensor) -> list[Tensor]:
        return list(whole.flatten(1).chunk(self.heads.get(name, 1)))

    def _block(self, place: tuple[object, ...], function: Reference, weights: Tensor, u: Tensor) -> Tensor:
        settings = {each.name: each.default for each in VARIANTS[self.variant].settings} | self.settings
        rates = ReferenceRates(polar, self.lr, self.scale(*u.shape), settings)
        return function(weights, u, self.kept.setdefault(place, {}), rates)

    def _apply(self, param: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
        param.copy_(decayed_step(param, update, lr=lr, weight_decay=weight_decay, mode=self.decay_mode))

    def _cut(
        self,
        name: str,
        function: Reference,
        weights: Tensor,
        u: Tensor,
        rows: list[int],
        cols: list[int],
        transposed: bool,
    ) -> Tensor:
        bands = []
        for i, band in enumerate(zip(weights.split(rows), u.split(rows), strict=True)):
            cells = []
            for j, cell in enumerate(zip(*(each.split(cols, 1) for each in band), strict=True)):
                layer = [each.T if transposed else each for each in cell]
                update = self._block((name, i, j), function, *layer)
                cells.append(update.T if transposed else update)
            bands.append(torch.cat(cells, 1))
        return torch.cat(bands)

    def _adamw(self, name: str, param: Tensor, grad: Tensor) -> None:
        m, v = self.state.get(name, (torch.zeros_like(grad), torch.zeros_like(grad)))
        b1, b2 = self.betas
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        self.state[name] = (self.keep_moments(m), self.keep_moments(v))
        root = (v / (1 - b2**self.step)).sqrt() + self.eps
        self._apply(param, (m / (1 - b1**self.step)) / root, self.adam_lr, self.weight_decay)


def in_8_bits(buf: Tensor) -> Tensor:
    """Return what is left of a momentum that is kept in 8 bits: blocks of 256, their scale of 17 significant bits."""
    found = []
    for block in buf.reshape(-1).split(256):
        scale = float(block.abs().max()) / 127
        mantissa, exponent = math.frexp(scale)
        scale = math.ldexp(math.floor(mantissa * 2**17), exponent - 17)
        codes = [round(each / scale) if scale else 0 for each in block.tolist()]
        found.append(torch.tensor([code * scale for code in codes], dtype=torch.float64))
    return torch.cat(found).view(buf.shape)


def relative(actual: Tensor, expected: Tensor, start: Tensor) -> float:
    """Norm of the difference of two paths from ``start``, relative to the expected one."""
    path = expected.double() - start.double()
    return float((actual.double() - expected.double()).norm() / path.norm())


def worst(pairs: Sequence[float]) -> float:
    """Return the largest error, treating NaN as infinite."""
    return max((math.inf if math.isnan(value) else value) for value in pairs)


def decayed_step(p: Tensor, u: Tensor, *, lr: float, weight_decay: float, mode: str) -> Tensor:
    """Return ``p`` after a step by the scaled update ``u`` with the weight decay ``mode``, one of three kinds."""
    p, u = p.double(), u.double()
    if mode == "decoupled":
        decay = lr * weight_decay * p
    elif mode == "independent":
        decay = weight_decay * p
    elif mode == "cautious":
        decay = torch.where(u * p >= 0, lr * weight_decay * p, torch.zeros_like(p))
    else:
        raise ValueError(f"unknown mode {mode!r}")
    return p - decay - lr * u
