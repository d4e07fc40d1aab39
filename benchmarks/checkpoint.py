"""How long consolidating takes against copying the same bytes to the same disk, and how much memory it needs.

``python benchmarks/checkpoint.py --gigabytes 1 --ranks 2 --stage 3`` makes a stack of linear layers whose fp32
masters, momentum and moments are about that large, then in turn copies the finished set with sync and
consolidates, several times. Prints JSON; ``--out`` keeps it with a table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

WIDTH = 1024


def resident() -> int:
    """Bytes of this process that are its own: what is mapped from files is the page cache's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


class Peak:
    """The largest resident size while it runs, sampled every 5 ms."""

    def __enter__(self) -> Peak:
        self.start = self.peak = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, resident())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, resident())

    @property
    def growth(self) -> int:
        return self.peak - self.start


def copy_synced(source: Path, target: Path) -> None:
    """Copy a folder's files and sync each, as the save does."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def measure(
    rank: int, world_size: int, *, folder: str, stage: int, layers: int, repeats: int, shard_bytes: int
) -> dict[str, Any]:
    import deepspeed
    import torch
    import torch.distributed as dist

    import deepspeed_muon  # noqa: F401 - registers the optimizer
    from deepspeed_muon.checkpoint import consolidate

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(WIDTH, WIDTH), *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1_000_000,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Muon", "params": {}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    # A gradient of zero makes the state without any Newton-Schulz work.
    engine.backward(engine(torch.arange(4).view(1, 4)).mean() * 0.0)
    engine.step()
    for state in engine.basic_optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.normal_()
    base = Path(folder)
    saves, copies, growths, total = [], [], [], 0
    for number in range(repeats + 1):
        target = base / f"set{number}"
        dist.barrier()
        start = time.perf_counter()
        with Peak() as peak:
            consolidate(engine, target, shard_bytes=shard_bytes)
        dist.barrier()
        saves.append(time.perf_counter() - start)
        growths.append(peak.growth)
        if rank == 0:
            total = sum(path.stat().st_size for path in target.iterdir())
            start = time.perf_counter()
            copy_synced(target, base / "copy")
            copies.append(time.perf_counter() - start)
            shutil.rmtree(base / "copy")
            shutil.rmtree(target)
        dist.barrier()
    engine.destroy()
    # The first round warms the disk. Memory that the allocator kept from it would hide what later ones need.
    return {"save_s": saves[1:], "copy_s": copies[1:], "peak_growth_bytes": growths, "bytes": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shard-mb", type=int, default=128)
    parser.add_argument(
        "--dir", help="a folder on the disk to measure; the system's temporary one by default"
    )
    parser.add_argument("--out", help="path without ending for .json and .md")
    arguments = parser.parse_args()
    from benchmarks.optimizer_step import machine
    from tests.support.harness import run_ranks

    # Masters and momentum of each layer, 4 bytes each; the embedding has two moments.
    layers = max(1, round(arguments.gigabytes * 1e9 / (8 * WIDTH * WIDTH)) - 1)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        settings = {
            "folder": folder,
            "stage": arguments.stage,
            "layers": layers,
            "repeats": arguments.repeats,
            "shard_bytes": arguments.shard_mb << 20,
        }
        reports = run_ranks("benchmarks.checkpoint:measure", arguments.ranks, settings, timeout=900)
    first = reports[0]
    save, copy = statistics.median(first["save_s"]), statistics.median(first["copy_s"])
    growth = max(max(report["peak_growth_bytes"]) for report in reports)
    result = {
        "command": " ".join(["python", "benchmarks/checkpoint.py", *sys.argv[1:]]),
        "machine": {
            "cpu": machine()["name"],
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
        },
        "bytes": first["bytes"],
        "stage": arguments.stage,
        "ranks": arguments.ranks,
        "shard_bytes": arguments.shard_mb << 20,
        "save_s": first["save_s"],
        "copy_s": first["copy_s"],
        "save_over_copy": save / copy,
        "peak_growth_bytes_of_a_rank": growth,
        "allowed_growth_bytes": (arguments.shard_mb << 20) + 300 * 10**6,
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        Path(arguments.out + ".json").write_text(json.dumps(result, indent=1) + "\n")
        Path(arguments.out + ".md").write_text(_table(result, save, copy))


def _table(result: dict[str, Any], save: float, copy: float) -> str:
    machine = result["machine"]
    spread = lambda values: f"{min(values):.2f} to {max(values):.2f}"  # noqa: E731
    return f"""# Consolidating a checkpoint

`{result["command"]}`

{machine["cpu"]}, {machine["cores"]} cores, Linux {machine["kernel"]}; {result["bytes"] / 1e9:.2f} GB,
stage {result["stage"]}, {result["ranks"]} ranks, files of {result["shard_bytes"] >> 20} MiB,
{len(result["save_s"])} times in turn.

| | median | range |
|---|---|---|
| copying the same files with sync, s | {copy:.2f} | {spread(result["copy_s"])} |
| consolidating with sync and checksums, s | {save:.2f} | {spread(result["save_s"])} |
| ratio (2 allowed) | {result["save_over_copy"]:.2f} | |
| growth of a rank's memory, MB (shard + 300 = {result["allowed_growth_bytes"] / 1e6:.0f} allowed) \
| {result["peak_growth_bytes_of_a_rank"] / 1e6:.0f} | |
"""


if __name__ == "__main__":
    main()
