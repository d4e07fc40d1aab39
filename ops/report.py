"""What this machine can build and run: ``python -m deepspeed_muon report``, as ``ds_report`` is for DeepSpeed."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from importlib import metadata
from typing import Any

import torch

from . import library, self_test, toolchain
from .dispatch import OTHER_RULES, RULE


def collect() -> dict[str, dict[str, Any]]:
    """Return the report as section to name to value; builds nothing, but loads a library that is built."""
    spec = toolchain.machine_spec()
    built, reason = library.built_library(), library.unavailable_reason()
    path, built_spec = built or (None, spec)
    # Without a library load() would build it.
    operators = library.try_load() if built else None
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    on_hopper = bool(gpus) and library.has_kernel(operators, "cuda", "sym_gemm")
    return {
        "versions": {
            "torch": torch.__version__,
            "CUDA of torch": torch.version.cuda,
            **{name: _version(name) for name in ("triton", "deepspeed", "deepspeed-muon", "mpi4py")},
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
            name: [device for device in ("cpu", "cuda") if library.has_kernel(operators, device, name)]
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


def _version_line(program: str | None, word: str = "") -> str | None:
    """Return the first line of ``program --version`` that contains ``word``, with the program's path."""
    lines = toolchain.version_output(program).splitlines()
    line = next((line for line in lines if line.strip() and word in line), None)
    return line and f"{line.strip()} ({program})"
