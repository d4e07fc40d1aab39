"""Which kernels the tests run: those of the rule for this machine, or those that ``TESTS_KERNEL`` forces.

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

KERNEL_VARIABLE = "TESTS_KERNEL"
"""Forces kernels: one of :data:`KERNELS`, or empty for those of the rule, which are ``ops-gram``."""

KERNELS = (
    "ops-standard", "torch-gram", "torch-standard", "no-compiler", "ops-gram-bf16", "ops-standard-bf16",
)  # fmt: skip
"""Flat passes and norms (native or torch's), order of the products and, unless it is fp32, the dtype of the iteration.

With ``no-compiler`` the native library cannot be built, so everything runs as on such a machine.
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
    """Have this process take the forced kernels."""
    kernel = forced_kernel()
    if not kernel:
        return
    from deepspeed_muon.ops import builder, dispatch

    if "standard" in kernel:
        setattr(dispatch.Problem, "order", lambda *_: "standard")  # noqa: B010 - mypy allows no assignment to a method
    if kernel.startswith("torch"):
        dispatch._operators = lambda backend: builder.load() if backend == "ops" else None
    if kernel == "no-compiler":
        builder.unavailable_reason = lambda: "no C++ compiler"
        builder.built_library = lambda: None


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
