"""Which slice of a full tensor a rank's parameter is.

Where ranks hold different slices of a full tensor or name it differently, a :class:`TensorSlice` says which slice a
rank has. Three kinds of parallelism fit one rule. A rank of ``deepspeed.moe`` has some of the experts, each complete,
under numbers of its own; AutoEP stacks a rank's experts along dimension 0; tensor parallelism shards a dimension.
In each case the rank's tensor is the full tensor, under a name that all ranks share, at some ranges of indices along
one dimension.

Example: two ranks share a fused gate and up projection of 12 x 4, and each has half of both. The first rank's tensor of
6 x 4 is ``TensorSlice("gate_up", (12, 4), 0, ((0, 3), (6, 9)))``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StridedRange:
    """Equal ranges of elements at equal distances, in a rank's tensor and in the full tensor.

    Attributes:
        local_offset: Where the first range starts in the rank's tensor.
        full_offset: Where it starts in the full tensor.
        numel: Elements of each range.
        count: How many ranges there are.
        local_stride: From the start of one range to that of the next in the rank's tensor.
        full_stride: The same in the full tensor.
    """

    local_offset: int
    full_offset: int
    numel: int
    count: int
    local_stride: int
    full_stride: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rank's tensor, as ranges along one dimension of the full tensor.

    Attributes:
        name: The name of the full tensor, equal on all ranks.
        shape: The shape of the full tensor.
        dim: The dimension along which it is sliced.
        ranges: First and last index plus one of each range, ascending, in the order of the rank's tensor.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        ends = [0, *(stop for _, stop in self.ranges)]
        are_ascending = all(
            end <= start < stop for end, (start, stop) in zip(ends, self.ranges, strict=False)
        )
        has_dim = 0 <= self.dim < max(1, len(self.shape))
        if not self.ranges or not has_dim or not are_ascending or ends[-1] > self.length:
            raise ValueError(f"not a slice: {self}")

    @property
    def length(self) -> int:
        """The length of the full tensor along :attr:`dim`."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def is_full(self) -> bool:
        """Whether the rank holds the full tensor."""
        return self.ranges == ((0, self.length),)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the rank's tensor."""
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]) if self.shape else ()

    @property
    def _row_numels(self) -> tuple[int, int, int]:
        """Elements of one index along :attr:`dim`, and of all its indices in the rank's and in the full tensor."""
        inner = math.prod(self.shape[self.dim + 1 :])
        return inner, math.prod(self.local_shape[self.dim :]), self.length * inner

    def local_elements_before(self, element: int) -> int:
        """Return how many of the rank's elements come before an element of the full tensor, both in row-major order.

        So the rank's elements among ``[start, stop)`` of the full tensor are
        ``[local_elements_before(start), local_elements_before(stop))``.
        """
        inner, local_row, full_row = self._row_numels
        # A row is what follows one index of the dimensions before dim. Of the last row, which is incomplete, each range
        # counts as far as the element. Example: ranges (0, 3) and (6, 9) along dimension 0 of a 12 x 4 tensor: one row
        # of 48 elements, of which the rank has 24. Before element 26, in index 6, it has 12 and 2 of them.
        outer, rest = divmod(element, full_row)
        return outer * local_row + sum(
            min(max(rest - start * inner, 0), (stop - start) * inner) for start, stop in self.ranges
        )

    def strided_ranges(self, start: int, stop: int) -> Iterator[StridedRange]:
        """Yield where the rank's elements ``[start, stop)`` are in the full tensor: at most three for each range."""
        inner, local_row, full_row = self._row_numels
        for row, count, left, right in row_ranges(start, stop, local_row):
            range_start = 0  # of this range in the rank's row, in elements
            for begin, end in self.ranges:
                range_stop = range_start + (end - begin) * inner
                low, high = max(left, range_start), min(right, range_stop)
                if low < high:
                    offset = row * full_row + begin * inner + low - range_start
                    yield StridedRange(row * local_row + low, offset, high - low, count, local_row, full_row)
                range_start = range_stop

    def scaled(self, local_length: int) -> TensorSlice:
        """Return the slice of a vector that has equally many numbers for each index of :attr:`dim`."""
        factor, rest = divmod(local_length, sum(stop - start for start, stop in self.ranges))
        if rest or not factor:
            raise ValueError(
                f"{self.name}: {local_length} numbers do not belong to the indices of {self.ranges}"
            )
        ranges = tuple((start * factor, stop * factor) for start, stop in self.ranges)
        return TensorSlice(self.name, (self.length * factor,), 0, ranges)


def row_ranges(start: int, stop: int, width: int) -> list[tuple[int, int, int, int]]:
    """Return the end of a row, full rows and the start of a row that elements ``[start, stop)`` consist of.

    Each is given by its first row, the number of rows, its first column, and the column after its last one.
    """
    # [5, 14) in rows of 4: element 5 to the end of row 1, row 2, elements 12 and 13 of row 3
    first, end = -(-start // width), stop // width  # full rows are [first, end)
    if first > end:  # all inside one row
        return [(end, 1, start % width, stop % width)]
    ranges = [(first - 1, 1, start % width, width)] if start < first * width else []
    if end > first:
        ranges.append((first, end - first, 0, width))
    return [*ranges, (end, 1, 0, stop % width)] if stop > end * width else ranges


def full_slice(name: str, shape: Sequence[int]) -> TensorSlice:
    """Return the slice of a rank that has the full tensor."""
    return TensorSlice(name, tuple(shape), 0, ((0, shape[0] if shape else 1),))


def cover_tensor(slices: Iterable[TensorSlice]) -> bool:
    """Return whether slices of one tensor, replicas counted once, have each index of it once."""
    distinct = set(slices)
    if len({(one.name, one.shape, one.dim) for one in distinct}) > 1:
        return False
    ranges = sorted(pair for one in distinct for pair in one.ranges)
    ends = [0, *(stop for _, stop in ranges)]
    are_adjacent = all(end == start for end, (start, _) in zip(ends, ranges, strict=False))
    return are_adjacent and ends[-1] == next(iter(distinct)).length
