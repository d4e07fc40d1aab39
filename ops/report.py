"""What this machine can build and run: ``python -m deepspeed_muon report``, as ``ds_report`` is for DeepSpeed."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import torch

from . import library, toolchain
from .candidates import has_kernel
from .gate import cached_verdict
from .machine import cache_folder, hardware_name, installed_version


def collect() -> dict[str, dict[str, Any]]:
    """Return the report as section to name to value; builds nothing, but loads a library that is built."""
    spec = toolchain.machine_spec()
    built, reason = library.built_library(), library.unavailable_reason()
    path, built_spec = built or (None, spec)
    # Without a library load() would build it.
    operators = library.try_load() if built else None
    return {
        "versions": {
            "torch": torch.__version__,
            "CUDA of torch": torch.version.cuda,
            **{name: installed_version(name) for name in ("deepspeed", "deepspeed-muon", "mpi4py")},
            # A module of its own, which pip installs beside the package.
            "DEEPSPEED_MUON=1": "switches this Muon on"
            if importlib.util.find_spec("_deepspeed_muon_switch")
            else None,
        },
        "toolchain": {
            "g++": _version_line(toolchain.cxx_compiler()),
            "nvcc": _version_line(toolchain.find_nvcc(), "release"),
            "ninja": toolchain.find_program("ninja"),
            "MPI": _version_line(toolchain.find_program("mpirun")),
        },
        "build": {
            "folder": str(library.build_folder(spec)),
            "library": None if built is None else str(path),
            "cannot be built": None if built else reason,
            "without CUDA because": None if built_spec.with_cuda else toolchain.cuda_reason(),
            "architectures": list(toolchain.architectures(built_spec)),
        },
        "ops": {
            name: [device for device in ("cpu", "cuda") if has_kernel(operators, device, name)]
            for name in library.NAMES
        },
        "hardware": {
            "processor": hardware_name(),
            **_gpu(operators),
            "measured choices": str(cache_folder()),
        },
    }


def render(sections: dict[str, dict[str, Any]], checks: list[dict[str, Any]] | None = None) -> str:
    """Return the result of :func:`collect` as text, with that of :func:`.checks.self_test` if it was run."""
    lines = ["deepspeed_muon report"]
    for title, values in sections.items():
        lines += ["", title]
        for name, value in values.items():
            shown = ", ".join(value) if isinstance(value, list) else value
            lines.append(f"  {name:<22} {shown or '-'}")
    lines += ["", "sm90: kernels with wgmma and TMA; sm80: with mma.sync"]
    if checks is not None:
        lines += ["", "self-test"]
        for check in checks:
            verdict = "ok" if check["ok"] else "FAILED"
            lines.append(
                f"  {verdict:<6} {check['device']:<5} {check['op']:<44} error {check['error']:.1e}"
                f"  (bound {check['bound']:.0e})"
            )
    return "\n".join(lines)


def _gpu(operators: ModuleType | None) -> dict[str, Any]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not names:
        return {"gpus": names}
    kernels = {}
    if has_kernel(operators, "cuda", "sym_gemm"):
        assert operators is not None
        kernels["sym_gemm"] = operators.sym_gemm_kernel(0)
        kernels["flat passes"] = operators.flat_passes_missing(0) or "ops"
    verdict = cached_verdict(0)  # a report starts no self-test
    tested = "not run yet"
    if verdict is not None:
        tested = f"failed, so torch's code runs instead: {verdict.why}" if verdict.failed else "passed"
    return {"gpus": names, **kernels, "tested before first use": tested}


def _version_line(program: str | None, word: str = "") -> str | None:
    """Return the first line of ``program --version`` that contains ``word``, with the program's path."""
    lines = toolchain.version_output(program).splitlines()
    line = next((line for line in lines if line.strip() and word in line), None)
    return line and f"{line.strip()} ({program})"
