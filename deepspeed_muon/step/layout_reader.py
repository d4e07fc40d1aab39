"""Makes step sets out of partitions and routes, for the readers of DeepSpeed's wrappers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.errors import BindingError
from deepspeed_muon.plan.layout import MatrixLayout, ParameterLayout
from deepspeed_muon.plan.spread import Spread, replicated_spread
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.shapes import true_shape
from deepspeed_muon.step.step_set import BoundPartition, NativeAdam, Refresh, StepSet


class LayoutReader:
    """Collects the layouts of one step set while a reader walks the partitions of a wrapper."""

    def __init__(
        self,
        routes: Mapping[int, Route],
        group: dist.ProcessGroup | None,
        *,
        others: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None),
        native_adam: NativeAdam | None = None,
    ) -> None:
        """Start an empty set; ``routes`` maps ``id(model parameter)`` to its route, for the rest see :class:`StepSet`.

        ``others`` are ``wider_group`` and ``stack_group``. A wider group that is no larger than the group does not
        count.
        """
        self._native_adam = native_adam
        wider_group, self._stack_group = others
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

    def add_parameter(self, param: Tensor, spread: Spread) -> None:
        """Add one parameter of the partition begun last."""
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
                    spread,
                    row_blocks=route.row_blocks,
                    col_blocks=route.col_blocks,
                    transposed=route.transposed,
                    shards=route.shards,
                )
            )
        else:
            self._others.append(ParameterLayout(route.name, partition.index, spread))

    def step_set(self, refresh: Refresh | None = None) -> StepSet:
        """Return what was collected; for ``refresh`` see :class:`StepSet`."""
        return StepSet(
            tuple(self._partitions),
            tuple(self._matrices),
            tuple(self._others),
            self._group,
            self.rank,
            self.world_size,
            self._model_dtype or torch.float32,
            self._wider_group,
            native_adam=self._native_adam,
            refresh=refresh,
            stack_group=self._stack_group,
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
    others: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None),
) -> StepSet:
    """Return a step set of parameters that every rank holds whole; each one is a partition.

    Args:
        pairs: Model parameter and the fp32 tensor that the optimizer updates (often the same), in order.
        routes: ``id(model parameter)`` to its route.
        group: Ranks that hold the same parameters; ``None`` in a single process.
        numbers: Number of each partition; ``None`` counts from 0.
        others: As for :class:`LayoutReader`.
    """
    reader = LayoutReader(routes, group, others=others)
    for index, (model, master) in zip(numbers or range(len(pairs)), pairs, strict=True):
        reader.add_partition(index, master, [model])
        if model.numel():
            reader.add_parameter(model, replicated_spread(0, model.numel(), reader.world_size))
    return reader.step_set()
