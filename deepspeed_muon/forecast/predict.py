"""What a step will compute and send, from shapes alone.

Counts (floating-point operations, elements sent, owners) follow from the same rules that the running optimizer uses,
and tests compare them with counted runs.

Bytes of a collective are those that a ring sends from each rank: ``n (W-1)/W`` for a reduce-scatter or an all-gather of
``n`` bytes on ``W`` ranks, twice that for an all-reduce.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from deepspeed_muon.math.flops import orthogonalize_flops
from deepspeed_muon.math.newton_schulz import NsMethod
from deepspeed_muon.plan.hardware import GPUS, Gpu
from deepspeed_muon.plan.holdings import Floats, Holdings, Ints, flat_holdings, sharded_holdings
from deepspeed_muon.plan.order import OrderName, balanced_order, flat_partition_numel
from deepspeed_muon.plan.owners import FLOPS_PER_MOVED_ELEMENT, assign_holdings
from deepspeed_muon.plan.pieces import PIECE_SHARE, block_runs
from deepspeed_muon.plan.sharing import Shareable, SharingRule, Speeds, choose_sharers, even_sizes

__all__ = [
    "Exchange",
    "PlanSettings",
    "PlannedParameter",
    "exchange_of",
    "node_of_ranks",
    "parameter_flops",
    "peer_bytes",
    "peer_flops",
    "zero_bytes",
]

# DeepSpeed's defaults: sub_group_size, and the elements up to which stage 3 keeps gathered parameters for backward.
_SUB_GROUP_NUMEL = 1_000_000_000
_REUSE_NUMEL = 1_000_000_000


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """One parameter of a model that need not exist.

    Attributes:
        name: Dotted name.
        numel: Elements.
        muon: Whether it is Muon's; otherwise AdamW's.
        blocks: Rows and columns of every matrix in it that is orthogonalised by itself, with their count.
        stack: How many equal ones follow each other in memory, if that is all of it.
    """

    name: str
    numel: int
    muon: bool
    blocks: tuple[tuple[int, int, int], ...] = ()
    stack: int = 1


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Where and how a model will be trained.

    Attributes:
        world_size: GPUs, tensor-parallel ones counted.
        stage: ZeRO stage.
        tensor_parallel: GPUs that share every matrix before ZeRO divides it.
        gpus_per_node: GPUs that NVLink connects.
        gpu: The kind of GPU.
        steps: Newton-Schulz steps.
        method: ``gram`` or ``standard``.
        ns_dtype: Dtype of the iteration.
        wire_bytes: Bytes of an element of the exchange.
        model_bytes: Bytes of an element of the forward pass's weights, and of its gradient.
        chunk_numel: ``exchange_chunk_numel``.
        order: Order of the matrices in the flat buffers of stages 1 and 2.
        share_matrices: Whether ranks share a matrix where that pays, or how many do wherever it is possible.
        efficiency: Part of the GPU's tensor operations that the iteration reaches.
        link_efficiency: Part of the bandwidths that copies and collectives reach.
    """

    world_size: int
    stage: int = 3
    tensor_parallel: int = 1
    gpus_per_node: int = 8
    gpu: Gpu = field(default_factory=lambda: GPUS["h100"])
    steps: int = 5
    method: NsMethod = "gram"
    ns_dtype: torch.dtype = torch.float16
    wire_bytes: int = 2
    model_bytes: int = 2
    chunk_numel: int = 1 << 26
    order: OrderName = "balanced"
    share_matrices: Literal["auto", False] | int = "auto"
    efficiency: float = 0.5
    link_efficiency: float = 0.7

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.tensor_parallel < 1 or self.world_size % self.tensor_parallel:
            raise ValueError(
                f"{self.world_size} GPUs cannot be divided into tensor-parallel groups of {self.tensor_parallel}"
            )

    @property
    def data_parallel(self) -> int:
        """Ranks among which ZeRO divides."""
        return self.world_size // self.tensor_parallel

    @property
    def sharing_rule(self) -> SharingRule:
        """When ranks share a matrix."""
        wanted = False if self.tensor_parallel > 1 else self.share_matrices
        speeds = None
        if wanted == "auto":
            speeds = Speeds.of(self.gpu, efficiency=self.efficiency, link_efficiency=self.link_efficiency)
        most = 1 if wanted is False else self.world_size if wanted == "auto" else int(wanted)
        return SharingRule(most, self.steps, self.method, self.ns_dtype, speeds)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Owners, work and traffic of all Muon matrices in one step.

    Attributes:
        owners: The owning rank of each Muon parameter, in order; the first of several, and of a stack's first piece.
        owned_elements: Elements of the matrices, and parts of them, that each rank orthogonalises.
        shared: The ranks that share a Muon parameter, by its number, for those that are shared.
        flops: Newton-Schulz operations of each rank; time in which sharers communicate counts as operations.
        gather_elements: Elements that each rank sends to owners.
        scatter_elements: Elements that each rank sends back as an owner.
        moving: Muon parameters that do not lie whole on their owner.
    """

    owners: tuple[int, ...]
    shared: Mapping[int, tuple[int, ...]]
    owned_elements: Floats
    flops: Floats
    gather_elements: Floats
    scatter_elements: Floats
    moving: int

    @property
    def balance(self) -> float:
        """Work of the busiest rank over the mean."""
        mean = float(self.flops.sum()) / len(self.flops)
        return float(self.flops.max()) / mean if mean else 1.0


def node_of_ranks(world_size: int, gpus_per_node: int) -> Ints:
    """Return the node of every rank, ranks being numbered node by node."""
    return np.arange(world_size, dtype=np.int64) // max(1, gpus_per_node)


def parameter_flops(parameter: PlannedParameter, settings: PlanSettings) -> float:
    """Return the floating-point operations of orthogonalising all blocks of one parameter."""
    return sum(
        count * _block_flops(rows, cols, settings.steps, settings.method, settings.ns_dtype)
        for count, rows, cols in parameter.blocks
    )


@functools.lru_cache(maxsize=4096)
def _block_flops(rows: int, cols: int, steps: int, method: NsMethod, dtype: torch.dtype) -> float:
    return orthogonalize_flops(rows, cols, steps=steps, method=method, dtype=dtype)


def exchange_of(parameters: Sequence[PlannedParameter], settings: PlanSettings) -> Exchange:
    """Assign owners and count operations and elements, as the running optimizer does.

    Args:
        parameters: All parameters in the order of the param groups; AdamW's are skipped.
        settings: Stage, ranks and iteration.
    """
    muon = [parameter for parameter in parameters if parameter.muon]
    world = settings.world_size
    place = _order(muon, settings)
    given, muon = muon, [muon[index] for index in place]
    load = [0.0] * world
    nodes = node_of_ranks(world, settings.gpus_per_node)
    costs = [parameter_flops(parameter, settings) for parameter in muon]
    owners: list[int] = []
    shared: dict[int, tuple[int, ...]] = {}
    gather, scatter, owned = np.zeros(world), np.zeros(world), np.zeros(world)
    moving = 0
    for start, stop in _sub_groups(muon, settings):
        numels = np.array([parameter.numel for parameter in muon[start:stop]], dtype=np.int64)
        whole = _holdings(numels, settings)
        part_of, begins, ends = _cut_stacks(muon[start:stop], costs[start:stop], whole, load, settings)
        holdings = whole.parts(part_of, begins, ends)
        of_part = [
            (end - begin)
            * muon[start + i].stack
            // muon[start + i].numel
            * costs[start + i]
            / muon[start + i].stack
            for i, begin, end in zip(part_of.tolist(), begins.tolist(), ends.tolist(), strict=True)
        ]
        candidates = _shareable(muon[start:stop], whole, settings)
        single = np.bincount(part_of, minlength=stop - start)[part_of] == 1
        sharers = choose_sharers(
            [candidates[i] if alone else None for i, alone in zip(part_of.tolist(), single, strict=True)],
            of_part,
            load=load,
            nodes=nodes.tolist(),
            rule=settings.sharing_rule,
        )
        owner_of: dict[int, int] = {}
        for part, ranks in sharers.items():
            index = int(part_of[part])
            _count_slabs(gather, scatter, part, muon[start + index], ranks, holdings, settings)
            owned[list(ranks)] += numels[index] / len(ranks)
            shared[place[start + index]] = ranks
            owner_of[index] = ranks[0]
        alone = np.array([part for part in range(len(part_of)) if part not in sharers], dtype=np.int64)
        rest = holdings.parts(alone, np.zeros_like(alone), holdings.numel[alone])
        given_to = assign_holdings(
            [of_part[part] for part in alone.tolist()],
            rest,
            load=load,
            nodes=nodes,
            replicated=settings.stage == 0 and world > 1,
        )
        owner = np.asarray(given_to, dtype=np.int64)
        for part, rank in zip(alone.tolist(), given_to, strict=True):
            owner_of.setdefault(int(part_of[part]), rank)
        owners.extend(owner_of[index] for index in range(stop - start))
        own = rest.held(np.arange(len(alone)), owner)
        np.add.at(owned, owner, rest.numel)
        if settings.stage > 0:
            gather += rest.per_rank()
            np.add.at(gather, owner, -own)
            np.add.at(scatter, owner, rest.numel - own)
        else:
            np.add.at(scatter, owner, rest.numel * (world - 1.0))
        moving += int(np.count_nonzero(own < rest.numel)) if settings.stage else len(alone) * (world > 1)
        moving += len(sharers)
    of_given = dict(zip(place, owners, strict=True))
    in_order = tuple(of_given[index] for index in range(len(given)))
    return Exchange(in_order, shared, owned, np.asarray(load), gather, scatter, moving)


def _cut_stacks(
    muon: Sequence[PlannedParameter],
    costs: Sequence[float],
    holdings: Holdings,
    load: Sequence[float],
    settings: PlanSettings,
) -> tuple[Ints, Ints, Ints]:
    """Return the parameter, first and last element of everything that has an owner of its own."""
    limit = PIECE_SHARE * (math.fsum(costs) + math.fsum(load)) / settings.world_size
    rows: list[tuple[int, int, int]] = []
    for index, parameter in enumerate(muon):
        size = parameter.numel // parameter.stack
        runs = [(0, parameter.stack)]
        lies_whole = settings.stage > 0 and holdings.first[index] == holdings.last[index]
        if parameter.stack > 1 and settings.tensor_parallel == 1 < settings.world_size and not lies_whole:
            starts = holdings.starts(index).tolist() if settings.stage else None
            runs = block_runs(parameter.stack, size, starts, cost=costs[index] / parameter.stack, limit=limit)
        rows += [(index, first * size, (first + count) * size) for first, count in runs]
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _shareable(
    muon: Sequence[PlannedParameter], holdings: Holdings, settings: PlanSettings
) -> list[Shareable | None]:
    """Return what ranks could share: matrices that are orthogonalised whole."""
    stays = (holdings.first == holdings.last) & (settings.stage > 0)
    return [
        Shareable(*p.blocks[0][1:], moving=FLOPS_PER_MOVED_ELEMENT * p.numel * bool(alone))
        if sum(count for count, _, _ in p.blocks) == 1
        else None
        for p, alone in zip(muon, stays, strict=True)
    ]


def _count_slabs(
    gather: Floats,
    scatter: Floats,
    index: int,
    parameter: PlannedParameter,
    ranks: Sequence[int],
    holdings: Holdings,
    settings: PlanSettings,
) -> None:
    """Add what travels of a matrix that ranks share."""
    _, rows, cols = parameter.blocks[0]
    holders, held = holdings.holders(index)
    starts = holdings.starts(index)
    first = 0
    for rank, count in zip(ranks, even_sizes(rows, len(ranks)), strict=True):
        last = first + count * cols
        if settings.stage == 0:
            scatter[rank] += (last - first) * (settings.world_size - 1.0)
        else:
            inside = np.clip(np.minimum(starts + held, last) - np.maximum(starts, first), 0, None)
            elsewhere = np.where(holders == rank, 0, inside)
            gather[holders] += elsewhere
            scatter[rank] += elsewhere.sum()
        first = last


def _order(muon: Sequence[PlannedParameter], settings: PlanSettings) -> list[int]:
    """Return the positions of the matrices in the order in which they will lie."""
    if settings.stage not in (1, 2) or settings.order == "given":
        return list(range(len(muon)))
    return balanced_order(
        [parameter.numel for parameter in muon],
        [parameter_flops(parameter, settings) for parameter in muon],
        [parameter.blocks for parameter in muon],
        settings.data_parallel,
    )


def _holdings(numels: Ints, settings: PlanSettings) -> Holdings:
    ranks, width = settings.data_parallel, settings.tensor_parallel
    if settings.stage in (1, 2):
        ends = np.cumsum(numels)
        partition = flat_partition_numel(-(-int(numels.sum()) // width), ranks) * width
        return flat_holdings(ends - numels, numels, partition_numel=partition, ranks=ranks, width=width)
    # Stage 0 divides nothing; what is held is not asked for.
    return sharded_holdings(numels, ranks=ranks, width=width)


def _sub_groups(muon: Sequence[PlannedParameter], settings: PlanSettings) -> list[tuple[int, int]]:
    """Return the parts of the Muon group that are exchanged together: ZeRO 3 cuts it by partition size."""
    if settings.stage != 3:
        return [(0, len(muon))] if muon else []
    bounds, start, filled = [], 0, 0
    for index, parameter in enumerate(muon):
        filled += -(-parameter.numel // settings.world_size)
        if filled >= _SUB_GROUP_NUMEL:
            bounds.append((start, index + 1))
            start, filled = index + 1, 0
    if start < len(muon):
        bounds.append((start, len(muon)))
    return bounds


def zero_bytes(parameters: Sequence[PlannedParameter], settings: PlanSettings) -> float:
    """Return the bytes that a rank sends in ZeRO's own collectives in a step without accumulation.

    Stage 0 all-reduces gradients. Stages 1 and 2 all-reduce buckets of gradients too
    (``use_multi_rank_bucket_allreduce``) and all-gather parameters. Stage 3 reduce-scatters gradients and gathers
    parameters for forward, and again for backward in models that are larger than ``stage3_max_reuse_distance``.
    """
    ranks = settings.data_parallel
    numel = sum(parameter.numel for parameter in parameters) / settings.tensor_parallel
    passes = {0: 2.0, 1: 3.0, 2: 3.0, 3: 2.0 if numel <= _REUSE_NUMEL else 3.0}[settings.stage]
    return passes * numel * settings.model_bytes * (ranks - 1) / ranks


def peer_flops(parameters: Sequence[PlannedParameter], settings: PlanSettings) -> float:
    """Return the operations on the critical path of DeepSpeed's own Muon, from its source (0.19.8).

    Stage 0: every rank orthogonalises every matrix. Stages 1, 2: a rank orthogonalises every matrix that touches its
    partition. Stage 3: ranks take turns in rounds of as many matrices as there are ranks.
    """
    muon = [parameter for parameter in parameters if parameter.muon]
    costs = np.array([parameter_flops(parameter, settings) for parameter in muon])
    if not muon:
        return 0.0
    if settings.stage == 0:
        return float(costs.sum())
    if settings.stage == 3:
        world = settings.data_parallel
        padded = np.concatenate([costs, np.zeros(-len(costs) % world)])
        return float(padded.reshape(-1, world).max(axis=1).sum())
    numels = np.array([parameter.numel for parameter in muon], dtype=np.int64)
    holdings = _holdings(numels, settings)
    steps = np.zeros(settings.data_parallel + 1)
    np.add.at(steps, holdings.first, costs)
    np.add.at(steps, holdings.last + 1, -costs)
    return float(np.cumsum(steps)[:-1].max())


def peer_bytes(parameters: Sequence[PlannedParameter], settings: PlanSettings) -> float:
    """Return the bytes that a rank sends in a step of DeepSpeed's own Muon, from its source (0.19.8).

    At stage 3 it all-reduces gradients (it refuses reduce-scatter), gathers Muon's gradients and momentum, and after
    each round of one matrix a rank all-gathers updates and momentum, padded to the round's largest matrix.
    """
    own = zero_bytes(parameters, settings)
    ranks = settings.data_parallel
    if settings.stage != 3 or ranks == 1:
        return own
    numel = sum(parameter.numel for parameter in parameters) / settings.tensor_parallel
    numels = np.array([p.numel for p in parameters if p.muon], dtype=np.float64) / settings.tensor_parallel
    rounds = np.concatenate([numels, np.zeros(-len(numels) % ranks)]).reshape(-1, ranks)
    update = 2 * rounds.max(axis=1).sum() * (ranks - 1)
    gathers = 2 * numels.sum() * (ranks - 1) / ranks
    return own + settings.model_bytes * (numel * (ranks - 1) / ranks + float(gathers) + float(update))
