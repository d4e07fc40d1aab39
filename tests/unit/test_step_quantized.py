"""Momentum in 8 bits: the codes, and the pass over them."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed_muon import Muon
from deepspeed_muon.ops.dispatch import NsBackend, flat_passes
from deepspeed_muon.ops.torch_operators import BLOCK, block_scales, from_codes, to_codes
from tests.support.comparisons import close
from tests.support.models import build, train_alone
from tests.support.oracle import in_8_bits

pytestmark = pytest.mark.kernels(native=True)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def random(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = block_scales(values.abs().amax().view(1))
    return to_codes(values, scales), scales


@given(st.lists(FLOATS, min_size=1, max_size=20), st.integers(-60, 20))
@settings(max_examples=300, deadline=None)
def test_values_of_codes_have_the_same_codes(numbers: list[float], exponent: int) -> None:
    largest = torch.finfo(torch.float32).max
    values = (torch.tensor(numbers) * 2.0**exponent).clamp(-largest, largest)
    codes, scales = quantized(values)
    found = from_codes(codes, scales, 0)
    again, same = quantized(found)
    assert torch.equal(codes, again) and torch.equal(scales, same)
    assert torch.equal(found.double(), codes.double() * scales.double()), "products are exact"
    if scales.item():
        assert int(codes.abs().max()) == 127
        # Half a code, and the scale's 17 bits over 127 codes.
        bound = 0.5 * scales.double() * (1 + 2**-8)
        assert bool(((found.double() - values.double()).abs() <= bound).all())
        close(found.double(), in_8_bits(values), rtol=2**-16, atol=1.01 * scales.item())
    else:
        assert not codes.any() and float(values.abs().max()) < 128 * 2.0**-126


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_spoils_its_block(bad: float) -> None:
    codes, scales = quantized(torch.tensor([1.0, bad, 0.0]))
    assert not scales.isfinite().any() and from_codes(codes, scales, 0).isnan().all()


def pack(
    backend: NsBackend, ends: list[int], grad: Tensor, out: torch.dtype, nesterov: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the pass on fragments from each of ``ends`` to the next one; return directions, codes and scales."""
    values = 0.01 * torch.randn(len(grad), generator=torch.Generator().manual_seed(3))
    values[: BLOCK + 9] = 0.0
    whole = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    old = block_scales(whole.abs().amax(1))
    codes = to_codes(whole, old.unsqueeze(1)).view(-1)[: len(values)].clone()
    moved = from_codes(codes, old, 0)
    passes = flat_passes(backend)
    # A product with 1/8 is exact: the bits do not depend on fused multiply-adds, which torch may lack.
    rates = torch.tensor([(0.875, float(nesterov))], dtype=torch.float64)
    everything = torch.tensor([(0, 0, 0, 0, len(values), 0)])
    passes.momentum_pack([moved], [grad], [torch.empty_like(moved)], everything, rates)
    largest = torch.nn.functional.pad(moved, (0, -len(values) % BLOCK)).view(-1, BLOCK).abs().amax(1)
    new = block_scales(largest)
    cut = sorted({end // BLOCK for end in ends[1:-1] if end % BLOCK})
    slot = {block: number for number, block in enumerate(cut)}
    rows, blocks, scales = [], [], []
    for start, stop in pairwise(ends):
        first, last = start // BLOCK, (stop - 1) // BLOCK
        rows.append((0, start, 0, start, stop - start, 0))
        blocks.append((start % BLOCK, sum(map(len, scales)), slot.get(first, -1), slot.get(last, -1)))
        scales.append(old[first : last + 1].clone())
        scales[-1][torch.tensor([b in slot for b in range(first, last + 1)])] = (
            math.nan
        )  # nobody may read them
    outs, kept, pairs = (
        torch.zeros(len(values), dtype=out),
        torch.cat(scales),
        torch.stack((old, new), 1)[cut],
    )
    table, where = torch.tensor(rows), torch.tensor(blocks)
    passes.momentum_pack_int8([codes], [kept], [grad], [outs], table, rates, where, pairs.view(-1, 2))
    found = new.clone()
    for (start, stop), (_, place, *_) in zip(pairwise(ends), blocks, strict=True):
        for number, block in enumerate(range(start // BLOCK, (stop - 1) // BLOCK + 1)):
            if block not in slot:
                found[block] = kept[place + number]
    return outs, codes, found


GRADS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("grad", "out"), [GRADS, GRADS[::-1]])
@pytest.mark.parametrize("backend", ["ops", "torch"])
def test_cuts_change_nothing(backend: NsBackend, grad: torch.dtype, out: torch.dtype, nesterov: bool) -> None:
    """Wherever fragments begin and end, whole blocks, parts of one and several in one block."""
    numel = 40 * BLOCK + 17
    gradient = random(numel, grad, 0)
    whole = pack(backend, [0, numel], gradient, out, nesterov)
    assert int(whole[1].abs().max()) == 127
    for ends in ([1, 2, 250], [256, 1000, 5000], [255, 257, 511, 513], [3, 7, 7000, 40 * BLOCK + 1]):
        for found, expected in zip(
            pack(backend, [0, *ends, numel], gradient, out, nesterov), whole, strict=True
        ):
            assert torch.equal(found, expected), ends


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("grad", "out"), [GRADS, GRADS[::-1]])
def test_native_and_torch_pass_agree(grad: torch.dtype, out: torch.dtype, nesterov: bool) -> None:
    gradient = random(3 * BLOCK + 100, grad, 1)
    ends = [0, 100, 700, len(gradient)]
    for found, expected in zip(
        pack("ops", ends, gradient, out, nesterov), pack("torch", ends, gradient, out, nesterov), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["ops", "torch"])
def test_what_is_not_finite_stays_so(backend: NsBackend) -> None:
    gradient = random(3 * BLOCK, torch.float32, 2)
    gradient[BLOCK + 5] = math.inf
    outs, codes, scales = pack(backend, [0, len(gradient)], gradient, torch.float32, False)
    assert outs.isfinite().sum() == len(gradient) - 1
    kept = from_codes(codes, scales, 0).view(-1, BLOCK)
    assert kept[1].isnan().all() and kept[::2].isfinite().all()


@pytest.mark.parametrize(("before", "after"), [("int8", "int8"), ("int8", "fp32"), ("bf16", "int8")])
def test_state_dicts(before: str, after: str, caplog: pytest.LogCaptureFixture) -> None:
    """Codes stay as they are; to and from other dtypes the values go on, with one warning."""
    models = [build("toy"), build("toy", seed=1)]
    first, second = (
        Muon(model, lr=0.02, momentum_dtype=dtype)  # type: ignore[arg-type]
        for model, dtype in zip(models, (before, after), strict=True)
    )
    train_alone(models[0], first, 2)
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    told = [record for record in caplog.records if "momentum_dtype" in record.message]
    assert len(told) == (before != after)
    if before == after:
        for own, loaded in zip(first.state.values(), second.state.values(), strict=True):
            for key in ("momentum_buffer", "momentum_scale"):
                assert key not in own or torch.equal(own[key], loaded[key])
    train_alone(models[0], first, 2, first=2)
    train_alone(models[1], second, 2, first=2)
    for param, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        if before == after:
            assert torch.equal(param, other)
        # Two steps at 0.02 of an update that is off by some percent.
        assert float((param - other).detach().norm()) <= 0.02 * float(param.detach().norm())
    dtypes = {own["momentum_buffer"].dtype for own in second.state.values() if "momentum_buffer" in own}
    assert dtypes == {torch.int8 if after == "int8" else torch.float32}
