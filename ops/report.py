"""What this machine can build and run: ``python -m deepspeed_muon report``, as ``ds_report`` is for DeepSpeed."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from importlib import metadata
from typing import Any

import torch

from . import builder, self_test
from .dispatch import OTHER_RULES, RULE


def collect() -> dict[str, dict[str, Any]]:
    """Return the report as section to name to value; builds nothing, but loads a library that is built."""
    built, without_cuda = builder.built_library(), builder.cuda_reason()
    # Without a library load() would build it.
    operators = builder.try_load() if built else None
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    on_hopper = bool(gpus) and builder.has_kernel(operators, "cuda", "sym_gemm")
    return {
        "versions": {
            "torch": torch.__version__,
            "CUDA of torch": torch.version.cuda,
            **{name: _version(name) for name in ("triton", "deepspeed", "deepspeed-muon", "mpi4py")},
        },
        "toolchain": {
            "g++": shutil.which(os.environ.get("CXX", "c++")),
            "nvcc": builder.find_nvcc(),
            "ninja": shutil.which("ninja", path=builder.search_path()),
            "MPI": shutil.which("mpirun", path=builder.search_path()),
        },
        "build": {
            "folder": str(builder.library_path(with_cuda=without_cuda is None).parent),
            "library": None if built is None else str(built),
            "cannot be built": None if built else builder.unavailable_reason(),
            "without CUDA because": without_cuda,
            "architectures": [flag.rpartition("=")[2] for flag in builder.nvcc_flags() if "gencode" in flag],
        },
        "ops": {
            name: [device for device in ("cpu", "cuda") if builder.has_kernel(operators, device, name)]
            for names in self_test.TESTS.values()
            for name in names
        },
        "hardware": {
            "processor": torch.backends.cpu.get_cpu_capability()
            + (", AMX" if torch.cpu._is_amx_tile_supported() else ""),
            "gpus": gpus,
            **({"sym_gemm": operators.sym_gemm_kernel(0)} if on_hopper and operators else {}),
        },
        "kernels, the first row that fits": {
            f"{number}. {row.kernels}": f"{row.problems} ({row.times})" for number, row in enumerate(RULE, 1)
        },
        "also": {name: text for name, _, text in (rule.partition(": ") for rule in OTHER_RULES)},
    }


def render(sections: dict[str, dict[str, Any]], checks: list[dict[str, Any]] | None = None) -> str:
    """Return the result of :func:`collect` as text, with that of :func:`.self_test.checks` if it was run."""
    lines = ["deepspeed_muon report"]
    for title, values in sections.items():
        lines += ["", title]
        for name, value in values.items():
            shown = ", ".join(value) if isinstance(value, list) else value
            lines.append(f"  {name:<22} {shown or '-'}")
    if checks is not None:
        lines += ["", "self-test"]
        for check in checks:
            verdict = "ok" if check["ok"] else "FAILED"
            lines.append(
                f"  {verdict:<6} {check['device']:<5} {check['op']:<44} error {check['error']:.1e}"
                f"  (bound {check['bound']:.0e})"
            )
    return "\n".join(lines)


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):  # a source tree on sys.path is not installed
        return metadata.version(package)
    return None
