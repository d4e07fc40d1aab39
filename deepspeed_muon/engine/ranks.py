"""Which ranks an engine has, which of them train a parameter, and the facts about the model that they compare."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group
from torch import Tensor

from deepspeed_muon.routing.param_groups import expert_group_name
from deepspeed_muon.routing.shapes import true_shape
from deepspeed_muon.transport.agreement import RankFacts, Scope
from deepspeed_muon.transport.members import Members

__all__ = [
    "data_parallel_scope",
    "has_experts",
    "holders",
    "is_part_of_stack",
    "members_of",
    "model_facts",
    "skips_with",
]


def members_of(engine: Any) -> Members:
    """Return the ranks that make up an engine: data-parallel, sequence-, tensor- and pipeline-parallel ones.

    Args:
        engine: A ``DeepSpeedEngine`` that knows its process groups: from its ``_broadcast_model`` on.
    """
    if not dist.is_available() or not dist.is_initialized():
        return Members()
    groups = [engine.seq_data_parallel_group]
    mpu = engine.mpu
    if engine.mp_world_size > 1:
        # Not mpu.get_model_parallel_group: in a pipeline that spans the stages too.
        groups.append(bwc_tensor_model_parallel_group(mpu))
    pipeline = getattr(
        mpu, "get_pipeline_model_parallel_group", getattr(mpu, "get_pipe_parallel_group", None)
    )
    if pipeline is not None:
        groups.append(pipeline())
    return Members.of(groups)


def holders(param: Tensor, default: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the ranks that train ``param`` together.

    An expert's parameters carry ``allreduce = False`` and the name of their expert-parallel group. The ranks that hold
    the same expert are its expert-data-parallel group; they partition (or replicate) it among themselves.

    Args:
        param: A parameter of the model.
        default: The data-parallel group of everything that is no expert.
    """
    name = expert_group_name(param)
    return default if name is None else deepspeed_groups._get_expert_data_parallel_group(name)


def is_part_of_stack(param: Tensor) -> bool:
    """Return whether a parameter is a stack of some experts of a layer, of which other ranks hold the rest (AutoEP)."""
    return hasattr(param, "ds_autoep_uc_meta")


def skips_with(
    param: Tensor, default: dist.ProcessGroup
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return ``wider_group`` and ``stack_group`` (:class:`deepspeed_muon.step.step_set.StepSet`) of a parameter's set.

    Args:
        param: A parameter of the model.
        default: The data-parallel group of everything that is no expert.
    """
    name = expert_group_name(param)
    if name is None or not is_part_of_stack(param):
        return default, None
    group = deepspeed_groups._get_expert_parallel_group(name)
    return None, group if dist.get_world_size(group) > 1 else None


def has_experts(engine: Any) -> bool:
    """Return whether the model has mixture-of-experts layers of DeepSpeed: ``deepspeed.moe``, or those of AutoEP."""
    return bool(getattr(engine, "has_moe_layers", False))


def data_parallel_scope(engine: Any) -> Scope | None:
    """Return the ranks that train the same parameters; ``None`` for all ranks of the engine."""
    group = getattr(engine, "seq_data_parallel_group", None)
    return None if group is None else Scope.of(group)


def model_facts(engine: Any) -> RankFacts:
    """Return dtype and shape of every parameter, to be equal on the ranks between which DeepSpeed broadcasts it."""
    data_parallel = engine.seq_data_parallel_group
    facts, scopes = {}, {}
    known = {data_parallel: Scope.of(data_parallel)}
    for name, param in engine.module.named_parameters():
        fact = f"parameter {name}"
        facts[fact] = f"{str(param.dtype).removeprefix('torch.')} {list(true_shape(param))}"
        group = holders(param, data_parallel)
        if group not in known:
            known[group] = Scope.of(group)
        scopes[fact] = known[group]
    return RankFacts(facts, scopes=scopes)
