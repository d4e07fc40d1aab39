#!/usr/bin/env python3
"""Trains with two commits of this project, side by side, and says whether every bit of the results is the same.

    python scripts/compare_commits.py BASE [TREE] [--output FILE.md]

BASE and TREE are folders with a checkout, or commits of this repository, which are unpacked into a temporary folder;
TREE is this checkout unless given. Each side trains a small model for some steps in every configuration of ``CASES``,
on 1, 2 or 4 gloo ranks on the CPU, with ``ns_backend: torch``. After the last step every rank takes the SHA-256 of each
fp32 master, each state tensor, each weight of the model, and of all losses and gradient norms. The script prints a
table and ends with code 1 if anything differs.

It needs an environment with torch and DeepSpeed; both sides use the one that runs it, and DeepSpeed's CPU Adam from
TORCH_EXTENSIONS_DIR (``.cache/torch_extensions`` of this checkout unless set). It takes three minutes on two idle
cores.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
WORLDS = (1, 2, 4)
TIMEOUT = 400.0
"""Seconds that all configurations of one world size may take on one side."""

STEPS = 4
VOCAB, WIDTH, HEADS, KEY_HEADS, HEAD_WIDTH = 29, 16, 4, 2, 4

MUON = {
    "muon_lr": 0.02,
    "adam_lr": 3e-3,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "ns_backend": "torch",
    "ns_dtype": "fp32",  # bf16 would hide a difference in the last bits of the momentum
    "exchange_chunk_numel": 700,
    "health": {"every": 2},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration; what it leaves out has DeepSpeed's default.

    Attributes:
        world: Number of ranks.
        stage: ZeRO stage.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        offload: Whether the optimizer's state lies on the CPU.
        tensor: Size of the tensor-parallel groups.
        sub_groups: ``sub_group_size``.
        accumulation: Micro-batches of a step.
        clipping: Largest norm of the gradients.
        params: ``optimizer.params``, beside :data:`MUON`.
    """

    world: int
    stage: int
    precision: str = "fp32"
    offload: bool = False
    tensor: int = 1
    sub_groups: int | None = None
    accumulation: int = 1
    clipping: float = 0.0
    params: dict[str, Any] = field(default_factory=dict)


NORMUON = {"variant": "normuon"}
DISTRIBUTED = {"tensor_parallel_mode": "distributed"}
SPLITS = {"heads": {"*q_proj.weight": 4, "*k_proj.weight": 2}, "split": {"qkv.weight": [0.5, 0.25, 0.25]}}

# Tensor-parallel cases come last in their world: DeepSpeed keeps the groups that a program hands to it.
CASES = {
    "1-stage0": Case(1, 0, params=NORMUON),
    "1-stage1-fp16": Case(1, 1, "fp16", params={"ns_schedule": "polar_express"}),
    "1-stage3-bf16-offload": Case(1, 3, "bf16", offload=True, sub_groups=600),
    "2-stage0-bf16": Case(2, 0, "bf16", params=NORMUON),
    "2-stage1-offload": Case(2, 1, offload=True, params={**NORMUON, "weight_decay_mode": "cautious"}),
    "2-stage2-given": Case(
        2, 2, "bf16", offload=True, params={"order": "given", "torch_adam": True, **SPLITS}
    ),
    "2-stage3-fp16-offload": Case(2, 3, "fp16", offload=True, sub_groups=600, clipping=0.5),
    "2-stage3-splits": Case(2, 3, params={"share_matrices": 2, **SPLITS}),
    "2-stage1-tensor2": Case(2, 1, tensor=2, params=DISTRIBUTED),
    "4-stage0": Case(4, 0, clipping=0.5, params={"exchange_overlap": False}),
    "4-stage1-shared": Case(4, 1, accumulation=2, params={"share_matrices": 4}),
    "4-stage2-qk-clip": Case(4, 2, "bf16", params={"qk_clip": {"threshold": 0.5}, "ns_dtype": "bf16"}),
    "4-stage2-normuon": Case(4, 2, offload=True, accumulation=2, params={**NORMUON, "order": "given"}),
    "4-stage3-normuon": Case(4, 3, "bf16", sub_groups=600, params=NORMUON),
    "4-stage3-given": Case(4, 3, params={"order": "given", "ns_method": "standard"}),
    "4-stage0-tensor2": Case(4, 0, tensor=2, params={"momentum_dtype": "bf16"}),
    "4-stage2-tensor2": Case(4, 2, "fp16", tensor=2, clipping=0.5),
    "4-stage3-tensor2": Case(4, 3, "bf16", offload=True, tensor=2, sub_groups=600, params=DISTRIBUTED),
}


# ---- one rank


class TreeFinder:
    """Imports ``deepspeed_muon`` and ``deepspeed_muon.ops`` from one checkout, whatever is installed."""

    def __init__(self, tree: Path) -> None:
        self._places = {"deepspeed_muon": tree / "deepspeed_muon", "deepspeed_muon.ops": tree / "ops"}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        place = self._places.get(name)
        return None if place is None else importlib.util.spec_from_file_location(name, place / "__init__.py")


def import_tree(tree: Path) -> Any:
    """Import the package of a checkout."""
    sys.meta_path.insert(0, TreeFinder(tree))
    return importlib.import_module("deepspeed_muon")


def imported_from(tree: Path) -> list[str]:
    """Return where the package and its operators came from.

    Raises:
        RuntimeError: If a module of the package lies outside of the checkout.
    """
    for name, module in sorted(sys.modules.items()):
        place = getattr(module, "__file__", None)
        ours = name == "deepspeed_muon" or name.startswith("deepspeed_muon.")
        if ours and place is not None and tree not in Path(place).resolve().parents:
            raise RuntimeError(f"{name} was imported from {place}, which is not in {tree}")
    return [str(sys.modules[name].__file__) for name in ("deepspeed_muon", "deepspeed_muon.ops")]


def build_model(tensor_group: Any) -> Any:
    """Return a model with attention, blocks of awkward sizes, a convolution and vectors; blocks cut over a group."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional as F

    from deepspeed_muon import QkRecorder

    class Enter(torch.autograd.Function):
        """Identity whose gradient is summed over the group."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=tensor_group)
            return grad

    class Leave(torch.autograd.Function):
        """Sum over the group whose gradient passes."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            x = x.contiguous()
            dist.all_reduce(x, group=tensor_group)
            return x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    class Linear(nn.Module):
        """Computes in fp32; ``dim`` is the side that a Megatron-style layer cuts."""

        def __init__(self, inputs: int, outputs: int, dim: int | None = None) -> None:
            super().__init__()
            weight = torch.randn(outputs, inputs) / inputs**0.5
            self.dim = dim if tensor_group is not None else None
            if self.dim is not None:
                shards = weight.chunk(dist.get_world_size(tensor_group), self.dim)
                weight = shards[dist.get_rank(tensor_group)].clone().contiguous()
            self.weight = nn.Parameter(weight)
            if self.dim is not None:
                self.weight.tensor_model_parallel, self.weight.partition_dim = True, self.dim

        def forward(self, x: Any) -> Any:
            if self.dim == 0:
                x = Enter.apply(x)
            x = F.linear(x, self.weight.float())
            return Leave.apply(x) if self.dim == 1 else x

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = Linear(WIDTH, HEADS * HEAD_WIDTH)
            self.k_proj = Linear(WIDTH, KEY_HEADS * HEAD_WIDTH)
            self.v_proj = Linear(WIDTH, KEY_HEADS * HEAD_WIDTH)
            self.o_proj = Linear(HEADS * HEAD_WIDTH, WIDTH)
            self.recorder = QkRecorder.separate(heads=HEADS, key_heads=KEY_HEADS, head_dim=HEAD_WIDTH)

        def forward(self, x: Any) -> Any:
            q, k, v = (
                layer(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
                for layer in (self.q_proj, self.k_proj, self.v_proj)
            )
            self.recorder.record(q, k, scale=0.5)
            k, v = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
            return x + self.o_proj(out.transpose(1, 2).flatten(2))

    class Block(nn.Module):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.up, self.down = Linear(WIDTH, hidden, 0), Linear(hidden, WIDTH, 1)
            self.gain = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.tanh(self.up(x))) * self.gain.float()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.attn = Attention()
            self.blocks = nn.ModuleList(Block(hidden) for hidden in (16, 80, 6))
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
            self.qkv = Linear(WIDTH, 4 * WIDTH)
            self.lm_head = Linear(WIDTH, VOCAB)

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.attn(self.embed(tokens).float())
            for block in self.blocks:
                x = block(x)
            conv = self.conv
            x = x + torch.tanh(F.conv1d(x.mT, conv.weight.float(), conv.bias.float(), padding=1, groups=2)).mT
            a, b, c = self.qkv(x).split((2 * WIDTH, WIDTH, WIDTH), -1)
            x = x + torch.tanh(a[..., :WIDTH] * b) + c * a[..., WIDTH:]
            return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())

    torch.manual_seed(1)
    return Model()


def ds_config(case: Case) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a case."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "Muon", "params": {**MUON, **case.params}},
        "zero_optimization": {"stage": case.stage},
    }
    if case.stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if case.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if case.sub_groups is not None:
        config["zero_optimization"]["sub_group_size"] = case.sub_groups
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
    found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests(engine: Any, package: Any) -> dict[str, str]:
    """Return the digest of everything that a step changes on this rank, by name."""
    optimizer = package.muon_optimizer(engine)
    masters = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
    if masters is None:
        masters = [param for group in optimizer.param_groups for param in group["params"]]
    found = {}
    for number, master in enumerate(masters):
        found[f"master {number}"] = digest(master)
        for key, value in sorted(optimizer.state.get(master, {}).items()):
            found[f"state {number} {key}"] = digest(value)
    for name, param in engine.module.named_parameters():
        found[f"weight {name}"] = digest(getattr(param, "ds_tensor", param.data))
    return found


class Mpu:
    """The object by which Megatron-style programs tell DeepSpeed their groups: neighbours share a model."""

    def __init__(self, size: int) -> None:
        import torch.distributed as dist

        world, groups = dist.get_world_size(), {}
        groups["model"] = [range(start, start + size) for start in range(0, world, size)]
        groups["data"] = [range(start, world, size) for start in range(size)]
        for kind, divided in groups.items():
            for ranks in divided:
                group = dist.new_group(list(ranks))
                if dist.get_rank() in ranks:
                    self._answer(kind, group)

    def _answer(self, kind: str, group: Any) -> None:
        import torch.distributed as dist

        answers = {"group": group, "rank": dist.get_rank(group), "world_size": dist.get_world_size(group)}
        for prefix in ("model", "tensor_model") if kind == "model" else (kind,):
            for what, answer in answers.items():
                setattr(self, f"get_{prefix}_parallel_{what}", lambda answer=answer: answer)


def train(case: Case, package: Any, rank: int) -> dict[str, Any]:
    """Train one case on this rank and return digests, losses and norms."""
    import deepspeed
    import torch

    size = case.tensor
    mpu = Mpu(size) if size > 1 else None
    model = build_model(mpu and mpu.get_model_parallel_group())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=ds_config(case), mpu=mpu
    )
    start, losses, norms = digests(engine, package), [], []
    for step in range(STEPS):
        for micro in range(case.accumulation):
            source = torch.Generator().manual_seed(1000 * step + 10 * (rank // size) + micro)
            tokens = torch.randint(0, VOCAB, (3, 8), generator=source)
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm()))
    end = digests(engine, package)
    same = [name for name in start if name.startswith("master") and start[name] == end[name]]
    if (
        same
        or not any(name.endswith("momentum_buffer") for name in end)
        or not all(map(math.isfinite, losses))
    ):
        raise RuntimeError(
            f"nothing was trained: {same} did not move, losses {losses}, entries {sorted(end)}"
        )
    if engine.skipped_steps:
        raise RuntimeError(f"{engine.skipped_steps} steps were skipped")
    engine.destroy()
    end["losses"], end["gradient norms"] = digest(losses), digest(norms)
    return {"digests": end, "losses": losses}


def serve(tree: Path, world: int, rank: int, folder: Path, names: Sequence[str]) -> None:
    """Run all cases of one world size on this rank, and write what it found into ``folder``."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    # Left on, DeepSpeed's shared-memory all-reduce leaves 66 MB a rank in /dev/shm.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    # DeepSpeed refuses fp16 on a CPU without instructions for it; torch converts there.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, verbose=False
    )
    package = import_tree(tree)
    found: dict[str, Any] = {"cases": {}}
    for name in names:
        found["cases"][name] = train(CASES[name], package, rank)
    found["paths"] = imported_from(tree)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# ---- both sides


def run_side(tree: Path, world: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Start the ranks of one world size with the package of ``tree`` and return what each rank found.

    Raises:
        RuntimeError: With the output of a rank that failed.
    """
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # never used: the ranks meet in a file
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="compare_commits_") as name:
        folder = Path(name)
        ranks = []
        for rank in range(world):
            with open(folder / f"rank{rank}.log", "wb") as log:
                order = ["--rank", str(rank), "--world", str(world), "--folder", name, "--only", *names]
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, __file__, str(tree), *order],
                        cwd=folder,
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        deadline = time.monotonic() + TIMEOUT
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.returncode for rank in ranks) or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        finally:
            codes = [rank.poll() for rank in ranks]
            for each in ranks:
                each.kill()
                each.wait()
        if any(code != 0 for code in codes):
            first = next((number for number, code in enumerate(codes) if code), 0)
            raise RuntimeError(
                f"{tree} on {world} ranks: exit codes {codes} (None: still running after {TIMEOUT:g} s or when another "
                f"failed)\n{(folder / f'rank{first}.log').read_text(errors='replace')[-6000:]}"
            )
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


def git(*arguments: str, folder: Path = REPOSITORY) -> str:
    """Return what git says, without the line's end."""
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def checkout(what: str, temporary: Path) -> tuple[Path, str]:
    """Return the folder of a side and what it is: a commit, with a note where files of the package were changed."""
    if Path(what).is_dir():
        tree = Path(what).resolve()
        commit = git("rev-parse", "HEAD", folder=tree)
        changed = git("status", "--porcelain", "--", "deepspeed_muon", "ops", folder=tree)
        return tree, f"{commit}{' with uncommitted changes' if changed else ''}"
    commit = git("rev-parse", "--verify", f"{what}^{{commit}}")
    tree = temporary / commit
    tree.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(REPOSITORY), "archive", commit, "deepspeed_muon", "ops"],
        check=True,
        capture_output=True,
    )
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    return tree, commit


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], name: str) -> list[str]:
    """Return what differs between the sides of one case, by rank."""
    found = []
    for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        first, second = a["cases"][name]["digests"], b["cases"][name]["digests"]
        found += [f"rank {rank}: {key}" for key in first | second if first.get(key) != second.get(key)]
    return found


def describe(case: Case) -> str:
    """Return the settings of a case in one cell of a table."""
    settings = dict(case.params)
    if case.sub_groups is not None:
        settings["sub_group_size"] = case.sub_groups
    if case.accumulation > 1:
        settings["gradient_accumulation_steps"] = case.accumulation
    if case.clipping:
        settings["gradient_clipping"] = case.clipping
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in settings.items()) or "-"


def row(name: str, sides: Sequence[list[dict[str, Any]]], differing: int) -> str:
    """Return one line of the table."""
    case = CASES[name]
    both = []
    for side in sides:
        entries = [rank["cases"][name]["digests"] for rank in side]
        both.append(digest([sorted(each.items()) for each in entries])[:12])
    count = sum(len(rank["cases"][name]["digests"]) for rank in sides[0])
    losses = sides[0][0]["cases"][name]["losses"]
    cells = [
        name,
        case.stage,
        case.world,
        case.tensor,
        case.precision,
        "CPU" if case.offload else "-",
        describe(case),
        f"{losses[0]:.4f} to {losses[-1]:.4f}",
        count,
        *both,
        f"**{differing} differ**" if differing else "yes",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def environment_line() -> str:
    """Return the machine and the versions of both sides."""
    import deepspeed
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    return (
        f"{names[0] if names else platform.machine()}, {cores} cores; Python {platform.python_version()}, "
        f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}; ranks under gloo, one thread each"
    )


HEADER = (
    "| configuration | stage | ranks | tensor parallel | precision | offload | settings | loss | values compared "
    "| SHA-256, base | SHA-256, tree | same |\n" + "|---" * 12 + "|"
)


def compare(base: str, tree: str, names: Sequence[str], output: Path | None) -> int:
    """Run both sides, print and write the table, and return the exit code."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compare_commits_") as temporary:
        sides = [checkout(what, Path(temporary)) for what in (base, tree)]
        rows, wrong = [], []
        for world in WORLDS:
            chosen = [name for name in names if CASES[name].world == world]
            if not chosen:
                continue
            results = [run_side(place, world, chosen) for place, _ in sides]
            for (place, commit), result in zip(sides, results, strict=True):
                print(
                    f"{world} ranks, {commit[:12]}: {', '.join(result[0]['paths'])} (below {place})",
                    flush=True,
                )
            for name in chosen:
                found = differences(results[0], results[1], name)
                rows.append(row(name, results, len(found)))
                print(rows[-1], flush=True)
                wrong += [f"{name}: {line}" for line in found]
    print("\n".join(wrong))
    text = (
        "# Two commits, the same bits\n\n"
        f"`python scripts/compare_commits.py BASE TREE` with base {sides[0][1]} and tree {sides[1][1]}.\n\n"
        f"{environment_line()}. {STEPS} steps for each configuration. A value is a master, a state tensor, a weight, "
        "all losses or all gradient norms on one rank after the last step; a SHA-256 (its first 12 digits) is over all "
        "of them.\n\n" + "\n".join([HEADER, *rows]) + "\n\n"
        f"{'Nothing differs.' if not wrong else f'{len(wrong)} values differ.'}\n"
    )
    if output is not None:
        output.write_text(text)
    print(f"{len(rows)} configurations, {len(wrong)} values differ, {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="folder with a checkout, or a commit")
    parser.add_argument(
        "tree", nargs="?", default=str(REPOSITORY), help="the same; this checkout unless given"
    )
    parser.add_argument("--output", type=Path, help="Markdown file to write the table to")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    for name in ("--rank", "--world"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        serve(Path(options.base), options.world, options.rank, options.folder, options.only)
        return 0
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        from importlib.metadata import version

        place = REPOSITORY / ".cache" / "torch_extensions" / f"ds{version('deepspeed')}"
        os.environ["TORCH_EXTENSIONS_DIR"] = str(place)
    return compare(options.base, options.tree, options.only, options.output)


if __name__ == "__main__":
    sys.exit(main())
