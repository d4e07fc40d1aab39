"""What this machine can build and run: ``python -m deepspeed_muon report``, the twin of DeepSpeed's ``ds_report``."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepspeed_muon.errors import OpsUnavailableError
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, restart_steps
from deepspeed_muon.math.reference import reference_orthogonalize

from . import library, reference, toolchain
from .autotune import TOLERANCE, cache_folder, error_of, hardware_name
from .builder import MuonBuilder, build_folder, ninja_folder, prebuilt_path
from .candidates import candidates_for, has_kernel, other_products, problem_of
from .gate import known_verdict

__all__ = ["collect", "cuda_checks", "render", "self_test"]

# What the operators compute in.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Oldest compute capability of each CUDA kernel of sym_gemm, and the newest where it is for one generation only.
_CUDA_KERNELS = {
    "sym_gemm mma.sync": (80, None),
    "sym_gemm wgmma + TMA": (90, 90),
    "sym_gemm in squares of 256": (90, 90),
    "flat passes": (80, None),
}


def collect() -> dict[str, Any]:
    """Return everything that the report shows; builds nothing."""
    builder = MuonBuilder()
    spec = builder.spec()
    return {
        "versions": _versions(),
        "hardware": hardware_name(),
        "toolchain": {
            "g++": _first_line(toolchain.cxx_compiler(), "--version"),
            "nvcc": _last_release(toolchain.find_nvcc()),
            "ninja": ninja_folder(),
        },
        "build": {
            "folder": str(build_folder(spec)),
            "ahead_of_time": str(prebuilt_path(spec)) if prebuilt_path(spec).exists() else None,
            "built": builder.built_path() is not None,
            "cannot_be_built": builder.unavailable_reason(),
            "with_cuda": spec.with_cuda,
            "without_cuda_because": toolchain.cuda_reason(torch),
            "architectures": [flag.rpartition("=")[2] for flag in spec.nvcc_flags if "gencode" in flag],
        },
        "ops": _ops(builder),
        "gpu": _gpu(),
        "choices": str(cache_folder()),
    }


def self_test() -> list[dict[str, Any]]:
    """Compare each operator with its reference on every device that has kernels; builds the library if necessary.

    Returns:
        One entry for each check: ``op``, ``device``, ``error``, ``bound``, ``ok``.

    Raises:
        OpsUnavailableError: If the library can be neither loaded nor built.
    """
    checks = _test_operators(library.load(), "cpu")
    return checks + cuda_checks() if torch.cuda.is_available() else checks


def cuda_checks() -> list[dict[str, Any]]:
    """Return the part of :func:`self_test` for the current GPU: the operators, if there are any, and graphs."""
    operators = library.try_load()
    checks = [] if operators is None else _test_operators(operators, "cuda")
    return checks + _test_other_products() + _test_graphs(operators)


def _test_operators(operators: Any, device: str) -> list[dict[str, Any]]:
    return [
        *_test_orthogonalize(operators, device),
        *_test_sym_gemm(operators, device),
        *_test_norms(operators, device),
        *_test_flat(operators, device),
    ]


def render(found: dict[str, Any], checks: list[dict[str, Any]] | None = None) -> str:
    """Return the result of :func:`collect`, and of :func:`self_test` if it was run, as text."""
    lines = ["deepspeed_muon report", ""]
    lines += _section("versions", found["versions"])
    lines += [f"hardware: {found['hardware']}", ""]
    lines += _section("toolchain", found["toolchain"])
    build = dict(found["build"])
    build["architectures"] = ", ".join(build["architectures"]) or "none"
    lines += _section("build", build)
    lines += ["op                 built  can be built  devices"]
    for op in found["ops"]:
        devices = ", ".join(op["devices"]) or "-"
        lines.append(f"{op['name']:<18} {_yes(op['built']):<6} {_yes(op['compatible']):<13} {devices}")
    lines += ["", "CUDA kernels"]
    for kernel in found["gpu"]["kernels"]:
        lines.append(f"  {kernel['name']:<24} {kernel['state']}")
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


def _ops(builder: MuonBuilder) -> list[dict[str, Any]]:
    built, compatible = builder.built_path() is not None, builder.is_compatible()
    operators = None
    if built:
        try:
            operators = library.load()
        except OpsUnavailableError:
            built = False
    return [
        {
            "name": name,
            "built": built,
            "compatible": compatible,
            "devices": [device for device in ("cpu", "cuda") if has_kernel(operators, device, name)],
        }
        for name in library.NAMES
    ]


def _gpu() -> dict[str, Any]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    capability = None
    if names:
        major, minor = torch.cuda.get_device_capability(0)
        capability = 10 * major + minor
    sources = sorted(path.name for path in (toolchain.CSRC / "cuda").glob("*.cu"))
    kernels = []
    for name, (oldest, newest) in _CUDA_KERNELS.items():
        if capability is None:
            state = "no GPU here"
        elif capability < oldest or (newest is not None and capability > newest):
            state = f"none for compute capability {capability / 10:.1f}"
        else:
            state = f"for {names[0]}"
        kernels.append({"name": name, "state": state})
    verdict = known_verdict(0) if names else None
    tested = "not run yet" if names else "no GPU here"
    if verdict is not None:
        tested = "passed" if verdict.ok else f"failed, so torch's code runs: {verdict.why}"
    return {"devices": names, "kernels": kernels, "sources": sources, "self_test": tested}


def _test_orthogonalize(operators: Any, device: str) -> list[dict[str, Any]]:
    if not has_kernel(operators, device, "orthogonalize"):
        return []
    rows = resolve_schedule("quintic")
    flat = [value for row in rows for value in row]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 96, 320, generator=generator)
    expected = torch.stack([reference_orthogonalize(each, rows) for each in x])
    checks = []
    for dtype in _DTYPES:
        variants = ["", "+symmetric"]
        if device == "cuda":
            half = dtype != torch.float32
            variants = ["", "+wide"] if half and operators.sym_gemm_wide_available() else [""]
        if device == "cpu" and dtype == torch.bfloat16 and operators.tiles_available():
            variants.append("+tiles")
        if device == "cpu" and dtype == torch.bfloat16 and operators.vectors_available():
            variants.append("+vectors")
        for method in [base + variant for base in ("standard", "gram") for variant in variants]:
            restarts = sorted(restart_steps(len(rows), dtype)) if method.startswith("gram") else []
            result = operators.orthogonalize(x.to(device), flat, method, restarts, dtype, 1e-12).cpu()
            checks.append(
                _check(
                    f"orthogonalize {method} {_short(dtype)}",
                    device,
                    error_of(result, expected),
                    TOLERANCE[dtype],
                )
            )
    return checks


def _test_sym_gemm(operators: Any, device: str) -> list[dict[str, Any]]:
    if not has_kernel(operators, device, "sym_gemm"):
        return []
    return [_test_product("sym_gemm", operators.sym_gemm, device, dtype) for dtype in _DTYPES]


def _test_other_products() -> list[dict[str, Any]]:
    checks = []
    for name in other_products():
        product = importlib.import_module(f"{__package__}.{name}_sym").sym_gemm
        for dtype in (torch.float16, torch.bfloat16):
            checks.append(_test_product(f"sym_gemm of {name}", product, "cuda", dtype))
    return checks


def _test_product(
    name: str, product: Callable[..., torch.Tensor], device: str, dtype: torch.dtype
) -> dict[str, Any]:
    a = torch.randn(2, 264, 128, generator=torch.Generator().manual_seed(0)).to(device, dtype) / 16
    c = reference.sym_gemm(a, a, None, 0.5, 0.0, 0.0)
    result = product(a, a, c, 1.5, -0.5, 2.0)
    error = error_of(result.double(), reference.sym_gemm(a, a, c, 1.5, -0.5, 2.0).double())
    if not torch.equal(result, result.mT):
        error = float("inf")
    return _check(f"{name} {_short(dtype)}, bitwise symmetric", device, error, 2 * torch.finfo(dtype).eps)


def _test_norms(operators: Any, device: str) -> list[dict[str, Any]]:
    if not has_kernel(operators, device, "frobenius_norms"):
        return []
    checks = []
    for dtype in _DTYPES:
        x = torch.randn(3, 200, 500, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        error = _relative(operators.frobenius_norms(x), torch.linalg.matrix_norm(x.double()))
        checks.append(_check(f"frobenius_norms {_short(dtype)}", device, error, 1e-6))
    return checks


def _test_flat(operators: Any, device: str) -> list[dict[str, Any]]:
    checks = []
    generator = torch.Generator().manual_seed(0)
    for dtype in _DTYPES:
        bound = 2 * torch.finfo(dtype).eps
        buf, grad, param = (torch.randn(100_003, generator=generator).to(device) for _ in range(3))
        out, expected = torch.empty_like(buf, dtype=dtype), torch.empty_like(buf, dtype=dtype)
        if has_kernel(operators, device, "momentum_pack_"):
            copy = buf.clone()
            operators.momentum_pack_(buf, grad, out, 0.95, True)
            reference.momentum_pack_(copy, grad, expected, 0.95, True)
            error = max(_relative(out, expected), _relative(buf, copy))
            checks.append(_check(f"momentum_pack_ {_short(dtype)}", device, error, bound))
        if has_kernel(operators, device, "unpack_apply_"):
            copy, update = param.clone(), grad.to(dtype)
            operators.unpack_apply_(param, update, 0.02, 0.99)
            reference.unpack_apply_(copy, update, 0.02, 0.99)
            checks.append(_check(f"unpack_apply_ {_short(dtype)}", device, _relative(param, copy), bound))
    return checks


def _test_graphs(operators: Any | None) -> list[dict[str, Any]]:
    """Compare replayed graphs with plain calls, bit for bit."""
    settings = NsSettings(resolve_schedule("quintic"), "gram", torch.float16)
    inputs = [torch.randn(2, 256, 640, device="cuda") for _ in range(3)]
    found = {each.name: each for each in candidates_for(problem_of(inputs[0], settings), operators)}
    checks = []
    for name in [name for name in found if name.endswith("+graph")]:
        # The first call with a shape runs without a graph, the second records it.
        equal = [
            torch.equal(found[name].run(x, settings), found[name.removesuffix("+graph")].run(x, settings))
            for x in inputs
        ]
        checks.append(_check(f"orthogonalize {name}", "cuda", 0.0 if all(equal) else float("inf"), 0.0))
    return checks


def _relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def _check(op: str, device: str, error: float, bound: float) -> dict[str, Any]:
    return {"op": op, "device": device, "error": error, "bound": bound, "ok": error <= bound}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _section(title: str, values: dict[str, Any]) -> list[str]:
    width = max(map(len, values))
    shown = {name: _yes(value) if isinstance(value, bool) else value or "-" for name, value in values.items()}
    return [title, *(f"  {name.replace('_', ' '):<{width}}  {value}" for name, value in shown.items()), ""]


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
