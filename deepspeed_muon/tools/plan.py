"""``python -m deepspeed_muon plan MODEL``: predicts a run's computation, communication and memory.

Layouts, order and owners of the matrices are computed by the functions of the optimizer itself; tests compare the
predictions with real runs.

A collective counts as the bytes that each rank sends in a ring: ``n (W-1)/W`` for a reduce-scatter or an all-gather of
``n`` bytes on ``W`` ranks, twice that for an all-reduce.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypedDict

import hjson
import numpy as np
import torch

from deepspeed_muon.config.settings import MUON_TYPES, OUR_TYPE, MuonConfig
from deepspeed_muon.config.values import StatePolicy, shown
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.ops.torch_operators import BLOCK
from deepspeed_muon.plan.chunks import divide_into_chunks
from deepspeed_muon.plan.flat_order import flat_partition_numel, order_of_matrices
from deepspeed_muon.plan.layout import MatrixLayout, PartitionIndex, TensorShards
from deepspeed_muon.plan.owners import assign, assign_owners, blocks_flops
from deepspeed_muon.plan.placement import (
    Floats,
    Ints,
    flat_placement,
    replicated_placement,
    sharded_placement,
)
from deepspeed_muon.routing.route import Route, rows_of, totals_of
from deepspeed_muon.routing.rules import route_parameters
from deepspeed_muon.tools.command_line import Output
from deepspeed_muon.tools.model_shapes import (
    as_autoep,
    did_you_mean,
    load_model,
    read_object,
    with_separate_experts,
)
from deepspeed_muon.transport.all_to_all import SLOTS, overlap_fits

# DeepSpeed's defaults of sub_group_size and stage3_max_reuse_distance (gathered parameters that stay for backward).
SUB_GROUP_NUMEL = 1_000_000_000
_REUSE_NUMEL = 1_000_000_000

LINK_EFFICIENCY = 0.7
"""The fraction of a bandwidth that copies and collectives are assumed to reach."""


class Gpu(TypedDict):
    """The specification of a GPU in a server.

    ``flops`` are dense bf16 or fp16 tensor operations per second, ``memory`` is in bytes. The bandwidths are in bytes
    per second and GPU; those of NVLink in the node and of the network are for one direction (datasheets give NVLink as
    the sum of both).
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory: float
    node_bandwidth: float
    network_bandwidth: float


# From NVIDIA's datasheets of the A100 80GB SXM, H100 SXM, H200 SXM and DGX B200. The network is that of the DGX server
# with eight GPUs: eight ports of 400 Gb/s (H100, H200, B200) or 200 Gb/s (A100).
GPUS: dict[str, Gpu] = {
    "a100": {
        "name": "a100",
        "flops": 312e12,
        "memory_bandwidth": 2.039e12,
        "memory": 80e9,
        "node_bandwidth": 300e9,
        "network_bandwidth": 25e9,
    },
    "h100": {
        "name": "h100",
        "flops": 989e12,
        "memory_bandwidth": 3.35e12,
        "memory": 80e9,
        "node_bandwidth": 450e9,
        "network_bandwidth": 50e9,
    },
    "h200": {
        "name": "h200",
        "flops": 989e12,
        "memory_bandwidth": 4.8e12,
        "memory": 141e9,
        "node_bandwidth": 450e9,
        "network_bandwidth": 50e9,
    },
    "b200": {
        "name": "b200",
        "flops": 2250e12,
        "memory_bandwidth": 8.0e12,
        "memory": 180e9,
        "node_bandwidth": 900e9,
        "network_bandwidth": 50e9,
    },
}
"""GPUs by name, in the servers in which they are usually sold."""


MAX_GPUS = 1 << 20
"""The largest world size of a plan, because a plan has several numbers per GPU."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The hardware, parallelism and dtypes of a training run to plan.

    Attributes:
        world_size: All GPUs, including those of tensor and expert parallelism.
        stage: ZeRO stage.
        tensor_parallel: The tensor-parallel size; ZeRO partitions the shards.
        expert_parallel: The expert-parallel size; ZeRO partitions the local experts of each stack.
        gpus_per_node: GPUs connected by NVLink.
        gpu: The specification of a GPU, such as an entry of :data:`GPUS`.
        config: The optimizer's settings.
        device: The device of the Newton-Schulz iteration, which determines its dtype.
        model_dtype: Dtype of the model's weights and gradients.
        master_dtype: Dtype of the master weights, bf16 with DeepSpeed's ``bf16_master_weights_and_grads``.
        half_states: Whether DeepSpeed's ``bf16_optimizer_states`` is set.
        reordered: Whether stages 1 and 2 order the matrices as :mod:`deepspeed_muon.plan.owners` describes.
        efficiency: The fraction of the GPU's peak tensor throughput that Newton-Schulz is assumed to reach.
    """

    world_size: int
    stage: int = 3
    tensor_parallel: int = 1
    expert_parallel: int = 1
    gpus_per_node: int = 8
    gpu: Gpu = field(default_factory=lambda: GPUS["h100"])
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
                f"--efficiency {self.efficiency:g}: a fraction of the peak is above 0 and at most 1"
            )
        if self.world_size > MAX_GPUS:
            raise ConfigError(f"--world-size {self.world_size}: plans are made for at most {MAX_GPUS} GPUs")
        for name in ("world_size", "gpus_per_node", "tensor_parallel", "expert_parallel"):
            if (size := getattr(self, name)) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {size}: must be at least 1")
        for kind, size in (("tensor", self.tensor_parallel), ("expert", self.expert_parallel)):
            if self.world_size % size:
                raise ConfigError(
                    f"{self.world_size} GPUs cannot be divided into {kind}-parallel groups of {size}"
                )
        if self.expert_parallel > 1 and self.tensor_parallel > 1:
            raise ConfigError("expert parallelism together with tensor parallelism is not planned")

    @property
    def iteration(self) -> NsSettings:
        """The settings of the Newton-Schulz iteration."""
        return self.config.ns_settings(self.device)

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of directions and updates."""
        return self.config.resolved_wire_dtype(self.model_dtype)

    @property
    def wire_bytes(self) -> int:
        """Bytes per element of directions and updates."""
        return self.wire_dtype.itemsize


def divisions(
    routes: Sequence[Route], settings: PlanSettings
) -> list[tuple[list[int], list[Route], PlanSettings]]:
    """Group the trained parameters by the data-parallel ranks over which ZeRO partitions them.

    A tensor-parallel rank has a shard of every parameter; all shards are assumed to be equal numbers of rows. An
    expert-parallel rank has some experts of each stack. ZeRO partitions these local parameters over the ranks that have
    the same ones.

    Args:
        routes: The routes of all parameters.
        settings: Stage and parallel sizes.

    Returns:
        For each group: the positions of its parameters in ``routes``, the routes of what one rank has of them, and the
        settings of the ranks that share it.

    Raises:
        ConfigError: If the experts of a stack cannot be divided evenly.
    """
    # 1. Without model parallelism there is one group.
    trained = [number for number, route in enumerate(routes) if route.algorithm != "frozen"]
    model_parallel = settings.tensor_parallel * settings.expert_parallel
    if model_parallel == 1:
        return [(trained, [routes[number] for number in trained], settings)]
    data_parallel = replace(
        settings,
        world_size=settings.world_size // model_parallel,
        tensor_parallel=1,
        expert_parallel=1,
        gpus_per_node=max(1, settings.gpus_per_node // model_parallel),
        # The param groups of experts are never reordered.
        reordered=settings.reordered and settings.tensor_parallel > 1,
    )
    # 2. Tensor parallelism shards every parameter.
    if settings.tensor_parallel > 1:
        return [(trained, [_shard(routes[number], model_parallel) for number in trained], data_parallel)]
    # 3. Expert parallelism divides the stacks of experts; all ranks replicate the other parameters.
    dense, stacks = [], {}
    for number in trained:
        route = routes[number]
        if len(route.shape) != 3 or "experts" not in route.name.split("."):
            dense.append(number)
            continue
        count = route.shape[0]
        if count % model_parallel:
            raise ConfigError(
                f"--expert-parallel {model_parallel}: the {count} experts of {route.name} cannot be divided evenly"
            )
        stacks[number] = replace(route, shape=(count // model_parallel, *route.shape[1:]))
    replicated = dense, [routes[number] for number in dense], replace(settings, expert_parallel=1)
    return [replicated, (list(stacks), list(stacks.values()), data_parallel)]


def _shard(route: Route, ranks: int) -> Route:
    """Return the route of a tensor-parallel rank's shard: an equal number of the rows of each block, rounded up."""
    if not route.shape:
        return route
    dim = len(route.shape) - 2 if route.kind == "experts" else 0  # the rows of each expert
    blocks, length = route.output_blocks, -(-route.shape[dim] // ranks)
    if blocks and not route.transposed:
        blocks = tuple(-(-rows // ranks) for rows in blocks)
        length = sum(blocks)  # each block is rounded up by itself
    shard = replace(route, shape=(*route.shape[:dim], length, *route.shape[dim + 1 :]), output_blocks=blocks)
    return replace(shard, shards=TensorShards(0, (shard.matrix_shape[0],) * ranks))


@dataclass(slots=True)
class Exchange:
    """Owners, computation and communication of all Muon matrices in one step.

    Attributes:
        owners: The owner of each Muon parameter; for a stack with several owners, that of the first blocks.
        flops: Newton-Schulz operations by rank, ``(world_size,)``.
        gather_elements: Elements that each rank sends to owners, ``(world_size,)``.
        scatter_elements: Elements that each rank sends back as an owner, ``(world_size,)``.
        internode_elements: The elements of both that each rank sends to other nodes, ``(world_size,)``.
        sent_matrices: The number of Muon parameters that are sent, even partly.
        largest_chunk: Elements that one owner has in the largest chunk; at stage 0 the elements of all owners.
        overlap: Whether the exchange of a chunk overlaps with Newton-Schulz of the previous one.
    """

    owners: list[int]
    flops: Floats
    gather_elements: Floats
    scatter_elements: Floats
    internode_elements: Floats
    sent_matrices: int = 0
    largest_chunk: int = 0
    overlap: bool = True

    @property
    def balance(self) -> float:
        """The operations of the busiest rank over the mean of all ranks."""
        mean = float(self.flops.mean())
        return float(self.flops.max()) / mean if mean else 1.0

    @property
    def internode_fraction(self) -> float:
        """The fraction of the sent elements that go to another node."""
        sent = float((self.gather_elements + self.scatter_elements).max())
        return float(self.internode_elements.max()) / sent if sent else 0.0


def exchange_of(routes: Sequence[Route], settings: PlanSettings) -> Exchange:
    """Assign owners and count operations and elements, exactly as the optimizer does.

    With ``n`` tensor-parallel or expert-parallel ranks, ranks ``n k`` to ``n k + n - 1`` form group ``k``. The ranks of
    a group have equal shapes and do the same work.

    Args:
        routes: The routes of all parameters in the order of the param groups; only Muon's count.
        settings: Stage, parallel sizes and iteration.
    """
    muon = [route for route in routes if route.algorithm == "muon"]
    # (5, world_size): the four vectors of the result, and the elements of shards that each rank owns.
    zeros = np.zeros((5, settings.world_size))
    total = Exchange([-1] * len(muon), zeros[0], zeros[1], zeros[2], zeros[3])
    total.overlap = settings.config.exchange_overlap
    owned, sent_matrices = zeros[4], set()
    for numbers, local, data_parallel in divisions(muon, settings):
        # All vectors below are by data-parallel rank, and are repeated for the ranks of a model-parallel group.
        ranks = data_parallel.world_size
        group_size = settings.world_size // ranks
        load = np.zeros(ranks)  # (ranks,) Newton-Schulz operations
        for order, layouts in step_sets(local, data_parallel):
            # 1. Owners, and what each rank sends.
            assignment = assign(layouts, settings.iteration, load, divisor=settings.config.cut_divisor)
            sent, returned = sent_by_rank(assignment.matrices, assignment.owners, ranks)
            owners = np.asarray(assignment.owners, dtype=np.int64)
            numels = np.array([matrix.numel for matrix in assignment.matrices], dtype=np.float64)
            owned += np.repeat(np.bincount(owners, numels, ranks), group_size)
            total.gather_elements += np.repeat(sent, group_size)
            total.scatter_elements += np.repeat(returned, group_size)
            total.internode_elements += _internode_fraction(data_parallel) * np.repeat(
                sent + returned, group_size
            )
            # 2. Chunks.
            bound = settings.config.exchange_chunk_numel
            for chunk in divide_into_chunks(assignment.matrices, assignment.owners, bound, ranks):
                numel_by_owner = np.bincount(owners[chunk], numels[chunk])
                largest = numel_by_owner.max() if settings.stage else numel_by_owner.sum()
                total.largest_chunk = max(total.largest_chunk, int(largest))
            total.overlap = total.overlap and overlap_fits(layouts, settings.wire_dtype)
            # 3. The owner of each parameter.
            for matrix, owner, origin in zip(
                assignment.matrices, assignment.owners, assignment.origin, strict=True
            ):
                number = numbers[order[origin]]
                if total.owners[number] < 0:
                    total.owners[number] = owner * group_size
                if matrix.placement.only_rank != owner:
                    sent_matrices.add(number)
        total.flops += np.repeat(load, group_size)
    total.sent_matrices = len(sent_matrices)
    if settings.tensor_parallel > 1:
        _add_tensor_parallel(total, owned, muon, settings)
    return total


def sent_by_rank(
    matrices: Sequence[MatrixLayout], owners: Sequence[int], world_size: int
) -> tuple[Floats, Floats]:
    """Return the elements that each rank of the group sends in gather and in scatter: ``(world_size,)`` both.

    They are the sums of what the plans of all ranks say, without a plan for each.
    """
    # Each of these is (matrices,).
    rules = [
        (p.numel, p.first, p.head, p.body, p.replicas) for p in (matrix.placement for matrix in matrices)
    ]
    numel, first, head, body, replicas = np.array(rules, dtype=np.int64).reshape(-1, 5).T
    owner, cut = np.asarray(owners, dtype=np.int64), replicas == 0

    def start(behind: Ints) -> Ints:
        first_element: Ints = np.minimum(np.where(behind > 0, head + (behind - 1) * body, 0), numel)
        return first_element

    # 1. scatter: the owner sends what it does not hold itself, or, if replicated, everything to every other rank
    numel_on_owner = start(owner - first + 1) - start(owner - first)
    scatter = np.zeros(world_size)
    np.add.at(scatter, owner, np.where(cut, numel - numel_on_owner, numel * (replicas - 1)))
    # 2. gather: a rank sends all that it holds of matrices that it does not own. The first rank has the head, the last
    # one what is left, and those between them a body each, which is added as a difference at both ends and summed up.
    equal = (numel - head) // np.maximum(body, 1)  # ranks with a full body
    change, ends = np.zeros(world_size + 1), np.zeros(world_size + 1)
    np.add.at(change, (first + 1)[cut], body[cut])
    np.add.at(change, (first + 1 + equal)[cut], -body[cut])
    np.add.at(ends, first[cut], head[cut])
    np.add.at(ends, (first + 1 + equal)[cut], (numel - head - equal * body)[cut])
    gather = (np.cumsum(change) + ends)[:world_size]  # (world_size,)
    np.add.at(gather, owner[cut], -numel_on_owner[cut])
    return gather, scatter


def _internode_fraction(settings: PlanSettings) -> float:
    """Return the fraction of what data-parallel ranks send each other that goes to another node."""
    ranks, node = settings.world_size, settings.gpus_per_node
    if settings.stage == 0 and ranks > 1:
        # A broadcast passes along a chain of ranks: one of its W-1 hops for each further node.
        return (-(-ranks // node) - 1) / (ranks - 1)
    return fraction_between_nodes(ranks, node)


def step_sets(
    muon: Sequence[Route], settings: PlanSettings
) -> Iterator[tuple[Sequence[int], list[MatrixLayout]]]:
    """Yield the positions in ``muon`` and the layouts of the matrices of each step set, in the order of the buffer."""
    ranks = settings.world_size
    order: Sequence[int] = range(len(muon))
    if settings.stage in (1, 2) and settings.reordered:
        kinds = [route.kinds_of_blocks() for route in muon]
        order = order_of_matrices([route.numel for route in muon], kinds, ranks, settings.iteration)
    numels = [muon[number].numel for number in order]
    ends = list(accumulate(numels, initial=0))
    # Where ZeRO stores the elements: in one flat buffer cut into partitions (1, 2), on every rank (0), or sharded (3).
    if settings.stage in (1, 2):
        partition = flat_partition_numel(ends[-1], ranks)
        placements = [flat_placement(end, numel, partition) for end, numel in zip(ends, numels, strict=False)]
    elif settings.stage == 0:
        placements = [replicated_placement(numel, ranks) for numel in numels]
    else:
        shards = [-(-numel // ranks) for numel in numels]
        placements = [*map(sharded_placement, accumulate(shards, initial=0), numels, shards)]
    layouts = [
        muon[number].layout(PartitionIndex(0), placement)
        for number, placement in zip(order, placements, strict=True)
    ]
    start = filled = 0  # of the running sub-group: its first matrix, and the elements on a rank
    for end, placement in enumerate(placements):
        # ZeRO 3 divides a param group into sub-groups by the elements in a rank's partition.
        if settings.stage == 3 and filled >= SUB_GROUP_NUMEL:
            yield order[start:end], layouts[start:end]
            start, filled = end, 0
        filled += placement.head
    yield order[start:], layouts[start:]


def _add_tensor_parallel(
    total: Exchange, owned: Floats, muon: Sequence[Route], settings: PlanSettings
) -> None:
    """Add the exchange among tensor-parallel ranks: the owners of a matrix's shards gather it on one of them.

    Args:
        total: The exchange of the shards. Mutated.
        owned: Elements of shards that each rank owns, ``(world_size,)``.
        muon: The routes of the full matrices.
        settings: Stage, parallel sizes and iteration.
    """
    size = settings.tensor_parallel
    # Elements of the rank's own shards of the matrices that it orthogonalises, (world_size,): these are not sent.
    local = np.zeros(settings.world_size)
    numbers_by_group: dict[int, list[int]] = {}  # by the first rank of the tensor-parallel group
    for number, first in enumerate(total.owners):
        numbers_by_group.setdefault(first, []).append(number)
    # Newton-Schulz runs on the gathered matrices, not on the shards: count its operations anew.
    total.flops[:] = 0.0
    for first, numbers in numbers_by_group.items():
        load = total.flops[first : first + size]  # a view, to which assign_owners adds
        costs = [blocks_flops(muon[number].kinds_of_blocks(), settings.iteration) for number in numbers]
        for number, rank in zip(numbers, assign_owners(costs, [None] * len(costs), load=load), strict=True):
            total.owners[number] = first + rank
            local[first + rank] += muon[number].numel / size
    # A rank sends all shards that it owns but those of matrices that it orthogonalises itself; it returns to each of
    # the other size - 1 ranks a shard as large as its own.
    total.gather_elements += owned - local
    total.scatter_elements += local * (size - 1)
    total.internode_elements += fraction_between_nodes(size, settings.gpus_per_node) * (
        owned + local * (size - 2)
    )
    total.sent_matrices = len(muon)


def fraction_between_nodes(ranks: int, gpus_per_node: int) -> float:
    """Return the fraction that goes to other nodes if a rank sends equally to all other ranks."""
    return (ranks - min(gpus_per_node, ranks)) / (ranks - 1) if ranks > 1 else 0.0


def zero_bytes(routes: Sequence[Route], settings: PlanSettings) -> float:
    """Return the bytes that a rank sends in ZeRO's own collectives, in a step without gradient accumulation.

    Stage 0 all-reduces gradients. Stages 1 and 2 all-reduce buckets of gradients
    (``use_multi_rank_bucket_allreduce``) and all-gather parameters. Stage 3 reduce-scatters gradients and all-gathers
    parameters, frozen ones too, for forward, and again for backward in models larger than
    ``stage3_max_reuse_distance``.
    """
    total = 0.0
    groups = zip(divisions(routes, settings), divisions(_frozen_alone(routes), settings), strict=True)
    for (_, trained, data_parallel), (_, frozen, _) in groups:
        ranks = data_parallel.world_size
        numel, frozen_numel = (sum(route.numel for route in local) for local in (trained, frozen))
        gathers = 1.0 if numel + frozen_numel <= _REUSE_NUMEL else 2.0
        # How often a rank sends (W-1)/W of all elements; an all-reduce counts twice.
        passes, frozen_passes = {0: (2.0, 0.0), 3: (1.0 + gathers, gathers)}.get(settings.stage, (3.0, 0.0))
        sent = passes * numel + frozen_passes * frozen_numel
        total += sent * settings.model_dtype.itemsize * (ranks - 1) / ranks
    return total


def _frozen_alone(routes: Sequence[Route]) -> list[Route]:
    """Return the routes of the frozen parameters as if AdamW trained them, to divide them between ranks."""
    return [replace(route, algorithm="adamw") for route in routes if route.algorithm == "frozen"]


def parameter_bytes(routes: Sequence[Route], settings: PlanSettings) -> tuple[dict[str, float], int, int]:
    """Return the bytes of a rank's weights, gradients and master weights, and the elements of its partitions.

    Returns:
        The bytes by name; the elements of Muon's partitions; those of AdamW's. ZeRO's padding is included.
    """
    nbytes = {"weights": 0.0, "gradients": 0.0, "master_weights": 0.0}
    elements = {"muon": 0, "adamw": 0}
    model, master = settings.model_dtype.itemsize, settings.master_dtype.itemsize
    for _, local, data_parallel in divisions(routes, settings):
        for algorithm in elements:
            numels = [route.numel for route in local if route.algorithm == algorithm]
            partition = sum(numels)
            if settings.stage == 3:
                partition = sum(-(-numel // data_parallel.world_size) for numel in numels)
            elif settings.stage:
                partition = flat_partition_numel(partition, data_parallel.world_size)
            # Stages 1 and 2 replicate the weights, stage 1 the gradients too.
            replicated = partition * (data_parallel.world_size if settings.stage in (1, 2) else 1)
            nbytes["weights"] += model * replicated
            nbytes["gradients"] += model * (replicated if settings.stage == 1 else partition)
            nbytes["master_weights"] += master * partition
            elements[algorithm] += partition
    for _, frozen, data_parallel in divisions(_frozen_alone(routes), settings):
        ranks = data_parallel.world_size if settings.stage == 3 else 1
        nbytes["weights"] += model * sum(-(-route.numel // ranks) for route in frozen)
    return nbytes, elements["muon"], elements["adamw"]


def iteration_numel(rows: int, cols: int) -> int:
    """Return an upper bound on the elements in memory while one matrix is orthogonalised."""
    # The matrix, and at most four products of Gram size, or two of each size.
    gram = min(rows, cols) ** 2
    return rows * cols + max(rows * cols + 2 * gram, 4 * gram)


_OPTIMIZERS = {"muon": "deepspeed_muon", "adamw": "AdamW"}

# Fields of PlanSettings that are options of the command with the same names.
_OPTIONS = ("world_size", "stage", "tensor_parallel", "expert_parallel", "gpus_per_node")

# Seconds that each peer adds to an all-to-all: the order of magnitude of NCCL over InfiniBand.
_MESSAGE_SECONDS = 3e-6
# Bytes read and written per element. AdamW reads the gradient, the weight and both moments, and writes the last three
# and the low-precision copy. Muon has two passes: momentum and pack (14), unpack and apply (10).
_ADAMW_TRAFFIC = 30.0
_MUON_TRAFFIC = 24.0


class StepForecast(TypedDict):
    """The busiest rank's step and memory with one optimizer.

    ``sent_bytes`` are those of Muon's exchange, ``zero_bytes`` those of ZeRO's collectives, which take ``zero_seconds``
    if nothing overlaps with them. ``flops`` are those of Newton-Schulz. ``seconds`` by phase are without ZeRO's
    collectives, ``memory``, bytes by purpose, is without activations; both have a ``total``.
    """

    sent_bytes: float
    flops: float
    seconds: dict[str, float]
    memory: dict[str, float]
    zero_bytes: float
    zero_seconds: float


def forecast(
    routes: Sequence[Route], settings: PlanSettings, exchange: Exchange | None = None
) -> dict[str, StepForecast]:
    """Predict the step and the memory of the busiest rank, with this project's ``muon`` and with ``adamw`` alone.

    Args:
        routes: The routes of all parameters.
        settings: Stage, parallel sizes and hardware.
        exchange: From :func:`exchange_of`; computed if absent.
    """
    exchange = exchange or exchange_of(routes, settings)
    # 1. What both optimizers have in common.
    parameters, muon_numel, adamw_numel = parameter_bytes(routes, settings)
    zero = zero_bytes(routes, settings)
    zero_seconds = _ring_seconds(settings, zero)
    # 2. Muon's step. Gather and scatter are both counted with the bytes of the larger one.
    flops = float(exchange.flops.max())
    gather, scatter = exchange.gather_elements, exchange.scatter_elements
    exchange_seconds = _exchange_seconds(
        settings, max(gather.max(), scatter.max()) * settings.wire_bytes, exchange
    )
    bandwidth = settings.gpu["memory_bandwidth"] * LINK_EFFICIENCY
    muon = StepForecast(
        sent_bytes=float((gather + scatter).max()) * settings.wire_bytes,
        flops=flops,
        seconds={
            "gather": exchange_seconds if settings.stage else 0.0,  # at stage 0 every rank has the gradients
            "newton_schulz": flops / (settings.gpu["flops"] * settings.efficiency),
            "scatter": exchange_seconds,
            "momentum_and_apply": _MUON_TRAFFIC * muon_numel / bandwidth,
            "adamw": _ADAMW_TRAFFIC * adamw_numel / bandwidth,
        },
        memory=parameters
        | _state(muon_numel, adamw_numel, settings)
        | _buffers(routes, settings, exchange, partition=muon_numel),
        zero_bytes=zero,
        zero_seconds=zero_seconds,
    )
    # 3. AdamW for all parameters, to compare.
    adamw = StepForecast(
        sent_bytes=0.0,
        flops=0.0,
        seconds={"adamw": _ADAMW_TRAFFIC * (muon_numel + adamw_numel) / bandwidth},
        memory=parameters | _state(0, muon_numel + adamw_numel, settings),
        zero_bytes=zero,
        zero_seconds=zero_seconds,
    )
    for step in (muon, adamw):
        for terms in (step["seconds"], step["memory"]):
            terms["total"] = math.fsum(terms.values())
    return {"muon": muon, "adamw": adamw}


def _ring_seconds(settings: PlanSettings, nbytes: float) -> float:
    """Return the time of collectives in which each rank sends ``nbytes`` around a ring."""
    rate = settings.gpu["node_bandwidth"]  # of one GPU
    if settings.world_size > settings.gpus_per_node:
        # A ring uses every link between nodes once, and the GPUs of a node share its links.
        rate = min(rate, settings.gpus_per_node * settings.gpu["network_bandwidth"])
    return nbytes / (rate * LINK_EFFICIENCY)


def _exchange_seconds(settings: PlanSettings, nbytes: float, exchange: Exchange) -> float:
    """Return the time of one all-to-all in which the busiest rank sends ``nbytes``."""
    if settings.world_size == 1 or not exchange.sent_matrices:
        return 0.0
    # At stages 1 and 2 a rank exchanges only with the neighbours that have fragments of the same matrices.
    peers = settings.world_size - 1 if settings.stage in (0, 3) else 2 * settings.tensor_parallel
    # Both networks work at the same time, so the slower one decides.
    node = (1 - exchange.internode_fraction) * nbytes / settings.gpu["node_bandwidth"]
    network = exchange.internode_fraction * nbytes / settings.gpu["network_bandwidth"]
    seconds: float = max(node, network) / LINK_EFFICIENCY
    return seconds + _MESSAGE_SECONDS * min(peers, settings.world_size - 1)


def _state(muon: int, adamw: int, settings: PlanSettings) -> dict[str, float]:
    """Return the bytes of the optimizer's state and input, for the numbers of elements of Muon and of AdamW.

    The input is the gradient in the dtype of the master weights, which ZeRO passes for one param group, at stage 3 one
    sub-group, at a time.
    """
    policy = StatePolicy(settings.config.momentum_dtype, settings.half_states)
    master, largest = settings.master_dtype, max(muon, adamw)
    # bytes of an element; int8 has an fp32 scale for each block of 256
    momentum = policy.dtype("momentum_buffer", master).itemsize + policy.quantizes_momentum * 4 / BLOCK
    return {
        "gradient_copy": master.itemsize
        * (min(largest, SUB_GROUP_NUMEL) if settings.stage == 3 else largest),
        "momentum": momentum * muon,
        "moments": 2 * policy.dtype("exp_avg", master).itemsize * adamw,
    }


def _buffers(
    routes: Sequence[Route], settings: PlanSettings, exchange: Exchange, *, partition: float
) -> dict[str, float]:
    """Return upper bounds on the bytes of the buffers in Muon's step; ``partition`` is Muon's elements on a rank."""
    chunk = exchange.largest_chunk if exchange.sent_matrices else 0
    # Directions of one chunk that are not sent: at stage 3 only the owner's own fragments, 1 / W of the chunk on W
    # data-parallel ranks.
    local = min(partition, float(exchange.largest_chunk))
    if settings.stage == 3 and exchange.sent_matrices:
        local = chunk / (settings.world_size // settings.tensor_parallel)
    muon = [route for route in routes if route.algorithm == "muon"]
    blocks = {(rows, cols) for route in muon for _, rows, cols in route.kinds_of_blocks()}
    block = max((rows * cols for rows, cols in blocks), default=0)
    largest = max((iteration_numel(*shape) for shape in blocks), default=0)
    # Without overlap the directions of a block reuse a buffer that has been sent.
    waiting = exchange.overlap * settings.wire_bytes * min(chunk, block)
    return {
        "directions": settings.wire_bytes * local,
        "exchange_buffers": float(int(2 * (SLOTS if exchange.overlap else 1) * settings.wire_bytes * chunk)),
        "iteration": float(settings.iteration.dtype.itemsize * largest + waiting),
    }


def report(
    model: str,
    routes: Sequence[Route],
    settings: PlanSettings,
    *,
    owners: bool = False,
) -> dict[str, Any]:
    """Return the plan as data that can be serialised to JSON.

    Args:
        model: The model's name in the report.
        routes: The routes of all parameters.
        settings: Stage, parallel sizes and hardware.
        owners: Whether to list the owner of every matrix.
    """
    exchange = exchange_of(routes, settings)
    names = [route.name for route in routes if route.algorithm == "muon"]
    counts = np.bincount(np.asarray(exchange.owners, dtype=np.int64), minlength=settings.world_size)
    step = forecast(routes, settings, exchange)
    sent = (exchange.gather_elements + exchange.scatter_elements) * settings.wire_bytes
    return {
        "model": model,
        "elements": sum(route.numel for route in routes),
        "algorithms": totals_of(routes),
        "settings": {
            **{key: getattr(settings, key) for key in (*_OPTIONS, "gpu", "wire_bytes")},
            "overlap": exchange.overlap,
            "assumed_efficiency": settings.efficiency,
            "assumed_link_efficiency": LINK_EFFICIENCY,
        },
        "routes": rows_of(routes, per_parameter=False),
        "owners": {
            "matrices": len(names),
            "moving": exchange.sent_matrices,
            "matrices_per_rank": _range(counts),
            "flops_per_rank": _range(exchange.flops),
            "max_over_mean": exchange.balance,
            **({"of": dict(zip(names, exchange.owners, strict=True))} if owners else {}),
        },
        "sent_bytes_per_rank": _range(sent),
        "step": step,
        "fits": step["muon"]["memory"]["total"] <= settings.gpu["memory"],
    }


def _range(values: Floats | Ints) -> dict[str, float]:
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}


def render(data: Mapping[str, Any]) -> str:
    """Return the data of :func:`report` as text."""
    chosen, owners, forecasts = data["settings"], data["owners"], data["step"]
    gpu, steps = chosen["gpu"], list(forecasts.values())
    lines = [
        f"{data['model']}: {_elements(data['elements'])} parameters; ZeRO {chosen['stage']} on "
        f"{chosen['world_size']} x {gpu['name'].upper()}, tensor parallel {chosen['tensor_parallel']}, "
        f"expert parallel {chosen['expert_parallel']}, {chosen['gpus_per_node']} GPUs a node",
    ]
    lines.append(f"\nowners\n  {owners['matrices']} matrices, {owners['moving']} of them on several ranks")
    for label, spread, unit in (
        ("matrices per rank", owners["matrices_per_rank"], 1),
        ("Newton-Schulz per rank, TFLOP", owners["flops_per_rank"], 1e12),
        ("sent per rank, MB", data["sent_bytes_per_rank"], 1e6),
    ):
        low, mean, high = (f"{spread[key] / unit:,.2f}" for key in ("min", "mean", "max"))
        lines.append(f"  {label:<29} {low} to {high} (mean {mean})")
    lines.append(f"  {'busiest rank':<29} {owners['max_over_mean']:.3f} x the mean\n")
    lines.append(f"{'per rank and step':<30}" + "".join(f"{_OPTIMIZERS[name]:>18}" for name in forecasts))
    rows: list[tuple[str, list[float | None], float]] = [
        ("exchange, MB", [step["sent_bytes"] for step in steps], 1e6),
        ("ZeRO's collectives, MB", [step["zero_bytes"] for step in steps], 1e6),
        ("ZeRO's collectives, ms", [step["zero_seconds"] for step in steps], 1e-3),
        ("Newton-Schulz, TFLOP", [step["flops"] for step in steps], 1e12),
    ]
    for kind, total, suffix, unit in (
        ("seconds", "optimizer step", "ms", 1e-3),
        ("memory", "memory", "GB", 1e9),
    ):
        for name in forecasts["muon"][kind]:
            label = (
                total if name == "total" else name.replace("_", " ").replace("newton schulz", "Newton-Schulz")
            )
            rows.append((f"{label}, {suffix}", [step[kind].get(name) for step in steps], unit))
    for label, values, unit in rows:
        cells = ("-" if value is None else f"{value / unit:,.2f}" for value in values)
        lines.append(f"  {label:<28}" + "".join(f"{cell:>18}" for cell in cells))
    overlap = "communication overlaps with Newton-Schulz (exchange_overlap)"
    if not chosen["overlap"]:
        overlap = "every exchange is waited for: exchange_overlap is false, or its buffers would take more than 1 GiB"
    return "\n".join(
        [
            *lines,
            f"{'fits' if data['fits'] else 'does not fit'}: {forecasts['muon']['memory']['total'] / 1e9:,.1f} of the "
            f"{gpu['memory'] / 1e9:.0f} GB of a GPU, without activations, ZeRO's buckets and gathered parameters",
            f"\ntimes are a model: {chosen['assumed_efficiency']:.0%} of {gpu['flops'] / 1e12:,.0f} TFLOP/s, "
            f"{chosen['assumed_link_efficiency']:.0%} of {gpu['memory_bandwidth'] / 1e12:.2f} TB/s memory, "
            f"{gpu['node_bandwidth'] / 1e9:g} GB/s in a node, {gpu['network_bandwidth'] / 1e9:.3g} GB/s between nodes",
            overlap,
            "buffers are upper bounds; activations and CUDA graphs are not counted",
            "ZeRO's collectives are no part of the step's time",
        ]
    )


def _elements(count: int) -> str:
    for unit, suffix in ((1e9, "B"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:,.2f}{suffix}"
    return str(count)


def run(arguments: argparse.Namespace) -> Output:
    """Run the command ``plan``."""
    configuration = read_configuration(arguments.params)
    bf16 = configuration.get("bf16", {})
    settings = PlanSettings(
        **{name: getattr(arguments, name) for name in _OPTIONS},
        gpu=_gpu(arguments),
        config=optimizer_config(configuration),
        master_dtype=torch.bfloat16 if bf16.get("bf16_master_weights_and_grads") else torch.float32,
        half_states=bool(bf16.get("bf16_optimizer_states")),
        efficiency=arguments.efficiency,
    )
    members = load_model(arguments.model)
    if settings.expert_parallel > 1:
        if arguments.separate_experts:
            raise ConfigError("--expert-parallel divides stacks of experts: remove --separate-experts")
        members = as_autoep(members)
    if arguments.separate_experts:
        members = with_separate_experts(members)
    routes = route_parameters(members, settings.config)
    if all(route.algorithm == "frozen" for route in routes):
        raise ConfigError(f"{arguments.model}: has no parameter to train")
    data = report(arguments.model, routes, settings, owners=arguments.owners)
    return Output(data, render(data))


def _gpu(arguments: argparse.Namespace) -> Gpu:
    """Return the GPU's figures: those of the table, and those that options give."""
    figures = ("flops", "memory", "bandwidth")
    given = {name: getattr(arguments, name) for name in (*figures, "network_gbit")}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if not 0 < value < math.inf:  # also false for NaN
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be above 0 and finite")
    name = arguments.gpu.lower()
    if name not in GPUS and (absent := [f"--{figure}" for figure in figures if figure not in given]):
        raise ConfigError(
            f"--gpu {arguments.gpu}: not among {', '.join(GPUS)}{did_you_mean(name, GPUS) or ';'} another one needs "
            f"{', '.join(absent)}"
        )
    gpu: Gpu = {**GPUS.get(name, GPUS["h100"]), "name": name}
    if "flops" in given:
        gpu["flops"] = given["flops"] * 1e12
    if "memory" in given:
        gpu["memory"] = given["memory"] * 1e9
    if "bandwidth" in given:
        gpu["memory_bandwidth"] = given["bandwidth"] * 1e9
    if "network_gbit" in given:
        # Gb/s of a node to bytes per second and GPU
        gpu["network_bandwidth"] = given["network_gbit"] * 1e9 / 8 / max(1, arguments.gpus_per_node)
    return gpu


def optimizer_config(configuration: Mapping[str, Any]) -> MuonConfig:
    """Return the settings of a DeepSpeed configuration's optimizer, with defaults for those that are "auto"."""
    params = configuration["optimizer"].get("params")
    if isinstance(params, Mapping):  # the values that the Trainer fills in do not affect routes and forecasts
        params = {key: value for key, value in params.items() if value != "auto"}
    return MuonConfig.from_params(params)


def read_configuration(text: str) -> Mapping[str, Any]:
    """Return the DeepSpeed configuration that the option ``--params`` gives.

    Args:
        text: ``optimizer.params`` as JSON, or the path of a DeepSpeed configuration or of such an object.

    Raises:
        ConfigError: If it cannot be read.
    """
    if text.lstrip().startswith("{"):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--params {text!r}: not JSON: {error}") from error
    else:
        content = read_object(Path(text), hjson.loads)  # DeepSpeed's configuration files may have comments
        if "optimizer" not in content and not content.keys() & MuonConfig.model_fields.keys():
            raise ConfigError(
                f'--params: {text} has no section "optimizer", and is not optimizer.params either. Leave --params out '
                f"for the defaults, or add the section"
            )
    configuration = content if "optimizer" in content else {"optimizer": {"params": content}}
    for name in ("optimizer", "bf16"):
        if not isinstance(configuration.get(name, {}), Mapping):
            raise ConfigError(f"--params: {name} must be an object, got {shown(configuration[name])}")
    kind = configuration["optimizer"].get("type", OUR_TYPE)
    if str(kind).lower() not in MUON_TYPES:
        raise ConfigError(f"--params: optimizer.type is {shown(kind)}, not Muon (`rates` converts AdamW's)")
    return configuration
