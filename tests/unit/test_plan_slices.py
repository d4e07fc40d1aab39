"""Parts of whole tensors: their runs are those of an index tensor that is cut with torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_muon.checkpoint.parameters import TensorSlice, cover_tensor, full_slice


@st.composite
def slices(draw: st.DrawFn) -> TensorSlice:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    taken = draw(st.lists(st.booleans(), min_size=shape[dim], max_size=shape[dim]).filter(any))
    ranges = [(index, index + 1) for index, has in enumerate(taken) if has]
    return TensorSlice("w", shape, dim, tuple(ranges))


def reference(tensor_slice: TensorSlice) -> list[int]:
    """Return the whole tensor's element for each of the part's elements."""
    numbers = torch.arange(math.prod(tensor_slice.shape)).view(tensor_slice.shape)
    cut = torch.cat(
        [numbers.narrow(tensor_slice.dim, start, stop - start) for start, stop in tensor_slice.ranges],
        tensor_slice.dim,
    )
    assert tuple(cut.shape) == tensor_slice.local_shape
    return [int(number) for number in cut.reshape(-1)]


def shown(tensor_slice: TensorSlice, start: int, stop: int) -> dict[int, int]:
    """Return the whole element of each of the part's elements by their runs, none of which is there twice."""
    elements: dict[int, int] = {}
    for run in tensor_slice.strided_ranges(start, stop):
        for number in range(run.count):
            for element in range(run.numel):
                position = run.local_offset + number * run.local_stride + element
                assert position not in elements
                elements[position] = run.full_offset + number * run.full_stride + element
    return elements


@given(slices(), st.data())
def test_runs_are_those_of_the_reference(tensor_slice: TensorSlice, data: st.DataObject) -> None:
    expected = reference(tensor_slice)
    stop = data.draw(st.integers(0, len(expected)))
    start = data.draw(st.integers(0, stop))
    assert shown(tensor_slice, start, stop) == {
        position: expected[position] for position in range(start, stop)
    }
    assert len(list(tensor_slice.strided_ranges(start, stop))) <= 3 * len(tensor_slice.ranges), (
        "runs do not grow with the rows"
    )


@given(slices(), st.data())
def test_elements_of_a_range_of_the_full_tensor(tensor_slice: TensorSlice, data: st.DataObject) -> None:
    element = data.draw(st.integers(0, math.prod(tensor_slice.shape)))
    assert tensor_slice.local_elements_before(element) == sum(
        index < element for index in reference(tensor_slice)
    )


def test_slices_of_fused_blocks_add_up() -> None:
    slices = [
        TensorSlice("w", (4, 18), 1, ((start, start + 3), (start + 9, start + 12))) for start in (0, 3, 6)
    ]
    assert (
        cover_tensor(slices)
        and cover_tensor([*slices, slices[0]])
        and not cover_tensor(slices[:2])
        and not cover_tensor(slices[::2])
    )
    assert not cover_tensor([full_slice("w", (4, 18)), *slices])
    assert slices[1].scaled(12) == TensorSlice("w", (36,), 0, ((6, 12), (24, 30)))
    assert full_slice("w", ()).is_full and full_slice("w", ()).local_elements_before(1) == 1


@pytest.mark.parametrize("ranges", [(), ((0, 5),), ((2, 2),), ((0, 2), (1, 3)), ((2, 3), (0, 1)), ((-1, 2),)])
def test_an_invalid_slice_is_refused(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="not a slice"):
        TensorSlice("w", (4, 3), 0, ranges)
