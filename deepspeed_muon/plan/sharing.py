"""Which matrices several ranks orthogonalise together: those that would keep one rank busy while others wait.

If there are more ranks than matrices, or one matrix dominates, all ranks wait for one owner. Then ranks of one node
share the matrix: each gets some of its rows, and they run :func:`deepspeed_muon.orthogonalize_sharded`. Each rank does
its part of the products with the matrix, and all products of Gram-sized matrices. The ranks all-reduce the Gram matrix
once per pass over the matrix. If rows are the short side, they first exchange rows for columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from deepspeed_muon.math.flops import iteration_flops, orthogonalize_flops
from deepspeed_muon.math.newton_schulz import NsMethod
from deepspeed_muon.plan.hardware import GPUS, Gpu
from deepspeed_muon.plan.layout import MatrixLayout, TensorShards
from deepspeed_muon.plan.owners import FLOPS_PER_MOVED_ELEMENT, Holders, assign_owners
from deepspeed_muon.plan.stacks import cut_rows

__all__ = [
    "Shareable",
    "SharingRule",
    "Speeds",
    "assign_ranks",
    "choose_sharers",
    "cut_for_sharers",
    "even_sizes",
]

# Sharing must be faster by this factor.
_WORTH = 1.05


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds that decide whether sharing pays.

    Attributes:
        flops: Floating-point operations per second that the iteration reaches.
        node_bandwidth: Bytes per second that a collective reaches between ranks of one node.
        collective_seconds: Time that even a collective of no bytes takes.
    """

    flops: float
    node_bandwidth: float
    collective_seconds: float = 3e-5

    @classmethod
    def of(cls, gpu: Gpu, *, efficiency: float = 0.5, link_efficiency: float = 0.7) -> Speeds:
        """Return the speeds of a GPU whose published figures are reached to these parts."""
        return cls(gpu.flops * efficiency, gpu.node_bandwidth * link_efficiency)

    @classmethod
    def of_device(cls, device: torch.device) -> Speeds | None:
        """Return the speeds of a GPU, ``None`` for a CPU. A GPU that is not in the table counts as an H100.

        Only the ratio of the two figures matters, and it is similar for all GPUs of the table.
        """
        if device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(device).lower()
        return cls.of(next((gpu for key, gpu in GPUS.items() if key in name), GPUS["h100"]))


@dataclass(frozen=True, slots=True)
class SharingRule:
    """How many ranks may share a matrix, and what it costs them.

    Attributes:
        most: The largest number of ranks that share a matrix; 1 for no sharing.
        steps: Newton-Schulz steps.
        method: ``gram`` or ``standard``.
        dtype: Dtype of the iteration.
        speeds: What collectives cost; ``None`` counts them as free, so that ranks share wherever it divides the work.
    """

    most: int
    steps: int
    method: NsMethod
    dtype: torch.dtype
    speeds: Speeds | None

    def cost(self, rows: int, cols: int, ranks: int) -> float:
        """Return what one matrix costs each of the ``ranks`` that divide its rows, in floating-point operations.

        The time of collectives counts as the operations that a rank could do in that time.
        """
        if ranks == 1:
            return orthogonalize_flops(rows, cols, steps=self.steps, method=self.method, dtype=self.dtype)
        divided, repeated, reductions = iteration_flops(
            rows, cols, steps=self.steps, method=self.method, dtype=self.dtype
        )
        flops = divided / ranks + repeated
        if self.speeds is None:
            return flops
        # The Gram matrix is all-reduced in float32; the norm needs one more collective.
        nbytes = reductions * 2 * 4.0 * min(rows, cols) ** 2 * (ranks - 1) / ranks
        collectives = reductions + 1
        if rows < cols:
            nbytes += 2.0 * self.dtype.itemsize * rows * cols / ranks * (ranks - 1) / ranks
            collectives += 2
        seconds = nbytes / self.speeds.node_bandwidth + collectives * self.speeds.collective_seconds
        return flops + seconds * self.speeds.flops


@dataclass(frozen=True, slots=True)
class Shareable:
    """A matrix that ranks could share. If it ``stays``, it lies whole on one rank and travels only when shared."""

    rows: int
    cols: int
    stays: bool = False

    @property
    def moving(self) -> float:
        """What sharing adds by making the matrix travel, in operations."""
        return FLOPS_PER_MOVED_ELEMENT * self.rows * self.cols * self.stays


def assign_ranks(
    costs: Sequence[float],
    shareable: Sequence[Shareable | None],
    holders: Sequence[Holders],
    *,
    load: list[float],
    rule: SharingRule,
    nodes: Sequence[int] | None,
    share_nodes: Sequence[int],
) -> list[tuple[int, ...]]:
    """Return the ranks that orthogonalise each matrix of a step set: its owner, or the ranks that share it.

    Args:
        costs: What each costs one rank, in operations.
        shareable: As for :func:`choose_sharers`.
        holders: As for :func:`~deepspeed_muon.plan.owners.assign_owners`.
        load: What each rank has to do already. Mutated: the new work is added.
        rule: When sharing pays.
        nodes: The node of every rank for the choice of owners; ``None`` for one node.
        share_nodes: The node of every rank for sharing.
    """
    ranks = choose_sharers(shareable, costs, load=load, nodes=share_nodes, rule=rule)
    alone = [index for index in range(len(costs)) if index not in ranks]
    owners = assign_owners(
        [costs[index] for index in alone], [holders[index] for index in alone], load=load, nodes=nodes
    )
    ranks.update({index: (owner,) for index, owner in zip(alone, owners, strict=True)})
    return [ranks[index] for index in range(len(costs))]


def choose_sharers(
    matrices: Sequence[Shareable | None],
    costs: Sequence[float],
    *,
    load: list[float],
    nodes: Sequence[int],
    rule: SharingRule,
) -> dict[int, tuple[int, ...]]:
    """Return the ranks of each shared matrix, by the index of the matrix.

    :func:`_ranks_wanted` says how many ranks a matrix gets. The costliest matrix chooses first: it takes the idlest
    ranks of one node, if they finish it before the idlest rank would finish it alone. Deterministic.

    Args:
        matrices: All matrices of a step set; ``None`` for one that cannot be shared.
        costs: What each costs one rank, in operations.
        load: What each rank has to do already. Mutated: the shared work is added.
        nodes: The node of every rank.
        rule: When sharing pays.
    """
    largest_node = max(Counter(nodes).values(), default=1)
    wanted = _ranks_wanted(matrices, costs, load, rule, most=min(rule.most, largest_node))
    places: dict[int, np.ndarray] = {}
    loads = np.array(load)
    found: dict[int, tuple[int, ...]] = {}
    for index in sorted(wanted, key=lambda i: (-costs[i], i)):
        matrix = matrices[index]
        assert matrix is not None
        for ranks in range(wanted[index], 1, -1):
            if ranks not in places:
                places[ranks] = _places(nodes, ranks)
            if not len(places[ranks]):
                continue
            busiest = loads[places[ranks]].max(axis=1)
            best = int(busiest.argmin())
            each = rule.cost(matrix.rows, matrix.cols, ranks)
            if busiest[best] + _WORTH * (each + matrix.moving / ranks) < loads.min() + costs[index]:
                loads[places[ranks][best]] += each
                found[index] = tuple(places[ranks][best].tolist())
                break
    load[:] = loads.tolist()
    return found


def _ranks_wanted(
    matrices: Sequence[Shareable | None],
    costs: Sequence[float],
    load: Sequence[float],
    rule: SharingRule,
    *,
    most: int,
) -> dict[int, int]:
    """Return the number of ranks for each shared matrix that minimises the makespan.

    Each time that a matrix can take, alone or shared, is tried as a limit: every matrix gets the fewest ranks that stay
    within the limit. The limit with the earliest end wins.
    """
    kinds: dict[tuple[Shareable | None, float], list[int]] = {}
    for index, kind in enumerate(zip(matrices, costs, strict=True)):
        kinds.setdefault(kind, []).append(index)
    # For each kind of matrix: the work of each rank if one, two, ... ranks share it.
    options = [
        [cost]
        + [
            rule.cost(matrix.rows, matrix.cols, ranks) + matrix.moving / ranks
            for ranks in range(2, min(most, matrix.rows) + 1)
        ]
        if matrix is not None
        else [cost]
        for matrix, cost in kinds
    ]
    counts = [len(indices) for indices in kinds.values()]
    carried = math.fsum(load)

    def outcome(limit: float) -> tuple[float, list[int]]:
        ranks = [
            next((number for number, each in enumerate(parts, 1) if each <= limit), 1) for parts in options
        ]
        each = [parts[number - 1] for parts, number in zip(options, ranks, strict=True)]
        jobs = [count * number for count, number in zip(counts, ranks, strict=True)]
        return _earliest_end(jobs, each, carried, len(load)), ranks

    if not costs:
        return {}
    alone, nobody = outcome(math.inf)
    soonest, chosen = min(outcome(limit) for limit in {each for parts in options for each in parts})
    if _WORTH * soonest >= alone:
        chosen = nobody
    return {
        index: number
        for indices, number in zip(kinds.values(), chosen, strict=True)
        if number > 1
        for index in indices
    }


def _earliest_end(jobs: Sequence[int], each: Sequence[float], carried: float, world: int) -> float:
    """Estimate when ``world`` ranks have done ``jobs[i]`` indivisible jobs of length ``each[i]``.

    A rank does a whole number of long jobs of one length; short jobs fill the rest of its time.
    """
    mean = (carried + math.fsum(count * length for count, length in zip(jobs, each, strict=True))) / world
    ends = {length * number for length in each for number in (1, 2, 3)} | {_WORTH * mean}
    for end in sorted(ends):
        if end < mean or end < max(each):
            continue
        long = (pair for pair in zip(jobs, each, strict=True) if pair[1] > end / 4)
        if math.fsum(count / (end // length) for count, length in long) <= world - carried / end:
            return end
    return max(max(each), mean) * _WORTH


def _places(nodes: Sequence[int], ranks: int) -> np.ndarray:
    """Return the groups of ``ranks`` neighbouring ranks of a node that may share a matrix."""
    of_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        of_node.setdefault(node, []).append(rank)
    groups = [
        members[start : start + ranks]
        for members in of_node.values()
        for start in range(0, len(members) - ranks + 1, ranks)
    ]
    return np.array(groups, dtype=np.int64).reshape(len(groups), ranks)


def even_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Divide ``total`` into ``parts`` lengths that differ by at most one, longer ones first."""
    length, longer = divmod(total, parts)
    return tuple(length + (part < longer) for part in range(parts))


def cut_for_sharers(matrix: MatrixLayout, sharers: Sequence[int]) -> list[MatrixLayout]:
    """Return the layouts of the rows that each of ``sharers`` gets; the matrix itself for a single owner.

    A shared matrix has only one block and at least as many rows as sharers.
    """
    if len(sharers) == 1:
        return [matrix]
    sizes = even_sizes(matrix.rows, len(sharers))
    return [
        replace(matrix, rows=rows, spread=spread, shards=TensorShards(0, sizes), sharers=tuple(sharers))
        for rows, spread in zip(sizes, cut_rows(matrix, sizes), strict=True)
    ]
