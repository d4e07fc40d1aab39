#!/usr/bin/env python3
"""Trains with two commits of this project, side by side, and says whether every bit of the results is the same.

    python scripts/compare_commits.py BASE [TREE] [--only CASE ...] [--output FILE.md]

BASE and TREE are folders with a checkout, or commits of this repository, which are unpacked into a temporary folder;
TREE is this checkout unless given. Each side trains its own small models of ``tests/support`` for some steps in every
configuration of ``CASES``, on 1, 2 or 4 gloo ranks on the CPU, with ``ns_backend: torch``. After the last step every
rank takes the SHA-256 of each fp32 master, each state tensor, each weight of the model, and of all losses and gradient
norms. The script prints a table and ends with code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
STEPS = 4
MUON = {
    "muon_lr": 0.02,
    "adam_lr": 3e-3,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "ns_backend": "torch",
    "ns_dtype": "fp32",  # bf16 would hide a difference in the last bits of the momentum
    "exchange_chunk_numel": 700,
    "health": 2,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration; what it leaves out has DeepSpeed's default.

    Attributes:
        ranks: Number of ranks.
        stage: ZeRO stage.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        model: The kind of ``tests/support/models.py``.
        tensor: Size of the tensor-parallel groups; above 1 the model is ``megatron_model``.
        accumulation: Micro-batches of a step.
        clipping: Largest norm of the gradients.
        zero: ``zero_optimization``, beside the stage.
        params: ``optimizer.params``, beside :data:`MUON`.
    """

    ranks: int
    stage: int
    precision: str = "fp32"
    model: str = "toy"
    tensor: int = 1
    accumulation: int = 1
    clipping: float = 0.0
    zero: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SMALL = {"sub_group_size": 600}
NORMUON = {"variant": "normuon"}
SPLITS = {"matrices": {"*q_proj.weight": {"heads": 4}, "*k_proj.weight": {"heads": 2}}}
FUSED = {
    "matrices": {
        "*": {"heads": "config"},
        "*.qkv_proj.weight": {"split": "qkv"},
        "*.gate_up_proj": {"split": "gate_up"},
    }
}

# Tensor-parallel cases come last of their number of ranks: DeepSpeed keeps the groups that a program hands to it.
CASES = {
    "1-stage0": Case(1, 0, params=NORMUON),
    "1-stage1-fp16": Case(1, 1, "fp16", params={"ns_schedule": "polar_express"}),
    "1-stage3-bf16-offload": Case(1, 3, "bf16", zero={**OFFLOAD, **SMALL}),
    "2-stage0-bf16": Case(2, 0, "bf16", "mixed", params=NORMUON),
    "2-stage1-offload": Case(2, 1, zero=OFFLOAD, params={**NORMUON, "weight_decay_mode": "cautious"}),
    "2-stage2-bf16-offload": Case(2, 2, "bf16", "heads", zero=OFFLOAD, params=SPLITS),
    "2-stage3-fp16-offload": Case(2, 3, "fp16", clipping=0.5, zero={**OFFLOAD, **SMALL}),
    "2-stage3-splits": Case(2, 3, model="fused", params=FUSED),
    "2-stage1-tensor2": Case(2, 1, tensor=2),
    "4-stage0": Case(4, 0, model="convolutions", clipping=0.5, params={"exchange_overlap": False}),
    "4-stage1-round-robin": Case(4, 1, accumulation=2, zero={"round_robin_gradients": True}),
    "4-stage2-qk-clip": Case(
        4, 2, "bf16", "grouped", params={"qk_clip": {"threshold": 0.5}, "ns_dtype": "bf16"}
    ),
    "4-stage2-muon-eq": Case(4, 2, "bf16", "fused", params={**FUSED, "variant": "muon_eq"}),
    "4-stage2-normuon": Case(4, 2, accumulation=2, zero=OFFLOAD, params=NORMUON),
    "4-stage3-normuon": Case(4, 3, "bf16", zero=SMALL, params=NORMUON),
    "4-stage3-standard": Case(4, 3, model="adapters", params={"ns_method": "standard"}),
    "4-stage0-tensor2": Case(4, 0, tensor=2, params={"momentum_dtype": "bf16"}),
    "4-stage2-tensor2": Case(4, 2, "fp16", tensor=2, clipping=0.5),
    "4-stage3-tensor2": Case(4, 3, "bf16", tensor=2, zero={**OFFLOAD, **SMALL}),
}


def ds_config(case: Case) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a case."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "Muon", "params": {**MUON, **case.params}},
        "zero_optimization": {"stage": case.stage, **case.zero},
    }
    if case.stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if case.precision != "fp32":
        config[case.precision] = {"enabled": True}
    if case.precision == "fp16":
        config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 1000}
    return config


def digest(value: Any) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bytes, or of a plain value."""
    import torch

    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    tensor = value.detach().cpu().contiguous()
    sha256 = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def train(rank: int, world_size: int, *, tree: str, case: dict[str, Any]) -> dict[str, Any]:
    """Train one case on this rank with the package of ``tree``; return digests and losses."""
    # Ranks are forked from a process that has imported the package of this checkout, and hooked DeepSpeed with it.
    if "deepspeed_muon" in sys.modules and not str(sys.modules["deepspeed_muon"].__file__).startswith(tree):
        sys.modules["deepspeed_muon"].unregister()
        for name in [*sys.modules]:
            if name.split(".")[0] in ("deepspeed_muon", "tests"):
                del sys.modules[name]
    sys.path.insert(0, tree)
    import deepspeed

    import deepspeed_muon
    from deepspeed_muon import ops
    from tests.support import attention_models  # noqa: F401  # makes kinds of models known
    from tests.support.models import batch, build
    from tests.support.tensor_parallel import Mpu, megatron_model

    for module in (deepspeed_muon, ops):
        if Path(tree) not in Path(str(module.__file__)).resolve().parents:
            raise RuntimeError(
                f"{module.__name__} was imported from {module.__file__}, which is not in {tree}"
            )
    this = Case(**case)
    mpu = Mpu(this.tensor) if this.tensor > 1 else None
    model: Any = build(this.model) if mpu is None else megatron_model(mpu.tensor)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=ds_config(this), mpu=mpu
    )
    optimizer = deepspeed_muon.muon_optimizer(engine)
    masters = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
    if masters is None:
        masters = [param for group in optimizer.param_groups for param in group["params"]]
    before, losses, norms = [digest(master) for master in masters], [], []
    for step in range(STEPS):
        for micro in range(this.accumulation):
            loss = engine(*batch(step, 10 * (rank // this.tensor) + micro))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm()))
    digests = {"losses": digest(losses), "gradient norms": digest(norms)}
    for number, master in enumerate(masters):
        digests[f"master {number}"] = digest(master)
        for key, value in sorted(optimizer.state.get(master, {}).items()):
            digests[f"state {number} {key}"] = digest(value)
    for name, param in engine.module.named_parameters():
        digests[f"weight {name}"] = digest(getattr(param, "ds_tensor", param.data))
    moved = [
        digests[f"master {number}"] != old for number, old in enumerate(before) if masters[number].numel()
    ]
    has_momentum = any(name.endswith("momentum_buffer") for name in digests)
    if not (all(moved) and has_momentum and all(map(math.isfinite, losses))) or engine.skipped_steps:
        raise RuntimeError(
            f"nothing was trained: masters moved {moved}, losses {losses}, entries {sorted(digests)}"
        )
    engine.destroy()
    return {"digests": digests, "losses": losses}


def checkout(revision: str, temporary: Path) -> tuple[Path, str]:
    """Return the folder of a side and what it is: a commit, with a note where files of the package were changed."""

    def git(folder: Path, *arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    if Path(revision).is_dir():
        tree = Path(revision).resolve()
        changed = git(tree, "status", "--porcelain", "--", "deepspeed_muon", "ops")
        return tree, git(tree, "rev-parse", "HEAD") + (" with uncommitted changes" if changed else "")
    commit = git(REPOSITORY, "rev-parse", "--verify", f"{revision}^{{commit}}")
    tree = temporary / commit
    tree.mkdir()
    archive = ["git", "-C", str(REPOSITORY), "archive", commit, "deepspeed_muon", "ops", "tests"]
    packed = subprocess.run(archive, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=packed, check=True)
    return tree, commit


def compare(base: str, tree: str, names: Sequence[str], output: Path | None) -> int:
    """Run both sides, print and write the table, and return the exit code."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.support.harness import RankPool
    from tests.support.native_ops import warm

    warm()
    started = time.monotonic()
    heading = ("configuration", "settings", "loss", "values", "SHA-256, base", "SHA-256, tree", "same")
    rows, wrong = ["| " + " | ".join(heading) + " |", "|---" * len(heading) + "|"], []
    with tempfile.TemporaryDirectory(prefix="compare_commits_") as temporary:
        sides = [checkout(what, Path(temporary)) for what in (base, tree)]
        for ranks in sorted({CASES[name].ranks for name in names}):
            chosen = [name for name in names if CASES[name].ranks == ranks]
            results: list[dict[str, Any]] = []
            for place, _ in sides:
                with RankPool(ranks) as pool:
                    results.append(
                        {
                            name: pool.run(
                                "scripts.compare_commits:train", tree=str(place), case=asdict(CASES[name])
                            )
                            for name in chosen
                        }
                    )
            for name in chosen:
                base_ranks, tree_ranks = ([rank["digests"] for rank in side[name]] for side in results)
                differing = [
                    f"{name}: rank {rank}: {key}"
                    for rank, (a, b) in enumerate(zip(base_ranks, tree_ranks, strict=True))
                    for key in a | b
                    if a.get(key) != b.get(key)
                ]
                wrong += differing
                losses = results[0][name][0]["losses"]
                default = asdict(Case(0, 0))
                told = {key: value for key, value in asdict(CASES[name]).items() if value != default[key]}
                cells = [
                    name,
                    json.dumps(told)[1:-1].replace('"', ""),
                    f"{losses[0]:.4f} to {losses[-1]:.4f}",
                    str(sum(map(len, base_ranks))),
                    *(
                        digest([sorted(each.items()) for each in side])[:12]
                        for side in (base_ranks, tree_ranks)
                    ),
                    f"**{len(differing)} differ**" if differing else "yes",
                ]
                rows.append("| " + " | ".join(cells) + " |")
                print(rows[-1], flush=True)
    print("\n".join(wrong))
    if output is not None:
        output.write_text(
            "# Two commits, the same bits\n\n"
            f"`python scripts/compare_commits.py BASE TREE` with base {sides[0][1]} and tree {sides[1][1]}.\n"
            f"{STEPS} steps for each configuration. A value is a master, a state tensor, a weight, all losses or all "
            "gradient norms on one rank after the last step; a SHA-256 (its first 12 digits) is over all of them.\n\n"
            + "\n".join(rows)
            + f"\n\n{f'{len(wrong)} values differ.' if wrong else 'Nothing differs.'}\n"
        )
    print(f"{len(names)} configurations, {len(wrong)} values differ, {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="folder with a checkout, or a commit")
    parser.add_argument("tree", nargs="?", default=str(REPOSITORY), help="the same; default: this checkout")
    parser.add_argument("--output", type=Path, help="Markdown file to write the table to")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    options = parser.parse_args()
    return compare(options.base, options.tree, options.only, options.output)


if __name__ == "__main__":
    sys.exit(main())
