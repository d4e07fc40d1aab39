"""The independent oracle of the distributed tests: one process, float64.

It trains the same model on the global batch with the definition of the Muon step written out once more. Of the package
it takes the variants' float64 references alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from deepspeed_muon.math.newton_schulz import restart_steps
from deepspeed_muon.variants import VARIANTS
from deepspeed_muon.variants.variant import Reference, ReferenceRates
from tests.support import rounding

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


Rows = Sequence[tuple[float, float, float]]


def rounded_polar(u: Tensor, errors: rounding.Errors, rows: Rows = (QUINTIC,) * 5) -> Tensor:
    """Return :func:`polar` with the errors of a kernel that rounds every product and every result."""
    products, exchanged = errors.arithmetic.products, errors.arithmetic.exchanged
    u = errors.rounded(u.double(), exchanged)
    # One number, whose error moves all singular values alike: a sum in fp32, its root and its inverse.
    norm = errors.rounded(u.norm().clamp_min(1e-300), times=3)
    x = errors.rounded(u / norm, products)
    x = x.T if x.shape[0] > x.shape[1] else x
    if errors.order == "standard":
        for a, b, c in rows:
            s = errors.product(x, x.T)
            t = errors.rounded(b * s + c * errors.product(s, s), products)
            x = errors.rounded(a * x + errors.product(t, x), products)
    else:
        restarts = restart_steps(rows, products)
        r, q = errors.product(x, x.T), None
        for done, (a, b, c) in enumerate(rows, start=1):
            z = errors.rounded(b * r + c * errors.product(r, r), products)
            if q is None:
                q = errors.rounded(a * torch.eye(len(z), dtype=z.dtype) + z, products)
            else:
                q = errors.rounded(a * q + errors.product(q, z), products)
            if done in restarts:
                x = errors.product(q, x)
                r, q = errors.product(x, x.T), None
            else:
                rz = errors.rounded(a * r + errors.product(r, z), products)
                r = errors.rounded(a * rz + errors.product(z, rz), products)
        assert q is not None
        x = errors.product(q, x)
    x = errors.rounded(x, exchanged)
    return x.T if u.shape[0] > u.shape[1] else x


def iteration_limit(
    x: Tensor, dtype: torch.dtype, orders: Sequence[str] = rounding.ORDERS, rows: Rows = (QUINTIC,) * 5
) -> float:
    """Return how far a kernel's orthogonalised matrix may lie from the polynomial in float64, relative to its norm.

    Args:
        x: The matrix.
        dtype: Of the iteration and of its result.
        orders: Of the products, ``gram`` or ``standard``.
        rows: The coefficients.
    """
    exact = rounded_polar(x, rounding.Errors(rounding.EXACT, "standard", torch.Generator()), rows)
    arithmetic = rounding.Arithmetic(products=dtype)
    largest = 0.0
    # The norm over many elements is the same in every run.
    seeds = rounding.SEEDS if x.numel() < 1 << 15 else 1
    for order, seed in itertools.product(orders, range(seeds)):
        errors = rounding.Errors(arithmetic, order, torch.Generator().manual_seed(seed))
        largest = max(largest, float((rounded_polar(x, errors, rows) - exact).norm() / exact.norm()))
    return min(rounding.LARGEST, rounding.SPARE * largest)


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
        errors = rounding.current()
        if errors:
            errors.restore_weights()
        if errors and self.step == 1:
            for param in model.parameters():
                param.data.copy_(param.data.to(errors.arithmetic.start))
        grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
        if errors:
            # Each micro-batch's, then the sum over micro-batches and ranks and their mean.
            dtype = errors.arithmetic.gradients
            grads = {
                name: errors.rounded(errors.rounded(g, dtype), dtype, times=3) for name, g in grads.items()
            }
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
        # DeepSpeed divides by (norm + 1e-6) / limit where that exceeds 1.
        factor = max(1.0, (norm + 1e-6) / self.clipping) if self.clipping else 1.0
        if errors:
            # A sum of some thousand squares in blocks, and the root.
            norm = float(errors.rounded(torch.tensor(norm, dtype=torch.float64), times=64))
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
        if errors := rounding.current():
            buf, u = errors.rounded(buf, times=2), errors.rounded(u, times=2)
            if errors.arithmetic.momentum == torch.int8:
                buf = buf + buf.abs().max() / 254 * errors.random(buf)
            else:
                buf = errors.rounded(buf, errors.arithmetic.momentum)
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
        errors = rounding.current()
        iterate = functools.partial(rounded_polar, errors=errors) if errors else polar
        rates = ReferenceRates(iterate, self.lr, self.scale(*u.shape), settings)
        return function(weights, u, self.kept.setdefault(place, {}), rates)

    def _apply(self, param: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
        after = decayed_step(param, update, lr=lr, weight_decay=weight_decay, mode=self.decay_mode)
        if errors := rounding.current():
            # Decay, step and the result; the update has some roundings of its own.
            after = errors.rounded(after + lr * (update - errors.rounded(update, times=8)), times=3)
            after = errors.rounded(after, errors.arithmetic.masters)
        param.copy_(after)

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
        if errors := rounding.current():
            m, v = errors.rounded(m, times=2), errors.rounded(v, times=2)
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
