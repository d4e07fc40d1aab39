"""The check of every orthogonalised matrix, and the measurement of the sampled ones, between iteration and apply.

Every placement hands its :class:`Result` to a :class:`ResultCheck` and gets it back once it is right: whether the
matrix was whole here, was gathered over a tensor-parallel group, or stays cut over a group. All checks of an optimizer
share one :class:`~deepspeed_muon.monitoring.recorder.StepRecorder`. Only results that stay cut need
communication: the ranks that hold the parts gather their norms, all results of a window at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from deepspeed_muon.monitoring.results import Member, R, Result, Together, Window
from deepspeed_muon.ops.reference import frobenius_norms
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.transport.waiting import phase

__all__ = ["ResultCheck"]

# On an accelerator the norms of this many elements of results are read back together, while the next as many are
# being orthogonalised. It bounds how many results wait.
_WINDOW_NUMEL = 1 << 25


@dataclass(frozen=True, slots=True)
class _Wrong:
    """An entry of a result whose norm is outside of its bounds.

    Attributes:
        result: Where it is.
        position: Of the entry.
        bounds: Of its norm.
        norm: Its norm.
        why: What is wrong.
    """

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
        """What was put in: ``(rows, cols)``, or this rank's part of it."""
        return self.result.inputs[self.position]


class ResultCheck:
    """The recorder's view of one exchange plan, and the check of its results.

    Attributes:
        failed_last: Matrices of this plan whose update was left out since the set was last cleared.
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
        """Reserve numbers for the plan's matrices.

        Args:
            recorder: Of the optimizer.
            matrices: Of the plan.
            device: Where the iteration runs.
            ns: The iteration.
            norms: The Frobenius norms of a batch, fp32.
        """
        self.recorder = recorder
        self.failed_last: set[int] = set()
        self._matrices = matrices
        self._first = recorder.reserve(len(matrices))
        self._device = device
        self._ns = ns
        self._norms = norms
        self._band = band_of(ns.coefficients)
        self._bounds: dict[tuple[int, int], tuple[float, float]] = {}
        self._warned: set[int] = set()

    def settled(self, results: Iterable[R]) -> Iterator[R]:
        """Pass results on once they are known to be right; whole ones in order.

        On a CPU each is checked at once. On an accelerator the norms of a window of results are read while the next
        window runs, so the device never waits. Results that ranks have together are checked by the window too, with one
        small all-gather, and the device waits for it: all those ranks must bring the same ones in the same order.

        Args:
            results: What came out of the iteration; a wrong result is replaced in place.
        """
        window = _window_numel(self._device)
        waiting: Window[R] | None = None
        current: Window[R] = Window()
        apart: dict[dist.ProcessGroup, list[R]] = {}
        for result in results:
            if not self.recorder.check:
                if self.recorder.sampling and result.together is None:
                    self._sample(result)
                yield result
                continue
            if result.together is not None:
                group = result.together.group
                apart.setdefault(group, []).append(result)
                if sum(map(self._share_of, apart[group])) >= _WINDOW_NUMEL:
                    yield from self._settle_together(apart.pop(group))
                continue
            if window == 0:
                self._settle_now(result)
                yield result
                continue
            current.add(result, self._norms(result.updates))
            if current.numel < window:
                continue
            current.send()
            if waiting is not None:
                yield from self._settle_all(waiting)
            waiting, current = current, Window()
        current.send()
        for rest in (waiting, current):
            if rest is not None:
                yield from self._settle_all(rest)
        # In the order of their first results, which is the same on all ranks.
        for together in apart.values():
            yield from self._settle_together(together)

    def _settle_now(self, result: Result) -> None:
        self._settle([result], self._norms(result.updates).tolist())

    def _settle_all(self, window: Window[R]) -> Iterator[R]:
        norms = iter(window.read())
        for result in window.results:
            self._settle([result], [next(norms) for _ in result.members])
            yield result

    def _settle_together(self, results: list[R]) -> Iterator[R]:
        """Settle results of one group; all its ranks come to the same verdict."""
        together = results[0].together
        assert together is not None
        own = torch.cat([self._norms(result.updates) for result in results])
        norms = [math.hypot(*parts) for parts in zip(*_all_of(own, together), strict=True)]
        self._settle(results, norms)
        yield from results

    def _share_of(self, result: Result) -> int:
        """Return the elements that each rank has of a result on average; the same number on all of them."""
        assert result.together is not None
        rows, cols = self._whole_shape(result)
        return len(result.members) * rows * cols // len(result.together.sizes)

    def _whole_shape(self, result: Result) -> tuple[int, int]:
        """Return the shape of the blocks, of which ranks may have parts."""
        rows, cols = result.blocks.shape[1:]
        if result.together is None:
            return rows, cols
        total = sum(result.together.sizes)
        return (total, cols) if result.together.dim == 0 else (rows, total)

    def _settle(self, results: Sequence[Result], norms: Iterable[float]) -> None:
        """Redo the entries whose norm is wrong, and sample; of results that all are whole or all of one group."""
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
        if self.recorder.sampling:
            for result in results:
                if result.together is None:
                    self._sample(result)

    def _bounds_of(self, rows: int, cols: int) -> tuple[float, float]:
        bounds = self._bounds.get((rows, cols))
        if bounds is None:
            bounds = self._bounds[rows, cols] = norm_bounds(rows, cols, self._band)
        return bounds

    def _redo(self, wrong: Sequence[_Wrong]) -> None:
        """Compute entries again in fp32; leave those out that are wrong too. All of them are whole or of one group."""
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
        # Below ns_eps (a head without a gradient is zero) the input is not normalised: no bound from below.
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
            # The row moments may be what is wrong.
            entry, top = entries[number]
            entries[number] = (replace(entry, why=f"{entry.why}; its row moments start anew"), top)
            updates[number] = self._again(*entries[number], anew=True)
            norms[number] = self._norms_of([updates[number]], together)[0]
        for (each, _), update, norm in zip(entries, updates, norms, strict=True):
            self._replace(each, update, check_failure(norm, each.bounds))

    def _again(self, entry: _Wrong, largest: float, *, anew: bool = False) -> Tensor:
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
        return result.finish.normalize([entry.member], block)[0]

    def _norms_of(self, updates: Sequence[Tensor], together: Together | None) -> list[float]:
        own = torch.cat([self._norms(update.unsqueeze(0)) for update in updates])
        return [math.hypot(*parts) for parts in zip(*_all_of(own, together), strict=True)]

    def _replace(self, entry: _Wrong, update: Tensor, worse: str | None) -> None:
        """Put an update that was computed again in its place, or zeros if it is wrong too; count and report it."""
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
            self.failed_last.add(index)
        self._warn(index, self._matrices[index], entry.why, worse)

    def _warn(self, index: int, matrix: MatrixLayout, why: str, failure: str | None) -> None:
        if index in self._warned:
            return
        self._warned.add(index)
        rows, cols = matrix.logical_shape
        shape, dtype = f"{rows} x {cols}", str(self._ns.dtype).removeprefix("torch.")
        if failure is None:
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
        """Measure entries of one matrix, and redo them if a singular value is far above the band."""
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


def _window_numel(device: torch.device) -> int:
    return 0 if device.type == "cpu" else _WINDOW_NUMEL


def _all_of(own: Tensor, together: Together | None) -> list[list[Any]]:
    """Return what every rank of a group has, as lists; waits for the device.

    Must be called by all ranks of the group with tensors of one shape. The lists of all ranks are equal, so that what
    is computed from them is too.
    """
    if together is None:
        values: list[Any] = own.tolist()
        return [values]
    gathered = [torch.empty_like(own) for _ in together.sizes]
    with phase("check of results", together.group):
        dist.all_gather(gathered, own, group=together.group)
    return [each.tolist() for each in gathered]


def _largest(x: Tensor) -> Tensor:
    """Return the largest magnitude; 0 of nothing, NaN if there is one."""
    return x.abs().amax() if x.numel() else x.new_zeros(())


def _maximum(values: Iterable[float]) -> float:
    """Return the largest value, NaN if there is one."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)
