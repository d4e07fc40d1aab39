"""How far the updates of matrices are from fp32's if what is sent is int8 or bf16, over shapes.

    python benchmarks/wire_errors.py --out benchmarks/results/wire_errors-NAME

Newton-Schulz brings all singular values of a direction to about the same size, so it amplifies the rounding of a
direction along the small ones. Values do not depend on the speed of the machine.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize
from deepspeed_muon.plan.chunks import INT8
from deepspeed_muon.transport.all_to_all import Codec

SHAPES = [(8, 8), (16, 16), (64, 64), (256, 256), (1024, 1024), (8, 32), (64, 256), (256, 1024), (512, 2048)]
SPECTRA = {"Gaussian": None, "condition 1e2": 2.0, "condition 1e4": 4.0}
SEEDS = 3


def direction(shape: tuple[int, int], decades: float | None, seed: int) -> Tensor:
    """Return a random matrix: Gaussian, or with singular values that fall evenly over some decades."""
    generator = torch.Generator().manual_seed(seed)
    if decades is None:
        return torch.randn(shape, generator=generator)
    short = min(shape)
    left, right = (
        torch.linalg.qr(torch.randn(side, short, generator=generator, dtype=torch.float64)).Q
        for side in shape
    )
    return ((left * torch.logspace(0, -decades, short, dtype=torch.float64)) @ right.T).float()


def received(values: Tensor, dtype: str) -> Tensor:
    """Return what another rank reads of values that are sent."""
    if dtype == "bf16":
        return values.bfloat16().float()
    codec = Codec(torch.float32, INT8)
    buffer = torch.empty(INT8.buffer_numel(values.numel()), dtype=torch.uint8)
    codec.write(buffer, values.reshape(-1))
    return codec.read(buffer, values.numel()).view(values.shape)


def distance(values: Tensor, exact: Tensor) -> float:
    """Return the relative distance in the Frobenius norm."""
    return float((values - exact).norm() / exact.norm())


def measure(shape: tuple[int, int], decades: float | None) -> dict[str, float]:
    """Return the medians over the seeds of the relative errors of directions and updates."""
    settings = NsSettings(resolve_schedule("quintic"), "gram", torch.float32)
    errors: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        exact = direction(shape, decades, seed)
        update = orthogonalize(exact, settings=settings)
        for dtype in ("int8", "bf16"):
            sent = received(exact, dtype)
            errors.setdefault(f"{dtype} direction", []).append(distance(sent, exact))
            after = received(orthogonalize(sent, settings=settings), dtype)
            errors.setdefault(f"{dtype} update", []).append(distance(after, update))
    return {what: statistics.median(values) for what, values in errors.items()}


def main() -> None:
    """Measure and write."""
    arguments = support.options(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    for spectrum, decades in SPECTRA.items():
        for shape in SHAPES:
            rows.append({"shape": "{} x {}".format(*shape), "spectrum": spectrum, **measure(shape, decades)})
    heads = ["spectrum", "shape", "int8 direction", "int8 update", "bf16 direction", "bf16 update"]
    cells = [
        [row["spectrum"], row["shape"], *(f"{100 * row[head]:.2f} %" for head in heads[2:])] for row in rows
    ]
    told = f"Quintic, 5 steps in fp32; medians of {SEEDS} seeds; relative distances in the Frobenius norm from fp32's."
    page = [*support.heading("Errors of what is sent, and of the update", told), *support.table(heads, cells)]
    support.write(arguments.out, {"machine": support.machine(), "rows": rows}, page)


if __name__ == "__main__":
    main()
