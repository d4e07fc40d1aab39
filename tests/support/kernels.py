"""Which kernels the tests run: the expected ones of this machine, or those that ``TESTS_KERNEL`` forces.

``python -m tests.support.kernels`` runs the tests marked ``kernels`` with each kernel and each arithmetic of other
machines in turn; with arguments with those settings only, such as ``torch-gram,ATEN_CPU_CAPABILITY=default``.

No module of torch or of this package is imported before a function needs it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

EXPECTED_KERNELS_VARIABLE = "TESTS_EXPECTED_KERNELS"
"""Set if a process does not choose its kernels by measuring them; tests/conftest.py sets it, benchmarks do not."""

KERNEL_VARIABLE = "TESTS_KERNEL"
"""Forces a kernel: one of :data:`KERNELS`, or empty for the expected ones."""

KERNELS = (
    "ops-gram", "ops-standard", "torch-gram", "torch-standard", "no-compiler",
    "ops-gram-bf16", "ops-standard-bf16", "torch-gram-bf16", "torch-standard-bf16",
)  # fmt: skip
"""Library, order of the products and, unless it is fp32, the dtype of the iteration.

``torch`` has torch's flat passes and norms too. With ``no-compiler`` the native library cannot be built, so everything
runs as on such a machine.
"""

MACHINES = ("ATEN_CPU_CAPABILITY=default", "ATEN_CPU_CAPABILITY=avx2", "MKL_CBWR=COMPATIBLE")
"""Variables by which torch and MKL round as on processors without AVX512, or without fused multiply-adds."""


def forced_kernel() -> str:
    """Return the forced kernel, or an empty text.

    Raises:
        ValueError: If the variable has another value.
    """
    kernel = os.environ.get(KERNEL_VARIABLE, "")
    if kernel and kernel not in KERNELS:
        raise ValueError(f"{KERNEL_VARIABLE}={kernel!r} is none of {KERNELS}")
    return kernel


def forced_dtype() -> str:
    """Return the ``ns_dtype`` that the tests set: fp32 unless another one is forced."""
    return "bf16" if forced_kernel().endswith("bf16") else "fp32"


def take_kernels() -> None:
    """Have this process take the forced kernels, or those that are expected to be fastest, without measuring any."""
    kernel = forced_kernel()
    if not kernel and not os.environ.get(EXPECTED_KERNELS_VARIABLE):
        return
    from deepspeed_muon.ops import dispatch, library, toolchain
    from deepspeed_muon.ops.autotune import Choice, Tuner

    wanted = kernel.removesuffix("-bf16").replace("-", " ")

    def choose(_: Tuner, key: str, problem: Any, candidates: Sequence[Any], device: Any) -> Choice:
        names = [candidate.name for candidate in candidates]
        # Torch's code has no Gram order for matrices that are nearly square.
        fitting = [name for name in names if wanted and name.startswith(wanted)]
        return Choice((fitting or names)[0], "forced" if kernel else "expected")

    setattr(Tuner, "_decide", choose)  # noqa: B010 - mypy allows no assignment to a method
    if kernel.endswith("bf16"):
        dispatch.in_fp32 = lambda problem: None  # small matrices too
    if wanted.startswith("torch"):
        dispatch._operators = lambda backend: library.load() if backend == "ops" else None
    if kernel == "no-compiler":
        toolchain.cxx_compiler = lambda: None
        library.built_library = lambda: None


def main(settings: Sequence[str]) -> int:
    """Run the core with each setting; return the exit status."""
    failed = []
    for setting in settings or (*KERNELS, *MACHINES):
        print(f"\n==== {setting}", flush=True)
        variables = dict(
            assignment.split("=", 1) if "=" in assignment else (KERNEL_VARIABLE, assignment)
            for assignment in setting.split(",")
        )
        command = [sys.executable, "-m", "pytest", "-q", "-m", "kernels and not full"]
        command += shlex.split(os.environ.get("PYTEST_ARGS", ""))
        if subprocess.run(command, env={**os.environ, **variables}, check=False).returncode:
            failed.append(setting)
    print(f"\nfailed with {', '.join(failed)}" if failed else "\npassed with all settings")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
