"""AdamW, DeepSpeed's Muon and this one on the same model, text and tokens: ``make demo``.

Runs four trainings of ``train_gpt.py`` on two ranks, one after the other, through the ``deepspeed`` launcher: the three
optimizers at ZeRO 2, and this one at ZeRO 3. The last one is saved, consolidated, and restored on one rank at ZeRO 1,
where it must have the same validation loss. At the end it prints a table of losses, times, bytes and memory, and draws
the curves into a PNG. Each optimizer has its best learning rates of ``benchmarks/study.py``, which trains with more
seeds. ``--dataset FILE`` trains on your own text.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent / "ds_configs"
CONFIG = CONFIGS / "zero2.json"
SHM = Path("/dev/shm")

RANKS = 2
STEPS = 120
# 0.85M parameters, 2048 tokens a step: all trainings and their starts fit into minutes on two CPU cores.
MODEL = {"dim": 128, "layers": 4, "heads": 4, "seq_len": 128, "batch_size": 8, "schedule": "cosine"}
RATES = {
    "AdamW": {"lr": 0.004},
    # It clips the update, so its rate is larger; decay is multiplied by the rate.
    "DeepSpeed's Muon": {"muon_lr": 3.0, "adam_lr": 0.008, "weight_decay": 0.001333},
    "Muon": {"muon_lr": 0.04, "adam_lr": 0.032},
}
AT_ZERO_3 = "Muon, ZeRO 3"
COLOURS = {
    "AdamW": "tab:orange",
    "DeepSpeed's Muon": "tab:green",
    "Muon": "tab:blue",
    AT_ZERO_3: "tab:purple",
}
TOKENS_PER_STEP = RANKS * MODEL["batch_size"] * MODEL["seq_len"]
EVAL_BATCHES = 8
"""Validation batches per rank."""
TIMEOUT_S = 900


class RunFailed(RuntimeError):
    """A training ended with an error or did not end in time."""


def environment(extensions: Path) -> dict[str, str]:
    """The environment of a run: DeepSpeed's CPU accelerator where there is no GPU for every rank."""
    env = dict(os.environ, PYTHONWARNINGS="ignore::FutureWarning")
    if torch.cuda.device_count() < RANKS:
        env.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    if "TORCH_EXTENSIONS_DIR" not in env:
        # DeepSpeed compiles its CPU communication here. A build that was killed leaves a lock on which every
        # later run would wait in silence; in a folder of our own such a lock can only be a dead run's.
        env["TORCH_EXTENSIONS_DIR"] = str(extensions)
        for lock in extensions.glob("*/**/lock"):
            lock.unlink()
    return env


def folder_name(optimizer: str) -> str:
    """The name without a sign that a shell would read: "deepspeed-muon"."""
    return optimizer.lower().replace("'s ", "-").replace(", ", "-").replace(" ", "")


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(what: str, ranks: int, words: list[str], extensions: Path) -> float:
    """Runs ``demo_rank.py`` with these words on ``ranks`` ranks; returns the seconds.

    Raises:
        RunFailed: it ended with an error, or did not end within ``TIMEOUT_S``.
    """
    port = free_port()
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
    command += ["--master_port", str(port), str(HERE / "demo_rank.py"), *words]
    started = time.monotonic()
    # A session of its own, so that the launcher and all ranks can be ended together.
    process = subprocess.Popen(command, env=environment(extensions), start_new_session=True)
    try:
        code = process.wait(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{what}: not finished after {TIMEOUT_S} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # DeepSpeed leaves a 66 MB file per rank and run in shared memory, named after user, address and port.
        for buffer in SHM.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"):
            buffer.unlink(missing_ok=True)
    if code:
        raise RunFailed(f"{what}: the launcher ended with code {code}; its output is above")
    return time.monotonic() - started


def as_words(options: dict[str, Any]) -> list[str]:
    """Options as the command line has them."""
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def train(
    optimizer: str,
    rates: dict[str, float],
    steps: int,
    folder: Path,
    extensions: Path,
    *,
    config: Path = CONFIG,
    text: Path | None = None,
    save_dir: Path | None = None,
) -> float:
    """Runs one training, its metrics in ``folder``; returns its seconds.

    ``text`` is a file or a folder to train on; without it the text is Python's standard library. With ``save_dir``
    the training ends with ``engine.save_checkpoint``.

    Raises:
        RunFailed: it ended with an error, or did not end within ``TIMEOUT_S``.
    """
    kind = "AdamW" if optimizer == "AdamW" else "Muon"
    options = {**MODEL, **rates, "steps": steps, "optimizer": kind, "eval_every": max(1, steps // 6)}
    options |= {"data": text} if text else {}
    options |= {"save_dir": save_dir} if save_dir else {}
    options |= {"metrics_dir": folder.parent, "run_name": folder.name, "deepspeed_config": config}
    options |= {"eval_batches": EVAL_BATCHES, "measured": folder / "measured.json"}
    options["peer"] = "deepspeed" if optimizer.startswith("DeepSpeed's") else "ours"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.csv"):
        stale.unlink()  # DeepSpeed's CSV monitor appends
    return launch(optimizer, RANKS, as_words(options), extensions)


def restored_loss(checkpoint: Path, work: Path, extensions: Path, text: Path | None) -> float:
    """The validation loss of a consolidated checkpoint on one rank at ZeRO 1, over the sequences of the training."""
    options = {**MODEL, "deepspeed_config": CONFIGS / "zero1.json", "metrics_dir": "", "peer": "ours"}
    options |= {"data": text} if text else {}
    options |= {"restore": checkpoint, "measured": work / "restored.json"}
    options["eval_batches"] = RANKS * EVAL_BATCHES  # one rank takes the batches of all
    launch("restoring", 1, as_words(options), extensions)
    return json.loads((work / "restored.json").read_text())["validation_loss"]


def move(saved: Path, loss: float, out: Path, extensions: Path, text: Path | None) -> None:
    """Moves the training from two ranks at ZeRO 3 to one rank at ZeRO 1.

    Raises:
        RunFailed: the checkpoint cannot be consolidated or restored, or its validation loss is another.
    """
    consolidated = out / "consolidated"
    arguments = ["checkpoint", "consolidate", str(saved), str(consolidated)]
    print(f"\n=== python -m deepspeed_muon {' '.join(arguments)}", flush=True)
    code = subprocess.run(
        [sys.executable, "-m", "deepspeed_muon", *arguments], env=environment(extensions), check=False
    ).returncode
    if code:
        raise RunFailed(f"consolidating {saved} ended with code {code}; its output is above")
    print("\n=== restored on one rank at ZeRO 1", flush=True)
    restored = restored_loss(consolidated, out, extensions, text)
    print(
        f"\nValidation loss: {loss:.6f} on {RANKS} ranks at ZeRO 3, {restored:.6f} restored on one rank at ZeRO 1."
    )
    # The weights are the same bits; only the sum over the batches has another order.
    if abs(restored - loss) > 1e-5:
        raise RunFailed("the restored model has another validation loss")


def read_curve(path: Path) -> list[tuple[int, float]]:
    """(step, value) pairs of one of DeepSpeed's CSV files; it repeats the header line when a run is resumed."""
    with path.open(newline="") as file:
        return [(int(step), float(value)) for step, value in csv.reader(file) if step != "step"]


class Outcome(NamedTuple):
    """What a training left in its folder."""

    curves: dict[str, list[tuple[int, float]]]
    """Losses by step: "train" and "val"."""
    seconds: float
    """Of the whole run, start included."""
    step_s: float
    """Median seconds of a step."""
    sent_bytes: float
    """What a rank sends in a step."""
    peak_bytes: int


def read(folder: Path, seconds: float, steps: int) -> Outcome:
    """Reads what a training left."""
    curves = {kind: read_curve(folder / f"{kind}_loss.csv") for kind in ("train", "val")}
    rates = [rate for _, rate in read_curve(folder / "train_tokens_per_second.csv")]
    measured = json.loads((folder / "measured.json").read_text())
    step_s = TOKENS_PER_STEP / statistics.median(rates)
    return Outcome(curves, seconds, step_s, measured["sent_bytes"] / steps, measured["peak_bytes"])


def print_table(outcomes: dict[str, Outcome]) -> None:
    """Prints the validation losses side by side, and below what each step cost."""
    validation = {name: dict(outcome.curves["val"]) for name, outcome in outcomes.items()}
    header = f"{'step':>16} | {'tokens':>9} | " + " | ".join(f"{name:>16}" for name in outcomes)
    line = "-" * len(header)
    print(f"\nValidation loss after equal tokens\n{header}\n{line}")
    for step in sorted(set.intersection(*(set(values) for values in validation.values()))):
        values = " | ".join(f"{values[step]:16.4f}" for values in validation.values())
        print(f"{step:16d} | {step * TOKENS_PER_STEP:9,d} | {values}")
    print(line)
    rows = {
        "ms a step": lambda outcome: 1e3 * outcome.step_s,
        "MB sent a step": lambda outcome: outcome.sent_bytes / 1e6,
        "MB memory, peak": lambda outcome: outcome.peak_bytes / 1e6,
        "s in all": lambda outcome: outcome.seconds,
    }
    for name, value in rows.items():
        values = " | ".join(f"{value(outcome):16.1f}" for outcome in outcomes.values())
        print(f"{name:>16} | {'':9} | {values}")


def plot(outcomes: dict[str, Outcome], path: Path, text: str) -> None:
    """Draws training (thin) and validation (dots) losses of all runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, outcome in outcomes.items():
        colour, style = COLOURS[name], "x--" if name == AT_ZERO_3 else "o-"
        axes.plot(*zip(*outcome.curves["train"], strict=True), color=colour, alpha=0.3)
        axes.plot(*zip(*outcome.curves["val"], strict=True), style, color=colour, label=name)
    # The first steps fall from ln(256) = 5.5; leaving them out shows where they differ.
    top = max(outcome.curves["val"][0][1] for outcome in outcomes.values())
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(None, top * 1.1))
    axes.set_title(f"{text}, {RANKS} ranks")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=80, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    """Trains with all optimizers, moves the last training to one rank, and shows the outcome."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / "runs" / "demo", help="for metrics and PNG")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="a text file or a folder of them; default: Python's library",
    )
    args = parser.parse_args()

    outcomes: dict[str, Outcome] = {}
    saved, extensions = args.out / "saved", args.out / "torch_extensions"
    shutil.rmtree(saved, ignore_errors=True)
    for optimizer, rates in {**RATES, AT_ZERO_3: RATES["Muon"]}.items():
        last = {"config": CONFIGS / "zero3.json", "save_dir": saved} if optimizer == AT_ZERO_3 else {}
        folder = args.out / folder_name(optimizer)
        told = ", ".join(f"{key} {rate:g}" for key, rate in rates.items())
        print(f"\n=== {optimizer}: {told}", flush=True)
        seconds = train(optimizer, rates, args.steps, folder, extensions, text=args.dataset, **last)
        outcomes[optimizer] = read(folder, seconds, args.steps)
    move(saved, outcomes[AT_ZERO_3].curves["val"][-1][1], args.out, extensions, args.dataset)
    print_table(outcomes)
    plot(outcomes, args.out / "loss.png", args.dataset.name if args.dataset else "Python's standard library")
    print("\nThis is one seed; benchmarks/results/study.md has mean and deviation of five.")
    print(f"Curves: {args.out / 'loss.png'}")


if __name__ == "__main__":
    # A polite kill must end the training too: as an exception it passes through train()'s clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    try:
        main()
    except RunFailed as error:
        sys.exit(f"demo: {error}")
