"""Every CUDA kernel once, on one shape, for compute-sanitizer, under which a kernel takes a hundred times as long.

``MUON_CUDA_LIBRARY=... compute-sanitizer --tool memcheck python -m tests.gpu.sanitized --seconds 90`` prints a line for
each kernel, and begins none after that time, so that the sanitizer can print its summary.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from deepspeed_muon.ops.torch_operators import momentum_pack_int8_
from tests.support import cuda_cases as cases
from tests.support.cuda_library import OK, Kernels


def kernels_of(
    kernels: Kernels, device: str = "cuda", *, processors: int = 132
) -> dict[str, Callable[[], None]]:
    """Return a call of each kernel that this GPU can run; it has at most so many multiprocessors, an H200 132."""
    inputs, half = cases.Inputs(device), (torch.float32, torch.bfloat16)
    lengths, offsets = [1, 8, 4099], (3, 7, 5)
    calls: dict[str, Callable[[], None]] = {
        "momentum_pack": lambda: cases.momentum_pack(
            kernels, lengths, offsets, (torch.float32, *half), True, inputs
        ),
        "momentum_pack_int8": lambda: cases.momentum_pack_int8(
            kernels, momentum_pack_int8_, lengths, offsets, half, True, inputs
        ),
        "unpack_apply": lambda: cases.unpack_apply(kernels, lengths, offsets[:2], half, inputs),
        "divide_transposed": lambda: cases.divide_transposed(kernels, (2, 70, 41), 1, half, inputs),
        "squares": lambda: cases.squares(kernels, 2, 4099, 5, 3, torch.bfloat16, inputs),
    }
    if kernels.available() == OK:
        # Matrices of six tiles, together more than two for each multiprocessor. So the blocks compete for the counter,
        # and some take three tiles: both consumers work, and the first one uses its staging buffer again. Three blocks
        # of k are quick, and with the second tile of a block the ring of five stages begins anew.
        shape = (processors // 3 + 2, 264, 136)
        calls["sym_gemm"] = lambda: cases.sym_gemm(kernels, shape, torch.float16, inputs)
    return calls


def main() -> None:
    """Run them one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0)
    arguments = parser.parse_args()
    started = time.monotonic()
    for name, call in kernels_of(Kernels(Path(os.environ["MUON_CUDA_LIBRARY"]))).items():
        if time.monotonic() - started > arguments.seconds:
            raise SystemExit(f"no time left for {name} and what follows")
        call()
        print(f"ran {name} after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
