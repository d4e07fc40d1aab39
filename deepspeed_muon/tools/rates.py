"""``python -m deepspeed_muon rates CONFIG``: the ``optimizer`` section of Muon for a run of another size.

Reads a DeepSpeed configuration of AdamW or of Muon. Under ``match_rms_adamw`` AdamW's rate serves Muon too. With
``--from`` and ``--to`` Muon's rate is carried from the run on which it was tuned to one of another size, by a published
law, because it cost little in the runs here, which are of other models than those that it was fitted on.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hjson

from deepspeed_muon.config.settings import MUON_TYPES, MuonConfig
from deepspeed_muon.config.values import shown
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.updates import WIDTH_EXPONENT, AdjustLrName
from deepspeed_muon.tools.command_line import SIZES, Output
from deepspeed_muon.tools.model_shapes import read_object

_PEAKS = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
"""Keys of ``scheduler.params`` with the number that a group with ``lr`` (without it: with ``muon_lr``) gets."""

_ADAMW_ONLY = {
    "torch_adam",
    "bias_correction",
    "amsgrad",
    "set_grad_none",
    "foreach",
    "fused",
    "fp32_optimizer_states",
}
"""Options of AdamW in DeepSpeed that say how it computes."""

Sizes = Mapping[str, float]
"""The sizes of a run that are known, by their names in :data:`SIZES`."""

MEASURED = ("original", "match_rms_adamw", "spectral", "normuon")
"""The scale rules of plain Muon, and the variant under the rule ``original``, whose rates the runs here measured."""

_ROOT_OF_WIDTH = ("match_rms_adamw", "spectral")
"""The scale rules that contain the root of the width."""

_EXPONENTS = {"width": WIDTH_EXPONENT["original"], "tokens": -0.395, "batch": 0.5}
"""The law that is followed (marin-community/marin#5951), for updates that grow with the width as under ``original``."""


def _powers(rule: AdjustLrName) -> Sizes:
    """Return the exponents of the law under a scale rule, whose root of the width is divided out."""
    return {**_EXPONENTS, "width": _EXPONENTS["width"] - 0.5 * (rule in _ROOT_OF_WIDTH)}


def factor(ratios: Sizes, rule: AdjustLrName) -> float:
    """Return by what the rate changes where the sizes of a run change by these factors."""
    exponents = _powers(rule)
    return math.prod(float(ratio ** exponents[size]) for size, ratio in ratios.items())


@dataclass(slots=True)
class Proposal:
    """Settings of Muon, with what is said about them.

    Attributes:
        params: ``optimizer.params``.
        reasons: For the keys of ``params`` that were made or changed, why they have their values.
        notes: What to decide or to set by hand.
        peak: Key and value of the schedule's rate, if the configuration has one.
    """

    params: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    peak: tuple[str, Any] | None = None

    def put(self, key: str, value: object, reason: str) -> None:
        """Set a key with its reason."""
        self.params[key], self.reasons[key] = value, reason

    def config(self) -> MuonConfig:
        """Return the validated settings, without the "auto" values that the Trainer fills in later."""
        return MuonConfig.from_params({key: value for key, value in self.params.items() if value != "auto"})

    @property
    def rate_key(self) -> str | None:
        """The key of Muon's rate: ``muon_lr``, else ``lr``; ``None`` if a default trains."""
        return next((key for key in ("muon_lr", "lr") if key in self.params), None)


def run(arguments: argparse.Namespace) -> Output:
    """Run the command ``rates``."""
    proposal = propose(read_object(Path(arguments.config), hjson.loads))
    before, after = _read_sizes("--from", arguments.before), _read_sizes("--to", arguments.after)
    if unpaired := ", ".join(sorted(before.keys() ^ after.keys())):
        raise ConfigError(
            f"--from and --to both need {unpaired}: a rate is carried from the run on which it was tuned to another"
        )
    carry(proposal, before, after)
    proposal.config()  # refuses what a run would refuse
    # What changed and why, and the section to paste.
    lines = []
    for key, reason in proposal.reasons.items():
        lines += _wrapped(f"{key} {json.dumps(proposal.params[key])}: ", reason)
    for note in proposal.notes:
        lines += _wrapped("note: ", note)
    section = ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in proposal.params.items()
    )
    section = f'"optimizer": {{"type": "Muon", "params": {{\n{section}\n}}}}'
    hint = "To carry the rate: --from width=512 tokens=10e9 --to width=1024 tokens=20e9."
    if after:
        hint = (
            "The law was measured on models of at most 7M parameters; beyond them it is extrapolated: "
            "docs/measured.md, Rates over sizes."
        )
    return Output(proposal.params, "\n".join([*lines, "", *_wrapped("", hint), "", section]))


def propose(configuration: Mapping[str, Any]) -> Proposal:
    """Return the settings of Muon for a DeepSpeed configuration of AdamW or Muon.

    Raises:
        ConfigError: If it has another optimizer, or a setting is invalid or unknown.
    """
    section, scheduler = configuration.get("optimizer"), configuration.get("scheduler")
    name = str(section.get("type")).lower() if isinstance(section, Mapping) else ""
    if "optimizer" not in configuration:
        raise ConfigError(
            'no section "optimizer": this command reads a DeepSpeed configuration. Where the Trainer or Accelerate '
            'makes the optimizer, write its settings into one: {"optimizer": {"type": "AdamW", "params": {"lr": ...}}}'
        )
    if not isinstance(section, Mapping) or name not in ("adam", "adamw", *MUON_TYPES):
        got = section.get("type") if isinstance(section, Mapping) else section
        raise ConfigError(
            f"optimizer: expected a section with the type AdamW or Muon, got {shown(got)}; for other frameworks see "
            f"docs/from_deepspeeds_muon.md"
        )
    params = section.get("params") or {}
    if not isinstance(params, Mapping):
        raise ConfigError(f"optimizer.params: must be an object, got {shown(params)}")
    # 1. What DeepSpeed's AdamW alone has is left out.
    given = {key: value for key, value in params.items() if value is not None}  # null is the default
    proposal = Proposal({key: value for key, value in given.items() if key not in _ADAMW_ONLY})
    for key in sorted(given.keys() & _ADAMW_ONLY):
        proposal.notes.append(f"left out: {key}, an option of DeepSpeed's AdamW without a counterpart here")
    # 2. The defaults here differ from AdamW's.
    if name in ("adam", "adamw"):
        proposal.put("adjust_lr_fn", "match_rms_adamw", "updates of AdamW's usual size, 0.2 times the rate")
        defaults: list[tuple[str, Any, str]] = [("betas", [0.9, 0.999], ""), ("eps", 1e-8, "")]
        # DeepSpeed's AdamW has no decay by default, torch's has.
        if given.get("torch_adam") and (name == "adamw" or given.get("adam_w_mode", True)):
            defaults.append(("weight_decay", 0.01, "torch's "))
        for key, default, whose in defaults:
            if key not in proposal.params:
                proposal.put(key, default, f"{whose}AdamW's default; the default here differs")
    if proposal.rate_key is None:
        proposal.notes.append("no rate is set: write the one that was tuned as lr or muon_lr")
    # 3. The schedule, which overwrites the rates.
    numbers = scheduler.get("params") if isinstance(scheduler, Mapping) else None
    if isinstance(numbers, Mapping):
        proposal.peak = next(((key, numbers[key]) for key in _PEAKS if numbers.get(key) is not None), None)
    proposal.config()  # validates
    return proposal


def carry(proposal: Proposal, before: Sizes, after: Sizes) -> None:
    """Carry Muon's rate from the run on which it was tuned to another one; AdamW's rate stays.

    Args:
        proposal: The settings. Mutated.
        before: The sizes of the run on which the rate was tuned.
        after: The sizes of the run to train.
    """
    config, params, rate_key = proposal.config(), proposal.params, proposal.rate_key
    rule, variant = config.adjust_lr_fn, config.variant
    exponents = _powers(rule)
    # As in MEASURED; another text if it was not measured.
    name = rule if variant == "muon" else variant if rule == "original" else f"{variant} with {rule}"
    ratios = {size: after[size] / before[size] for size in exponents if size in before and size in after}
    if set(ratios.values()) <= {1.0} or rate_key is None:
        return
    if rule not in WIDTH_EXPONENT:
        proposal.notes.append(f"the rate is not carried: how it follows a size under {rule} was not measured")
        return
    # 1. The rate.
    times = factor(ratios, rule)
    source = "confirmed by measured runs" if name in MEASURED else f"not measured under {name}"
    formula = " ".join(f"{ratio:.4g}^{exponents[size]:g} ({size})" for size, ratio in ratios.items())
    rate = params[rate_key]
    if rate == "auto":
        proposal.notes.append(
            f"lr is 'auto' and stays. For the other size set muon_lr to {times:.3g} times the learning rate that "
            f"fills it in ({formula}; {source})"
        )
    else:
        proposal.put("muon_lr", three_digits(rate * times), f"{rate:g} x {times:.3g} ({formula}; {source})")
    # 2. The decay, whose product with the rate was kept over widths in the measured runs.
    of_width = ratios.get("width", 1.0) ** exponents["width"]
    decay = params.get("muon_weight_decay", params.get("weight_decay"))
    if decay and of_width != 1.0 and config.weight_decay_mode != "independent":
        stays = "its product with the rate stays the same over widths, as in the measured runs"
        if "auto" in (rate, decay):
            proposal.notes.append(f"divide Muon's weight_decay, {shown(decay)}, by {of_width:.3g}: {stays}")
        else:
            proposal.put(
                "muon_weight_decay", three_digits(decay / of_width), f"{decay:g} / {of_width:.3g}: {stays}"
            )
    # 3. What else depends on the rate: AdamW's half and the schedule.
    if rate_key == "lr" and config.adam_lr is None and rate != "auto":
        proposal.reasons["lr"] = (
            "AdamW's rate, as tuned; in the measured runs it was the same at all widths"
            + ("" if rule in _ROOT_OF_WIDTH else "; this one was Muon's, too: choose adam_lr")
        )
    if proposal.peak is not None and "lr" not in params:
        key, value = proposal.peak
        proposal.notes.append(
            f"scheduler.params.{key}, {shown(value)}, stands for muon_lr: multiply it by {times:.3g}"
        )


def _read_sizes(option: str, values: Sequence[str]) -> Sizes:
    """Return the sizes of an option, given as ``["width=512", "tokens=10e9"]``."""
    sizes: dict[str, float] = {}
    for value in values:
        name, _, text = value.partition("=")
        try:
            size = float(text)
        except ValueError:
            size = math.nan
        if name not in SIZES or not 1 <= size < math.inf:
            accepted = ", ".join(f"{key} ({meaning})" for key, meaning in SIZES.items())
            raise ConfigError(
                f"{option}: must be NAME=NUMBER, as in width=512 or tokens=10e9, with {accepted} and a number of at "
                f"least 1, got {value!r}"
            )
        if sizes.setdefault(name, size) != size:
            raise ConfigError(f"{option}: has two numbers for {name}: leave one out")
    return sizes


def three_digits(value: float) -> float:
    """Return a number rounded to three significant digits."""
    return float(f"{value:.3g}")


def _wrapped(first: str, text: str) -> list[str]:
    """Return lines of at most 100 characters; those behind the first one are indented."""
    indent = " " * min(len(first), 18)
    return textwrap.wrap(
        first + text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
