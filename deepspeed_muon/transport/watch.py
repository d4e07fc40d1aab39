"""The check of every orthogonalised matrix, and the measurement of the sampled ones, between iteration and scatter.

The pipeline calls a :class:`PipelineWatch` at its boundaries; all watches of an optimizer share one
:class:`~deepspeed_muon.transport.recorder.StepRecorder`. Nothing here communicates: a rank that finds a wrong result
goes on with the exchange.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.math.health import (
    SIGMA_TOLERANCE,
    band_of,
    check_failure,
    measure,
    norm_bounds,
    orthogonalize_carefully,
)
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.ops.reference import frobenius_norms
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.transport.recorder import SpanName, StepRecorder

__all__ = ["PipelineWatch", "Result"]

logger = logging.getLogger("deepspeed_muon")

# On an accelerator the norms of this many elements of results are read back together, while the next as many are
# being orthogonalised. It bounds how many results wait.
_WINDOW_NUMEL = 1 << 25


@dataclass(slots=True)
class Result:
    """What came out of one call of the iteration.

    Attributes:
        members: Index of the matrix, and number of its block, of each entry.
        blocks: ``(entries, rows, cols)``; in fp32 once an entry was redone.
        complete: Called with the blocks once they are right: returns what is to be applied now, as ``(matrix index,
            flat update)``.
    """

    members: Sequence[tuple[int, int]]
    blocks: Tensor
    complete: Callable[[Tensor], Iterable[tuple[int, Tensor]]]


class PipelineWatch:
    """The recorder's view of one exchange plan, and the check of its results.

    Attributes:
        scale_of: Returns the factor of the scale rule for the block of a matrix; set before each step.
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
        self.scale_of: Callable[[int, int], float] = lambda index, block: 1.0
        self.failed_last: set[int] = set()
        self._matrices = matrices
        self._first = recorder.reserve(len(matrices))
        self._device = device
        self._ns = ns
        self._norms = norms
        self._band = band_of(ns.coefficients)
        self._bounds: dict[tuple[int, int], tuple[float, float]] = {}
        self._warned: set[int] = set()

    def span(self, name: SpanName) -> AbstractContextManager[None]:
        """Return the recorder's span."""
        return self.recorder.span(name)

    def settled(self, results: Iterable[Result], direction_of: Callable[[int], Tensor]) -> Iterator[Result]:
        """Pass results on, in order, once they are known to be right.

        On a CPU each is checked at once. On an accelerator the norms of a window of results are read while the next
        window runs, so the device never waits.

        Args:
            results: What came out of the iteration; a wrong result is replaced in place.
            direction_of: Returns what was put in for one matrix, ``(rows, cols)``.
        """
        window = _window_numel(self._device)
        waiting: _Window | None = None
        current = _Window()
        for result in results:
            if not self.recorder.check:
                if self.recorder.sampling:
                    self._sample(result, direction_of)
                yield result
                continue
            if window == 0:
                self._settle_now(result, direction_of)
                yield result
                continue
            current.add(result, self._norms(result.blocks))
            if current.numel < window:
                continue
            current.send()
            if waiting is not None:
                yield from self._settle_all(waiting, direction_of)
            waiting, current = current, _Window()
        current.send()
        for rest in (waiting, current):
            if rest is not None:
                yield from self._settle_all(rest, direction_of)

    def _settle_now(self, result: Result, direction_of: Callable[[int], Tensor]) -> None:
        self._settle(result, self._norms(result.blocks).tolist(), direction_of)

    def _settle_all(self, window: _Window, direction_of: Callable[[int], Tensor]) -> Iterator[Result]:
        norms = iter(window.read())
        for result in window.results:
            self._settle(result, [next(norms) for _ in result.members], direction_of)
            yield result

    def _settle(self, result: Result, norms: list[float], direction_of: Callable[[int], Tensor]) -> None:
        """Redo the entries whose norm is wrong, and sample."""
        lowest, highest = bounds = self._bounds_of(*result.blocks.shape[1:])
        for position, norm in enumerate(norms):
            # Not so for a NaN either.
            if not lowest <= norm <= highest:
                self._redo(result, position, direction_of, str(check_failure(norm, bounds)))
        if self.recorder.sampling:
            self._sample(result, direction_of)

    def _bounds_of(self, rows: int, cols: int) -> tuple[float, float]:
        bounds = self._bounds.get((rows, cols))
        if bounds is None:
            bounds = self._bounds[rows, cols] = norm_bounds(rows, cols, self._band)
        return bounds

    def _redo(
        self, result: Result, position: int, direction_of: Callable[[int], Tensor], failure: str
    ) -> None:
        """Compute one entry again in fp32; leave it out where that is wrong too."""
        index, number = result.members[position]
        source = direction_of(index)[self._matrices[index].blocks()[number].area].to(self._device)
        bounds = self._bounds_of(*source.shape)
        # Below ns_eps (a head without a gradient is zero) the input is not normalised: no bound from below.
        if (
            float(source.double().norm()) < self._ns.eps
            and float(result.blocks[position].double().norm()) <= bounds[1]
        ):
            return
        again = orthogonalize_carefully(source.unsqueeze(0), self._ns)
        worse = check_failure(float(self._norms(again)), bounds)
        result.blocks = result.blocks.float()
        if worse is None:
            result.blocks[position].copy_(again[0])
            self.recorder.redone += 1
        else:
            result.blocks[position].zero_()
            self.recorder.failed += 1
            self.failed_last.add(index)
        self._warn(index, self._matrices[index], failure, worse)

    def checked_slab(
        self,
        index: int,
        direction: Tensor,
        update: Tensor,
        *,
        group: dist.ProcessGroup,
        again: Callable[[], Tensor],
        counts: bool,
    ) -> Tensor:
        """Check a matrix that the ranks of ``group`` orthogonalised together; return this rank's rows of a right one.

        Must be called by all of them; all come to the same verdict. Waits for the device. Such matrices are checked in
        every step but not sampled.

        Args:
            index: Of this rank's slab in the plan.
            direction: What this rank put in.
            update: What came out.
            group: The ranks that share the matrix.
            again: Orthogonalises it in fp32, on all of them.
            counts: Whether this rank counts and reports it.
        """
        if not self.recorder.check:
            return update
        matrix = self._matrices[index]
        bounds = self._bounds_of(*matrix.logical_shape)
        failure = self._slab_failure(direction, update, bounds, group)
        if failure is None:
            return update
        update = again()
        worse = self._slab_failure(direction, update, bounds, group)
        if worse is not None:
            update = torch.zeros_like(update)
        if counts:
            self.recorder.redone += worse is None
            self.recorder.failed += worse is not None
            self._warn(index, matrix, failure, worse)
            if worse is not None:
                self.failed_last.add(index)
        return update

    def _slab_failure(
        self, direction: Tensor, update: Tensor, bounds: tuple[float, float], group: dist.ProcessGroup
    ) -> str | None:
        norms = torch.stack([torch.linalg.vector_norm(x, dtype=torch.float32) for x in (direction, update)])
        gathered = [torch.empty_like(norms) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, norms, group=group)
        before, after = torch.linalg.vector_norm(torch.stack(gathered), dim=0).tolist()
        # As in _redo: an input below ns_eps is not normalised.
        return check_failure(after, (0.0, bounds[1]) if before < self._ns.eps else bounds)

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

    def _sample(self, result: Result, direction_of: Callable[[int], Tensor]) -> None:
        """Measure the entries of sampled matrices."""
        with self.span("sampling"):
            entries: dict[int, list[int]] = {}
            for position, (index, _) in enumerate(result.members):
                if self.recorder.watches(self._first + index):
                    entries.setdefault(index, []).append(position)
            for index, positions in entries.items():
                self._measure(result, index, positions, direction_of)

    def _measure(
        self, result: Result, index: int, positions: Sequence[int], direction_of: Callable[[int], Tensor]
    ) -> None:
        """Measure entries of one matrix, and redo them if a singular value is far above the band."""
        layout = self._matrices[index]
        areas = layout.blocks()
        whole = direction_of(index)
        numbers = [result.members[position][1] for position in positions]
        directions = torch.stack([whole[areas[number].area] for number in numbers]).to(self._device)
        scale = self.scale_of(index, numbers[0])
        band = self._band

        sums = measure(directions, result.blocks[list(positions)], scale=scale, band=band)
        limit = band.high * (1 + SIGMA_TOLERANCE)
        if self.recorder.check and not sums.sigma_max <= limit:
            why = f"its largest singular value {sums.sigma_max:.3g} is above {limit:.3g}"
            for position in positions:
                self._redo(result, position, direction_of, why)
            sums = measure(directions, result.blocks[list(positions)], scale=scale, band=band)
        self.recorder.keep(layout.name, sums)


def _window_numel(device: torch.device) -> int:
    return 0 if device.type == "cpu" else _WINDOW_NUMEL


class _Window:
    """Results whose norms travel to the host together."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.numel = 0
        self._norms: list[Tensor] = []
        self._host: Tensor | None = None
        self._ready: torch.Event | None = None

    def add(self, result: Result, norms: Tensor) -> None:
        self.results.append(result)
        self.numel += result.blocks.numel()
        self._norms.append(norms)

    def send(self) -> None:
        """Start the copy to the host, in the order of the stream: later work does not delay it."""
        if not self._norms:
            return
        norms = torch.cat(self._norms)
        if norms.device.type == "cpu":
            self._host = norms
            return
        self._host = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=True)
        self._host.copy_(norms, non_blocking=True)
        self._ready = torch.Event(device=norms.device.type)
        self._ready.record()

    def read(self) -> list[float]:
        """Wait for the copy and return the norms."""
        if self._ready is not None:
            self._ready.synchronize()
        values: list[float] = [] if self._host is None else self._host.tolist()
        return values
