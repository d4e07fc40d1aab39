"""The mathematics against independent float64 definitions."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch

import deepspeed_muon.math.newton_schulz as fast
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.coefficients import resolve_schedule, tolerates_rounding
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize, restart_steps
from deepspeed_muon.math.updates import shape_scale
from deepspeed_muon.reference import newton_schulz
from tests.support.comparisons import close, within
from tests.support.matrices import DTYPES, matrix
from tests.support.rounding import iteration_limit
from tests.support.thinning import pairwise

pytestmark = pytest.mark.kernels

SHAPES = [(1, 1), (1, 9), (9, 1), (17, 17), (13, 31), (31, 13), (64, 256), (256, 64), (96, 200)]


@pytest.mark.parametrize(
    ("shape", "kind", "method", "dtype"),
    pairwise(
        product(
            SHAPES,
            ["gaussian", "low-rank", "ill-conditioned", "tiny", "tiniest", "huge"],
            ["gram", "standard"],
            DTYPES,
        )
    ),
)
def test_orthogonalize_matches_float64(
    shape: tuple[int, int], kind: str, method: str, dtype: torch.dtype
) -> None:
    x = matrix(kind, *shape)
    settings_ = NsSettings(resolve_schedule("quintic"), method, dtype)  # type: ignore[arg-type]
    expected = newton_schulz(x, settings_.coefficients)
    result = orthogonalize(x, settings=settings_)
    assert result.shape == x.shape and result.dtype == dtype
    error = float((result.double() - expected).norm() / expected.norm())
    within(error, iteration_limit(x, dtype), "orthogonalised")


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_batches_and_views_give_the_single_result(method: str) -> None:
    flat = torch.randn(4 * 24 * 64)
    batch = flat.view(4, 24, 64)
    settings_ = NsSettings(resolve_schedule("quintic"), method)  # type: ignore[arg-type]
    together = orthogonalize(batch, settings=settings_)
    for index in range(4):
        close(together[index], orthogonalize(batch[index], settings=settings_), rtol=1e-4, atol=1e-5)
    close(
        orthogonalize(batch[0].T, settings=settings_),
        orthogonalize(batch[0], settings=settings_).T,
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_stays_zero_and_nonfinite_shows(dtype: torch.dtype) -> None:
    settings_ = NsSettings(resolve_schedule("quintic"), "gram", dtype)
    assert not orthogonalize(torch.zeros(8, 32), settings=settings_).any()
    bad = torch.ones(8, 32)
    bad[3, 3] = math.nan
    assert not torch.isfinite(orthogonalize(bad, settings=settings_)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["quintic", "polar_express", "polar_express_5", "cans", "deepseekv4"])
def test_only_cans_has_no_margin_for_half_precision(name: str, dtype: torch.dtype) -> None:
    rows = resolve_schedule(name)  # type: ignore[arg-type]
    tolerates = tolerates_rounding(rows, dtype)
    assert tolerates == (name != "cans" or dtype == torch.float32)
    # What the singular value 1 becomes, which a matrix of rank one has: the norm and the cast may round it up.
    result = orthogonalize(torch.ones(1, 9), settings=NsSettings(rows, "standard", dtype))
    if tolerates:
        assert 0.6 < float(torch.linalg.vector_norm(result.float())) < 1.3


@pytest.mark.parametrize("steps", [1, 4, 6])
@pytest.mark.parametrize("name", ["cans", "polar_express_5", "deepseekv4"])
def test_a_table_is_never_cycled_or_cut(name: str, steps: int) -> None:
    with pytest.raises(ConfigError, match="set ns_steps to"):
        resolve_schedule(name, steps)  # type: ignore[arg-type]


def test_a_table_that_flips_the_sign_is_refused() -> None:
    """Four rows cycled to five once gave minus the polar factor: gradient ascent."""
    cans = resolve_schedule("cans")
    with pytest.raises(ConfigError):
        resolve_schedule([*cans[:4], (-1.0, 0.0, 0.0)])
    with pytest.raises(ConfigError, match="cannot run for ns_steps=5"):
        resolve_schedule(cans[:4], 5)


def test_polar_express_repeats_its_last_row_unscaled() -> None:
    rows = resolve_schedule("polar_express", 10)
    assert rows[7:] == ((1.875, -1.25, 0.375),) * 3
    assert rows[1][0] == pytest.approx(4.107059111542203 / 1.01)
    assert rows[1][2] == pytest.approx(0.5448431082926601 / 1.01**5)


@pytest.mark.parametrize("steps", [5, 8])
def test_polar_express_is_the_authors_implementation(steps: int) -> None:
    """They divide by 1.01 ||X||_F *and* have 1.01 in the rows; the rows alone gave an update 4.5 % away at 5 steps."""
    gradient = matrix("gaussian", 64, 128).double()
    x = gradient / (1.01 * gradient.norm() + 1e-7)
    first = tuple(
        value / 1.01**p
        for value, p in zip(
            (8.28721201814563, -23.595886519098837, 17.300387312530933), (1, 3, 5), strict=True
        )
    )
    for a, b, c in (first, *resolve_schedule("polar_express", steps)[1:]):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result = newton_schulz(gradient, resolve_schedule("polar_express", steps))
    # 1e-7 beside a norm of about 90.
    assert float((result - x).norm() / x.norm()) < 1e-8


def test_restarts_never_come_after_the_last_step() -> None:
    quintic = resolve_schedule("quintic")
    assert restart_steps(quintic, torch.bfloat16) == {1, 3}
    assert restart_steps(quintic, torch.float16) == {3}
    assert restart_steps(quintic, torch.float32) == {3}
    for name, dtype, steps in product(("quintic", "polar_express"), DTYPES, range(1, 12)):
        rows = resolve_schedule(name, steps)  # type: ignore[arg-type]
        assert all(0 < done < steps for done in restart_steps(rows, dtype))


def test_scale_rules() -> None:
    assert shape_scale("original", 4, 16) == 1.0
    assert shape_scale("original", 16, 4) == 2.0
    assert shape_scale("match_rms_adamw", 25, 4) == pytest.approx(1.0)
    assert shape_scale("spectral", 9, 16) == 4.0
    assert shape_scale("unit_rms_norm", 4, 16) == 0.5


@pytest.mark.parametrize(
    ("vendor", "amx", "avx512_bf16", "expected"),
    [
        ("GenuineIntel", True, True, torch.bfloat16),
        ("GenuineIntel", False, True, torch.float32),
        ("AuthenticAMD", False, True, torch.bfloat16),
        ("AuthenticAMD", False, False, torch.float32),
    ],
)
def test_a_cpu_iterates_in_bf16_where_that_is_faster(
    vendor: str,
    amx: bool,
    avx512_bf16: bool,
    expected: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processors = tmp_path / "cpuinfo"
    processors.write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(fast, "Path", lambda _: processors)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    fast._bf16_is_faster.cache_clear()
    try:
        assert fast.resolve_ns_dtype("auto", torch.device("cpu")) == expected
    finally:
        fast._bf16_is_faster.cache_clear()
