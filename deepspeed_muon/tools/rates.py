"""``python -m deepspeed_muon rates CONFIG``: the ``optimizer`` section of Muon for a run of another size.

Reads a DeepSpeed configuration of AdamW or of Muon. Under ``match_rms_adamw`` AdamW's rate serves Muon too. With
``--from`` and ``--to`` Muon's rate is carried from the run on which it was tuned to one of another
size (:mod:`.size_laws`).
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hjson

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.config.values import shown, unknown_key_message
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.updates import WIDTH_EXPONENT
from deepspeed_muon.tools.model_shapes import read_object
from deepspeed_muon.tools.size_laws import (
    CARRIED_BY,
    LAWS,
    ROOT_OF_WIDTH,
    SIZES,
    UNKNOWN,
    Sizes,
    measured,
    read_sizes,
)

_PEAKS = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
"""Keys of ``scheduler.params`` with the number that a group with ``lr`` (without it: with ``muon_lr``) gets."""


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


def add_subcommand(subparsers: Any) -> None:
    """Add the command ``rates`` to the result of ``ArgumentParser.add_subparsers``; its ``run`` executes it."""
    parser = subparsers.add_parser("rates", help="settings for Muon from those of AdamW, at another size")
    parser.add_argument("config", help="a DeepSpeed configuration with AdamW or Muon")
    sizes = ", ".join(f"{size} ({meaning})" for size, meaning in SIZES.items())
    for option, name, text in (
        ("--from", "before", f"the run on which the rate was tuned, as in width=512 tokens=10e9: {sizes}"),
        ("--to", "after", "the run to train"),
    ):
        parser.add_argument(option, dest=name, metavar="NAME=NUMBER", nargs="+", default=[], help=text)
    parser.add_argument("--apply", choices=LAWS, help="carry the rate by this published law alone")
    parser.set_defaults(run=_rates)


def _rates(arguments: argparse.Namespace) -> int:
    proposal = propose(read_object(Path(arguments.config), hjson.loads))
    before, after = read_sizes("--from", arguments.before), read_sizes("--to", arguments.after)
    if (tuned_width := proposal.config().tuned_width) is not None:
        before.setdefault("width", tuned_width)
    evidence = _evidence(proposal, before, after)  # of the rate that was tuned
    carry(proposal, before, after, law_name=arguments.apply)
    # What changed and why, the evidence, and the section to paste.
    lines = []
    for key, reason in proposal.reasons.items():
        lines += _wrapped(f"{key} {json.dumps(proposal.params[key])}: ", reason)
    for note in proposal.notes:
        lines += _wrapped("note: ", note)
    section = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in proposal.params.items()]
    text = ",\n".join(section)
    print("\n".join([*lines, "", *evidence, f'"optimizer": {{"type": "Muon", "params": {{\n{text}\n}}}}']))
    return 0


def propose(configuration: Mapping[str, Any]) -> Proposal:
    """Return the settings of Muon for a DeepSpeed configuration of AdamW or Muon.

    Raises:
        ConfigError: If it has another optimizer, or a setting is invalid.
    """
    section, scheduler = configuration.get("optimizer"), configuration.get("scheduler")
    name = str(section.get("type")).lower() if isinstance(section, Mapping) else ""
    if not isinstance(section, Mapping) or name not in ("adam", "adamw", "muon"):
        raise ConfigError(
            f"optimizer: expected a section of AdamW or Muon, got {shown(section)}; docs/from_deepspeeds_muon.md has "
            f"the settings of other frameworks"
        )
    params = section.get("params") or {}
    if not isinstance(params, Mapping):
        raise ConfigError(f"optimizer.params: must be an object, got {shown(params)}")
    # 1. Settings without a counterpart are left out.
    given = {key: value for key, value in params.items() if value is not None}  # null is the default
    proposal = Proposal({key: value for key, value in given.items() if key in MuonConfig.model_fields})
    unknown = given.keys() - proposal.params.keys()
    proposal.notes += [
        f"left out: {unknown_key_message(key, MuonConfig.model_fields)}" for key in sorted(unknown)
    ]
    # 2. AdamW's defaults are others here.
    if name != "muon":
        proposal.put("adjust_lr_fn", "match_rms_adamw", "updates of AdamW's usual size, 0.2 times the rate")
        for key, default in (("betas", [0.9, 0.999]), ("eps", 1e-8)):
            if key not in proposal.params:
                proposal.put(key, default, "AdamW's default, which is another one here")
    if proposal.rate_key is None:
        proposal.notes.append("no rate is set: write the one that was tuned as lr or muon_lr")
    # 3. The schedule, which overwrites the rates.
    numbers = scheduler.get("params") if isinstance(scheduler, Mapping) else None
    if isinstance(numbers, Mapping):
        proposal.peak = next(((key, numbers[key]) for key in _PEAKS if numbers.get(key) is not None), None)
    proposal.config()  # validates
    return proposal


def carry(proposal: Proposal, before: Sizes, after: Sizes, *, law_name: str | None = None) -> None:
    """Carry Muon's rate from the run on which it was tuned to another one; AdamW's rate stays.

    Args:
        proposal: The settings. Mutated.
        before: The sizes of the run on which the rate was tuned.
        after: The sizes of the run to train.
        law_name: The key of :data:`LAWS` to apply; without it that of :data:`CARRIED_BY`, over the sizes that are known
            of both runs.

    Raises:
        ConfigError: If ``before`` or ``after`` lack a size of the law that ``law_name`` asks for.
    """
    config, params, rate_key = proposal.config(), proposal.params, proposal.rate_key
    rule = config.adjust_lr_fn
    law, runs = LAWS[law_name or CARRIED_BY], measured(config.variant, rule)
    if law_name and (missing := law.missing(before, after, rule)):
        raise ConfigError(f"--apply {law_name}: needs {' and '.join(missing)} in --from and in --to")
    powers = law.powers(rule)
    ratios = {size: after[size] / before[size] for size in powers if size in before and size in after}
    changed = [size for size, ratio in ratios.items() if ratio != 1.0]
    if not changed or rate_key is None:
        return
    if rule not in WIDTH_EXPONENT and law_name is None:
        proposal.notes.append(f"the rate is not carried: how it follows a size under {rule} was not measured")
        return
    # 1. The rate.
    factor = law.factor(before, after, rule)
    source = f"{law.source}: applied because --apply asks for it" if law_name else runs.support
    if not law_name and (beyond := runs.beyond(changed, before, after)):
        source += f"; extrapolated beyond what was measured, {' and '.join(beyond)}"
    formula = " ".join(f"{ratio:.4g}^{powers[size]:g} ({size})" for size, ratio in ratios.items())
    rate = params[rate_key]
    if rate == "auto":
        proposal.notes.append(
            f"lr is 'auto' and stays. For the other size set muon_lr to {factor:.3g} times the learning rate that "
            f"fills it in ({formula}: {source})"
        )
    else:
        proposal.put("muon_lr", three_digits(rate * factor), f"{rate:g} x {factor:.3g} ({formula}: {source})")
    # 2. The decay, whose product with the rate was kept over widths in the measured runs.
    of_width = ratios.get("width", 1.0) ** powers.get("width", 0.0)
    decay = params.get("muon_weight_decay", params.get("weight_decay"))
    if decay and of_width != 1.0 and config.weight_decay_mode != "independent":
        stays = "over widths its product with the rate stays, as in the measured runs"
        if "auto" in (rate, decay):
            proposal.notes.append(f"divide Muon's weight_decay, {shown(decay)}, by {of_width:.3g}: {stays}")
        else:
            proposal.put(
                "muon_weight_decay", three_digits(decay / of_width), f"{decay:g} / {of_width:.3g}: {stays}"
            )
    # 3. What else depends on the rate: AdamW's half, the schedule, and the warning of a width.
    if rate_key == "lr" and config.adam_lr is None and rate != "auto":
        proposal.reasons["lr"] = (
            "AdamW's rate, as tuned; in the measured runs it was the same at all widths"
            + ("" if rule in ROOT_OF_WIDTH else "; this one was Muon's, too: choose adam_lr")
        )
    if proposal.peak is not None and "lr" not in params:
        key, value = proposal.peak
        proposal.notes.append(
            f"scheduler.params.{key}, {shown(value)}, stands for muon_lr: multiply it by {factor:.3g}"
        )
    if "width" in ratios and rate != "auto":
        proposal.put("tuned_width", round(after["width"]), "a much wider model begins with a warning")


def three_digits(value: float) -> float:
    """Return a number rounded to three significant digits."""
    return float(f"{value:.3g}")


def _evidence(proposal: Proposal, before: Sizes, after: Sizes) -> list[str]:
    """Return lines with what was measured, and with what each published law makes of the rate that was tuned."""
    if not before or not after:
        return [
            *_wrapped("", "To carry the rate: --from width=512 tokens=10e9 --to width=1024 tokens=20e9."),
            "",
        ]
    config, rate = proposal.config(), proposal.params.get(proposal.rate_key or "")
    rule, runs = config.adjust_lr_fn, measured(config.variant, config.adjust_lr_fn)
    sizes = [", ".join(f"{name} {value:,.0f}" for name, value in run.items()) for run in (before, after)]
    measured_on = f". Measured on {runs.runs()}." if runs.ranges else ""
    lines = [f"from {sizes[0]} to {sizes[1]}", *_wrapped("  measured here: ", runs.costs + measured_on)]
    lines.append("  published, for adjust_lr_fn 'original' (--apply NAME):")
    if rule in ROOT_OF_WIDTH:
        lines.append(f"    {rule} contains the root of the width: also width^-0.5")
    for name, law in LAWS.items():
        factor, missing = law.factor(before, after, rule), law.missing(before, after, rule)
        text = f"{law.formula()}: x {factor:.3g}"
        if isinstance(rate, (int, float)):
            text += f" = {rate * factor:.3g}"
        if missing:
            text += f" (without {', '.join(missing)})"
        lines += _wrapped(f"    {name:<13} ", f"{text}. {law.setup}; {law.source}")
    return [*lines, *_wrapped("  not known: ", "; ".join(UNKNOWN)), ""]


def _wrapped(first: str, text: str) -> list[str]:
    """Return lines of at most 100 characters; those behind the first one are indented."""
    indent = " " * min(len(first), 18)
    return textwrap.wrap(
        first + text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
