"""The changes of topology that checkpoints are tried with; ``tests/distributed/test_topologies.py`` makes them."""

from __future__ import annotations

from typing import Any

from tests.support import training


def on(ranks: int, kind: str, stage: int, size: int = 1, **settings: Any) -> tuple[int, dict[str, Any]]:
    """Return a number of ranks and the topology on them; ``size`` is the tensor, expert or pipeline size."""
    return ranks, {"kind": kind, "stage": stage, "size": size, **settings}


ROUND = {"zero": {"round_robin_gradients": True}}
SMALL = {"zero": {"sub_group_size": 300}}
OFFLOAD = {"zero": training.OFFLOAD}
BLOCKS_BY_ADAM = {"exclude": ["blocks.*"]}
NORMUON = {"variant": "normuon"}
HEADS = {**NORMUON, "matrices": {"blocks.*.up.weight": {"heads": 4}}}

CHANGES = {
    # tensor parallelism: with it, without it, of another size, the other convention
    "tensor 2 to data 3": (on(4, "megatron", 1, 2), on(3, "data", 3)),
    "data 3 to tensor 2": (on(3, "data", 2, **ROUND), on(4, "megatron", 3, 2)),
    "tensor 2 to tensor 4": (on(4, "megatron", 3, 2), on(4, "megatron", 2, 4)),
    "tensor 4 to tensor 2 alone": (on(4, "megatron", 0, 4), on(2, "megatron", 1, 2)),
    "tensor 2 to AutoTP 2": (on(2, "megatron", 2, 2), on(4, "autotp", 1, 2)),
    "AutoTP 2 to data 1": (on(4, "autotp", 3, 2), on(1, "data", 0)),
    "data 2 to AutoTP 2": (on(2, "data", 0), on(4, "autotp", 2, 2)),
    "AutoTP 4 to tensor 2": (on(4, "autotp", 0, 4), on(4, "megatron", 0, 2)),
    "tensor 2 with fused parts to tensor 4": (
        on(4, "megatron", 1, 2, mark="fused"),
        on(4, "megatron", 2, 4, mark="fused"),
    ),
    "tensor 2 with fused parts to data 2": (on(4, "megatron", 3, 2, mark="fused"), on(2, "data", 1)),
    "tensor 2 with unequal shards of AdamW to data 2": (
        on(4, "megatron", 1, 2, mark="uneven", params=BLOCKS_BY_ADAM),
        on(2, "data", 2, params=BLOCKS_BY_ADAM),
    ),
    "tensor 2 offloaded to data 2": (on(4, "megatron", 2, 2, **OFFLOAD), on(2, "data", 3, **SMALL)),
    "tensor 2, NorMuon, to data 2": (
        on(4, "megatron", 1, 2, params=NORMUON),
        on(2, "data", 3, params=NORMUON),
    ),
    "data 2, NorMuon of heads, to tensor 2": (
        on(2, "data", 1, params=HEADS),
        on(4, "megatron", 2, 2, params=HEADS),
    ),
    "tensor 2, NorMuon of heads, to data 2": (
        on(4, "megatron", 3, 2, params=HEADS),
        on(2, "data", 2, params=HEADS),
    ),
    # experts
    "experts over 2 to 1": (on(4, "experts", 1, 2), on(3, "experts", 2)),
    "experts over 1 to 4": (on(2, "experts", 2), on(4, "experts", 1, 4)),
    "experts over 4 to 2": (on(4, "experts", 2, 4), on(2, "experts", 0, 2)),
    "experts over 2 without ZeRO to 4": (on(4, "experts", 0, 2), on(4, "experts", 2, 4)),
    "experts over 2 offloaded to 2": (on(4, "experts", 2, 2, **OFFLOAD), on(2, "experts", 1, 2)),
    "experts over 2, NorMuon, to 1": (
        on(4, "experts", 1, 2, params=NORMUON),
        on(2, "experts", 2, params=NORMUON),
    ),
    # stacks of experts
    "AutoEP over 2 to 1": (on(4, "autoep", 2, 2), on(2, "autoep", 3, 1)),
    "AutoEP over 1 to 4": (on(2, "autoep", 1, 1), on(4, "autoep", 2, 4)),
    "AutoEP over 4 to 2": (on(4, "autoep", 3, 4), on(4, "autoep", 1, 2)),
    "AutoEP over 4 to 2 without ZeRO": (on(4, "autoep", 3, 4), on(4, "autoep", 0, 2)),
    "AutoEP over 2, NorMuon, to 4": (
        on(4, "autoep", 3, 2, params=NORMUON),
        on(4, "autoep", 2, 4, params=NORMUON),
    ),
    # stages of a pipeline
    "2 stages to 3": (on(4, "pipeline", 1, 2, model="toy"), on(3, "pipeline", 1, 3, model="toy")),
    "3 stages to 2 without ZeRO": (
        on(3, "pipeline", 1, 3, model="toy"),
        on(2, "pipeline", 0, 2, model="toy"),
    ),
    "2 stages to 1": (on(2, "pipeline", 1, 2), on(3, "pipeline", 1, 1)),
    "1 stage to 2": (on(2, "pipeline", 1, 1), on(4, "pipeline", 1, 2)),
    # the stage and the number of ranks alone
    "data 4 to data 3": (on(4, "data", 3, **SMALL), on(3, "data", 1, **ROUND)),
}


def _by_model() -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Return by model topologies of ``CHANGES`` that can be converted into each other, one for each way to cut it."""
    models: dict[str, dict[Any, Any]] = {}
    for ranks, topology in (side for change in CHANGES.values() for side in change):
        kind = topology["kind"]
        is_dense = kind in ("data", "megatron", "autotp")
        model = "dense" if is_dense else topology.get("model", kind)
        # The number of ranks alone is changed in test_checkpoint_consolidate.
        way = (kind, topology["size"], topology.get("mark"), is_dense or ranks)
        if "params" not in topology:
            models.setdefault(model, {}).setdefault(way, (ranks, topology))
    return {model: list(ways.values()) for model, ways in models.items()}


TOPOLOGIES = _by_model()
