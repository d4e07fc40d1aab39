"""What an adapter reports: the partitions that one call of ``step()`` updates together, and their fragments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.errors import BindingError, UnsupportedConfigError
from deepspeed_muon.plan.layout import Fragment, MatrixLayout, ParameterLayout, replicated_fragments
from deepspeed_muon.routing import Route, true_shape

__all__ = ["BoundPartition", "LayoutReader", "Refresh", "StepSet", "read_step_sets", "read_whole"]

Refresh = Callable[[int, int], None]
"""Copies elements of a set's only partition, from an offset on, into the weights of the forward pass."""


@dataclass(frozen=True, slots=True)
class BoundPartition:
    """A tensor that ZeRO hands to the inner optimizer, and what lies in it.

    Attributes:
        index: Number of the partition, equal on all ranks; the layouts refer to it.
        tensor: This rank's tensor: a flat master partition (fp32, or half precision where DeepSpeed is told to keep
            masters so), or the whole fp32 parameter at stage 0.
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
        wider_group: Ranks beyond the group that must skip the same steps (those with other experts), or ``None``.
        tensor_group: The tensor-parallel process group whose ranks hold the other shards of the same matrices; ``None``
            without tensor parallelism.
        offloaded: Whether ZeRO-Offload keeps the partitions off the device.
        refresh: Brings a run of the partition into the weights of the forward pass once more, after ZeRO has copied all
            of it. Where there is one, the last updates may arrive during the call that updates the next set.
    """

    partitions: tuple[BoundPartition, ...]
    matrices: tuple[MatrixLayout, ...]
    others: tuple[ParameterLayout, ...]
    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    model_dtype: torch.dtype
    wider_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    offloaded: bool = False
    refresh: Refresh | None = None

    @property
    def layouts(self) -> tuple[MatrixLayout | ParameterLayout, ...]:
        """All parameters, in the order of the flags that ranks exchange by position."""
        return (*self.matrices, *self.others)


class LayoutReader:
    """Collects the layouts of one step set while an adapter walks a wrapper's groups."""

    def __init__(
        self,
        routes: Mapping[int, Route],
        group: dist.ProcessGroup | None,
        *,
        wider_group: dist.ProcessGroup | None = None,
        offloaded: bool = False,
    ) -> None:
        """Start an empty set.

        Args:
            routes: ``id(model parameter)`` to its route.
            group: The process group of the set.
            wider_group: Ranks that must skip the same steps, where they are more than the group.
            offloaded: See :class:`StepSet`.
        """
        self._offloaded = offloaded
        self._routes = routes
        self._group = group
        self._wider_group = wider_group
        if group is not None and wider_group is not None:
            larger = dist.get_world_size(wider_group) > dist.get_world_size(group)
            self._wider_group = wider_group if larger else None
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
                MatrixLayout(
                    route.name,
                    rows,
                    cols,
                    partition.index,
                    fragments,
                    replicated=replicated,
                    row_blocks=route.row_blocks,
                    col_blocks=route.col_blocks,
                    transposed=route.transposed,
                )
            )
        else:
            numel = torch.Size(route.shape).numel()
            self._others.append(ParameterLayout(route.name, numel, partition.index, fragments))

    def step_set(self, refresh: Refresh | None = None) -> StepSet:
        """Return what was collected.

        Args:
            refresh: See :class:`StepSet`.
        """
        return StepSet(
            tuple(self._partitions),
            tuple(self._matrices),
            tuple(self._others),
            self._group,
            self.rank,
            self.world_size,
            self._model_dtype or torch.float32,
            self._wider_group,
            offloaded=self._offloaded,
            refresh=refresh,
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
    pairs: Sequence[tuple[Tensor, Tensor]],
    routes: Mapping[int, Route],
    group: dist.ProcessGroup | None,
    *,
    numbers: Sequence[int] | None = None,
    wider_group: dist.ProcessGroup | None = None,
) -> StepSet:
    """Describe parameters that every rank holds whole; each one is a partition of its own.

    Args:
        pairs: Model parameter and the fp32 tensor that the optimizer updates (often the same), in order.
        routes: ``id(model parameter)`` to its route.
        group: Ranks that hold the same parameters; ``None`` in a single process.
        numbers: Number of each partition; ``None`` counts from 0.
        wider_group: Ranks that must skip the same steps, where they are more than the group.
    """
    reader = LayoutReader(routes, group, wider_group=wider_group)
    for index, (model, master) in zip(numbers or range(len(pairs)), pairs, strict=True):
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
        UnsupportedConfigError: If the wrapper is one that no adapter knows, or a matrix that tensor parallelism cuts
            is of a kind that cannot be orthogonalised.
        BindingError: If the layout does not fit the routes.
        PlanMismatchError: If the ranks of a tensor-parallel group hold different matrices.
    """
    from deepspeed_muon.zero.tensor_parallel import tensor_parallel_group, with_tensor_parallel

    group = tensor_parallel_group(engine)
    if group is None:
        return _read(engine, optimizer, routes)
    return with_tensor_parallel(group, lambda: _read(engine, optimizer, routes), engine.module, routes)


def _read(engine: Any, optimizer: torch.optim.Optimizer, routes: Mapping[int, Route]) -> list[StepSet]:
    from deepspeed_muon.zero import stage3, stage12, unpartitioned

    wrapper = engine.optimizer
    for adapter in (stage3, stage12, unpartitioned):
        if adapter.knows(wrapper, optimizer):
            return adapter.read(engine, wrapper, routes)
    raise UnsupportedConfigError(
        f"DeepSpeed wrapped the optimizer in {type(wrapper).__name__}, whose layout is not known here; "
        f"known: ZeRO stages 0 to 3, BF16_Optimizer and FP16_UnfusedOptimizer"
    )
