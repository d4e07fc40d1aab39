"""How long consolidating takes against copying the same bytes to the same disk.

``python benchmarks/checkpoint.py --gigabytes 1 --ranks 2 --stage 3`` makes a stack of linear layers whose fp32
masters, momentum and moments are about that large, then in turn copies the finished set with sync and
consolidates, several times.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from benchmarks import support

WIDTH = 1024


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
    saves, copies, total = [], [], 0
    for number in range(repeats + 1):
        target = base / f"set{number}"
        dist.barrier()
        start = time.perf_counter()
        consolidate(engine, target, shard_bytes=shard_bytes)
        dist.barrier()
        saves.append(time.perf_counter() - start)
        if rank == 0:
            total = sum(path.stat().st_size for path in target.iterdir())
            start = time.perf_counter()
            copy_synced(target, base / "copy")
            copies.append(time.perf_counter() - start)
            shutil.rmtree(base / "copy")
            shutil.rmtree(target)
        dist.barrier()
    engine.destroy()
    return {"bytes": total, "save_s": saves[1:], "copy_s": copies[1:]}  # the first round warms the disk


def main() -> None:
    parser = support.options(__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shard-mb", type=int, default=128)
    parser.add_argument(
        "--dir", help="a folder on the disk to measure; the system's temporary one by default"
    )
    arguments = parser.parse_args()
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
        found = run_ranks("benchmarks.checkpoint:measure", arguments.ranks, settings, timeout=900)[0]
    used = support.machine()
    save, copy = found["save_s"], found["copy_s"]
    page = [
        "# Consolidating a checkpoint",
        "",
        f"`python {' '.join(sys.argv)}`: {used['name']}, {used['cores']} cores; {found['bytes'] / 1e9:.2f} GB,",
        f"stage {arguments.stage}, {arguments.ranks} ranks, files of {arguments.shard_mb} MiB, "
        f"{len(save)} times in turn.",
        "",
        *support.table(
            ["", "median", "range"],
            [
                ("copying the same files with sync, s", *_spread(copy)),
                ("consolidating with sync and checksums, s", *_spread(save)),
                ("ratio", f"{statistics.median(save) / statistics.median(copy):.2f}", ""),
            ],
        ),
    ]
    print("\n".join(page))
    support.write(arguments.out, {"machine": used, "arguments": sys.argv, **found}, page)


def _spread(values: list[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"


if __name__ == "__main__":
    main()
