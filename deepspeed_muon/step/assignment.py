"""Who orthogonalises what of one step set: owners, stacks in pieces, and the matrices that several ranks share."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.errors import UnsupportedConfigError
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.owners import FLOPS_PER_MOVED_ELEMENT, assign_owners, matrix_flops
from deepspeed_muon.plan.pieces import PIECE_SHARE, pieces
from deepspeed_muon.plan.sharing import Shareable, SharingRule, Speeds, choose_sharers, slabs
from deepspeed_muon.step.step_set import StepSet

__all__ = ["Assignment", "assign", "may_share"]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The matrices of a step set as they are exchanged: whole, in pieces, or in slabs of rows where ranks share one.

    Attributes:
        matrices: Layouts; the pieces and slabs of one matrix follow each other.
        owners: The rank that each goes to.
        origin: Index of each in the step set.
        work: Newton-Schulz operations that each costs its owner.
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
    """Choose the owners of a step set's matrices.

    Args:
        step_set: Partitions and layouts.
        config: The optimizer's settings.
        device: Where the iteration runs.
        load: Newton-Schulz cost that each rank carries from other sets; updated.
        can_open_groups: Whether process groups of ranks that share a matrix can be made.

    Raises:
        UnsupportedConfigError: If ranks shall share matrices that cannot be shared.
    """
    iteration = config.ns_settings(device)
    steps, method, dtype = len(iteration.coefficients), iteration.method, iteration.dtype
    matrices, origin = _in_pieces(step_set, iteration, load)
    pieces_of = Counter(origin)
    costs = [matrix_flops(matrix, steps, method=method, dtype=dtype) for matrix in matrices]
    rule = SharingRule(_most(step_set, config, device, can_open_groups), steps, method, dtype, None)
    if config.share_matrices == "auto":
        rule = SharingRule(rule.most, steps, method, dtype, Speeds.of_device(device))
    shared = choose_sharers(
        [
            _shareable(matrix) if pieces_of[index] == 1 else None
            for matrix, index in zip(matrices, origin, strict=True)
        ],
        costs,
        load=load,
        nodes=_nodes(step_set, config.ranks_per_node or _ranks_of_this_node()) or [0] * step_set.world_size,
        rule=rule,
    )
    alone = [index for index in range(len(costs)) if index not in shared]
    owners = assign_owners(
        [matrices[index] for index in alone],
        step_set.world_size,
        steps=steps,
        load=load,
        method=method,
        dtype=dtype,
        nodes=_nodes(step_set, config.ranks_per_node),
    )
    owner_of = dict(zip(alone, owners, strict=True))
    rows: list[tuple[MatrixLayout, int, int, float]] = []
    for index, matrix in enumerate(matrices):
        if index in owner_of:
            rows.append((matrix, owner_of[index], origin[index], costs[index]))
            continue
        sharers = shared[index]
        each = replace(rule, speeds=None).cost(matrix.rows, matrix.cols, len(sharers))
        rows += [
            (slab, rank, origin[index], each)
            for slab, rank in zip(slabs(matrix, sharers), sharers, strict=True)
        ]
    return Assignment(
        tuple(matrix for matrix, _, _, _ in rows),
        tuple(owner for _, owner, _, _ in rows),
        tuple(index for _, _, index, _ in rows),
        tuple(cost for _, _, _, cost in rows),
    )


def _in_pieces(
    step_set: StepSet, iteration: NsSettings, load: Sequence[float]
) -> tuple[list[MatrixLayout], list[int]]:
    """Return the set's matrices, stacks in pieces, and the index in the set of each."""
    found = list(step_set.matrices)
    if step_set.world_size == 1:
        return found, list(range(len(found)))
    costs = [
        matrix_flops(matrix, len(iteration.coefficients), method=iteration.method, dtype=iteration.dtype)
        for matrix in found
    ]
    limit = PIECE_SHARE * (math.fsum(costs) + math.fsum(load)) / step_set.world_size
    cut = [pieces(matrix, cost=cost, limit=limit) for matrix, cost in zip(found, costs, strict=True)]
    return [piece for parts in cut for piece in parts], [i for i, parts in enumerate(cut) for _ in parts]


def may_share(config: MuonConfig, device: torch.device) -> bool:
    """Return whether ranks may share matrices at all: the same on every rank."""
    if config.share_matrices is False or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return config.share_matrices != "auto" or device.type == "cuda"


def _most(step_set: StepSet, config: MuonConfig, device: torch.device, can_open_groups: bool) -> int:
    """Return how many ranks may share a matrix."""
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
    stays = not matrix.replicated and matrix.whole_on() is not None
    return Shareable(matrix.rows, matrix.cols, FLOPS_PER_MOVED_ELEMENT * matrix.numel * stays)


def _ranks_of_this_node() -> int | None:
    """Return what the launcher says: torchrun's variable or DeepSpeed's."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name]) or None
    return None


def _nodes(step_set: StepSet, ranks_per_node: int | None) -> Sequence[int] | None:
    """Return the machine of every rank of the set's group, numbered from zero."""
    if ranks_per_node is None or step_set.group is None:
        return None
    nodes = [rank // ranks_per_node for rank in dist.get_process_group_ranks(step_set.group)]
    return [node - min(nodes) for node in nodes]
