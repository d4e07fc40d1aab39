"""Bytes of optimizer state and time of a step, by the dtype of the momentum, and of AdamW's kernels on the CPU.

``python benchmarks/state_memory.py`` makes the example's GPT, takes some steps on random gradients in one process with
``momentum_dtype`` fp32, bf16 and int8 in turn, and times the native AdamW of offloaded partitions beside torch's.
Under ZeRO every rank holds its share of these bytes. Prints a table; ``--out FILE`` keeps it.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1]),
    str(Path(__file__).resolve().parents[1] / "examples"),
]
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402
from gpt import GPT, GPTConfig  # noqa: E402

from deepspeed_muon import Muon  # noqa: E402
from deepspeed_muon.engine.offload import CpuAdam  # noqa: E402
from deepspeed_muon.math.updates import AdamStep, adam_step_  # noqa: E402
from deepspeed_muon.ops import flat_passes  # noqa: E402
from tests.support.training import state_bytes  # noqa: E402

MIB = 1 << 20


def median_ms(function: Callable[[], None], repeats: int) -> float:
    """Return the median time of a call after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def memory(config: GPTConfig) -> list[str]:
    """Return the table of bytes."""
    lines = [
        "| `momentum_dtype` | momentum, MiB | AdamW's moments, MiB | momentum, bytes per element |",
        "|---|---|---|---|",
    ]
    for dtype in ("fp32", "bf16", "int8"):
        model = GPT(config)
        optimizer = Muon(model, momentum_dtype=dtype)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        found = state_bytes(optimizer.state)
        numel = sum(
            torch.Size(route.shape).numel() for route in optimizer.routes if route.algorithm == "muon"
        )
        adam = found["exp_avg"] + found["exp_avg_sq"]
        momentum = found["momentum_buffer"] + found.get("momentum_scale", 0)
        lines.append(f"| {dtype} | {momentum / MIB:.1f} | {adam / MIB:.1f} | {momentum / numel:.3f} |")
    return lines


def passes(numel: int, repeats: int) -> list[str]:
    """Return the table of times of the elementwise passes on a flat partition."""
    lines = ["| pass | ms |", "|---|---|"]
    grad, out = torch.randn(numel), torch.empty(numel, dtype=torch.bfloat16)
    kernel = flat_passes("auto")
    table, rates = torch.tensor([(0, 0, 0, 0, numel, 0)]), torch.tensor([(0.95, 1.0)], dtype=torch.float64)
    codes, scales = torch.zeros(numel, dtype=torch.int8), torch.zeros(-(-numel // 256))
    coded = [codes], [scales], [grad], [out], table, rates, torch.tensor([(0, 0, -1, -1)]), torch.empty(0, 2)
    elapsed = median_ms(functools.partial(kernel.momentum_pack_int8, *coded), repeats)
    lines.append(f"| momentum int8 ({kernel.name}) | {elapsed:.1f} |")
    for name, dtype in (("momentum fp32", torch.float32), ("momentum bf16", torch.bfloat16)):
        buf = torch.zeros(numel, dtype=dtype)
        elapsed = median_ms(
            functools.partial(kernel.momentum_pack, [buf], [grad], [out], table, rates), repeats
        )
        lines.append(f"| {name} ({kernel.name}) | {elapsed:.1f} |")
    settings = AdamStep(1e-3, (0.9, 0.95), 1e-8, 0.1, 3)
    native = CpuAdam(decoupled=True, master=torch.float32, moments=torch.float32)
    adams: dict[str, Callable[..., None]] = {"DeepSpeed's cpu_adam": native, "torch fused": adam_step_}
    for name, adam in adams.items():
        tensors = [[torch.randn(numel)], [grad], [torch.zeros(numel)], [torch.zeros(numel)]]
        elapsed = median_ms(functools.partial(adam, *tensors, settings=settings), repeats)
        lines.append(f"| AdamW, {name} | {elapsed:.1f} |")
    return lines


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--numel", type=int, default=1 << 24)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = GPTConfig(dim=options.dim, layers=options.layers)
    text = [
        f"GPT of the example, dim {options.dim}, {options.layers} layers; passes over {options.numel:,} elements, "
        f"{torch.get_num_threads()} threads, {platform.machine()}, torch {torch.__version__}.",
        "",
        *memory(config),
        "",
        *passes(options.numel, options.repeats),
    ]
    print("\n".join(text))
    if options.out:
        options.out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
