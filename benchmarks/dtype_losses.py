"""What ``wire_dtype`` or ``momentum_dtype`` does to the loss: the demo's model at ZeRO 3, equal tokens, some seeds.

    python benchmarks/dtype_losses.py wire_dtype bf16 int8 --out benchmarks/results/dtype_losses-wire-NAME
    python benchmarks/dtype_losses.py momentum_dtype fp32 int8 --out benchmarks/results/dtype_losses-momentum-NAME

Trains once for each value and seed, in turn. A seed decides about weights and data, so the runs of a seed are compared
with each other. Losses do not depend on what else the machine does. Finished runs in the JSON of ``--out`` are kept, so
a long series can be run in pieces.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "examples")]

import demo  # noqa: E402  # the demo is a script beside train_gpt.py, not a package

from benchmarks import support  # noqa: E402
from tests.support.native_ops import extensions_dir  # noqa: E402

Losses = dict[str, dict[str, float]]


def loss(key: str, value: str, seed: int, steps: int) -> float:
    """Train once with a setting; return the last validation loss."""
    config = json.loads((support.REPOSITORY / "ds_configs" / "zero3.json").read_text())
    config["optimizer"]["params"][key] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config))
        rates = {**demo.RATES["Muon"], "seed": seed}
        run = Path(folder, "run")
        demo.train("Muon", rates, steps, run, extensions_dir(), config=path)
        return demo.read_curve(run / "val_loss.csv")[-1][1]


def page(key: str, losses: Losses, values: list[str], steps: int) -> list[str]:
    """Return the losses of all seeds as Markdown, with the distance of each value from the first one."""
    seeds = sorted({seed for found in losses.values() for seed in found}, key=int)
    rows = [[seed, *(f"{losses[value][seed]:.4f}" for value in values)] for seed in seeds]
    means = [statistics.fmean(losses[value][seed] for seed in seeds) for value in values]
    rows.append(["mean", *(f"{mean:.4f}" for mean in means)])
    first = values[0]
    spread = statistics.stdev(losses[first][seed] for seed in seeds) if len(seeds) > 1 else 0.0
    lines = [
        f"# Validation losses by `{key}`",
        "",
        f"The demo's model, ZeRO 3, {demo.RANKS} ranks, {steps} steps of {demo.TOKENS_PER_STEP} tokens, "
        f"{support.machine()['name']}.",
        "",
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
    parser.add_argument("key", choices=["wire_dtype", "momentum_dtype"])
    parser.add_argument("values", nargs="+")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=demo.STEPS)
    arguments = parser.parse_args()
    tokens = arguments.steps * demo.TOKENS_PER_STEP
    known = support.read(arguments.out)
    losses: Losses = known["losses"] if known.get("tokens") == tokens else {}
    for seed in range(arguments.seeds):
        for value in arguments.values:
            of_value = losses.setdefault(value, {})
            if str(seed) not in of_value:
                of_value[str(seed)] = loss(arguments.key, value, seed, arguments.steps)
        lines = page(arguments.key, losses, arguments.values, arguments.steps)
        about = {"machine": support.machine(), "steps": arguments.steps, "tokens": tokens}
        support.write(arguments.out, {**about, "losses": losses}, lines)
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
