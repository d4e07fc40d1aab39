"""The command ``python -m deepspeed_muon rates CONFIG``: another optimizer's settings as those of this one.

It reads ``optimizer`` of a DeepSpeed configuration (AdamW, DeepSpeed's Muon or torch's), or Megatron-LM's arguments in
JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson

from deepspeed_muon.config import DEFAULT_MUON_LR, MuonConfig, unknown_key_message
from deepspeed_muon.config.messages import RENAMED, shown
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.forecast.model_shapes import load_model
from deepspeed_muon.routing.route import summarize_routes
from deepspeed_muon.routing.rules import route_parameters

_ADAM = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam", "torch_adam")
_MEGATRON = {"adam_beta1", "adam_beta2", "muon_momentum", "muon_scale_mode", "muon_extra_scale_factor"}
_KINDS = {
    "adamw": "AdamW",
    "deepspeed": "DeepSpeed's Muon, whose keys are those of this one",
    "torch": "torch.optim.Muon",
    "megatron": "Megatron-LM's Muon",
}
_QUINTIC = [3.4445, -4.775, 2.0315]
_ADAM_HALF = "AdamW's half; written out because the default here is another"


def add_subcommand(subparsers: Any) -> None:
    """Add the command ``rates`` to what ``ArgumentParser.add_subparsers`` returned; its ``run`` executes it."""
    parser = subparsers.add_parser(
        "rates", help="the settings of AdamW or of another Muon as settings of this one"
    )
    parser.add_argument(
        "config", help="a DeepSpeed configuration, or Megatron-LM's arguments as a JSON object"
    )
    parser.add_argument("--source", choices=_KINDS, help="whose settings they are (default: the keys tell)")
    parser.add_argument("--model", help="as for plan: says which parameters go to Muon")
    parser.set_defaults(run=_rates)


def _rates(arguments: argparse.Namespace) -> int:
    try:
        content = hjson.loads(Path(arguments.config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{arguments.config}: not a readable JSON file: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{arguments.config}: expected a JSON object")
    kind, found = translate(content, arguments.source)
    params = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in found.settings.items())
    print(f'"optimizer": {{"type": "Muon", "params": {{\n{params}\n}}}}\n\nread as {_KINDS[kind]}')
    for key, reason in found.reasons.items():
        print(f"  {key:<22} {reason}")
    for key, reason in found.left_out.items():
        print(f"  {key:<22} left out: {reason}")
    if arguments.model:
        print(f"\n{summarize_routes(route_parameters(load_model(arguments.model), found.config()))}")
    return 0


class Translation:
    """Settings of this optimizer in the making.

    Attributes:
        given: The other optimizer's settings that nobody has taken yet.
        settings: ``optimizer.params``.
        reasons: Key of ``settings`` to why it has its value.
        left_out: Key of the other optimizer to why nothing here stands for it.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = dict(given)
        self.settings: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self.left_out: dict[str, str] = {}

    def put(self, key: str, value: Any, reason: str) -> None:
        """Set a key."""
        self.settings[key], self.reasons[key] = value, reason

    def take(self, theirs: str, default: Any, reason: str, *, key: str = "") -> None:
        """Set a key, by default of the same name, to the other optimizer's value or its default."""
        self.put(key or theirs, self.given.pop(theirs, default), reason)

    def config(self) -> MuonConfig:
        """Return the checked settings, without those that the Hugging Face integrations fill in later."""
        return MuonConfig.from_params({key: value for key, value in self.settings.items() if value != "auto"})

    def keep_rest(self) -> None:
        """Take all that is left under its name here; what has none is left out with what to do about it."""
        for key, value in self.given.items():
            name = RENAMED.get(key, key)
            if name in MuonConfig.model_fields:
                self.put(name, value, "the same" if name == key else f"another name of {key}")
            else:
                self.left_out[key] = unknown_key_message(key, MuonConfig.model_fields)


def translate(content: Mapping[str, Any], kind: str | None = None) -> tuple[str, Translation]:
    """Return the kind of optimizer, and its settings as those of this one.

    Args:
        content: A DeepSpeed configuration, or Megatron-LM's arguments.
        kind: One of ``adamw``, ``deepspeed``, ``torch`` and ``megatron``; ``None`` to tell it from the keys.

    Raises:
        ConfigError: If there is no optimizer that can be translated, or the outcome is not valid here.
    """
    section = content.get("optimizer")
    if isinstance(section, Mapping):
        type_name, params = str(section.get("type", "")), section.get("params") or {}
    else:
        type_name, params = str(section or ""), content
    if not isinstance(params, Mapping):
        raise ConfigError(f"optimizer.params: must be an object, got {shown(params)}")
    kind = kind or _kind(type_name, params)
    found = Translation(params)
    try:
        if kind == "deepspeed":
            _from_deepspeed(found, content)
        else:
            {"adamw": _from_adamw, "torch": _from_torch, "megatron": _from_megatron}[kind](found)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"optimizer: a value of the wrong type: {error}") from error
    found.config()
    return kind, found


def _kind(type_name: str, params: Mapping[str, Any]) -> str:
    if _MEGATRON & set(params):
        return "megatron"
    if type_name.lower() in _ADAM:
        return "adamw"
    if "ns_coefficients" in params:
        return "torch"
    if type_name.lower() == "muon":
        return "deepspeed"
    raise ConfigError(
        f"optimizer.type: {type_name!r} has no counterpart here; rates reads AdamW, DeepSpeed's or torch's Muon, and "
        f"Megatron-LM's arguments (--source says which)"
    )


def _from_adamw(found: Translation) -> None:
    found.take("lr", 1e-3, "AdamW's rate serves both halves under match_rms_adamw")
    found.put(
        "adjust_lr_fn", "match_rms_adamw", "matrices get updates of AdamW's usual size, 0.2 times the rate"
    )
    found.take("weight_decay", 0.0, "times the rate, as AdamW's: the product stays")
    found.take("betas", [0.9, 0.999], _ADAM_HALF)
    found.take("eps", 1e-8, _ADAM_HALF)
    found.keep_rest()


def _from_deepspeed(found: Translation, content: Mapping[str, Any]) -> None:
    clipping = content.get("gradient_clipping", 0.0)
    if clipping and (content.get("zero_optimization") or {}).get("stage", 0):
        shared = found.given.pop("lr", None)
        tuned = found.given.pop("muon_lr", shared)
        found.put(
            "muon_lr",
            DEFAULT_MUON_LR,
            f"DeepSpeed clips the update to gradient_clipping {shown(clipping)}, here it is the gradient: "
            f"{shown(tuned)} does not carry over; begin with this, then try half and twice of it",
        )
        if shared is not None:
            found.take("adam_lr", shared, "its half is not affected: the same")
    if found.given.pop("per_head_muon", False):
        found.put("matrices", {"*": {"heads": "config"}}, "per_head_muon: every head is a matrix")
    found.keep_rest()


def _from_torch(found: Translation) -> None:
    if found.given.get("adjust_lr_fn") == "match_rms_adamw":
        found.take("lr", 1e-3, "under match_rms_adamw it serves both halves")
    else:
        found.take("lr", 1e-3, "torch.optim.Muon has matrices only", key="muon_lr")
        found.put("adam_lr", 3e-4, "the default: write the rate of the AdamW that trains the rest")
    found.take("weight_decay", 0.1, "torch's default is 0.1, here it is 0", key="muon_weight_decay")
    row, steps = list(found.given.pop("ns_coefficients", _QUINTIC)), found.given.pop("ns_steps", 5)
    if row == _QUINTIC:
        found.put("ns_steps", steps, "the same coefficients, quintic")
    else:
        found.put("ns_schedule", [row] * steps, f"ns_coefficients in each of {steps} steps")
    if found.given.pop("eps", None) is not None:
        found.left_out["eps"] = (
            "guards the norm there; here a norm below 1e-12 counts as 1e-12, and eps is AdamW's"
        )
    if found.given.get("adjust_lr_fn", "") is None:
        del found.given["adjust_lr_fn"]
    found.keep_rest()


def _from_megatron(found: Translation) -> None:
    found.given = {
        key.replace("-", "_").removeprefix("muon_"): value for key, value in found.given.items()
    }  # the model's arguments are among them: what is left is no setting of the optimizer
    extra, mode = found.given.get("extra_scale_factor", 1.0), found.given.get("scale_mode", "spectral")
    rate, decay = found.given.get("lr", 1e-3), found.given.get("weight_decay", 0.01)
    if extra <= 0:
        raise ConfigError(f"muon_extra_scale_factor: must be positive, got {shown(extra)}")
    if (mode, extra) == ("spectral", 0.2):
        found.put("lr", rate, "the rate of both halves, as there")
        found.put("adjust_lr_fn", "match_rms_adamw", "spectral with an extra factor of 0.2 is this rule")
    else:
        found.put("adjust_lr_fn", {"shape_scaling": "original"}.get(mode, mode), f"the formula of its {mode}")
        found.put("muon_lr", rate * extra, f"lr times the extra scale factor {extra:g}")
        found.put("adam_lr", rate, "lr")
        if extra != 1.0:
            found.put("muon_weight_decay", decay / extra, "so that its product with the rate stays")
    found.put("weight_decay", decay, "times the rate, as there")
    found.take("momentum", 0.95, "the same")
    found.take("use_nesterov", False, "off there unless asked for", key="nesterov")
    found.take("nesterov", found.settings["nesterov"], "off there unless asked for")
    found.take("num_ns_steps", 5, "the same", key="ns_steps")
    betas = [found.given.get("adam_beta1", 0.9), found.given.get("adam_beta2", 0.999)]
    found.put("betas", betas, _ADAM_HALF)
    found.take("adam_eps", 1e-8, _ADAM_HALF, key="eps")
    schedule = found.given.get("coefficient_type", "quintic")
    if schedule in ("polar_express", "cans", "deepseekv4"):
        found.put("ns_schedule", schedule, "the same method; its last digits differ")
    elif schedule != "simple":
        found.left_out["coefficient_type"] = f"{schedule} is a table of its own; quintic here is its 'simple'"
    if found.given.get("tp_mode") == "distributed":
        found.put("tensor_parallel_mode", "distributed", "the same")
    else:
        found.left_out["tp_mode"] = "the default, gather, gives the update of the whole matrix"
