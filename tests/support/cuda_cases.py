"""What every CUDA kernel must do, against float64: on a GPU (``tests/gpu``) and on the bench (``tests/unit``) alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tests.support.cuda_library import DTYPE, MISALIGNED, OK, SHAPE, Blocks, Kernels

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half of the distance between neighbours, relative: the one rounding of a result."""

SCALARS = [(False, 1.0, 0.0, 0.0), (True, 2.0315, -4.775, 3.4445), (True, -1.0, 0.5, 0.0)]
"""Whether there is a c; alpha, beta, and what is added to the diagonal."""


class Inputs:
    """Random tensors on a device, the same for the same seed."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a normally distributed tensor; of codes in 8 bits one that has all of them."""
        values = torch.randn(*shape, generator=self._generator)
        if dtype == torch.int8:
            values = (60 * values).clamp_(-127, 127)
        return values.to(self.device, dtype)


def lower_mirrored(x: Tensor) -> Tensor:
    """Return the symmetric matrices with the lower triangles of ``x``."""
    return x.tril() + x.tril(-1).mT


def check_product(
    d: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, diag: float
) -> None:
    """Check a symmetric product: symmetric to the last bit, and near the exact one."""
    assert torch.equal(d.view(torch.int16), d.mT.contiguous().view(torch.int16))
    exact = alpha * a.double() @ b.double().mT
    size = abs(alpha) * a.double().abs() @ b.double().abs().mT + abs(diag)
    if c is not None:
        exact, size = exact + beta * c.double(), size + abs(beta) * c.double().abs()
    exact = lower_mirrored(exact + diag * torch.eye(a.shape[1], dtype=torch.float64, device=a.device))
    # A tensor core adds 16 products to its sum at once: it shifts all of them to the largest one and truncates at a
    # float32's last bit, or one before. That is at most 2^-22 of the terms' sizes for each such step; four more for the
    # epilogue's three IEEE operations and the first sum.
    slack = 2.0**-22 * (-(-a.shape[-1] // 16) + 4)
    bound = UNIT[d.dtype] * exact.abs() + slack * lower_mirrored(size)
    excess = ((d.double() - exact).abs() / bound).max()
    assert float(excess) <= 1, f"{float(excess):.3g} times the bound"


def sym_gemm(kernels: Kernels, shape: tuple[int, int, int], dtype: torch.dtype, inputs: Inputs) -> None:
    """Products with and without c, of inputs whose product is symmetric up to what is mirrored.

    The rows and the matrices of b lie at other distances than those of a.
    """
    batch, m, k = shape
    a = inputs(batch, m, k, dtype=dtype)
    b = inputs(batch, m + 8, k + 16, dtype=dtype)[:, :m, 8:-8].mul_(0.01).add_(a)
    c = lower_mirrored(inputs(batch, m, m, dtype=dtype))
    for with_c, alpha, beta, diag in SCALARS:
        added, d = c if with_c else None, torch.full_like(c, torch.nan)
        assert kernels.sym_gemm(a, b, added, d, alpha=alpha, beta=beta, diag=diag) == OK
        check_product(d, a, b, added, alpha, beta, diag)


def nothing_outside_is_written(kernels: Kernels, inputs: Inputs) -> None:
    """A product into the middle of a wider tensor, of operands that are views."""
    wider = torch.full((3, 280, 296), 7.0, dtype=torch.float16, device=inputs.device)
    a = inputs(3, 280, 400, dtype=torch.float16)[:, 8:272, 16:]
    d = wider[:, 8:272, 16:280]
    assert kernels.sym_gemm(a, a, None, d) == OK
    check_product(d.contiguous(), a, a, None, 1.0, 0.0, 0.0)
    d.fill_(7.0)
    assert bool((wider == 7.0).all())


def refused_operands(kernels: Kernels, inputs: Inputs) -> None:
    """A shape, the address of each operand and a dtype that a kernel cannot take."""
    d = torch.empty(1, 128, 128, dtype=torch.float16, device=inputs.device)
    a = inputs(1, 128, 68, dtype=torch.float16)
    assert kernels.sym_gemm(a, a, None, d) == SHAPE
    a = inputs(1, 128, 64, dtype=torch.float16)
    off = inputs(1, 128, 144, dtype=torch.float16)[:, :, 4:]
    assert kernels.sym_gemm(off[:, :, :64], a, d, d) == MISALIGNED
    assert kernels.sym_gemm(a, off[:, :, :64], d, d) == MISALIGNED
    assert kernels.sym_gemm(a, a, off[:, :, :128], d, beta=1.0) == MISALIGNED
    assert kernels.sym_gemm(a, a, d, off[:, :, :128]) == MISALIGNED
    a = inputs(1, 128, 64)
    assert kernels.sym_gemm(a, a, None, d) == DTYPE


def c_may_be_the_output(kernels: Kernels, inputs: Inputs) -> None:
    """A product that is added to what is in the output."""
    a = inputs(2, 648, 256, dtype=torch.bfloat16)
    c = lower_mirrored(inputs(2, 648, 648, dtype=torch.bfloat16))
    d = c.clone()
    assert kernels.sym_gemm(a, a, d, d, alpha=0.5, beta=2.0) == OK
    check_product(d, a, a, c, 0.5, 2.0, 0.0)


LENGTHS = (0, 1, 7, 8, 4096, 4099, 8200)
"""Of fragments: empty, without a vector, one vector, a tile of ``flat_split.h``, and several."""


def fragment_lengths(many: int) -> list[int]:
    """Return :data:`LENGTHS`, then ``many`` short fragments, as of a chunk of small matrices."""
    return [*LENGTHS, *(1 + number % 40 for number in range(many))]


class Around:
    """Fragments one after the other in a larger tensor, each ``offset`` elements behind a 16-byte boundary."""

    def __init__(self, lengths: Sequence[int], offset: int, dtype: torch.dtype, inputs: Inputs) -> None:
        ends = list(accumulate(-(-(offset + length) // 16) * 16 + 16 for length in lengths))
        # Room behind the last one for what a wrong kernel writes.
        self.buffer = inputs(ends[-1] + 3 * 4096, dtype=dtype)
        self.before = self.buffer.clone()
        starts = [start + offset for start in [0, *ends[:-1]]]
        self.slices = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        self.fragments = [self.buffer[fragment] for fragment in self.slices]

    def old(self, number: int) -> Tensor:
        """Return what a fragment held at first, in float64."""
        return self.before[self.slices[number]].double()

    def alone(self, number: int) -> Tensor:
        """Return what a fragment held at first, in a tensor of its own: from a 16-byte boundary on."""
        return self.before[self.slices[number]].clone()

    def assert_rest_unchanged(self) -> None:
        """Check that nothing outside of the fragments was written."""
        rest = torch.ones_like(self.buffer, dtype=torch.bool)
        for fragment in self.slices:
            rest[fragment] = False
        assert torch.equal(self.buffer[rest], self.before[rest])


def momentum_pack(
    kernels: Kernels,
    lengths: Sequence[int],
    offsets: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    nesterov: bool,
    inputs: Inputs,
) -> None:
    """The momentum pass on fragments that begin at ``offsets``: the bits of each alone; what lies around them stays."""
    arrays = [Around(lengths, offset, dtype, inputs) for offset, dtype in zip(offsets, dtypes, strict=True)]
    decays = [0.95 - 0.5 * (number % 2) for number in range(len(lengths))]
    fragments = zip(*(array.fragments for array in arrays), strict=True)
    assert kernels.momentum_pack(list(zip(fragments, decays, strict=True)), nesterov=nesterov) == OK
    for number, decay in enumerate(decays):
        momentum, grad = arrays[0].old(number), arrays[1].old(number)
        size = momentum.abs() + grad.abs()
        momentum += (1 - decay) * (grad - momentum)
        direction = grad + decay * (momentum - grad) if nesterov else momentum
        _assert_close(arrays[0].fragments[number], momentum, size)
        _assert_close(arrays[2].fragments[number], direction, size)
        assert torch.equal(arrays[1].fragments[number].double(), grad)
        alone = [array.alone(number) for array in arrays]
        assert kernels.momentum_pack([(alone, decay)], nesterov=nesterov) == OK
        assert all(
            torch.equal(array.fragments[number], expected)
            for array, expected in zip(arrays, alone, strict=True)
        )
    for array in arrays:
        array.assert_rest_unchanged()


CODE_BLOCK = 256
"""``kCodeBlock`` of ops/csrc/include/code_blocks.h."""


class Coded:
    """Fragments of int8 momentum: the scales of their blocks, and how far into its first block each begins."""

    def __init__(self, lengths: Sequence[int], inputs: Inputs) -> None:
        self.before = [0 if n == 0 else (0, 3, 0, 255, 131)[number % 5] for number, n in enumerate(lengths)]
        counts = [-(-(before + n) // CODE_BLOCK) for before, n in zip(self.before, lengths, strict=True)]
        self.scales = Around(counts, 1, torch.float32, inputs)
        for scales in self.scales.fragments:
            scales.abs_()

    def blocks(self) -> list[Blocks]:
        """Return what the launcher takes of each fragment."""
        return list(zip(self.before, self.scales.fragments, strict=True))


def momentum_pack_int8(
    kernels: Kernels,
    run: Callable[..., None],
    lengths: Sequence[int],
    offsets: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    nesterov: bool,
    inputs: Inputs,
) -> None:
    """The momentum pass in 8 bits, on fragments that begin at ``offsets``: the bits of ``run`` on the CPU.

    Args:
        kernels: Run the kernel.
        run: ``momentum_pack_int8_`` of ``deepspeed_muon.ops.torch_operators``, or its native counterpart.
        lengths: Of the fragments.
        offsets: Of codes, gradient and what is sent.
        dtypes: Of gradient and what is sent.
        nesterov: Whether the gradient is blended in once more.
        inputs: Random tensors.
    """
    kinds = (torch.int8, *dtypes)
    arrays = [Around(lengths, offset, dtype, inputs) for offset, dtype in zip(offsets, kinds, strict=True)]
    coded = Coded(lengths, inputs)
    # In turn: as they are, a block that is zero, one too small for a scale, and one that is not finite.
    for number, (codes, grad) in enumerate(zip(arrays[0].fragments, arrays[1].fragments, strict=True)):
        block = slice(0, CODE_BLOCK - coded.before[number])
        if number % 7 in (1, 4):
            codes[block] = 0
            grad[block] *= 0.0 if number % 7 == 1 else 2.0**-126
        middle = len(grad) // 2
        if number % 7 == 6 and len(grad):
            grad[middle] = math.inf if number % 2 else math.nan
    # Products with powers of two are exact, so the bits do not depend on fused multiply-adds, which some builds of
    # torch and some processors do not have. There is a formula for each half of the unit interval.
    decays = [0.25 if number % 2 else 0.875 for number in range(len(lengths))]
    codes, grads, outs, scales = (
        [x.cpu().clone() for x in array.fragments] for array in (*arrays, coded.scales)
    )
    table = torch.tensor([(i, 0, i, 0, n, i) for i, n in enumerate(lengths)])
    rates = torch.tensor([(decay, float(nesterov)) for decay in decays], dtype=torch.float64)
    blocks = torch.tensor([(before, 0) for before in coded.before])
    run(codes, scales, grads, outs, table, rates, blocks)
    fragments = [
        (tensors, decay)
        for *tensors, decay in zip(*(array.fragments for array in arrays), decays, strict=True)
    ]
    assert kernels.momentum_pack_int8(fragments, coded.blocks(), nesterov=nesterov) == OK
    for array, references in ((arrays[0], codes), (arrays[1], grads), (arrays[2], outs)):
        for fragment, reference in zip(array.fragments, references, strict=True):
            assert torch.equal(fragment.isnan().cpu(), reference.isnan())
            # Subnormal products are rounded.
            difference = fragment.cpu().nan_to_num().double() - reference.nan_to_num().double()
            assert bool((difference.abs() <= 2.0**-148).all())
        array.assert_rest_unchanged()
    for fragment, reference in zip(coded.scales.fragments, scales, strict=True):
        torch.testing.assert_close(fragment.cpu(), reference, rtol=0, atol=0, equal_nan=True)
    coded.scales.assert_rest_unchanged()


def unpack_apply(
    kernels: Kernels,
    lengths: Sequence[int],
    offsets: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    inputs: Inputs,
) -> None:
    """The pass that applies updates, as :func:`momentum_pack`."""
    arrays = [Around(lengths, offset, dtype, inputs) for offset, dtype in zip(offsets, dtypes, strict=True)]
    decays = [0.998 - 0.5 * (number % 2) for number in range(len(lengths))]
    fragments = zip(*(array.fragments for array in arrays), strict=True)
    assert kernels.unpack_apply(list(zip(fragments, decays, strict=True)), lr_scale=0.02) == OK
    for number, decay in enumerate(decays):
        param, update = arrays[0].old(number), arrays[1].old(number)
        _assert_close(arrays[0].fragments[number], decay * param - 0.02 * update, param.abs() + update.abs())
        alone = [array.alone(number) for array in arrays]
        assert kernels.unpack_apply([(alone, decay)], lr_scale=0.02) == OK
        assert torch.equal(arrays[0].fragments[number], alone[0])
    assert torch.equal(arrays[1].buffer, arrays[1].before)
    arrays[0].assert_rest_unchanged()


def divide_transposed(
    kernels: Kernels,
    shape: tuple[int, int, int],
    step: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    inputs: Inputs,
) -> None:
    """Matrices in the middle of a wider tensor, neighbours in a row at a distance of ``step``: torch's bits."""
    batch, rows, cols = shape
    x = inputs(batch, rows + 3, step * cols + 5, dtype=dtypes[0])[:, 1:-2, 3 : 3 + step * cols : step]
    norms = 0.5 + inputs(batch, 1, 1).abs()
    buffer = torch.full((x.numel() + 4096,), 7.0, dtype=dtypes[1], device=inputs.device)
    out = buffer[2048:-2048].view(batch, cols, rows)
    assert kernels.divide_transposed(x, norms, out) == OK
    assert torch.equal(out, (x.mT / norms).to(dtypes[1]))
    out.fill_(7.0)
    assert bool((buffer == 7.0).all())


def squares(
    kernels: Kernels, batch: int, numel: int, parts: int, offset: int, dtype: torch.dtype, inputs: Inputs
) -> None:
    """Sums of squares of matrices that begin ``offset`` elements behind a 16-byte boundary, also of small elements."""
    matrices = inputs(offset + batch * numel + 64, dtype=dtype)
    small = 0 if dtype == torch.float16 else 2.0**-90  # whose squares underflow
    for factor in (1.0, small):
        x = matrices.mul(factor)[offset : offset + batch * numel].view(batch, numel)
        buffer = torch.full((batch + 2, parts, 2), torch.nan, device=inputs.device)
        assert kernels.squares(x, buffer[1:-1]) == OK
        assert bool(buffer[0].isnan().all()) and bool(buffer[-1].isnan().all())
        plain, enlarged = buffer[1:-1].double().sum(1).unbind(1)  # (batch,) each
        exact = x.double().square().sum(1)
        # A sum of n squares has n roundings of 2^-24, of a lane's and five of the warp's; all terms are positive.
        slack = 2.0**-24 * (numel // parts // 32 + 16)
        if factor == 1.0:
            assert bool(((plain - exact).abs() <= slack * exact).all())
        if enlarged.isfinite().all():
            assert bool(((enlarged * 2.0**-160 - exact).abs() <= slack * exact).all())
        assert factor == 1.0 or bool(enlarged.isfinite().all())


def _assert_close(actual: Tensor, expected: Tensor, size: Tensor) -> None:
    dtype = actual.dtype
    # In float32 at most four roundings, each of 2^-24 of a value that is at most the inputs' ``size``: of the weight
    # (0.05, say), of a difference and of a fused multiply-add, and with Nesterov's blend of the last two again, where
    # the first error enters with a factor below 1. So 2^-21 of the size is twice the bound. Then one rounding to dtype,
    # which below the smallest normal number is half of the smallest subnormal one.
    unit = UNIT.get(dtype, 0.0)
    bound = unit * expected.abs().clamp(min=torch.finfo(dtype).smallest_normal) + (1 + unit) * 2.0**-21 * size
    assert bool(((actual.double() - expected).abs() <= bound).all())
