"""Compares the health of a run with the ranges of runs that went well, and suggests what to change.

The ranges of :data:`QUANTITIES` are data. ``good`` is the range over the good runs of ``benchmarks/diagnosis.py``,
rounded outwards, with their raw output in ``benchmarks/results/diagnosis.json`` (small models, 200 steps). A value
outside of ``limits`` is reported; these are wide enough for larger models, of which a step changes matrices by 0.3 % to
3 % of their size at published rates of pretraining. A test compares both with that file.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Level = Literal["good", "look", "bad"]

# Exchanges of fewer seconds in a step are not worth a finding: those of tiny models.
_SHORT_EXCHANGE = 0.1


class Finding(NamedTuple):
    """One result of a diagnosis.

    Attributes:
        level: ``bad``, ``look`` (worth a look) or ``good``.
        key: What it is about, the same in all runs: a name of :data:`QUANTITIES` where it is one of them.
        text: What was measured, and what to change.
    """

    level: Level
    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity that the diagnosis judges.

    Attributes:
        limits: The smallest and the largest value that is not reported; NaN counts as too small.
        too_low, too_high: What is said beyond the limits; a format string over ``value``, ``percent`` (100 times it),
            ``inverse`` (one over it) and ``usual`` (the value over the geometric mean of :attr:`good`).
        level: The level of the finding.
        low_level: That of a value that is too small, where it differs.
        good: The smallest and the largest value in good runs; ``None`` for what is always the same there.
        label: How the line after the first steps names it, with the value; empty for what that line leaves out.
        details: What the line adds; a format string over all values of the run, left out where one is missing.
        unit: The format of a value.
    """

    limits: tuple[float, float]
    too_low: str = ""
    too_high: str = ""
    level: Level = "look"
    low_level: Level | None = None
    good: tuple[float, float] | None = None
    label: str = ""
    details: str = ""
    unit: str = ".3g"


QUANTITIES: dict[str, Quantity] = {
    # Counters of the check that every result passes: any block that failed it is reported.
    "failed": Quantity(
        (0, 0), "", "{value:.0f} updates were left out because they were wrong in fp32 too.", level="bad"
    ),
    "redone": Quantity(
        (0, 0),
        too_high="{value:.0f} updates were recomputed in fp32. If the number grows, set ns_dtype to fp32.",
    ),
    # The cosine of the angle between update and direction. 1e-300 excludes 0, where the update does not descend.
    "alignment": Quantity(
        (1e-300, math.inf), "Updates point away from their directions (alignment at or below 0).", level="bad"
    ),
    "skipped": Quantity(
        (0, 0.25),
        too_high="{value:.0%} of the steps were skipped, because gradients were not finite. In fp16 the loss scale or "
        "the activations overflow: train in bf16, or lower initial_scale_power or the static loss_scale.",
        level="bad",
        good=(0, 0),
        label="skipped steps {}",
        unit=".0%",
    ),
    # The median, over the clipped and unclipped ones of the last steps, of the factor applied to the gradients.
    "clip_coefficient": Quantity(
        (1e-4, math.inf),
        "Gradients are clipped to nothing, at a median coefficient of {value:.1g}. They are not what you think (a loss "
        "that is summed, one layer that explodes), or gradient_clipping is far too small.",
        level="bad",
        good=(0.092, 1),
        label="median coefficient of clipping {}",
        details="least {clip_least:.3g}, {clipped:.0%} of the steps clipped",
    ),
    # The most of the last steps in a row with a coefficient below that limit, where the median does not show it.
    "clip_stalled": Quantity(
        (0, 19),
        too_high="Gradients were clipped to nothing in {value:.0f} steps in a row, and AdamW's half stood "
        "still: one layer exploded, or the loss was of another scale.",
        level="bad",
    ),
    "adamw_share": Quantity(
        (0, 0.95),
        too_high="AdamW trains {value:.0%} of the elements: embeddings are most of what is trained, or 'exclude', the "
        "param groups or the routing rules leave Muon few matrices or none (deepspeed_muon.routes(engine) says why).",
        level="bad",
        good=(0.1, 0.26),
        label="elements that AdamW trains {}",
        unit=".0%",
    ),
    "routers": Quantity(
        (0, 0),
        too_high="Muon trains the router of a mixture of experts, because the settings say so: its rows are nearly "
        "dependent and orthogonalisation gives all of them one size. Take it out of 'include' or Muon's group.",
        level="bad",
    ),
    "adamw_over_weight": Quantity(
        (0, 0.2),
        too_high="AdamW trains matrices that the settings exclude from Muon, at a rate that was meant for embeddings: "
        "a step changes them by about {value:.0%} of their size. Lower adam_lr, or give the embeddings their own param "
        "group.",
        level="bad",
    ),
    # RMS of a step over RMS of the weights. Fine-tuning and long runs are below the lower limit on purpose: that is
    # only "look", and no factor is suggested, because the best rate falls with the tokens of a run.
    "update_over_weight": Quantity(
        (1.5e-3, 0.2),
        "At the highest rate a step changes the matrices by {percent:.2g} % of their size: right for fine-tuning, and "
        "low for pretraining on few tokens. Compare with python -m deepspeed_muon rates.",
        "At the highest rate a step changes the matrices by {value:.0%} of their size: the rate is too high. Try "
        "muon_lr (or lr) / {usual:.2g}.",
        level="bad",
        low_level="look",
        good=(0.0059, 0.03),
        label="change of the matrices in a step {}",
        unit=".2%",
    ),
    # RMS of Muon's steps over that of AdamW's. Judged only where both have one rate: two are each tuned for themselves.
    "update_over_adamw": Quantity(
        (0.1, 5),
        "Updates are {value:.2g} times as large as AdamW's would be at the same rate: this scale rule takes AdamW's "
        "rate * {inverse:.2g}. Set muon_lr to it, or adjust_lr_fn to match_rms_adamw.",
        "Updates are {value:.3g} times AdamW's at the same rate: this scale rule takes AdamW's rate / {value:.2g}. Set "
        "muon_lr to it, or adjust_lr_fn to match_rms_adamw.",
        level="bad",
        good=(0.76, 15),
        label="updates as a multiple of AdamW's {}",
    ),
    # Root mean square distance of the singular values from the band of the schedule.
    "orthogonality_error": Quantity(
        (0, 0.6),
        too_high="The singular values of the updates are {value:.2f} away from the band of the schedule: the gradients "
        "have few directions (few tokens in a step). Use a larger batch, more ns_steps or polar_express.",
        good=(0.046, 0.13),
        label="orthogonality error {}",
        unit=".2f",
    ),
    "time_optimizer": Quantity(
        (0, 0.75),
        too_high="The optimizer takes {value:.0%} of the time between two samples: docs/measured.md says how long it "
        "should take. Compare time_gather and time_newton_schulz, and accumulate more micro-batches.",
        label="share of the optimizer in the time {}",
        unit=".0%",
    ),
    **{
        f"wire_error_{kind}": Quantity(
            (0, 0.01),
            too_high=f"wire_error_{kind} is {{value:.3f}}: a few elements are much larger than their neighbours.",
        )
        for kind in ("direction", "update")
    },
}
"""What is judged of a sample, by the name of its event without "Train/Muon/"."""


def diagnose(values: Mapping[str, Any]) -> list[Finding]:
    """Return what is out of its range in a sample, in the order of :data:`QUANTITIES`.

    Args:
        values: A sample by event name. What is missing is not judged.
    """
    results: list[Finding] = []
    for name, quantity in QUANTITIES.items():
        if name not in values or (name == "update_over_adamw" and values.get("two_rates") != 0):
            continue
        if name == "clip_stalled" and any(finding.key == "clip_coefficient" for finding in results):
            continue
        measured, (low, high) = values[name], quantity.limits
        # A rate that may still rise, or was higher before the run was resumed, is too low only at its highest.
        lowest_judged = values.get(f"{name}_expected", measured)
        is_high = measured > high
        if not is_high and low <= lowest_judged:
            continue
        value = measured if is_high else lowest_judged
        # The suggested rate moves the value to the geometric middle of the good runs: 0.0133 for 0.0059 to 0.03.
        usual = math.sqrt(math.prod(quantity.good)) if quantity.good else 0.0
        template = quantity.too_high if is_high else quantity.too_low
        if not template:
            continue  # NaN, where nothing is too small
        text = template.format(
            value=value,
            percent=100 * value,
            inverse=1 / value if value else math.inf,
            usual=value / usual if usual else math.inf,
        )
        level = quantity.level if is_high else quantity.low_level or quantity.level
        if name == "adamw_share" and value < 1:
            level = "look"  # large embeddings beside small matrices or adapters may be what the user wants
        results.append(Finding(level, name, text))
    # Fractions of the inner step; nothing is compared where none was timed.
    exchange = values.get("time_gather", 0.0) + values.get("time_scatter", 0.0)
    is_long = exchange * values.get("seconds", 0.0) >= _SHORT_EXCHANGE
    if is_long and exchange > values.get("time_newton_schulz", math.inf):
        text = (
            f"The exchanges take {exchange:.0%} of the inner step, more than Newton-Schulz: the network, or unbalanced "
            f"ranks."
        )
        results.append(Finding("look", "time_exchange", text))
    return results


def line(values: Mapping[str, Any]) -> str:
    """Return the quantities of a sample with the ranges of good runs, for the log.

    Args:
        values: As for :func:`diagnose`, with the measurements by matrix under ``matrices`` if they are known.
    """
    shown = []
    for name, quantity in QUANTITIES.items():
        if name not in values or not quantity.label:
            continue
        notes = []
        if quantity.good is not None:
            low, high = (format(bound, quantity.unit) for bound in quantity.good)
            notes.append(f"{low} to {high} in good runs")
        with contextlib.suppress(KeyError):
            notes += [quantity.details.format(**values)] if quantity.details else []
        if name == "update_over_weight" and (ratio_of := _ratio_of_matrices(values)):
            ends = (bound(ratio_of, key=ratio_of.__getitem__) for bound in (min, max))
            notes.append("now " + " to ".join(f"{100 * ratio_of[end]:.2g}% of {end}" for end in ends))
        text = quantity.label.format(format(values[name], quantity.unit))
        shown.append(text + (f" ({'; '.join(notes)})" if notes else ""))
    return ", ".join(shown)


def _ratio_of_matrices(values: Mapping[str, Any]) -> dict[str, float]:
    """Return ``update_over_weight`` of the sampled matrices by name, at the rate of the step."""
    return {
        matrix: measured["update_over_weight"]
        for matrix, measured in values.get("matrices", {}).items()
        if "update_over_weight" in measured
    }
