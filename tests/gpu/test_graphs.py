"""Orthogonalisation replayed as CUDA graphs, against the plain calls, bit for bit; skipped without a GPU."""

# ruff: noqa: E402  # the imports below need DeepSpeed, which a machine with a GPU may lack
from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("deepspeed", reason="deepspeed_muon registers with DeepSpeed when it is imported")

from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.ops import builder
from deepspeed_muon.ops.graphs import Replayed, native_iteration, torch_iteration, triton_products

SHAPES = [(1, 256, 1024), (8, 512, 512), (4, 768, 256), (1, 264, 264), (4, 1024, 1024)]


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_replay_gives_the_bits_of_the_plain_call(shape: tuple[int, int, int], method: str) -> None:
    settings = NsSettings(resolve_schedule("quintic"), method, torch.float16)  # type: ignore[arg-type]
    first = torch.randn(shape, device="cuda")
    runs = [torch_iteration(settings.method), torch_iteration(settings.method, triton_products())]
    operators = builder.try_load()
    if builder.has_kernel(operators, "cuda", "sym_gemm"):
        runs.append(native_iteration(settings.method, operators))
    for run in runs:
        replayed = Replayed(run)
        replayed.capture(first, settings)
        results = [(x, replayed(x, settings)) for x in (first, torch.randn_like(first), 1e-9 * first)]
        for x, result in results:
            assert torch.equal(result, run(x, settings))


def test_graphs_of_several_shapes_share_a_pool_undisturbed() -> None:
    settings = NsSettings(resolve_schedule("quintic"), "gram", torch.bfloat16)
    inputs = [torch.randn(shape, device="cuda") for shape in SHAPES]
    runs = [Replayed(torch_iteration("standard")) for _ in inputs]
    expected = [run(x, settings) for run, x in zip(runs, inputs, strict=True)]
    for run, x in zip(runs, inputs, strict=True):
        run.capture(x, settings)
    for _ in range(3):
        results = [run(x, settings) for run, x in zip(runs, inputs, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
