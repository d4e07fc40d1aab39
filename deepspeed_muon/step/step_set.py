"""Describes what one call of the inner ``step()`` updates: partitions, the parameters in them, and process groups."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.errors import BindingError
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.monitoring.recorder import StepRecorder
from deepspeed_muon.ops.dispatch import FlatPasses, Orthogonalizer, flat_passes
from deepspeed_muon.plan.layout import MatrixLayout, ParameterLayout, PartitionIndex, SetIndex
from deepspeed_muon.plan.placement import Fragment, Placement, replicated_placement
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.shapes import true_shape
from deepspeed_muon.transport.all_to_all import ExchangeBuffers, SentCounts
from deepspeed_muon.variants import VARIANTS
from deepspeed_muon.variants.variant import Variant

State = MutableMapping[Tensor, dict[str, Any]]
"""``optimizer.state``: the entries of each partition's tensor, by key."""

NativeAdam = Callable[[], Callable[..., None]]
"""Makes a native AdamW; see :attr:`StepSet.native_adam`."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A tensor of the param groups in one call of ``step()``: ZeRO's, or a parameter itself.

    Attributes:
        index: Index of the partition, equal on all ranks; the layouts refer to it.
        tensor: This rank's flat partition of master weights (fp32, or half precision if DeepSpeed is configured so); at
            stage 0 in fp32, and without DeepSpeed, a parameter.
        muon: Whether its parameters are Muon's. A partition never mixes them with AdamW's.
    """

    index: PartitionIndex
    tensor: Tensor
    muon: bool

    def check_numel(self, tensor: Tensor, numel: int, label: str) -> None:
        """Raise ``BindingError`` if a tensor of its state does not have ``numel`` elements."""
        if tensor.numel() != numel:
            raise BindingError(
                f"the optimizer state holds {tensor.numel()} {label} of partition {self.index}, expected {numel}: it "
                f"was saved with another layout. Restore it from a consolidated checkpoint"
            )


@dataclass(frozen=True, slots=True)
class StepSet:
    """What one call of the inner ``step()`` updates over one process group, in an order that all ranks share.

    Attributes:
        partitions: The partitions, in the order of the param groups, with :attr:`matrices` of Muon and
            :attr:`adamw_parameters`.
        group: The data-parallel process group that partitions (or replicates) them; ``None`` in a single process.
        model_dtype: Dtype of the weights that the forward pass uses.
        wider_group: A process group with more ranks, which have different experts and must skip the same steps, or
            ``None``.
        stage_group: The process group of all stages and tensor-parallel ranks of this rank's pipeline, which must skip
            the same steps too; ``None`` if there is one stage, or DeepSpeed sees to it. The same for all step sets of
            an optimizer.
        stack_group: The expert-parallel process group whose ranks have the remaining experts of the same stacks: a
            stack has a gradient if any of its experts has one. ``None`` if no stack is divided between ranks.
        tensor_group: The tensor-parallel process group whose ranks have the remaining shards of the matrices; ``None``
            without tensor parallelism.
        native_adam: Makes DeepSpeed's native AdamW if ZeRO-Offload stores the partitions on the CPU, else ``None``.
            It returns a function like :func:`deepspeed_muon.math.updates.adam_step_` or raises ``InstallationError``.
    """

    partitions: tuple[Partition, ...]
    matrices: tuple[MatrixLayout, ...]
    adamw_parameters: tuple[ParameterLayout, ...]
    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    model_dtype: torch.dtype
    wider_group: dist.ProcessGroup | None = None
    stage_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    native_adam: NativeAdam | None = None
    stack_group: dist.ProcessGroup | None = None

    @contextlib.contextmanager
    def flat_partitions(self) -> Iterator[dict[PartitionIndex, Tensor]]:
        """Yield this rank's partitions as flat tensors in row-major order, by index; writes to them are kept.

        Flat partitions are yielded as views. A parameter that is not contiguous (``channels_last``, a transpose) is
        copied, and the copy is written back when the context ends.
        """
        flat = {p.index: p.tensor.detach().contiguous().view(-1) for p in self.partitions}
        yield flat
        for partition in self.partitions:
            if not partition.tensor.is_contiguous():
                partition.tensor.detach().copy_(flat[partition.index].view(partition.tensor.shape))

    def flat_gradients(self, loss_scale: Tensor | None) -> dict[PartitionIndex, Tensor]:
        """Return the gradients in ``grad`` of the tensors, flat and contiguous, by partition index.

        They are divided in fp32 by ``loss_scale``, of a torch ``GradScaler``. Raises BindingError if one is sparse.
        """
        grads = {}
        for partition in self.partitions:
            if (grad := partition.tensor.grad) is None:
                continue
            if grad.is_sparse:
                raise BindingError("sparse gradients are not supported; use sparse=False in the embedding")
            # The native operators read a contiguous tensor; the gradient of a strided view need not be one.
            grads[partition.index] = grad.reshape(-1).contiguous()
        if loss_scale is not None:
            inverse = 1.0 / loss_scale.double()
            for index, grad in grads.items():  # in fp16 small elements would lose bits, or all of them
                unscaled = grad.to(torch.promote_types(grad.dtype, torch.float32))
                grads[index] = unscaled * inverse.to(unscaled.device, unscaled.dtype)
        return grads

    def local_fragments(self) -> list[list[tuple[SetIndex, Fragment]]]:
        """Return this rank's fragments of each partition, with the index of their parameter in :attr:`layouts`."""
        # Layouts name partitions by index, which need not be consecutive within a step set.
        local: dict[PartitionIndex, list[tuple[SetIndex, Fragment]]] = {p.index: [] for p in self.partitions}
        for number, layout in enumerate(self.layouts):
            fragment = layout.placement.fragment_on(self.rank)
            if fragment is not None:
                local[layout.partition].append((SetIndex(number), fragment))
        return [local[partition.index] for partition in self.partitions]

    @property
    def layouts(self) -> tuple[MatrixLayout | ParameterLayout, ...]:
        """All parameters, in the order of the gradient flags that the ranks exchange."""
        return (*self.matrices, *self.adamw_parameters)

    def gradients_of_muon(
        self,
        grads: Mapping[PartitionIndex, Tensor],
        flat: Mapping[PartitionIndex, Tensor],
        active: Sequence[bool],
    ) -> list[Tensor]:
        """Return the flat gradient of each partition of Muon, zeros where this rank has none but another rank has.

        ``active`` has a flag for each matrix. Where none of a partition is active, its weights stand in: the passes
        take a tensor for every partition, and do not read this one.
        """
        gradient_of = {**flat, **grads}
        if not flat.keys() <= grads.keys():
            used = {
                matrix.partition for matrix, is_active in zip(self.matrices, active, strict=True) if is_active
            }
            gradient_of |= {index: torch.zeros_like(flat[index]) for index in used - grads.keys()}
        return [gradient_of[partition.index] for partition in self.partitions if partition.muon]


@dataclass(frozen=True)
class StepContext:
    """What the step of one step set needs beside its tensors; made when the optimizer is bound.

    Attributes:
        number: The number of the step set, for errors.
        device: Where the exchange and the iteration run; the partitions may be elsewhere (offload).
        orthogonalizer: Runs the Newton-Schulz iteration.
        counts: Counters of the optimizer; mutated.
        recorder: Samples and counters of the check.
        buffers: Memory of the exchange, shared by all step sets.
        policy: Dtype of the state.
        overlap: Whether chunks are exchanged while others are orthogonalised.
    """

    number: int
    step_set: StepSet
    config: MuonConfig
    device: torch.device
    orthogonalizer: Orthogonalizer
    counts: SentCounts
    recorder: StepRecorder
    buffers: ExchangeBuffers
    policy: StatePolicy
    overlap: bool

    @functools.cached_property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of all directions and updates."""
        return self.config.resolved_wire_dtype(self.step_set.model_dtype)

    @functools.cached_property
    def ns_settings(self) -> NsSettings:
        """The Newton-Schulz iteration."""
        return self.config.ns_settings(self.device)

    @functools.cached_property
    def passes(self) -> FlatPasses:
        """The elementwise passes over Muon's partitions and their momentum."""
        partitions, policy = self.step_set.partitions, self.policy
        dtypes = {partition.tensor.dtype for partition in partitions}
        dtypes |= {policy.dtype("momentum_buffer", dtype) for dtype in dtypes}
        device = partitions[0].tensor.device if partitions else torch.device("cpu")
        # The native passes have no float64, which an optimizer without DeepSpeed may have.
        return flat_passes("torch" if torch.float64 in dtypes else self.config.ns_backend, device)

    @property
    def variant(self) -> Variant:
        """The variant of Muon."""
        return VARIANTS[self.config.variant]

    @property
    def batch_below(self) -> int:
        """Blocks with a shorter short side than this are orthogonalised in batches.

        Above it a CPU multiplies matrices faster one at a time. A GPU takes all that may be stacked: of 2560 x 2560 one
        is 210 tiles of 128 x 128 on the 132 multiprocessors of an H100, two waves of which the second is 60 % full, and
        five are eight full ones.
        """
        return 256 if self.device.type == "cpu" else sys.maxsize


def read_step_set(
    partitions: Sequence[tuple[PartitionIndex, Tensor, Sequence[Tensor], Iterable[tuple[Tensor, Placement]]]],
    routes: Mapping[int, Route],
    group: dist.ProcessGroup | None = None,
) -> StepSet:
    """Build the step set of partitions and their parameters; nothing is sent.

    ``partitions`` has for each partition its index, this rank's tensor, the model's parameters in it, and those with
    elements again with their placements, which refer to the ranks of ``group``; ``routes`` are by ``id(parameter)``.

    Raises:
        BindingError: If a partition mixes Muon's parameters with AdamW's, or a parameter has no route.
    """
    bound: list[Partition] = []
    matrices: list[MatrixLayout] = []
    adamw_parameters: list[ParameterLayout] = []
    for index, tensor, params, placements in partitions:
        partition_routes = [_route_of(param, routes) for param in params]
        # One pass updates a partition, so that it must not mix algorithms.
        algorithms = {route.algorithm for route in partition_routes}
        if len(algorithms) > 1:
            names = ", ".join(f"{route.name}: {route.algorithm}" for route in partition_routes)
            raise BindingError(
                f"flat partition {index} mixes algorithms ({names}); its param group was changed after start"
            )
        is_muon = algorithms == {"muon"}
        bound.append(Partition(index, tensor, is_muon))
        for param, placement in placements:
            route = _route_of(param, routes)
            if is_muon:
                matrices.append(route.layout(index, placement))
            else:
                adamw_parameters.append(ParameterLayout(route.name, index, placement))
    return StepSet(
        tuple(bound),
        tuple(matrices),
        tuple(adamw_parameters),
        group,
        0 if group is None else dist.get_rank(group),
        1 if group is None else dist.get_world_size(group),
        # the model's dtype, not that of the fp32 masters in the partitions
        next((params[0].dtype for _, _, params, _ in partitions if params), torch.float32),
    )


def step_set_of_parameters(
    params: Sequence[Tensor], trained: Mapping[PartitionIndex, Tensor], routes: Mapping[int, Route]
) -> tuple[StepSet, torch.device]:
    """Return the step set of an optimizer without DeepSpeed, and the device of its parameters.

    Each parameter that is updated (``trained``) is a partition. Raises BindingError if parameters have no data, or are
    on several devices.
    """
    # The storage of tensors on "meta" and of those of FakeTensorMode is on this device.
    if any(param.untyped_storage().device.type == "meta" for param in params):
        raise BindingError(
            "the parameters have no data (device meta, or FakeTensorMode), so there is nothing to orthogonalise: "
            "call step() with real tensors"
        )
    devices = {param.device for param in params}
    if len(devices) > 1:
        raise BindingError(
            f"without DeepSpeed all parameters must be on one device, found {sorted(map(str, devices))}"
        )
    partitions = []
    for index, param in trained.items():
        # a single rank that has all elements
        placements = [(param, replicated_placement(param.numel(), 1))] if param.numel() else []
        partitions.append((index, param, [param], placements))
    return read_step_set(partitions, routes), devices.pop()


def _route_of(param: Tensor, routes: Mapping[int, Route]) -> Route:
    try:
        return routes[id(param)]
    except KeyError:
        raise BindingError(
            f"a parameter of shape {true_shape(param)} is in DeepSpeed's groups but was never routed: add every "
            f"parameter to the optimizer before deepspeed.initialize"
        ) from None
