"""Muon for one process in float64, written to be read: the rest of the package computes the same, sharded and fast.

Muon moves a weight along the matrix that is nearest to its momentum and has only singular values of 1, so that a step
is equally long in every direction. With the gradient ``G`` of a weight ``W`` (``rows x cols``: outputs x inputs)::

    M <- momentum * M + (1 - momentum) * G           running mean of the gradients
    U  = momentum * M + (1 - momentum) * G           Nesterov, one step ahead; without it U = M
    O  = newton_schulz(U)                            U = A S B^T (singular values S) becomes about A B^T
    W <- W - lr * weight_decay * W - lr * scale * O

AdamW updates all parameters that are not matrices of hidden layers: embeddings, the output layer, biases, norms.
Source: Keller Jordan, https://kellerjordan.github.io/posts/muon/. The tests compare every result with this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepspeed_muon.math.coefficients import SMALLEST_NORM, Coefficients, resolve_schedule


def unit(x: Tensor, dim: int | None = None) -> Tensor:
    """Divide a matrix, or every row of it (``dim=1``), by its norm; zeros stay zeros."""
    return x / torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp(min=SMALLEST_NORM)


def newton_schulz(u: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    """Orthogonalise: move all singular values to about 1 by a polynomial, which takes matrix products only."""
    if u.shape[0] > u.shape[1]:
        return newton_schulz(u.T, coefficients).T
    x = unit(u.double())  # (rows, cols), singular values in [0, 1]
    for a, b, c in coefficients:
        gram = x @ x.T  # (rows, rows)
        x = a * x + (b * gram + c * gram @ gram) @ x  # every singular value s becomes a s + b s^3 + c s^5
    return x


@dataclass
class ReferenceMuon:
    """Muon for the parameters in ``matrices``, AdamW for all others; the settings are keys of ``optimizer.params``."""

    # Maps the name of a parameter to a function that returns views of its matrices, with a row for every output: the
    # weight itself (lambda weight: [weight]), or the experts of a stack, the heads of a projection.
    matrices: Mapping[str, Callable[[Tensor], Sequence[Tensor]]]
    muon_lr: float = 0.02
    adam_lr: float = 3e-4
    momentum: float = 0.95
    momentum_warmup: Mapping[str, float] | None = None
    nesterov: bool = True
    weight_decay: float = 0.0
    weight_decay_mode: str = "decoupled"
    adjust_lr_fn: str = "original"
    update_scale: float = 1.0
    coefficients: Sequence[Coefficients] = resolve_schedule("quintic")  # of ns_schedule and ns_steps
    variant: str = "muon"
    beta2: float = 0.95  # of NorMuon's row moments
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    eps: float = 1e-10
    steps: int = 0
    state: dict[tuple[object, ...], Tensor] = field(default_factory=dict)  # (name, ..., key) to running mean

    def step(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        """Update float64 weights in place; one without a gradient keeps its value and its state."""
        self.steps += 1
        for name, grad in grads.items():
            (self.muon if name in self.matrices else self.adamw)(name, weights[name], grad.double())

    def muon(self, name: str, weight: Tensor, grad: Tensor) -> None:
        """Update one parameter, matrix by matrix."""
        update = torch.zeros_like(weight, dtype=torch.float64)
        split = self.matrices[name]
        for number, (u, out) in enumerate(zip(split(self.direction(name, grad)), split(update), strict=True)):
            out.copy_(self.update_of(u, (name, number)))
        self.apply(weight, update, self.muon_lr, self.weight_decay)

    def direction(self, name: str, grad: Tensor) -> Tensor:
        """Update the momentum ``M`` and return the direction ``U``."""
        momentum = self.momentum_of_step()
        m = self.running_mean((name, "momentum_buffer"), momentum, grad)
        return momentum * m + (1 - momentum) * grad if self.nesterov else m

    def momentum_of_step(self) -> float:
        """Return ``momentum``, to which ``momentum_warmup`` rises from its ``from`` in the first ``steps`` steps."""
        if self.momentum_warmup is None or self.momentum <= self.momentum_warmup["from"]:
            return self.momentum
        done = min((self.steps - 1) / self.momentum_warmup["steps"], 1.0)
        return (1 - done) * self.momentum_warmup["from"] + done * self.momentum

    def update_of(self, u: Tensor, key: tuple[object, ...] = ()) -> Tensor:
        """Return ``scale * O`` of one matrix, or what the variant makes of it (docs/how_it_works.md has the papers)."""
        o = newton_schulz(unit(u, dim=1) if self.variant == "muon_eq" else u, self.coefficients)
        if self.variant == "normuon":  # divides rows by the root of their mean square, keeps the norm of O
            v = self.running_mean((*key, "row_second_moment"), self.beta2, o.square().mean(dim=1))  # (rows,)
            o = o.norm() * unit(o / (v.sqrt() + 1e-8)[:, None])
        rows, cols = o.shape
        scale = {
            "original": max(1.0, rows / cols) ** 0.5,
            "match_rms_adamw": 0.2 * max(rows, cols) ** 0.5,
            "spectral": max(rows, cols) ** 0.5,
            "unit_rms_norm": (rows / cols) ** 0.5,
        }[self.adjust_lr_fn]
        return self.update_scale * scale * o

    def adamw(self, name: str, weight: Tensor, grad: Tensor) -> None:
        """Update one parameter by AdamW (arXiv 1711.05101)."""
        beta1, beta2 = self.betas
        m = self.running_mean((name, "exp_avg"), beta1, grad) / (1 - beta1**self.steps)
        v = self.running_mean((name, "exp_avg_sq"), beta2, grad.square()) / (1 - beta2**self.steps)
        self.apply(weight, m / (v.sqrt() + self.eps), self.adam_lr, self.weight_decay)

    def running_mean(self, key: tuple[object, ...], beta: float, value: Tensor) -> Tensor:
        """Update an entry of the state, zero before the first step, and return it."""
        self.state[key] = beta * self.state.get(key, 0.0) + (1 - beta) * value
        return self.state[key]

    def apply(self, weight: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
        """Decay a weight and subtract ``lr * update``; every term reads the weight before the step."""
        decay = {
            "decoupled": lr * weight_decay * weight,
            "independent": weight_decay * weight,
            "cautious": lr * weight_decay * weight * (update * weight >= 0),
        }[self.weight_decay_mode]
        weight.copy_(weight - decay - lr * update)
