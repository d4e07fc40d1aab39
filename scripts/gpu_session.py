#!/usr/bin/env python3
"""An hour on a machine with one GPU, in three parts, each well below ten minutes: what is right, what trains, how fast.

    python3 scripts/gpu_session.py wheels .whl            # here, where packages can be had; the folder is then carried
    OUT=folder python3 scripts/gpu_session.py check --wheels .whl     # build, self-test, every kernel against float64
    OUT=folder python3 scripts/gpu_session.py engine --wheels .whl    # ZeRO 0 to 3 on the GPU, compute-sanitizer
    OUT=folder python3 scripts/gpu_session.py time --wheels .whl      # kernels, iteration and steps beside the peers

Run from any folder, by an interpreter with a CUDA torch and pytest, with nvcc. A step that fails or takes too long is
noted, and the next one runs. Each part writes PART.log and PART.json to ``$OUT``; ``time`` adds its tables, eight files
in all. Nothing is installed into the interpreter, and no setting of the card is changed. ``--dry-run`` says what would
run, and checks that the wheels install and that the steps' programs start.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = Path(tempfile.gettempdir()) / "deepspeed_muon_gpu"
"""Builds and installed wheels; the parts share it while they run on one machine."""

PART_SECONDS = 560.0

WHEELS = ["deepspeed==0.19.8", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "hjson"]
"""What the machine lacks of what DeepSpeed and this project need (its image has torch, pytest, ninja, einops, ...)."""

PYTHON = sys.executable
LIBRARY = WORK / "libmuon_cuda.so"
BUILD = f"""
from pathlib import Path
import shutil, subprocess, torch
from tests.support.cuda_library import build
major, minor = torch.cuda.get_device_capability()
library = build(Path({str(WORK)!r}), (f"{{major}}{{minor}}" + ("a" if major >= 9 else ""),))
if program := shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin"):
    sass = subprocess.run([program, "--dump-sass", str(library)], capture_output=True, text=True).stdout
    for name in ("HGMMA", "UTMALDG", "HMMA", "LDSM", "STG.E.128", "STG.E.64", "STG.E ", "LDL", "STL"):
        print(name, sass.count(name))
"""
VERSIONS = """
import torch
print("torch", torch.__version__, "cuda", torch.version.cuda)
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
"""


@dataclass(frozen=True)
class Step:
    """A command and the seconds that it may take."""

    name: str
    command: list[str]
    seconds: float
    environment: tuple[tuple[str, str], ...] = ()


def python(*arguments: str) -> list[str]:
    return [PYTHON, *arguments]


def parts(out: Path) -> dict[str, list[Step]]:
    """Return the steps of each part, in order."""
    gpu = (("DS_ACCELERATOR", "cuda"),)
    library = (("MUON_CUDA_LIBRARY", str(LIBRARY)),)
    pytest = python("-m", "pytest", "-p", "no:cacheprovider", "-q", "--durations=10", "tests/gpu")
    small = ["-x", "-k", "(test_sym_gemm and 264) or momentum_pack"]
    device = [
        Step("card", ["nvidia-smi"], 30),
        Step("versions", python("-c", VERSIONS), 60),
    ]
    kernels = Step("kernels as a library", python("-c", BUILD), 200)
    build = Step("binding and self-test", python("-m", "deepspeed_muon", "report", "--selftest"), 300, gpu)
    sanitizers = [
        Step(
            tool,
            ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *pytest, *small],
            120,
            library,
        )
        for tool in ("memcheck", "racecheck")
    ]
    step = python("benchmarks/optimizer_step.py", "--device", "cuda", "--no-memory", "--accumulation", "1")
    step += ["--optimizers", "ours", "DeepSpeed Muon, standard", "DeepSpeed AdamW"]
    step += [
        "--out",
        str(out / "optimizer_step"),
        "--stages",
        "1",
        "3",
        "--model",
        "350M",
        "--tokens",
        "8192",
    ]
    iteration = python("benchmarks/newton_schulz.py", "--device", "cuda", "--threads", "1", "--seconds", "1")
    iteration += ["--out", str(out / "newton_schulz")]
    return {
        "check": [
            *device,
            build,
            Step("self-test in a process of its own", python("-m", "deepspeed_muon.ops.gate", "0"), 120, gpu),
            kernels,
            Step("every kernel against float64", pytest, 240, library),
        ],
        "engine": [
            *device,
            build,
            Step("an engine at every stage", python("-m", "tests.gpu.engine"), 240, gpu),
            kernels,
            *sanitizers,
        ],
        "time": [
            *device,
            build,
            Step("steps", step, 200, gpu),
            Step("iteration beside the peers", iteration, 200, gpu),
        ],
    }


def run_part(steps: list[Step], log: Path, site: Path | None) -> list[dict[str, object]]:
    """Run the steps one after the other, whatever becomes of each; return what became of them."""
    deadline = time.monotonic() + PART_SECONDS
    found: list[dict[str, object]] = []
    with log.open("w") as output:
        for step in steps:
            seconds = min(step.seconds, deadline - time.monotonic())
            if seconds < 5:
                found.append({"step": step.name, "ended": "not started: no time left"})
                continue
            print(f"== {step.name} (at most {seconds:.0f} s)", flush=True)
            output.write(f"\n==== {step.name}: {' '.join(step.command)[:300]}\n")
            output.flush()
            started = time.monotonic()
            ended = run_step(step, seconds, output.fileno(), site)
            took = round(time.monotonic() - started, 1)
            found.append({"step": step.name, "ended": ended, "seconds": took})
            print(f"   {ended}, {took} s", flush=True)
            log.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def run_step(step: Step, seconds: float, output: int, site: Path | None) -> str:
    """Run one step in a session of its own; return how it ended."""
    paths = [str(ROOT), *([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "4",
        "TORCH_EXTENSIONS_DIR": str(WORK / "extensions"),
        "DS_MUON_CACHE_DIR": str(WORK / "cache"),
        "PATH": f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/local/cuda/bin",
        **dict(step.environment),
    }
    try:
        child = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    except OSError as error:
        return f"did not start: {error}"
    try:
        code = child.wait(timeout=seconds)
        return "ok" if code == 0 else f"failed with {code}"
    except subprocess.TimeoutExpired:
        return "took too long"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def collect_wheels(folder: Path, version: str) -> None:
    """Put the wheels for the machine (Linux on x86-64, CPython of that version) into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_17", "2014", "1")]
    with tempfile.TemporaryDirectory() as temporary:
        for name in WHEELS:
            download = [PYTHON, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
            ready = [
                *download,
                "--only-binary=:all:",
                f"--python-version={version}",
                "--implementation=cp",
                *platforms,
            ]
            tried = subprocess.run([*ready, pinned(name, folder)], check=False, stderr=subprocess.DEVNULL)
            if tried.returncode:
                # Only as source, and pure Python. DeepSpeed's set-up asks for torch: this environment has it.
                options = ["-q", "--no-deps", "--no-build-isolation", "-w", temporary]
                subprocess.run([PYTHON, "-m", "pip", "wheel", *options, name], check=True)
        for wheel in Path(temporary).glob("*.whl"):
            shutil.move(wheel, folder / wheel.name)
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB, in {folder}")


def pinned(name: str, folder: Path) -> str:
    """Return the requirement of a package; pydantic needs one very version of its core."""
    if name == "pydantic-core":
        (wheel,) = folder.glob("pydantic-[0-9]*.whl")
        text = subprocess.run(
            ["unzip", "-p", str(wheel), "*/METADATA"], capture_output=True, text=True, check=True
        ).stdout
        line = next(line for line in text.splitlines() if line.startswith("Requires-Dist: pydantic-core"))
        return line.split(":", 1)[1].strip()
    return name


def install(wheels: Path, site: Path) -> bool:
    """Install carried wheels into a folder of their own; return whether that went well."""
    if site.exists():
        return True
    options = ["-q", "--no-index", "--no-deps", "--no-compile", "--target", str(site)]
    command = [PYTHON, "-m", "pip", "install", *options, *map(str, sorted(wheels.glob("*.whl")))]
    return subprocess.run(command, check=False).returncode == 0


def rehearse(steps: list[Step], site: Path | None) -> bool:
    """Say what would run; return whether the steps' programs are there, as far as a machine without a GPU can tell."""
    fine = True
    for step in steps:
        print(f"{step.seconds:5.0f} s  {step.name}: {' '.join(step.command)[:160]}")
        arguments = step.command[1:]
        if step.command[0] != PYTHON:
            continue
        if arguments[0] == "-m":
            check = (
                f"import importlib.util, sys; sys.exit(importlib.util.find_spec({arguments[1]!r}) is None)"
            )
        elif arguments[0] == "-c":
            check = f"compile({arguments[1]!r}, 'step', 'exec')"
        else:
            check = f"compile(open({arguments[0]!r}).read(), {arguments[0]!r}, 'exec')"
        with tempfile.TemporaryFile() as output:
            ended = run_step(
                Step(step.name, python("-c", check), 120, step.environment), 120, output.fileno(), site
            )
        if ended != "ok":
            print(f"         {ended}")
            fine = False
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["wheels", "check", "engine", "time"])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".whl"), help="for wheels")
    parser.add_argument("--python", default="3.12", help="for wheels: the machine's version (3.12)")
    parser.add_argument("--wheels", type=Path, help="carried wheels")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if arguments.part == "wheels":
        collect_wheels(arguments.folder, arguments.python)
        return 0
    out = Path(os.environ.get("OUT", WORK / "out"))
    out.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    site = WORK / "site" if arguments.wheels else None
    if arguments.wheels and site and not install(arguments.wheels, site):
        print("the wheels do not install", file=sys.stderr)
        return 2
    steps = parts(out)[arguments.part]
    if arguments.dry_run:
        return 0 if rehearse(steps, site) else 1
    found = run_part(steps, out / f"{arguments.part}.log", site)
    return 0 if all(each["ended"] == "ok" for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
