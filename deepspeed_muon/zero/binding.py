"""What an adapter reports: the partitions that one call of ``step()`` updates together, and their fragments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.errors import BindingError, UnsupportedConfigError
from deepspeed_muon.plan.layout import Fragment, MatrixLayout, ParameterLayout, replicated_fragments
from deepspeed_muon.routing import Route, true_shape

__all__ = ["BoundPartition", "LayoutReader", "StepSet", "read_step_sets", "read_whole"]


@dataclass(frozen=True, slots=True)
class BoundPartition:
    """A tensor that ZeRO hands to the inner optimizer, and what lies in it.

    Attributes:
        index: Number of the partition, equal on all ranks; the layouts refer to it.
        tensor: This rank's tensor: a flat fp32 partition, or the whole fp32 parameter at stage 0.
        muon: Whether its parameters are Muon's. A partition is never mixed.
    """

    index: int
    tensor: Tensor
    muon: bool


@dataclass(frozen=True, slots=True)
class StepSet:
    """Everything that one call of the inner ``step()`` updates, in an order that all ranks share.

    Attributes:
        partitions: The tensors, in the order of the param groups.
        matrices: Muon's matrices in those partitions.
        others: All other parameters in those partitions.
        group: The data-parallel process group that partitions (or replicates) them; ``None`` in a single process.
        rank: This rank inside the group.
        world_size: Its size.
        model_dtype: Dtype of the weights that the forward pass uses.
    """

    partitions: tuple[BoundPartition, ...]
    matrices: tuple[MatrixLayout, ...]
    others: tuple[ParameterLayout, ...]
    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    model_dtype: torch.dtype


class LayoutReader:
    """Collects the layouts of one step set while an adapter walks a wrapper's groups."""

    def __init__(self, routes: Mapping[int, Route], group: dist.ProcessGroup | None) -> None:
        """Start an empty set.

        Args:
            routes: ``id(model parameter)`` to its route.
            group: The process group of the set.
        """
        self._routes = routes
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self._partitions: list[BoundPartition] = []
        self._matrices: list[MatrixLayout] = []
        self._others: list[ParameterLayout] = []
        self._model_dtype: torch.dtype | None = None

    def add_partition(self, index: int, tensor: Tensor, params: Sequence[Tensor]) -> None:
        """Begin the partition that holds ``params``.

        Raises:
            BindingError: If it mixes Muon's parameters with others.
        """
        algorithms = {self._route(param).algorithm for param in params}
        if len(algorithms) > 1:
            names = ", ".join(
                f"{self._route(param).name}: {self._route(param).algorithm}" for param in params
            )
            raise BindingError(
                f"flat partition {index} mixes algorithms ({names}); its param group was changed after start"
            )
        self._partitions.append(BoundPartition(index, tensor, algorithms == {"muon"}))
        if params and self._model_dtype is None:
            self._model_dtype = params[0].dtype

    def add_parameter(
        self, param: Tensor, fragments: tuple[Fragment, ...], *, replicated: bool = False
    ) -> None:
        """Add one parameter of the partition begun last."""
        if not fragments:
            return
        partition = self._partitions[-1]
        route = self._route(param)
        if partition.muon:
            rows, cols = route.matrix_shape
            self._matrices.append(
                MatrixLayout(route.name, rows, cols, partition.index, fragments, replicated, route.heads)
            )
        else:
            numel = torch.Size(route.shape).numel()
            self._others.append(ParameterLayout(route.name, numel, partition.index, fragments))

    def step_set(self) -> StepSet:
        """Return what was collected."""
        return StepSet(
            tuple(self._partitions),
            tuple(self._matrices),
            tuple(self._others),
            self._group,
            self.rank,
            self.world_size,
            self._model_dtype or torch.float32,
        )

    def _route(self, param: Tensor) -> Route:
        try:
            return self._routes[id(param)]
        except KeyError:
            raise BindingError(
                f"a parameter of shape {true_shape(param)} is in DeepSpeed's groups but was never routed: add every "
                f"parameter to the optimizer before deepspeed.initialize"
            ) from None


def read_whole(
    pairs: Sequence[tuple[Tensor, Tensor]], routes: Mapping[int, Route], group: dist.ProcessGroup | None
) -> StepSet:
    """Describe parameters that every rank holds whole; each one is a partition of its own.

    Args:
        pairs: Model parameter and the fp32 tensor that the optimizer updates (often the same), in order.
        routes: ``id(model parameter)`` to its route.
        group: Ranks that hold the same parameters; ``None`` in a single process.
    """
    reader = LayoutReader(routes, group)
    for index, (model, master) in enumerate(pairs):
        reader.add_partition(index, master, [model])
        if model.numel():
            reader.add_parameter(
                model, replicated_fragments(0, model.numel(), reader.world_size), replicated=True
            )
    return reader.step_set()


def read_step_sets(
    engine: Any, optimizer: torch.optim.Optimizer, routes: Mapping[int, Route]
) -> list[StepSet]:
    """Read the layout of whichever wrapper DeepSpeed put around ``optimizer``.

    Args:
        engine: The ``DeepSpeedEngine`` whose ``optimizer`` attribute is the wrapper.
        optimizer: Our optimizer, inside the wrapper.
        routes: ``id(model parameter)`` to its route.

    Returns:
        The step sets in an order that all ranks share.

    Raises:
        UnsupportedConfigError: If the wrapper is one that no adapter knows.
        BindingError: If the layout does not fit the routes.
    """
    from deepspeed_muon.zero import stage3, stage12, unpartitioned

    wrapper = engine.optimizer
    for adapter in (stage3, stage12, unpartitioned):
        if adapter.knows(wrapper, optimizer):
            return adapter.read(engine, wrapper, routes)
    raise UnsupportedConfigError(
        f"DeepSpeed wrapped the optimizer in {type(wrapper).__name__}, whose layout is not known here; "
        f"known: ZeRO stages 0 to 3, BF16_Optimizer and FP16_UnfusedOptimizer"
    )
