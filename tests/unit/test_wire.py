"""A coded wire: what is read is near what was written, wherever it lies, and nothing that is not finite hides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed_muon.plan.chunks import INT8
from deepspeed_muon.transport.all_to_all import Codec

WIRE = Codec(torch.float32, INT8)


def sent(values: Tensor, *, gap: int = 0, copies: int | None = None) -> Tensor:
    """Return what is read of values that were written with room between the fragments."""
    count, units = copies or len(values), INT8.buffer_numel(values.shape[1])
    buffer = torch.full(((units + gap) * count,), 77, dtype=torch.uint8)
    place = buffer.as_strided((count, units), (units + gap, 1))
    WIRE.write(place, values)
    for number in range(count):
        after = (units + gap) * number + units
        assert (buffer[after : after + gap] == 77).all()
    return WIRE.read(place, values.shape[1])


@given(
    fragments=st.integers(1, 3),
    numel=st.integers(1, 700),
    gap=st.sampled_from([0, 4, 36]),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e20]),
    seed=st.integers(0, 99),
)
def test_half_a_step_at_most(fragments: int, numel: int, gap: int, scale: float, seed: int) -> None:
    values = scale * torch.randn(fragments, numel, generator=torch.Generator().manual_seed(seed))
    read = sent(values, gap=gap)
    for block in range(0, numel, INT8.block):
        here = slice(block, block + INT8.block)
        step = values[:, here].abs().amax(dim=1, keepdim=True) / 127
        assert ((read[:, here] - values[:, here]).abs() <= 0.5001 * step).all()


def test_one_fragment_for_many() -> None:
    values = torch.randn(1, 300)
    assert torch.equal(sent(values, copies=3), sent(values).expand(3, -1))


def test_what_was_read_is_read_again() -> None:
    once = sent(torch.randn(2, 1000))
    torch.testing.assert_close(sent(once), once, rtol=1e-6, atol=0)


def test_zeros_stay_zeros() -> None:
    values = torch.zeros(1, 600)
    values[0, 300] = 1.0
    assert torch.equal(sent(values), values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    values = torch.ones(1, 600)
    values[0, 300] = bad
    read = sent(values)
    assert not read[0, 300].isfinite()
    assert torch.equal(read[0, :256], values[0, :256])


def test_rounding_of_normal_numbers() -> None:
    """The figure of docs/measured.md: 0.7 % of a normally distributed direction."""
    values = torch.randn(1, 1 << 20, generator=torch.Generator().manual_seed(0))
    assert 0.006 < float((sent(values) - values).norm() / values.norm()) < 0.008


def test_a_plain_wire_copies() -> None:
    wire = Codec(torch.bfloat16)
    assert wire.is_uncompressed and wire.dtype is torch.bfloat16 and wire.format.buffer_numel(10) == 10
    place, values = torch.empty(1, 10, dtype=torch.bfloat16), torch.randn(1, 10)
    wire.write(place, values)
    assert torch.equal(wire.read(place, 10), values.bfloat16())
    assert not Codec(torch.bfloat16, INT8).is_uncompressed and INT8.bytes_per_element(2) == 1.015625
