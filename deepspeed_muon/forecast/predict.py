"""What a step will compute and send, from the routes of a model that need not exist.

The matrices get the layouts, the order and the owners of the running optimizer, by its own functions. Tests compare the
counts with those of real runs.

A collective counts the bytes that each rank of a ring sends: ``n (W-1)/W`` for a reduce-scatter or an all-gather of
``n`` bytes on ``W`` ranks, twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.plan.chunks import divide_into_chunks, is_sent
from deepspeed_muon.plan.layout import MatrixLayout, TensorShards
from deepspeed_muon.plan.owners import (
    assign,
    assign_owners,
    blocks_flops,
    flat_partition_numel,
    sent_by_rank,
)
from deepspeed_muon.plan.placement import (
    Floats,
    Placement,
    flat_placement,
    replicated_placement,
    sharded_placement,
)
from deepspeed_muon.routing.route import Route, order_of_matrices
from deepspeed_muon.transport.all_to_all import overlap_fits

# DeepSpeed's defaults: sub_group_size, and the elements up to which stage 3 keeps gathered parameters for backward.
SUB_GROUP_NUMEL = 1_000_000_000
_REUSE_NUMEL = 1_000_000_000

LINK_EFFICIENCY = 0.7
"""The part of the bandwidths that copies and collectives are taken to reach."""


# Dense bf16 / fp16 tensor operations per second without sparsity, and bytes per second: of the device memory, of NVLink
# and of the network, both in one direction for each GPU. The datasheets give NVLink as the sum of both directions. The
# network is that of the DGX server with eight GPUs: eight ports of 400 Gb/s (H100, H200, B200) or 200 Gb/s (A100).
_FIGURES = ("flops", "memory_bandwidth", "memory", "node_bandwidth", "network_bandwidth", "source")
_A100 = (312e12, 2.039e12, 80e9, 300e9, 25e9, "NVIDIA A100 80GB SXM datasheet; DGX A100 datasheet")
_H100 = (989e12, 3.35e12, 80e9, 450e9, 50e9, "NVIDIA H100 SXM datasheet; DGX H100 datasheet")
_H200 = (989e12, 4.8e12, 141e9, 450e9, 50e9, "NVIDIA H200 SXM datasheet; DGX H200 datasheet")
_B200 = (2250e12, 8.0e12, 180e9, 900e9, 50e9, "NVIDIA DGX B200 datasheet")
GPUS: dict[str, dict[str, Any]] = {
    name: {"name": name, **dict(zip(_FIGURES, figures, strict=True))}
    for name, figures in {"a100": _A100, "h100": _H100, "h200": _H200, "b200": _B200}.items()
}
"""The kinds of GPUs, in the servers in which they are usually sold."""


MOST_GPUS = 1 << 20
"""Far more than anybody has. A plan keeps some numbers for each GPU."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Where and how a model will be trained.

    Attributes:
        world_size: GPUs, tensor-parallel ones counted.
        stage: ZeRO stage.
        tensor_parallel: GPUs that share every matrix before ZeRO divides it.
        expert_parallel: GPUs that the experts of a layer are divided among before ZeRO divides each stack.
        gpus_per_node: GPUs that NVLink connects.
        gpu: A row of :data:`GPUS`.
        config: The optimizer's settings.
        device: Where the iteration runs, which decides its dtype.
        model_dtype: Dtype of the forward pass's weights and of their gradients.
        master_dtype: Dtype of the masters, bf16 with DeepSpeed's ``bf16_master_weights_and_grads``.
        half_states: Whether DeepSpeed's ``bf16_optimizer_states`` is set.
        reordered: Whether stages 1 and 2 lay the matrices out by the rule of :mod:`deepspeed_muon.plan.owners`.
        efficiency: Part of the GPU's tensor operations that the iteration reaches.
    """

    world_size: int
    stage: int = 3
    tensor_parallel: int = 1
    expert_parallel: int = 1
    gpus_per_node: int = 8
    gpu: Mapping[str, Any] = field(default_factory=lambda: GPUS["h100"])
    config: MuonConfig = field(default_factory=MuonConfig)
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    model_dtype: torch.dtype = torch.bfloat16
    master_dtype: torch.dtype = torch.float32
    half_states: bool = False
    reordered: bool = True
    efficiency: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ConfigError(
                f"--efficiency {self.efficiency:g}: a part of the peak is above 0 and at most 1"
            )
        if self.world_size > MOST_GPUS:
            raise ConfigError(f"--world-size {self.world_size}: plans are made for at most {MOST_GPUS} GPUs")
        if self.gpus_per_node < 1:
            raise ConfigError(f"--gpus-per-node {self.gpus_per_node}: must be at least 1")
        for kind, ways in (("tensor", self.tensor_parallel), ("expert", self.expert_parallel)):
            if min(self.world_size, ways) < 1 or self.world_size % ways:
                raise ConfigError(
                    f"{self.world_size} GPUs cannot be divided into {kind}-parallel groups of {ways}"
                )
        if self.expert_parallel > 1 and self.tensor_parallel > 1:
            raise ConfigError("expert parallelism together with tensor parallelism is not planned")

    @property
    def iteration(self) -> NsSettings:
        """The Newton-Schulz iteration."""
        return self.config.ns_settings(self.device)

    @property
    def direction_bytes(self) -> int:
        """Bytes of an element of the directions that are not sent."""
        return self.config.resolved_wire_dtype(self.model_dtype).itemsize

    @property
    def wire_bytes(self) -> float:
        """Bytes of an element of the exchange."""
        return self.config.wire_format.bytes_per_element(self.direction_bytes)


def divisions(
    routes: Sequence[Route], settings: PlanSettings
) -> list[tuple[list[int], list[Route], PlanSettings]]:
    """Return the trained parameters by the ranks among which ZeRO divides them, as one of these ranks sees them.

    A tensor-parallel rank has a shard of every parameter; all are taken as cut into equal rows. Expert-parallel ranks
    have some experts of each stack. ZeRO divides what a rank has among the ranks that have the same.

    Args:
        routes: Of all parameters.
        settings: Stage and ranks.

    Returns:
        The positions of the parameters, their routes with what one rank has of them, and the settings of its ranks.

    Raises:
        ConfigError: If the experts of a stack cannot be divided evenly.
    """
    trained = [number for number, route in enumerate(routes) if route.algorithm != "frozen"]
    ways = settings.tensor_parallel * settings.expert_parallel
    if ways == 1:
        return [(trained, [routes[number] for number in trained], settings)]
    inside = replace(
        settings,
        world_size=settings.world_size // ways,
        tensor_parallel=1,
        expert_parallel=1,
        gpus_per_node=max(1, settings.gpus_per_node // ways),
        # That of groups of experts is left alone.
        reordered=settings.reordered and settings.tensor_parallel > 1,
    )
    if settings.tensor_parallel > 1:
        return [(trained, [_shard(routes[number], ways) for number in trained], inside)]
    dense, stacks = [], {}
    for number in trained:
        route = routes[number]
        if len(route.shape) != 3 or "experts" not in route.name.split("."):
            dense.append(number)
            continue
        count = route.shape[0]
        if count % ways:
            raise ConfigError(
                f"--expert-parallel {ways}: the {count} experts of {route.name} cannot be divided so"
            )
        stacks[number] = replace(route, shape=(count // ways, *route.shape[1:]))
    everywhere = dense, [routes[number] for number in dense], replace(settings, expert_parallel=1)
    return [everywhere, (list(stacks), list(stacks.values()), inside)]


def _shard(route: Route, ways: int) -> Route:
    """Return what a tensor-parallel rank has of a parameter: an equal part of the rows of each block."""
    if not route.shape:
        return route
    dim = len(route.shape) - 2 if route.kind == "experts" else 0
    parts, length = route.output_blocks, -(-route.shape[dim] // ways)
    if parts and not route.transposed:
        parts = tuple(-(-part // ways) for part in parts)
        length = sum(parts)
    shard = replace(route, shape=(*route.shape[:dim], length, *route.shape[dim + 1 :]), output_blocks=parts)
    return replace(shard, shards=TensorShards(0, (shard.matrix_shape[0],) * ways))


@dataclass(slots=True)
class Exchange:
    """Owners, work and traffic of all Muon matrices in one step.

    Attributes:
        owners: The owner of each Muon parameter; for a cut stack, that of its first blocks.
        flops: Newton-Schulz operations of each rank.
        gather_elements: Elements that each rank sends to owners.
        scatter_elements: Elements that each rank sends back as an owner.
        leaving_elements: Those of both that leave the node of each rank.
        moving: The number of Muon parameters of which elements are sent.
        largest_chunk: Elements that an owner has in the largest chunk; of replicated matrices those of all owners.
        overlap: Whether chunks are exchanged while others are orthogonalised.
    """

    owners: list[int]
    flops: Floats
    gather_elements: Floats
    scatter_elements: Floats
    leaving_elements: Floats
    moving: int = 0
    largest_chunk: int = 0
    overlap: bool = True

    @property
    def balance(self) -> float:
        """The work of the busiest rank over the mean."""
        mean = float(self.flops.mean())
        return float(self.flops.max()) / mean if mean else 1.0

    @property
    def leaving(self) -> float:
        """The part of what a rank sends that leaves its node."""
        sent = float((self.gather_elements + self.scatter_elements).max())
        return float(self.leaving_elements.max()) / sent if sent else 0.0


def exchange_of(routes: Sequence[Route], settings: PlanSettings) -> Exchange:
    """Assign owners and count operations and elements, as the running optimizer does.

    Where ``n`` tensor-parallel or expert-parallel ranks share a layer, ranks ``n k`` to ``n k + n - 1`` do, and each of
    them does with its part what the others do with theirs.

    Args:
        routes: Of all parameters in the order of the param groups; only those of Muon count.
        settings: Stage, ranks and iteration.
    """
    muon = [route for route in routes if route.algorithm == "muon"]
    zeros = np.zeros((5, settings.world_size))
    total = Exchange([-1] * len(muon), zeros[0], zeros[1], zeros[2], zeros[3])
    total.overlap = settings.config.exchange_overlap
    owned, moving = zeros[4], set()
    for numbers, local, inside in divisions(muon, settings):
        ranks, ways = inside.world_size, settings.world_size // inside.world_size
        load = np.zeros(ranks)
        for order, layouts in _step_sets(local, inside):
            found = assign(layouts, settings.iteration, load, divisor=settings.config.cut_divisor)
            sent, returned = sent_by_rank(found.matrices, found.owners, ranks)
            owners = np.asarray(found.owners, dtype=np.int64)
            numels = np.array([matrix.numel for matrix in found.matrices], dtype=np.float64)
            owned += np.repeat(np.bincount(owners, numels, ranks), ways)
            total.gather_elements += np.repeat(sent, ways)
            total.scatter_elements += np.repeat(returned, ways)
            total.leaving_elements += _leaving(inside) * np.repeat(sent + returned, ways)
            bound = settings.config.exchange_chunk_numel
            for chunk in divide_into_chunks(found.matrices, found.owners, bound, ranks):
                own = np.bincount(owners[chunk], numels[chunk])
                largest = own.max() if settings.stage else own.sum()
                total.largest_chunk = max(total.largest_chunk, int(largest))
            total.overlap = total.overlap and overlap_fits(layouts, settings.wire_bytes)
            for matrix, owner, origin in zip(found.matrices, found.owners, found.origin, strict=True):
                number = numbers[order[origin]]
                if total.owners[number] < 0:
                    total.owners[number] = owner * ways
                if is_sent(matrix.placement, owner):
                    moving.add(number)
        total.flops += np.repeat(load, ways)
    total.moving = len(moving)
    if settings.tensor_parallel > 1:
        _add_tensor_parallel(total, owned, muon, settings)
    return total


def _leaving(settings: PlanSettings) -> float:
    """Return the part of what data-parallel ranks send each other that leaves the node."""
    ranks, node = settings.world_size, settings.gpus_per_node
    if settings.stage == 0 and ranks > 1:
        # A broadcast goes from rank to rank.
        return (-(-ranks // node) - 1) / (ranks - 1)
    return leaving_the_node(ranks, node)


def _step_sets(
    muon: Sequence[Route], settings: PlanSettings
) -> Iterator[tuple[Sequence[int], list[MatrixLayout]]]:
    """Yield the positions and layouts of the matrices of each step set, in the order in which they lie."""
    ranks = settings.world_size
    order: Sequence[int] = range(len(muon))
    if settings.stage in (1, 2) and settings.reordered:
        order = order_of_matrices(muon, ranks, settings.iteration)
    numels = [muon[number].numel for number in order]
    ends = list(accumulate(numels, initial=0))
    placements: list[Placement]
    if settings.stage in (1, 2):
        partition = flat_partition_numel(ends[-1], ranks)
        placements = [flat_placement(end, numel, partition) for end, numel in zip(ends, numels, strict=False)]
    elif settings.stage == 0:
        placements = [replicated_placement(0, numel, ranks) for numel in numels]
    else:
        placements = [sharded_placement(0, numel, -(-numel // ranks)) for numel in numels]
    layouts = [muon[number].layout(0, placement) for number, placement in zip(order, placements, strict=True)]
    start = filled = 0
    for end, placement in enumerate(placements):
        # ZeRO 3 cuts a param group into sub-groups by the size of its partition.
        if settings.stage == 3 and filled >= SUB_GROUP_NUMEL:
            yield order[start:end], layouts[start:end]
            start, filled = end, 0
        filled += placement.head
    yield order[start:], layouts[start:]


def _add_tensor_parallel(
    total: Exchange, owned: Floats, muon: Sequence[Route], settings: PlanSettings
) -> None:
    """Let the owners of a matrix's shards gather it on one of them, and divide the matrices between them.

    Args:
        total: The exchange of the shards. Mutated.
        owned: Elements of shards that each rank owns.
        muon: The whole matrices.
        settings: Stage, ranks and iteration.
    """
    ways, whole = settings.tensor_parallel, np.zeros(settings.world_size)
    together: dict[int, list[int]] = {}
    for number, first in enumerate(total.owners):
        together.setdefault(first, []).append(number)
    total.flops[:] = 0.0
    for first, numbers in together.items():
        load = total.flops[first : first + ways]
        costs = [blocks_flops(muon[number].kinds_of_blocks(), settings.iteration) for number in numbers]
        for number, rank in zip(numbers, assign_owners(costs, [None] * len(costs), load=load), strict=True):
            total.owners[number] = first + rank
            whole[first + rank] += muon[number].numel / ways
    total.gather_elements += owned - whole
    total.scatter_elements += whole * (ways - 1)
    total.leaving_elements += leaving_the_node(ways, settings.gpus_per_node) * (owned + whole * (ways - 2))
    total.moving = len(muon)


def leaving_the_node(ranks: int, gpus_per_node: int) -> float:
    """Return the part that leaves the node of what one of ``ranks`` sends equally to all others."""
    return (ranks - min(gpus_per_node, ranks)) / (ranks - 1) if ranks > 1 else 0.0


def zero_bytes(routes: Sequence[Route], settings: PlanSettings) -> float:
    """Return the bytes that a rank sends in ZeRO's own collectives in a step without accumulation.

    Stage 0 all-reduces gradients. Stages 1 and 2 all-reduce buckets of gradients too
    (``use_multi_rank_bucket_allreduce``) and all-gather parameters. Stage 3 reduce-scatters gradients and gathers
    parameters for forward, and again for backward in models that are larger than ``stage3_max_reuse_distance``.
    """
    total = 0.0
    for _, local, inside in divisions(routes, settings):
        numel, ranks = sum(route.numel for route in local), inside.world_size
        passes = {0: 2.0, 1: 3.0, 2: 3.0, 3: 2.0 if numel <= _REUSE_NUMEL else 3.0}[settings.stage]
        total += passes * numel * settings.model_dtype.itemsize * (ranks - 1) / ranks
    return total


def kept_bytes(routes: Sequence[Route], settings: PlanSettings) -> tuple[dict[str, float], int, int]:
    """Return the bytes of weights, gradients and masters of a rank, and the elements of its partitions.

    The elements are Muon's and AdamW's, ZeRO's padding included.
    """
    kept = {"weights": 0.0, "gradients": 0.0, "master_weights": 0.0}
    elements = {"muon": 0, "adamw": 0}
    model, master = settings.model_dtype.itemsize, settings.master_dtype.itemsize
    for _, local, inside in divisions(routes, settings):
        for algorithm in elements:
            numels = [each.numel for each in local if each.algorithm == algorithm]
            own = sum(numels)
            if settings.stage == 3:
                own = sum(-(-numel // inside.world_size) for numel in numels)
            elif settings.stage:
                own = flat_partition_numel(own, inside.world_size)
            whole = own * (inside.world_size if settings.stage in (1, 2) else 1)
            kept["weights"] += model * whole
            kept["gradients"] += model * (whole if settings.stage == 1 else own)
            kept["master_weights"] += master * own
            elements[algorithm] += own
    return kept, elements["muon"], elements["adamw"]


def iteration_numel(rows: int, cols: int) -> int:
    """Return the elements that orthogonalising one matrix takes: at most four products of Gram size, or two of each."""
    gram = min(rows, cols) ** 2
    return rows * cols + max(rows * cols + 2 * gram, 4 * gram)
