"""The independent oracle of the distributed tests: one process, float64, no code of the package.

It trains the same model on the global batch with the definition of the Muon step written out once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

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
    nesterov: bool = True
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clipping: float = 0.0
    scale: Callable[[int, int], float] = lambda r, c: math.sqrt(max(1.0, r / c))
    heads: dict[str, int] = field(default_factory=dict)
    experts: set[str] = field(default_factory=set)
    variant: str = "muon"
    beta2: float = 0.95
    decay_mode: str = "decoupled"
    # Name to rows, columns and whether the weight is input x output; 3-D weights are stacked to one matrix first.
    cuts: dict[str, tuple[list[int], list[int], bool]] = field(default_factory=dict)
    keep: Callable[[Tensor], Tensor] = lambda buf: buf
    step: int = 0
    state: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)

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
        (buf,) = self.state.get(name, (torch.zeros_like(grad),))
        buf = self.momentum * buf + (1 - self.momentum) * grad
        u = (1 - self.momentum) * grad + self.momentum * buf if self.nesterov else buf
        self.state[name] = (self.keep(buf),)
        if name in self.cuts:
            update = self._cut(name, u.reshape(-1, u.shape[-1]), *self.cuts[name])
        else:
            blocks = list(u) if name in self.experts else u.flatten(1).chunk(self.heads.get(name, 1))
            factors = self._normalized(name, [polar(block) for block in blocks])
            update = torch.cat([self.scale(*factor.shape) * factor for factor in factors])
        self._apply(param, update.view(param.shape), self.lr)

    def _normalized(self, name: str, factors: list[Tensor]) -> list[Tensor]:
        if self.variant != "normuon":
            return factors
        seconds = self.rows.get(name, torch.zeros(sum(len(o) for o in factors), dtype=torch.float64))
        seconds = self.beta2 * seconds + (1 - self.beta2) * torch.cat([(o**2).mean(1) for o in factors])
        self.rows[name] = seconds
        result = []
        for o, v in zip(factors, seconds.split([len(o) for o in factors]), strict=True):
            n = o / (v.sqrt() + 1e-8)[:, None]
            result.append(n / n.norm() * o.norm())
        return result

    def _apply(self, param: Tensor, update: Tensor, lr: float) -> None:
        if self.decay_mode == "cautious":
            decay = lr * self.weight_decay * param * (update * param >= 0)
        else:
            decay = (1.0 if self.decay_mode == "independent" else lr) * self.weight_decay * param
        param.sub_(decay + lr * update)

    def _cut(self, name: str, u: Tensor, rows: list[int], cols: list[int], transposed: bool) -> Tensor:
        def own(place: str, cell: Tensor) -> Tensor:
            layer = cell.T if transposed else cell
            (factor,) = self._normalized(place, [polar(layer)])
            update = self.scale(*layer.shape) * factor
            return update.T if transposed else update

        bands = []
        for i, band in enumerate(u.split(rows)):
            cells = enumerate(band.split(cols, 1))
            bands.append(torch.cat([own(f"{name}[{i}, {j}]", cell) for j, cell in cells], 1))
        return torch.cat(bands)

    def _adamw(self, name: str, param: Tensor, grad: Tensor) -> None:
        m, v = self.state.get(name, (torch.zeros_like(grad), torch.zeros_like(grad)))
        b1, b2 = self.betas
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        self.state[name] = (m, v)
        root = (v / (1 - b2**self.step)).sqrt() + self.eps
        self._apply(param, (m / (1 - b1**self.step)) / root, self.adam_lr)


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
