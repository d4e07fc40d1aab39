"""How long consolidating takes against copying the same bytes to the same disk.

``python benchmarks/checkpoint.py --gigabytes 1`` makes a stack of linear layers, at ZeRO 3 on two ranks, whose fp32
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from benchmarks import support

WIDTH = 1024
SHARD_MIB = 128


def copy_synced(source: Path, target: Path) -> None:
    """Copy a folder's files and sync each, as the save does."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def measure(rank: int, world_size: int, *, folder: str, layers: int, repeats: int) -> dict[str, list[float]]:
    """Return the bytes of the set, and the seconds of each save and copy."""
    import torch
    import torch.distributed as dist

    from benchmarks.step_ranks import make_engine
    from deepspeed_muon.checkpoint import consolidate

    torch.manual_seed(0)
    linears = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
    model = torch.nn.Sequential(torch.nn.Embedding(WIDTH, WIDTH), *linears)
    engine = make_engine("ours", model, 3, 1, "cpu")
    # A gradient of zero makes the state without any Newton-Schulz work.
    engine.backward(engine(torch.arange(4).view(1, 4)).mean() * 0.0)
    engine.step()
    for state in engine.basic_optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.normal_()
    base = Path(folder)
    found: dict[str, list[float]] = {"bytes": [], "save_s": [], "copy_s": []}
    for number in range(repeats + 1):
        target = base / f"set{number}"
        dist.barrier()
        start = time.perf_counter()
        consolidate(engine, target, shard_bytes=SHARD_MIB << 20)
        dist.barrier()
        saved = time.perf_counter()
        if rank == 0:
            copy_synced(target, base / "copy")
            if number:  # the first round warms the disk
                found["copy_s"].append(time.perf_counter() - saved)
                found["save_s"].append(saved - start)
                found["bytes"].append(sum(path.stat().st_size for path in target.iterdir()))
            shutil.rmtree(base / "copy")
            shutil.rmtree(target)
        dist.barrier()
    engine.destroy()
    return found


def main() -> None:
    """Run from the command line."""
    parser = support.options(__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", help="a folder on the disk to measure (the system's temporary one)")
    arguments = parser.parse_args()
    from tests.support.harness import run_ranks

    # Masters and momentum of each layer, 4 bytes each; the embedding has two moments.
    layers = max(1, round(arguments.gigabytes * 1e9 / (8 * WIDTH * WIDTH)) - 1)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        settings = {"folder": folder, "layers": layers, "repeats": arguments.repeats}
        found = run_ranks("benchmarks.checkpoint:measure", 2, settings, timeout=900)[0]
    rows = [
        (what, f"{statistics.median(times):.2f}", f"{min(times):.2f} to {max(times):.2f}")
        for what, times in (
            ("copying the same files with sync, s", found["copy_s"]),
            ("consolidating with sync and checksums, s", found["save_s"]),
        )
    ]
    ratio = statistics.median(found["save_s"]) / statistics.median(found["copy_s"])
    told = f"{found['bytes'][0] / 1e9:.2f} GB in files of {SHARD_MIB} MiB, {arguments.repeats} times in turn."
    page = support.heading("Consolidating a checkpoint", told)
    page += support.table(["", "median", "range"], [*rows, ("ratio", f"{ratio:.2f}", "")])
    print("\n".join(page))
    support.write(arguments.out, found, page)


if __name__ == "__main__":
    main()
