"""Which matrices several ranks orthogonalise together: those that would keep one rank busy while others wait.

Where ranks outnumber matrices, or one matrix dominates, everybody waits for the owner of a matrix. Then the ranks of
one node share it: each one gets some of its rows, and they run :func:`deepspeed_muon.orthogonalize_sharded`. The
products with the matrix are divided; the products of Gram-sized matrices run on every rank; the ranks all-reduce
the Gram matrix once per pass over the matrix, and where rows are the short side they cut it anew along columns first.
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

# A gain below this is not worth it.
_WORTH = 1.05


@dataclass(frozen=True, slots=True)
class Speeds:
    """What sharing is weighed with.

    Attributes:
        flops: Floating-point operations per second that the iteration reaches.
        node_bandwidth: Bytes per second that a collective reaches between ranks of one node.
        collective_seconds: What a collective takes, however little it sends.
    """

    flops: float
    node_bandwidth: float
    collective_seconds: float = 3e-5

    @classmethod
    def of(cls, gpu: Gpu, *, efficiency: float = 0.5, link_efficiency: float = 0.7) -> Speeds:
        """Return the speeds of a kind of GPU.

        Args:
            gpu: Published figures.
            efficiency: Part of the operations that the iteration reaches.
            link_efficiency: Part of the bandwidth that collectives reach.
        """
        return cls(gpu.flops * efficiency, gpu.node_bandwidth * link_efficiency)

    @classmethod
    def of_device(cls, device: torch.device) -> Speeds | None:
        """Return the speeds of a device, those of an H100 for a GPU that the table does not have; none for a CPU.

        Only the ratio of both figures decides, and it is alike in all GPUs of the table.
        """
        if device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(device).lower()
        return cls.of(next((gpu for key, gpu in GPUS.items() if key in name), GPUS["h100"]))


@dataclass(frozen=True, slots=True)
class SharingRule:
    """How many ranks share a matrix, and what it costs them.

    Attributes:
        most: Ranks at most; 1 for no sharing.
        steps: Newton-Schulz steps.
        method: ``gram`` or ``standard``.
        dtype: Dtype of the iteration.
        speeds: Decide whether it pays; ``None`` shares whatever has more work than a rank has on average.
    """

    most: int
    steps: int
    method: NsMethod
    dtype: torch.dtype
    speeds: Speeds | None

    def cost(self, rows: int, cols: int, ranks: int) -> float:
        """Return what orthogonalising one matrix costs each of ``ranks``, in floating-point operations.

        Time that collectives take is counted as the operations that run in that time.

        Args:
            rows: Rows of the matrix, which are what is divided.
            cols: Columns of the matrix.
            ranks: How many share it; one is the ordinary iteration.
        """
        if ranks == 1:
            return orthogonalize_flops(rows, cols, steps=self.steps, method=self.method, dtype=self.dtype)
        divided, repeated, reductions = iteration_flops(
            rows, cols, steps=self.steps, method=self.method, dtype=self.dtype
        )
        flops = divided / ranks + repeated
        if self.speeds is None:
            return flops
        # The Gram matrix is reduced in float32; the norm is a collective of its own.
        nbytes = reductions * 2 * 4.0 * min(rows, cols) ** 2 * (ranks - 1) / ranks
        collectives = reductions + 1
        if rows < cols:
            nbytes += 2.0 * self.dtype.itemsize * rows * cols / ranks * (ranks - 1) / ranks
            collectives += 2
        seconds = nbytes / self.speeds.node_bandwidth + collectives * self.speeds.collective_seconds
        return flops + seconds * self.speeds.flops


@dataclass(frozen=True, slots=True)
class Shareable:
    """A matrix that several ranks could share.

    Attributes:
        rows: Its rows.
        cols: Its columns.
        stays: Whether it lies whole on one rank, so that only sharing makes it travel.
    """

    rows: int
    cols: int
    stays: bool = False

    @property
    def moving(self) -> float:
        """What it costs to bring the rows to the ranks that share them, in operations."""
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
        load: What each rank has to do already; increased by what it is given.
        rule: When sharing pays.
        nodes: The node of every rank, in which owners are sought; ``None`` for one node.
        share_nodes: The node of every rank, in which ranks share.
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
    """Return the ranks that share a matrix, by index, for the matrices that are shared.

    :func:`_ranks_wanted` says how many ranks a matrix gets. The costliest matrix chooses first: it takes the ranks of
    one node that have least to do, if they finish it before the idlest rank would alone. Deterministic.

    Args:
        matrices: All matrices of a step set; ``None`` for one that cannot be shared.
        costs: What each costs one rank, in operations.
        load: What each rank has to do already; increased on the ranks that share.
        nodes: The node of every rank.
        rule: When it pays.
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

    Every time that one rank can need for a matrix, alone or shared, is tried as a limit: each matrix gets the fewest
    ranks that stay within the limit. The limit with the earliest end wins.
    """
    kinds: dict[tuple[Shareable | None, float], list[int]] = {}
    for index, kind in enumerate(zip(matrices, costs, strict=True)):
        kinds.setdefault(kind, []).append(index)
    # What each rank has to do for a matrix of this kind that one, two, ... ranks share.
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

    In a given time a rank does a whole number of long jobs of one length; short ones fill what is left.
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
    """Return the groups of ``ranks`` neighbouring ranks of one node that may share a matrix."""
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
    """Return the layouts of the rows that each rank of ``sharers`` gets; the matrix itself for a single owner.

    Args:
        matrix: A matrix; one with several sharers is orthogonalised whole.
        sharers: Ranks of its group, no more than it has rows.
    """
    if len(sharers) == 1:
        return [matrix]
    sizes = even_sizes(matrix.rows, len(sharers))
    return [
        replace(matrix, rows=rows, fragments=held, shards=TensorShards(0, sizes), sharers=tuple(sharers))
        for rows, held in zip(sizes, cut_rows(matrix, sizes), strict=True)
    ]
