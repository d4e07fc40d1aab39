"""``python -m deepspeed_muon rates CONFIG``: the settings of this optimizer, each with its reason.

The input is a DeepSpeed configuration whose optimizer is AdamW, this Muon or DeepSpeed's, or the arguments of torch's,
Megatron-LM's, verl's, Dion's or xtuner's Muon. With ``--from`` and ``--to`` (or ``--model``) the rate is carried
from the run on which it was tuned to one of another size (:mod:`deepspeed_muon.forecast.size_laws`). With ``--check``,
one step with random gradients measures the size of the updates at two widths.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hjson
import torch

from deepspeed_muon.config.settings import DEFAULT_ADAM_LR, DEFAULT_MUON_LR, MuonConfig
from deepspeed_muon.config.values import RENAMED, shown, unknown_key_message
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.forecast.frameworks import framework_settings
from deepspeed_muon.forecast.model_shapes import build_model, load_model, model_config, read_object
from deepspeed_muon.forecast.size_laws import (
    CARRIED_BY,
    LAWS,
    MEASURED,
    MEASURED_ON,
    ROOT_OF_WIDTH,
    SIZES,
    UNKNOWN,
    Sizes,
    read_sizes,
)
from deepspeed_muon.math.updates import shape_scale
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.param_groups import rate_warning, width_exponent
from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.routing.route import Route, model_width, summarize_routes
from deepspeed_muon.routing.rules import route_parameters
from deepspeed_muon.variants import VARIANTS

_ADAM = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam", "torch_adam")
_MEGATRON = {
    "adam_beta1",
    "adam_beta2",
    "muon_momentum",
    "muon_scale_mode",
    "muon_extra_scale_factor",
    "muon_match_adamw_update_rms",
}
_KINDS = {
    "adamw": "AdamW",
    "deepspeed": "DeepSpeed's Muon or this one, which have the same keys",
    "torch": "torch.optim.Muon",
    "megatron": "Megatron-LM's Muon",
    "dion": "Dion's Muon or xtuner's",
}
_QUINTIC = [3.4445, -4.775, 2.0315]  # the default of torch.optim.Muon, and of ns_schedule here
_ADAM_HALF = "AdamW's half; written out because the default here differs"


def add_subcommand(subparsers: Any) -> None:
    """Add the command ``rates`` to the result of ``ArgumentParser.add_subparsers``; its ``run`` executes it."""
    parser = subparsers.add_parser(
        "rates", help="convert the settings of AdamW or another Muon, and carry its rate"
    )
    parser.add_argument(
        "config", help="a DeepSpeed configuration, or another framework's arguments as a JSON object"
    )
    sizes = ", ".join(f"{size} ({meaning})" for size, meaning in SIZES.items())
    parser.add_argument(
        "--from",
        dest="before",
        metavar="NAME=NUMBER",
        nargs="+",
        default=[],
        help=f"the run on which the rate was tuned, as in width=512 tokens=10e9: {sizes}",
    )
    parser.add_argument(
        "--to",
        dest="after",
        metavar="NAME=NUMBER",
        nargs="+",
        default=[],
        help="the run to train, likewise; width and depth come from --model if they are not given",
    )
    parser.add_argument("--model", help="as for plan: says which parameters go to Muon")
    parser.add_argument(
        "--apply",
        choices=LAWS,
        help="carry muon_lr by this published law alone, also over the width",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--check",
        action="store_true",
        help="with --model: measure the updates of one step with random gradients at two widths; the exit status is 1 "
        "if they do not have the size that the scale rule says",
    )
    parser.set_defaults(run=_rates)


def _rates(arguments: argparse.Namespace) -> int:
    if arguments.check and not arguments.model:
        raise ConfigError("--check needs --model: a preset, a config.json, or a folder with one")
    # 1. The settings at the size where the rate was tuned.
    kind, translation = translate(read_object(Path(arguments.config), hjson.loads))
    routes = route_parameters(load_model(arguments.model), translation.config()) if arguments.model else []
    before, after = read_sizes("--from", arguments.before), read_sizes("--to", arguments.after)
    if (tuned_width := translation.config().tuned_width) is not None:
        before.setdefault("width", tuned_width)
    after = {**_sizes_of_model(routes), **after}
    # 2. The rate at the other size, beside what others publish.
    published = _published(translation, before, after)
    carry(translation, before, after, law_name=arguments.apply)
    report = {
        "read_as": _KINDS[kind],
        "from": before,
        "to": after,
        "optimizer": {"type": "Muon", "params": translation.settings},
        "reasons": translation.reasons,
        "left_out": translation.left_out,
        "notes": translation.notes,
        "measured": MEASURED.get(_rule_of(translation.config()), "nothing under this rule"),
        "published": published,
        "unknown": list(UNKNOWN),
    }
    print(json.dumps(report, indent=2) if arguments.json else _text(report, applied=arguments.apply))
    if routes and not arguments.json:
        print(f"\n{summarize_routes(routes)}")
    return _check(model_config(arguments.model), translation.config()) if arguments.check else 0


def _sizes_of_model(routes: Sequence[Route]) -> dict[str, float]:
    """Return width and depth of a model; the depth is one more than the largest first number in a name."""
    numbers = [re.search(r"\.(\d+)\.", route.name) for route in routes]  # layers.31.mlp: 31
    depth = max((int(number[1]) + 1 for number in numbers if number), default=0)
    return {name: size for name, size in (("width", model_width(routes)), ("depth", depth)) if size}


def _rule_of(config: MuonConfig) -> str:
    """Return the variant if it has a size of updates of its own, else the scale rule."""
    return config.adjust_lr_fn if VARIANTS[config.variant].apply is None else config.variant


def _published(translation: Translation, before: Sizes, after: Sizes) -> list[dict[str, Any]]:
    """Return what each published law makes of the rate that was tuned, over the sizes that are given."""
    config = translation.config()
    rates = [translation.settings.get(key) for key in ("muon_lr", "lr")]
    rate = None if "auto" in rates else config.muon_defaults()["lr"]
    rows = []
    for name, law in LAWS.items():
        factor = law.factor(before, after, config.adjust_lr_fn)
        row: dict[str, Any] = {"name": name, "formula": law.formula(), "factor": _three_digits(factor)}
        row["muon_lr"] = None if rate is None else _three_digits(rate * factor)
        row["without"] = law.missing(before, after, config.adjust_lr_fn)
        rows.append({**row, "setup": law.setup, "source": law.source})
    return rows


def _text(report: Mapping[str, Any], applied: str | None) -> str:
    """Return the report as text: settings with their reasons, evidence, and the section to paste."""
    settings, before, after = report["optimizer"]["params"], report["from"], report["to"]

    def sizes(values: Sizes) -> str:
        return ", ".join(f"{name} {value:,.0f}" for name, value in values.items())

    # 1. The settings.
    shown_values = {key: json.dumps(value) for key, value in settings.items()}
    key_width, value_width = (
        max(map(len, texts), default=0) for texts in (shown_values, shown_values.values())
    )
    lines = [f"read as {report['read_as']}", ""]
    for key, value in shown_values.items():
        lines += _wrapped(f"  {key:<{key_width}}  {value:<{value_width}}  ", report["reasons"][key])
    for key, reason in report["left_out"].items():
        lines += _wrapped(f"  {key:<{key_width}}  left out: ", reason)
    for note in report["notes"]:
        lines += ["", *_wrapped("note: ", note)]
    # 2. The evidence.
    lines.append("")
    if before and after:
        lines.append(f"from {sizes(before)} to {sizes(after)}")
        lines += _wrapped("  measured here   ", f"{report['measured']}. Measured on {MEASURED_ON}.")
        status = f"{applied} is applied" if applied else "--apply NAME carries muon_lr by one of them alone"
        lines.append(f"  published ({status})")
        if settings.get("adjust_lr_fn") in ROOT_OF_WIDTH:
            lines.append(
                f"    for 'original'; {settings['adjust_lr_fn']} contains the root of the width: also width^-0.5"
            )
        for law in report["published"]:
            rate = "" if law["muon_lr"] is None else f" = {law['muon_lr']:g}"
            without = f" (without {', '.join(law['without'])})" if law["without"] else ""
            lines.append(f"    {law['name']:<13} {law['formula']}: x {law['factor']:g}{rate}{without}")
            lines += _wrapped(" " * 18, f"{law['setup']}; {law['source']}")
        lines += _wrapped("  not known       ", "; ".join(report["unknown"]))
    else:
        lines += _wrapped(
            "",
            "To carry the rate to another size: --from width=512 depth=8 tokens=10e9 batch=524288 (what is known of "
            "the run on which it was tuned), and --to or --model.",
        )
    # 3. The section.
    params = ",\n".join(f"  {json.dumps(key)}: {value}" for key, value in shown_values.items())
    return "\n".join([*lines, "", f'"optimizer": {{"type": "Muon", "params": {{\n{params}\n}}}}'])


def _wrapped(first: str, text: str) -> list[str]:
    """Return lines of at most 100 characters; those behind the first one are indented to its end."""
    return textwrap.wrap(
        text,
        100,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def carry(translation: Translation, before: Sizes, after: Sizes, *, law_name: str | None = None) -> None:
    """Carry Muon's rate from the run on which it was tuned to another one; AdamW's rate stays.

    Args:
        translation: The settings. Mutated.
        before: The sizes of the run on which the rate was tuned.
        after: The sizes of the run to train.
        law_name: The key of :data:`LAWS` to apply; without it that of :data:`CARRIED_BY`, over the
            sizes that are known of both runs.

    Raises:
        ConfigError: If ``before`` or ``after`` lack a size of the law that ``law_name`` asks for.
    """
    config = translation.config()
    exponent, tuned, width = width_exponent(config), before.get("width"), after.get("width")
    law = LAWS[law_name or CARRIED_BY]
    powers = law.powers(config.adjust_lr_fn)
    if law_name and (missing := law.missing(before, after, config.adjust_lr_fn)):
        raise ConfigError(f"--apply {law_name}: needs {' and '.join(missing)} in --from and in --to")
    ratios = {size: after[size] / before[size] for size in powers if size in before and size in after}
    if any(ratio != 1.0 for ratio in ratios.values()):
        if exponent is None and law_name is None:
            translation.notes.append(
                f"the rate is not carried to the other size: the measured runs do not say how it follows one under "
                f"{_rule_of(config)}"
            )
        else:
            factors = " ".join(f"{ratio:.4g}^{powers[size]:g} ({size})" for size, ratio in ratios.items())
            source = (
                f"{law.source}: applied because --apply asks for it"
                if law_name
                else "which the runs here agree with"
            )
            _multiply_rate(
                translation,
                law.factor(before, after, config.adjust_lr_fn),
                ratios.get("width", 1.0) ** powers.get("width", 0.0),
                f"{factors}: {source}",
            )
    if exponent and tuned:
        reason = "the width that the rate is for: training a much wider model begins with a warning"
        translation.put("tuned_width", round(width or tuned), reason)


def _multiply_rate(translation: Translation, factor: float, of_width: float, reason: str) -> None:
    """Give Muon a rate of its own, ``factor`` times the one that it has.

    The decay is divided by ``of_width``, the part of the factor that follows the width: over widths its product with
    the rate was kept in the measured runs. Over tokens and batch the decay stays.
    """
    settings, config = translation.settings, translation.config()
    key = "lr" if settings.get("muon_lr") is None else "muon_lr"
    rate, decay = settings[key], config.muon_defaults()["weight_decay"]
    if rate == "auto":
        translation.notes.append(
            f"lr is 'auto' and stays. For the other size set muon_lr to {factor:.3g} times the learning rate that "
            f"fills it in ({reason}), and adam_lr to that learning rate"
        )
        return
    if factor == 1.0:
        translation.reasons[key] += f"; {reason}"
        return
    # The rates stand first. AdamW keeps the lr that both had.
    rest = {name: value for name, value in settings.items() if name != key}
    settings.clear()
    translation.put("muon_lr", _three_digits(rate * factor), f"{rate:g} x {factor:.3g} ({reason})")
    if key == "lr" and rest.get("adam_lr") is None:
        del translation.reasons["lr"]
        translation.put("adam_lr", rate, "as tuned: in the measured runs it was the same at all widths")
    settings.update(rest)
    if config.weight_decay_mode == "independent":
        return  # its decay is not multiplied by the rate
    if "auto" in (settings.get("muon_weight_decay"), settings.get("weight_decay")):
        translation.notes.append(
            f"weight_decay is 'auto' and stays: its product with Muon's rate becomes {factor:.3g} of what it was"
        )
    elif decay and of_width != 1.0:
        translation.put(
            "muon_weight_decay",
            _three_digits(decay / of_width),
            f"{decay:g} / {of_width:.3g}: over widths its product with the rate stays, as in the measured runs",
        )


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _check(model: Mapping[str, Any], config: MuonConfig) -> int:
    """Print the sizes of the updates at two widths; return 1 if one deviates from the scale rule."""
    if "hidden_size" not in model:
        raise ConfigError("--check: the model's config.json has no hidden_size that could be divided")
    # The wider one of the two models has a width of at most 512: a width of 4096 is divided by 8, and by 16.
    shrink = max(1, 2 ** math.ceil(math.log2(model["hidden_size"] / 512)))
    full_width, half_width = (measured_sizes(model, config, factor) for factor in (shrink, 2 * shrink))
    print(
        f"\nsize of an update over the rate, models of 1/{2 * shrink} and 1/{shrink} of the width, two layers"
    )
    wrong = 0
    for name, (shape, size, rule) in full_width.items():
        if name not in half_width:
            raise ConfigError(f"--check: at half the width {name} goes to AdamW: take a wider model")
        half_shape, half_size, half_rule = half_width[name]
        # Newton-Schulz yields singular values between 0.7 and 1.2.
        right = all(0.7 < ratio < 1.25 for ratio in (size / rule, half_size / half_rule))
        wrong += not right
        print(
            f"  {name:<44} {half_shape:>12} {half_size:8.4f} {shape:>12} {size:8.4f}  ratio {size / half_size:.2f}"
            + ("" if right else f"  wrong: the rule says {half_rule:.4f} and {rule:.4f}")
        )
    return int(wrong > 0)


class Translation:
    """Settings of this optimizer, built step by step from those of a source optimizer.

    Attributes:
        source: Settings of the source optimizer that have not been translated yet.
        settings: The resulting ``optimizer.params``.
        reasons: For each key of ``settings``, why it has its value.
        left_out: For each key of the source optimizer without a counterpart, why it has none.
        notes: What to decide or to set by hand.
    """

    def __init__(self, source: Mapping[str, Any]) -> None:
        self.source = dict(source)
        self.settings: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.notes: list[str] = []

    def put(self, key: str, value: object, reason: str) -> None:
        """Set a key of ``settings`` with its reason."""
        self.settings[key], self.reasons[key] = value, reason

    def take(self, source_key: str, default: object, reason: str, *, key: str = "") -> None:
        """Move a setting of the source optimizer, or its default there, to ``key`` (by default the same name)."""
        self.put(key or source_key, self.source.pop(source_key, default), reason)

    def config(self) -> MuonConfig:
        """Return the validated settings, without the "auto" values that Hugging Face integrations fill in later."""
        return MuonConfig.from_params({key: value for key, value in self.settings.items() if value != "auto"})

    def take_rest(self) -> None:
        """Move all remaining settings to their names here; those without one are left out, with a remedy."""
        for key, value in self.source.items():
            name = RENAMED.get(key, key)
            if name in MuonConfig.model_fields:
                self.put(name, value, "the same" if name == key else f"another name of {key}")
            else:
                self.left_out[key] = unknown_key_message(key, MuonConfig.model_fields)


def translate(content: Mapping[str, Any]) -> tuple[str, Translation]:
    """Return the kind of the source optimizer (a key of ``_KINDS``) and its translated settings.

    Args:
        content: A DeepSpeed configuration, or Megatron-LM's arguments.

    Raises:
        ConfigError: If the optimizer cannot be translated, or the translated settings are invalid.
    """
    section = content.get("optimizer")
    # A DeepSpeed configuration has a section; Megatron-LM's arguments are flat, with the optimizer's name as a string.
    if isinstance(section, Mapping):
        type_name, params = str(section.get("type", "")), section.get("params") or {}
    else:
        type_name, params = str(section or ""), content
    if not isinstance(params, Mapping):
        raise ConfigError(f"optimizer.params: must be an object, got {shown(params)}")
    kind, translation = _kind(type_name, params), Translation(params)
    try:
        if kind == "deepspeed":
            _from_deepspeed(translation, content)
        else:
            {
                "adamw": _from_adamw,
                "torch": _from_torch,
                "megatron": _from_megatron,
                "dion": _from_dion,
            }[kind](translation)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"optimizer: a value of the wrong type: {error}") from error
    config = translation.config()  # validates
    # What an engine would warn of, if its param groups have no rates of their own.
    rates = {"muon": {config.muon_defaults()["lr"]}, "adamw": {config.adam_defaults()["lr"]}}
    if (warning := rate_warning(config, rates)) is not None:
        translation.notes.append(warning)
    return kind, translation


def _kind(type_name: str, params: Mapping[str, Any]) -> str:
    # Arguments that only one optimizer has decide before the name: several are called Muon.
    if _MEGATRON & set(params):
        return "megatron"
    if type_name.lower() in _ADAM:
        return "adamw"
    if "ns_coefficients" in params:
        return "torch"
    if "adjust_lr" in params:
        return "dion"
    if type_name.lower() == "muon":
        return "deepspeed"
    raise ConfigError(
        f"optimizer.type: {type_name!r} has no counterpart here; rates reads AdamW, the Muon of DeepSpeed, torch, Dion "
        f"and xtuner, and Megatron-LM's arguments"
    )


def _from_adamw(translation: Translation) -> None:
    translation.take("lr", 1e-3, "AdamW's rate serves both halves under match_rms_adamw")
    translation.put(
        "adjust_lr_fn", "match_rms_adamw", "matrices get updates of AdamW's usual size, 0.2 times the rate"
    )
    translation.take("weight_decay", 0.0, "times the rate, as AdamW's: the product stays")
    translation.take("betas", [0.9, 0.999], _ADAM_HALF)
    translation.take("eps", 1e-8, _ADAM_HALF)
    translation.take_rest()


def _from_deepspeed(translation: Translation, content: Mapping[str, Any]) -> None:
    # 1. The rate. At ZeRO 1 to 3 DeepSpeed clips the update, so with clipping its rate says nothing about one here.
    clipping = content.get("gradient_clipping", 0.0)
    if clipping and (content.get("zero_optimization") or {}).get("stage", 0):
        shared = translation.source.pop("lr", None)
        tuned = translation.source.pop("muon_lr", shared)
        translation.put(
            "muon_lr",
            DEFAULT_MUON_LR,
            f"DeepSpeed clips the update to gradient_clipping {shown(clipping)}, here it is the gradient: "
            f"{shown(tuned)} does not carry over; begin with this, then try half and twice of it",
        )
        if shared is not None:
            translation.take("adam_lr", shared, "its half is not affected: the same")
    # 2. Everything else has the same name; a rate that is missing gets its default, so that it is seen.
    if translation.source.pop("per_head_muon", False):
        translation.put("matrices", {"*": {"heads": "config"}}, "per_head_muon: every head is a matrix")
    translation.take_rest()
    if translation.settings.get("lr") is None:
        for key, default in (("muon_lr", DEFAULT_MUON_LR), ("adam_lr", DEFAULT_ADAM_LR)):
            if translation.settings.get(key) is None:
                translation.put(key, default, "the default, chosen by nobody: tune it, by factors of two")


def _from_torch(translation: Translation) -> None:
    if translation.source.get("adjust_lr_fn") == "match_rms_adamw":
        translation.take("lr", 1e-3, "under match_rms_adamw it serves both halves")
    else:
        translation.take("lr", 1e-3, "torch.optim.Muon has matrices only", key="muon_lr")
        translation.put("adam_lr", 3e-4, "the default: write the rate of the AdamW that trains the rest")
    translation.take("weight_decay", 0.1, "torch's default is 0.1, here it is 0", key="muon_weight_decay")
    coefficients = list(translation.source.pop("ns_coefficients", _QUINTIC))
    steps = translation.source.pop("ns_steps", 5)
    if coefficients == _QUINTIC:
        translation.put("ns_steps", steps, "the same coefficients, quintic")
    else:
        translation.put("ns_schedule", [coefficients] * steps, f"ns_coefficients in each of {steps} steps")
    if translation.source.pop("eps", None) is not None:
        translation.left_out["eps"] = (
            "guards the norm there; here a norm below 1e-12 counts as 1e-12, and eps is AdamW's"
        )
    if translation.source.get("adjust_lr_fn", "") is None:
        del translation.source["adjust_lr_fn"]
    translation.take_rest()


def _from_megatron(translation: Translation) -> None:
    # There is no take_rest() at the end: the remaining arguments describe the model. Arguments of the command line have
    # dashes, and Muon's own a prefix: --muon-scale-mode is scale_mode below.
    source = {key.replace("-", "_").removeprefix("muon_"): value for key, value in translation.source.items()}
    translation.source = source
    extra, mode = source.get("extra_scale_factor", 1.0), source.get("scale_mode", "spectral")
    rate, decay = source.get("lr", 1e-3), source.get("weight_decay", 0.01)
    factor = f"extra scale factor {extra!r}"
    if extra <= 0:
        raise ConfigError(f"muon_extra_scale_factor: must be positive, got {shown(extra)}")
    if source.get("match_adamw_update_rms"):  # verl derives the factor from AdamW's first beta
        beta1 = (source.get("betas") or (0.9,))[0]
        extra = math.sqrt((1 - beta1) / (1 + beta1))
        factor = f"sqrt((1 - {beta1:g}) / (1 + {beta1:g})), as muon_match_adamw_update_rms says"
    row = framework_settings("Megatron-LM", muon_scale_mode=mode, muon_extra_scale_factor=extra)
    row = row or framework_settings("Megatron-LM", muon_scale_mode=mode)
    if row is None:
        raise ConfigError(f"muon_scale_mode: {shown(mode)} is none of Megatron-LM's modes")
    scale = {"update_scale": extra, **row.ours}
    translation.put("lr", rate, "the rate of both halves, as there")
    translation.put("adjust_lr_fn", scale["adjust_lr_fn"], f"the formula of its {mode}")
    if scale["adjust_lr_fn"] == "match_rms_adamw":
        translation.reasons["adjust_lr_fn"] += f" with the {factor}"
    elif extra != 1.0:
        translation.put("update_scale", scale["update_scale"], f"the {factor}")
    translation.put("weight_decay", decay, "times the rate, as there")
    translation.take("momentum", 0.95, "the same")
    translation.take("use_nesterov", False, "off there unless asked for", key="nesterov")
    translation.take("nesterov", translation.settings["nesterov"], "off there unless asked for")
    translation.take("num_ns_steps", 5, "the same", key="ns_steps")
    first, second = source.get("betas") or (0.9, 0.999)
    betas = [source.get("adam_beta1", first), source.get("adam_beta2", second)]
    translation.put("betas", betas, _ADAM_HALF)
    translation.take("adam_eps", 1e-8, _ADAM_HALF, key="eps")
    schedule = source.get("coefficient_type", "quintic")
    if schedule in ("polar_express", "cans", "deepseekv4"):
        translation.put("ns_schedule", schedule, "the same method; its last digits differ")
    elif schedule != "simple":
        translation.left_out["coefficient_type"] = (
            f"{schedule} is a table of its own; quintic here is its 'simple'"
        )
    if source.get("tp_mode") == "distributed":
        translation.put("tensor_parallel_mode", "distributed", "the same")
    else:
        translation.left_out["tp_mode"] = "the default, gather, gives the update of the whole matrix"


def _from_dion(translation: Translation) -> None:
    rule = translation.source.pop("adjust_lr")
    row = framework_settings("Dion", adjust_lr=rule)
    if row is None:
        raise ConfigError(
            f"adjust_lr: {shown(rule)} has no counterpart: every rule here depends on the shape"
        )
    translation.take("lr", 0.01, "the rate of both halves, as there")
    translation.put("adjust_lr_fn", row.ours["adjust_lr_fn"], f"the formula of its {rule}")
    translation.take("mu", 0.95, "a sum of gradients there, which has the same direction", key="momentum")
    translation.take("nesterov", False, "off there unless asked for")
    translation.take("weight_decay", 0.01, "times the rate, as there")
    translation.take("betas", [0.9, 0.95], "the same")
    translation.take("epsilon", 1e-8, _ADAM_HALF, key="eps")
    translation.take_rest()


def expected_size(route: Route, config: MuonConfig) -> float:
    """Return the RMS of an update divided by the rate, as the scale rule gives it for exact orthogonalisation."""
    square = 0.0
    # RMS^2 = |update|^2 / elements, and |update|^2 is the sum over blocks of scale^2 * min(rows, cols).
    for count, rows, cols in route.kinds_of_blocks():
        # All min(rows, cols) singular values are 1, so that is the squared Frobenius norm before scaling.
        out, into = (cols, rows) if route.transposed else (rows, cols)
        square += count * shape_scale(config.adjust_lr_fn, out, into) ** 2 * min(rows, cols)
    return config.update_scale * math.sqrt(square / route.numel)


def measured_sizes(
    sizes: Mapping[str, Any], config: MuonConfig, shrink: int
) -> dict[str, tuple[str, float, float]]:
    """Take one step of a narrower model with random gradients and measure the updates.

    Args:
        sizes: A Hugging Face configuration.
        config: The optimizer's settings; weight decay and QK-clip are switched off.
        shrink: The factor by which to divide widths and heads; the model has two layers and at most eight experts.

    Returns:
        For each Muon parameter, named with a star for the layer number: its shape, the size of its update, and the size
        by the scale rule. The size is the RMS divided by the rate; for a variant with a relative rate it is the norm
        divided by the rate and the norm of the weights.
    """
    # 1. A narrow model and its optimizer.
    torch.manual_seed(0)
    model = build_model(_narrower(sizes, shrink), "cpu").float()
    off = {"weight_decay": 0.0, "muon_weight_decay": None, "qk_clip": None, "health": 0}
    config = config.model_copy(update=off)
    optimizer = Muon.from_config(model, config, model=model)
    members = list(model_parameters_by_name(model).values())
    routes = route_parameters(members, config)
    # 2. One step.
    before = [member.param.detach().clone() for member in members]
    for member in members:
        member.param.grad = torch.randn_like(member.param)
    optimizer.step()
    # 3. The sizes of the updates.
    # A variant with "apply" has no scale rule: its step is rate times the norm of the weights.
    relative = VARIANTS[config.variant].apply is not None
    rate = config.muon_defaults()["lr"]
    measured = {}
    for route, member, old in zip(routes, members, before, strict=True):
        if route.algorithm == "muon":
            step = (member.param.detach() - old).norm() / rate
            size = float(step / old.norm()) if relative else float(step) / math.sqrt(route.numel)
            expected = 1.0 if relative else expected_size(route, config)
            shape = "x".join(map(str, route.shape))
            # The last of equal layers stands for all of them.
            measured[re.sub(r"\.\d+\.", ".*.", route.name)] = (shape, size, expected)
    return measured


def _narrower(config: Mapping[str, Any], shrink: int) -> dict[str, Any]:
    """Return the configuration of a model with widths and heads divided, two layers and a small vocabulary."""
    narrow = dict(config)
    divided = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank")
    for key in (*divided, "num_attention_heads", "num_key_value_heads"):
        if narrow.get(key):
            narrow[key] = max(1, narrow[key] // shrink)
    for key, limit in {
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "num_experts": 8,
        "n_routed_experts": 8,
    }.items():
        if narrow.get(key):
            narrow[key] = min(limit, narrow[key])
    return {**narrow, "pad_token_id": None}
