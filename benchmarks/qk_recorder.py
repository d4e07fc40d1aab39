"""What recording attention logits for QK-clip adds to causal attention, forward and backward.

    python benchmarks/qk_recorder.py [--out benchmarks/results/qk_recorder.md]

Medians over interleaved rounds of one attention layer with and without a recorder.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from deepspeed_muon import QkRecorder
from deepspeed_muon.ops.machine import hardware_name

SHAPES = [(1, 16, 4, 1024, 64), (1, 16, 16, 2048, 64), (4, 32, 8, 4096, 128)]
"""Batch, query heads, key heads, positions, width."""


def layer(shape: tuple[int, ...], device: torch.device, recorder: QkRecorder | None) -> Callable[[], None]:
    """Return one forward and backward pass of attention."""
    batch, heads, key_heads, positions, width = shape
    torch.manual_seed(0)
    sizes = ((batch, count, positions, width) for count in (heads, key_heads, key_heads))
    q, k, v = (torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_() for size in sizes)

    def run() -> None:
        if recorder is not None:
            recorder.record(q, k, scale=width**-0.5)
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()

    return run


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """Time one call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = SHAPES if device.type == "cuda" else SHAPES[:2]
    name = torch.cuda.get_device_name() if device.type == "cuda" else hardware_name()
    lines = [
        f"# Recording attention logits: {name}, {torch.get_num_threads()} threads",
        "",
        f"Causal attention in bf16, forward and backward, median of {arguments.rounds} interleaved rounds.",
        "",
        "| batch x heads (key heads) x positions x width | attention, ms | logits computed | logits bounded |",
        "|---|---|---|---|",
    ]
    for shape in shapes:
        runs = [layer(shape, device, None)]
        for exact in (True, False):
            recorder = QkRecorder.separate(heads=shape[1], key_heads=shape[2], head_dim=shape[4])
            recorder.exact = exact
            runs.append(layer(shape, device, recorder))
        for run in runs:
            run()
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(arguments.rounds):
            for number, run in enumerate(runs):
                times[number].append(seconds(run, device))
        plain, computed, bounded = (1000 * statistics.median(each) for each in times)
        batch, heads, key_heads, positions, width = shape
        what = f"{batch} x {heads} ({key_heads}) x {positions} x {width}"
        lines.append(f"| {what} | {plain:.1f} | {computed / plain - 1:+.0%} | {bounded / plain - 1:+.0%} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
