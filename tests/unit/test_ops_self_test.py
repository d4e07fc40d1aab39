"""Code for a GPU runs only after a self-test: what is wrong or raises ends in one warning and torch's code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.ops import self_test, torch_operators
from deepspeed_muon.ops.self_test import failure

GPU = torch.device("cuda", 0)


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Replace the checks of every component by a function, and CUDA's synchronisation by another."""

    def replace(checks: Callable[..., Any], synchronize: Callable[..., None] = lambda _: None) -> None:
        monkeypatch.setattr(self_test, "_checks_of", checks)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    self_test._failure.cache_clear()
    yield replace
    self_test._failure.cache_clear()


def check(ok: bool) -> dict[str, Any]:
    return {"op": "product", "device": "cuda", "error": 0.0 if ok else 0.5, "bound": 1e-3, "ok": ok}


def test_a_wrong_component_is_left_out_with_one_warning(
    give: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    give(lambda component, device: [check(True), check(component != "Triton's product")])
    for _ in range(3):
        assert "product: error 0.5, bound 0.001" in failure("Triton's product", GPU)
        assert not failure("symmetric product", GPU)
    (warning,) = caplog.records
    assert "the self-test of the Triton's product failed" in warning.getMessage()


def test_a_component_that_raises_is_left_out(give: Callable[..., None]) -> None:
    def raises(*_: object) -> None:
        raise ImportError("no driver")

    give(raises)
    assert failure("Triton's product", GPU) == "ImportError: no driver"


def test_a_gpu_without_memory_says_nothing_about_a_kernel(give: Callable[..., None]) -> None:
    """A GPU that was out of memory when it was tested ran torch's code, and in the next run its kernels."""

    def raises(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    give(raises)
    with pytest.raises(torch.OutOfMemoryError):
        failure("flat passes", GPU)
    give(lambda *_: [check(True)])
    assert not failure("flat passes", GPU)


def test_a_broken_context_is_an_error(give: Callable[..., None]) -> None:
    """After an illegal address every call of CUDA fails: no other kernel could run in its place."""

    def synchronize(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    give(lambda *_: [check(True)], synchronize)
    with pytest.raises(InstallationError, match=r"illegal memory access.*ns_backend 'torch'"):
        failure("symmetric product", GPU)


def test_a_cpu_is_not_tested(give: Callable[..., None]) -> None:
    give(lambda *_: pytest.fail("it is tested"))
    assert not failure("flat passes", torch.device("cpu"))


@pytest.mark.parametrize("processors", [40, 84, 108, 132, 142, 160])
def test_products_come_back_to_their_barriers(processors: int) -> None:
    small, (batch, m, k) = self_test.product_shapes(processors)
    rows = -(-m // 128)  # of tiles
    tiles = batch * rows * (rows + 1) // 2
    assert tiles >= 3 * 2 * processors
    assert batch >= 8 and k > 2 * 5 * 64 and k % 64
    text = (Path(self_test.__file__).parent / "triton_sym.py").read_text()
    (large,) = re.findall(r"^_TILES_FROM = (\d+)$", text, flags=re.MULTILINE)
    assert tiles >= int(large) and self_test.product_shapes(0) == [small]


def test_a_product_that_is_not_symmetric_to_the_last_bit_is_wrong() -> None:
    def unmirrored(*arguments: Any) -> Tensor:
        result = torch_operators.sym_gemm(*arguments)
        result[:, 0, 1] = torch.nextafter(result[:, 0, 1], torch.tensor(9.0, dtype=result.dtype))
        return result

    for product, is_right in ((torch_operators.sym_gemm, True), (unmirrored, False)):
        for _, error, bound in self_test.products(product, "cpu", torch.float16):
            assert (error <= bound) is is_right
