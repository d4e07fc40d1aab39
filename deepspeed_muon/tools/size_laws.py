"""How a tuned rate is carried to a run of another size: what was measured in this repository, and published laws.

One published law is followed, because it cost little in the runs here, which are of other models than those that it was
fitted on. The others are printed beside it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.updates import WIDTH_EXPONENT, AdjustLrName

Sizes = Mapping[str, float]
"""The sizes of a run that are known, by their names in :data:`SIZES`."""

SIZES = {
    "width": "hidden size",
    "depth": "layers",
    "tokens": "tokens of the whole run",
    "batch": "tokens in a step",
}
"""What a rate may depend on."""


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
    "larger models and mixtures of experts",
    "larger batches",
    "how weight decay and AdamW's rate should follow a size",
)
"""What none of these runs says."""


ROOT_OF_WIDTH = ("match_rms_adamw", "spectral")
"""The scale rules that contain the root of the width."""


@dataclass(frozen=True, slots=True)
class Law:
    """A published power law of the rate of hidden matrices.

    Attributes:
        exponents: Name of a size to its exponent; the law does not contain the others.
        setup: What it was fitted on, and where it fails.
        source: Where it is published.
    """

    exponents: Sizes
    setup: str
    source: str

    def formula(self) -> str:
        """Return the law as text, as in ``width^-0.15 batch^0.5``."""
        return " ".join(f"{size}^{power:g}" for size, power in self.exponents.items()) or "constant"

    def powers(self, rule: AdjustLrName) -> Sizes:
        """Return the exponents under a scale rule.

        The laws are for updates that grow with the width as those of ``original`` do. The root of the width that other
        rules contain is divided out.
        """
        if rule not in ROOT_OF_WIDTH:
            return self.exponents
        return {**self.exponents, "width": self.exponents.get("width", 0.0) - 0.5}

    def factor(self, before: Sizes, after: Sizes, rule: AdjustLrName) -> float:
        """Return by what the rate changes, over the sizes that ``before`` and ``after`` both have."""
        given = {size: power for size, power in self.powers(rule).items() if size in before and size in after}
        return math.prod(float((after[size] / before[size]) ** power) for size, power in given.items())

    def missing(self, before: Sizes, after: Sizes, rule: AdjustLrName) -> list[str]:
        """Return the sizes of the law that ``before`` or ``after`` lacks."""
        return [size for size in self.powers(rule) if size not in before or size not in after]


LAWS = {
    "marin": Law(
        {"width": WIDTH_EXPONENT["original"], "tokens": -0.395, "batch": 0.5},
        "MuonH, mixtures of experts of width 512 to 1280, 4 to 240 tokens a parameter, no clipping. At 300 to 600 "
        "tokens a parameter the best rate was 1.2 to 1.4 times the law's (marin#7856)",
        "marin-community/marin#5951",
    ),
    "hyperp": Law(
        {"depth": -0.5, "tokens": -0.32, "batch": 0.5},
        "MuonH with residual branches scaled by 1/sqrt(2 depth), constant aspect ratio, base 1e-2 at 8 layers, 10.4e9 "
        "tokens and a batch of 2^21",
        "arXiv 2603.28743",
    ),
    "scion": Law(
        {"tokens": -0.56, "batch": 0.62},
        "unit-norm updates in all layers, up to 1.3B parameters and 138e9 tokens",
        "arXiv 2510.03871",
    ),
    "nanochat": Law(
        {"batch": 0.5},
        "NorMuon at 0.02 with a batch of 2^19; its author calls this not studied. AdamW's rates there: width^-0.5",
        "karpathy/nanochat, base_train.py",
    ),
    "kellerjordan": Law(
        {},
        "original: a claim that the best rate is constant over sizes, without a fit",
        "KellerJordan/Muon#16",
    ),
}
"""Laws by the name that ``--apply`` takes."""

CARRIED_BY = "marin"
"""The law that ``rates`` follows without ``--apply``, over the sizes that it is given: the runs here agree with it."""


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
