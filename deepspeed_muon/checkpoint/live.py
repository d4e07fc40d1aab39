"""What a running engine holds: the master and optimizer state of every parameter, and which rank has which fragment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.checkpoint.host import Host, optimizer_of
from deepspeed_muon.checkpoint.index import STATE_KEYS, InPartitions
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.layout import MatrixLayout, ParameterLayout
from deepspeed_muon.plan.rows import ROW_STATE_KEY, RowPlaces
from deepspeed_muon.plan.spread import Fragment, Spread
from deepspeed_muon.routing.rules import Route
from deepspeed_muon.step.step_set import BoundPartition

__all__ = ["LiveParameter", "LiveState", "collect"]


@dataclass(frozen=True, slots=True)
class LiveParameter(InPartitions):
    """One parameter of a running engine, and where it lies.

    Attributes:
        route: Name, true shape and algorithm.
        partition: The partition that holds this rank's fragments.
        group: Number of its param group.
    """

    route: Route
    shape: tuple[int, ...]
    spread: Spread
    row_places: RowPlaces | None
    partition: BoundPartition
    group: int


@dataclass(frozen=True, slots=True)
class LiveState:
    """Everything of an engine that a checkpoint holds.

    Attributes:
        optimizer: Our optimizer inside the engine.
        host: The engine around it.
        parameters: In an order that all ranks of the group share.
        group: The data-parallel group that divides or replicates them.
        rank: This rank inside the group.
        world_size: Its size.
        device: Where the group's backend can send from.
    """

    optimizer: Muon
    host: Host
    parameters: tuple[LiveParameter, ...]
    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    device: torch.device

    @property
    def by_name(self) -> dict[str, LiveParameter]:
        """The parameters by name."""
        return {parameter.route.name: parameter for parameter in self.parameters}

    def own_fragment(self, parameter: LiveParameter, key: str) -> Fragment | None:
        """Return this rank's fragment of the master or of an entry of the state."""
        return parameter.places_of(key).on(self.rank)

    def step(self, partition: BoundPartition) -> int:
        """Return the optimizer steps that a partition has taken."""
        return int(self.optimizer.state.get(partition.tensor, {}).get("step", 0))

    def tensor(self, partition: BoundPartition, key: str) -> Tensor:
        """Return the master (``fp32``) or an entry of the state of this rank's partition, flat in row-major order.

        It shares memory, but for whole parameters of stage 0 with other strides (``channels_last``): those are copied.
        """
        return self._own(partition, key).reshape(-1)

    def keep(self, partition: BoundPartition, key: str, flat: Tensor) -> None:
        """Take over what was written into :meth:`tensor`, where that is a copy."""
        own = self._own(partition, key)
        if not own.is_contiguous():
            own.copy_(flat.view(own.shape))

    def _own(self, partition: BoundPartition, key: str) -> Tensor:
        own: Tensor = partition.tensor if key == "fp32" else self.optimizer.state[partition.tensor][key]
        return own.detach()

    def keys(self, parameter: LiveParameter) -> tuple[str, ...]:
        """Return what there is to save of a parameter: ``fp32``, and the state once a step was taken."""
        if not self.step(parameter.partition):
            return ("fp32",)
        own = self.optimizer.state[parameter.partition.tensor]
        rows = (ROW_STATE_KEY,) if parameter.row_places and ROW_STATE_KEY in own else ()
        return ("fp32", *STATE_KEYS[parameter.route.algorithm], *rows)


def collect(engine: Any) -> LiveState:
    """Describe the engine's state as this rank knows it, without copying or sending anything.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours.

    Raises:
        CheckpointError: If the engine runs another optimizer, or its parameters cannot be told apart by name.
    """
    optimizer = optimizer_of(engine)
    host: Host = optimizer.host
    routes: dict[str, Route] = {}
    for route in optimizer.routes:
        if route.name in routes:
            raise CheckpointError(f"two parameters are called {route.name}: pass model.named_parameters()")
        routes[route.name] = route
    groups = host.param_group_numbers()
    parameters = []
    for runner in optimizer.runners:
        step_set = runner.step_set
        rows = {places.matrix.name: places for places in runner.row_places}
        if step_set.tensor_group is not None:
            raise CheckpointError(
                "this project's checkpoints do not know tensor parallelism yet: use engine.save_checkpoint and "
                "load_checkpoint with the same number of ranks and the same tensor-parallel size"
            )
        if _ranks(step_set.group) != _ranks(optimizer.runners[0].step_set.group):
            raise CheckpointError("param groups of different data-parallel groups cannot be consolidated yet")
        partitions = {partition.index: partition for partition in step_set.partitions}
        layouts: tuple[MatrixLayout | ParameterLayout, ...] = (*step_set.matrices, *step_set.others)
        for layout in layouts:
            parameters.append(
                LiveParameter(
                    routes[layout.name],
                    routes[layout.name].shape,
                    layout.spread,
                    rows.get(layout.name),
                    partitions[layout.partition],
                    groups[layout.partition],
                )
            )
    if not parameters:
        raise CheckpointError("the engine's optimizer holds no parameters")
    first = optimizer.runners[0]
    ranks = first.step_set
    return LiveState(
        optimizer, host, tuple(parameters), ranks.group, ranks.rank, ranks.world_size, first.context.device
    )


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)
