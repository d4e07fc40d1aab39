"""Chooses the owners of a step set's matrices and runs of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.plan.exchange import ExchangePlan, build_exchange_plan
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.owners import assign_owners, holders_in_layouts, matrix_flops
from deepspeed_muon.plan.stacks import cut_stack, shares_of_blocks, travelling_cost
from deepspeed_muon.step.step_set import StepSet


@dataclass(frozen=True, slots=True)
class Assignment:
    """The layouts that a step set exchanges: whole matrices and runs of blocks.

    Attributes:
        matrices: The layouts; those of one matrix follow each other.
        owners: The rank that each layout goes to.
        origin: For each layout, the index of its matrix in the step set.
        work: Newton-Schulz operations that each layout costs its owner.
    """

    matrices: tuple[MatrixLayout, ...]
    owners: tuple[int, ...]
    origin: tuple[int, ...]
    work: tuple[float, ...]


def assign(
    step_set: StepSet,
    config: MuonConfig,
    *,
    device: torch.device,
    load: list[float],
) -> Assignment:
    """Choose the owner of each matrix of a step set, and cut stacks of blocks for several owners.

    Args:
        step_set: Partitions and layouts.
        config: The optimizer's settings.
        device: Where the iteration runs.
        load: Operations that each rank already has from other step sets. Mutated: the new work is added.
    """
    iteration = config.ns_settings(device)
    steps, method, dtype = len(iteration.coefficients), iteration.method, iteration.dtype
    shares = [
        (index, share) for index, matrix in enumerate(step_set.matrices) for share in shares_of_blocks(matrix)
    ]
    costs = [matrix_flops(matrix, steps, method=method, dtype=dtype) for _, matrix in shares]
    limit = travelling_cost(costs, load)
    runs = [
        cut_stack(matrix, cost=cost, limit=limit) for (_, matrix), cost in zip(shares, costs, strict=True)
    ]
    matrices = [run for each in runs for run in each]
    origin = [index for (index, _), each in zip(shares, runs, strict=True) for _ in each]
    costs = [matrix_flops(matrix, steps, method=method, dtype=dtype) for matrix in matrices]
    owners = assign_owners(costs, holders_in_layouts(matrices, step_set.world_size), load=load)
    return Assignment(tuple(matrices), tuple(owners), tuple(origin), tuple(costs))


def planned(
    step_set: StepSet,
    config: MuonConfig,
    *,
    device: torch.device,
    load: list[float],
) -> tuple[Assignment, ExchangePlan]:
    """Choose the owners and plan the exchange."""
    assignment = assign(step_set, config, device=device, load=load)
    plan = build_exchange_plan(
        assignment.matrices,
        assignment.owners,
        rank=step_set.rank,
        world_size=step_set.world_size,
        chunk_numel=config.exchange_chunk_numel,
        wire=config.wire_format,
    )
    return assignment, plan
