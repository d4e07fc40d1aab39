"""Updates momentum and makes directions for one chunk at a time, so that no step copies a whole partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.spread import Fragment
from deepspeed_muon.transport.buffers import aligned
from deepspeed_muon.transport.context import StepContext


@dataclass(frozen=True, slots=True)
class MomentumSource:
    """The input of the directions of one partition.

    Attributes:
        momentum_buffer: The partition's momentum, flat.
        grad: Its gradient, flat; ``None`` counts as zero.
        momentum: Decay of the moving average.
        nesterov: Whether the gradient is blended in once more.
        pack: ``(buf, grad, out, momentum, nesterov)``: updates ``buf`` and writes the direction.
    """

    momentum_buffer: Tensor
    grad: Tensor | None
    momentum: float
    nesterov: bool
    pack: Callable[[Tensor, Tensor, Tensor, float, bool], None]


class LocalDirections:
    """The directions of this rank's fragments in the chunks that are under way.

    ``held`` has this rank's fragment of each of ``matrices``, ``sources`` are by partition index.
    """

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        held: Sequence[Fragment | None],
        sources: Mapping[int, MomentumSource],
        context: StepContext,
    ) -> None:
        self._matrices = matrices
        self._held = held
        self._sources = sources
        self._wire_dtype = context.wire_dtype
        self._made: dict[int, Tensor] = {}

    def prepare(self, indices: Sequence[int]) -> None:
        """Update the momentum of these matrices' local fragments and make their directions.

        The directions of one device lie in memory in the order of ``indices``, each at a multiple of 32 elements. So
        small matrices that lie whole here and run in one batch need no copy if their sizes are such multiples. Each
        matrix may be prepared once in a step.
        """
        local = [(index, fragment) for index in indices if (fragment := self._held[index]) is not None]
        sizes: dict[torch.device, int] = {}
        for index, fragment in local:
            device = self._source_of(index).momentum_buffer.device
            sizes[device] = sizes.get(device, 0) + aligned(fragment.numel)
        free = {
            device: torch.empty(numel, dtype=self._wire_dtype, device=device)
            for device, numel in sizes.items()
        }
        for index, fragment in local:
            device = self._source_of(index).momentum_buffer.device
            place, free[device] = free[device].tensor_split([aligned(fragment.numel)])
            self._made[index] = place.narrow(0, 0, fragment.numel)
            self._make(index, fragment, self._made[index])

    def write(self, index: int, out: Tensor) -> None:
        """Update the momentum of a matrix's local fragment and write its direction to ``out``, flat, on any device.

        Instead of :meth:`prepare`, for a fragment that this rank does not need itself.
        """
        fragment = self._held[index]
        assert fragment is not None
        device = self._source_of(index).momentum_buffer.device
        if out.device == device:
            self._make(index, fragment, out)
        else:
            made = torch.empty(fragment.numel, dtype=out.dtype, device=device)
            self._make(index, fragment, made)
            out.copy_(made, non_blocking=True)

    def _make(self, index: int, fragment: Fragment, out: Tensor) -> None:
        source = self._source_of(index)
        buf = source.momentum_buffer.narrow(0, fragment.partition_offset, fragment.numel)
        grad = source.grad
        grad = (
            torch.zeros_like(buf)
            if grad is None
            else grad.narrow(0, fragment.partition_offset, fragment.numel)
        )
        source.pack(buf, grad, out, source.momentum, source.nesterov)

    def _source_of(self, index: int) -> MomentumSource:
        return self._sources[self._matrices[index].partition]

    def get(self, index: int) -> tuple[Fragment, Tensor] | None:
        """Return this rank's fragment of a prepared matrix and its direction, flat, on the partition's device."""
        fragment = self._held[index]
        return None if fragment is None else (fragment, self._made[index])

    def release(self, indices: Sequence[int]) -> None:
        """Forget the directions of these matrices."""
        for index in indices:
            self._made.pop(index, None)
