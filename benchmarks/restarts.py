"""What the additional restarts of the Gram iteration are worth in half precision, and what they cost.

    python benchmarks/restarts.py    # CPU, some minutes

The Gram iteration restarts every second step in half precision, and besides before the steps that need an exact input
(``deepspeed_muon.math.newton_schulz.restart_steps``). This compares both sets of restarts: how many ill-conditioned
matrices get a singular value more than 10 % above the band of the schedule, and the time and operations of the
iteration. The singular values of the matrices are between 1 and 1/condition; their logarithms are spaced evenly in one
half of the matrices, and uniformly random in the other.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support
from benchmarks.support import Row
from deepspeed_muon.math import newton_schulz
from deepspeed_muon.math.coefficients import band_of, resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize

SHAPES = ((32, 64), (64, 128), (64, 256))
CONDITIONS = (1e1, 1e2, 1e3, 1e4, 1e5, 1e6)
SEEDS = 30
TIMED = ((256, 1024), (256, 2048))
ABOVE = 1.1


def regular_restarts(settings: NsSettings) -> frozenset[int]:
    """Return the restarts without those before the steps that need an exact input."""
    with mock.patch.object(newton_schulz, "steps_that_need_an_exact_input", return_value=frozenset()):
        return newton_schulz.restart_steps.__wrapped__(settings.coefficients, settings.dtype)


def matrices(rows: int, cols: int, condition: float) -> Iterator[Tensor]:
    """Yield matrices of both kinds of spectrum."""
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        left, right = (
            torch.linalg.qr(torch.randn(size, rows, dtype=torch.float64, generator=generator))[0]
            for size in (rows, cols)
        )
        random = torch.rand(rows, dtype=torch.float64, generator=generator)
        for exponents in (torch.linspace(0, 1, rows, dtype=torch.float64), random):
            yield (left * condition**-exponents @ right.T).float()


def largest_values(settings: NsSettings) -> list[float]:
    """Return the largest singular value of each result, as a multiple of the upper end of the schedule's band."""
    high = band_of(settings.coefficients).high
    inputs = (x for shape in SHAPES for condition in CONDITIONS for x in matrices(*shape, condition))
    return [
        float(torch.linalg.matrix_norm(orthogonalize(x, settings=settings).float(), ord=2)) / high
        for x in inputs
    ]


def measure(schedule: str, steps: int, dtype: torch.dtype, seconds: float) -> Row:
    """Return one row of the table."""
    settings = NsSettings(resolve_schedule(schedule, steps), "gram", dtype)  # type: ignore[arg-type]
    restarts = newton_schulz.restart_steps(settings.coefficients, dtype)
    regular = regular_restarts(settings)
    row: Row = {
        "schedule": f"{schedule}, {steps} steps",
        "dtype": str(dtype).removeprefix("torch."),
        "restarts after": " ".join(map(str, sorted(restarts))),
        "regular ones": " ".join(map(str, sorted(regular))),
    }

    def without(run, *args, **kwargs):  # type: ignore[no-untyped-def]
        with mock.patch.object(newton_schulz, "restart_steps", return_value=regular):
            return run(*args, **kwargs)

    for name, values in (("all", largest_values(settings)), ("regular", without(largest_values, settings))):
        row["matrices"] = len(values)
        row[f"above the band, {name}"] = sum(not value <= ABOVE for value in values)
        row[f"largest / band, {name}"] = max(values)
    for shape in TIMED:
        x = torch.randn(1, *shape)
        runs = {
            "all": lambda x=x: orthogonalize(x, settings=settings),
            "regular": lambda x=x: without(orthogonalize, x, settings=settings),
        }
        times = support.timed_in_turn(runs, seconds)
        flops = newton_schulz.orthogonalize_flops.__wrapped__
        operations = flops(*shape, settings) / without(flops, *shape, settings)
        name = "x".join(map(str, shape))
        row[f"time, {name}"] = support.median_ratio(times["all"], times["regular"])
        row[f"operations, {name}"] = operations
    return row


def main() -> None:
    """Measure, print and write."""
    parser = support.options(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of all turns of an input")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = itertools.product((("polar_express", 5), ("polar_express", 8)), (torch.bfloat16, torch.float16))
    rows = []
    for (schedule, steps), dtype in cases:
        rows.append(measure(schedule, steps, dtype, arguments.seconds))
        print(rows[-1], flush=True)
        page = support.heading(
            "Restarts of the Gram iteration",
            "Matrices with a singular value more than 10 % above the band, and the ratio of time and of operations, "
            "with all restarts and with the regular ones; one thread, turns of both.",
        )
        support.write(arguments.out, {"rows": rows}, [*page, *support.table_of(rows)])


if __name__ == "__main__":
    main()
