"""What ``deepspeed.initialize`` refuses: features whose result would be wrong.

One function per topic, each looking at the engine before anything is built. Whoever calls :func:`refuse_unsupported`
has all ranks agree on the outcome, so that no rank goes on without the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from deepspeed_muon.checkpoint.host import SOME_RANKS
from deepspeed_muon.config import MuonConfig
from deepspeed_muon.engine.offload import half_states, master_dtype, offload_device
from deepspeed_muon.engine.ranks import members_of
from deepspeed_muon.engine.tensor_parallel import tensor_parallel_group
from deepspeed_muon.errors import UnsupportedConfigError
from deepspeed_muon.routing.pipeline_module import is_divided

__all__ = [
    "expert_parallel",
    "refuse_checkpoints",
    "refuse_unsupported",
    "refuse_with_qk_clip",
]


def refuse_unsupported(engine: Any) -> None:
    """Raise for the first feature that is asked for and whose result would be wrong.

    Args:
        engine: A ``DeepSpeedEngine`` before its optimizer is made.

    Raises:
        UnsupportedConfigError: Naming the config key, why, and what to do.
    """
    for check in _CHECKS:
        check(engine)


def refuse_checkpoints(engine: Any, config: MuonConfig) -> None:
    """Raise where a consolidated checkpoint is asked for of ranks that cannot write one together.

    Args:
        engine: A ``DeepSpeedEngine`` that knows its process groups.
        config: The optimizer's settings.

    Raises:
        UnsupportedConfigError: Naming the config key, why, and what to do.
    """
    wanted = [key for key in ("consolidate_on_save", "restore_from") if getattr(config, key)]
    if not wanted:
        return
    key = f"optimizer.params.{wanted[0]}"
    if any(getattr(module, "ep_size", 1) > 1 for module in engine.module.modules()):
        _refuse(
            f"{key} with deepspeed.moe and ep_size > 1",
            "the ranks hold different experts under equal names; use engine.save_checkpoint alone, or ep_size 1",
        )
    if not members_of(engine).are_everyone:
        _refuse(f"{key} with an engine of some of the program's ranks", SOME_RANKS)


def refuse_with_qk_clip(engine: Any) -> None:
    """Raise where a rank sees a part of the heads or of the layers, so that rows and logits would not belong together.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer has ``qk_clip``.

    Raises:
        UnsupportedConfigError: Naming the config key, why, and what to do.
    """
    sizes = {
        "tensor parallelism": 1 if tensor_parallel_group(engine) is None else 2,
        "sequence parallelism": int(getattr(engine, "sequence_parallel_size", 1) or 1),
        "a pipeline": 2 if is_divided(engine.module) else 1,
    }
    for what, size in sizes.items():
        if size > 1:
            _refuse(
                f"optimizer.params.qk_clip with {what}",
                "a rank's attention holds other heads than its weights do, or only some of the layers; unset qk_clip",
            )


def _refuse(key: str, why: str) -> NoReturn:
    raise UnsupportedConfigError(f"{key} is not supported by deepspeed_muon: {why}")


def _offload(engine: Any) -> None:
    offload = getattr(engine._config.zero_config, "offload_optimizer", None)
    if getattr(offload, "super_offload", False):
        _refuse(
            "zero_optimization.offload_optimizer.super_offload",
            "it steps AdamW in worker processes that see one rank's slice of a matrix, while Muon needs whole matrices "
            "of all ranks. Remove super_offload; offload_optimizer.device cpu works",
        )
    for section in ("offload_optimizer", "offload_param"):
        if offload_device(engine, section) == "nvme":
            _refuse(
                f"zero_optimization.{section}.device nvme",
                "swapped to a disk, DeepSpeed's own AdamW did not give the result that it gives in memory, and neither "
                "did ours. Use device cpu",
            )


def _zenflow(engine: Any) -> None:
    if getattr(engine._config.zero_config, "zenflow", None) is not None:
        _refuse(
            "zero_optimization.zenflow",
            "it updates the columns with the largest gradients every step and the others later, and orthogonalisation "
            "needs all columns of a matrix at once. Remove zenflow; offload_optimizer.device cpu works",
        )


def _masters(engine: Any) -> None:
    dtype = master_dtype(engine)
    if dtype == torch.float32 or offload_device(engine) != "none":
        return
    if dtype == torch.float16:
        _refuse(
            "fp16.fp16_master_weights_and_grads without offload",
            "DeepSpeed keeps fp16 masters on the CPU only. Add zero_optimization.offload_optimizer.device cpu, or "
            "remove the key",
        )
    if not half_states(engine):
        _refuse(
            "bf16.bf16_master_weights_and_grads without offload",
            "on the device DeepSpeed keeps bf16 masters together with bf16 state only. Add "
            "bf16.bf16_optimizer_states, or zero_optimization.offload_optimizer.device cpu",
        )
    if engine.zero_optimization_stage() == 1 and engine.get_data_types()[1] == torch.float32:
        _refuse(
            "bf16.bf16_master_weights_and_grads at stage 1 with data_types.grad_accum_dtype fp32",
            "DeepSpeed runs its BF16_Optimizer there, whose masters are fp32 whatever the key says. Use stage 2, or "
            "grad_accum_dtype bf16",
        )


def expert_parallel(engine: Any) -> bool:
    """Return whether the configuration asks for AutoEP."""
    return bool(getattr(getattr(engine._config, "expert_parallel_config", None), "enabled", False))


def _experts(engine: Any) -> None:
    if expert_parallel(engine):
        _refuse(
            "expert_parallel (AutoEP)",
            "DeepSpeed 0.19 cannot build it for models of transformers 5, so that no result was compared; stacked "
            "experts work without it, and so does deepspeed.moe.layer.MoE",
        )
    if getattr(engine, "has_moe_layers", False) and engine.zero_optimization_stage() == 3:
        _refuse(
            "deepspeed.moe at ZeRO stage 3", "DeepSpeed cannot divide its experts there; use stage 1 or 2"
        )


def _tensor_parallel(engine: Any) -> None:
    if tensor_parallel_group(engine) is None:
        return
    if getattr(engine, "has_moe_layers", False):
        _refuse("tensor parallelism with deepspeed.moe", "experts are cut by both; use one of them")
    if is_divided(engine.module):
        _refuse(
            "tensor parallelism inside deepspeed.pipe",
            "it was not compared with the reference; use one of them",
        )


def _pipeline(engine: Any) -> None:
    half = engine.fp16_enabled() or engine.bfloat16_enabled()
    if is_divided(engine.module) and half and engine._config.zero_config.stage == 0:
        _refuse(
            "a pipeline in half precision at ZeRO stage 0",
            "DeepSpeed then clips by the norm of the first stage alone; set zero_optimization.stage to 1",
        )


def _sequence_parallel(engine: Any) -> None:
    from deepspeed.utils import groups

    size = int(getattr(engine, "sequence_parallel_size", 1) or 1)
    if size > 1 and not hasattr(groups.mpu, "get_sequence_data_parallel_group"):
        _refuse(
            "sequence parallelism by mesh_param (or data_parallel_size and sequence_parallel_size)",
            "ZeRO then leaves out the ranks that share a sequence when it adds up gradients; pass mpu="
            "deepspeed.runtime.sequence_parallel.parallel_state_sp after its initialize_sequence_parallel",
        )


def _quantized_communication(engine: Any) -> None:
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if getattr(engine._config.zero_config, key, False):
            _refuse(
                f"zero_optimization.{key}",
                "it needs DeepSpeed's CUDA quantizer, with which no result has been compared with the reference; "
                "remove it (zero_hpz_partition_size works)",
            )


def _mics(engine: Any) -> None:
    if getattr(engine._config.zero_config, "mics_shard_size", -1) > 0:
        _refuse(
            "zero_optimization.mics_shard_size",
            "its shards are replicated between groups of ranks, and DeepSpeed has removed it; use "
            "zero_hpz_partition_size, which keeps a second copy of the weights inside each node",
        )


def _elastic_checkpoint(engine: Any) -> None:
    zero = engine._config.zero_config
    if zero.stage in (1, 2) and getattr(zero, "elastic_checkpoint", False):
        _refuse(
            "zero_optimization.elastic_checkpoint",
            "it reads the state of every param group by the first one's keys, and Muon's and AdamW's differ; remove it "
            "and use deepspeed_muon.checkpoint.consolidate and restore to change the number of ranks",
        )


def _deepcompile(engine: Any) -> None:
    if getattr(getattr(engine._config, "compile_config", None), "deepcompile", False):
        _refuse(
            "compile.deepcompile",
            "it replaces ZeRO's gradient reduction by compiled passes that exist for CUDA only, with which no result "
            "has been compared with the reference; remove it (engine.compile() without it works)",
        )


def _dual_pipe(engine: Any) -> None:
    if type(engine).__name__ == "DualPipeVEngine":
        _refuse("DualPipeVModule", "a rank holds two stages of the model; use deepspeed.pipe.PipelineModule")


_CHECKS: tuple[Callable[[Any], None], ...] = (
    _offload,
    _zenflow,
    _masters,
    _quantized_communication,
    _mics,
    _elastic_checkpoint,
    _deepcompile,
    _dual_pipe,
    _pipeline,
    _sequence_parallel,
    _experts,
    _tensor_parallel,
)
