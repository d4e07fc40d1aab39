"""What a forecast is made of: the parameters of a model that need not exist, and where and how it will be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from deepspeed_muon.math.newton_schulz import NsMethod
from deepspeed_muon.plan.hardware import GPUS, Gpu


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """One parameter of a model that need not exist.

    Attributes:
        name: Dotted name.
        numel: Elements.
        muon: Whether it is Muon's; otherwise AdamW's.
        blocks: Count, rows and columns of every kind of block in it.
        stack: The number of blocks, if they are equal and follow each other in memory; else 1.
        experts: The number of experts in a stack of experts; 0 for any other parameter.
    """

    name: str
    numel: int
    muon: bool
    blocks: tuple[tuple[int, int, int], ...] = ()
    stack: int = 1
    experts: int = 0


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Where and how a model will be trained.

    Attributes:
        world_size: GPUs, tensor-parallel ones counted.
        stage: ZeRO stage.
        tensor_parallel: GPUs that share every matrix before ZeRO divides it.
        expert_parallel: GPUs that the experts of a layer are divided among before ZeRO divides each stack.
        gpus_per_node: GPUs that NVLink connects.
        gpu: The kind of GPU.
        steps: Newton-Schulz steps.
        method: ``gram`` or ``standard``.
        ns_dtype: Dtype of the iteration.
        wire_bytes: Bytes of an element of the exchange.
        direction_bytes: Bytes of an element of the directions that do not travel.
        model_bytes: Bytes of an element of the forward pass's weights, and of its gradient.
        chunk_numel: ``exchange_chunk_numel``.
        overlap: ``exchange_overlap``.
        reordered: Whether stages 1 and 2 lay the matrices out by the rule of :mod:`deepspeed_muon.plan.order`.
        efficiency: Part of the GPU's tensor operations that the iteration reaches.
        link_efficiency: Part of the bandwidths that copies and collectives reach.
    """

    world_size: int
    stage: int = 3
    tensor_parallel: int = 1
    expert_parallel: int = 1
    gpus_per_node: int = 8
    gpu: Gpu = field(default_factory=lambda: GPUS["h100"])
    steps: int = 5
    method: NsMethod = "gram"
    ns_dtype: torch.dtype = torch.float16
    wire_bytes: float = 2
    direction_bytes: int = 2
    model_bytes: int = 2
    chunk_numel: int = 1 << 26
    overlap: bool = True
    reordered: bool = True
    efficiency: float = 0.5
    link_efficiency: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"--efficiency {self.efficiency:g}: a part of the peak is above 0 and at most 1")
        if self.gpus_per_node < 1:
            raise ValueError(f"--gpus-per-node {self.gpus_per_node}: must be at least 1")
        if self.world_size < 1 or self.tensor_parallel < 1 or self.world_size % self.tensor_parallel:
            raise ValueError(
                f"{self.world_size} GPUs cannot be divided into tensor-parallel groups of {self.tensor_parallel}"
            )
        if self.expert_parallel < 1 or self.world_size % self.expert_parallel:
            raise ValueError(
                f"{self.world_size} GPUs cannot be divided into expert-parallel groups of {self.expert_parallel}"
            )
        if self.expert_parallel > 1 and self.tensor_parallel > 1:
            raise ValueError("expert parallelism together with tensor parallelism is not planned")

    @property
    def data_parallel(self) -> int:
        """The number of ranks among which ZeRO divides."""
        return self.world_size // self.tensor_parallel


def divisions(
    parameters: Sequence[PlannedParameter], settings: PlanSettings
) -> list[tuple[list[int], list[PlannedParameter], PlanSettings]]:
    """Return the parameters by the ranks among which ZeRO divides them, as one of these ranks sees them.

    Expert-parallel ranks hold some experts of each stack. ZeRO divides those among the ranks that hold the same.

    Args:
        parameters: All parameters.
        settings: Stage and ranks.

    Returns:
        The numbers of the parameters, the parameters with the experts of one rank, and the settings of its ranks.

    Raises:
        ValueError: If the experts of a stack cannot be divided evenly.
    """
    ways = settings.expert_parallel
    if ways == 1:
        return [(list(range(len(parameters))), list(parameters), settings)]
    experts = [number for number, parameter in enumerate(parameters) if parameter.experts]
    rest = [number for number, parameter in enumerate(parameters) if not parameter.experts]
    inside = replace(
        settings,
        world_size=settings.world_size // ways,
        expert_parallel=1,
        gpus_per_node=max(1, settings.gpus_per_node // ways),
        reordered=False,  # that of groups of experts is left alone
    )
    local = [_some_experts(parameters[number], ways) for number in experts]
    dense = replace(settings, expert_parallel=1)
    return [(rest, [parameters[number] for number in rest], dense), (experts, local, inside)]


def _some_experts(parameter: PlannedParameter, ways: int) -> PlannedParameter:
    if parameter.experts % ways:
        raise ValueError(f"{parameter.name}: {parameter.experts} experts cannot be divided among {ways} GPUs")
    blocks = tuple((count // ways, rows, cols) for count, rows, cols in parameter.blocks)
    stack = parameter.stack // ways if parameter.stack > 1 else 1
    return replace(
        parameter,
        numel=parameter.numel // ways,
        blocks=blocks,
        stack=stack,
        experts=parameter.experts // ways,
    )
