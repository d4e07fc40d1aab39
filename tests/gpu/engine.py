"""Real engines on one GPU, ZeRO 0 to 3, against the float64 reference.

``DS_ACCELERATOR=cuda python -m tests.gpu.engine`` runs every case and tells how it went; the status says whether all
were right. Arguments choose cases by name. With ``DS_ACCELERATOR=cpu`` it runs on a CPU. Started by torchrun, several
ranks train together, and share the GPU if there is one: over NCCL, which needs 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1.
``--killed`` starts two ranks itself, kills one in a step, and says how the other one ends.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import deepspeed_muon
from tests.support import training
from tests.support.comparisons import all_within, relative
from tests.support.contract import STEPS, compare, reference
from tests.support.rounding import HALF_MODEL, limits

CASES: list[tuple[str, dict[str, Any]]] = [
    *((f"stage {stage} fp32", {"stage": stage}) for stage in (0, 1, 2, 3)),
    *(
        (f"stage {stage} {half}", {"stage": stage, "precision": half})
        for stage in (1, 2, 3)
        for half in ("bf16", "fp16")
    ),
    *(
        (f"stage {stage} fp32, offload", {"stage": stage, "zero": {"offload_optimizer": {"device": "cpu"}}})
        for stage in (2, 3)
    ),
    *((f"stage {stage} fp32, resumed", {"stage": stage, "resumed": True}) for stage in (1, 2, 3)),
    ("stage 3 bf16, native kernels", {"stage": 3, "precision": "bf16", "params": {"ns_backend": "ops"}}),
    (
        "stage 3 bf16, int8 momentum, native kernels",
        {"stage": 3, "precision": "bf16", "params": {"ns_backend": "ops", "momentum_dtype": "int8"}},
    ),
    ("stage 3 bf16, NorMuon", {"stage": 3, "precision": "bf16", "params": {"variant": "normuon"}}),
]
TIMEOUT = timedelta(seconds=20)
"""Of the ranks of ``--killed``."""


def check(settings: dict[str, Any]) -> str:
    """Train and compare on the first rank; return what was measured there, or raise.

    Must be called by all ranks.
    """
    precision = settings.get("precision", "fp32")
    variant = settings.get("params", {}).get("variant", "muon")
    if precision != "fp32":
        # As in training: the iteration in the GPU's own dtype.
        settings = {
            **settings,
            "params": {"ns_dtype": "auto", "wire_dtype": "auto", **settings.get("params", {})},
        }
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results: list[Any] = [None] * world_size
    with tempfile.TemporaryDirectory() as folder:
        settings = {**settings}
        if settings.pop("resumed", False):
            folders = [folder]
            dist.broadcast_object_list(folders, 0)  # that of rank 0 is removed after the gather
            settings["folder"] = folders[0]
        dist.all_gather_object(results, training.train(rank, world_size, steps=STEPS, **settings))
    if rank:
        return ""
    if precision == "fp32":
        compare(results, "toy", world_size, 0.0)
        return "within the bounds of the CPU's tests"
    start, end, _, _ = reference("toy", world_size, 0.0, variant=variant)
    arithmetic = replace(HALF_MODEL[precision], products=torch.float16, exchanged=torch.bfloat16)
    if settings["params"].get("momentum_dtype") == "int8":
        arithmetic = replace(arithmetic, momentum=torch.int8)
    errors = {name: relative(results[0]["params"][name], end[name], start[name]) for name in end}
    all_within(
        errors, limits(reference, "toy", world_size, 0.0, variant=variant, arithmetic=arithmetic).paths
    )
    error = max(errors.values())
    return f"{error:.3f} of the path"


def train_until_killed() -> None:
    """Train as one of two ranks, and print the number of every step that is done."""
    engine = training.make_engine(training.ds_config(3))
    for step in itertools.count():
        training.run_step(engine, step, dist.get_rank(), 2, 1)
        print("step", step, flush=True)


def check_killed_rank() -> str:
    """Kill the second of two ranks; return how the first one ended, or raise if it did not, or without an error."""
    command = [sys.executable, "-m", "tests.gpu.engine", "--until-killed"]
    common = {**os.environ, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            command, env={**common, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    try:
        assert ranks[1].stdout is not None
        for line in ranks[1].stdout:
            if line.startswith("step 2"):
                break
        else:
            raise RuntimeError("the rank that was to be killed ended before its third step")
        ranks[1].kill()
        start = time.monotonic()
        # Twice the time-out: that of the operation, and that of the watchdog that ends the process.
        status = ranks[0].wait(2 * TIMEOUT.total_seconds())
    finally:
        for rank in ranks:
            rank.kill()
    if status == 0:
        raise RuntimeError("the rank that was left ended without an error")
    return f"the rank that was left ended after {time.monotonic() - start:.0f} s, with status {status}"


def main() -> int:
    """Run all cases; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="of CASES; default: all")
    parser.add_argument("--killed", action="store_true")
    parser.add_argument("--until-killed", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29656")
    if arguments.killed:
        print(check_killed_rank())
        return 0
    on_gpu = os.environ.get("DS_ACCELERATOR") != "cpu"
    if on_gpu:
        # DeepSpeed takes the GPU of this number.
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(
        "nccl" if on_gpu else "gloo", **({"timeout": TIMEOUT} if arguments.until_killed else {})
    )
    if arguments.until_killed:
        train_until_killed()
    print(f"deepspeed_muon {deepspeed_muon.__version__}, deepspeed {deepspeed.__version__}")
    wrong = 0
    for name in arguments.cases or dict(CASES):
        settings = dict(CASES)[name]
        try:
            line = f"ok      {name}: {check(settings)}"
            if dist.get_rank() == 0:
                print(line, flush=True)
        except Exception:  # every case is worth its own line
            wrong += 1
            print(f"FAILED  {name}:\n{traceback.format_exc(limit=4)}", flush=True)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
