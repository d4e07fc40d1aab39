"""``python -m deepspeed_muon rates CONFIG``: the settings of this optimizer, each with its reason.

The settings come from :mod:`deepspeed_muon.forecast.translation`, which reads configurations of AdamW and other Muons.
With ``--from`` and ``--to`` (or ``--model``) the rate is carried from the run on which it was tuned to one of another
size (:mod:`deepspeed_muon.forecast.size_laws`). With ``--check``, one step with random gradients measures the size of
the updates at two widths.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hjson
import torch

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.forecast.model_shapes import (
    build_parsed,
    load_model,
    model_config,
    parse_config,
    read_object,
)
from deepspeed_muon.forecast.size_laws import (
    CARRIED_BY,
    LAWS,
    ROOT_OF_WIDTH,
    SIZES,
    UNKNOWN,
    Sizes,
    measured,
    read_sizes,
)
from deepspeed_muon.forecast.translation import SOURCES, Translation, translate
from deepspeed_muon.math.updates import shape_scale
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.param_groups import one_rate_serves_both, width_exponent
from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.routing.route import Route, model_width, summarize_routes
from deepspeed_muon.routing.rules import route_parameters
from deepspeed_muon.variants import VARIANTS


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
    config = translation.config()
    if config.tuned_width is not None:
        before.setdefault("width", config.tuned_width)
    after = {**_sizes_of_model(routes), **after}
    # 2. The rate at the other size, beside what others publish.
    published = _published(translation, before, after)
    carry(translation, before, after, law_name=arguments.apply)
    runs = measured(config.variant, config.adjust_lr_fn)
    report = {
        "read_as": SOURCES[kind].name,
        "from": before,
        "to": after,
        "optimizer": {"type": "Muon", "params": translation.settings},
        "reasons": translation.reasons,
        "left_out": translation.left_out,
        "notes": translation.notes,
        "measured": runs.costs,
        "measured_on": runs.runs() if runs.ranges else None,
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


def _published(translation: Translation, before: Sizes, after: Sizes) -> list[dict[str, Any]]:
    """Return what each published law makes of the rate that was tuned, over the sizes that are given."""
    config = translation.config()
    rate = translation.muon_lr()
    rate = rate if translation.rate_is_tuned and rate != "auto" else None
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
        measured_on = f". Measured on {report['measured_on']}." if report["measured_on"] else ""
        lines += _wrapped("  measured here   ", report["measured"] + measured_on)
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
    exponent, tuned_width, width = width_exponent(config), before.get("width"), after.get("width")
    law = LAWS[law_name or CARRIED_BY]
    powers = law.powers(config.adjust_lr_fn)
    if law_name and (missing := law.missing(before, after, config.adjust_lr_fn)):
        raise ConfigError(f"--apply {law_name}: needs {' and '.join(missing)} in --from and in --to")
    ratios = {size: after[size] / before[size] for size in powers if size in before and size in after}
    changed = [size for size, ratio in ratios.items() if ratio != 1.0]
    if changed and not translation.rate_is_tuned:
        translation.notes.append(
            "Muon's rate is one to begin with and was not tuned: it is not carried to the other size"
        )
    elif changed and exponent is None and law_name is None:
        translation.notes.append(
            f"the rate is not carried to the other size: the measured runs do not say how it follows one under "
            f"{config.adjust_lr_fn}"
        )
    elif changed:
        factors = " ".join(f"{ratio:.4g}^{powers[size]:g} ({size})" for size, ratio in ratios.items())
        runs = measured(config.variant, config.adjust_lr_fn)
        source = f"{law.source}: applied because --apply asks for it" if law_name else runs.support
        if not law_name and (beyond := runs.beyond(changed, before, after)):
            source += f"; extrapolated beyond what was measured, {' and '.join(beyond)}"
        _multiply_rate(
            translation,
            law.factor(before, after, config.adjust_lr_fn),
            ratios.get("width", 1.0) ** powers.get("width", 0.0),
            f"{factors}: {source}",
        )
        if "muon_lr" in translation.settings and "lr" in translation.settings and config.adam_lr is None:
            is_of_muon = config.muon_lr is None and not one_rate_serves_both(config)
            translation.reasons["lr"] = (
                "as it was, Muon's rate: choose adam_lr" if is_of_muon else _reason_of_adamws_rate(changed)
            )
    if exponent and tuned_width and translation.rate_is_tuned:
        reason = "the width that the rate is for: training a much wider model begins with a warning"
        is_carried = translation.muon_lr() != "auto"
        translation.put("tuned_width", round(width if width and is_carried else tuned_width), reason)


def _reason_of_adamws_rate(changed: Sequence[str]) -> str:
    """Return the reason of ``lr`` where Muon has a rate of its own for the sizes that changed."""
    reasons = ["AdamW's rate, as tuned"]
    if "width" in changed:
        reasons.append("in the measured runs it was the same at all widths")
    if unmeasured := [size for size in changed if size != "width"]:
        reasons.append(
            f"how it follows {' and '.join(unmeasured)} was not measured, and Marin's law gives it the exponents of "
            f"Muon's"
        )
    return "; ".join(reasons)


def _multiply_rate(translation: Translation, factor: float, of_width: float, reason: str) -> None:
    """Give Muon a rate of its own, ``factor`` times the one that it has.

    The decay is divided by ``of_width``, the part of the factor that follows the width: over widths its product with
    the rate was kept in the measured runs. Over tokens and batch the decay stays.
    """
    # 1. The rate.
    settings, rate = translation.settings, translation.muon_lr()
    if factor == 1.0:
        translation.reasons["lr" if settings.get("muon_lr") is None else "muon_lr"] += f"; {reason}"
        return
    if rate == "auto":
        translation.notes.append(
            f"lr is 'auto' and stays. For the other size set muon_lr to {factor:.3g} times the "
            f"learning rate that fills it in ({reason})"
        )
    else:
        translation.change_muon_lr(
            _three_digits(rate * factor), factor, f"{rate:g} x {factor:.3g} ({reason})"
        )
    # 2. The decay, unless it is not multiplied by the rate.
    decay = settings.get("muon_weight_decay", settings.get("weight_decay"))
    if not decay or of_width == 1.0 or settings.get("weight_decay_mode") == "independent":
        return
    stays = "over widths its product with the rate stays, as in the measured runs"
    if decay == "auto":
        translation.notes.append(
            f"set muon_weight_decay to {1 / of_width:.3g} times the number that fills in weight_decay: {stays}"
        )
    elif rate == "auto":
        translation.notes.append(f"set muon_weight_decay to {decay / of_width:.3g}, with muon_lr: {stays}")
    else:
        translation.put(
            "muon_weight_decay", _three_digits(decay / of_width), f"{decay:g} / {of_width:.3g}: {stays}"
        )


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _check(model: Mapping[str, Any], config: MuonConfig) -> int:
    """Print the sizes of the updates at two widths; return 1 if one deviates from the scale rule."""
    parsed = parse_config(model)
    if not getattr(parsed, "hidden_size", None):
        raise ConfigError(
            f"--check: the configuration of model_type {parsed.model_type!r} has no hidden_size that could be divided: "
            f"pass that of its text model"
        )
    # The wider one of the two models has a width of at most 512: a width of 4096 is divided by 8, and by 16.
    shrink = max(1, 2 ** math.ceil(math.log2(parsed.hidden_size / 512)))
    full_width, half_width = (measured_sizes(parsed, config, factor) for factor in (shrink, 2 * shrink))
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


def expected_size(route: Route, config: MuonConfig) -> float:
    """Return the RMS of an update divided by the rate, as the scale rule gives it for exact orthogonalisation."""
    square = 0.0
    # RMS^2 = |update|^2 / elements, and |update|^2 is the sum over blocks of scale^2 * min(rows, cols).
    for count, rows, cols in route.kinds_of_blocks():
        # All min(rows, cols) singular values are 1, so that is the squared Frobenius norm before scaling.
        out, into = (cols, rows) if route.transposed else (rows, cols)
        square += count * shape_scale(config.adjust_lr_fn, out, into) ** 2 * min(rows, cols)
    return config.update_scale * math.sqrt(square / route.numel)


def measured_sizes(sizes: Any, config: MuonConfig, shrink: int) -> dict[str, tuple[str, float, float]]:
    """Take one step of a narrower model with random gradients and measure the updates.

    Args:
        sizes: A configuration of transformers.
        config: The optimizer's settings; weight decay and QK-clip are switched off.
        shrink: The factor by which to divide widths and heads; the model has two layers and at most eight experts.

    Returns:
        For each Muon parameter, named with a star for the layer number: its shape, the size of its update, and the size
        by the scale rule. The size is the RMS divided by the rate; for a variant with a relative rate it is the norm
        divided by the rate and the norm of the weights.
    """
    # 1. A narrow model and its optimizer.
    torch.manual_seed(0)
    model = build_parsed(_narrower(sizes, shrink), "cpu").float()
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


def _narrower(sizes: Any, shrink: int) -> Any:
    """Return the configuration of a model with widths and heads divided, two layers and a small vocabulary."""
    narrow = copy.deepcopy(sizes)

    def change(keys: Sequence[str], value_of: Callable[[int], int]) -> None:
        for key in keys:
            if isinstance(value := getattr(narrow, key, None), int) and value > 0:
                setattr(narrow, key, value_of(value))

    # 1. Lists with an entry for each layer, such as layer_types.
    layers = getattr(sizes, "num_hidden_layers", None)
    for key, value in vars(sizes).items():
        if isinstance(value, (list, tuple)) and len(value) == layers:
            setattr(narrow, key, value[:2])
    change(["num_hidden_layers"], lambda layers: min(layers, 2))
    change(["vocab_size"], lambda rows: min(rows, 256))
    change(["num_experts", "n_routed_experts", "num_local_experts"], lambda experts: min(experts, 8))
    # 2. Widths.
    widths = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    change([*widths, "q_lora_rank", "kv_lora_rank"], lambda width: max(1, width // shrink))
    # 3. The numbers of heads are divided by their common divisor with shrink, and the size of a head by the rest.
    # It stays even, because rotary embeddings divide a head into halves.
    heads = ["num_attention_heads", "num_key_value_heads"]
    divisor = math.gcd(shrink, *(getattr(narrow, key, None) or 0 for key in heads))
    change(heads, lambda number: number // divisor)
    head_dims = ("head_dim", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    change(head_dims, lambda size: 2 * max(1, size * divisor // (2 * shrink)))
    narrow.pad_token_id = None
    return narrow
