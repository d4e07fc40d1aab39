"""How a tuned rate is carried to a run of another size, and what the runs of this repository say of it.

A published law is followed, because it cost little in the runs here, which are of other models than those that it was
fitted on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.updates import WIDTH_EXPONENT, AdjustLrName
from deepspeed_muon.tools.command_line import SIZES

Sizes = Mapping[str, float]
"""The sizes of a run that are known, by their names in :data:`SIZES`."""


MEASURED = ("original", "match_rms_adamw", "spectral", "normuon")
"""The scale rules of plain Muon, and the variant under the rule ``original``, whose rates the runs here measured."""


def measured_name(variant: str, rule: AdjustLrName) -> str:
    """Return a variant under a scale rule as in :data:`MEASURED`; another text if it was not measured."""
    return rule if variant == "muon" else variant if rule == "original" else f"{variant} with {rule}"


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
