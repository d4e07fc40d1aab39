#!/usr/bin/env python3
"""Checks, times and trains on this machine's GPU, and writes one page about it; ``make gpu`` runs it.

    make gpu                          # all parts, in the order of the list below; again: what is not "ok" yet
    make gpu PARTS="check time"       # some parts
    make gpu DRY_RUN=1                # all parts on a CPU, with tiny shapes, to the page

    check     the kernels, the optimizer and several ranks against float64
    time      TFLOP/s and GB/s of the kernels, and milliseconds of the iteration, beside the peers
    train     losses and milliseconds of whole steps, in turns with FusedAdam and DeepSpeed's Muon
    sanitize  memcheck and racecheck of every kernel

It needs Linux, an NVIDIA GPU (80 GB for the 1.3B model) and a CUDA build of torch; without nvcc or compute-sanitizer
(pip has both) the steps that need them are left out. Every step is a process, so a step that fails, takes too long or
leaves the GPU in a bad state does not affect the next one. No setting of the card is changed. The results are
``gpu-CARD-DATE.md`` and ``.json`` in ``--out``, beside the log of every step.

Where a GPU is available for some minutes at a time, ``--limit 560`` ends a call after that many seconds, and the next
call continues from the files in ``--out``, which are less than 64 MiB. A machine without a network takes the packages
from a folder; nothing is installed into its interpreter:

    python scripts/gpu.py wheels FOLDER --python 3.12 --mib 64       # where packages can be downloaded
    python scripts/gpu.py check --wheels FOLDER [FOLDER ...]         # on the machine with the GPU
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import support  # noqa: E402

WORK = Path(tempfile.gettempdir()) / "deepspeed_muon_gpu"
"""Builds and unpacked wheels."""
OUT = ROOT / "runs" / "gpu"
PARTS = ("check", "time", "train", "sanitize")
UNTIMED = ("check", "sanitize")
"""Parts whose steps may run side by side."""
RUNNING: set[int] = set()
"""The sessions of the steps that are running."""
LOG_BYTES = 512 << 10
"""Of the log of a step, of which beginning and end are stored."""

WHEELS = [
    "deepspeed==0.19.8",
    "hjson",
    "annotated-types",
    "typing-inspection",
    # pydantic needs one very version of its core.
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "pytest-xdist",
    "execnet",
]
"""What DeepSpeed and the tests need beside torch, pytest and what comes with them."""

PEERS = [
    "gram-newton-schulz==0.1.6",
    "quack-kernels==0.6.5",
    "apache-tvm-ffi>=0.1.6,<0.2",
    "torch-c-dlpack-ext",
    "einops",
    *(f"nvidia-cutlass-dsl-libs-{name}==4.7.0" for name in ("core", "base", "cu13")),
]
"""quack and gram-newton-schulz, whose metadata pins quack 0.5.0, and what they need beside a CUDA build of torch."""

DRY_RUN_FACTOR = 10
"""The seconds of a step are for a machine with a GPU; a CPU that is busy may compile for minutes."""

PYTHON = sys.executable
LIBRARY = WORK / "libmuon_cuda.so"
BUILD = f"""
from pathlib import Path
import shutil, subprocess, torch
from tests.support.cuda_library import build
major, minor = torch.cuda.get_device_capability()
library = build(Path({str(WORK)!r}), (f"{{major}}{{minor}}" + ("a" if major >= 9 else ""),))
if program := shutil.which("cuobjdump"):
    sass = subprocess.run([program, "--dump-sass", str(library)], capture_output=True, text=True).stdout
    for name in ("HGMMA", "UTMALDG", "HMMA", "LDSM", "STG.E.128", "STG.E.64", "STG.E ", "LDL", "STL"):
        print(name, sass.count(name))
"""
BINDING = "from deepspeed_muon.ops import builder; builder.load()"
MACHINE = """
import json, platform, subprocess, torch
from importlib import metadata
facts = {"card": platform.processor() or platform.machine(), "gpus": torch.cuda.device_count()}
if torch.cuda.is_available():
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    facts |= {
        "card": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory, GiB": round(properties.total_memory / 2**30),
        "NCCL": "{}.{:02}.{}".format(*torch.cuda.nccl.version()),
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()[:1],
    }
facts |= {"python": platform.python_version(), "torch": torch.__version__, "CUDA of torch": torch.version.cuda}
for name in ("deepspeed", "triton", "quack-kernels", "gram-newton-schulz"):
    try:
        facts[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        facts[name] = None
print(json.dumps(facts))
"""
"""Prints what a page says about its machine."""

OPTIMIZERS = (
    "ours",
    "DeepSpeed AdamW",
    "DeepSpeed AdamW, check_grad_overflow false",
    "DeepSpeed Muon, gram",
    "DeepSpeed Muon, standard",
)
"""Of ``benchmarks/whole_steps.py``."""


@dataclass(frozen=True)
class Step:
    """A command and the seconds that it may take.

    Attributes:
        name: For the page.
        command: Run in the repository.
        seconds: After them it is ended.
        environment: Variables.
        needs: What it is left out without: keys of :func:`available`.
        dry: What runs in its place in a dry run; ``None`` leaves it out.
        prepares: Whether later steps need what it builds. A call that continues an earlier one repeats it.
        result: Name of the JSON in ``--out`` that it writes, for the page.
    """

    name: str
    command: list[str]
    seconds: float
    environment: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ("a CUDA GPU",)
    dry: list[str] | None = None
    prepares: bool = False
    result: str = ""


def python(*arguments: str) -> list[str]:
    return [PYTHON, *arguments]


def torchrun(ranks: int, *arguments: str) -> list[str]:
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *arguments)


def steps_of(out: Path) -> dict[str, list[Step]]:
    """Return the steps of each part, in order."""
    cuda = (("DS_ACCELERATOR", "cuda"),)
    library = (("MUON_CUDA_LIBRARY", str(LIBRARY)),)
    needs_library = ("a CUDA GPU", "nvcc")
    binding = Step(
        "native operators", python("-c", BINDING), 300, cuda, (), python("-c", BINDING), prepares=True
    )
    kernels = Step("kernels as a library", python("-c", BUILD), 240, (), needs_library, prepares=True)
    return {
        "check": [
            kernels,
            *(
                against_float64(name, [f"tests/gpu/{file}.py", *selection], library, needs)
                for name, file, selection, needs in (
                    (
                        "flat passes",
                        "test_cuda_kernels",
                        ["-k", "momentum or unpack or divide"],
                        needs_library,
                    ),
                    (
                        "symmetric products",
                        "test_cuda_kernels",
                        ["-k", "not momentum and not unpack and not divide"],
                        needs_library,
                    ),
                    ("symmetric products in Triton", "test_triton", [], ("a CUDA GPU",)),
                )
            ),
            binding,
            against_float64("CUDA graphs", ["tests/gpu/test_graphs.py"], cuda),
            Step(
                "self-test",
                python("-m", "deepspeed_muon", "report", "--selftest"),
                200,
                cuda,
                dry=python("-m", "deepspeed_muon", "report", "--selftest"),
            ),
            Step(
                "an engine at every stage",
                python("-m", "tests.gpu.engine"),
                240,
                cuda,
                dry=python("-m", "tests.gpu.engine", "stage 3 fp32"),
            ),
            Step(
                "four ranks on one GPU",
                torchrun(4, "-m", "tests.gpu.ranks", "--device", "cuda"),
                200,
                cuda,
                dry=torchrun(2, "-m", "tests.gpu.ranks", "--cases", "fragments, row state"),
            ),
            Step(
                "two ranks on two GPUs, NCCL",
                torchrun(2, "-m", "tests.gpu.ranks", "--device", "cuda", "--backend", "nccl"),
                120,
                cuda,
                ("two GPUs",),
            ),
            *ranks_share_the_gpu(cuda),
        ],
        "time": [binding, *timings(out, cuda)],
        "train": [binding, *trainings(out, cuda)],
        "sanitize": [
            kernels,
            *(
                Step(
                    tool,
                    [
                        *[
                            "compute-sanitizer",
                            "--tool",
                            tool,
                            "--error-exitcode",
                            "9",
                            "--kernel-name",
                            "kns=muon",
                        ],
                        *python("-m", "tests.gpu.sanitized", "--seconds", "90"),
                    ],
                    120,
                    # Otherwise a block of torch's allocator holds several tensors, and hides accesses past their ends.
                    (*library, ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")),
                    (*needs_library, "compute-sanitizer"),
                )
                for tool in ("memcheck", "racecheck")
            ),
        ],
    }


def ranks_share_the_gpu(environment: tuple[tuple[str, str], ...]) -> list[Step]:
    """Return the steps in which two ranks share one GPU over NCCL, with and without torch's check of streams.

    NCCL's transports are tried from the fastest on; a container may forbid some.
    """
    transports = (
        "",
        "NCCL_CUMEM_ENABLE=0",
        "NCCL_CUMEM_ENABLE=0 NCCL_P2P_DISABLE=1",
        "NCCL_CUMEM_ENABLE=0 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1",
    )
    needs = ("a CUDA GPU", "NCCL 2.30, in torch 2.14.1 or by LD_PRELOAD")
    shared = (
        *environment,
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
        ("NCCL_NVLS_ENABLE", "0"),
        ("NCCL_MAX_CTAS", "4"),
    )
    ranks = torchrun(2, "-m", "tests.gpu.ranks", "--device", "cuda", "--backend", "nccl")
    engines = torchrun(2, "-m", "tests.gpu.engine")
    killed = python("-m", "tests.gpu.engine", "--killed")
    steps = []
    for name, command, dry, more in (
        ("two ranks on one GPU, NCCL", ranks, None, ()),
        ("two engines on one GPU, NCCL", engines, [*engines, "stage 3 fp32"], ()),
        ("two ranks on one GPU, NCCL, streams checked", ranks, None, (("TORCH_CUDA_SANITIZER", "1"),)),
        ("two engines on one GPU, NCCL, one is killed", killed, killed, ()),
    ):
        attempts = " || ".join(
            f"timeout 90 env {transport} {shlex.join(command)}" for transport in transports
        )
        steps.append(
            Step(
                name,
                ["bash", "-c", attempts],
                380,
                (*shared, *more),
                needs,
                dry=dry,
            )
        )
    return steps


def against_float64(
    name: str,
    tests: list[str],
    environment: tuple[tuple[str, str], ...],
    needs: tuple[str, ...] = ("a CUDA GPU",),
) -> Step:
    """Return the step that runs tests of ``tests/gpu`` in six processes; in a dry run they are only collected."""
    pytest = python("-m", "pytest", "-p", "no:cacheprovider", *tests)
    return Step(
        f"{name} against float64",
        [*pytest, "-v", "-n", "6"],
        120,
        environment,
        needs,
        dry=[*pytest, "--co", "-q"],
    )


def timings(out: Path, environment: tuple[tuple[str, str], ...]) -> list[Step]:
    """Return the steps of the part ``time``: flat passes, iteration, products, a rank of many."""
    common = python("benchmarks/newton_schulz.py", "--threads", "1")
    tiny = ["--seconds", "0.05", "--shapes", "32x64", "--sizes", "64", "--numel", "4096"]
    shapes = ["1024x1024", "1024x2816", "2048x2048", "2048x5504", "4096x4096", "4096x11008"]
    busy = ["--sizes", "2048", "4096", "--busy", "0", "8", "16", "24"]
    steps = []
    for name, part, result, seconds, options in (
        ("flat passes", "flat", "flat", 60, ["0.5"]),
        ("iteration at six shapes", "iteration", "iteration", 480, ["0.5", "--shapes", *shapes]),
        ("symmetric products", "sym_gemm", "sym_gemm", 120, ["0.5"]),
        ("symmetric products beside a busy kernel", "sym_gemm", "sym_gemm-busy", 300, ["2", *busy]),
    ):
        command = [*common, "--only", part, "--out", str(out / result)]
        cuda = [*command, "--device", "cuda", "--seconds", *options]
        steps.append(Step(name, cuda, seconds, environment, dry=command + tiny, result=result))
    share = python("benchmarks/step_launches.py", "--out", str(out / "share"), "--world")
    cuda = [*share, "8", "64", "512", "--device", "cuda", "--model", "llama-7b"]
    dry = [*share, "8", "--rank", "3", "--model", "tiny", "--seconds", "0.1"]
    return [*steps, Step("a rank's share", cuda, 120, environment, dry=dry, result="share")]


def trainings(out: Path, environment: tuple[tuple[str, str], ...]) -> list[Step]:
    """Return a step for each model, accumulation and set of optimizers that fit on a GPU together.

    DeepSpeed's Muon runs without clipping: it would clip its updates, and losses could not be compared.
    """
    ours, *theirs = OPTIMIZERS
    adamw, muon = [ours, *theirs[:2]], [ours, *theirs[2:]]
    steps = []
    for model, accumulation, clipping, names in (
        *(("1.3B", accumulation, 1, adamw) for accumulation in (1, 4, 16)),
        ("1.3B", 1, 0, muon[:2]),
        *(("350M", accumulation, 1, adamw) for accumulation in (1, 4)),
        ("350M", 1, 0, muon),
        ("7B", 1, 1, [ours]),  # AdamW's state does not fit beside it
    ):
        result = f"steps-{model}-{accumulation}-clipping-{clipping}"
        command = python("benchmarks/whole_steps.py", "--out", str(out / result), "--optimizers", *names)
        command += ["--accumulation", str(accumulation), "--clipping", str(clipping), "--profile"]
        dry = [*command, "--model", "tiny", "--steps", "6", "--length", "32"] if model == "350M" else None
        cuda = [*command, "--device", "cuda", "--model", model]
        cuda += ["--sequences", "1", "--steps", "9"] if model == "7B" else []
        name = f"{model}, accumulation {accumulation}, clipping {clipping}"
        steps.append(Step(name, cuda, 240, environment, dry=dry, result=result))
    return steps


def available(facts: dict[str, Any]) -> set[str]:
    """Return which of the things that steps need this machine has."""
    programs = {name for name in ("nvcc", "compute-sanitizer") if shutil.which(name, path=search_path())}
    gpus = {"a CUDA GPU"} if facts["gpus"] else set()
    nccl = {"NCCL 2.30, in torch 2.14.1 or by LD_PRELOAD"} if facts.get("NCCL", "") >= "2.30" else set()
    return programs | gpus | nccl | ({"two GPUs"} if facts["gpus"] > 1 else set())


def search_path() -> str:
    """Return PATH with the folders of CUDA's programs: those of pip, and the usual one."""
    packages = Path(sysconfig.get_path("platlib"), "nvidia")
    folders = [packages / name / "bin" for name in ("cu13", "cu12", "cuda_nvcc")]
    path = [os.environ.get("PATH", os.defpath), *map(str, folders), "/usr/local/cuda/bin"]
    return os.pathsep.join([str(Path(PYTHON).parent), *path])


def environment_of(step: Step, site: Path | None) -> dict[str, str]:
    """Return the environment of a step's process."""
    # quack's compiler is in a folder of its own, which its package of metadata, left out here, would add to the path.
    packages = [str(site), str(site / "nvidia_cutlass_dsl" / "dsl_packages")] if site else []
    paths = [str(ROOT), *packages, os.environ.get("PYTHONPATH", "")]
    return {
        "TORCH_EXTENSIONS_DIR": str(WORK / "extensions"),
        **os.environ,
        # The builders of DeepSpeed (FusedAdam) raise on 9.0a, which some machines set; ours read 9.0 as that.
        "TORCH_CUDA_ARCH_LIST": re.sub(r"(?<=\d)[af]", "", os.environ.get("TORCH_CUDA_ARCH_LIST", "")),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "4",
        "PATH": search_path(),
        **dict(step.environment),
    }


def run_step(step: Step, log: Path, *, site: Path | None = None) -> str:
    """Run one step in a session of its own, which ends with it; return how it ended."""
    with log.open("wb") as output:
        output.write(f"==== {step.name}: {' '.join(step.command)[:500]}\n".encode())
        output.flush()
        try:
            child = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env=environment_of(step, site),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            return f"did not start: {error}"
        RUNNING.add(child.pid)
        try:
            code = child.wait(timeout=step.seconds)
            ended = "ok" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            ended = "took too long"
        finally:
            # What it has started, too: otherwise it would keep the memory of the GPU.
            kill_session(child.pid)
            child.poll()
            RUNNING.discard(child.pid)
    text = log.read_bytes()
    if len(text) > LOG_BYTES:
        half = LOG_BYTES // 2
        log.write_bytes(text[:half] + b"\n[...]\n" + text[-half:])
    return ended


def kill_session(session: int) -> None:
    """Kill the processes of a session, in any process group: ninja gives every compiler one of its own.

    One that waits for a GPU inside the driver may not react; it is left behind after some seconds.
    """
    for _ in range(200):
        stats = map(read_stat, Path("/proc").glob("[0-9]*"))
        processes = [
            process for process, its_session, has_ended in stats if its_session == session and not has_ended
        ]
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def read_stat(folder: Path) -> tuple[int, int, bool]:
    """Return a process, its session, and whether it has ended; (0, 0, True) if it is gone."""
    try:
        state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return 0, 0, True
    return int(folder.name), int(session), state in "ZX"


def machine_facts(site: Path | None) -> dict[str, Any]:
    """Return card and versions, read in a process of its own, which leaves no CUDA context here."""
    environment = environment_of(Step("machine", [], 120), site)
    run = subprocess.run(
        python("-c", MACHINE), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    if run.returncode:
        raise SystemExit(f"{PYTHON} cannot import torch, or the GPU does not answer:\n{run.stderr[-2000:]}")
    facts: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return facts


class Session:
    """The outcomes and results of one card and revision, in a folder; several calls add to them.

    Attributes:
        state: What the JSON of the page has: ``machine``, ``revision``, ``dry run``, ``started``, ``steps`` and
            ``results``.
    """

    def __init__(self, out: Path, *, dry_run: bool, facts: dict[str, Any], fresh: bool = False) -> None:
        self.out, self.dry_run, self._saving = out, dry_run, threading.Lock()
        self.logs = out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        identity = {"machine": facts, "revision": support.revision(), "dry run": dry_run}
        self._file = out / "state.json"
        self.state: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}
        if fresh or any(self.state.get(key) != value for key, value in identity.items()):
            if self.state:
                print("another card, version or commit than in the results there: all steps run", flush=True)
            started = time.strftime("%Y-%m-%d")
            self.state = {**identity, "started": started, "steps": {}, "results": {}}
            for step in (step for steps in steps_of(out).values() for step in steps if step.result):
                for ending in (".json", ".md"):
                    (out / f"{step.result}{ending}").unlink(missing_ok=True)

    @property
    def page(self) -> Path:
        """The page."""
        card = re.sub(r"[^a-z0-9]+", "-", self.state["machine"]["card"].lower()).strip("-")
        dry = "dry-run-" if self.dry_run else ""
        return self.out / f"gpu-{dry}{card}-{self.state['started']}.md"

    def outcome(self, part: str, step: Step) -> dict[str, Any]:
        """Return what became of a step in earlier calls or in this one."""
        found: dict[str, Any] = self.state["steps"].setdefault(part, {}).setdefault(step.name, {})
        return found

    def run(
        self,
        parts: dict[str, list[Step]],
        has: Iterable[str],
        *,
        limit: float = math.inf,
        site: Path | None = None,
        jobs: int = 1,
    ) -> bool:
        """Run the steps that are not "ok" yet, ``jobs`` of an untimed part side by side; return whether none failed.

        After ``limit`` seconds no step is running.
        """
        has, deadline = set(has), time.monotonic() + limit
        built: set[str] = set()
        for part, steps in parts.items():
            left = [step for step in steps if self.outcome(part, step).get("ended") != "ok"]
            is_finished = all(step.prepares for step in left)
            repeated = [
                step for step in steps if step.prepares and not is_finished and step.name not in built
            ]
            chosen = [step for step in steps if step in left or step in repeated]

            def run(step: Step, part: str = part) -> None:
                self._run(part, step, has, deadline, built, site)

            for prepares in (True, False):  # what later steps need first
                together = [step for step in chosen if step.prepares is prepares]
                if jobs == 1 or part not in UNTIMED:
                    for step in together:
                        run(step)
                    continue
                with ThreadPoolExecutor(jobs) as pool:
                    try:
                        list(pool.map(run, together))
                    except BaseException:  # this process is being ended, and what it has started with it
                        pool.shutdown(wait=False, cancel_futures=True)
                        for session in list(RUNNING):
                            kill_session(session)
                        raise
        ended = [self.outcome(part, step)["ended"] for part, steps in parts.items() for step in steps]
        return all(end == "ok" or end.startswith("left out") for end in ended)

    def _run(
        self, part: str, step: Step, has: set[str], deadline: float, built: set[str], site: Path | None
    ) -> None:
        outcome, chosen = dict(self.outcome(part, step)), self._chosen(step, has)
        seconds = min(step.seconds * (DRY_RUN_FACTOR if self.dry_run else 1), deadline - time.monotonic())
        if isinstance(chosen, str):
            outcome |= {"ended": chosen}
        elif seconds < 5:
            outcome.setdefault("ended", "not started: no time left")
        elif step.name in built:
            outcome |= {"ended": "ok", "seconds": 0}
        else:
            print(f"== {part}: {step.name} (at most {seconds:.0f} s)\n", end="", flush=True)
            log = self.logs / f"{re.sub('[^A-Za-z0-9]+', '-', f'{part}-{step.name}')}.log"
            started = time.monotonic()
            ended = run_step(Step(step.name, chosen, seconds, self._environment(step)), log, site=site)
            outcome |= {"ended": ended, "seconds": round(time.monotonic() - started, 1), "log": log.name}
            print(f"   {step.name}: {ended}, {outcome['seconds']} s\n", end="", flush=True)
            if step.prepares and ended == "ok":
                built.add(step.name)
        with self._saving:  # a step beside it must not change the state while it is written
            self.outcome(part, step).update(outcome)
            self.save(step)

    def _chosen(self, step: Step, has: set[str]) -> list[str] | str:
        """Return the command that runs, or why none does."""
        if self.dry_run:
            return step.dry or "left out: needs a GPU"
        missing = [need for need in step.needs if need not in has]
        return f"left out: needs {' and '.join(missing)}" if missing else step.command

    def _environment(self, step: Step) -> tuple[tuple[str, str], ...]:
        if not self.dry_run:
            return step.environment
        return (*step.environment, ("DS_ACCELERATOR", "cpu"), ("OMP_NUM_THREADS", "1"))

    def save(self, step: Step | None = None) -> None:
        """Write state and page, after every step so that a call that is stopped loses nothing."""
        result = self.out / f"{step.result}.json" if step and step.result else None
        if result and step and result.exists():
            self.state["results"][step.result] = json.loads(result.read_text())
        text = json.dumps(self.state, indent=1) + "\n"
        self._file.write_text(text)
        self.page.with_suffix(".json").write_text(text)
        self.page.write_text("\n".join(page_of(self.state, self.logs)) + "\n")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty one."""
    return [*support.table_of([dict(zip(heads, row, strict=True)) for row in rows]), ""]


def page_of(state: dict[str, Any], logs: Path) -> list[str]:
    """Return the page: machine, outcomes, speeds, whole steps, losses, and the ends of the logs of what failed."""
    facts, results = state["machine"], state["results"]
    lines = [f"# deepspeed_muon on {facts['card']}, {state['started']}", ""]
    if state["dry run"]:
        lines += ["A dry run on a CPU, with tiny shapes: the numbers say nothing about any GPU.", ""]
    versions = {**facts, "deepspeed_muon": state["revision"]}
    lines += table(
        ("machine", ""),
        ((key, ", ".join(value) if isinstance(value, list) else value) for key, value in versions.items()),
    )
    lines += ["## Parts", ""]
    outcomes = [
        (part, name, outcome.get("ended", "not started"), outcome.get("seconds"), outcome.get("log"))
        for part, steps in state["steps"].items()
        for name, outcome in steps.items()
    ]
    lines += table(("part", "step", "outcome", "seconds"), (row[:4] for row in outcomes))
    lines += ["## Speed", ""]
    for name, title in (
        (
            "flat",
            "Flat passes, GB/s, by the dtype of the send buffer. The momentum is fp32 unless its dtype is named.",
        ),
        (
            "sym_gemm",
            "Symmetric products, TFLOP/s. Only the lower triangle counts, for cuBLAS the full product.",
        ),
        (
            "sym_gemm-busy",
            "Symmetric products, TFLOP/s, while another kernel occupies so many multiprocessors.",
        ),
        ("iteration", "Newton-Schulz: milliseconds of ours, and how many times as long each peer takes."),
        ("share", "What a rank of many computes in a step of llama-7b at ZeRO 3, without the network."),
    ):
        result = results.get(name, {})
        if rows := result.get(name.partition("-")[0]) or result.get("rows"):
            lines += [title, "", *support.table_of(rows), ""]
    lines += losses_of(results)
    failed = [row for row in outcomes if row[4] and not row[2].startswith("ok")]
    if failed:
        lines += ["## What failed", ""]
    for part, name, ended, _, log in failed:
        path = logs / log
        end = path.read_text(errors="replace").splitlines()[-25:] if path.exists() else []
        lines += [f"{part}, {name}: {ended}", "", "```text", *(line[:300] for line in end), "```", ""]
    return [
        *lines,
        "Please attach this page and the JSON beside it to an issue, with the form *A GPU ran it*.",
    ]


def losses_of(results: dict[str, Any]) -> list[str]:
    """Return whole steps and losses step by step of every run that trained."""
    lines = []
    for name in sorted(name for name in results if name.startswith("steps-")):
        rows = results[name]["rows"]
        lines += [f"## Whole {name.replace('-', ' ')}", "", *support.table_of(results[name]["table"]), ""]
        lines += ["Loss of each step:", ""]
        longest = max(len(row["losses"]) for row in rows)
        lines += table(
            ("step", *(row["optimizer"] for row in rows)),
            (
                (step + 1, *(row["losses"][step] if step < len(row["losses"]) else None for row in rows))
                for step in range(longest)
            ),
        )
        kernels = {kernel["problem"]: kernel for row in rows for kernel in row.get("kernels", [])}
        lines += ["Newton-Schulz: what ran.", ""]
        ran = ([kernel["problem"], kernel["ran"], kernel["note"]] for kernel in kernels.values())
        lines += table(("problem", "ran", "no graph because"), ran)
    return lines


def download(names: list[str], folder: Path, version: str, mib: float) -> None:
    """Put the wheels of packages (Linux on x86-64, CPython of that version) into a folder, as many as fit."""
    folder.mkdir(parents=True, exist_ok=True)
    tags = ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")
    binary = ["--only-binary=:all:", f"--python-version={version}", "--implementation=cp"]
    binary += [f"--platform=manylinux{tag}_x86_64" for tag in tags]
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            command = [PYTHON, "-m", "pip", "download", "-q", "--no-deps", "-d", temporary, *binary]
            tried = subprocess.run([*command, name], check=False, stderr=subprocess.DEVNULL)
            if tried.returncode:
                # Only as source, and pure Python. DeepSpeed's set-up asks for torch: this environment has it.
                options = ["-q", "--no-deps", "--no-build-isolation", "-w", temporary]
                subprocess.run([PYTHON, "-m", "pip", "wheel", *options, name], check=True)
            wheels = [*Path(temporary).glob("*.whl")]
            stored = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
            if stored + sum(wheel.stat().st_size for wheel in wheels) > mib * 2**20:
                print(f"{name} is left out: with it the wheels would take more than {mib:g} MiB")
                continue
            for wheel in wheels:
                shutil.move(wheel, folder / wheel.name)


def unpack(folders: list[Path], site: Path) -> None:
    """Unpack the wheels of some folders into one, those that are not there yet."""
    for wheel in sorted(wheel for folder in folders for wheel in folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
            if not (site / record).exists():
                archive.extractall(site)


def site_folder() -> Path:
    """Return where wheels are unpacked for this interpreter: a wheel with C++ code is for one version of Python."""
    return WORK / f"site-{sys.implementation.cache_tag}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; or: wheels FOLDER")
    parser.add_argument("--dry-run", action="store_true", help="walk the parts on a CPU")
    parser.add_argument("--out", type=Path, default=OUT, help=f"results ({OUT.relative_to(ROOT)})")
    parser.add_argument("--fresh", action="store_true", help="run also what is ok in the results there")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="of this call")
    parser.add_argument("--jobs", type=int, default=1, help="steps of check and sanitize side by side (1)")
    parser.add_argument("--wheels", type=Path, nargs="+", metavar="FOLDER", help="wheels to use")
    parser.add_argument("--python", default="3.12", help="for wheels: the version of the interpreter (3.12)")
    parser.add_argument("--mib", type=float, default=math.inf, help="for wheels: the most that they take")
    arguments = parser.parse_args()
    if arguments.parts[:1] == ["wheels"]:
        if len(arguments.parts) != 2:
            parser.error("wheels needs a folder")
        download([*WHEELS, *PEERS], Path(arguments.parts[1]), arguments.python, arguments.mib)
        return 0
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    out = arguments.out.resolve()
    # By an exception, so that the step that is running is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    WORK.mkdir(parents=True, exist_ok=True)
    site = None
    if arguments.wheels:
        site = site_folder()
        unpack(arguments.wheels, site)
    facts = machine_facts(site)
    has = available(facts)
    if not arguments.dry_run and "a CUDA GPU" not in has:
        print("torch finds no CUDA GPU; DRY_RUN=1 (--dry-run) walks the parts on a CPU", file=sys.stderr)
        return 2
    session = Session(out, dry_run=arguments.dry_run, facts=facts, fresh=arguments.fresh)
    steps = steps_of(out)
    all_right = session.run(
        {part: steps[part] for part in arguments.parts or PARTS},
        has,
        limit=arguments.limit,
        site=site,
        jobs=max(1, arguments.jobs),
    )
    print(f"{session.page}\nPlease attach this page and the JSON beside it to an issue.")
    return 0 if all_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
