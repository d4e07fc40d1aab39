"""What one call of ``step()`` updates: some partitions, and the layouts of the parameters in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.plan.layout import MatrixLayout, ParameterLayout
from deepspeed_muon.plan.spread import Fragment

Refresh = Callable[[int, int], None]
"""Copies elements of a set's only partition, from an offset on, into the weights of the forward pass."""


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
        refresh: Copies elements of the partition into the weights of the forward pass again, after ZeRO has copied all
            of them. A set with ``refresh`` may leave its last updates in flight until the next set's call.
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
    refresh: Refresh | None = None
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
            fragment = layout.spread.on(self.rank)
            if fragment is not None:
                local[position[layout.partition]].append((number, fragment))
        return local

    @property
    def layouts(self) -> tuple[MatrixLayout | ParameterLayout, ...]:
        """All parameters, in the order of the flags that the ranks exchange."""
        return (*self.matrices, *self.others)
