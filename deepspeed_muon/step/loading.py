"""Checks and converts the state dict given to ``load_state_dict``, before anything of the optimizer changes.

The state dict may have been saved by this optimizer or by one with the same state: the momentum of
``torch.optim.Muon`` and of Keller Jordan's Muon is a running mean of the gradients, as it is here, and AdamW's moments
have one definition. Missing entries are replaced as follows:

- A parameter without an entry, or with an empty one, starts without state, as before its first step.
- Momentum without ``step`` gets ``step`` 0, so that a ``momentum_warmup`` begins. AdamW's moments need ``step``.
- A setting that the saved group does not have remains that of this optimizer.

Anything else that is missing or unknown is an error.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from deepspeed_muon.config.settings import (
    GROUP_SETTINGS,
    GroupSettings,
    MuonConfig,
    checked_group_settings,
    refuse_misspelt_keys,
)
from deepspeed_muon.config.values import TORCH_OPTIONS, StatePolicy, shown
from deepspeed_muon.errors import CheckpointError, ConfigError, RoutingError
from deepspeed_muon.routing.param_groups import CALLER_GROUP
from deepspeed_muon.step.int8 import SCALE_KEY
from deepspeed_muon.variants import ROW_STATE

_FIXED = frozenset(("params", "param_names", "algorithm", "use_muon", CALLER_GROUP, "moe"))
"""Keys that identify a group: they are compared or ignored, and never loaded."""

_SCHEDULER_KEYS = frozenset(("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"))
"""Keys that torch's schedulers add to the groups; without this list some would be reported as misspelt settings."""

_KERNEL_OPTIONS = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Options of torch's optimizers that do not change what is computed."""

STATE_TENSORS = ("momentum_buffer", "exp_avg", "exp_avg_sq")
"""Keys of the state with the shape of a parameter."""

# Keys of a parameter's state, by algorithm.
_REQUIRED = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq", "step")}
_ALLOWED = {
    "muon": frozenset(("momentum_buffer", "step", SCALE_KEY, *ROW_STATE)),
    "adamw": frozenset(_REQUIRED["adamw"]),
}


def read_state_dict(
    state_dict: StateDict,
    param_groups: Sequence[GroupSettings],
    config: MuonConfig,
    policy: StatePolicy,
    *,
    names: Mapping[int, str] | None,
) -> tuple[list[GroupSettings], dict[Tensor, StateDict]]:
    """Check a state dict, and return the new settings of each group and state of each parameter that has one.

    Nothing is mutated. The state is on the devices and in the dtypes of this optimizer. ``names`` maps
    ``id(parameter)`` to its name; it is ``None`` if the tensors in the groups are ZeRO's partitions. Raises the errors
    of :meth:`.Muon.load_state_dict`.
    """
    sizes = [len(group["params"]) for group in param_groups]
    saved_groups, saved_state = _checked_form(state_dict, sizes)
    settings: list[GroupSettings] = []
    state: dict[Tensor, StateDict] = {}
    for number, (saved, group) in enumerate(zip(saved_groups, param_groups, strict=True)):
        where = f"param group {number} of the state dict"
        entries = [saved_state.get(key, {}) for key in saved["params"]]
        _check_kind(where, saved, group["algorithm"], {key for entry in entries for key in entry})
        _check_convention(where, saved, config, entries)
        settings.append(settings_to_load(where, saved, group, config))
        for position, (param, entry) in enumerate(zip(group["params"], entries, strict=True)):
            if entry:
                label = f"partition {position}" if names is None else f"parameter {names[id(param)]}"
                shape = None if names is None else param.shape
                _check_entry(f"{where}, {label}", entry, group["algorithm"], shape=shape)
                state[param] = {**converted(entry, param, policy), "step": int(entry.get("step", 0))}
    return settings, state


def converted(entry: StateDict, param: Tensor, policy: StatePolicy) -> StateDict:
    """Return the state of a parameter on its device and in the dtypes of ``policy``.

    To and from int8 the next step converts (:func:`.int8.convert_momentum`), which needs the layout.
    """
    state = dict(entry)
    for key, value in entry.items():
        if isinstance(value, Tensor):
            dtype = policy.dtype(key, param.dtype) if key in STATE_TENSORS else value.dtype
            if torch.int8 in (dtype, value.dtype):
                dtype = value.dtype
            state[key] = value.to(device=param.device, dtype=dtype)
    return state


def _checked_form(
    state_dict: object, sizes: Sequence[int]
) -> tuple[Sequence[GroupSettings], Mapping[int | str, StateDict]]:
    """Return groups and state; raise unless the groups have these ``sizes``."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError(
            f"a state dict of an optimizer has 'state' and 'param_groups', got {shown(state_dict)}"
        )
    groups: Sequence[GroupSettings] = state_dict["param_groups"]
    if (saved_sizes := [len(group["params"]) for group in groups]) != sizes:
        raise RoutingError(
            f"the param groups of the loaded state dict have {saved_sizes} parameters, those of this optimizer {sizes} "
            f"(Muon and AdamW divide each group of the caller between them). Make the optimizer with the groups of the "
            f"saved one, and the same include and exclude"
        )
    return groups, state_dict["state"]


def _check_kind(where: str, saved: GroupSettings, algorithm: str, state_keys: Set[object]) -> None:
    """Raise if a saved group has a different algorithm, by its keys for that, else its state, else its settings."""
    kinds = [saved["algorithm"]] if "algorithm" in saved else []
    if saved.get("use_muon") is not None:
        kinds.append("muon" if saved["use_muon"] else "adamw")
    if not kinds and state_keys & {"exp_avg", "exp_avg_sq", "momentum_buffer"}:
        kinds.append("adamw" if state_keys & {"exp_avg", "exp_avg_sq"} else "muon")
    elif not kinds and ("betas" in saved) != ("momentum" in saved):
        kinds.append("adamw" if "betas" in saved else "muon")
    if set(kinds) - {algorithm}:
        raise RoutingError(
            f"{where} is of {' and '.join(dict.fromkeys(kinds))}, and this optimizer's of {algorithm}: it was saved "
            f"with other routes, or by another optimizer. Make the optimizer with the same include, exclude and param "
            f"groups"
        )


def _check_convention(
    where: str, saved: GroupSettings, config: MuonConfig, entries: Sequence[StateDict]
) -> None:
    """Raise if the group's momentum or iteration, saved by an optimizer of another library, differs from this one's."""
    # 1. torch.optim.Muon, whose momentum is a mean too: only the iteration, one polynomial ns_steps times, may differ.
    if "ns_coefficients" in saved:
        coefficients, steps = saved["ns_coefficients"], saved.get("ns_steps")
        if [tuple(coefficients)] * (steps or 0) != [*config.coefficients()]:
            raise ConfigError(
                f"{where} was saved by torch.optim.Muon with ns_coefficients {shown(coefficients)} and ns_steps "
                f"{shown(steps)}, and this optimizer iterates otherwise: make it with ns_schedule="
                f"[{shown(list(coefficients))}] * {shown(steps)}"
            )
        return
    # 2. SGD, whose momentum is a sum of gradients, and earlier versions of Keller Jordan's Muon, where it may be one.
    # Those of today have none of these keys, and a mean.
    foreign = sorted(saved.keys() & {"dampening", "nesterov", "ns_steps", "backend_steps"})
    if "algorithm" in saved or not foreign:
        return
    if any("momentum_buffer" in entry and "step" not in entry for entry in entries):
        raise CheckpointError(
            f"{where} was saved by SGD or an unknown Muon (it has {', '.join(foreign)}, and momentum without step), "
            f"where momentum may be a sum of gradients; here it is their mean. If it is a mean (buf.lerp_(grad, 1 - "
            f"momentum)), set 'algorithm' to 'muon' in the group; if it is a sum, multiply momentum_buffer by 1 - "
            f"momentum before"
        )


def settings_to_load(
    where: str, saved: Mapping[str, object], group: GroupSettings, config: MuonConfig
) -> GroupSettings:
    """Return the settings of ``group``, updated by those of ``saved`` after the checks of the constructor."""
    is_torch_muon = "ns_coefficients" in saved
    ignored = _FIXED | _KERNEL_OPTIONS | {"decoupled_weight_decay"}
    if group.get("moe"):  # DeepSpeed finds the experts by their group's name
        ignored |= {"name"}
    if is_torch_muon:  # its eps bounds a norm, that of this optimizer is AdamW's
        ignored |= {"ns_coefficients", "ns_steps", "eps"}
    decoupled = saved.get("decoupled_weight_decay", config.adam_w_mode)
    if decoupled != config.adam_w_mode and saved.get("weight_decay"):
        raise ConfigError(
            f"{where}: decoupled_weight_decay is {decoupled!r}, and this optimizer's adam_w_mode "
            f"{config.adam_w_mode!r}: make it with adam_w_mode={bool(decoupled)!r}"
        )
    # A key that is neither known nor ignored would silently lose its effect.
    values = {key: value for key, value in saved.items() if key not in ignored}
    refuse_misspelt_keys(values, where, GROUP_SETTINGS | _SCHEDULER_KEYS | group.keys())
    loaded = {key: copy.deepcopy(value) for key, value in values.items() if key not in TORCH_OPTIONS}
    if is_torch_muon and loaded.get("adjust_lr_fn", "") is None:
        loaded["adjust_lr_fn"] = "original"
    checked = checked_group_settings(loaded, where, config)
    # A learning rate in a tensor remains that tensor, so that changes of its value take effect.
    rates = {key for key in ("lr", "weight_decay", "initial_lr") if isinstance(loaded.get(key), Tensor)}
    return {**group, **loaded, **{key: value for key, value in checked.items() if key not in rates}}


def _check_entry(label: str, entry: StateDict, algorithm: str, *, shape: torch.Size | None) -> None:
    """Raise unless the state of one parameter is that of its algorithm.

    ``shape`` is ``None`` for a partition, whose size depends on the number of ranks.
    """
    refusal = ""
    if missing := [key for key in _REQUIRED[algorithm] if key not in entry]:
        refusal = f"its state has no {missing[0]!r}, which {algorithm} needs"
    elif unknown := [key for key in entry if key not in _ALLOWED[algorithm]]:
        refusal = f"its state has {unknown[0]!r}, which is none of {algorithm}'s"
    for key, value in entry.items():
        if refusal:
            break
        if key == "step":
            refusal = "" if _is_count(value) else f"'step' is {shown(value)}, expected a count of steps"
            continue
        if not isinstance(value, Tensor):
            refusal = f"{key!r} is {shown(value)}, expected a tensor"
            break
        # Only momentum may be int8, and then it is useless without its scales.
        is_int8 = value.dtype == torch.int8
        if key == "momentum_buffer" and is_int8 != (SCALE_KEY in entry):
            refusal = f"{key!r} is {value.dtype} {'without' if is_int8 else 'with'} {SCALE_KEY!r}"
        elif shape is not None and key in STATE_TENSORS and value.shape != shape:
            refusal = f"{key!r} has the shape {list(value.shape)}, and the parameter {list(shape)}"
        elif not torch.isfinite(value).all():
            refusal = f"{key!r} holds an infinity or NaN, with which it would never train again"
    if refusal:
        raise CheckpointError(
            f"{label}: {refusal}; remove its entry from 'state', and it starts without state"
        )


def _is_count(value: object) -> bool:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    # Larger floats do not count every step; NaN is not in the range.
    return 0 <= float(value) < 1 << 53 and float(value).is_integer()
