"""What a rank does in ``benchmarks/optimizer_step.py``: the model, the engines, the counters, the measurements."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import peers, support
from benchmarks.network import End, limit_rate, link_bytes
from benchmarks.sent_bytes import counting
from deepspeed_muon.routing.evidence import NamedParameter
from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.tools.model_shapes import load_model


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with the shapes of LLaMA.

    The vocabulary is small, so that the hidden matrices have the share of the weights that they have in a model of
    several billion (95 % and more), and not that of a toy.
    """

    width: int
    hidden: int
    layers: int
    vocabulary: int


MODELS = {
    "5M": Shape(256, 704, 6, 512),
    "60M": Shape(768, 2048, 8, 2048),
    "350M": Shape(1024, 2816, 26, 4096),
    "1.3B": Shape(2048, 5504, 25, 8192),
    "7B": Shape(4096, 11008, 32, 8192),
    "tiny": Shape(64, 176, 2, 64),
}

ADAMW = "DeepSpeed AdamW"
UNCHECKED = "DeepSpeed AdamW, check_grad_overflow false"
EIGHT_BIT = "torchao AdamW8bit, blocks of 64"
DION = "Dion's Muon, FSDP2"

BF16_MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ours, no overlap": ({"exchange_overlap": False}, {}),
    "ours, bf16 momentum": ({"momentum_dtype": "bf16"}, {}),
    "ours, int8 momentum": ({"momentum_dtype": "int8"}, {}),
    "ours, int8 momentum, bf16 masters": ({"momentum_dtype": "int8"}, BF16_MASTERS),
}
"""Other settings of this project than its defaults: ``optimizer.params`` and the section ``bf16``."""

OPTIMIZERS = (
    "ours",
    *VARIANTS,
    "DeepSpeed Muon, standard",  # bf16 where supported
    "DeepSpeed Muon, gram",  # its default: fp16 where supported
    ADAMW,
    UNCHECKED,
    EIGHT_BIT,  # in blocks that divide ZeRO's partitions, else it keeps fp32; needs torchao
    "torch Muon",  # torch.optim.Muon and AdamW, whole matrices on every rank
    DION,  # under torch's FSDP2; needs a checkout
)
"""Every optimizer that takes part, in the order of the tables."""
ONLY_STAGE = {"torch Muon": 0, DION: 3}
ON_REQUEST = {*VARIANTS, DION, EIGHT_BIT, UNCHECKED}


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = max(1, width // 64)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate_proj, self.up_proj = (nn.Linear(width, shape.hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(shape.hidden, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            proj(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attention.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class TorchMuon(torch.optim.Optimizer):
    """``torch.optim.Muon`` for the hidden matrices and fused AdamW for the rest, as one optimizer for DeepSpeed."""

    def __init__(self, named: list[tuple[str, Tensor]]) -> None:
        inside = [p for name, p in named if name.startswith("layers.") and p.ndim == 2]
        chosen = {id(p) for p in inside}
        rest = [p for _, p in named if id(p) not in chosen]
        super().__init__([{"params": inside}, {"params": rest}], {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if not hasattr(self, "halves"):  # the wrapper has replaced the parameters by its fp32 copies by now
            matrices, rest = (group["params"] for group in self.param_groups)
            self.halves = (
                torch.optim.Muon(matrices, lr=0.0, weight_decay=0.0),
                torch.optim.AdamW(rest, lr=0.0, weight_decay=0.0, fused=True),
            )
        for half in self.halves:
            half.step()


def choose_dtype_by_processor() -> None:
    """Let DeepSpeed's Muon choose its dtype by what the processor has; the tests' ranks run fp16 on any CPU."""
    from deepspeed.accelerator import get_accelerator

    vars(get_accelerator()).pop("is_fp16_supported", None)


def join(device: str) -> None:
    """Make this process a rank: of torchrun, or the only one."""
    import deepspeed

    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": "29655"}.items():
        os.environ.setdefault(name, value)
    if device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo" if device == "cpu" else "nccl")


def leave() -> None:
    """Leave the process group, if there is one: no rank does while another one still uses it."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def decoder(model: str) -> Decoder:
    """Return a model of ``MODELS`` with the same weights on every rank and in every run."""
    torch.manual_seed(0)
    return Decoder(MODELS[model])


def members_of(model: str) -> list[NamedParameter]:
    """Return the parameters of a model of ``MODELS``, or of one that the command ``plan`` knows, on the meta device."""
    if model not in MODELS:
        return load_model(model)
    with torch.device("meta"):
        return list(model_parameters_by_name(Decoder(MODELS[model])).values())


def make_engine(
    optimizer: str,
    model: nn.Module,
    stage: int,
    accumulation: int,
    device: str,
    *,
    clipping: float = 0.0,
    **settings: Any,
) -> Any:
    """Return an engine with an optimizer of ``OPTIMIZERS``; ``settings`` are further ``optimizer.params``.

    Rates of zero keep weights and gradients equal.
    """
    import deepspeed

    import deepspeed_muon

    if optimizer == DION:
        return peers.FullyShardedDion(model, accumulation, device)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    client = None
    if optimizer in (ADAMW, UNCHECKED):
        config["bf16"].update({"check_grad_overflow": False} if optimizer == UNCHECKED else {})
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, **settings}}
    elif optimizer == "torch Muon":
        client = TorchMuon(list(model.named_parameters()))
        config["zero_allow_untested_optimizer"] = True
    elif optimizer == EIGHT_BIT:
        from torchao.optim import AdamW8bit

        client = AdamW8bit(model.parameters(), lr=0.0, block_size=64)
        config["zero_allow_untested_optimizer"] = True
    else:
        params, bf16 = VARIANTS.get(optimizer, ({}, {}))
        config["optimizer"] = {"type": "Muon", "params": {"lr": 0.0, **params, **settings}}
        config["bf16"].update(bf16)
    if optimizer.startswith("DeepSpeed Muon"):
        config["optimizer"]["params"]["ns_method"] = optimizer.rpartition(" ")[2]
        if stage == 3:
            config["zero_optimization"].update(reduce_scatter=False, save_muon_momentum_buffer_in_memory=True)
        deepspeed_muon.unregister()  # until the engine is made
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config, optimizer=client
        )
    finally:
        deepspeed_muon.register()
    return engine


def batch_of(vocabulary: int, micro: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + micro)
    return torch.randint(vocabulary, (1, tokens), generator=generator)


def batches_of(model: str, accumulation: int, tokens: int) -> list[Tensor]:
    """Return the micro-batches of this rank."""
    vocabulary = MODELS[model].vocabulary
    return [batch_of(vocabulary, micro, tokens) for micro in range(accumulation)]


def one_step(engine: Any, batches: list[Tensor]) -> dict[str, float]:
    """Run one optimizer step; return the seconds of all calls, of backward and step, and of step alone."""
    forward = backward = step = 0.0
    for batch in batches:
        dist.barrier()
        begin = time.perf_counter()
        loss = engine(batch)
        forward += time.perf_counter() - begin
        dist.barrier()
        start = time.perf_counter()
        engine.backward(loss)
        middle = time.perf_counter()
        engine.step()
        end = time.perf_counter()
        backward += middle - start
        step += end - middle
    return {"whole_s": forward + backward + step, "total_s": backward + step, "step_s": step}


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure_times(
    rank: int,
    world_size: int,
    *,
    model: str,
    stage: int,
    accumulation: int,
    optimizers: list[str],
    repeats: int,
    tokens: int,
    rates: Sequence[float | None] = (None,),
    ends: Sequence[End] = (),
) -> dict[str, Any]:
    """Time all optimizers in turn, with all their engines alive, and count the bytes of one step.

    With ``ends``, both ends of every link, rank 0 sets the links to one of the ``rates`` after the other, in bits a
    second (``None`` for no limit), and the kernel's bytes are counted.

    Returns:
        Of each optimizer: ``bytes`` and ``calls`` of collectives, for our own ``kernels``, and for each rate the
        ``times`` of the slowest rank in each turn, with the bytes of the busiest link.
    """
    import deepspeed_muon

    choose_dtype_by_processor()
    engines = {name: make_engine(name, decoder(model), stage, accumulation, "cpu") for name in optimizers}
    batches = batches_of(model, accumulation, tokens)
    rows: dict[str, dict[str, Any]] = {}
    # A process runs several cells. DeepSpeed's engines of the one before are destroyed again when they are collected:
    # not while torch compiles an optimizer, which would take minutes, with operators on fake tensors.
    gc.disable()
    for name, engine in engines.items():
        one_step(engine, batches)  # builds state, compiles, chooses kernels
        with counting() as sent:
            one_step(engine, batches)  # its barriers carry no payload
        rows[name] = {"bytes": sent.total, "calls": dict(sent.calls), "times": []}
    for rate in rates:
        _set_rate(rank, ends, rate)
        for name, times in _turns(engines, batches, repeats, has_links=bool(ends)).items():
            rows[name]["times"].append(times)
    _set_rate(rank, ends, None)
    for name, engine in engines.items():
        if name.startswith("ours"):
            rows[name]["kernels"] = deepspeed_muon.muon_optimizer(engine).kernel_report()
    for engine in engines.values():
        engine.destroy()
    return rows


def _turns(
    engines: dict[str, Any], batches: list[Tensor], repeats: int, *, has_links: bool
) -> dict[str, dict[str, list[float]]]:
    """Let all engines take turns; return for each what every step took of the rank with most."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    gc.disable()  # a collection takes 0.1 s, in whichever step it falls
    for names in support.turns(list(engines), repeats):
        gc.collect()
        for name in names:
            before = link_bytes()[0] if has_links else 0
            figures = one_step(engines[name], batches)
            if has_links:
                figures["link_bytes"] = float(link_bytes()[0] - before)
            most = torch.tensor([*figures.values()], dtype=torch.float64)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            for key, value in zip(figures, most.tolist(), strict=True):
                found[name].setdefault(key, []).append(value)
    gc.enable()
    return found


def _set_rate(rank: int, ends: Sequence[End], rate: float | None) -> None:
    dist.barrier()
    if rank == 0:
        limit_rate(ends, rate)
    dist.barrier()


def measure_memory(
    rank: int,
    world_size: int,
    *,
    model: str,
    stage: int,
    accumulation: int,
    optimizer: str,
    tokens: int,
) -> int:
    """Return how far memory grows over what the process had before the model, at the peak of steady steps.

    It is resident memory, everything included; the process must run with a small MALLOC_MMAP_THRESHOLD_ and
    MALLOC_TRIM_THRESHOLD_, so that what is freed goes back.
    """
    choose_dtype_by_processor()
    gc.collect()
    before = support.memory_of("cpu")[0]
    engine = make_engine(optimizer, decoder(model), stage, accumulation, "cpu")
    batches = batches_of(model, accumulation, tokens)
    one_step(engine, batches)
    gc.collect()
    support.reset_peak("cpu")
    for _ in range(2):
        one_step(engine, batches)
    peak = support.memory_of("cpu")[1]
    engine.destroy()
    return peak - before
