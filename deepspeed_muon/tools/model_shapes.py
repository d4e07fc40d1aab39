"""Loads parameter names and shapes, without weights, from a preset, a configuration or a function.

Nothing is downloaded. Models are built on the meta device, so that routing treats their parameters exactly as those of
a real model.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.routing.evidence import NamedParameter
from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.routing.shapes import true_shape
from deepspeed_muon.tools.command_line import MODEL_FORMS

Shapes = dict[str, tuple[int, ...]]

# From the models' published config.json files; kimi-k2 has the architecture and size (1T), not the exact values.
PRESETS: dict[str, dict[str, Any]] = {
    "llama-7b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-70b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
    },
    "kimi-k2": {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
}


_SAME_SHAPES = {"kimi_k2": "deepseek_v3"}
"""Architectures that transformers lacks, each with one that has the same parameters."""


def load_model(source: str, device: str = "meta") -> list[NamedParameter]:
    """Return the parameters of the model that ``source`` names, in the model's order.

    Args:
        source: One of :data:`~deepspeed_muon.tools.command_line.MODEL_FORMS`.
        device: The device on which a MODULE:FUNCTION builds its model.

    Raises:
        ConfigError: If ``source`` has no such form, or the model cannot be built.
    """
    path = Path(source)
    if ":" in source and not path.exists():
        return list(model_parameters_by_name(_from_function(source, device)).values())
    return from_config(model_config(source))


def model_config(source: str) -> dict[str, Any]:
    """Return the Hugging Face configuration of the model that ``source``, one of ``MODEL_FORMS``, names.

    Raises:
        ConfigError: If there is no configuration.
    """
    path = Path(source)
    if source in PRESETS:
        return PRESETS[source]
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{source!r}: a folder without config.json")
        return read_object(path / "config.json")
    if path.is_file() and path.suffix == ".json":
        return read_object(path)
    if path.suffix == ".py":
        raise ConfigError(f"{source}: name a function in it, {path.stem}:FUNCTION")
    if path.suffix == ".json" or path.is_file():
        raise ConfigError(f"{source}: {'not a config.json' if path.is_file() else 'no such file'}")
    try:
        import transformers
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise ConfigError(
            f"{source!r} is no preset ({', '.join(PRESETS)}){did_you_mean(source, PRESETS)} and no file. Names of "
            f"models need transformers: pip install 'deepspeed-muon[hf]'; or pass MODULE:FUNCTION"
        ) from None
    if source in transformers.CONFIG_MAPPING:
        return {"model_type": source}
    try:
        config_class = getattr(transformers, source).config_class
        return {"model_type": config_class.model_type, "architectures": [source]}
    except (AttributeError, ImportError):  # transformers imports a class on its first use
        pass
    cached: Any = None
    with contextlib.suppress(ValueError):  # not a valid repository name
        cached = try_to_load_from_cache(source, "config.json")
    if isinstance(cached, str):
        return read_object(Path(cached))
    names = [
        *PRESETS,
        *transformers.CONFIG_MAPPING,
        *(name for name in dir(transformers) if name[0].isupper()),
    ]
    if source not in names and (hint := did_you_mean(source, names)):  # a Trainer is no model
        raise ConfigError(f"{source!r} names no model{hint}")
    raise ConfigError(
        f"{source!r} is none of {MODEL_FORMS}. Nothing is downloaded: for a model on the Hub pass its config.json"
    )


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the question behind an error about an unknown name, empty without a similar one."""
    similar = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def _from_function(source: str, device: str) -> nn.Module:
    """Return the model that ``MODULE:FUNCTION`` builds on a device.

    Raises:
        ConfigError: If the function cannot be imported, raises or returns no module.
    """
    module, _, function = source.rpartition(":")
    if module.endswith(".py") or "/" in module:
        stem = Path(module).stem
        raise ConfigError(f"{source}: run the command in the folder of {module}, and write {stem}:{function}")
    try:
        model: Any = functools.reduce(getattr, function.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # of any type, because this runs the user's module
        raise ConfigError(
            f"{source}: cannot be imported: {_in_one_line(error)}. Run the command in the folder of the module, and "
            f"write MODULE:FUNCTION as in models.gpt:build"
        ) from error
    try:
        with torch.device(device):
            model = model if isinstance(model, nn.Module) else model()
    except (Exception, SystemExit) as error:  # of any type, because this runs the user's function
        remedy = "It is called without arguments: write a function that needs none and returns the model"
        if device == "meta" and not isinstance(error, TypeError | SystemExit):
            remedy = "On the meta device tensors have no values: if it needs some, build it with --device cpu"
        raise ConfigError(f"{source}: {_in_one_line(error)}. {remedy}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{source} returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def as_autoep(members: Sequence[NamedParameter]) -> list[NamedParameter]:
    """Return the parameters as they are after AutoEP has replaced the expert layers: gate and up are separate stacks.

    Args:
        members: The parameters before AutoEP.

    Raises:
        ConfigError: If there are no stacks of experts.
    """
    replaced = _with_experts(
        members,
        lambda module, stacks: {
            f"{module}.{_AUTOEP.get(name, name)}": shape for name, shape in stacks.items()
        },
    )
    if len(replaced) == len(members):  # AutoEP splits every gate_up_proj
        raise ConfigError("--expert-parallel: no stacks of experts in this model")
    return replaced


# Names of the projections after AutoEP has replaced a layer of transformers.
_AUTOEP = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def with_separate_experts(members: Sequence[NamedParameter]) -> list[NamedParameter]:
    """Return the parameters of the same model with separate weights for every expert instead of stacks."""
    return _with_experts(
        members,
        lambda module, stacks: {
            # (experts, out, in) becomes an (out, in) for each expert
            f"{module}.{expert}.{name}.weight": shape[1:]
            for expert in range(next(iter(stacks.values()))[0])
            for name, shape in stacks.items()
        },
    )


def _with_experts(
    members: Sequence[NamedParameter], shapes_of: Callable[[str, Shapes], Shapes]
) -> list[NamedParameter]:
    """Replace the stacks of each module of experts by ``shapes_of(module name, stacks by projection)``."""
    replaced: list[NamedParameter] = []
    for module, group in itertools.groupby(members, key=_module_of_stack):
        if module is None:
            replaced += group
        else:
            stacks = {name: shape for member in group for name, shape in _projections(member).items()}
            replaced += _from_shapes(shapes_of(module, stacks))
    return replaced


def _module_of_stack(member: NamedParameter) -> str | None:
    """Return the name of the module of a stack of experts, ``None`` for any other parameter."""
    module = member.name.rpartition(".")[0]
    return module if module.endswith("experts") and len(true_shape(member.param)) == 3 else None


def _projections(member: NamedParameter) -> Shapes:
    """Return the shapes of the projections in a stack, by name; a fused gate_up_proj is split into two."""
    count, out, into = true_shape(member.param)  # (experts, output, input)
    if member.layer is not None and member.layer.transposed:
        out, into = into, out
    projection = member.name.rpartition(".")[2]
    if projection == "gate_up_proj":
        return dict.fromkeys(("gate_proj", "up_proj"), (count, out // 2, into))
    return {projection: (count, out, into)}


def read_object(path: Path, loads: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """Return the object in a file of JSON, or of another format that ``loads`` parses.

    Raises:
        ConfigError: If the file cannot be read or parsed, or its content is not an object.
    """
    try:
        content = loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable JSON: {_in_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return content


def _from_shapes(shapes: Shapes) -> list[NamedParameter]:
    """Return parameters on the meta device with the given names and shapes, in the same order."""
    return [
        NamedParameter(
            (name,), nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"), requires_grad=True)
        )
        for name, shape in shapes.items()
    ]


def from_config(config: Mapping[str, Any]) -> list[NamedParameter]:
    """Return the parameters of the model that transformers builds of a Hugging Face configuration.

    Raises:
        ConfigError: If transformers is not installed, or cannot build the model.
    """
    model_type = str(config.get("model_type", ""))
    if not model_type:
        raise ConfigError(
            "no model_type: not the config.json of a Hugging Face model (a DeepSpeed configuration goes to --params)"
        )
    try:
        import transformers
    except ImportError:
        transformers = None
    class_name = _SAME_SHAPES.get(model_type, model_type)
    if transformers is None or class_name not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"the shapes of a model of model_type {model_type!r} come from transformers, which is not installed or "
            f"does not know it: pip install 'deepspeed-muon[hf]', or pass MODULE:FUNCTION"
        )
    settings = {key: value for key, value in config.items() if key != "model_type"}
    try:
        parsed = transformers.CONFIG_MAPPING[class_name](**settings)
        # The class that saved the configuration determines the head of the model: LlamaForCausalLM has lm_head.
        saved_classes = [getattr(transformers, str(name), None) for name in parsed.architectures or ()]
        matching: list[Any] = [
            model_class
            for model_class in saved_classes
            if getattr(model_class, "config_class", None) is type(parsed)
        ]
        is_causal = type(parsed) in transformers.AutoModelForCausalLM._model_mapping
        auto_class = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
        with torch.device("meta"):
            model: nn.Module = matching[0](parsed) if matching else auto_class.from_config(parsed)
    except Exception as error:  # of any type, because this runs the architecture's code
        raise ConfigError(
            f"transformers {transformers.__version__} cannot build this model of model_type {model_type!r}: {error}"
        ) from error
    return list(model_parameters_by_name(model).values())
