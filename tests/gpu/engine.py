"""Real engines on one GPU, ZeRO 0 to 3, against the float64 reference.

``DS_ACCELERATOR=cuda python -m tests.gpu.engine`` runs every case and tells how it went; the status says whether all
were right. Arguments choose cases by name. With ``DS_ACCELERATOR=cpu`` it runs on a CPU. Started by torchrun, several
ranks train together, and share the GPU if there is one: over NCCL, which needs 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
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
    ("stage 2 fp32, offload", {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu"}}}),
    ("stage 3 bf16, native kernels", {"stage": 3, "precision": "bf16", "params": {"ns_backend": "ops"}}),
    (
        "stage 3 bf16, int8 momentum, native kernels",
        {"stage": 3, "precision": "bf16", "params": {"ns_backend": "ops", "momentum_dtype": "int8"}},
    ),
    ("stage 3 bf16, NorMuon", {"stage": 3, "precision": "bf16", "params": {"variant": "normuon"}}),
]


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


def main() -> int:
    """Run all cases; return the exit status."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29656")
    on_gpu = os.environ.get("DS_ACCELERATOR") != "cpu"
    if on_gpu:
        # DeepSpeed takes the GPU of this number.
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl" if on_gpu else "gloo")
    print(f"deepspeed_muon {deepspeed_muon.__version__}, deepspeed {deepspeed.__version__}")
    wrong = 0
    chosen = sys.argv[1:] or [name for name, _ in CASES]
    for name in chosen:
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
