"""What a step will compute and send, from shapes alone.

Owners, floating-point operations and elements sent follow the rules of the running optimizer; tests compare them with
counts of real runs.

A collective counts the bytes that each rank of a ring sends: ``n (W-1)/W`` for a reduce-scatter or an all-gather of
``n`` bytes on ``W`` ranks, twice that for an all-reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_muon.forecast.settings import PlannedParameter, PlanSettings, divisions
from deepspeed_muon.math.newton_schulz import orthogonalize_flops
from deepspeed_muon.plan.holdings import Floats, Holdings, flat_holdings, sharded_holdings
from deepspeed_muon.plan.order import balanced_order, flat_partition_numel
from deepspeed_muon.plan.owners import assign_owners, holders_in_holdings
from deepspeed_muon.plan.stacks import block_runs, travelling_cost

# DeepSpeed's defaults: sub_group_size, and the elements up to which stage 3 keeps gathered parameters for backward.
_SUB_GROUP_NUMEL = 1_000_000_000
_REUSE_NUMEL = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Exchange:
    """Owners, work and traffic of all Muon matrices in one step.

    Attributes:
        owners: The owner of each Muon parameter; for a cut stack, that of its first blocks.
        owned_elements: Elements that each rank orthogonalises.
        flops: Newton-Schulz operations of each rank.
        gather_elements: Elements that each rank sends to owners.
        scatter_elements: Elements that each rank sends back as an owner.
        moving: The number of Muon parameters of which elements travel.
        leaving: The part of what a rank sends that leaves its node, where that is the largest.
    """

    owners: tuple[int, ...]
    owned_elements: Floats
    flops: Floats
    gather_elements: Floats
    scatter_elements: Floats
    moving: int
    leaving: float

    @property
    def balance(self) -> float:
        """The work of the busiest rank over the mean."""
        mean = float(self.flops.sum()) / len(self.flops)
        return float(self.flops.max()) / mean if mean else 1.0


def parameter_flops(parameter: PlannedParameter, settings: PlanSettings) -> float:
    """Return the floating-point operations of orthogonalising all blocks of one parameter."""
    return sum(
        count
        * orthogonalize_flops(
            rows, cols, steps=settings.steps, method=settings.method, dtype=settings.ns_dtype
        )
        for count, rows, cols in parameter.blocks
    )


def exchange_of(parameters: Sequence[PlannedParameter], settings: PlanSettings) -> Exchange:
    """Assign owners and count operations and elements, as the running optimizer does.

    Args:
        parameters: All parameters in the order of the param groups; those of AdamW do not count.
        settings: Stage, ranks and iteration.
    """
    muon = [parameter for parameter in parameters if parameter.muon]
    if settings.expert_parallel > 1:
        return _merged(muon, settings)
    load = [0.0] * settings.world_size
    gather, scatter, owned = (np.zeros(settings.world_size) for _ in range(3))
    owners: dict[int, int] = {}
    moving: set[int] = set()
    for members in _step_sets(muon, settings):
        holdings = _holdings([muon[number].numel for number in members], settings)
        numbers, parts, ranks = _assign([muon[n] for n in members], holdings, load, settings)
        for index, rank in zip(numbers, ranks, strict=True):
            owners.setdefault(members[index], rank)
        np.add.at(owned, ranks, parts.numel)
        sent, returned, travels = parts.traffic(ranks)
        gather, scatter = gather + sent, scatter + returned
        moving.update(members[numbers[at]] for at in np.flatnonzero(travels))
    in_order = tuple(owners[number] for number in range(len(muon)))
    leaving = to_other_nodes(settings)
    if settings.stage == 0 and settings.world_size > 1:
        # A broadcast goes from rank to rank.
        leaving = (-(-settings.world_size // max(1, settings.gpus_per_node)) - 1) / (settings.world_size - 1)
    return Exchange(in_order, owned, np.asarray(load), gather, scatter, len(moving), leaving)


def _merged(muon: Sequence[PlannedParameter], settings: PlanSettings) -> Exchange:
    """Return the exchange where experts lie on other ranks than the rest: ranks ``n k`` to ``n k + k - 1`` divide them.

    Every one of these ``k`` ranks does with its experts what the others do with theirs.
    """
    owners: dict[int, int] = {}
    flops, owned, gather, scatter = (np.zeros(settings.world_size) for _ in range(4))
    moving, leaves = 0, 0.0
    for numbers, local, inside in divisions(muon, settings):
        each, ranks = exchange_of(local, inside), settings.world_size // inside.world_size
        owners.update({number: owner * ranks for number, owner in zip(numbers, each.owners, strict=True)})
        flops += np.repeat(each.flops, ranks)
        owned += np.repeat(each.owned_elements, ranks)
        gather += np.repeat(each.gather_elements, ranks)
        scatter += np.repeat(each.scatter_elements, ranks)
        moving += each.moving
        leaves += each.leaving * float((each.gather_elements + each.scatter_elements).max())
    sent = float((gather + scatter).max())
    in_order = tuple(owners[number] for number in range(len(muon)))
    return Exchange(in_order, owned, flops, gather, scatter, moving, leaves / sent if sent else 0.0)


def to_other_nodes(settings: PlanSettings) -> float:
    """Return the part that leaves the node of what a rank sends equally to all other ranks."""
    world, inside = settings.world_size, min(settings.gpus_per_node, settings.world_size)
    return (world - inside) / (world - 1) if world > 1 else 0.0


def _assign(
    muon: Sequence[PlannedParameter], holdings: Holdings, load: list[float], settings: PlanSettings
) -> tuple[list[int], Holdings, list[int]]:
    """Return the parts of a step set: the parameter of each, where it lies, and its owner."""
    costs = [parameter_flops(parameter, settings) for parameter in muon]
    limit = travelling_cost(costs, load)
    whole = holdings.whole.tolist()
    runs: list[tuple[int, int, int]] = []
    for index, (parameter, cost) in enumerate(zip(muon, costs, strict=True)):
        found = [(0, parameter.stack)]
        if parameter.stack > 1 and settings.tensor_parallel == 1 and not whole[index]:
            size = parameter.numel // parameter.stack
            rank_at = None if holdings.replicated else functools.partial(holdings.rank_at, index)
            found = block_runs(parameter.stack, size, rank_at, cost=cost / parameter.stack, limit=limit)
        runs += [(index, first, count) for first, count in found]
    sizes = np.array([parameter.numel // parameter.stack for parameter in muon], dtype=np.int64)
    index, first, count = np.array(runs, dtype=np.int64).T
    begins, ends = first * sizes[index], (first + count) * sizes[index]
    parts = holdings.ranges(index, begins, ends)
    owners = assign_owners(
        [costs[i] / muon[i].stack * blocks for i, _, blocks in runs],
        holders_in_holdings(parts),
        load=load,
    )
    return index.tolist(), parts, owners


def _step_sets(muon: Sequence[PlannedParameter], settings: PlanSettings) -> list[list[int]]:
    """Return the numbers of the matrices of each step set, in the order in which they lie."""
    if not muon:
        return []
    if settings.stage in (1, 2) and settings.reordered:
        return [
            balanced_order(
                [parameter.numel for parameter in muon],
                [parameter_flops(parameter, settings) for parameter in muon],
                [parameter.blocks for parameter in muon],
                settings.data_parallel,
            )
        ]
    sets: list[list[int]] = [[]]
    filled = 0
    for number, parameter in enumerate(muon):
        # ZeRO 3 cuts a param group into sub-groups by the size of its partition.
        if settings.stage == 3 and filled >= _SUB_GROUP_NUMEL:
            sets.append([])
            filled = 0
        sets[-1].append(number)
        filled += -(-parameter.numel // settings.world_size)
    return sets


def _holdings(sizes: Sequence[int], settings: PlanSettings) -> Holdings:
    numels = np.array(sizes, dtype=np.int64)
    ranks, width = settings.data_parallel, settings.tensor_parallel
    if settings.stage in (1, 2):
        ends = np.cumsum(numels)
        partition = flat_partition_numel(-(-int(numels.sum()) // width), ranks) * width
        return flat_holdings(ends - numels, numels, partition_numel=partition, ranks=ranks, width=width)
    replicated = settings.stage == 0 and settings.world_size > 1
    return sharded_holdings(numels, ranks=ranks, width=width, replicated=replicated)


def zero_bytes(parameters: Sequence[PlannedParameter], settings: PlanSettings) -> float:
    """Return the bytes that a rank sends in ZeRO's own collectives in a step without accumulation.

    Stage 0 all-reduces gradients. Stages 1 and 2 all-reduce buckets of gradients too
    (``use_multi_rank_bucket_allreduce``) and all-gather parameters. Stage 3 reduce-scatters gradients and gathers
    parameters for forward, and again for backward in models that are larger than ``stage3_max_reuse_distance``.
    """
    if settings.expert_parallel > 1:
        return sum(zero_bytes(local, inside) for _, local, inside in divisions(parameters, settings))
    ranks = settings.data_parallel
    numel = sum(parameter.numel for parameter in parameters) / settings.tensor_parallel
    passes = {0: 2.0, 1: 3.0, 2: 3.0, 3: 2.0 if numel <= _REUSE_NUMEL else 3.0}[settings.stage]
    return passes * numel * settings.model_bytes * (ranks - 1) / ranks
