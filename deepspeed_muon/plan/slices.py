"""Which part of a whole tensor a rank's parameter is, where ranks hold different parts or give it other names.

Three kinds of parallelism fit one rule. A rank of ``deepspeed.moe`` has some of the experts, each whole, under the
numbers of the rank; AutoEP stacks a rank's experts along dimension 0; tensor parallelism cuts a dimension. In each case
the rank's tensor is the whole tensor, under a name that all ranks share, at some ranges of indices along one dimension.

Example: two ranks share a fused gate and up projection of 12 x 4, and each has half of both. The first rank's tensor of
6 x 4 is ``TensorSlice("gate_up", (12, 4), 0, ((0, 3), (6, 9)))``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Runs:
    """Equal runs of elements of a rank's tensor, and of the whole tensor.

    Attributes:
        own: Where the first run starts in the rank's tensor.
        whole: Where it starts in the whole tensor.
        numel: Elements of each run.
        count: How many runs there are.
        own_step: From the start of one run to that of the next in the rank's tensor.
        step: The same in the whole tensor.
    """

    own: int
    whole: int
    numel: int
    count: int
    own_step: int
    step: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rank's tensor, as ranges along one dimension of the whole tensor.

    Attributes:
        name: Of the whole tensor, equal on all ranks.
        shape: Of the whole tensor.
        dim: The dimension that is cut.
        ranges: First index and the one behind the last of each range, ascending, as the rank's tensor has them.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        ends = [0, *(stop for _, stop in self.ranges)]
        apart = all(end <= start < stop for end, (start, stop) in zip(ends, self.ranges, strict=False))
        if (
            not self.ranges
            or not 0 <= self.dim < max(1, len(self.shape))
            or not apart
            or ends[-1] > self.length
        ):
            raise ValueError(f"not a slice: {self}")

    @property
    def length(self) -> int:
        """The length of the whole tensor along the dimension that is cut."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds the whole tensor."""
        return self.ranges == ((0, self.length),)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the rank's tensor."""
        own = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], own, *self.shape[self.dim + 1 :]) if self.shape else ()

    @property
    def _steps(self) -> tuple[int, int, int]:
        """Elements of one index, of a row of the rank's tensor along :attr:`dim`, and of one of the whole tensor."""
        inner = math.prod(self.shape[self.dim + 1 :])
        return inner, math.prod(self.own_shape[self.dim :]), self.length * inner

    def before(self, element: int) -> int:
        """Return how many of the rank's elements come before an element of the whole tensor, both in row-major order.

        So the rank's elements among ``[start, stop)`` of the whole tensor are ``[before(start), before(stop))``.
        """
        inner, row, whole_row = self._steps
        outer, rest = divmod(element, whole_row)
        return outer * row + sum(
            min(max(rest - start * inner, 0), (stop - start) * inner) for start, stop in self.ranges
        )

    def runs(self, start: int, stop: int) -> Iterator[Runs]:
        """Yield where the rank's elements ``[start, stop)`` lie in the whole tensor."""
        _, row, _ = self._steps
        begin = min(stop, -(-start // row) * row)
        end = max(begin, stop // row * row)
        for first, last, rows in ((start, begin, 1), (begin, end, (end - begin) // row), (end, stop, 1)):
            if first < last:
                yield from self._runs(first, last if rows == 1 else first + row, rows)

    def _runs(self, start: int, stop: int, rows: int) -> Iterator[Runs]:
        """Yield the runs of elements of one row, in this row and the next ones."""
        inner, row, whole_row = self._steps
        outer = start // row
        own = outer * row
        for begin, end in self.ranges:
            numel = (end - begin) * inner
            first, last = max(start, own), min(stop, own + numel)
            if first < last:
                place = outer * whole_row + begin * inner + first - own
                yield Runs(first, place, last - first, rows, row, whole_row)
            own += numel

    def scaled(self, own: int) -> TensorSlice:
        """Return the slice of a vector that has equally many numbers for each index of :attr:`dim`.

        Args:
            own: The length of the rank's part of the vector.

        Raises:
            ValueError: If it is no multiple of the indices.
        """
        each, rest = divmod(own, sum(stop - start for start, stop in self.ranges))
        if rest or not each:
            raise ValueError(f"{self.name}: {own} numbers do not belong to the indices of {self.ranges}")
        ranges = tuple((start * each, stop * each) for start, stop in self.ranges)
        return TensorSlice(self.name, (self.length * each,), 0, ranges)


def whole_slice(name: str, shape: Sequence[int]) -> TensorSlice:
    """Return the slice of a rank that has the whole tensor."""
    return TensorSlice(name, tuple(shape), 0, ((0, shape[0] if shape else 1),))


def add_up(slices: Iterable[TensorSlice]) -> bool:
    """Return whether slices of one tensor, copies counted once, have each index of it once."""
    distinct = set(slices)
    if len({(each.name, each.shape, each.dim) for each in distinct}) > 1:
        return False
    ordered = sorted(each for piece in distinct for each in piece.ranges)
    ends = [0, *(stop for _, stop in ordered)]
    together = all(end == start for end, (start, _) in zip(ends, ordered, strict=False))
    return together and ends[-1] == next(iter(distinct)).length
