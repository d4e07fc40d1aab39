"""The settings of AdamW or of another Muon as those of this optimizer, each with the reason for its value.

:data:`SOURCES` says by which arguments the optimizer of a configuration is recognised. Several are called Muon, so
their arguments decide before the name does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from deepspeed_muon.config.settings import DEFAULT_ADAM_LR, DEFAULT_MUON_LR, MuonConfig
from deepspeed_muon.config.values import RENAMED, shown, unknown_key_message
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.forecast.frameworks import framework_settings
from deepspeed_muon.routing.param_groups import given_rates, one_rate_serves_both, rate_warning, rule_of
from deepspeed_muon.variants import VARIANTS

FILLED_IN = ("lr", "betas", "eps", "weight_decay")
"""Keys whose "auto" the integrations of Hugging Face replace by a number."""
_PEAKS = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
"""Keys of ``scheduler.params`` with the number that a group with ``lr`` (without it: with ``muon_lr``) gets."""
_QUINTIC = [3.4445, -4.775, 2.0315]  # the default of torch.optim.Muon, and of ns_schedule here
_ADAM_HALF = "AdamW's half; written out because the default here differs"
NOBODY = "chosen by nobody: tune it, by factors of two"
"""The reason of a rate that is a default."""


class Translation:
    """Settings of this optimizer, built step by step from those of a source optimizer.

    Attributes:
        source: Settings of the source optimizer that have not been translated yet.
        deepspeed: The DeepSpeed configuration; empty if the arguments are those of another framework, which are flat.
        name: The name of the optimizer in lower case, or "".
        settings: The resulting ``optimizer.params``.
        reasons: For each key of ``settings``, why it has its value.
        left_out: For each key of the source optimizer without a counterpart, why it has none.
        notes: What to decide or to set by hand.
        rate_is_tuned: Whether somebody tuned Muon's rate, so that it can be carried to another size.
    """

    def __init__(self, source: Mapping[str, Any], deepspeed: Mapping[str, Any], name: str) -> None:
        # null is the default there as here, but for Dion's adjust_lr, where it is a rule.
        self.source = {key: value for key, value in source.items() if value is not None or key == "adjust_lr"}
        if "learning_rate" in self.source:
            if "lr" in self.source:
                raise ConfigError("lr: is given twice, also as learning_rate")
            self.source["lr"] = self.source.pop("learning_rate")
        self.deepspeed = deepspeed
        self.name = name
        self.settings: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.notes: list[str] = []
        self.rate_is_tuned = True

    def put(self, key: str, value: object, reason: str) -> None:
        """Set a key of ``settings`` with its reason."""
        self.settings[key], self.reasons[key] = value, reason

    def take(self, source_key: str, default: object, reason: str, *, key: str = "") -> None:
        """Move a setting of the source optimizer, or its default there, to ``key`` (by default the same name).

        An "auto" keeps its name, because the Trainer fills in no others: torch's ``lr`` does not become ``muon_lr``.
        """
        if source_key not in self.source:
            reason = "the default there" if reason == "the same" else f"the default there; {reason}"
        value = self.source.pop(source_key, default)
        self.put(source_key if value == "auto" else key or source_key, value, reason)

    def take_rate(self, default: float, reason: str, *, key: str = "lr") -> None:
        """Move ``lr``, Muon's rate, to ``key``. If there is none, the reason says that nobody chose the default."""
        if "lr" not in self.source:
            self.rate_is_tuned, reason = False, f"{NOBODY}; {reason}"
        self.take("lr", default, reason, key=key)

    def take_betas(self, first: float, second: float, reason: str) -> None:
        """Move AdamW's betas, given as a pair or as ``adam_beta1`` and ``adam_beta2``."""
        betas = self.source.pop("betas", None)
        if betas == "auto" and self.deepspeed:
            return self.put("betas", "auto", reason)
        where = "optimizer.params" if self.deepspeed else "arguments"
        given = [first, second] if betas is None else betas
        pair = MuonConfig.from_params({"betas": given}, where=where).betas
        given = [self.source.pop(f"adam_beta{number}", beta) for number, beta in enumerate(pair, 1)]
        self.put("betas", list(MuonConfig.from_params({"betas": given}, where=where).betas), reason)

    def take_rest(self) -> None:
        """Move all remaining settings to their names here; those without one are left out, with a remedy."""
        for key, value in self.source.items():
            name = RENAMED.get(key, key)
            if name in MuonConfig.model_fields:
                self.put(name, value, "the same" if name == key else f"another name of {key}")
            else:
                self.left_out[key] = unknown_key_message(key, MuonConfig.model_fields)

    def config(self) -> MuonConfig:
        """Return the validated settings, without the "auto" values that Hugging Face integrations fill in later."""
        filled_in = [key for key in FILLED_IN if self.deepspeed and self.settings.get(key) == "auto"]
        return MuonConfig.from_params({k: v for k, v in self.settings.items() if k not in filled_in})

    def muon_lr(self) -> Any:
        """Return the rate of Muon, which may be "auto"."""
        rates = (self.settings.get(key) for key in ("muon_lr", "lr"))
        return next((rate for rate in rates if rate is not None), DEFAULT_MUON_LR)

    def change_muon_lr(self, rate: float, factor: float, reason: str) -> None:
        """Give Muon ``rate``, which is ``factor`` times the one that it has, and note what a schedule needs for that.

        ``lr`` remains: it is AdamW's rate, and the rate that the numbers of a schedule stand for.
        """
        rest = {key: value for key, value in self.settings.items() if key != "muon_lr"}
        self.settings.clear()
        self.put("muon_lr", rate, reason)
        self.settings.update(rest)
        if factor != 1.0 and (peak := self.peak()) is not None and "lr" not in rest:
            key, value = peak
            numbers = "it, and the other rates of the schedule,"
            if isinstance(value, list):
                numbers = "Muon's rates in it"
            elif value == "auto":
                numbers = "learning_rate, with which the Trainer fills it in,"
            self.notes.append(
                f"scheduler.params.{key}, {shown(value)}, stands for muon_lr: multiply {numbers} by {factor:.3g}"
            )

    def peak(self) -> tuple[str, Any] | None:
        """Return the key and the value of the schedule's rate, if the configuration has one."""
        scheduler = self.deepspeed.get("scheduler")
        params = scheduler.get("params") if isinstance(scheduler, Mapping) else None
        params = params if isinstance(params, Mapping) else {}
        return next(((key, params[key]) for key in _PEAKS if params.get(key) is not None), None)


def translate(content: Mapping[str, Any]) -> tuple[str, Translation]:
    """Return the source optimizer (a key of :data:`SOURCES`) and its translated settings.

    Args:
        content: A DeepSpeed configuration, or the arguments of another framework.

    Raises:
        ConfigError: If the optimizer cannot be translated, or the translated settings are invalid.
    """
    # 1. A DeepSpeed configuration has a section. Other arguments are flat, with the optimizer's name as a string; those
    # of a command line have dashes.
    section = content.get("optimizer")
    if isinstance(section, Mapping):
        name, params, deepspeed = section.get("type"), section.get("params"), content
    else:
        params = {key.lstrip("-").replace("-", "_"): value for key, value in content.items()}
        name, deepspeed = params.pop("optimizer", None), {}
    params = {} if params is None else params
    if not isinstance(params, Mapping):
        raise ConfigError(f"optimizer.params: must be an object, got {shown(params)}")
    translation = Translation(params, deepspeed, str(name or "").lower())
    # 2. The first source with a mark of the configuration.
    marks = _marks(params, translation.name, is_section=bool(deepspeed))
    kind = next((kind for kind, source in SOURCES.items() if source.marks & marks), "")
    if not kind or translation.name not in ("", *_ADAM, *_MUON):
        hint = "; to begin from its settings name it Muon, and add variant 'normuon' if it is one"
        raise ConfigError(
            f"optimizer.type: {name or ''!r} has no counterpart here; rates reads AdamW, the Muon of DeepSpeed, "
            f"torch, Dion and xtuner, and the arguments of Megatron-LM and verl and of the Trainer's AdamW"
            + (hint if "muon" in translation.name else "")
        )
    source = SOURCES[kind]
    source.translate(translation)
    translation.notes += [text for mark, text in _AMBIGUOUS.items() if source.marks & marks == {mark}]
    # 3. Validate, and say what an engine would warn of, if its param groups have no rates of their own.
    config = translation.config()
    if translation.settings.get("lr") != "auto":
        given = [given_rates(config)]
        if (warning := rate_warning(config, given, given)) is not None:
            translation.notes.append(warning)
    elif config.muon_lr is None and config.adam_lr is None and not one_rate_serves_both(config):
        matched = "set adjust_lr_fn to 'match_rms_adamw' for a rate of AdamW, or "
        translation.notes.append(
            f"lr is 'auto', so the Trainer's learning_rate trains both halves; under {rule_of(config)} one rate does "
            f"not serve both: {matched if VARIANTS[config.variant].apply is None else ''}add muon_lr"
        )
    return kind, translation


def _from_adamw(translation: Translation, *, lr: float = 1e-3, decay: float = 0.0) -> None:
    serves = "AdamW's rate serves both halves under match_rms_adamw"
    key, peak = translation.peak() or ("", None)
    if isinstance(peak, list) and peak and peak.count(peak[0]) == len(peak):
        peak = peak[0]  # of every group
    if "lr" not in translation.source and (peak == "auto" or isinstance(peak, (int, float))):
        translation.put("lr", peak, f"scheduler.params.{key}, to which the rate rises; {serves}")
    else:
        translation.take_rate(lr, serves)
    translation.put(
        "adjust_lr_fn", "match_rms_adamw", "matrices get updates of AdamW's usual size, 0.2 times the rate"
    )
    translation.take("weight_decay", decay, "times the rate, as AdamW's: the product stays")
    translation.take_betas(0.9, 0.999, _ADAM_HALF)
    translation.take("eps", 1e-8, _ADAM_HALF)
    translation.take_rest()


def _from_megatrons_adam(translation: Translation) -> None:
    _take_adam_arguments(translation)
    _from_adamw(translation, decay=0.01)


def _from_trainer(translation: Translation) -> None:
    optim = str(translation.source.get("optim", "adamw"))
    if not optim.startswith("adamw"):
        raise ConfigError(
            f"optim: {optim!r} has no counterpart here; rates reads the Trainer's adamw_torch and alike"
        )
    _take_adam_arguments(translation)
    _from_adamw(translation, lr=5e-5)


def _take_adam_arguments(translation: Translation) -> None:
    """Leave only Adam's settings in ``source``, by AdamW's names: the others describe the model and the run."""
    _leave_out_arguments_of_the_run(translation)
    names = {"adam_epsilon": "eps", "adam_eps": "eps"}
    source = {names.get(key, key): value for key, value in translation.source.items()}
    arguments = ("lr", "weight_decay", "betas", "adam_beta1", "adam_beta2", "eps")
    translation.source = {key: source.pop(key) for key in arguments if key in source}
    for key in source:
        if key.startswith("muon_"):
            translation.left_out[key] = "Muon's, and the optimizer is Adam"
        elif key in MuonConfig.model_fields:
            raise ConfigError(
                f"{key}: is no argument of the AdamW as which the rest is read: name the optimizer"
            )


def _from_this(translation: Translation) -> None:
    if translation.source.pop("per_head_muon", False):
        translation.put("matrices", {"*": {"heads": "config"}}, "per_head_muon: every head is a matrix")
    translation.take_rest()
    # A rate that is missing gets its default, so that it is seen.
    if translation.settings.get("lr") is None:
        translation.rate_is_tuned = translation.settings.get("muon_lr") is not None
        for key, default in (("muon_lr", DEFAULT_MUON_LR), ("adam_lr", DEFAULT_ADAM_LR)):
            if translation.settings.get(key) is None:
                translation.put(key, default, f"the default, {NOBODY}")


def _from_deepspeed(translation: Translation) -> None:
    was_given = not translation.source.keys().isdisjoint(("lr", "muon_lr"))
    _from_this(translation)
    translation.config()  # validates
    rate, clipping = translation.muon_lr(), _clipping_of_updates(translation.deepspeed)
    if clipping and was_given:
        translation.rate_is_tuned = False
        translation.change_muon_lr(
            DEFAULT_MUON_LR,
            1.0 if rate == "auto" or not rate else DEFAULT_MUON_LR / rate,
            f"DeepSpeed clips the update to gradient_clipping {shown(clipping)}, here it is the gradient: "
            f"{shown(rate)} does not carry over; begin with this, then try half and twice of it",
        )
        if "lr" in translation.settings and "adam_lr" not in translation.settings:
            translation.reasons["lr"] = "the rate of AdamW's half, which is not affected: the same"


def _from_deepspeed_or_this(translation: Translation) -> None:
    _from_this(translation)
    rate, clipping = translation.muon_lr(), _clipping_of_updates(translation.deepspeed)
    if clipping and rate not in ("auto", DEFAULT_MUON_LR):
        translation.notes.append(
            f"Muon's rate, {shown(rate)}, is read as one that was tuned with this package. If it was tuned with "
            f"DeepSpeed's own Muon, it does not carry over, because the update was clipped there to gradient_clipping "
            f"{shown(clipping)}: begin with muon_lr {DEFAULT_MUON_LR:g}. To say which it is, add "
            f'"adjust_lr_fn": "original" (this package) or "torch_adam": false (DeepSpeed)'
        )


def _clipping_of_updates(deepspeed: Mapping[str, Any]) -> Any:
    """Return the norm to which DeepSpeed's Muon clips its updates: at ZeRO 1 to 3, by default 1.0; else ``None``."""
    zero = deepspeed.get("zero_optimization") or {}
    if not isinstance(zero, Mapping):
        raise ConfigError(f"zero_optimization: must be an object with a stage, got {shown(zero)}")
    clipping = deepspeed.get("gradient_clipping")
    return (1.0 if clipping is None else clipping) if zero.get("stage") else None


def _from_torch(translation: Translation) -> None:
    if translation.source.get("adjust_lr_fn") == "match_rms_adamw":
        translation.take_rate(1e-3, "under match_rms_adamw it serves both halves")
    else:
        translation.take_rate(1e-3, "torch.optim.Muon has matrices only", key="muon_lr")
        if "muon_lr" in translation.settings:
            reason = "the default: write the rate of the AdamW that trains the rest"
            translation.put("adam_lr", DEFAULT_ADAM_LR, reason)
    translation.take("adjust_lr_fn", "original", "the same")
    translation.take("weight_decay", 0.1, "torch's default is 0.1, here it is 0", key="muon_weight_decay")
    steps = MuonConfig.from_params({"ns_steps": translation.source.pop("ns_steps", 5)}).ns_steps or 5
    coefficients = translation.source.pop("ns_coefficients", _QUINTIC)
    if not isinstance(coefficients, (list, tuple)):
        raise ConfigError(f"ns_coefficients: must be three numbers, got {shown(coefficients)}")
    if list(coefficients) == _QUINTIC:
        translation.put("ns_steps", steps, "the same coefficients, quintic")
    else:
        translation.put(
            "ns_schedule", [list(coefficients)] * steps, f"ns_coefficients in each of {steps} steps"
        )
    if translation.source.pop("eps", None) is not None:
        translation.left_out["eps"] = (
            "guards the norm there; here a norm below 1e-12 counts as 1e-12, and eps is AdamW's"
        )
    translation.take_rest()


def _from_megatron(translation: Translation) -> None:
    # There is no take_rest() at the end: the remaining arguments describe the model. Muon's own have a prefix:
    # muon_scale_mode is scale_mode below. muon_lr and muon_weight_decay are none of them.
    _leave_out_arguments_of_the_run(translation)
    source = {
        key.removeprefix("muon_") if key in _MEGATRON else key: value
        for key, value in translation.source.items()
    }
    translation.source = source
    # 1. The scale of the update.
    extra, mode = source.get("extra_scale_factor", 1.0), source.get("scale_mode", "spectral")
    if isinstance(extra, bool) or not isinstance(extra, (int, float)) or not 0 < extra < math.inf:
        raise ConfigError(f"muon_extra_scale_factor: must be a positive number, got {shown(extra)}")
    factor = f"extra scale factor {extra!r}"
    translation.take_rate(1e-3, "the rate of both halves, as there")
    translation.take_betas(0.9, 0.999, _ADAM_HALF)
    if source.get("match_adamw_update_rms"):  # verl derives the factor from AdamW's first beta
        if extra != 1.0:
            raise ConfigError(
                f"muon_match_adamw_update_rms: derives muon_extra_scale_factor from AdamW's first beta, and that is "
                f"set to {extra:g}: give one of the two, as verl asks for"
            )
        beta1 = translation.settings["betas"][0]
        extra = math.sqrt((1 - beta1) / (1 + beta1))
        factor = f"sqrt((1 - {beta1:g}) / (1 + {beta1:g})), as muon_match_adamw_update_rms says"
    row = framework_settings("Megatron-LM", muon_scale_mode=mode, muon_extra_scale_factor=extra)
    row = row or framework_settings("Megatron-LM", muon_scale_mode=mode)
    if row is None:
        raise ConfigError(f"muon_scale_mode: {shown(mode)} is none of Megatron-LM's modes")
    scale = {"update_scale": extra, **row.ours}
    translation.put("adjust_lr_fn", scale["adjust_lr_fn"], f"the formula of its {mode}")
    if scale["adjust_lr_fn"] == "match_rms_adamw":
        translation.reasons["adjust_lr_fn"] += f" with the {factor}"
    elif extra != 1.0:
        translation.put("update_scale", scale["update_scale"], f"the {factor}")
    # 2. Decay, momentum and AdamW's half.
    translation.take("weight_decay", 0.01, "times the rate, as there")
    has_momentum = "momentum" in source
    translation.take("momentum", 0.95, "the same")
    if not has_momentum:
        translation.reasons["momentum"] = "the default of OptimizerConfig there; --muon-momentum's is 0.9"
    nesterov = source.pop("use_nesterov", False)
    translation.put("nesterov", source.pop("nesterov", nesterov), "off there unless asked for")
    translation.take("num_ns_steps", 5, "the same", key="ns_steps")
    translation.take("adam_eps", 1e-8, _ADAM_HALF, key="eps")
    # 3. The iteration, and what has no counterpart.
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
    if source.get("scalar_optimizer", "adam") != "adam":
        translation.left_out["muon_scalar_optimizer"] = "here AdamW trains what Muon does not"
    for key in source:
        if key in MuonConfig.model_fields or key.startswith("muon_"):
            translation.left_out[key] = "no argument of Megatron-LM's Muon, as which the others are read"


def _from_dion(translation: Translation) -> None:
    translation.take_rate(0.01, "the rate of both halves, as there")
    _put_scale_of_dion(translation, "Dion", "spectral_norm")
    translation.take("mu", 0.95, "a sum of gradients there, which has the same direction", key="momentum")
    translation.take("nesterov", False, "off there unless asked for")
    translation.take("weight_decay", 0.01, "times the rate, as there")
    translation.take_betas(0.9, 0.95, "the same")
    translation.take("epsilon", 1e-8, _ADAM_HALF, key="eps")
    translation.take_rest()


def _from_xtuner(translation: Translation) -> None:
    translation.take_rate(1e-5, "the rate of both halves, as there")
    _put_scale_of_dion(translation, "xtuner", "rms_norm")
    limit, mode = (translation.source.pop(key, None) for key in ("max_grad_norm", "clip_grad_mode"))
    if mode not in (None, "adamw_only", "all"):
        raise ConfigError(f"clip_grad_mode: {shown(mode)} is not read; write clip and gradient_clipping here")
    translation.take("momentum", 0.95, "a sum of gradients there, which has the same direction")
    translation.put("nesterov", True, "always on there")
    translation.take("weight_decay", 0.1, "times the rate, as there")
    translation.take_betas(0.9, 0.95, "the same")
    translation.take("eps", 1e-8, _ADAM_HALF)
    if mode != "all":
        translation.put("clip", "adamw", "there the gradients of Muon are not clipped")
    limit = 1.0 if limit is None else limit
    translation.notes.append(
        f"set gradient_clipping to {shown(limit)} in the DeepSpeed configuration: max_grad_norm there"
    )
    for key in ("enable_all2all", "skip_grad_norm_threshold"):
        if translation.source.pop(key, None) is not None:
            translation.left_out[key] = "has no counterpart here, and changes no step that is taken"
    translation.take_rest()


def _put_scale_of_dion(translation: Translation, framework: str, default: str) -> None:
    """Put the scale rule of Dion or xtuner, which have the same ones, and note their Newton-Schulz iteration."""
    is_given = "adjust_lr" in translation.source
    rule = translation.source.pop("adjust_lr", default)
    row = framework_settings(framework, adjust_lr=rule)
    if row is None:
        raise ConfigError(
            f"adjust_lr: {shown(rule)} has no counterpart: every rule here depends on the shape"
        )
    translation.put("adjust_lr_fn", row.ours["adjust_lr_fn"], f"the formula of its {rule}")
    if not is_given:
        translation.reasons["adjust_lr_fn"] += ", the default there"
    translation.notes.append(
        f"{framework}'s Newton-Schulz iteration has five triples of coefficients of its own, here it has those of "
        f"'quintic': to use them, write them as ns_schedule"
    )


def _leave_out_arguments_of_the_run(translation: Translation) -> None:
    for key in ("max_grad_norm", "clip_grad"):
        if (limit := translation.source.pop(key, None)) is not None:
            translation.left_out[key] = (
                f"write gradient_clipping: {shown(limit)} into the DeepSpeed configuration"
            )
    if translation.source.pop("decoupled_lr", None) is not None:
        translation.left_out["decoupled_lr"] = (
            "the rate of embedding and output layer there; here adam_lr is the rate of all that AdamW trains, unless a "
            "param group has its own"
        )


@dataclass(frozen=True, slots=True)
class Source:
    """An optimizer whose settings are translated.

    Attributes:
        name: Its name in the report.
        translate: The function that translates its settings.
        marks: Arguments and marks of :func:`_marks`. One suffices if no earlier source in :data:`SOURCES` has one.
    """

    name: str
    translate: Callable[[Translation], None]
    marks: Set[str]


_ADAM = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam", "torch_adam")
_MUON = ("muon", "dist_muon", "torch.optim.muon")
_SHARED = {"lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "betas", "eps", "ns_method", "adam_w_mode"}
_DEEPSPEED = _SHARED | {"torch_adam", "per_head_muon"}
_TORCH = {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}
_MEGATRON = {
    *("muon_momentum", "muon_nesterov", "muon_use_nesterov", "muon_num_ns_steps", "muon_coefficient_type"),
    *("muon_scale_mode", "muon_extra_scale_factor", "muon_match_adamw_update_rms", "muon_scalar_optimizer"),
    *("muon_tp_mode", "muon_split_qkv", "muon_fp32_matmul_prec", "muon_use_syrk"),
}
_THIS = {"muon_lr", "adam_lr", "muon_weight_decay", "adam_weight_decay", "adjust_lr_fn"}


def _marks(params: Mapping[str, Any], name: str, *, is_section: bool) -> set[str]:
    """Return what may identify the source: its arguments unless they are null, its name, telling combinations."""
    arguments = {key for key, value in params.items() if value is not None or key == "adjust_lr"}
    marks = set(arguments)
    if "adjust_lr_fn" in params and params["adjust_lr_fn"] is None:
        marks.add("adjust_lr_fn null")
    eps = params.get("eps")
    if "ns_steps" in arguments and arguments <= _TORCH and isinstance(eps, float) and eps >= 1e-7:
        marks.add("ns_steps with eps 1e-7")
    if "adjust_lr" in arguments and arguments & {"momentum", "eps", "max_grad_norm"}:
        marks.add("adjust_lr with momentum, eps or max_grad_norm")
    if is_section:
        keys_of = {"keys of both": _SHARED, "keys of DeepSpeed": _DEEPSPEED}
        fitting = [words for words, keys in keys_of.items() if name == "muon" and arguments <= keys]
        marks.add(f"type {name} with {fitting[0]}" if fitting else f"type {name}")
    elif arguments & _THIS and name not in _ADAM:
        marks.add("flat with a key of this package")
    elif not name and arguments & {"optim", "learning_rate"}:
        marks.add("flat optim or learning_rate")
    else:
        marks.add(f"optimizer {name}")
    return marks


SOURCES = {
    # AdamW by its name, whatever else is given.
    "adamw": Source("AdamW", _from_adamw, {f"type {name}" for name in _ADAM}),
    "megatron adam": Source(
        "Megatron-LM's Adam", _from_megatrons_adam, {f"optimizer {name}" for name in _ADAM}
    ),
    # Muons by arguments that no later one has. xtuner's have Dion's adjust_lr, so they come first.
    "torch": Source(
        "torch.optim.Muon",
        _from_torch,
        {
            *("type torch.optim.muon", "optimizer torch.optim.muon"),
            *("ns_coefficients", "adjust_lr_fn null", "ns_steps with eps 1e-7"),
        },
    ),
    "xtuner": Source(
        "xtuner's Muon",
        _from_xtuner,
        {
            "enable_all2all",
            "clip_grad_mode",
            "skip_grad_norm_threshold",
            "adjust_lr with momentum, eps or max_grad_norm",
        },
    ),
    "dion": Source(
        "Dion's Muon",
        _from_dion,
        {"adjust_lr", "mu", "epsilon", "use_triton", "distributed_mesh", "newton_schulz_func"},
    ),
    # Then by the name muon, which several have: flat arguments are Megatron-LM's, a section is DeepSpeed's or ours.
    "megatron": Source(
        "Megatron-LM's Muon, or verl's", _from_megatron, {"optimizer muon", "optimizer dist_muon", *_MEGATRON}
    ),
    "deepspeed": Source("DeepSpeed's Muon", _from_deepspeed, {"type muon with keys of DeepSpeed"}),
    "deepspeed or this": Source(
        "DeepSpeed's Muon or this one, which have the same keys",
        _from_deepspeed_or_this,
        {"type muon with keys of both"},
    ),
    "this": Source("this Muon", _from_this, {"type muon", "flat with a key of this package"}),
    # Arguments without a name and of no Muon.
    "trainer": Source("AdamW, with the Trainer's arguments", _from_trainer, {"flat optim or learning_rate"}),
}
"""The sources. The first one is read that has a mark of the configuration."""

_AMBIGUOUS = {
    "adjust_lr": "adjust_lr is an argument of Dion's Muon and of xtuner's. It is read as Dion's: for xtuner's, which "
    "has other defaults, give max_grad_norm, too",
    "ns_steps with eps 1e-7": "ns_steps together with eps 1e-07 is read as torch.optim.Muon, where eps guards the norm "
    "and weight_decay is 0.1 unless given. If these are settings of this package, add a key that only it has, as in "
    '"ns_schedule": "quintic"',
}
"""Marks that alone identify a source, although other sources could have them, with a note."""
