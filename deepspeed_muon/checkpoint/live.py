"""What a running engine holds: the master and optimizer state of every parameter, and which rank has which fragment."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from deepspeed_muon.plan.slices import TensorSlice, whole_slice
from deepspeed_muon.plan.spread import Fragment, Spread
from deepspeed_muon.routing.route import Route
from deepspeed_muon.step.step_set import BoundPartition

__all__ = ["HeldParameter", "LiveParameter", "LiveState", "collect"]


@dataclass(frozen=True, slots=True)
class HeldParameter(InPartitions):
    """One parameter as the ranks of its data-parallel group hold it; other ranks may hold other parts of it.

    Attributes:
        route: Name, true shape and algorithm on these ranks.
        part: The part of the whole tensor that they hold, with its name.
        ranks: The ranks of the group, as global ranks: one object for all parameters of the group.
        group: Number of its param group.
        step: Optimizer steps taken.
        keys: What there is to save: ``fp32``, and the state once a step was taken.
    """

    route: Route
    shape: tuple[int, ...]
    part: TensorSlice
    spread: Spread
    row_places: RowPlaces | None
    ranks: tuple[int, ...]
    group: int
    step: int
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the whole tensor."""
        return self.part.name

    @property
    def whole(self) -> Route:
        """The route as it would be on a rank that has the whole tensor."""
        return replace(self.route, name=self.part.name, shape=self.part.shape)


@dataclass(frozen=True, slots=True)
class LiveParameter(HeldParameter):
    """One parameter of a running engine, and where it lies.

    Attributes:
        partition: The partition that holds this rank's fragments.
        rank: This rank inside the group.
    """

    partition: BoundPartition
    rank: int

    def own_fragment(self, key: str) -> Fragment | None:
        """Return this rank's fragment of the master or of an entry of the state."""
        return self.places_of(key).on(self.rank)

    def told(self) -> HeldParameter:
        """Return what the other ranks are told: no tensors, and of the row moments' places what tells the rank."""
        rows = None if self.row_places is None else self.row_places.alone()
        return HeldParameter(
            self.route,
            self.shape,
            self.part,
            self.spread,
            rows,
            self.ranks,
            self.group,
            self.step,
            self.keys,
        )


@dataclass(frozen=True, slots=True)
class LiveState:
    """Everything of an engine that a checkpoint holds.

    Attributes:
        optimizer: Our optimizer inside the engine.
        host: The engine around it.
        parameters: In an order that all ranks with the same parameters share.
        rank: This rank among all ranks.
        world_size: How many they are.
        device: Where their backend can send from.
    """

    optimizer: Muon
    host: Host
    parameters: tuple[LiveParameter, ...]
    rank: int
    world_size: int
    device: torch.device

    @property
    def by_name(self) -> dict[str, LiveParameter]:
        """The parameters by the names of the whole tensors."""
        return {parameter.name: parameter for parameter in self.parameters}

    @property
    def groups(self) -> list[list[LiveParameter]]:
        """The parameters of each data-parallel group that this rank is in."""
        found: dict[int, list[LiveParameter]] = {}
        for parameter in self.parameters:
            found.setdefault(id(parameter.ranks), []).append(parameter)
        return list(found.values())

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


def collect(engine: Any) -> LiveState:
    """Describe the engine's state as this rank knows it, without copying or sending anything.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours.

    Raises:
        CheckpointError: If the engine runs another optimizer, its parameters cannot be told apart by name, or nobody
            knows which part of a whole tensor one of them is.
    """
    optimizer = optimizer_of(engine)
    host: Host = optimizer.host
    routes: dict[str, Route] = {}
    for route in optimizer.routes:
        if route.name in routes:
            raise CheckpointError(f"two parameters are called {route.name}: pass model.named_parameters()")
        routes[route.name] = route
    groups = host.param_group_numbers()
    members: dict[tuple[int, ...], tuple[int, ...]] = {}
    parameters: dict[str, LiveParameter] = {}
    for runner in optimizer._runners:
        step_set = runner.step_set
        rows = {places.matrix.name: places for places in runner.row_places}
        ranks = _ranks(step_set.group)
        ranks = members.setdefault(ranks, ranks)
        partitions = {partition.index: partition for partition in step_set.partitions}
        layouts: tuple[MatrixLayout | ParameterLayout, ...] = (*step_set.matrices, *step_set.others)
        for layout in layouts:
            route, partition = routes[layout.name], partitions[layout.partition]
            state = optimizer.state.get(partition.tensor, {})
            found = LiveParameter(
                route,
                route.shape,
                _part(host, route),
                layout.spread,
                rows.get(layout.name),
                ranks,
                groups[layout.partition],
                int(state.get("step", 0)),
                _keys(route, state, layout.name in rows),
                partition,
                step_set.rank,
            )
            if parameters.setdefault(found.name, found) is not found:
                raise CheckpointError(
                    f"{parameters[found.name].route.name} and {route.name} are both {found.name}"
                )
    if not parameters:
        raise CheckpointError("the engine's optimizer holds no parameters")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = optimizer._runners[0].context.device
    return LiveState(optimizer, host, tuple(parameters.values()), rank, size, device)


def _part(host: Host, route: Route) -> TensorSlice:
    part = host.parts.get(route.name)
    if isinstance(part, str):
        raise CheckpointError(
            f"parameter {route.name}: {part}. engine.save_checkpoint and load_checkpoint resume it at the same ranks"
        )
    return part or whole_slice(route.name, route.shape)


def _keys(route: Route, state: dict[str, Any], with_rows: bool) -> tuple[str, ...]:
    if not state.get("step", 0):
        return ("fp32",)
    rows = (ROW_STATE_KEY,) if with_rows and ROW_STATE_KEY in state else ()
    return ("fp32", *STATE_KEYS[route.algorithm], *rows)


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return (0,) if group is None else tuple(dist.get_process_group_ranks(group))
