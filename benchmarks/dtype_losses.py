"""What ``wire_dtype`` or another dtype does to the loss: the demo's model at ZeRO 3, equal tokens, some seeds.

    python benchmarks/dtype_losses.py wire_dtype bf16 int8 --out benchmarks/results/dtype_losses-wire-NAME

Trains once for each value and seed, in turn. A seed decides about weights and data, so the runs of a seed are compared
with each other. Losses do not depend on what else the machine does. Finished runs in the JSON of ``--out`` are kept, so
a long series can be run in pieces.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import study, support
from benchmarks.study import demo

Losses = dict[str, dict[str, float]]


def loss(key: str, value: str, seed: int, steps: int) -> float:
    """Train once with a setting; return the last validation loss."""
    config = json.loads((support.REPOSITORY / "ds_configs" / "zero3.json").read_text())
    config["optimizer"]["params"][key] = value
    return study.trained("Muon", {**demo.RATES["Muon"], "seed": seed}, steps, config)[0]


def page(key: str, losses: Losses, values: list[str], steps: int) -> list[str]:
    """Return the losses of all seeds as Markdown, with the distance of each value from the first one."""
    seeds = sorted({seed for found in losses.values() for seed in found}, key=int)
    rows = [[seed, *(f"{losses[value][seed]:.4f}" for value in values)] for seed in seeds]
    means = [statistics.fmean(losses[value][seed] for seed in seeds) for value in values]
    rows.append(["mean", *(f"{mean:.4f}" for mean in means)])
    first = values[0]
    spread = statistics.stdev(losses[first][seed] for seed in seeds) if len(seeds) > 1 else 0.0
    told = f"The demo's model, ZeRO 3, {demo.RANKS} ranks, {steps} steps of {demo.TOKENS_PER_STEP} tokens."
    lines = [
        *support.heading(f"Validation losses by `{key}`", told),
        *support.table(["seed", *values], rows),
        "",
        f"Standard deviation over the seeds of {first}: {spread:.4f}.",
    ]
    for value in values[1:]:
        apart = [losses[value][seed] - losses[first][seed] for seed in seeds]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
        lines.append(f"{value} less {first}: {statistics.fmean(apart):+.4f}, standard error {error:.4f}.")
    return lines


def main() -> None:
    """Train and write."""
    parser = support.options(__doc__)
    parser.add_argument("key", help="of optimizer.params, as wire_dtype")
    parser.add_argument("values", nargs="+")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=demo.STEPS)
    arguments = parser.parse_args()
    known = support.read(arguments.out)
    losses: Losses = known["losses"] if known.get("steps") == arguments.steps else {}
    for seed in range(arguments.seeds):
        for value in arguments.values:
            of_value = losses.setdefault(value, {})
            if str(seed) not in of_value:
                of_value[str(seed)] = loss(arguments.key, value, seed, arguments.steps)
        lines = page(arguments.key, losses, arguments.values, arguments.steps)
        support.write(arguments.out, {"steps": arguments.steps, "losses": losses}, lines)
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
