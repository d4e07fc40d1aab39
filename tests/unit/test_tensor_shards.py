"""Which blocks a tensor-parallel rank has of a matrix in blocks, and how routing tells."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import ConfigError, RoutingError
from deepspeed_muon.plan.layout import MatrixLayout, TensorShards
from deepspeed_muon.plan.owners import assign, split_shard
from deepspeed_muon.plan.placement import flat_placement
from deepspeed_muon.routing.param_groups import build_groups
from deepspeed_muon.routing.shapes import blocks_of_shard

SHARES = {
    "heads of one part": ((16,), [4] * 4, 2, ((4, 4), (True, True))),
    "heads of every part": ((16, 8, 8), [4] * 8, 2, ((4,) * 4, (True,) * 4)),
    "whole parts": ((16, 8, 8), [16, 8, 8], 4, ((4, 2, 2), (False,) * 3)),
    "query heads, whole key and value": ((16, 8, 8), [4] * 4 + [8, 8], 4, ((4, 2, 2), (True, False, False))),
    "one head a rank": ((8,), [4, 4], 2, ((4,), (True,))),
    "one matrix of three parts": ((16, 8, 8), [32], 2, ((16,), (False,))),
    "equal parts one after the other": ((16,), [8, 8], 2, ((8,), (True,))),
    "unequal parts one after the other": ((16,), [12, 4], 2, None),
    "fewer heads than ranks": ((8,), [4, 4], 4, None),
    "a head on two ranks": ((12,), [4] * 3, 2, None),
    "ranks do not divide a part": ((6, 2), [6, 2], 4, None),
}


@pytest.mark.parametrize("name", SHARES)
def test_share_of_blocks(name: str) -> None:
    sizes, blocks, ranks, expected = SHARES[name]
    shards = TensorShards(0, (sum(blocks) // ranks,) * ranks, sizes)
    assert blocks_of_shard(blocks, shards) == expected


def test_shares_and_complete_blocks_become_separate_layouts() -> None:
    shards = TensorShards(0, (8,) * 4, (16, 8, 8), (True, False, False))
    matrix = MatrixLayout("qkv", 8, 16, 0, flat_placement(0, 128, 64), row_blocks=(4, 2, 2), tp_shards=shards)
    heads, key, value = split_shard(matrix)
    assert heads.tp_shards is None and (heads.rows, heads.first_row) == (4, 0)
    assert [(layout.first_row, layout.logical_shape, layout.is_tp_shard) for layout in (key, value)] == [
        (4, (8, 16), True),
        (6, (8, 16), True),
    ]
    for layout, start in ((heads, 0), (key, 64), (value, 96)):
        assert layout.placement.rank_of(0) == start // 64
    unsplit = MatrixLayout("up", 8, 16, 0, flat_placement(0, 128, 64), tp_shards=TensorShards(0, (8, 8)))
    assert split_shard(unsplit) == [unsplit]
    iteration = MuonConfig().ns_settings(torch.device("cpu"))
    assert len(assign([matrix], iteration, np.zeros(2), divisor=32).matrices) == 3
    with pytest.raises(ConfigError, match=r"qkv: .* after 64 elements, .* multiple of 256"):
        assign([matrix], iteration, np.zeros(2), divisor=256)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(16, 16, bias=False)
        self.embed = nn.Embedding(4, 4)


def routed(sizes: tuple[int, ...], **asked: object) -> tuple[tuple[int, ...], TensorShards | None]:
    model = Fused()
    config = MuonConfig.from_params({"matrices": {"qkv_proj.weight": {"split": [16, 8, 8], **asked}}})
    shards = {id(model.qkv_proj.weight): TensorShards(0, (16, 16), sizes)}
    (route, _) = build_groups(model, config, shards=shards).routes
    return route.output_blocks, route.shards


def test_counts_and_sizes_are_those_of_the_full_layer() -> None:
    sizes, shards = routed((16, 8, 8))
    assert sizes == (8, 4, 4) and shards is not None and shards.complete == (False,) * 3
    sizes, shards = routed((16, 8, 8), heads=[4, 2, 1])
    assert sizes == (4, 4, 4, 4) and shards is not None and shards.complete == (True, True, True, False)


def test_a_shard_is_divided_by_its_full_shape() -> None:
    """An optimizer made in a callable of deepspeed.initialize saw 16 outputs, which no split into 32 divides."""
    model = Fused()
    model.qkv_proj.weight.tensor_model_parallel = True
    config = MuonConfig.from_params({"matrices": {"*": {"heads": "config"}, "qkv*": {"split": [16, 8, 8]}}})
    assert build_groups(model, config).routes[0].output_blocks == ()
    with pytest.raises(RoutingError, match=r"qkv_proj\.weight"):  # one rank has all of it: 16 rows are not 32
        build_groups(model, config, shards={})
    with pytest.raises(RoutingError, match="no attention projection"):
        build_groups(model, config, shards={id(model.qkv_proj.weight): TensorShards(0, (16, 16), (16, 8, 8))})


@pytest.mark.parametrize(
    ("sizes", "asked", "said"),
    [
        ((), {}, "Set partition_stride"),
        ((32,), {}, "hold different blocks"),
        ((16, 8, 8), {"heads": [4, 1, 1], "transposed": True}, "outputs"),
    ],
)
def test_an_unrecognized_layout_is_refused(
    sizes: tuple[int, ...], asked: dict[str, object], said: str
) -> None:
    with pytest.raises(RoutingError, match=said):
        routed(sizes, **asked)
