"""Chooses the owners of a step set's matrices and runs of blocks, and the ranks that share a matrix."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.errors import UnsupportedConfigError
from deepspeed_muon.plan.exchange import ExchangePlan, build_exchange_plan
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.owners import holders_in_layouts, matrix_flops
from deepspeed_muon.plan.relay import Machines
from deepspeed_muon.plan.sharing import Shareable, SharingRule, Speeds, assign_ranks, cut_for_sharers
from deepspeed_muon.plan.stacks import cut_stack, shares_of_blocks, travelling_cost
from deepspeed_muon.step.step_set import StepSet

__all__ = ["Assignment", "assign", "may_relay", "may_share", "planned", "ranks_of_this_node"]

_MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Assignment:
    """The layouts that a step set exchanges: whole matrices, runs of blocks, and the rows of each sharer.

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
    can_open_groups: bool = True,
) -> Assignment:
    """Choose the ranks that orthogonalise each matrix of a step set, and cut the matrices accordingly.

    Args:
        step_set: Partitions and layouts.
        config: The optimizer's settings.
        device: Where the iteration runs.
        load: Operations that each rank already has from other step sets. Mutated: the new work is added.
        can_open_groups: Whether process groups of sharers can be made.

    Raises:
        UnsupportedConfigError: If ``share_matrices`` asks for sharing that is not possible.
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
    speeds = Speeds.of_device(device) if config.share_matrices == "auto" else None
    rule = SharingRule(_most(step_set, config, device, can_open_groups), steps, method, dtype, speeds)
    costs = [matrix_flops(matrix, steps, method=method, dtype=dtype) for matrix in matrices]
    ranks = assign_ranks(
        costs,
        [_shareable(each[0]) if len(each) == 1 else None for each in runs for _ in each],
        holders_in_layouts(matrices, step_set.world_size),
        load=load,
        rule=rule,
        nodes=_nodes(step_set, config),
        share_nodes=_nodes(step_set, config) or [0] * step_set.world_size,
    )
    # The operations of sharers, without the time of their collectives.
    work = replace(rule, speeds=None)
    rows = [
        (part, rank, index, cost if len(sharers) == 1 else work.cost(matrix.rows, matrix.cols, len(sharers)))
        for matrix, index, cost, sharers in zip(matrices, origin, costs, ranks, strict=True)
        for part, rank in zip(cut_for_sharers(matrix, sharers), sharers, strict=True)
    ]
    return Assignment(
        tuple(matrix for matrix, _, _, _ in rows),
        tuple(owner for _, owner, _, _ in rows),
        tuple(index for _, _, index, _ in rows),
        tuple(cost for _, _, _, cost in rows),
    )


def planned(
    step_set: StepSet,
    config: MuonConfig,
    *,
    device: torch.device,
    load: list[float],
    can_open_groups: bool,
) -> tuple[Assignment, ExchangePlan]:
    """Choose the owners and plan the exchange; the arguments are those of :func:`assign`."""
    assignment = assign(step_set, config, device=device, load=load, can_open_groups=can_open_groups)
    plan = build_exchange_plan(
        assignment.matrices,
        assignment.owners,
        rank=step_set.rank,
        world_size=step_set.world_size,
        chunk_numel=config.exchange_chunk_numel,
        wire=config.wire_format,
        machines=Machines.of(_nodes(step_set, config)) if can_open_groups else None,
        link=config.link(step_set.model_dtype),
    )
    return assignment, plan


def may_share(config: MuonConfig, device: torch.device) -> bool:
    """Return whether ranks may share matrices at all: the same on every rank."""
    if config.share_matrices is False or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return config.share_matrices != "auto" or device.type == "cuda"


def may_relay(config: MuonConfig) -> bool:
    """Return whether updates may be relayed between machines at all: the same on every rank."""
    ranks = config.ranks_per_node or 1
    return dist.is_initialized() and 1 < ranks < dist.get_world_size()


def _most(step_set: StepSet, config: MuonConfig, device: torch.device, can_open_groups: bool) -> int:
    """Return the largest number of ranks that may share a matrix."""
    wanted = config.share_matrices
    if step_set.world_size == 1 or not may_share(config, device):
        return 1
    for applies, why in (
        (config.variant != "muon", f"variant {config.variant!r}, which normalises by whole matrices"),
        (
            step_set.tensor_group is not None,
            "tensor parallelism, which has a way of its own: tensor_parallel_mode",
        ),
        (
            not can_open_groups,
            "an engine of some of the program's ranks: torch has all ranks make a process group",
        ),
    ):
        if applies:
            if wanted == "auto":
                return 1
            raise UnsupportedConfigError(
                f'optimizer.params.share_matrices is {wanted} with {why}; set it to "auto" or false'
            )
    return step_set.world_size if wanted == "auto" else int(wanted)


def _shareable(matrix: MatrixLayout) -> Shareable | None:
    if len(matrix.grid[0]) * len(matrix.grid[1]) > 1:
        return None
    return Shareable(matrix.rows, matrix.cols, stays=matrix.spread.whole_on is not None)


def ranks_of_this_node() -> int:
    """Return the number that the launcher gives, in torchrun's variable or DeepSpeed's; 0 without one."""
    given = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
    # More ranks than any machine has are no number that the ranks could compare in 64 bits.
    return next((min(int(number), _MOST_RANKS) for number in given if number.isdecimal()), 0)


def _nodes(step_set: StepSet, config: MuonConfig) -> Sequence[int] | None:
    """Return the machine of every rank of the set's group, numbered from zero; ``None`` if that is not known."""
    if config.ranks_per_node is None or step_set.group is None:
        return None
    nodes = [rank // config.ranks_per_node for rank in dist.get_process_group_ranks(step_set.group)]
    return [node - min(nodes) for node in nodes]
