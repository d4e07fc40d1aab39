"""How a tuned rate is carried to a run of another size, and what the runs of this repository say of it.

A published law is followed, because it cost little in the runs here, which are of other models than those that it was
fitted on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.updates import WIDTH_EXPONENT, AdjustLrName
from deepspeed_muon.tools.command_line import SIZES

Sizes = Mapping[str, float]
"""The sizes of a run that are known, by their names in :data:`SIZES`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the runs of this repository say of the law under a scale rule, or a variant.

    Attributes:
        costs: The costs of the rates that the law yields, and of the kept ones.
        support: Why the law is followed, as a clause about it.
        ranges: The smallest and the largest value of each size in the runs; beyond them the law is extrapolated.
    """

    costs: str
    support: str = "which the runs here agree with"
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def runs(self) -> str:
        """Return the sizes of the runs as text."""
        spans = {size: span(*limits) for size, limits in self.ranges.items()}
        return "0.4M to 7M parameters, width {width}, {depth} layers, {tokens} tokens in steps of {batch}".format(
            **spans
        )

    def beyond(self, sizes: Collection[str], before: Sizes, after: Sizes) -> list[str]:
        """Return the ranges of those of ``sizes`` that are beyond them in ``before`` or ``after``."""
        return [
            f"{size} {span(low, high)}"
            for size, (low, high) in self.ranges.items()
            if size in sizes and not (low <= before[size] <= high and low <= after[size] <= high)
        ]


def span(low: int, high: int) -> str:
    """Return a range as text."""
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


_RANGES = {"width": (128, 512), "depth": (2, 12), "tokens": (76_800, 614_400), "batch": (512, 2048)}

MEASURED = {
    "original": Measured(
        "width^-0.15 cost 0.000 nats from width 128 to 512, the kept rate 0.006. Over width, depth, tokens and batch "
        "the law cost at most 0.011 nats in 16 cells that chose no constant, the kept rate 0.040",
        ranges={**_RANGES, "tokens": (76_800, 2_457_600), "batch": (512, 8192)},
    ),
    "match_rms_adamw": Measured(
        "width^-0.65 cost 0.001 nats from width 128 to 512; the kept rate cost 0.02 at twice the width and 0.09 at "
        "four times. Over width, depth, tokens and batch the law cost at most 0.025 nats in 5 cells that chose no "
        "constant, the kept rate 0.061",
        ranges=_RANGES,
    ),
    "spectral": Measured(
        "width^-0.65, fitted to match_rms_adamw, cost 0.012 nats from width 128 to 512; the kept rate cost 0.04 at "
        "twice the width and 0.09 at four times",
        ranges={"width": (128, 512), "depth": (2, 2), "tokens": (76_800, 76_800), "batch": (512, 512)},
    ),
    "normuon": Measured(
        "over width, depth, tokens and batch the law cost at most 0.010 nats in 9 cells that chose no constant, the "
        "kept rate 0.022",
        ranges={**_RANGES, "tokens": (153_600, 614_400)},
    ),
}
"""Scale rule of plain Muon, or variant under the rule ``original``, to what the runs say.

The costs are those of ``benchmarks/results/rates.md`` and, where cells are counted, of ``transfer.md``, whose cells the
ranges are of.
"""


def measured(variant: str, rule: AdjustLrName) -> Measured:
    """Return what the runs say under a variant and a scale rule, which may be nothing."""
    name = rule if variant == "muon" else variant if rule == "original" else f"{variant} with {rule}"
    nothing = Measured(f"nothing under {name}", f"which was not measured under {name}")
    return MEASURED.get(name, nothing)


UNKNOWN = (
    "larger models, mixtures of experts, larger batches; how decay and AdamW's rate should follow a size"
)
"""What none of these runs says."""

ROOT_OF_WIDTH = ("match_rms_adamw", "spectral")
"""The scale rules that contain the root of the width."""

_EXPONENTS = {"width": WIDTH_EXPONENT["original"], "tokens": -0.395, "batch": 0.5}
"""The law that is followed (marin-community/marin#5951), for updates that grow with the width as under ``original``."""


def powers(rule: AdjustLrName) -> Sizes:
    """Return the exponents of the law under a scale rule, whose root of the width is divided out."""
    width = _EXPONENTS["width"] - 0.5 * (rule in ROOT_OF_WIDTH)
    return {**_EXPONENTS, "width": width}


def factor(before: Sizes, after: Sizes, rule: AdjustLrName) -> float:
    """Return by what the rate changes, over the sizes that ``before`` and ``after`` both have."""
    given = {size: power for size, power in powers(rule).items() if size in before and size in after}
    return math.prod(float((after[size] / before[size]) ** power) for size, power in given.items())


LARGEST = 1e30
"""The largest size that is read; ratios of larger ones overflow."""


def read_sizes(option: str, values: Sequence[str]) -> dict[str, float]:
    """Return the sizes of an option, given as ``["width=512", "tokens=10e9"]``.

    Raises:
        ConfigError: Naming the option and the value, if a name is not in :data:`SIZES` or is given twice, or a size is
            not a number from 1 to :data:`LARGEST`.
    """
    sizes: dict[str, float] = {}
    for value in values:
        name, _, text = value.partition("=")
        try:
            size = float(text)
        except ValueError:
            size = math.nan
        if name not in SIZES or not 1 <= size <= LARGEST:
            accepted = ", ".join(f"{key} ({meaning})" for key, meaning in SIZES.items())
            raise ConfigError(
                f"{option}: must be NAME=NUMBER, as in width=512 or tokens=10e9, with {accepted} and a "
                f"number from 1 to {LARGEST:g}, got {value!r}"
            )
        if name in sizes:
            raise ConfigError(f"{option}: {name} is given twice")
        sizes[name] = size
    return sizes
