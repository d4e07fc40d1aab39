"""What one call of ``step()`` updates, and how the readers of DeepSpeed's wrappers describe it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.errors import BindingError
from deepspeed_muon.plan.layout import MatrixLayout, ParameterLayout
from deepspeed_muon.plan.placement import Fragment, Placement, replicated_placement
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.shapes import true_shape

NativeAdam = Callable[..., Callable[..., None]]
"""Makes a native AdamW; see :attr:`StepSet.native_adam`."""


@dataclass(frozen=True, slots=True)
class BoundPartition:
    """A tensor that ZeRO hands to the inner optimizer, and what lies in it.

    Attributes:
        index: Number of the partition, equal on all ranks; the layouts refer to it.
        tensor: This rank's tensor: a flat master partition (fp32, or half precision if DeepSpeed is configured so), or
            the whole fp32 parameter at stage 0.
        muon: Whether its parameters are Muon's. A partition never mixes them with others.
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
        wider_group: More ranks than the group that must skip the same steps (those with other experts), or ``None``.
        stack_group: The expert-parallel process group, whose ranks hold the other experts of the same stacks: a stack
            has a gradient if any of its experts has. ``None`` where every rank holds whole stacks, or none.
        tensor_group: The tensor-parallel process group, whose ranks hold the other shards of the matrices; ``None``
            without tensor parallelism.
        native_adam: Makes DeepSpeed's native AdamW if ZeRO-Offload keeps the partitions off the device, else ``None``.
            Called with ``decoupled``, ``master`` and ``moments``, it returns a function like
            :func:`deepspeed_muon.math.updates.adam_step_` or raises ``OpsUnavailableError``.
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
    native_adam: NativeAdam | None = None
    stack_group: dist.ProcessGroup | None = None

    @contextlib.contextmanager
    def flat_partitions(self) -> Iterator[dict[int, Tensor]]:
        """Yield each partition's tensor on this rank as a flat one in row-major order, by index, to be written to.

        For ZeRO's partitions it is a view. A whole parameter that is not contiguous (``channels_last``, a transpose) is
        copied, and the copy is written back at the end.
        """
        flat = {p.index: p.tensor.detach().contiguous().view(-1) for p in self.partitions}
        yield flat
        for partition in self.partitions:
            if not partition.tensor.is_contiguous():
                partition.tensor.detach().copy_(flat[partition.index].view(partition.tensor.shape))

    def local_fragments(self) -> list[list[tuple[int, Fragment]]]:
        """Return this rank's fragments in each partition, each with the index of its parameter in ``layouts``."""
        position = {partition.index: number for number, partition in enumerate(self.partitions)}
        local: list[list[tuple[int, Fragment]]] = [[] for _ in self.partitions]
        for number, layout in enumerate(self.layouts):
            fragment = layout.placement.on(self.rank)
            if fragment is not None:
                local[position[layout.partition]].append((number, fragment))
        return local

    @property
    def layouts(self) -> tuple[MatrixLayout | ParameterLayout, ...]:
        """All parameters, in the order of the flags that the ranks exchange."""
        return (*self.matrices, *self.others)


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

    def add_parameter(self, param: Tensor, placement: Placement) -> None:
        """Add one parameter of the partition begun last."""
        partition = self._partitions[-1]
        route = self._route(param)
        if partition.muon:
            self._matrices.append(route.layout(partition.index, placement))
        else:
            self._others.append(ParameterLayout(route.name, partition.index, placement))

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
            self._wider_group,
            native_adam=self._native_adam,
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
            reader.add_parameter(model, replicated_placement(0, model.numel(), reader.world_size))
    return reader.step_set()
