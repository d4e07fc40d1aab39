"""Seconds and memory of saving and loading a consolidated set, in turn with another commit.

``python benchmarks/checkpoint.py --layers 119 --width 1024 --beside ../base`` makes a stack of linear layers, at ZeRO 3
on two ranks, whose fp32 masters, momentum and moments are 1 GB. In each turn new ranks with the package of this
checkout, and then with that of the other, consolidate, copy the finished set with sync, and restore it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from benchmarks import support

SHARD_MIB = 128
REPEATS = 3


def copy_synced(source: Path, target: Path) -> None:
    """Copy a folder's files and sync each, as the save does."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def measure(
    rank: int, world_size: int, *, tree: str, folder: str, layers: int, width: int
) -> list[dict[str, float]]:
    """Return for each repeat the bytes of the set, and seconds and growth of this rank's memory of each act."""
    sys.path.insert(0, tree)
    import deepspeed
    import torch
    import torch.distributed as dist

    from deepspeed_muon.checkpoint import consolidate, restore

    assert consolidate.__code__.co_filename.startswith(tree)
    torch.manual_seed(0)
    linears = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
    model = torch.nn.Sequential(torch.nn.Embedding(width, width), *linears)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Muon", "params": {"lr": 0.0}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    # A gradient of zero makes the state without any Newton-Schulz work.
    engine.backward(engine(torch.arange(4).view(1, 4)).mean() * 0.0)
    engine.step()
    for state in engine.basic_optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.normal_()
    target, copied = Path(folder, "set"), Path(folder, "copy")
    acts: dict[str, Callable[[], object]] = {
        "save": lambda: consolidate(engine, target, shard_bytes=SHARD_MIB << 20),
        "copy": lambda: rank or copy_synced(target, copied),
        "load": lambda: restore(engine, target),
    }
    rows = []
    for _ in range(REPEATS + 1):
        row: dict[str, float] = {}
        for name, act in acts.items():
            dist.barrier()
            support.reset_peak("cpu")
            before, start = support.memory_of("cpu")[0], time.perf_counter()
            act()
            dist.barrier()
            row[f"{name}_s"] = time.perf_counter() - start
            row[f"{name}_mb"] = (support.memory_of("cpu")[1] - before) / 1e6
        row["bytes"] = sum(path.stat().st_size for path in target.iterdir())
        rows.append(row)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(target)
            shutil.rmtree(copied)
    engine.destroy()
    return rows[1:]  # the first round warms the disk


def main() -> None:
    """Run from the command line."""
    parser = support.options(__doc__)
    parser.add_argument("--layers", type=int, default=119)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=2, help=f"each with {REPEATS} saves and loads")
    parser.add_argument("--dir", help="a folder on the disk to measure (the system's temporary one)")
    parser.add_argument("--beside", type=Path, help="a checkout of another commit")
    arguments = parser.parse_args()
    from tests.support.harness import run_ranks

    trees = [support.REPOSITORY, *filter(None, [arguments.beside])]
    revisions = {support.revision(tree): str(tree.resolve()) for tree in trees}
    rows: list[support.Row] = []
    for revision in itertools.chain.from_iterable(support.turns(list(revisions), arguments.turns)):
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            settings = {"layers": arguments.layers, "width": arguments.width, "folder": folder}
            settings["tree"] = revisions[revision]
            # With a variable of their own, ranks are new interpreters, which have imported no package.
            by_rank = run_ranks(
                "benchmarks.checkpoint:measure", 2, settings, timeout=3600, env={"MEASURED": revision}
            )
        # The slower rank counts, and the one with more memory.
        rows += [
            {"revision": revision} | {key: max(row[key] for row in ranks) for key in ranks[0]}
            for ranks in zip(*by_rank, strict=True)
        ]
    table: list[support.Row] = []
    for revision, act in itertools.product(revisions, ("save", "copy", "load")):
        times, growth = (
            [row[f"{act}_{unit}"] for row in rows if row["revision"] == revision] for unit in ("s", "mb")
        )
        seconds = {"median, s": statistics.median(times), "from": min(times), "to": max(times)}
        table.append({"revision": revision, "": act, **seconds, "memory, MB": max(growth)})
    sizes = f"{arguments.layers + 1} parameters, {rows[0]['bytes'] / 1e9:.2f} GB in files of {SHARD_MIB} MiB, 2 ranks."
    page = support.heading("Saving and loading a consolidated set", sizes) + support.table_of(table)
    print("\n".join(page))
    support.write(arguments.out, {"rows": rows}, page)


if __name__ == "__main__":
    main()
