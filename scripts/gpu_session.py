#!/usr/bin/env python3
"""Builds, checks and times the CUDA code on one GPU, in five parts: what is right, how fast, what trains.

    python scripts/gpu_session.py check     # every kernel against float64, the self-test
    python scripts/gpu_session.py engine    # training at ZeRO 0 to 3; memcheck
    python scripts/gpu_session.py time      # kernels, iteration and steps beside the peers
    python scripts/gpu_session.py train     # losses of 350M and 1.3B parameters beside FusedAdam
    python scripts/gpu_session.py race      # racecheck
    python scripts/gpu_session.py --dry-run # anywhere: what would run, whether the programs start

It needs Linux, an NVIDIA GPU (80 GB for the 1.3B model), nvcc, compute-sanitizer, and an interpreter with a CUDA build
of torch, this package's dependencies and pytest. A step that fails or takes too long is recorded, and the next one
runs. Each part writes PART.log, PART.json and its tables to ``--out``. ``--limit`` ends a part after some seconds, and
``--resume DIR`` runs only the steps that are not "ok" in the PART.json of an earlier run, and what they need. No
setting of the card is changed.

On a machine without a network, make a folder of wheels elsewhere and name it there; nothing is installed into the
interpreter:

    python scripts/gpu_session.py wheels FOLDER --python 3.12          # where packages can be downloaded
    python scripts/gpu_session.py check --wheels FOLDER [FOLDER ...]   # on the machine with the GPU
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = Path(tempfile.gettempdir()) / "deepspeed_muon_gpu"
"""Builds and unpacked wheels, which the parts share."""

WHEELS = [
    "deepspeed==0.19.8",
    "hjson",
    "annotated-types",
    "typing-inspection",
    # pydantic needs one very version of its core.
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
]
"""What DeepSpeed and this package need beside torch and what comes with it."""

PEERS = [
    "gram-newton-schulz==0.1.6",
    "quack-kernels==0.5.0",
    "nvidia-cutlass-dsl-libs-cu13==4.5.2",  # replaces all of nvidia-cutlass-dsl-libs-base
    "apache-tvm-ffi>=0.1.6,<0.2",
    "torch-c-dlpack-ext",
]
"""Peers in ``benchmarks/newton_schulz.py``, and what they need."""

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
BINDING = "from deepspeed_muon.ops import library; library.load()"
VERSIONS = """
import torch
print("torch", torch.__version__, "cuda", torch.version.cuda)
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
"""
REHEARSAL = """
import argparse, importlib.util, json, runpy, sys

def parse_and_leave(parser, *given, parse=argparse.ArgumentParser.parse_args):
    parse(parser, *given)
    sys.exit(0)

def start(first, *rest):
    if first == "-c":
        compile(rest[0], "step", "exec")
    elif first == "-m":
        if importlib.util.find_spec(rest[0]) is None:
            sys.exit(f"there is no module {rest[0]}")
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")

argparse.ArgumentParser.parse_args = parse_and_leave
wrong = 0
for name, command in json.loads(sys.argv[1]):
    try:
        start(*command)
    except (Exception, SystemExit) as error:
        if getattr(error, "code", 1):
            wrong = 1
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
sys.exit(wrong)
"""
"""Checks that the programs of steps are there, and parses the arguments of the scripts among them."""


OPTIMIZERS = ["ours", "DeepSpeed AdamW", "DeepSpeed Muon, standard"]


@dataclass(frozen=True)
class Step:
    """A command and the seconds that it may take.

    A resumed part repeats those that ``prepares``: the later steps need what they build.
    """

    name: str
    command: list[str]
    seconds: float
    environment: tuple[tuple[str, str], ...] = ()
    prepares: bool = False


def python(*arguments: str) -> list[str]:
    return [PYTHON, *arguments]


def parts(out: Path) -> dict[str, list[Step]]:
    """Return the steps of each part, in order."""
    gpu = (("DS_ACCELERATOR", "cuda"),)
    library = (("MUON_CUDA_LIBRARY", str(LIBRARY)),)
    pytest = python("-m", "pytest", "-p", "no:cacheprovider", "-q", "--durations=10", "tests/gpu")
    small = ["-x", "-k", "(test_sym_gemm and 264) or momentum_pack"]
    device = [
        Step("card", ["nvidia-smi"], 30, prepares=True),
        Step("versions", python("-c", VERSIONS), 60, prepares=True),
    ]
    kernels = Step("kernels as a library", python("-c", BUILD), 200, prepares=True)
    binding = Step("binding", python("-c", BINDING), 300, gpu, prepares=True)

    def sanitizer(tool: str, seconds: float) -> Step:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *pytest, *small]
        return Step(tool, command, seconds, library)

    iteration = python("benchmarks/newton_schulz.py", "--device", "cuda", "--threads", "1", "--seconds", "1")
    few = ["--only", "sym_gemm", "iteration", "--shapes", "1024x2816", "2048x5504", "4096x4096"]
    step = python("benchmarks/optimizer_step.py", "--device", "cuda", "--no-memory", "--accumulation", "1")
    step += ["--optimizers", *OPTIMIZERS, "--stages", "1", "3", "--model", "350M", "--tokens", "8192"]
    return {
        "check": [
            *device,
            kernels,
            binding,
            Step("every kernel against float64", pytest, 240, library),
            Step("self-test", python("-m", "deepspeed_muon", "report", "--selftest"), 200, gpu),
            Step("self-test in a process of its own", python("-m", "deepspeed_muon.ops.gate", "0"), 120, gpu),
        ],
        "engine": [
            *device,
            binding,
            Step("an engine at every stage", python("-m", "tests.gpu.engine"), 240, gpu),
            kernels,
            sanitizer("memcheck", 200),
        ],
        "time": [
            *device,
            binding,
            Step("few shapes", [*iteration, *few, "--out", str(out / "few_shapes")], 150, gpu),
            Step("steps", [*step, "--out", str(out / "optimizer_step")], 200, gpu),
            Step("iteration beside the peers", [*iteration, "--out", str(out / "newton_schulz")], 200, gpu),
        ],
        "train": [*device, binding, *trainings(out, gpu)],
        "race": [*device, kernels, sanitizer("racecheck", 400)],
    }


def trainings(out: Path, environment: tuple[tuple[str, str], ...]) -> list[Step]:
    """Return a step for each model and optimizer: a process each, which gives all its memory back."""
    steps = []
    for model in ("350M", "1.3B"):
        command = python("benchmarks/gpu_losses.py", "--device", "cuda", "--model", model)
        command += ["--out", str(out / f"losses-{model}"), "--optimizers"]
        steps += [Step(f"{model}, {name}", [*command, name], 150, environment) for name in OPTIMIZERS]
    return steps


def run_part(
    steps: list[Step],
    log: Path,
    site: Path | None,
    done: Collection[str] = (),
    limit: float = math.inf,
) -> list[dict[str, object]]:
    """Run the steps one after the other, whatever becomes of each; return what became of them.

    Those that are ``done`` stay "ok" and are not run again, unless they prepare others. After ``limit`` seconds no
    step is running.
    """
    deadline = time.monotonic() + limit
    outcomes: list[dict[str, object]] = []
    finished = all(step.name in done for step in steps if not step.prepares)
    with log.open("w") as output:
        for step in steps:
            seconds = min(step.seconds, deadline - time.monotonic())
            if step.name in done and (finished or not step.prepares):
                outcomes.append({"step": step.name, "ended": "ok", "run": "earlier"})
            elif seconds < 5:
                outcomes.append({"step": step.name, "ended": "not started: no time left"})
            else:
                print(f"== {step.name} (at most {seconds:.0f} s)", flush=True)
                output.write(f"\n==== {step.name}: {' '.join(step.command)[:300]}\n")
                output.flush()
                started = time.monotonic()
                ended = run_step(step, seconds, output.fileno(), site)
                took = round(time.monotonic() - started, 1)
                outcomes.append({"step": step.name, "ended": ended, "seconds": took})
                print(f"   {ended}, {took} s", flush=True)
            log.with_suffix(".json").write_text(json.dumps(outcomes, indent=1) + "\n")
    return outcomes


def done_earlier(report: Path) -> list[str]:
    """Return the steps that are "ok" in the report of an earlier run."""
    return [each["step"] for each in json.loads(report.read_text()) if each["ended"] == "ok"]


def run_step(step: Step, seconds: float, output: int, site: Path | None) -> str:
    """Run one step in a session of its own; return how it ended."""
    # quack's compiler lies in a folder that a .pth file names, which Python does not read from PYTHONPATH.
    installed = [str(site), str(site / "nvidia_cutlass_dsl" / "python_packages")] if site else []
    paths = [str(ROOT), *installed, os.environ.get("PYTHONPATH", "")]
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


def download(names: list[str], folder: Path, version: str) -> None:
    """Put the wheels of packages (Linux on x86-64, CPython of that version) into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tags = ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")
    binary = ["--only-binary=:all:", f"--python-version={version}", "--implementation=cp"]
    binary += [f"--platform=manylinux{tag}_x86_64" for tag in tags]
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            command = [PYTHON, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *binary]
            tried = subprocess.run([*command, name], check=False, stderr=subprocess.DEVNULL)
            if tried.returncode:
                # Only as source, and pure Python. DeepSpeed's set-up asks for torch: this environment has it.
                options = ["-q", "--no-deps", "--no-build-isolation", "-w", temporary]
                subprocess.run([PYTHON, "-m", "pip", "wheel", *options, name], check=True)
        for wheel in Path(temporary).glob("*.whl"):
            shutil.move(wheel, folder / wheel.name)


def unpack(folders: list[Path], site: Path) -> None:
    """Unpack the wheels of some folders into one, those that are not there yet."""
    for wheel in sorted(wheel for folder in folders for wheel in folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
            if not (site / record).exists():
                archive.extractall(site)


def rehearse(chosen: dict[str, list[Step]], site: Path | None) -> bool:
    """Say what would run; return whether the steps' programs start, as far as a machine without a GPU can tell."""
    checks = []
    for part, steps in chosen.items():
        print(part)
        for step in steps:
            command = " ".join(" ".join(step.command).split())
            print(f"{step.seconds:5.0f} s  {step.name}: {command[:160]}")
            if step.command[0] == PYTHON:
                checks.append((f"{part}, {step.name}", step.command[1:]))
    rehearsal = Step("rehearsal", python("-c", REHEARSAL, json.dumps(checks)), 300)
    sys.stdout.flush()
    ended = run_step(rehearsal, rehearsal.seconds, sys.stdout.fileno(), site)
    print(f"rehearsal: {ended}")
    return ended == "ok"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=["wheels", *parts(Path())])
    parser.add_argument("folder", nargs="?", type=Path, help="for wheels: where they go")
    parser.add_argument("--python", default="3.12", help="for wheels: the version of the interpreter (3.12)")
    parser.add_argument("--wheels", type=Path, nargs="+", metavar="FOLDER", help="wheels to use")
    parser.add_argument("--out", type=Path, default=WORK / "out", help=f"results ({WORK / 'out'})")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="of a part")
    parser.add_argument("--resume", type=Path, help="folder with the PART.json of an earlier run")
    parser.add_argument("--dry-run", action="store_true", help="rehearse a part, without one all of them")
    arguments = parser.parse_args()
    if arguments.part == "wheels":
        if arguments.folder is None:
            parser.error("wheels needs a folder")
        download([*WHEELS, *PEERS], arguments.folder, arguments.python)
        return 0
    if arguments.part is None and not arguments.dry_run:
        parser.error("name a part, or give --dry-run to rehearse all of them")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    site = WORK / "site" if arguments.wheels else None
    if site:
        unpack(arguments.wheels, site)
    known = parts(out)
    if arguments.dry_run:
        chosen = [arguments.part] if arguments.part else list(known)
        return 0 if rehearse({part: known[part] for part in chosen}, site) else 1
    done = done_earlier(arguments.resume / f"{arguments.part}.json") if arguments.resume else []
    log = out / f"{arguments.part}.log"
    found = run_part(known[arguments.part], log, site, done, arguments.limit)
    return 0 if all(each["ended"] == "ok" for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
