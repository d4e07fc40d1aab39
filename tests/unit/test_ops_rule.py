"""The rule that chooses kernels, what forces others, and that a machine runs the same ones in every run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, Products
from deepspeed_muon.ops import builder, dispatch, self_test, torch_operators
from deepspeed_muon.ops.dispatch import NsBackend, Orthogonalizer
from deepspeed_muon.reference import newton_schulz
from tests.support.comparisons import within
from tests.support.kernels import forced_kernel
from tests.support.native_ops import REPOSITORY
from tests.support.rounding import iteration_limit

pytestmark = pytest.mark.skipif(bool(forced_kernel()), reason="the choice that it tests is forced")

SETTINGS = NsSettings(resolve_schedule("quintic"))
HALF = replace(SETTINGS, dtype=torch.float16)
GPU = torch.device("cuda")

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Give this process a GPU: with a kernel, with Triton or without, and with components that fail the self-test."""

    def give(kernel: str = "sm90", *, triton: bool = True, failed: dict[str, str] | None = None) -> None:
        operators = SimpleNamespace(sym_gemm_kernel=lambda _: kernel)
        for name in ("momentum_pack_", "momentum_pack_int8_", "unpack_apply_"):
            setattr(operators, name, SimpleNamespace(default=None))
        monkeypatch.setattr(dispatch, "index_of", lambda device: 0)
        monkeypatch.setattr(builder, "has_kernel", lambda given, *_: given is not None)
        monkeypatch.setattr(
            dispatch, "_operators", lambda backend: operators if kernel and backend != "torch" else None
        )
        products = Products(lambda x: x @ x.mT) if triton else None
        monkeypatch.setattr(dispatch, "triton_products", lambda: products)
        monkeypatch.setattr(self_test, "failure", lambda name, _: (failed or {}).get(name, ""))

    return give


def chosen(
    shape: tuple[int, ...], settings: NsSettings = HALF, backend: NsBackend = "auto", device: str = "cuda"
) -> str:
    """Return what would run a shape, and whether as a CUDA graph."""
    x = torch.empty(shape, device="meta")
    choice = Orthogonalizer(backend)._choice(
        dispatch.Problem.of(x, settings, torch.device(device)), prepared=True
    )
    is_graph = isinstance(choice.run, dispatch.Replayed)
    return f"{choice.kernels} {choice.method}{' graph' if is_graph else ''}"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 1024, 2816), "sm90 gram graph"),
        ((2816, 1024), "sm90 gram graph"),
        ((8, 1024, 1024), "sm90 standard graph"),
        ((1, 1024, 1328), "sm90 standard graph"),
        ((1, 1024, 1336), "sm90 gram graph"),
        ((2, 2048, 5504), "sm90 gram"),
        ((1, 8192, 8192), "sm90 standard"),
        ((8, 504, 1024), "torch gram graph"),
        ((1, 1024, 2820), "torch gram graph"),
        ((1, 1022, 1024), "torch standard graph"),
        ((8, 96, 160), "torch standard graph"),
    ],
    ids=str,
)
def test_the_rule_on_hopper(machine: Machine, shape: tuple[int, ...], expected: str) -> None:
    machine()
    assert chosen(shape) == expected
    # In fp32 there is no kernel, and gram pays from a ratio of 2 on.
    assert chosen(shape, SETTINGS).startswith("torch")
    assert "standard" in chosen(shape, replace(HALF, method="standard"))


def test_the_rule_without_hopper(machine: Machine) -> None:
    shape = (1, 1024, 2816)
    for kernel in ("the device cannot run it", ""):
        machine(kernel)
        assert chosen(shape) == "triton gram graph"
        machine(kernel, triton=False)
        assert chosen(shape) == "torch gram graph"


def test_failures_of_the_self_test_are_left_out(machine: Machine) -> None:
    shape = (1, 1024, 2816)
    machine(failed={"symmetric product": "error 1, bound 0"})
    assert chosen(shape) == "triton gram graph"
    with pytest.raises(InstallationError, match="error 1, bound 0"):
        chosen(shape, backend="ops")
    machine(failed={"symmetric product": "it raised", "Triton's product": "it raised"})
    assert chosen(shape) == "torch gram graph" and dispatch.flat_passes("auto", GPU).name == "ops"
    machine(failed={"flat passes": "error 1, bound 0"})
    assert chosen(shape) == "sm90 gram graph" and dispatch.flat_passes("auto", GPU).name == "torch"
    with pytest.raises(InstallationError, match="error 1, bound 0"):
        dispatch.flat_passes("ops", GPU)


def test_a_backend_forces_another_row(machine: Machine) -> None:
    machine()
    for shape in ((1, 1024, 2816), (8, 96, 160)):
        assert chosen(shape, backend="torch") in ("torch gram", "torch standard")
    assert chosen((1, 1024, 2816), backend="ops") == "sm90 gram graph"
    assert chosen((8, 96, 160), backend="ops") == "ops standard graph"
    # cuBLAS computes whole products there: gram was taken from a ratio of 1.3 on.
    machine("the device cannot run it")
    assert chosen((1, 1024, 1336), backend="ops") == "ops standard graph"
    machine("")
    with pytest.raises(InstallationError, match="no CUDA kernels"):
        chosen((8, 96, 160), backend="ops")


def test_every_row_says_where_it_was_timed() -> None:
    for row in dispatch.RULE:
        for page in (word.rstrip(":") for word in row.times.split() if "/" in word):
            assert (REPOSITORY / page).exists(), page
        assert ".md" in row.times or row.times.startswith("not timed")


@pytest.mark.parametrize("backend", ["auto", "ops", "torch"])
@pytest.mark.parametrize("shape", [(24, 24), (24, 64), (64, 24), (3, 24, 64), (2, 2, 64, 24), (0, 4, 8)])
def test_every_backend_has_the_contract_of_the_torch_code(backend: NsBackend, shape: tuple[int, ...]) -> None:
    orthogonalizer = Orthogonalizer(backend)
    x = torch.randn(shape)
    for dtype in (torch.float32, torch.bfloat16):
        settings = NsSettings(resolve_schedule("quintic"), "gram", dtype)
        result = orthogonalizer(x, settings=settings)
        assert result.shape == x.shape and result.dtype == dtype
        if x.numel():
            matrices = x.reshape(-1, *shape[-2:])
            expected = torch.stack([newton_schulz(matrix, settings.coefficients) for matrix in matrices])
            expected = expected.reshape(shape)
            error = float((result.double() - expected).norm() / expected.norm())
            within(error, max(iteration_limit(matrix, dtype) for matrix in matrices), "orthogonalised")
    assert all(entry["calls"] == 1 for entry in orthogonalizer.report())


def test_the_report_names_the_kernels() -> None:
    orthogonalizer = Orthogonalizer("auto")
    for _ in range(3):
        orthogonalizer(torch.randn(24, 64), settings=SETTINGS)
    (entry,) = json.loads(json.dumps(orthogonalizer.report()))
    assert entry["calls"] == 3 and entry["ran"] == "torch gram" and "1x24x64" in entry["problem"]


def test_the_flat_passes_of_all_backends() -> None:
    """That they agree is shown in tests/unit/test_ops_kernels.py."""
    cases: tuple[tuple[NsBackend, str, Any], ...] = (
        ("ops", "ops", builder.load()),
        ("auto", "ops", builder.load()),
        ("torch", "torch", torch_operators),
    )
    for backend, name, module in cases:
        passes = dispatch.flat_passes(backend)
        assert passes.name == name
        for operator in ("momentum_pack", "momentum_pack_int8", "unpack_apply"):
            expected = getattr(module, f"{operator}_")
            assert getattr(passes, operator) == getattr(expected, "default", expected)


def test_unknown_devices_have_torchs_passes(caplog: pytest.LogCaptureFixture) -> None:
    builder.load()
    with pytest.raises(InstallationError, match="no flat passes for meta"):
        dispatch.flat_passes("ops", "meta")
    assert dispatch.flat_passes("auto", "meta").name == "torch" and not caplog.records
