"""Every key of ``optimizer.params`` and of the constructor, with its type, default, check and documentation.

The keys of DeepSpeed's own Muon have the same names, meanings and defaults, so that an existing configuration runs
unchanged, except for ``torch_adam`` and ``per_head_muon``, which do not exist. Unknown keys are errors, because a run
that ignores a misspelt key has the wrong settings.

A setting of the caller's param group overrides the key of one algorithm (``muon_lr``, ``adam_weight_decay``, ...),
which overrides the shared key (``lr``, ``weight_decay``).

The descriptions are Markdown: the optimizer's docstring and ``docs/settings.md`` are made from them.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import operator
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from deepspeed_muon.config.keywords import MuonKeywords
from deepspeed_muon.config.values import (
    TORCH_OPTIONS,
    Flag,
    Fraction,
    Integer,
    MatricesConfig,
    MomentumWarmupConfig,
    Number,
    QkClipConfig,
    Rate,
    RestoreConfig,
    plain,
    readable,
    shown,
    unknown_key_message,
)
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.coefficients import (
    Coefficients,
    NsScheduleName,
    resolve_schedule,
    steps_that_need_an_exact_input,
    tolerates_rounding,
)
from deepspeed_muon.math.newton_schulz import DTYPES, NsDtypeName, NsMethod, NsSettings, resolve_ns_dtype
from deepspeed_muon.math.updates import AdjustLrName, WeightDecayMode
from deepspeed_muon.ops.dispatch import NsBackend
from deepspeed_muon.ops.torch_operators import BLOCK
from deepspeed_muon.variants import SETTINGS as VARIANT_SETTINGS
from deepspeed_muon.variants import VARIANTS

OUR_TYPE = "deepspeed_muon"
MUON_TYPES = ("muon", OUR_TYPE)
"""The values of ``optimizer.type``, in lower case, that mean this optimizer; DeepSpeed has a Muon of the first name."""

DEFAULT_MUON_LR = 0.02
DEFAULT_ADAM_LR = 3e-4


GroupSettings: TypeAlias = dict[str, Any]
"""A param group of ``torch.optim``, or its settings without ``params``."""

RATE_KEYS = ("lr", "muon_lr", "adam_lr")
"""Keys whose value the constructor also takes as a tensor, which is then stored in the param groups."""

_Class = TypeVar("_Class", bound=type)

# The names and settings of variants are declared in their own files. Type checkers cannot follow that, so they see a
# model without these fields, and any string as a name.
if TYPE_CHECKING:
    VariantName: TypeAlias = str
    _VariantSettings = BaseModel
else:
    VariantName = Literal[tuple(VARIANTS)]
    _VariantSettings = create_model(
        "_VariantSettings",
        **{
            setting.name: (
                Annotated[Number, setting.limits],
                Field(default=setting.default, description=setting.description),
            )
            for setting in VARIANT_SETTINGS.values()
        },
    )


class MuonConfig(_VariantSettings):
    """The settings of one optimizer. Frozen, so that a run has the settings that its ranks compared at the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: Rate | None = Field(
        default=None,
        description="Learning rate of all parameters, unless `muon_lr` or `adam_lr` is set.",
    )
    muon_lr: Rate | None = Field(
        default=None, description=f"Learning rate of Muon; unset: `lr`, else {DEFAULT_MUON_LR}."
    )
    adam_lr: Rate | None = Field(
        default=None, description=f"Learning rate of AdamW; unset: `lr`, else {DEFAULT_ADAM_LR}."
    )
    momentum: Fraction = Field(default=0.95, description="Decay of Muon's momentum.")
    momentum_warmup: MomentumWarmupConfig | None = Field(
        default=None,
        description='Raises the momentum linearly in the first steps, as in `{"from": 0.85, "steps": 300}` '
        "([momentum](settings.md#momentum)).",
    )
    nesterov: Flag = Field(default=True, description="Nesterov momentum.")
    weight_decay: Rate = Field(default=0.0, description="Weight decay of all parameters.")
    muon_weight_decay: Rate | None = Field(
        default=None, description="Weight decay of Muon; unset: `weight_decay`."
    )
    adam_weight_decay: Rate | None = Field(
        default=None, description="Weight decay of AdamW; unset: `weight_decay`."
    )
    weight_decay_mode: WeightDecayMode = Field(
        default="decoupled",
        description="`decoupled` (multiplied by the learning rate), `independent` (not), `cautious` (decoupled, only "
        "where the update has the weight's sign).",
    )
    # AdamW divides by the root of the second moment. With a second beta of 0 that is |gradient|, and the update would
    # be its sign.
    betas: tuple[Fraction, Annotated[Number, Field(gt=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="AdamW's betas; the second must be above 0."
    )
    # A smaller one may round to 0 in fp32, and 0 / 0 is NaN; values up to 1 are in use.
    eps: Annotated[Number, Field(ge=1e-30, le=100)] = Field(default=1e-10, description="AdamW's epsilon.")
    adam_w_mode: Flag = Field(default=True, description="`true`: AdamW; `false`: Adam with an L2 term.")
    adjust_lr_fn: AdjustLrName = Field(
        default="original",
        description="How the update is scaled by the shape of the matrix ([rules](settings.md#scale-of-the-update)).",
    )
    update_scale: Annotated[Number, Field(gt=0, le=1e4)] = Field(
        default=1.0,
        description="Another factor of Muon's updates, after `adjust_lr_fn`; it does not scale the weight decay "
        "(Megatron-LM's `muon_extra_scale_factor`).",
    )
    ns_method: NsMethod = Field(
        default="gram",
        description="`gram` iterates on the Gram matrix if the sides differ enough, `standard` on the matrix itself.",
    )
    ns_schedule: NsScheduleName | list[tuple[Number, Number, Number]] = Field(
        default="quintic",
        description="Coefficients of the Newton-Schulz steps: `quintic` or `polar_express` (any number of steps), "
        "`polar_express_5` or `cans` (5 steps), `deepseekv4` (10 steps), or your own, as `[[a, b, c], ...]`.",
    )
    ns_steps: Integer | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Number of Newton-Schulz steps; unset: 5, or the length of the schedule. A schedule of fixed "
        "length allows no other number.",
    )
    ns_dtype: NsDtypeName = Field(
        default="auto",
        description="Dtype of Newton-Schulz: `fp32`, `bf16` or `fp16`. `auto` is fp16 on CUDA, bf16 on CPUs with AMX "
        "and on AMD CPUs with AVX512-BF16, else fp32; and always fp32 for schedules that are sensitive to rounding "
        "(`cans`, which refuses `bf16` and `fp16`).",
    )
    ns_backend: NsBackend = Field(
        default="auto",
        description="`auto`: kernels by a fixed rule ([usage.md](usage.md#native-operators)); `ops`: native operators, "
        "or an error without them; `torch`: torch's.",
    )
    variant: VariantName = Field(
        default="muon",
        description="; ".join(
            f"`{variant.name}`: {variant.description}" if variant.description else f"`{variant.name}`"
            for variant in VARIANTS.values()
        )
        + ".",
    )
    qk_clip: QkClipConfig | None = Field(
        default=None,
        description="MuonClip: after each step, scale down the query and key rows of attention heads whose largest "
        "logit exceeded the threshold. `{}` enables it with the defaults; the constructor then needs `model`.",
    )
    momentum_dtype: Literal["fp32", "bf16", "int8"] | None = Field(
        default=None,
        description="Dtype in which momentum is stored: `fp32`, `bf16` or `int8` (with an fp32 scale per 256 "
        "elements). Arithmetic is in fp32. Unset: fp32, or bf16 with DeepSpeed's `bf16_optimizer_states`.",
    )
    wire_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="Dtype in which momentum directions and updates are sent between ranks. `auto`: bf16 for bf16 and "
        "fp16 models, else fp32.",
    )
    matrices: dict[str, MatricesConfig] = Field(
        default_factory=dict,
        description="Which matrices a weight is made of, by name pattern: "
        '`{"*.qkv.weight": {"split": "qkv", "heads": "config"}}` '
        "([routing.md](routing.md#which-matrices-a-weight-is-made-of)).",
    )
    include: tuple[str, ...] = Field(
        default=(),
        description="Name patterns (shell globs, or `re:` and a regular expression) of parameters for Muon.",
    )
    exclude: tuple[str, ...] = Field(
        default=(), description="Name patterns of parameters for AdamW; overrides `include`."
    )
    nonfinite_grad: Literal["skip", "error"] = Field(
        default="skip",
        description="What to do about an infinity or NaN in a gradient: `skip` the step, or raise an `error`. With a "
        "dynamic loss scale the step is always skipped.",
    )
    exchange_chunk_numel: Annotated[Integer, Field(ge=1, le=1 << 40)] = Field(
        default=1 << 26,
        description="Largest number of elements that a rank owns in a chunk; it bounds the communication buffers "
        "([architecture.md](architecture.md#glossary)).",
    )
    exchange_overlap: Flag = Field(
        default=True,
        description="Overlap communication with Newton-Schulz. `false` gives bit-identical results with a third of the "
        "buffers. `true` has no effect if the largest matrix takes the buffers above 1 GiB (90 million elements in "
        "bf16).",
    )
    health: Annotated[Integer, Field(ge=0, le=1_000_000)] = Field(
        default=100,
        description="Steps between two samples for DeepSpeed's monitors. `false` turns off the samples and the check "
        "of every update ([health.md](health.md)).",
    )
    consolidate_on_save: Flag = Field(
        default=False, description="`save_checkpoint` also writes a consolidated set."
    )
    restore_from: RestoreConfig | None = Field(
        default=None,
        description="Consolidated set to load before the first step, or an object with `path` and `progress` "
        "([checkpoints.md](checkpoints.md)).",
    )

    @classmethod
    def from_params(
        cls, params: Mapping[str, object] | None, *, where: str = "optimizer.params"
    ) -> MuonConfig:
        """Check ``optimizer.params`` and return the settings.

        Args:
            params: The JSON object, or ``None`` if the section is absent.
            where: The name of the section in error messages.

        Raises:
            ConfigError: With a line for each bad key, and for each type that it can have, naming the key, the value and
                what is allowed; or if ``ns_schedule`` cannot run for ``ns_steps``.
        """
        if not isinstance(params, (Mapping, type(None))):
            raise ConfigError(f"{where}: must be an object, got {shown(params)}")
        # 1. Unknown keys, with suggestions. Pydantic would only say "Extra inputs are not permitted".
        unknown = [str(key) for key in params or {} if key not in cls.model_fields]
        if unknown:
            raise ConfigError("\n".join(unknown_key_message(key, cls.model_fields, where) for key in unknown))
        # 2. The others, each alone and together; finally those of the iteration, which no param group has.
        config = cls.of_values(params or {}, where)
        config.check_iteration()
        return config

    @classmethod
    def of_values(cls, values: Mapping[str, object], where: str) -> MuonConfig:
        """Return :meth:`from_params` of known keys, without :meth:`check_iteration`."""
        # null is the default
        given = {key: plain(value) for key, value in values.items() if value is not None}
        try:
            config = cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError("\n".join(readable(e, where) for e in error.errors())) from None
        config.check_combinations()
        return config

    def check_iteration(self) -> None:
        """Refuse an ``ns_schedule`` that cannot run for ``ns_steps`` or in ``ns_dtype``."""
        coefficients = self.coefficients()
        if self.ns_dtype != "auto" and not tolerates_rounding(coefficients, DTYPES[self.ns_dtype]):
            raise ConfigError(
                f"optimizer.params.ns_dtype: {self.ns_dtype!r} with ns_schedule {shown(self.ns_schedule)}: its "
                f"polynomials have no margin for the rounding of {self.ns_dtype}, which sends singular values to "
                f"infinity: unset ns_dtype ('auto' takes fp32 for such a schedule), or set it to 'fp32'"
            )

    def check_combinations(self) -> None:
        """Refuse keys that contradict each other.

        Raises:
            ConfigError: Naming both keys.
        """
        if not self.adam_w_mode and self.weight_decay_mode != "decoupled":
            raise ConfigError(
                f"optimizer.params.weight_decay_mode: {self.weight_decay_mode!r} needs adam_w_mode true; "
                f"with adam_w_mode false the decay of AdamW's half is a term of the gradient"
            )
        warmup = self.momentum_warmup
        if warmup is not None and warmup.start >= self.momentum:
            raise ConfigError(
                f"optimizer.params.momentum_warmup.from: {warmup.start:g} must be below momentum, which is "
                f"{self.momentum:g} (in optimizer.params or a param group): a warm-up rises to it. To lower momentum, "
                f"write it into the param groups during the run"
            )
        for key in ("weight_decay", "muon_weight_decay", "adam_weight_decay"):
            if self.weight_decay_mode == "independent" and (getattr(self, key) or 0.0) > 1.0:
                raise ConfigError(
                    f"optimizer.params.{key}: must be at most 1 with weight_decay_mode 'independent', where it is the "
                    f"fraction that each step subtracts from a weight (got {getattr(self, key)!r})"
                )

    def coefficients(self) -> tuple[Coefficients, ...]:
        """Return the ``(a, b, c)`` of every Newton-Schulz step, or raise ``ConfigError``."""
        return resolve_schedule(self.ns_schedule, self.ns_steps)

    def ns_settings(self, device: torch.device) -> NsSettings:
        """Return the schedule, method and dtype of the Newton-Schulz iteration on ``device``.

        ``ns_dtype: auto`` is the fast dtype of the device, or fp32 for a schedule that has no margin for its rounding.
        In half precision a user's own schedule runs the standard iteration if its steps need an exact input (steps with
        a root in (0, 1), such as the first one of ``cans``, lose a singular value near that root): how the Gram
        iteration rounds is measured for the named schedules only.
        """
        coefficients = self.coefficients()
        dtype = resolve_ns_dtype(self.ns_dtype, device)
        # An explicit ns_dtype was checked by check_iteration.
        if self.ns_dtype == "auto" and not tolerates_rounding(coefficients, dtype):
            dtype = torch.float32
        method = self.ns_method
        if (
            not isinstance(self.ns_schedule, str)  # the user's own
            and dtype.itemsize == 2
            and steps_that_need_an_exact_input(coefficients)
        ):
            method = "standard"
        return NsSettings(coefficients=coefficients, method=method, dtype=dtype)

    def resolved_wire_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of directions and updates; under ``auto`` bf16 for a half-precision model, else fp32."""
        if self.wire_dtype in DTYPES:
            return DTYPES[self.wire_dtype]
        return torch.bfloat16 if model_dtype in (torch.bfloat16, torch.float16) else torch.float32

    @property
    def cut_divisor(self) -> int:
        """Stacks are cut for several owners at multiples of so many elements: no block of int8 momentum is cut."""
        return BLOCK if self.momentum_dtype == "int8" else 1

    def muon_defaults(self) -> GroupSettings:
        """Return the settings that Muon reads, before the caller's own param group overrides them."""
        return {
            "lr": _first(self.muon_lr, self.lr, DEFAULT_MUON_LR),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": _first(self.muon_weight_decay, self.weight_decay),
            "adjust_lr_fn": self.adjust_lr_fn,
            "update_scale": self.update_scale,
            "weight_decay_mode": self.weight_decay_mode,
            **{key: getattr(self, key) for key in VARIANT_SETTINGS},
        }

    def adam_defaults(self) -> GroupSettings:
        """Return the settings that AdamW reads, before the caller's own param group overrides them."""
        return {
            "lr": _first(self.adam_lr, self.lr, DEFAULT_ADAM_LR),
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": _first(self.adam_weight_decay, self.weight_decay),
            "weight_decay_mode": self.weight_decay_mode,
        }

    def group_defaults(self, algorithm: str) -> GroupSettings:
        """Return all settings of a param group of ``muon`` or ``adamw``.

        Both have the keys of both, because schedulers write the same keys into all groups.
        """
        muon, adam = self.muon_defaults(), self.adam_defaults()
        # The keys that both read (lr, weight_decay) have the value of the group's own algorithm.
        return {**adam, **muon} if algorithm == "muon" else {**muon, **adam}

    @property
    def reference_lr(self) -> float:
        """The rate that a scheduler's single number stands for: ``lr`` where given, else Muon's rate."""
        return float(_first(self.lr, self.muon_lr, DEFAULT_MUON_LR))


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


GROUP_SETTINGS = frozenset(MuonConfig().group_defaults("muon"))
"""The settings that every param group of the optimizer has."""

GROUP_KEYS = GROUP_SETTINGS | {"muon_lr", "adam_lr", "muon_weight_decay", "adam_weight_decay"}
"""The settings that a caller may write into a param group."""

_GROUP_RATES = {"lr": (-1e4, 1e4), "initial_lr": (0.0, math.inf), "lr_ratio": (0.0, math.inf)}
"""Numbers that schedulers and the optimizer write into a param group, with their bounds. As in AdamW, a schedule may
take ``lr`` below 0, which ``optimizer.params`` refuses.
"""


def refuse_misspelt_keys(group: Mapping[str, object], where: str, not_misspelt: Collection[str]) -> None:
    """Refuse an option of torch's optimizers, or what looks like a misspelt setting, in a param group.

    Args:
        group: The param group. It may have other keys of the caller's, and torch's options that are off.
        where: The group in error messages.
        not_misspelt: Valid keys, some of which look like misspelt settings.

    Raises:
        ConfigError: Naming the key.
    """
    for key, value in group.items():
        # The caller may have keys of its own in a group ("name", "lr_scale"), so unknown ones are refused only if they
        # resemble a setting ("weight_deca").
        is_on = key in TORCH_OPTIONS and value is not None and value is not False
        is_misspelt = key not in not_misspelt and difflib.get_close_matches(
            str(key), GROUP_KEYS, n=1, cutoff=0.8
        )
        if is_on or (is_misspelt and key not in TORCH_OPTIONS):
            raise ConfigError(unknown_key_message(key, GROUP_KEYS, where))


def checked_group_settings(
    group: Mapping[str, object], where: str, config: MuonConfig | None
) -> GroupSettings:
    """Check the settings in a param group as ``optimizer.params`` is checked, and return those that it has.

    Args:
        group: The param group. Keys that are not settings are ignored.
        where: The group in error messages.
        config: The settings with which they have to be compatible; ``None`` for the defaults.

    Raises:
        ConfigError: With a line for each bad key, and for each type that it can have, naming the key and the value.
    """
    # 1. None, which stands for a default in optimizer.params only; and rates, which have bounds of their own here.
    values = {key: group[key] for key in sorted(group.keys() & GROUP_SETTINGS - _GROUP_RATES.keys())}
    rates = {key: plain(group[key]) for key in _GROUP_RATES if key in group}
    problems = [f"{where}.{key}: must be set (got None)" for key, value in values.items() if value is None]
    for key, number in rates.items():
        low, high = _GROUP_RATES[key]
        is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
        if not is_number or not low <= float(number) <= high or math.isinf(number):
            problems.append(
                f"{where}.{key}: must be a number from {low:g} to {high:g} (got {shown(group[key])})"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    # 2. The settings, each alone and together. During a run momentum may have been lowered below the warm-up's start.
    checked = MuonConfig.of_values(
        {**(config or MuonConfig()).model_dump(), "momentum_warmup": None, **values}, where
    )
    return {**{key: getattr(checked, key) for key in values}, **rates}


_settings_of = operator.itemgetter(*sorted(GROUP_SETTINGS - {"lr"}))


def refuse_unusable(
    groups: Sequence[Mapping[str, Any]], config: MuonConfig, checked: dict[int, tuple[object, ...]]
) -> None:
    """Raise a ConfigError for what :func:`checked_group_settings` refuses of the settings that are in the groups now.

    Args:
        groups: The param groups.
        config: The settings with which they have to be compatible.
        checked: By number of the group, the values that the last call accepted. Mutated. A step can spare only some
            microseconds for this, so beside the rate only values that changed are checked.
    """
    low, high = _GROUP_RATES["lr"]
    for number, group in enumerate(groups):
        lr, settings = plain(group["lr"]), _settings_of(group)
        try:
            is_checked = checked.get(number) == settings
        except (RuntimeError, ValueError):  # a tensor or array of several elements, which the check refuses
            is_checked = False
        if not (is_checked and isinstance(lr, float) and low <= lr <= high):
            checked_group_settings(group, f"param group {number}", config)
            checked[number] = tuple(map(plain, settings))


KEYS = sorted(MuonConfig.model_fields.items(), key=lambda item: item[0] in VARIANT_SETTINGS)
"""Every key and its field. Settings of variants, which the model has first, come last."""


def takes_settings(optimizer: _Class) -> _Class:
    """Write every key into the signature and the docstring of a class whose constructor takes ``**settings``.

    Args:
        optimizer: The class. Mutated: the ``__signature__`` of its constructor gets the keys after its own parameters,
            and in its ``__doc__`` an entry for each key, with type and default, replaces that of ``lr, **settings``.
    """
    init: Any = vars(optimizer)["__init__"]
    hints = {
        key: getattr(hint, "__forward_arg__", hint) for key, hint in MuonKeywords.__annotations__.items()
    }
    hints["lr"] = "Tensor | float | None"
    # A variant's setting is not there before scripts/settings_table.py has written it.
    hints = dict.fromkeys(VARIANT_SETTINGS, "float") | hints
    # 1. The signature: the constructor's own parameters, then a keyword for each key.
    signature = inspect.signature(init)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [parameter for parameter in signature.parameters.values() if parameter.kind not in variadic]
    defaults = {name: field.get_default(call_default_factory=True) for name, field in KEYS}
    keys = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in defaults.items()
        if name not in signature.parameters
    ]
    # Signature requires this order of kinds: positional parameters before keywords.
    parameters = sorted([*named, *keys], key=lambda parameter: parameter.kind)
    init.__signature__ = signature.replace(parameters=parameters)
    # 2. The docstring: an entry for each key, from its description.
    entries, indent = [], " " * 8
    for name, field in KEYS:
        # Markdown to reStructuredText: "[momentum](settings.md#momentum)" becomes "docs/settings.md", `x` ``x``.
        text = re.sub(r"\[.*?\]\(([\w.]+)[^)]*\)", r"docs/\1", field.description or "").replace("`", "``")
        kind = f"{hints[name]}, default {defaults[name]!r}" if defaults[name] is not None else hints[name]
        entry = f"{name} ({kind}): {text}"
        entries.append(
            textwrap.fill(entry, 110, initial_indent=indent, subsequent_indent=indent + "    ") + "\n"
        )
    if optimizer.__doc__ is not None:  # python -OO strips docstrings
        optimizer.__doc__ = re.sub(r" *lr, \*\*settings:.*\n", lambda _: "".join(entries), optimizer.__doc__)
    return optimizer
