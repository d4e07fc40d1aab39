"""How far rounding may take a training run from the float64 reference: measured on the reference itself.

A limit that is fitted to one machine fails on the next, whose kernels add up in another order. So the reference is
trained again, still in float64, with a random error wherever the fast path rounds (Monte Carlo arithmetic, Parker
1997), and the limit is a multiple of the distance between the two runs. So it takes into account the spectrum of every
matrix of the test, earlier steps, weights near zero, clipping and the variant.

:class:`tests.support.oracle.Oracle` rounds what the optimizer stores, and :func:`making` replaces the iteration of the
reference by :meth:`Errors.newton_schulz`.

What is rounded, with the unit roundoff ``u`` (2^-24 in fp32):

* every stored value (weights, gradients, momentum, normalised matrices): ``x (1 + u r)`` with a random ``r`` in
  [-1, 1];
* every product ``A B`` of the iteration over ``k`` terms: ``A B + u sqrt(k) |A| |B| r`` elementwise. An algorithm may
  add in any order: ``u k |A| |B|`` is the bound of all orders, ``sqrt(k)`` what independent roundings of any
  order come to (Higham and Mary 2019). Kernels with fused multiply-adds or several accumulators err by less;
* a product of a layer, where the model does not multiply in float64: the same, on the output of every module.

The iteration multiplies an error by the divided differences of its polynomial, up to 3.4445^5 = 485 in the direction
of a singular value near 0. The Gram order errs more than the standard one: it rounds ``R = X X^T`` by u relative to its
largest eigenvalue, and ``Q``, a polynomial of ``R``, has the slope ``b (a^2 + a^4 + a^6)`` = -8,700 at 0 before the
restart after step 3. On an 8 x 16 matrix with sigma_min = 0.026 of its norm that is 1.0e-5 of the update's norm, ten
times the standard order's. Both orders are among the random runs, for all matrices, since a machine chooses between
them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from deepspeed_muon import reference
from deepspeed_muon.math.coefficients import SMALLEST_NORM, Coefficients, resolve_schedule
from deepspeed_muon.math.newton_schulz import DTYPES, restart_steps
from tests.support.kernels import forced_dtype

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float64: 0.0}
"""Unit roundoffs: half the distance between neighbours above 1."""

ORDERS = ("standard", "gram")
"""The orders of the iteration's products that a machine may choose."""

SEEDS = 4
"""Random runs for each order."""

SPARE = 3.0
"""Factor of a limit above the largest error of the random runs.

1.5, because a kernel may be as unlucky as the unluckiest of many more runs than eight, times 2 in reserve.
"""

LARGEST = 0.9
"""No limit exceeds this: a missing, doubled or reversed update is off by 1 or 2.

Only half precision comes near it, where most directions of a matrix are noise: the cast alone puts 2^-9 into them.
"""


@dataclass(frozen=True)
class Arithmetic:
    """The precision of everything that a run rounds.

    Attributes:
        model: Relative error of a module's output and of the gradient that passes through it; 0 where the model
            multiplies in float64, as most models of the tests do.
        weights: The dtype of the weights in the forward pass. This rounding is not random: all micro-batches of a step
            have the same weights, so it does not average out.
        gradients: The dtype of gradients until the optimizer converts them to fp32.
        masters: The dtype of the weights that the optimizer updates.
        products: The dtype of the iteration: the one that :mod:`tests.support.kernels` forces, unless a test sets one.
        exchanged: The dtype of the directions and updates that ranks exchange.
        momentum: The dtype of momentum between steps; int8 has an error of up to 1/254 of the largest element.
        start: The dtype of the weights from which masters are made.
    """

    model: float = 0.0
    weights: torch.dtype = torch.float64
    gradients: torch.dtype = torch.float32
    masters: torch.dtype = torch.float32
    products: torch.dtype = DTYPES[forced_dtype()]
    exchanged: torch.dtype = torch.float32
    momentum: torch.dtype = torch.float32
    start: torch.dtype = torch.float64


USUAL = Arithmetic()
# Sums of up to 64 terms; the backward pass multiplies once more.
FP32_MODEL = Arithmetic(model=math.sqrt(2 * 64) * 2.0**-24)
# A router that computes in fp32 whatever the dtype of the model: exponential, sum and quotient, and as many backward.
FP32_GATE = Arithmetic(model=math.sqrt(6) * 2.0**-24)
# Input and output of a layer are rounded, sums are in fp32; the backward pass rounds as often. DeepSpeed makes the fp32
# masters from the rounded weights.
BF16_MODEL, FP16_MODEL = (
    Arithmetic(2 * UNIT[dtype], weights=dtype, gradients=dtype, start=dtype)
    for dtype in (torch.bfloat16, torch.float16)
)
HALF_MODEL = {"bf16": BF16_MODEL, "fp16": FP16_MODEL}


@dataclass
class Errors:
    """The random errors of one run."""

    arithmetic: Arithmetic
    order: str
    generator: torch.Generator
    # The values that the optimizer updates, while the parameters have rounded ones.
    masters: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def round_weights(self, module: nn.Module, _: Any) -> None:
        """Round the weights of a module until :meth:`restore_weights`; a forward pre-hook."""
        for param in module.parameters():
            if param not in self.masters:
                self.masters[param] = param.data
                param.data = param.data.to(self.arithmetic.weights).to(param.dtype)

    def restore_weights(self) -> None:
        """Give the parameters the values that the optimizer updates."""
        for param, master in self.masters.items():
            param.data = master
        self.masters.clear()

    def random(self, x: Tensor, largest: float) -> Tensor:
        """Return uniform random numbers between ``-largest`` and ``largest`` of the shape of ``x``."""
        return torch.empty(x.shape, dtype=torch.float64).uniform_(-largest, largest, generator=self.generator)

    def rounded(self, x: Tensor, dtype: torch.dtype = torch.float32, times: int = 1) -> Tensor:
        """Return values as after ``times`` independent roundings to ``dtype``."""
        # Below the normal numbers of fp16 the distance between neighbours no longer shrinks.
        size = x.abs().clamp_min(2.0**-14) if dtype == torch.float16 else x
        return torch.addcmul(x, size, self.random(x, UNIT[dtype] * math.sqrt(times)))

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of two matrices of the iteration, with its error."""
        exact = a @ b
        if self.arithmetic.products == torch.float64:
            return exact
        size = a.abs() @ b.abs()
        error = size.mul_(self.random(exact, UNIT[torch.float32] * math.sqrt(a.shape[1])))
        if self.arithmetic.products != torch.float32:
            # Half formats are added up in fp32, and the result is rounded.
            error.addcmul_(exact, self.random(exact, UNIT[self.arithmetic.products]))
        if torch.equal(exact, exact.mT):
            # Of X X^T a kernel computes both halves in one order of terms.
            error = error.triu() + error.triu(1).mT
        return exact.add_(error)

    def newton_schulz(self, u: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
        """Return :func:`deepspeed_muon.reference.newton_schulz` from a kernel that rounds every product and result."""
        u = self.rounded(u.double(), self.arithmetic.exchanged)
        # One number, whose error scales all singular values: a sum in fp32, its root and its inverse.
        norm = self.rounded(u.norm().clamp_min(SMALLEST_NORM), times=3)
        x = self.rounded(u / norm, self.arithmetic.products)
        iterate = self._standard if self.order == "standard" else self._gram
        transposed = u.shape[0] > u.shape[1]
        x = self.rounded(iterate(x.T if transposed else x, coefficients), self.arithmetic.exchanged)
        return x.T if transposed else x

    def _standard(self, x: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
        products = self.arithmetic.products
        for a, b, c in coefficients:
            s = self.product(x, x.T)
            t = self.rounded(b * s + c * self.product(s, s), products)
            x = self.rounded(a * x + self.product(t, x), products)
        return x

    def _gram(self, x: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
        products = self.arithmetic.products
        restarts = restart_steps(tuple(coefficients), products)
        r, q = self.product(x, x.T), None
        for done, (a, b, c) in enumerate(coefficients, start=1):
            z = self.rounded(b * r + c * self.product(r, r), products)
            if q is None:
                q = self.rounded(a * torch.eye(len(z), dtype=z.dtype) + z, products)
            else:
                q = self.rounded(a * q + self.product(q, z), products)
            if done in restarts:
                x = self.product(q, x)
                r, q = self.product(x, x.T), None
            else:
                rz = self.rounded(a * r + self.product(r, z), products)
                r = self.rounded(a * rz + self.product(z, rz), products)
        assert q is not None
        return self.product(q, x)


_current: Errors | None = None


def current() -> Errors | None:
    """Return the errors of the run in progress, ``None`` if it makes none."""
    return _current


@contextlib.contextmanager
def making(errors: Errors) -> Iterator[None]:
    """Make :class:`tests.support.oracle.Oracle` and the modules of models err so in this context."""
    global _current
    factor = errors.arithmetic.model

    def blur(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and output.is_floating_point() and output.ndim:
            return output * (1 + errors.random(output, factor)).to(output.dtype)
        return output

    hooks = [torch.nn.modules.module.register_module_forward_hook(blur)] if factor else []
    if errors.arithmetic.weights != torch.float64:
        hooks.append(torch.nn.modules.module.register_module_forward_pre_hook(errors.round_weights))
    _current = errors
    try:
        with mock.patch.object(reference, "newton_schulz", errors.newton_schulz):
            yield
    finally:
        _current = None
        for hook in hooks:
            hook.remove()


QUINTIC = resolve_schedule("quintic")


def iteration_limit(
    x: Tensor,
    dtype: torch.dtype,
    orders: Sequence[str] = ORDERS,
    coefficients: Sequence[Coefficients] = QUINTIC,
) -> float:
    """Return how far a kernel's orthogonalised matrix may be from the reference's, relative to its norm.

    Args:
        x: The matrix.
        dtype: Of the iteration and of its result.
        orders: Of the products, ``gram`` or ``standard``.
        coefficients: One triple for each iteration.
    """
    exact = reference.newton_schulz(x, coefficients)
    largest = 0.0
    # The norm over many elements is the same in every run; that of few, as the one number of a vector, varies by ten.
    seeds = 1 if x.numel() >= 1 << 15 else SEEDS if x.numel() >= 1 << 7 else 8 * SEEDS
    for order, seed in itertools.product(orders, range(seeds)):
        errors = Errors(Arithmetic(products=dtype), order, torch.Generator().manual_seed(seed))
        largest = max(largest, float((errors.newton_schulz(x, coefficients) - exact).norm() / exact.norm()))
    return min(LARGEST, SPARE * largest)


@dataclass
class Limits:
    """How far each result may be from the reference's; see :func:`limits`.

    Attributes:
        paths: Distance of two paths relative to the path, by name of the parameter (:func:`.comparisons.relative`).
        rows: The same for each slice of a parameter along its first dimension.
        norms: Relative, of the gradient norms.
        momentum: Relative, by name.
    """

    paths: dict[str, float] = field(default_factory=dict)
    rows: dict[str, list[float]] = field(default_factory=dict)
    norms: float = 0.0
    momentum: dict[str, float] = field(default_factory=dict)


def _raise(limits: dict[str, float], name: str, error: float) -> None:
    limits[name] = min(LARGEST, max(limits.get(name, 0.0), SPARE * error))


def _distances(actual: Tensor, expected: Tensor, scale: Tensor) -> Tensor:
    """Return the distance of each row relative to the norm of that row of ``scale``."""
    difference, norms = (x.double().flatten(1).norm(dim=1) for x in (actual - expected, scale))
    return torch.where(norms > 0, difference / norms, 0.0)


def _distance(actual: Tensor, expected: Tensor, scale: Tensor) -> float:
    return float(_distances(actual.reshape(1, -1), expected.reshape(1, -1), scale.reshape(1, -1)))


def limits(
    train: Callable[..., Any], *args: Any, arithmetic: Arithmetic = USUAL, seeds: int = SEEDS, **kwargs: Any
) -> Limits:
    """Return the limits for comparisons with a reference run.

    Args:
        train: A function under ``functools.lru_cache`` that trains a float64 model by an ``Oracle`` and returns the
            parameters before and after, the gradient norms and optionally the momentum.
        *args: Its arguments.
        arithmetic: The precision of the run that is compared.
        seeds: Random runs for each order; fewer where a run takes seconds.
        **kwargs: Its keyword arguments.
    """
    return _limits(train, args, tuple(sorted(kwargs.items())), arithmetic, seeds)


@functools.lru_cache(maxsize=256)
def _limits(
    train: Any,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    arithmetic: Arithmetic,
    seeds: int,
) -> Limits:
    exact = train(*args, **dict(kwargs))
    return measured_limits(lambda: train.__wrapped__(*args, **dict(kwargs)), exact, arithmetic, seeds=seeds)


def measured_limits(
    run: Callable[[], Any], exact: Any, arithmetic: Arithmetic = USUAL, *, seeds: int = SEEDS
) -> Limits:
    """Return the limits for comparisons with ``exact``, the result of ``run`` without errors."""
    start, end, norms, *momentum = exact
    result = Limits()
    for order, seed in itertools.product(ORDERS, range(seeds)):
        with making(Errors(arithmetic, order, torch.Generator().manual_seed(seed))):
            _, perturbed, perturbed_norms, *perturbed_momentum = run()
        for name, expected in end.items():
            path = expected - start[name]
            _raise(result.paths, name, _distance(perturbed[name], expected, path))
            if path.ndim:
                rows = SPARE * _distances(
                    *(x.reshape(len(path), -1) for x in (perturbed[name], expected, path))
                )
                before = torch.tensor(result.rows.get(name, 0.0), dtype=torch.float64)
                result.rows[name] = torch.maximum(rows, before).clamp_max(LARGEST).tolist()
        ratios = (
            abs(actual / norm - 1)
            for actual, norm in zip(perturbed_norms, norms, strict=True)
            if norm and math.isfinite(norm)
        )
        result.norms = max(result.norms, *(SPARE * ratio for ratio in ratios), 0.0)
        for name, expected in (momentum[0] if momentum else {}).items():
            _raise(result.momentum, name, _distance(perturbed_momentum[0][name], expected, expected))
    return result
