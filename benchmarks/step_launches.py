"""What a step launches on a GPU and how often the host waits for the device, for each variant; counted without a GPU.

    python benchmarks/step_launches.py    # CPU, some minutes

Launches are those of llama-7b on 64 ranks at ZeRO 3, by the rank that owns most matrices, with the kernels of the
iteration launched one by one (``tests/unit/test_step_launches.py`` says how they are counted). Waits are those of this
package in a step of a small model on two ranks, at every stage (``tests/support/host_waits.py``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support
from tests.distributed.test_plan_counts import STAGES_AND_DTYPES, waiting_settings
from tests.support.harness import RankPool
from tests.unit.test_step_launches import counted

VARIANTS = ("muon", "muon_eq", "normuon")


def waits(pool: RankPool, variant: str, stage: int, dtype: str) -> int:
    """Return how often this package lets the host wait in a step: the largest number of a rank."""
    reports = pool.run("tests.support.host_waits:count_waits", **waiting_settings(variant, stage, dtype))
    return max(
        sum(count for where, count in counts.items() if where.startswith("deepspeed_muon"))
        for counts in reports
    )


def main() -> None:
    """Run from the command line."""
    arguments = support.options(__doc__).parse_args()
    rows: list[support.Row] = []
    with RankPool(2) as pool:
        for variant in VARIANTS:
            _, launches = counted("llama-7b", 64, variant)
            row: dict[str, Any] = {"variant": variant, "launches": launches.counts.total()}
            row["of the iteration"] = launches.counts["iteration"]
            row["above muon's, a batch"] = (row["launches"] - (rows or [row])[0]["launches"]) / launches.calls
            for stage, dtype in STAGES_AND_DTYPES:
                row[f"waits, stage {stage}, {dtype}"] = waits(pool, variant, stage, dtype)
            rows.append(row)
            print(row, flush=True)
    page = [*support.heading("Launches and waits of a step"), *support.table_of(rows)]
    print("\n".join(page))
    support.write(arguments.out, {"rows": rows}, page)


if __name__ == "__main__":
    main()
