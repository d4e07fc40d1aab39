"""What this machine can build and run: ``python -m deepspeed_muon report``, the twin of DeepSpeed's ``ds_report``."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepspeed_muon.errors import OpsUnavailableError

from . import library, toolchain
from .candidates import has_kernel
from .gate import known_verdict
from .machine import cache_folder, hardware_name


def collect() -> dict[str, Any]:
    """Return everything that the report shows; builds nothing."""
    spec = library.spec()
    ahead, reason = library.prebuilt_path(spec), library.unavailable_reason()
    built = library.built_path(spec) is not None
    operators = _loaded(built)
    return {
        "versions": _versions(),
        "hardware": hardware_name(),
        "toolchain": {
            "g++": _first_line(toolchain.cxx_compiler(), "--version"),
            "nvcc": _last_release(toolchain.find_nvcc()),
            "ninja": toolchain.find_program("ninja"),
        },
        "build": {
            "folder": str(library.build_folder(spec)),
            "ahead_of_time": None if ahead is None else str(ahead),
            "built": built,
            "cannot_be_built": None if built else reason,
            "with_cuda": spec.with_cuda,
            "without_cuda_because": toolchain.cuda_reason(torch),
            "architectures": list(toolchain.architectures(spec)),
        },
        "ops": _ops(operators, compatible=built or reason is None),
        "gpu": _gpu(operators),
        "choices": str(cache_folder()),
    }


def render(found: dict[str, Any], checks: list[dict[str, Any]] | None = None) -> str:
    """Return the result of :func:`collect`, and of :func:`self_test` if it was run, as text."""
    lines = ["deepspeed_muon report", ""]
    lines += _section("versions", found["versions"])
    lines += [f"hardware: {found['hardware']}", ""]
    lines += _section("toolchain", found["toolchain"])
    build = dict(found["build"])
    build["architectures"] = ", ".join(build["architectures"]) or "none"
    lines += _section("build", {name.replace("_", " "): value for name, value in build.items()})
    lines += ["op                 built  can be built  devices"]
    for op in found["ops"]:
        devices = ", ".join(op["devices"]) or "-"
        lines.append(f"{op['name']:<18} {_yes(op['built']):<6} {_yes(op['compatible']):<13} {devices}")
    lines += ["", "CUDA kernels (sm90: wgmma and TMA; sm80: mma.sync)"]
    lines += [f"  {name:<24} {state}" for name, state in found["gpu"]["kernels"].items()]
    lines += [f"  tested before the first use: {found['gpu']['self_test']}"]
    lines += ["", f"remembered choices: {found['choices']}"]
    if checks is not None:
        lines += ["", "self-test"]
        for check in checks:
            verdict = "ok" if check["ok"] else "FAILED"
            lines.append(
                f"  {verdict:<6} {check['device']:<5} {check['op']:<44} error {check['error']:.1e}"
                f"  (bound {check['bound']:.0e})"
            )
    return "\n".join(lines)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"torch": torch.__version__, "CUDA of torch": torch.version.cuda}
    for label, name in (
        ("deepspeed", "deepspeed"),
        ("deepspeed_muon", "deepspeed-muon"),
        ("mpi4py", "mpi4py"),
    ):
        try:
            versions[label] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[label] = None
    installed = importlib.util.find_spec("_deepspeed_muon_switch") is not None
    versions["DEEPSPEED_MUON=1"] = "switches this Muon on" if installed else None
    versions["MPI"] = _first_line(toolchain.find_program("mpirun"), "--version")
    return versions


def _ops(operators: Any | None, *, compatible: bool) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "built": operators is not None,
            "compatible": compatible,
            "devices": [device for device in ("cpu", "cuda") if has_kernel(operators, device, name)],
        }
        for name in library.NAMES
    ]


def _loaded(built: bool) -> Any | None:
    """Return the operators if they are built already and can be loaded."""
    try:
        return library.load() if built else None
    except OpsUnavailableError:
        return None


def _gpu(operators: Any | None) -> dict[str, Any]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not names:
        return {"devices": [], "kernels": {}, "self_test": "no GPU here"}
    kernels = {}
    if has_kernel(operators, "cuda", "sym_gemm"):
        assert operators is not None
        wide = "in squares of 256 too" if all(operators.sym_gemm_waves(1, 256)) else ""
        kernels["sym_gemm"] = f"{operators.sym_gemm_kernel()} {wide}".strip()
        kernels["flat passes"] = operators.flat_passes_missing() or "ops"
    verdict = known_verdict(0)
    tested = "not run yet"
    if verdict is not None:
        tested = f"failed, so torch's code runs instead: {verdict.why}" if verdict.failed else "passed"
    return {"devices": names, "kernels": kernels, "self_test": tested}


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _section(title: str, values: dict[str, Any]) -> list[str]:
    width = max(map(len, values))
    shown = {name: _yes(value) if isinstance(value, bool) else value or "-" for name, value in values.items()}
    return [title, *(f"  {name:<{width}}  {value}" for name, value in shown.items()), ""]


def _output(program: str | None, *arguments: str) -> list[str]:
    if program is None:
        return []
    try:
        result = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in result.stdout.splitlines() if line.strip()]


def _first_line(program: str | None, *arguments: str) -> str | None:
    lines = _output(program, *arguments)
    return f"{lines[0].strip()} ({Path(str(program))})" if lines else None


def _last_release(nvcc: str | None) -> str | None:
    line = next((line for line in _output(nvcc, "--version") if "release" in line), None)
    return f"{line.strip()} ({nvcc})" if line else None
