"""AdamW, DeepSpeed's Muon and this one on the same model, text and tokens: ``make demo``.

Three trainings of ``train_gpt.py`` on two processes, one after the other, each through the ``deepspeed``
launcher; at the end a table of losses, times, bytes and memory, and a PNG of the curves. The learning rates are the
best of ``benchmarks/demo_sweep.py`` for each optimizer. ``--dataset FILE`` trains on a text of your own.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "ds_configs" / "zero2.json"
SHM = Path("/dev/shm")

RANKS = 2
STEPS = 300
# 0.85M parameters, 4096 tokens a step: three trainings and their starts fit into minutes on two CPU cores.
MODEL = {"dim": 128, "layers": 4, "heads": 4, "seq_len": 128, "batch_size": 16, "schedule": "cosine"}
RATES = {
    "AdamW": {"lr": 0.003},
    # It clips the update, so its rate is larger; decay is multiplied by the rate.
    "DeepSpeed's Muon": {"muon_lr": 3.0, "adam_lr": 0.008, "weight_decay": 0.001333},
    "Muon": {"muon_lr": 0.04, "adam_lr": 0.008},
}
COLOURS = {"AdamW": "tab:orange", "DeepSpeed's Muon": "tab:green", "Muon": "tab:blue"}
TOKENS_PER_STEP = RANKS * MODEL["batch_size"] * MODEL["seq_len"]
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
    return optimizer.lower().replace("'s ", "-")


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(
    optimizer: str,
    rates: dict[str, float],
    steps: int,
    folder: Path,
    extensions: Path,
    *,
    config: Path = CONFIG,
    text: Path | None = None,
) -> float:
    """Runs one training, its metrics in ``folder``; returns its seconds.

    ``text`` is a file or a folder to train on; without it the text is Python's standard library.

    Raises:
        RunFailed: it ended with an error, or did not end within ``TIMEOUT_S``.
    """
    kind, peer = ("Muon", "deepspeed") if optimizer == "DeepSpeed's Muon" else (optimizer, "ours")
    options = {**MODEL, **rates, "steps": steps, "optimizer": kind, "eval_every": max(1, steps // 10)}
    if text is not None:
        options["data"] = text
    port = free_port()
    options |= {"metrics_dir": folder.parent, "run_name": folder.name, "deepspeed_config": config}
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS)]
    command += ["--master_port", str(port), str(HERE / "demo_rank.py")]
    command += ["--measured", str(folder / "measured.json"), "--peer", peer]
    command += [word for key, value in options.items() for word in (f"--{key}", str(value))]

    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.csv"):
        stale.unlink()  # DeepSpeed's CSV monitor appends
    started = time.monotonic()
    # A session of its own, so that the launcher and both ranks can be ended together.
    process = subprocess.Popen(command, env=environment(extensions), start_new_session=True)
    try:
        code = process.wait(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{optimizer}: not finished after {TIMEOUT_S} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # DeepSpeed leaves a 66 MB file per rank and run in shared memory, named after user, address and port.
        for buffer in SHM.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"):
            buffer.unlink(missing_ok=True)
    if code:
        raise RunFailed(f"{optimizer}: the launcher ended with code {code}; its output is above")
    return time.monotonic() - started


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

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, outcome in outcomes.items():
        colour = COLOURS[name]
        axes.plot(*zip(*outcome.curves["train"], strict=True), color=colour, alpha=0.4)
        axes.plot(*zip(*outcome.curves["val"], strict=True), "o-", color=colour, label=name)
    # The first steps fall from ln(256) = 5.5; leaving them out shows where they differ.
    top = max(outcome.curves["val"][0][1] for outcome in outcomes.values())
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(None, top * 1.1))
    axes.set_title(f"{text}, {RANKS} ranks, {CONFIG.stem}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    """Trains with all three optimizers and shows the outcome."""
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
    for optimizer, rates in RATES.items():
        folder = args.out / folder_name(optimizer)
        told = ", ".join(f"{key} {rate:g}" for key, rate in rates.items())
        print(f"\n=== {optimizer}: {told}", flush=True)
        seconds = train(
            optimizer, rates, args.steps, folder, args.out / "torch_extensions", text=args.dataset
        )
        outcomes[optimizer] = read(folder, seconds, args.steps)
    print_table(outcomes)
    plot(outcomes, args.out / "loss.png", args.dataset.name if args.dataset else "Python's standard library")
    last = {name: outcome.curves["val"][-1][1] for name, outcome in outcomes.items()}
    best = min(last, key=lambda name: last[name])
    told = ", ".join(f"{loss:.4f} with {name}" for name, loss in last.items())
    print(f"\nAfter the same tokens {best} is ahead. Validation loss: {told}.")
    print(f"Curves: {args.out / 'loss.png'}")


if __name__ == "__main__":
    # A polite kill must end the training too: as an exception it passes through train()'s clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    try:
        main()
    except RunFailed as error:
        sys.exit(f"demo: {error}")
