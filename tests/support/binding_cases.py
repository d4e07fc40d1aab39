"""What the CUDA binding and the iteration over its products must do, run on the CPU's bench."""

from __future__ import annotations

import torch

from deepspeed_muon.math.coefficients import SMALLEST_NORM
from deepspeed_muon.ops.self_test import TESTS
from tests.support.comparisons import within
from tests.support.cuda_bench import Binding
from tests.support.cuda_cases import Inputs, check_product, lower_mirrored

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def flat_passes(binding: Binding) -> None:
    """The self-test's checks: two tensors and two matrices, one without Nesterov, all combinations of dtypes."""
    for name in ("momentum_pack_", "momentum_pack_int8_", "unpack_apply_"):
        for dtype in (FP32, FP16, BF16):
            binding.bench.configure(processors=3)
            for suffix, error, bound in TESTS["flat passes"][name](binding, "cpu", dtype):
                assert error <= bound, f"{name} {dtype}{suffix}: error {error}"


def products(binding: Binding) -> None:
    """Products whose operands have strides of their own, of which one is copied; and those that cuBLAS computes."""
    inputs = Inputs("cpu")
    a = inputs(2, 136, 96, dtype=FP16)[:, :, 8:80]
    b = torch.empty(2, 144, 104, dtype=FP16)[:, :136, :72].copy_(a + 0.01 * inputs(2, 136, 72, dtype=FP16))
    c = torch.empty(2, 137, 160, dtype=FP16)[:, 1:, 16:152].copy_(
        lower_mirrored(inputs(2, 136, 136, dtype=FP16))
    )
    for major, left, right, added in (
        (9, a, b, c),
        (9, a, b, None),
        (9, a[1], b[1], c[1]),
        (9, a, b.mT.contiguous().mT, c),  # not a row of any kernel
        (9, a[:, :135], b[:, :135], c[:, :135, :135]),  # 135 is no multiple of 8
        (8, a, b, c),  # a device without the kernel
    ):
        binding.bench.configure(major=major)
        result = binding.sym_gemm(left, right, added, 1.5, -0.5, 2.0)
        matrices = [x if x is None or x.dim() == 3 else x[None] for x in (result, left, right, added)]
        assert result.is_contiguous() and result.dim() == left.dim()
        if major == 8 or left.shape[-2] == 135:
            expected = 1.5 * left.double() @ right.double().mT - 0.5 * added.double()
            expected = lower_mirrored(expected + 2.0 * torch.eye(left.shape[-2], dtype=torch.float64))
            assert torch.equal(result, result.mT)
            # Three roundings to fp16 of at most 2^-11 of a value: the product, its sum with c, and the diagonal's.
            error = float((result - expected).abs().max() / expected.abs().max())
            within(error, 2 * 3 * 2.0**-11, "cuBLAS's product")
        else:
            check_product(*matrices, 1.5, 0.0 if added is None else -0.5, 2.0)


def iteration(binding: Binding) -> None:
    """The self-test's checks of the iteration: wide and tall matrices, both orders."""
    # A block for both of the batch's tiles, and one each.
    for dtype, processors in ((FP16, 1), (BF16, 3)):
        binding.bench.configure(processors=processors)
        for suffix, error, bound in TESTS["symmetric product"]["orthogonalize"](binding, "cpu", dtype):
            assert error <= bound, f"orthogonalize {dtype}{suffix}: error {error}"
    for x in (Inputs("cpu")(2, 24, 40), Inputs("cpu")(2, 40, 24)):
        arguments = [3.4, -4.8, 2.0] * 5, "gram", [], FP16, SMALLEST_NORM
        expected = binding.orthogonalize(x, *arguments)
        assert torch.equal(binding.orthogonalize(x * 2.0**-100, *arguments), expected)


def devices(binding: Binding) -> None:
    """What is asked and launched is of the tensors' device, whichever one is the current one."""
    binding.bench.configure(major=9, second_major=8)
    assert binding.sym_gemm_kernel(0) == "sm90" and "device" in binding.sym_gemm_kernel(1)
    binding.bench.configure(major=8, second_major=9)
    assert "device" in binding.sym_gemm_kernel(0) and binding.sym_gemm_kernel(1) == "sm90"
    table, rates = torch.tensor([(0, 0, 0, 0, 8, 0)]), torch.tensor([(0.5, 1.0)], dtype=torch.float64)
    a, norms = torch.ones(1, 8, 8, dtype=FP16), torch.ones(1, 1, 1)
    ones = [torch.ones(8)]
    codes, scales, blocks = [torch.ones(8, dtype=torch.int8)], [torch.ones(1)], torch.tensor([(0, 0)])
    for name, arguments in {
        "sym_gemm": (a, a, None, 1.0, 0.0, 0.0),
        "divide_transposed": (a, norms, FP16),
        "momentum_pack_": (ones, ones, [torch.ones(8)], table, rates),
        "momentum_pack_int8_": (codes, scales, ones, [torch.ones(8)], table, rates, blocks),
        "unpack_apply_": ([torch.ones(8)], ones, table, rates),
    }.items():
        binding.bench.configure(major=9, second_major=8)
        binding.bench.library.bench_set_device(1)
        getattr(binding, name)(*arguments)
        assert binding.bench.library.bench_set_device(0) == 1, "the current device is the one before"


CASES = (flat_passes, products, iteration, devices)


def every_case(binding: Binding) -> None:
    """Run all cases."""
    for case in CASES:
        case(binding)
