"""The polynomial schedules of the Newton-Schulz iteration.

One step maps ``X <- a X + (b A + c A^2) X`` with ``A = X X^T``; it maps a singular value ``s`` to
``a s + b s^3 + c s^5``. A table of ``(a, b, c)`` is a *schedule*: it is valid for as many steps as it has rows, and
some tables for any number. No table may be cycled: a 4-row table cycled to 5 steps returns minus the polar factor, and
a 5-row table cycled to 6 collapses the singular values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from deepspeed_muon.errors import ConfigError

Coefficients = tuple[float, float, float]
NsScheduleName = Literal["quintic", "polar_express", "polar_express_5", "cans", "deepseekv4"]

SMALLEST_NORM = 2.0**-126
"""The smallest normal number of fp32: what is divided by its norm, and has a smaller one, counts as zero."""

_QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)


def _scaled(rows: Sequence[Coefficients], safety: float) -> tuple[Coefficients, ...]:
    """Divide each row by ``s, s^3, s^5``: the polynomial of ``x / s``."""
    return tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in rows)


# Amsel et al., arXiv 2505.16932, Implementation 1: the factors against rounding are applied below.
_POLAR_EXPRESS_ROWS: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

# The same paper's method for five iterations, safety 2e-2 (in all rows), cushion 2.
_POLAR_EXPRESS_5_ROWS: tuple[Coefficients, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

_SCHEDULES: dict[str, tuple[Coefficients, ...]] = {
    # Keller Jordan, 2024.
    "quintic": (_QUINTIC,),
    # Implementation 1 has the safety factor 1.01 in all rows but the last, and divides the input by 1.01 ||X||_F
    # besides. Scaling the first row once more does that division.
    "polar_express": (
        *_scaled(_POLAR_EXPRESS_ROWS[:1], 1.01**2),
        *_scaled(_POLAR_EXPRESS_ROWS[1:-1], 1.01),
        _POLAR_EXPRESS_ROWS[-1],
    ),
    # Its input is divided by 1.02 ||X||_F.
    "polar_express_5": (*_scaled(_POLAR_EXPRESS_5_ROWS[:1], 1.02), *_POLAR_EXPRESS_5_ROWS[1:]),
    # CANS, arXiv 2506.10935.
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    # DeepSeek-V4 report: eight quintic steps, two of the cubic-convergent polynomial.
    "deepseekv4": (_QUINTIC,) * 8 + ((2.0, -1.5, 0.5),) * 2,
}
# Valid for any number of steps: their first rows are a schedule too, and the last one can be repeated.
_ANY_LENGTH = ("quintic", "polar_express")

# A schedule tolerates an error of its input if the largest singular value of the result grows at most by this factor.
_LARGEST_GROWTH = 1.25
# In numpy: torch's default device may be "meta", and its tensors fake.
_UNIT_INTERVAL = np.linspace(0.0, 1.0, 4001)


def resolve_schedule(
    schedule: NsScheduleName | Sequence[Sequence[float]],
    steps: int | None = None,
) -> tuple[Coefficients, ...]:
    """Turn the ``ns_schedule`` and ``ns_steps`` of the configuration into one coefficient triple per step.

    ``steps`` are at least 1; ``None`` means the length of the table, or 5 for a schedule of any length.

    Raises:
        ConfigError: If the table is not valid for ``steps``, or a caller's own table does not map singular values
            into the neighbourhood of 1.
    """
    name: str
    if isinstance(schedule, str):
        name, rows = schedule, _SCHEDULES[schedule]
    else:
        name, rows = "<own table>", tuple((float(a), float(b), float(c)) for a, b, c in schedule)
    if steps is None:
        steps = 5 if name in _ANY_LENGTH else len(rows)
    if steps != len(rows) and name not in _ANY_LENGTH:
        raise ConfigError(
            f"ns_schedule {name!r} is a table of {len(rows)} steps and cannot run for ns_steps={steps}: "
            f"set ns_steps to {len(rows)}, or use ns_schedule 'quintic' or 'polar_express', which are valid "
            f"for any number of steps"
        )
    coefficients = rows[:steps] + rows[-1:] * (steps - len(rows))
    if not isinstance(schedule, str):
        band = band_of(coefficients)
        if not (band.low > 0.2 and band.high < 2.0):
            raise ConfigError(
                f"ns_schedule: this table maps singular values in [0.05, 1] to [{band.low:.3g}, {band.high:.3g}] "
                f"after {steps} steps; an orthogonalising schedule ends near 1 (accepted: 0.2 to 2)"
            )
    return coefficients


@dataclass(frozen=True, slots=True)
class Band:
    """Where a schedule puts singular values.

    Attributes:
        low: Smallest image of the settled interval [0.05, 1]. It contains the singular values of a normalised Gaussian
            matrix of up to a few hundred columns, and every published table lifts 0.05 beyond 0.3.
        high: Largest image of [0, 1].
        gain: Smallest ``p(s) / s`` on (0, 1].
    """

    low: float
    high: float
    gain: float


@functools.lru_cache(maxsize=16)
def band_of(coefficients: tuple[Coefficients, ...]) -> Band:
    """Return the band of a schedule, from its polynomial on a fine grid."""
    start = np.logspace(-6, 0, 6001)
    values = _image(start, coefficients)
    settled = values[start >= 0.05]
    return Band(float(settled.min()), float(values.max()), float((values / start).min()))


def _image(
    values: NDArray[np.float64], coefficients: Sequence[Coefficients], rounding: float = 0.0
) -> NDArray[np.float64]:
    """Return the images of singular values under all steps, with a factor of ``1 + rounding`` before every step."""
    with np.errstate(over="ignore", invalid="ignore"):
        for a, b, c in coefficients:
            values = values * (1 + rounding)
            values = a * values + b * values**3 + c * values**5
    return values


def steps_that_need_an_exact_input(coefficients: Sequence[Coefficients]) -> frozenset[int]:
    """Return the numbers, from 2 on, of the steps that send a singular value out of the band if it is 3 % too large.

    Half-precision Gram matrices drift by about that much in one step. A step of Polar Express is made for the interval
    to which the step before leads, and is steep beyond its end: steps 2 to 4 are such steps. The quintic has none.
    """
    limit = _LARGEST_GROWTH * np.abs(_image(_UNIT_INTERVAL, coefficients)).max()
    sensitive = set()
    for step in range(2, len(coefficients) + 1):
        drifted = _image(_UNIT_INTERVAL, coefficients[: step - 1]) * (1 + 2.0**-5)
        if not np.abs(_image(drifted, coefficients[step - 1 :])).max() <= limit:  # NaN: it diverged
            sensitive.add(step)
    return frozenset(sensitive)


def tolerates_rounding(coefficients: Sequence[Coefficients], dtype: torch.dtype) -> bool:
    """Return whether a schedule stays in its band when ``dtype`` rounds up twice before every step.

    A table that is optimal on exactly [0, 1] is steep just above 1. Polar Express has a safety factor for that;
    ``cans`` has none, and one rounding in bfloat16 sends a singular value of 1 to infinity.
    """
    rounded = np.abs(_image(_UNIT_INTERVAL, coefficients, torch.finfo(dtype).eps))
    return bool(rounded.max() <= _LARGEST_GROWTH * np.abs(_image(_UNIT_INTERVAL, coefficients)).max())
