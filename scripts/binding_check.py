"""What ``scripts/binding_check.sh`` runs: build the library with CUDA, load it, and say what it holds."""

from __future__ import annotations

import subprocess
import time

import torch

from deepspeed_muon.ops import library, toolchain
from deepspeed_muon.ops.checks import self_test


def main() -> int:
    spec = toolchain.machine_spec()
    nvcc = subprocess.run([str(toolchain.find_nvcc()), "--version"], capture_output=True, text=True).stdout
    print(f"torch {torch.__version__}; {nvcc.strip().splitlines()[-1]}")
    print("architectures:", *(flag.rpartition("=")[2] for flag in spec.nvcc_flags if "gencode" in flag))
    if not spec.with_cuda:
        print("FAILED: no build with CUDA:", toolchain.cuda_reason())
        return 1
    started = time.perf_counter()
    operators = library.load()
    print(f"built and loaded in {time.perf_counter() - started:.0f} s")
    missing = []
    for name in library.NAMES:
        found = [
            key
            for key in ("CPU", "CUDA")
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"deepspeed_muon::{name}", key)
        ]
        # On a GPU these are torch's, which has one kernel for each.
        by_torch = name in ("frobenius_norms", "largest_magnitudes")
        missing += [name] if "CUDA" not in found and not by_torch else []
        print(f"  {name:<18} {', '.join(found)}")
    print("  without a GPU: sym_gemm_kernel() is", repr(operators.sym_gemm_kernel()))
    wrong = [check["op"] for check in self_test() if not check["ok"]]
    print("self-test on the CPU:", "failed: " + ", ".join(wrong) if wrong else "passed")
    print(
        "FAILED: no CUDA kernel for " + ", ".join(missing) if missing else "all operators have CUDA kernels"
    )
    return int(bool(missing or wrong))


if __name__ == "__main__":
    raise SystemExit(main())
