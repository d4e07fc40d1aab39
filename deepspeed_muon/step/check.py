"""Checks every orthogonalised matrix before it is applied, and measures the sampled ones.

Whoever orthogonalises hands each :class:`Result` to :meth:`ResultCheck.settle`, which corrects it in place. All checks
of an optimizer share one :class:`~deepspeed_muon.monitoring.recorder.StepRecorder`. An update is

* *wrong* if its norm is outside of its bounds or not finite, or a singular value of a sampled one is far too large;
* *redone* if it is computed again in fp32, as it is wrong or, on an accelerator, was wrong in an earlier step;
* *left out* if it is wrong and not applied: the matrix gets no update in the step, which ``failed`` of health counts;
* *unrecoverable* if it is left out although it was computed in fp32: ``nonfinite_grad: error`` raises an error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.logs import logger
from deepspeed_muon.math.coefficients import SMALLEST_NORM, band_of
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.monitoring.measure import (
    SIGMA_TOLERANCE,
    MeasuredBlocks,
    measure,
    norm_bounds,
    orthogonalize_carefully,
    why_wrong,
)
from deepspeed_muon.monitoring.recorder import StepRecorder
from deepspeed_muon.ops.torch_operators import frobenius_norms
from deepspeed_muon.plan.layout import MatrixLayout, PlanIndex, SetIndex
from deepspeed_muon.step.row_state import OwnedRows

Member = tuple[PlanIndex, int]
"""A matrix and the number of one of its blocks."""

LeftOut = tuple[list[PlanIndex], Tensor]
"""Matrices, and a flag for each, on the device: whether its update was left out."""

_COUNTED = (
    "deepspeed_muon.health counts it. If it happens often, set ns_dtype to fp32 or ns_method to standard"
)
_IN_FP32_FROM_NOW_ON = (
    "it got no update in the step before, and is computed in fp32 from now on; "
    f"{_COUNTED}, and look at its gradient"
)


@dataclass(slots=True)
class Result:
    """The result of one call of the iteration.

    Attributes:
        members: The block of each entry.
        inputs: ``(entries, rows, cols)``: what was orthogonalised, the directions unless the variant changes them.
        blocks: The orthogonalised blocks, of the same shape; in fp32 once an entry was redone.
        block_scales: Factor of the update before the learning rate, for each block of each matrix of the plan.
        row_state: Turns blocks into updates whose Frobenius norms keep the same bounds; ``None`` if they are the
            updates.
        dtype: The dtype of updates that :attr:`row_state` makes.
        updates: The updates to apply.
        new_rows: The new row state of the entries, ``(entries, outputs)``, stored once it is right.
    """

    members: Sequence[Member]
    inputs: Tensor
    blocks: Tensor
    block_scales: Sequence[tuple[float, ...]]
    row_state: OwnedRows | None = None
    dtype: torch.dtype = torch.float32
    updates: Tensor = field(init=False)
    new_rows: Tensor | None = None

    def __post_init__(self) -> None:
        self.updates = self.blocks
        if self.row_state is not None:
            self.updates, self.new_rows = self.row_state.scale_rows(self.members, self.blocks, self.dtype)


class ResultCheck:
    """Checks and samples the results of one exchange plan, on a CPU; :class:`DeferredCheck` does on an accelerator.

    A wrong result is redone at once. If it is still wrong, it is left out, and :attr:`left_out` records it. The ranks
    exchange that with their gradient status, and call :meth:`acknowledge`, in the next step; a single process calls
    :meth:`take_unrecoverable` at the end of this one.

    Attributes:
        left_out: What this rank left out since :meth:`acknowledge` was last called.
        origin: The index of each matrix of the plan in the step set, by which the ranks exchange what they left out.
        counts_immediately: Whether an update that is left out is counted at once, and not by :meth:`acknowledge`.
    """

    counts_immediately = True

    def __init__(
        self,
        recorder: StepRecorder,
        matrices: Sequence[MatrixLayout],
        *,
        ns: NsSettings,
        origin: Sequence[SetIndex],
    ) -> None:
        """Reserve numbers for the plan's matrices."""
        self.recorder = recorder
        self.left_out: list[LeftOut] = []
        self._matrices = matrices
        self.origin = origin
        self._first = recorder.reserve(len(matrices))
        self._ns = ns
        self._band = band_of(ns.coefficients)
        self._warned: set[PlanIndex] = set()

    def watches(self, index: PlanIndex) -> bool:
        """Return whether a matrix of the plan is measured in the current step."""
        return self.recorder.watches(self._first + index)

    def settle(self, result: Result) -> None:
        """Check a result, replace in place what is wrong, and store its row state."""
        wrong = self._settle_norms(result) if self.recorder.check else None
        if self.recorder.sampling:
            self._sample(result)
        if result.row_state is not None and result.new_rows is not None:
            result.row_state.write(result.members, result.new_rows, wrong)

    def acknowledge(self, left_out: Collection[SetIndex]) -> list[str]:
        """Drop :attr:`left_out`, and return :meth:`unrecoverable` of what some rank left out in the previous step.

        Must be called by all ranks that have shards of a matrix, with equal indices.
        """
        self.left_out = []
        return self.unrecoverable(left_out)

    def unrecoverable(self, left_out: Collection[SetIndex]) -> list[str]:
        """Return the names of the matrices whose update is unrecoverable, of those left out: here all of them."""
        pairs = zip(self.origin, self._matrices, strict=True) if left_out else ()
        name_of = {set_index: matrix.name for set_index, matrix in pairs}
        return [name_of[set_index] for set_index in sorted(left_out)]

    def unrecoverable_mask(self, count: int, device: torch.device) -> Tensor:
        """Return ``(count,)`` uint8 on the device: whether a left-out update of each parameter is unrecoverable.

        The host waits for the device only if some matrices are computed in fp32.
        """
        return torch.ones(count, dtype=torch.uint8, device=device)

    def take_unrecoverable(self) -> list[str]:
        """Return :meth:`unrecoverable` of what this rank left out, and drop it."""
        left_out = {self.origin[index] for indices, _ in self.left_out for index in indices}
        return self.acknowledge(left_out)

    def _settle_norms(self, result: Result) -> Tensor | None:
        """Redo the entries whose norm is wrong, and return ``None``: their row state is right again."""
        bounds = lowest, highest = self._bounds_of(result)
        norms = frobenius_norms(result.updates).tolist()  # [blocks]
        # The comparison is written so that NaN counts as wrong.
        for entry in [n for n, norm in enumerate(norms) if not lowest <= norm <= highest]:
            # The result for zeros (a head without a gradient) is zero, as may be that for smaller inputs than the
            # iteration normalises.
            small = norms[entry] <= highest and result.inputs[entry].double().norm() < SMALLEST_NORM
            if not small and (why := why_wrong(norms[entry], bounds)) is not None:
                self._redo(result, entry, why)
        return None

    def _bounds_of(self, result: Result) -> tuple[float, float]:
        _, rows, cols = result.blocks.shape
        return norm_bounds(rows, cols, self._band)

    def _redo(self, result: Result, entry: int, why: str) -> None:
        """Redo an entry that is wrong, and leave it out if it still is."""
        update = self._in_fp32(result, entry)
        still_wrong = self._why_wrong(result, update)
        if still_wrong is not None and result.row_state is not None:
            # The row state may be the cause.
            why += "; the state of its rows was reset"
            update = self._in_fp32(result, entry, anew=True)
            still_wrong = self._why_wrong(result, update)
        self._replace(result, entry, update, leave_out=still_wrong is not None)
        consequence = f"it was redone in fp32; {_COUNTED}"
        if still_wrong is not None:
            consequence = (
                f"and in fp32 ({still_wrong}): it gets no update in such a step. Look at its gradient; with wire_dtype "
                f"fp16 an element above 65504 overflows"
            )
        self._warn(result.members[entry][0], why, consequence)

    def _why_wrong(self, result: Result, update: Tensor) -> str | None:
        """Return what is wrong with an update ``(rows, cols)`` that was computed again, ``None`` if nothing is."""
        norm = float(frobenius_norms(update.unsqueeze(0)))
        return why_wrong(norm, self._bounds_of(result))

    def _in_fp32(self, result: Result, entry: int, *, anew: bool = False) -> Tensor:
        """Return the update of one entry from the iteration in fp32, ``(rows, cols)``; set its block and row state."""
        # (rows, cols): the entry alone, so that no other one of its batch changes
        block = orthogonalize_carefully(result.inputs[entry].unsqueeze(0), self._ns)
        result.blocks = result.blocks.float()  # fp32 has room for what half precision could not represent
        result.blocks[entry].copy_(block[0])
        if result.row_state is None or result.new_rows is None:
            return block[0]
        updates, rows = result.row_state.scale_rows([result.members[entry]], block, result.dtype, anew=anew)
        result.new_rows[entry].copy_(rows[0])
        return updates[0]

    def _replace(self, result: Result, entry: int, update: Tensor, *, leave_out: bool) -> None:
        """Write an update that was redone, or leave it out; count it."""
        index = result.members[entry][0]
        if result.row_state is None:
            result.updates = result.blocks
        else:
            result.updates = result.updates.float()
            result.updates[entry].copy_(update)
        if not leave_out:
            self.recorder.redone += 1
        else:  # no update, and the row state of before
            result.blocks[entry].zero_()
            result.updates[entry].zero_()
            if result.row_state is not None and result.new_rows is not None:
                result.new_rows[entry].copy_(result.row_state.stored([result.members[entry]])[0])
            if self.counts_immediately:
                self.recorder.failed += 1
            self.left_out.append(([index], torch.ones(1, dtype=torch.bool, device="cpu")))

    def _warn(self, index: PlanIndex, why: str, consequence: str) -> None:
        if index in self._warned:
            return
        self._warned.add(index)
        matrix = self._matrices[index]
        logger.warning(
            "deepspeed_muon: the orthogonalised update of %s (%s) was wrong in %s (%s): %s",
            matrix.name,
            "{} x {}".format(*matrix.logical_shape),
            str(self._ns.dtype).removeprefix("torch."),
            why,
            consequence,
        )

    def _sample(self, result: Result) -> None:
        """Measure the entries of sampled matrices, and redo them if a singular value is far above the band."""
        with self.recorder.span("sampling"):
            entries_of: dict[PlanIndex, list[int]] = {}
            for entry, (index, _) in enumerate(result.members):
                if self.watches(index):
                    entries_of.setdefault(index, []).append(entry)
            for index, entries in entries_of.items():
                # The norm says little of a single direction; the largest singular value shows a divergent one.
                sums = self._measured(result, entries)
                largest, limit = sums["sigma_max"], self._band.high * (1 + SIGMA_TOLERANCE)
                if self.recorder.check and not largest <= limit:
                    why = f"its largest singular value {largest:.3g} is above {limit:.3g}"
                    for entry in entries:
                        self._redo(result, entry, why)
                    sums = self._measured(result, entries)
                self.recorder.keep(self._matrices[index].name, sums)

    def _measured(self, result: Result, entries: list[int]) -> MeasuredBlocks:
        index, number = result.members[entries[0]]
        scale = result.block_scales[index][number]
        return measure(result.inputs[entries], result.blocks[entries], scale=scale, band=self._band)


class DeferredCheck(ResultCheck):
    """The check on an accelerator, where the host does not wait for a norm.

    A matrix whose update is wrong in step n:

    - In step n it is left out: the device makes its update zero, and ``left_out`` gets a flag that the host has not
      read.
    - In step n + 1 the ranks exchange ``left_out`` with their gradient status, and :meth:`acknowledge` warns. From now
      on it is redone in every step; its row state, which may be the cause, restarts once.
    - In step n + 2 :meth:`acknowledge` returns it as unrecoverable, if it was still wrong in step n + 1.
    """

    counts_immediately = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fp32_only: set[SetIndex] = set()
        self._restarted: set[Member] = set()  # blocks whose row state restarted since they were left out

    def acknowledge(self, left_out: Collection[SetIndex]) -> list[str]:
        """Count and log what this rank left out, too; the host waits for that only if any rank left something out."""
        local, unrecoverable = self.left_out, super().acknowledge(left_out)
        for indices, flags in local if left_out else ():
            for index, flag in zip(indices, flags.tolist(), strict=True):
                if flag:
                    self.recorder.failed += 1
                    self._warn(index, "its norm is outside of its bounds", _IN_FP32_FROM_NOW_ON)
        self._fp32_only.update(left_out)
        self._restarted = {member for member in self._restarted if self.origin[member[0]] not in left_out}
        return unrecoverable

    def unrecoverable(self, left_out: Collection[SetIndex]) -> list[str]:
        """Return those that are computed in fp32; of the others nothing but half precision is known."""
        return super().unrecoverable(self._fp32_only.intersection(left_out))

    def unrecoverable_mask(self, count: int, device: torch.device) -> Tensor:
        """Return which are computed in fp32."""
        if not self._fp32_only:
            return torch.zeros(count, dtype=torch.uint8, device=device)
        flags = [set_index in self._fp32_only for set_index in range(count)]
        return torch.tensor(flags, dtype=torch.uint8, device=device)

    def take_unrecoverable(self) -> list[str]:
        """Return nothing: the host has not read what was left out."""
        return []

    def _settle_norms(self, result: Result) -> Tensor:
        """Zero the entries whose norm is wrong, and return their flags, without waiting for the device."""
        for entry, member in enumerate(result.members if self._fp32_only else ()):
            if self.origin[member[0]] in self._fp32_only:
                # The entry of the batch ran as configured, and is replaced. Row state, which may be the cause, restarts
                # once after the matrix was left out.
                update = self._in_fp32(result, entry, anew=member not in self._restarted)
                self._restarted.add(member)
                self._replace(result, entry, update, leave_out=False)
        # 1. the norms, (blocks,) fp32: of an input only that of its diagonal, since all of it would be one more pass
        # over memory; where that is zero, the input is taken for zero
        lowest, highest = self._bounds_of(result)
        diagonals = result.inputs.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # (blocks, short side, 1)
        norms, inputs = frobenius_norms(result.updates), frobenius_norms(diagonals)
        # 2. which are wrong, (blocks,) bool
        # As on a CPU the result for zeros is zero: raising its norm to the lower bound leaves only the upper one.
        norms = torch.where(inputs < SMALLEST_NORM, norms.clamp(min=lowest), norms)
        wrong = norms.clamp(lowest, highest) != norms  # true for NaN, too
        result.updates.masked_fill_(wrong.view(-1, 1, 1), 0)
        if result.row_state is not None and self.recorder.sampling:
            result.blocks.masked_fill_(wrong.view(-1, 1, 1), 0)
        # 3. what is left out, for the exchange of flags in the next step
        indices = [index for index, _ in result.members]  # several blocks of a matrix repeat its index
        self.left_out.append((indices, wrong))
        return wrong
