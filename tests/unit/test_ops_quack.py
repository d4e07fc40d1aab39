"""quack as a candidate: a stand-in leaves the squares on the diagonal as its kernel does."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepspeed_muon import ops
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, Products, orthogonalize
from deepspeed_muon.ops import autotune, candidates, checks, gate, machine
from deepspeed_muon.ops.autotune import TOLERANCE, error_of
from deepspeed_muon.ops.candidates import Problem, candidates_for
from deepspeed_muon.reference import newton_schulz

SQUARE = 128
HALF = (torch.float16, torch.bfloat16)


def gemm_symmetric(
    a: Tensor, b: Tensor, C: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """Mirror the squares below the diagonal; those on it have two roundings, one on either side."""
    assert isinstance(alpha, float) and isinstance(beta, float), "it takes an integer for a tensor"
    product = alpha * (a.float() @ b.float())
    product = product if C is None else product + beta * C.float()
    product = product + 2e-3 * product.abs().triu(1)
    square = torch.arange(product.shape[-1]) // SQUARE
    is_mirrored = square[:, None] < square[None, :]
    return torch.where(is_mirrored, product.mT, product).to(a.dtype)


def forget_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next call of ``quack_products`` import quack again."""
    monkeypatch.delitem(sys.modules, "deepspeed_muon.ops.quack_sym", raising=False)
    monkeypatch.delattr(ops, "quack_sym", raising=False)
    candidates.quack_products.cache_clear()


@pytest.fixture
def quack_sym(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    interface = types.ModuleType("quack.gemm_interface")
    interface.gemm_symmetric = gemm_symmetric  # type: ignore[attr-defined]
    package = types.ModuleType("quack")
    package.__spec__ = util.spec_from_loader("quack", None)
    monkeypatch.setitem(sys.modules, "quack", package)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    forget_import(monkeypatch)
    assert candidates.quack_products() is not None
    yield sys.modules["deepspeed_muon.ops.quack_sym"]
    candidates.quack_products.cache_clear()
    monkeypatch.undo()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_gate_sees_squares_that_are_not_mirrored(quack_sym: types.ModuleType, dtype: torch.dtype) -> None:
    def unmirrored(a: Tensor, b: Tensor, c: Tensor, alpha: float, beta: float, diag: float) -> Tensor:
        out = gemm_symmetric(a, b.mT, c, alpha=alpha, beta=beta)
        return out + diag * torch.eye(a.shape[1], dtype=dtype)

    for product, is_right in ((unmirrored, False), (quack_sym.sym_gemm, True)):
        for _, error, bound in checks._products(product, "cpu", dtype):
            assert (error <= bound) == is_right


@pytest.mark.parametrize("m", [8, 256, 264, 512, 776])
def test_all_squares_are_mirrored_and_the_lower_halves_stay(quack_sym: types.ModuleType, m: int) -> None:
    a = torch.randn(2, m, 40, generator=torch.Generator().manual_seed(m)).half()
    out, before = quack_sym.sym_gemm(a, a), gemm_symmetric(a, a.mT)
    assert torch.equal(out, out.mT) and torch.equal(out.tril(), before.tril())
    assert not torch.equal(before, before.mT)
    assert torch.equal(quack_sym.sym_gemm(a[0], a[0]), out[0])


def test_the_iteration_with_its_products(quack_sym: types.ModuleType) -> None:
    rows = resolve_schedule("quintic")
    x = torch.randn(2, 264, 600, generator=torch.Generator().manual_seed(0))
    settings = NsSettings(rows, "gram", torch.float16)
    result = orthogonalize(x, settings=settings, products=candidates.quack_products())
    expected = torch.stack([newton_schulz(matrix, rows) for matrix in x])
    assert error_of(result, expected) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize(
    ("device", "dtype", "cols", "without", "expected"),
    [
        ("cuda", torch.bfloat16, 11008, (), ["quack gram", "quack standard"]),
        ("cuda", torch.bfloat16, 11004, (), []),
        ("cuda", torch.float32, 11008, (), []),
        ("cuda", torch.float16, 11008, ("quack",), []),
        ("cpu", torch.bfloat16, 11008, (), []),
    ],
)
def test_when_it_is_a_candidate(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    cols: int,
    without: tuple[str, ...],
    expected: list[str],
) -> None:
    products = Products(lambda x: x @ x.mT)
    monkeypatch.setattr(candidates, "quack_products", lambda: products)
    monkeypatch.setattr(candidates, "triton_products", lambda: products)
    settings = NsSettings(resolve_schedule("quintic"), "gram", dtype)
    problem = Problem(device, torch.bfloat16, 1, 4096, cols, 0, settings)
    names = [candidate.name for candidate in candidates_for(problem, None, without=without)]
    assert [name for name in names if name.startswith("quack")] == expected
    monkeypatch.setattr(candidates, "_has_tcgen05", lambda index: True)
    names = [candidate.name for candidate in candidates_for(problem, None, without=without)]
    assert names[: len(expected)] == expected  # before Triton where both have tcgen05


def test_another_version_is_tested_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of quack, of Triton or of the code in Python: a verdict of older code counted after an upgrade."""
    versions = {"triton": "3.1.0", "quack-kernels": None}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(machine, "installed_version", versions.get)
    identities = [gate._identity(0)]
    for package, version in (("quack-kernels", "0.5.0"), ("quack-kernels", "0.6.5"), ("triton", "3.2.0")):
        versions[package] = version
        identities.append(gate._identity(0))
    monkeypatch.setattr(machine, "_code_digest", lambda: "other code")
    identities.append(gate._identity(0))
    assert len(set(map(tuple, identities))) == 5
    # Choices depend on the same software.
    file = autotune.Tuner(tmp_path)._file
    versions["triton"] = "3.3.0"
    assert autotune.Tuner(tmp_path)._file != file


@pytest.mark.parametrize("name", ["triton_sym", "quack_sym", "candidates", "checks", "newton_schulz"])
def test_every_file_with_kernels_is_in_the_digest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, before = Path.read_bytes, machine._code_digest.__wrapped__()

    def edited(file: Path) -> bytes:
        return read(file) + (b"#" if file.stem == name else b"")

    monkeypatch.setattr(Path, "read_bytes", edited)
    assert machine._code_digest.__wrapped__() != before


def test_what_its_compiler_raises_at_import_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = types.ModuleType("quack")
    package.__spec__ = util.spec_from_loader("quack", None)
    monkeypatch.setitem(sys.modules, "quack", package)  # without gemm_interface
    forget_import(monkeypatch)
    assert candidates.quack_products() is None and "quack is installed" in caplog.text
    candidates.quack_products.cache_clear()
