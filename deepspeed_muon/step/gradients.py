"""What the ranks tell each other about their gradients before a step changes anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.transport.ranks import phase


@dataclass(frozen=True, slots=True)
class GradientReport:
    """What all ranks of a group know about this step's gradients.

    Attributes:
        active: Whether any rank has a non-zero gradient: flags of all matrices, then of all other parameters.
        nonfinite: Names of the parameters whose gradient holds an infinity or NaN on some rank.
        failed: Names of the matrices that got no update in the previous step, because it was wrong in fp32 too.
    """

    active: tuple[bool, ...]
    nonfinite: tuple[str, ...]
    failed: tuple[str, ...]


class Flat(Protocol):
    """A rank's gradient of one partition, of which runs can be read."""

    def narrow(self, dim: int, start: int, length: int, /) -> Tensor:
        """Return elements from ``start`` on; ``dim`` is 0."""


class GradientInspection:
    """Finds out, together with the group, which parameters have a gradient and whether all are finite."""

    def __init__(self, step_set: StepSet, device: torch.device) -> None:
        self._step_set = step_set
        self._device = device
        self._local = step_set.local_fragments()
        self._rows: list[list[int]] | None = None
        self.groups = [step_set.group] if step_set.world_size > 1 else []
        # A shard without a gradient must take part if other shards of its matrix have one, and so must the experts of a
        # stack that lies on several ranks: what a step does may not depend on where it is cut.
        self.groups += [each for each in (step_set.tensor_group, step_set.stack_group) if each is not None]

    @property
    def is_known(self) -> bool:
        """Whether :meth:`exchange` has told the flags of this step."""
        return self._rows is not None

    def forget(self) -> None:
        """Forget the flags, at the end of a step."""
        self._rows = None

    @staticmethod
    def exchange(
        inspections: Sequence[GradientInspection],
        grads: Mapping[int, Flat],
        failed_last: Sequence[Collection[str]],
    ) -> None:
        """Let the ranks tell each other their flags of several step sets of the same groups, in one message.

        Must be called by all ranks of the groups.

        Args:
            inspections: Of the step sets. They keep the flags until :meth:`forget`.
            grads: Partition index to its gradient; a missing one counts as zero.
            failed_last: For each set, names of the matrices that this rank left out in the previous step.
        """
        first = inspections[0]
        pairs = zip(inspections, failed_last, strict=True)
        own = [each._own_flags(grads, failed) for each, failed in pairs]
        rows = [row for each in own for row in each]
        if first.groups and rows:
            sent = torch.tensor(rows, dtype=torch.uint8, device=first._device)
            for group in first.groups:
                sent = _gather_flags(sent, group=group)
            rows = sent.tolist()
        start = 0
        for each, mine in zip(inspections, own, strict=True):
            each._rows = rows[start : start + len(mine)]
            start += len(mine)

    @property
    def found_nonfinite(self) -> bool:
        """Whether some gradient is not finite on any rank, after :meth:`exchange`."""
        return any(row[1] for row in self._rows or ())

    def report(self, grads: Mapping[int, Flat], failed_last: Collection[str]) -> GradientReport:
        """Return what all ranks know. Must be called by all ranks of the group.

        Args:
            grads: Partition index to its gradient, flat and contiguous; a missing one counts as zero.
            failed_last: Names of the matrices that this rank left out in the previous step.
        """
        if self._rows is None:
            self.exchange([self], grads, [failed_last])
        rows, self._rows = self._rows or [], None
        names = [layout.name for layout in self._step_set.layouts]
        nonfinite = tuple(name for name, row in zip(names, rows, strict=True) if row[1])
        failed = tuple(name for name, row in zip(names, rows, strict=True) if row[2])
        if self._step_set.wider_group is not None:
            bad = torch.tensor([bool(nonfinite), bool(failed)], dtype=torch.uint8, device=self._device)
            others = _gather_flags(bad, group=self._step_set.wider_group).tolist()
            nonfinite = nonfinite or ("a parameter of other ranks",) * others[0]
            failed = failed or ("a matrix of other ranks",) * others[1]
        return GradientReport(tuple(bool(row[0]) for row in rows), nonfinite, failed)

    def _own_flags(self, grads: Mapping[int, Flat], failed_last: Collection[str]) -> list[list[int]]:
        """Return three flags for each parameter: gradient not zero, gradient not finite, left out last."""
        flags = [[0, 0, int(layout.name in failed_last)] for layout in self._step_set.layouts]
        numbers: list[int] = []
        views: list[Tensor] = []
        for partition, local in zip(self._step_set.partitions, self._local, strict=True):
            grad = grads.get(partition.index)
            if grad is not None:
                numbers.extend(number for number, _ in local)
                views.extend(grad.narrow(0, f.partition_offset, f.numel) for _, f in local)
        if views:
            for number, (nonzero, nonfinite) in zip(numbers, _gradient_flags(views).tolist(), strict=True):
                flags[number][0] |= nonzero
                flags[number][1] |= nonfinite
        return flags


def _gather_flags(flags: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """Set ``flags`` (uint8) to their elementwise maximum over the group and return them.

    Must be called by all ranks of ``group``, with flags on a device from which its backend can send.
    """
    with phase("exchange of gradient flags", group):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return flags


def _gradient_flags(fragments: list[Tensor]) -> Tensor:
    """Return one row ``(has a non-zero element, has a non-finite element)`` per fragment, uint8 on their device."""
    if not fragments:
        return torch.zeros((0, 2), dtype=torch.uint8)
    # The largest magnitude is 0 for all zeros, inf or NaN for anything non-finite. A GPU has a multi-tensor kernel for
    # it; on a CPU that takes twenty times as long as minimum and maximum.
    if fragments[0].device.type == "cpu":
        ends = [torch.stack([end(fragment) for fragment in fragments]) for end in (torch.amin, torch.amax)]
        largest = torch.maximum(*(each.abs() for each in ends))
    else:
        largest = torch.stack(torch._foreach_norm(fragments, float("inf")))
    return torch.stack((largest != 0, ~torch.isfinite(largest)), dim=1).to(torch.uint8)
