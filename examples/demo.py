"""AdamW against Muon on the same model, text and tokens: ``make demo``, or ``python examples/demo.py``.

Two trainings of ``train_gpt.py`` on two processes, one after the other, each through the ``deepspeed``
launcher; at the end a table of losses and a PNG of the curves. The learning rates are the best of
``benchmarks/demo_sweep.py`` for each optimizer.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "ds_configs" / "zero2.json"
SHM = Path("/dev/shm")

RANKS = 2
STEPS = 300
# 0.85M parameters, 4096 tokens a step: two trainings and the start-up fit into five minutes on two CPU cores.
MODEL = {"dim": 128, "layers": 4, "heads": 4, "seq_len": 128, "batch_size": 16, "schedule": "cosine"}
RATES = {"AdamW": {"lr": 0.003}, "Muon": {"muon_lr": 0.04, "adam_lr": 0.008}}
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
) -> float:
    """Runs one training, its metrics in ``folder``; returns its seconds.

    Raises:
        RunFailed: it ended with an error, or did not end within ``TIMEOUT_S``.
    """
    options = {**MODEL, **rates, "steps": steps, "optimizer": optimizer, "eval_every": max(1, steps // 10)}
    port = free_port()
    options |= {"metrics_dir": folder.parent, "run_name": folder.name, "deepspeed_config": config}
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS)]
    command += ["--master_port", str(port), str(HERE / "train_gpt.py")]
    command += [word for key, value in options.items() for word in (f"--{key}", str(value))]

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


def print_table(curves: dict[str, dict[str, list[tuple[int, float]]]], seconds: dict[str, float]) -> None:
    """Prints the validation losses of both runs side by side."""
    validation = {name: dict(curve["val"]) for name, curve in curves.items()}
    header = f"{'step':>6} | {'tokens':>9} | " + " | ".join(
        f"{name + ' val loss':>15}" for name in validation
    )
    print(f"\n{header}\n" + "-" * len(header))
    tokens_per_step = RANKS * MODEL["batch_size"] * MODEL["seq_len"]
    for step in sorted(set.intersection(*(set(values) for values in validation.values()))):
        values = " | ".join(f"{values[step]:15.4f}" for values in validation.values())
        print(f"{step:6d} | {step * tokens_per_step:9,d} | {values}")
    print(f"{'time':>6} | {'':9} | " + " | ".join(f"{seconds[name]:13.0f} s" for name in validation))


def plot(curves: dict[str, dict[str, list[tuple[int, float]]]], path: Path) -> None:
    """Draws training (thin) and validation (dots) losses of both runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for (name, curve), colour in zip(curves.items(), ("tab:orange", "tab:blue"), strict=True):
        axes.plot(*zip(*curve["train"], strict=True), color=colour, alpha=0.4, label=f"{name}, training")
        axes.plot(*zip(*curve["val"], strict=True), "o-", color=colour, label=f"{name}, validation")
    # The first steps fall from ln(256) = 5.5; leaving them out shows where the two differ.
    top = max(curve["val"][0][1] for curve in curves.values())
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(None, top * 1.1))
    axes.set_title(f"Python's standard library, {RANKS} ranks, {CONFIG.stem}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    """Trains with both optimizers and shows the outcome."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / "runs" / "demo", help="for metrics and PNG")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()

    curves, seconds = {}, {}
    for optimizer, rates in RATES.items():
        folder = args.out / optimizer.lower()
        print(
            f"\n=== {optimizer}: " + ", ".join(f"{key} {rate:g}" for key, rate in rates.items()), flush=True
        )
        seconds[optimizer] = train(optimizer, rates, args.steps, folder, args.out / "torch_extensions")
        curves[optimizer] = {kind: read_curve(folder / f"{kind}_loss.csv") for kind in ("train", "val")}
    print_table(curves, seconds)
    plot(curves, args.out / "loss.png")
    adamw, muon = (curves[name]["val"][-1][1] for name in ("AdamW", "Muon"))
    ahead = "Muon is ahead" if muon < adamw else "AdamW is ahead"
    print(f"\n{ahead}: validation loss {muon:.4f} with Muon, {adamw:.4f} with AdamW, after the same tokens.")
    print(f"Curves: {args.out / 'loss.png'}")


if __name__ == "__main__":
    # A polite kill must end the training too: as an exception it passes through train()'s clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    try:
        main()
    except RunFailed as error:
        sys.exit(f"demo: {error}")
