"""Checks every orthogonalised matrix before it is applied, and measures the sampled ones.

Every placement hands each :class:`Result` to a :class:`ResultCheck` and gets it back once it is right. All checks of an
optimizer share one :class:`~deepspeed_muon.monitoring.recorder.StepRecorder`. Only results that stay cut over a group
need communication: the ranks that hold the parts gather their norms, for all results of a window at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.logs import logger
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.monitoring.measure import (
    SIGMA_TOLERANCE,
    band_of,
    check_failure,
    measure,
    norm_bounds,
    orthogonalize_carefully,
)
from deepspeed_muon.monitoring.recorder import StepRecorder
from deepspeed_muon.monitoring.results import Member, R, Result, Together
from deepspeed_muon.ops.reference import frobenius_norms
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.transport.ranks import phase

WINDOW_NUMEL = 1 << 25
"""Elements of the results that are cut over a group and checked together on a CPU."""

LeftOut = tuple[list[int], Tensor]
"""Matrices, and whether the update of each was left out: a flag for each, on the device."""


@dataclass(frozen=True, slots=True)
class _Wrong:
    """The entry at ``position`` of a result, whose norm is outside of its bounds."""

    result: Result
    position: int
    bounds: tuple[float, float]
    norm: float
    why: str

    @property
    def member(self) -> Member:
        return self.result.members[self.position]

    @property
    def direction(self) -> Tensor:
        """The direction of the entry, ``(rows, cols)``, or this rank's part of it."""
        return self.result.inputs[self.position]


class ResultCheck:
    """Checks and samples the results of one exchange plan.

    Attributes:
        left_out: The verdicts since this list was last cleared, of the matrices of this plan.
        told_later: Whether a verdict stays on the device, so that the host never waits for it inside of a step, and a
            wrong result is left out instead of computed again.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        matrices: Sequence[MatrixLayout],
        *,
        device: torch.device,
        ns: NsSettings,
        norms: Callable[[Tensor], Tensor] = frobenius_norms,
    ) -> None:
        """Reserve numbers for the plan's matrices; ``norms`` gives the Frobenius norms of a batch in fp32."""
        self.recorder = recorder
        self.left_out: list[LeftOut] = []
        self.told_later = device.type != "cpu"
        self._uncounted: list[LeftOut] = []
        self._careful: set[int] = set()
        self._anew: frozenset[int] = frozenset()
        self._matrices = matrices
        self._first = recorder.reserve(len(matrices))
        self._device = device
        self._ns = ns
        self._norms = norms
        self._band = band_of(ns.coefficients)
        self._bounds: dict[tuple[int, int], tuple[float, float]] = {}
        self._warned: set[int] = set()

    def settled(self, results: Iterable[R]) -> Iterator[R]:
        """Yield results once they are right; whole ones in their order. What is wrong is replaced in place.

        On a CPU each result is checked at once and computed again if it is wrong. On an accelerator it is left out
        instead, by a factor that the host never sees. :meth:`learn` hears of it when the ranks tell each other the
        flags of the next step, and from then on the matrix is computed in fp32.

        Results that are cut over a group are checked together. One small all-gather serves a window of them on a CPU,
        and each of them on an accelerator: all ranks of the group must bring the same results in the same order.
        """
        apart: dict[dist.ProcessGroup, list[R]] = {}
        for result in results:
            if self.recorder.check and result.together is not None and not self.told_later:
                group = result.together.group
                apart.setdefault(group, []).append(result)
                if sum(map(self._share_of, apart[group])) >= WINDOW_NUMEL:
                    yield from self._settle_together(apart.pop(group))
                continue
            if self.recorder.check and self.told_later:
                self._settle_on_device(result)
            elif self.recorder.check:
                self._settle_now(result)
            if self.recorder.sampling and result.together is None:
                self._sample(result)
            yield result
        # In the order of their first results, which is the same on all ranks.
        for together in apart.values():
            yield from self._settle_together(together)

    def learn(self, told: Collection[int]) -> set[int]:
        """Hear which updates were left out in the step before, on any rank; the host waits only if there are some.

        Those matrices are computed in fp32 from now on, and their row moments, which may be the cause, start anew. Must
        be called by all ranks that have parts of a matrix, with the same.

        Returns:
            Those that were wrong in fp32 too.
        """
        if not self.told_later:
            return set(told)
        uncounted, self._uncounted = self._uncounted, []
        for indices, flags in uncounted if told else ():
            for index, left_out in zip(indices, flags.tolist(), strict=True):
                if left_out:
                    self.recorder.failed += 1
                    self._warn(index, self._matrices[index], "its norm is outside of its bounds", None)
        wrong_again = self._careful.intersection(told)
        self._careful.update(told)
        self._anew = frozenset(told)
        return wrong_again

    def _settle_on_device(self, result: Result) -> None:
        """Zero the entries whose norm is wrong, and restore their row state, without waiting for the device."""
        for position, (index, _) in enumerate(result.members if self._careful else ()):
            if index in self._careful:
                self._compute_in_fp32(result, position)
        lowest, highest = self._bounds_of(*self._whole_shape(result))
        norms, inputs = (
            _gathered(self._norms(each), result.together).double().square().sum(0).sqrt()
            for each in (result.updates, result.inputs)
        )
        # An input of a norm below 1e-12 (a head without a gradient is zero) is not normalised: its result may be small.
        right = (norms <= highest) & ((norms >= lowest) | (inputs < self._ns.eps))
        wrong = ~right
        result.blocks.masked_fill_(wrong.view(-1, 1, 1), 0)
        if result.finish is not None:
            result.updates.masked_fill_(wrong.view(-1, 1, 1), 0)
            result.finish.keep(result.members, right)
        verdict = [index for index, _ in result.members], wrong
        self.left_out.append(verdict)
        if result.together is None or result.together.counts:
            self._uncounted.append(verdict)

    def _compute_in_fp32(self, result: Result, position: int) -> None:
        """Replace an entry that was wrong in an earlier step; row moments, which may be the cause, start anew once."""
        index = result.members[position][0]
        largest = _gathered(_largest(result.inputs[position]), result.together).amax()
        entry = _Wrong(result, position, (0.0, 0.0), 0.0, "")
        update = self._again(entry, largest, anew=index in self._anew)
        self._replace(entry, update, None)

    def _settle_now(self, result: Result) -> None:
        self._settle([result], self._norms(result.updates).tolist())

    def _settle_together(self, results: list[R]) -> Iterator[R]:
        """Check results that are cut over one group; all its ranks reach the same verdict."""
        together = results[0].together
        assert together is not None
        own = torch.cat([self._norms(result.updates) for result in results])
        norms = [math.hypot(*parts) for parts in zip(*_all_of(own, together), strict=True)]
        self._settle(results, norms)
        yield from results

    def _share_of(self, result: Result) -> int:
        """Return how many elements of a result a rank of its group has on average."""
        assert result.together is not None
        rows, cols = self._whole_shape(result)
        return len(result.members) * rows * cols // len(result.together.sizes)

    def _whole_shape(self, result: Result) -> tuple[int, int]:
        """Return the shape of the whole blocks, also if this rank has parts of them."""
        rows, cols = result.blocks.shape[1:]
        if result.together is None:
            return rows, cols
        total = sum(result.together.sizes)
        return (total, cols) if result.together.dim == 0 else (rows, total)

    def _settle(self, results: Sequence[Result], norms: Iterable[float]) -> None:
        """Redo the entries whose norm is wrong, and sample. All results are whole, or cut over one group."""
        following = iter(norms)
        wrong: list[_Wrong] = []
        for result in results:
            lowest, highest = self._bounds_of(*self._whole_shape(result))
            for position in range(len(result.members)):
                norm = next(following)
                # A NaN fails this comparison too.
                if not lowest <= norm <= highest:
                    why = str(check_failure(norm, (lowest, highest)))
                    wrong.append(_Wrong(result, position, (lowest, highest), norm, why))
        if wrong:
            self._redo(wrong)

    def _bounds_of(self, rows: int, cols: int) -> tuple[float, float]:
        bounds = self._bounds.get((rows, cols))
        if bounds is None:
            bounds = self._bounds[rows, cols] = norm_bounds(rows, cols, self._band)
        return bounds

    def _redo(self, wrong: Sequence[_Wrong]) -> None:
        """Compute entries again in fp32, and zero those that are wrong again. All are whole, or cut over one group."""
        together = wrong[0].result.together
        own = torch.stack(
            [
                torch.stack((each.direction.double().norm(), _largest(each.direction).double()))
                for each in wrong
            ]
        )
        told = list(zip(*_all_of(own, together), strict=True))
        inputs = [
            (math.hypot(*(norm for norm, _ in facts)), _maximum(top for _, top in facts)) for facts in told
        ]
        # An input of a norm below 1e-12 (a head without a gradient is zero) is not normalised: its result may be small.
        entries = [
            (each, top)
            for each, (norm, top) in zip(wrong, inputs, strict=True)
            if not (norm < self._ns.eps and each.norm <= each.bounds[1])
        ]
        if not entries:
            return
        updates = [self._again(each, top) for each, top in entries]
        norms = self._norms_of(updates, together)
        anew = [
            number
            for number, (each, _) in enumerate(entries)
            if each.result.finish is not None and check_failure(norms[number], each.bounds) is not None
        ]
        for number in anew:
            # The row moments may be the cause.
            entry, top = entries[number]
            entries[number] = (replace(entry, why=f"{entry.why}; its row moments start anew"), top)
            updates[number] = self._again(*entries[number], anew=True)
            norms[number] = self._norms_of([updates[number]], together)[0]
        for (each, _), update, norm in zip(entries, updates, norms, strict=True):
            self._replace(each, update, check_failure(norm, each.bounds))

    def _again(self, entry: _Wrong, largest: float | Tensor, *, anew: bool = False) -> Tensor:
        """Return the update of one entry from the iteration in fp32, ``(rows, cols)``."""
        result, together = entry.result, entry.result.together
        direction = entry.direction.unsqueeze(0)
        if together is None:
            block = orthogonalize_carefully(direction, self._ns)
        else:
            with phase("iteration in fp32", together.group):
                block = orthogonalize_carefully(direction, self._ns, largest=largest, run=together.iterate)
        result.blocks = result.blocks.float()
        result.blocks[entry.position].copy_(block[0])
        if result.finish is None:
            return block[0]
        result.finish.take_back(entry.member)
        if anew:
            result.finish.start_anew(entry.member)
        return result.finish.finish([entry.member], block)[0]

    def _norms_of(self, updates: Sequence[Tensor], together: Together | None) -> list[float]:
        own = torch.cat([self._norms(update.unsqueeze(0)) for update in updates])
        return [math.hypot(*parts) for parts in zip(*_all_of(own, together), strict=True)]

    def _replace(self, entry: _Wrong, update: Tensor, worse: str | None) -> None:
        """Write an update that was computed again, or zeros if it is wrong again; count and report it."""
        result, index = entry.result, entry.member[0]
        if result.finish is None:
            result.updates = result.blocks
        else:
            result.updates = result.updates.float()
            result.updates[entry.position].copy_(update)
        if worse is not None:
            result.blocks[entry.position].zero_()
            result.updates[entry.position].zero_()
            if result.finish is not None:
                result.finish.take_back(entry.member)
        if result.together is not None and not result.together.counts:
            return
        if worse is None:
            self.recorder.redone += 1
        else:
            self.recorder.failed += 1
            self.left_out.append(([index], torch.ones(1, dtype=torch.bool)))
        self._warn(index, self._matrices[index], entry.why, worse)

    def _warn(self, index: int, matrix: MatrixLayout, why: str, failure: str | None) -> None:
        if index in self._warned:
            return
        self._warned.add(index)
        rows, cols = matrix.logical_shape
        shape, dtype = f"{rows} x {cols}", str(self._ns.dtype).removeprefix("torch.")
        if self.told_later:
            logger.warning(
                "deepspeed_muon: the orthogonalised update of %s (%s) was wrong in %s (%s): it got no update in the "
                "step before, and is computed in fp32 from now on; deepspeed_muon.health counts it. If it happens "
                "often, set ns_dtype to fp32 or ns_method to standard, and look at its gradient",
                matrix.name, shape, dtype, why,
            )  # fmt: skip
        elif failure is None:
            logger.warning(
                "deepspeed_muon: the orthogonalised update of %s (%s) was wrong in %s (%s) and was redone in fp32; "
                "deepspeed_muon.health counts it. If it happens often, set ns_dtype to fp32 or ns_method to standard",
                matrix.name, shape, dtype, why,
            )  # fmt: skip
        else:
            logger.warning(
                "deepspeed_muon: the orthogonalised update of %s (%s) was wrong in %s (%s) and in fp32 (%s): it gets "
                "no update in such a step. Look at its gradient; with wire_dtype fp16 an element above 65504 overflows",
                matrix.name, shape, dtype, why, failure,
            )  # fmt: skip

    def _sample(self, result: Result) -> None:
        """Measure the entries of sampled matrices."""
        with self.recorder.span("sampling"):
            entries: dict[int, list[int]] = {}
            for position, (index, _) in enumerate(result.members):
                if self.recorder.watches(self._first + index):
                    entries.setdefault(index, []).append(position)
            for index, positions in entries.items():
                self._measure(result, index, positions)

    def _measure(self, result: Result, index: int, positions: Sequence[int]) -> None:
        """Measure entries of a matrix, and redo them if a singular value is far above the band."""
        layout = self._matrices[index]
        directions, scale = result.inputs[list(positions)], result.scales[positions[0]]
        band = self._band

        sums = measure(directions, result.blocks[list(positions)], scale=scale, band=band)
        limit = band.high * (1 + SIGMA_TOLERANCE)
        if self.recorder.check and not sums.sigma_max <= limit:
            why = f"its largest singular value {sums.sigma_max:.3g} is above {limit:.3g}"
            norms = self._norms(result.updates).tolist()
            bounds = self._bounds_of(*self._whole_shape(result))
            self._redo([_Wrong(result, position, bounds, norms[position], why) for position in positions])
            sums = measure(directions, result.blocks[list(positions)], scale=scale, band=band)
        self.recorder.keep(layout.name, sums)


def _all_of(own: Tensor, together: Together | None) -> list[list[Any]]:
    """Return the values of every rank of a group, the same on all of them; waits for the device.

    Must be called by all ranks of the group with tensors of one shape.
    """
    values: list[list[Any]] = _gathered(own, together).tolist()
    return values


def _gathered(own: Tensor, together: Together | None) -> Tensor:
    """Return the values of every rank of a group, ``(ranks, ...)``, on the device; otherwise as :func:`_all_of`."""
    if together is None:
        return own.unsqueeze(0)
    gathered = [torch.empty_like(own) for _ in together.sizes]
    with phase("check of results", together.group):
        dist.all_gather(gathered, own, group=together.group)
    return torch.stack(gathered)


def _largest(x: Tensor) -> Tensor:
    """Return the largest magnitude: 0 for an empty tensor, NaN if there is one."""
    return x.abs().amax() if x.numel() else x.new_zeros(())


def _maximum(values: Iterable[float]) -> float:
    """Return the largest value, NaN if there is one."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)
