"""Which ranks make up an engine, and what they say of its model before DeepSpeed broadcasts it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from deepspeed_muon.engine.experts import holders
from deepspeed_muon.routing.rules import true_shape
from deepspeed_muon.transport.agreement import RankFacts, group_rank_scope
from deepspeed_muon.transport.members import Members

__all__ = ["data_parallel_scope", "members_of", "model_facts"]


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
        groups.append(mpu.get_model_parallel_group())
    pipeline = getattr(
        mpu, "get_pipeline_model_parallel_group", getattr(mpu, "get_pipe_parallel_group", None)
    )
    if pipeline is not None:
        groups.append(pipeline())
    return Members.of(groups)


def data_parallel_scope(engine: Any) -> str:
    """Return a text that is shared by the ranks that train the same parameters."""
    return group_rank_scope(getattr(engine, "seq_data_parallel_group", None))


def model_facts(engine: Any) -> RankFacts:
    """Return dtype and shape of every parameter, to be equal on the ranks between which DeepSpeed broadcasts it.

    Args:
        engine: A ``DeepSpeedEngine`` that knows its process groups.
    """
    data_parallel = engine.seq_data_parallel_group
    facts, scopes = {}, {}
    for name, param in engine.module.named_parameters():
        fact = f"parameter {name}"
        facts[fact] = f"{str(param.dtype).removeprefix('torch.')} {list(true_shape(param))}"
        scopes[fact] = group_rank_scope(holders(param, data_parallel))
    return RankFacts(facts, scope=group_rank_scope(data_parallel), scopes=scopes)
