"""Pure data: who holds which run of which matrix, who owns it, and what travels. No communication, no DeepSpeed."""

from deepspeed_muon.plan.exchange import Chunk, ExchangePlan, build_exchange_plan
from deepspeed_muon.plan.layout import (
    Block,
    Fragment,
    MatrixLayout,
    ParameterLayout,
    flat_fragments,
    replicated_fragments,
    sharded_fragments,
)
from deepspeed_muon.plan.owners import assign_owners, matrix_flops

__all__ = [
    "Block",
    "Chunk",
    "ExchangePlan",
    "Fragment",
    "MatrixLayout",
    "ParameterLayout",
    "assign_owners",
    "build_exchange_plan",
    "flat_fragments",
    "matrix_flops",
    "replicated_fragments",
    "sharded_fragments",
]
