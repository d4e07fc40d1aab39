"""Momentum stored as int8: the codes, the pass over them, and the blocks of a partition."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed_muon import Muon
from deepspeed_muon.ops.dispatch import NsBackend, flat_passes
from deepspeed_muon.ops.torch_operators import BLOCK, block_scales, from_codes, quantize, to_codes
from deepspeed_muon.plan.placement import Fragment
from deepspeed_muon.step.int8 import Int8Blocks
from tests.support.comparisons import close
from tests.support.models import build, train_alone
from tests.support.oracle import in_8_bits

pytestmark = [pytest.mark.kernels, pytest.mark.native]

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def random(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = block_scales(values.abs().amax().view(1))
    return to_codes(values, scales), scales


@given(st.lists(FLOATS, min_size=1, max_size=20), st.integers(-60, 20))
@settings(max_examples=300)
def test_values_of_codes_have_the_same_codes(numbers: list[float], exponent: int) -> None:
    largest = torch.finfo(torch.float32).max
    values = (torch.tensor(numbers) * 2.0**exponent).clamp(-largest, largest)
    codes, scales = quantized(values)
    read_back = from_codes(codes, scales, 0)
    again, same = quantized(read_back)
    assert torch.equal(codes, again) and torch.equal(scales, same)
    assert torch.equal(read_back.double(), codes.double() * scales.double()), "products are exact"
    if scales.item():
        assert int(codes.abs().max()) == 127
        # Half a code, and the scale's 17 bits over 127 codes.
        bound = 0.5 * scales.double() * (1 + 2**-8)
        assert bool(((read_back.double() - values.double()).abs() <= bound).all())
        close(read_back.double(), in_8_bits(values), rtol=2**-16, atol=1.01 * scales.item())
    else:
        assert not codes.any() and float(values.abs().max()) < 128 * 2.0**-126


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_spoils_its_block(bad: float) -> None:
    codes, scales = quantized(torch.tensor([1.0, bad, 0.0]))
    assert not scales.isfinite().any() and from_codes(codes, scales, 0).isnan().all()


def pack(
    backend: NsBackend, before: int, grad: Tensor, out: torch.dtype, nesterov: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the pass on a fragment that ``before`` elements precede in its block; return direction, codes and scales."""
    momentum = 0.01 * torch.randn(len(grad), generator=torch.Generator().manual_seed(3))
    momentum[: BLOCK + 9] = 0.0
    codes, scales = quantize(momentum, before)
    codes = codes.clone()  # a view of padded blocks
    direction = torch.zeros(len(grad), dtype=out)
    table, blocks = torch.tensor([(0, 0, 0, 0, len(grad), 0)]), torch.tensor([(before, 0)])
    # A product with 1/8 is exact: the bits do not depend on fused multiply-adds, which torch may lack.
    rates = torch.tensor([(0.875, float(nesterov))], dtype=torch.float64)
    flat_passes(backend).momentum_pack_int8([codes], [scales], [grad], [direction], table, rates, blocks)
    return direction, codes, scales


GRADS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("grad", "out"), [GRADS, GRADS[::-1]])
@pytest.mark.parametrize("backend", ["ops", "torch"])
@pytest.mark.parametrize(("before", "numel"), [(0, 40 * BLOCK + 17), (250, 4), (255, 3 * BLOCK), (3, 7000)])
def test_the_pass_decodes_updates_and_encodes(
    backend: NsBackend, before: int, numel: int, grad: torch.dtype, out: torch.dtype, nesterov: bool
) -> None:
    gradient = random(numel, grad, 0)
    direction, codes, scales = pack(backend, before, gradient, out, nesterov)
    momentum = 0.01 * torch.randn(numel, generator=torch.Generator().manual_seed(3))
    momentum[: BLOCK + 9] = 0.0
    momentum = from_codes(*quantize(momentum, before), before)
    momentum += 0.125 * (gradient.float() - momentum)
    expected_codes, expected_scales = quantize(momentum, before)
    assert torch.equal(codes, expected_codes) and torch.equal(scales, expected_scales)
    expected = gradient.float() + 0.875 * (momentum - gradient.float()) if nesterov else momentum
    eps = torch.finfo(out).eps
    close(direction.double(), expected.double(), rtol=eps, atol=4 * eps * float(gradient.abs().max()))


@pytest.mark.parametrize("backend", ["ops", "torch"])
def test_infinities_and_nan_stay(backend: NsBackend) -> None:
    gradient = random(3 * BLOCK, torch.float32, 2)
    gradient[BLOCK + 5] = math.inf
    direction, codes, scales = pack(backend, 0, gradient, torch.float32, False)
    assert direction.isfinite().sum() == len(gradient) - 1
    values = from_codes(codes, scales, 0).view(-1, BLOCK)
    assert values[1].isnan().all() and values[::2].isfinite().all()


def partition(*fragments: tuple[int, int, int]) -> Int8Blocks:
    """Return the blocks of fragments: offsets in parameter and partition, and elements."""
    return Int8Blocks(Fragment(0, first, offset, numel) for first, offset, numel in fragments)


def test_blocks_end_where_a_fragment_ends() -> None:
    """The example of the module's docstring; two fragments of other parameters share the second partition."""
    first = partition((0, 0, 600))
    assert first.count == 3 and [first.row(offset) for offset in (0, 256, 512)] == [(0, 0), (0, 1), (0, 2)]
    second = partition((600, 10, 400), (0, 500, 100))
    assert second.count == 3
    assert [second.row(offset) for offset in (10, 178, 500)] == [(88, 0), (0, 1), (0, 2)]


@given(
    st.lists(st.tuples(st.integers(0, 600), st.integers(1, 700), st.integers(0, 9)), min_size=1, max_size=4),
    st.data(),
)
@settings(max_examples=60)
def test_any_range_of_a_fragment_decodes_to_the_same_values(
    sizes: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    fragments, offset = [], 0
    for first, numel, gap in sizes:
        fragments.append((first, offset + gap, numel))
        offset += gap + numel
    blocks, values = partition(*fragments), torch.zeros(offset + 5)
    for _, start, count in fragments:
        values[start : start + count] = random(count, torch.float32, start)
    codes, scales = blocks.encode(values)
    decoded = blocks.decode_all(codes, scales)
    assert float((decoded - values).abs().max()) <= 0.51 * float(scales.max())
    again = blocks.encode(decoded)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    _, first, numel = data.draw(st.sampled_from(fragments))
    start = data.draw(st.integers(first, first + numel - 1))
    stop = data.draw(st.integers(start + 1, first + numel))
    assert torch.equal(blocks.decode(codes, scales, start, stop - start), decoded[start:stop])


@pytest.mark.parametrize(
    ("before", "after"), [("int8", "int8"), ("int8", "fp32"), ("bf16", "int8"), ("bf16", "bf16")]
)
def test_state_dicts(before: str, after: str) -> None:
    """Codes stay as they are; to and from other dtypes the values go on. By itself torch loads bf16 as fp32."""
    models = [build("toy"), build("toy", seed=1)]
    first, second = (
        Muon(model, lr=0.02, momentum_dtype=dtype)  # type: ignore[arg-type]
        for model, dtype in zip(models, (before, after), strict=True)
    )
    train_alone(models[0], first, 2)
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    if before == after:
        for entries, loaded in zip(first.state.values(), second.state.values(), strict=True):
            for key in ("momentum_buffer", "momentum_scale"):
                assert key not in entries or torch.equal(entries[key], loaded[key])
    train_alone(models[0], first, 2, first=2)
    train_alone(models[1], second, 2, first=2)
    for param, twin in zip(models[0].parameters(), models[1].parameters(), strict=True):
        if before == after:
            assert torch.equal(param, twin)
        # Two steps at 0.02 of an update that is off by some percent.
        assert float((param - twin).detach().norm()) <= 0.02 * float(param.detach().norm())
    dtypes = {
        entries["momentum_buffer"].dtype for entries in second.state.values() if "momentum_buffer" in entries
    }
    assert dtypes == {{"int8": torch.int8, "bf16": torch.bfloat16, "fp32": torch.float32}[after]}
