"""What ``wire_dtype`` or ``momentum_dtype`` does to the loss: the demo's model at ZeRO 3, equal tokens, some seeds.

    python benchmarks/dtype_losses.py wire_dtype bf16 int8 --out benchmarks/results/dtype_losses-wire-NAME
    python benchmarks/dtype_losses.py momentum_dtype fp32 int8 --out benchmarks/results/dtype_losses-momentum-NAME

Trains once for each value and seed, in turn. A seed decides about weights and data, so the runs of a seed are compared
with each other. Losses do not depend on what else the machine does. Finished runs in the JSON of ``--out`` are kept, so
a long series can be run in pieces.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "examples")]

import demo  # noqa: E402  # the demo is a script beside train_gpt.py, not a package

from benchmarks.optimizer_step import machine  # noqa: E402
from tests.support.native_ops import extensions_dir  # noqa: E402

Losses = dict[str, dict[str, float]]


def loss(key: str, value: str, seed: int, steps: int) -> float:
    """Train once with a setting; return the last validation loss."""
    config = json.loads((REPOSITORY / "ds_configs" / "zero3.json").read_text())
    config["optimizer"]["params"][key] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config))
        rates = {**demo.RATES["Muon"], "seed": seed}
        run = Path(folder, "run")
        demo.train("Muon", rates, steps, run, extensions_dir(), config=path)
        return demo.read_curve(run / "val_loss.csv")[-1][1]


def table(key: str, losses: Losses, values: list[str], steps: int) -> str:
    """Return the losses of all seeds as Markdown, with the distance of each value from the first one."""
    seeds = sorted({seed for found in losses.values() for seed in found}, key=int)
    trained = f"{steps} steps of {demo.TOKENS_PER_STEP} tokens"
    lines = [
        f"# Validation losses by `{key}`",
        "",
        f"The demo's model, ZeRO 3, {demo.RANKS} ranks, {trained}, {machine()['name']}.",
        "",
        "| seed | " + " | ".join(values) + " |",
        "|" + "---|" * (len(values) + 1),
    ]
    for seed in seeds:
        lines.append(f"| {seed} | " + " | ".join(f"{losses[value][seed]:.4f}" for value in values) + " |")
    means = [statistics.fmean(losses[value][seed] for seed in seeds) for value in values]
    lines.append("| mean | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    first = values[0]
    spread = statistics.stdev(losses[first][seed] for seed in seeds) if len(seeds) > 1 else 0.0
    lines += ["", f"Standard deviation over the seeds of {first}: {spread:.4f}."]
    for value in values[1:]:
        apart = [losses[value][seed] - losses[first][seed] for seed in seeds]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
        lines.append(f"{value} less {first}: {statistics.fmean(apart):+.4f}, standard error {error:.4f}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("key", choices=["wire_dtype", "momentum_dtype"])
    parser.add_argument("values", nargs="+")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=demo.STEPS)
    parser.add_argument("--out", type=Path, required=True, help="path without ending for .json and .md")
    arguments = parser.parse_args()
    data = arguments.out.with_name(arguments.out.name + ".json")
    known = json.loads(data.read_text()) if data.exists() else {}
    about = {"machine": machine(), "steps": arguments.steps, "tokens": arguments.steps * demo.TOKENS_PER_STEP}
    losses: Losses = known.get("losses", {}) if known.get("tokens") == about["tokens"] else {}
    for seed in range(arguments.seeds):
        for value in arguments.values:
            of_value = losses.setdefault(value, {})
            if str(seed) not in of_value:
                of_value[str(seed)] = loss(arguments.key, value, seed, arguments.steps)
        data.write_text(json.dumps({**about, "losses": losses}))
        text = table(arguments.key, losses, arguments.values, arguments.steps)
        arguments.out.with_name(arguments.out.name + ".md").write_text(text)
        print(text, flush=True)


if __name__ == "__main__":
    main()
