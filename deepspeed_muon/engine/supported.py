"""What ``deepspeed.initialize`` refuses, because the result would be wrong: tables of features, each with the reason.

Every condition looks at the engine before its optimizer is made. The ranks agree on the outcome, so that none goes on
without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from pydantic import BaseModel

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.engine.offload import master_dtype, offload_device
from deepspeed_muon.engine.topology import tensor_parallel_group
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.parameters import is_divided
from deepspeed_muon.version import __version__

_Refusal = tuple[Callable[[Any, MuonConfig], Any], str]
"""Whether an engine and the optimizer's settings ask for a feature; why it is refused, and what to do instead."""


def refuse_unsupported(engine: DeepSpeedEngine, config: MuonConfig) -> None:
    """Raise for the first requested feature whose result would be wrong, and for all keys that are not known.

    Args:
        engine: A ``DeepSpeedEngine`` before its optimizer is wrapped.
        config: The optimizer's settings.

    Raises:
        ConfigError: Naming the config key, why, and what to do.
    """
    clipping = engine.gradient_clipping()
    if isinstance(clipping, bool) or not isinstance(clipping, (int, float)) or not clipping >= 0:
        raise ConfigError(
            f"gradient_clipping must be a number of at least 0, got {clipping!r}: DeepSpeed compares it with norms. "
            f"Write a number (0 for no clipping), or leave the key out for DeepSpeed's default"
        )
    for key, (asked, why) in _REFUSED.items():
        if asked(engine, config):
            raise ConfigError(f"{key} is not supported by deepspeed_muon: {why}")
    if unknown := list(_unknown_keys(engine._config.zero_config)):
        raise ConfigError(
            f"zero_optimization.{', zero_optimization.'.join(unknown)} is not supported by deepspeed_muon "
            f"{__version__}: no result with it has been compared with the reference; remove it, or install a newer "
            f"deepspeed_muon"
        )


def expert_parallel(engine: DeepSpeedEngine) -> bool:
    """Return whether the configuration asks for AutoEP."""
    return bool(engine._config.expert_parallel_config.enabled)


def _unknown_keys(section: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yield the keys of ``zero_optimization`` that are not in ``_SUPPORTED_KEYS`` and not at DeepSpeed's default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name not in _SUPPORTED_KEYS:
            if value != field.get_default(call_default_factory=True):
                yield prefix + name
        elif isinstance(value, BaseModel):
            yield from _unknown_keys(value, f"{prefix}{name}.")


def _on_nvme(engine: DeepSpeedEngine, _: MuonConfig) -> bool:
    return offload_device(engine) == "nvme"


def _has_layers_of_deepspeed(engine: DeepSpeedEngine) -> bool:
    return engine.has_moe_layers and any(isinstance(module, MoE) for module in engine.module.modules())


def _is_cut(engine: DeepSpeedEngine) -> bool:
    return tensor_parallel_group(engine) is not None


def _lacks_masters(engine: DeepSpeedEngine, _: MuonConfig) -> bool:
    if engine.zero_optimization_stage() or engine.bfloat16_enabled() or engine.fp16_enabled():
        return False
    # Without a wrapper the optimizer updates the model's own weights.
    halves = (torch.bfloat16, torch.float16)
    return any(param.requires_grad and param.dtype in halves for param in engine.module.parameters())


def _has_sparse_gradients(engine: DeepSpeedEngine, _: MuonConfig) -> bool:
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = (module for module in engine.module.modules() if isinstance(module, embeddings))
    return any(module.sparse and module.weight.requires_grad for module in modules)


def _shares_sequences(engine: DeepSpeedEngine) -> bool:
    return int(engine.sequence_parallel_size) > 1


# The keys of zero_optimization and of its sections in DeepSpeed 0.19.8, without those that need its CUDA quantizer
# (zero_quantized_...), that step AdamW elsewhere (super_offload, zenflow), or that read all state by the keys of the
# first param group (elastic_checkpoint). Keys of later releases may be for another wrapper.
_SUPPORTED_KEYS = frozenset((
    "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm",
    "load_from_fp32_weights", "sub_group_size", "cpu_offload_param",
    "cpu_offload_use_pin_memory", "cpu_offload", "prefetch_bucket_size", "param_persistence_threshold",
    "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
    "gather_16bit_weights_on_model_save", "module_granularity_threshold", "use_all_reduce_for_fetch_params",
    "allgather_sequential", "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters",
    "legacy_stage1", "round_robin_gradients", "parameter_alignment", "zero_hpz_partition_size",
    "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply",
    "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "offload_param",
    "offload_optimizer", "device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory",
    "pipeline_read", "pipeline_write", "fast_init", "ratio", "cpuadam_cores_perc", "leaf_module",
    "classes", "names", "name_suffixes",
))  # fmt: skip

_DIVIDED_ATTENTION = (
    "a rank's attention holds other heads than its weights do, or only some of the layers; unset qk_clip"
)

_REFUSED: dict[str, _Refusal] = {
    # Offload
    "zero_optimization.offload_optimizer.device nvme at stages 1 and 2": (
        lambda engine, config: _on_nvme(engine, config) and engine.zero_optimization_stage() < 3,
        "DeepSpeed keeps the state in memory there. Use stage 3, or device cpu",
    ),
    "zero_optimization.offload_optimizer.ratio with device nvme": (
        lambda engine, config: (
            _on_nvme(engine, config) and engine._config.zero_config.offload_optimizer.ratio < 1
        ),
        "no result was compared with the reference. Remove ratio, or use device cpu",
    ),
    "zero_optimization.offload_optimizer.device nvme with expert_parallel (AutoEP)": (
        lambda engine, config: _on_nvme(engine, config) and expert_parallel(engine),
        "DeepSpeed cannot save it. Use device cpu",
    ),
    "zero_optimization.offload_param.device nvme": (
        lambda engine, _: offload_device(engine, "offload_param") == "nvme",
        "no result was compared with the reference. offload_param.device cpu works, and offload_optimizer.device nvme",
    ),
    # Dtypes of weights and gradients
    "bf16.bf16_master_weights_and_grads at stage 1 with data_types.grad_accum_dtype fp32": (
        lambda engine, _: (
            master_dtype(engine) == torch.bfloat16
            and offload_device(engine) == "none"
            and engine.zero_optimization_stage() == 1
            and engine.get_data_types()[1] == torch.float32
        ),
        "DeepSpeed runs its BF16_Optimizer there, whose masters are fp32 whatever the key says. Use stage 2, or "
        "grad_accum_dtype bf16",
    ),
    "a model in half precision at ZeRO stage 0 without bf16.enabled or fp16.enabled": (
        _lacks_masters,
        "there are no fp32 master weights, so that most of an update is rounded away. Set bf16.enabled (or "
        "fp16.enabled), use stage 1 to 3, or pass the model in fp32",
    ),
    "torch.nn.Embedding(sparse=True)": (
        _has_sparse_gradients,
        "ZeRO divides dense gradients only, and AdamW's moments are dense. Make the embedding with sparse=False",
    ),
    # Features that assume one optimizer for all groups, or another engine
    "compile.deepcompile": (
        lambda engine, _: engine._config.compile_config.deepcompile,
        "it replaces ZeRO's gradient reduction by compiled passes that exist for CUDA only, with which no result has "
        "been compared with the reference; remove it (engine.compile() without it works)",
    ),
    # Kinds of parallelism, and pairs of them
    "DualPipeVModule": (
        lambda engine, _: type(engine).__name__ == "DualPipeVEngine",
        "a rank holds two stages of the model; use deepspeed.pipe.PipelineModule",
    ),
    "a pipeline in half precision at ZeRO stage 0": (
        lambda engine, _: (
            is_divided(engine.module)
            and (engine.fp16_enabled() or engine.bfloat16_enabled())
            and engine.zero_optimization_stage() == 0
        ),
        "DeepSpeed then clips by the norm of the first stage alone; set zero_optimization.stage to 1",
    ),
    "sequence parallelism by mesh_param (or data_parallel_size and sequence_parallel_size)": (
        lambda engine, _: (
            _shares_sequences(engine) and not hasattr(groups.mpu, "get_sequence_data_parallel_group")
        ),
        "ZeRO then leaves out the ranks that share a sequence when it adds up gradients (DeepSpeed's issue 6868); pass "
        "mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp after its initialize_sequence_parallel",
    ),
    "expert_parallel (AutoEP) with deepspeed.moe": (
        lambda engine, _: expert_parallel(engine) and _has_layers_of_deepspeed(engine),
        "experts of both kinds were not compared with the reference together; use one of them",
    ),
    "expert_parallel (AutoEP) with an optimizer that was made before deepspeed.initialize": (
        lambda engine, _: expert_parallel(engine) and isinstance(engine.client_optimizer, Muon),
        "AutoEP replaces the experts, and the new ones need param groups of their own, of which a schedule made for "
        "the old groups would not know. Write the optimizer into the configuration, or pass a callable: "
        "optimizer=lambda params: deepspeed_muon.Muon(model, ...)",
    ),
    "tensor parallelism with deepspeed.moe": (
        lambda engine, _: _has_layers_of_deepspeed(engine) and _is_cut(engine),
        "the ranks of a tensor-parallel group have different experts under equal names; and with "
        "enable_expert_tensor_parallelism DeepSpeed 0.19.8 gathers tokens in a way that gloo refuses, so that no "
        "result was compared with the reference; use one of them",
    ),
    "tensor_parallel with expert_parallel (AutoEP) at ZeRO stages 0, 1 and 2": (
        lambda engine, _: (
            expert_parallel(engine) and _is_cut(engine) and engine.zero_optimization_stage() < 3
        ),
        "DeepSpeed's norm has the experts of one tensor-parallel rank only, so that it clips by the wrong norm; use "
        "stage 3",
    ),
    # Settings of this optimizer
    "optimizer.params.qk_clip with sequence parallelism": (
        lambda engine, config: config.qk_clip is not None and _shares_sequences(engine),
        _DIVIDED_ATTENTION,
    ),
    "optimizer.params.qk_clip with a pipeline": (
        lambda engine, config: config.qk_clip is not None and is_divided(engine.module),
        _DIVIDED_ATTENTION,
    ),
}
