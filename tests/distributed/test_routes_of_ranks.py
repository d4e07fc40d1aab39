"""Routes do not depend on where ZeRO keeps a weight: those of a partitioned model are those of a whole one."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

from deepspeed_muon.optimizer import Muon
from tests.support import training


class Attention(nn.Module):
    """A fused projection, the gains of its heads and a table that is added to their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.norm = nn.LayerNorm((2, 8))
        self.table = nn.Parameter(torch.zeros(2, 8))
        self.proj = nn.Parameter(torch.randn(16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(x.unflatten(-1, (2, 8))) + self.table).flatten(-2) @ self.proj


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4)
        self.tokens = nn.Embedding(40, 16)
        self.layers = nn.ModuleList([Attention(), Mixture()])
        self.back = nn.Linear(16, 40)


def routes(rank: int, world_size: int) -> tuple[list[Any], list[Any]]:
    results = []
    config = training.ds_config(3)
    for partitioned in (False, True):
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=partitioned):
            model = Model()
        of_model = Muon(model).routes
        results.append([(r.name, r.shape, r.algorithm, r.reason, r.transposed, r.certain) for r in of_model])
    return results[0], results[1]


def test_partitioned_weights_go_where_full_ones_go(ranks: Any) -> None:
    (full_routes, partitioned), (full_of_second, partitioned_of_second) = ranks(2).run(routes)
    assert full_routes == partitioned
    assert full_routes == full_of_second and partitioned == partitioned_of_second
    algorithms = {name: (algorithm, certain) for name, _, algorithm, _, _, certain in full_routes}
    assert algorithms["layers.0.qkv.weight"] == ("muon", True)
    assert algorithms["layers.0.proj"] == algorithms["layers.0.table"] == ("adamw", False)
    for name in ("stem.weight", "layers.0.norm.weight", "layers.1.choose.weight", "back.weight"):
        assert algorithms[name] == ("adamw", True), name
