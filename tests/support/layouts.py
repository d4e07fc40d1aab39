"""Layouts of matrices as each ZeRO stage makes them, for properties of plans."""

from __future__ import annotations

import torch

from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.plan.chunks import ExchangePlan
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.owners import blocks_flops, grid_blocks
from deepspeed_muon.plan.placement import (
    Fragment,
    Placement,
    flat_placement,
    replicated_placement,
    sharded_placement,
)

ITERATION = NsSettings(resolve_schedule("quintic", 5), "standard", torch.float32)


def fragments_of(placement: Placement) -> list[Fragment]:
    """Return the fragments of all ranks, one after the other."""
    return [fragment for fragment in map(placement.fragment_on, placement.ranks) if fragment is not None]


def matrix_flops(matrix: MatrixLayout) -> float:
    """Return the floating-point operations of orthogonalising all blocks of a matrix."""
    return blocks_flops(grid_blocks(*matrix.grid), ITERATION)


def sent_elements(plan: ExchangePlan) -> int:
    """Return the elements that the rank of a plan sends in gather and scatter, without padding."""
    gathered = [chunk.fragment_buffer for chunk in plan.chunks if chunk.kind == "all_to_all"]
    return sum(sent.remote_numel for sent in (*gathered, *(chunk.owner_buffer for chunk in plan.chunks)))


def flat_layouts(dims: list[tuple[int, int]], world: int) -> list[MatrixLayout]:
    total = sum(r * c for r, c in dims)
    per_rank = -(-total // world)
    layouts, offset = [], 0
    for number, (rows, cols) in enumerate(dims):
        layouts.append(
            MatrixLayout(f"m{number}", rows, cols, 0, flat_placement(offset, rows * cols, per_rank))
        )
        offset += rows * cols
    return layouts


def sharded_layouts(dims: list[tuple[int, int]], world: int) -> list[MatrixLayout]:
    layouts, offset = [], 0
    for number, (rows, cols) in enumerate(dims):
        shard = -(-rows * cols // world)
        layouts.append(
            MatrixLayout(f"m{number}", rows, cols, 0, sharded_placement(offset, rows * cols, shard))
        )
        offset += shard
    return layouts


def replicated_layouts(dims: list[tuple[int, int]], world: int) -> list[MatrixLayout]:
    return [
        MatrixLayout(f"m{i}", r, c, i, replicated_placement(r * c, world)) for i, (r, c) in enumerate(dims)
    ]


MAKERS = {"flat": flat_layouts, "sharded": sharded_layouts, "replicated": replicated_layouts}
