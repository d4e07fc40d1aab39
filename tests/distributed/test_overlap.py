"""Exchanging one chunk while another is orthogonalised changes neither a bit nor a byte, and uses bounded memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch.multiprocessing.reductions import StorageWeakRef

import deepspeed_muon
from deepspeed_muon.engine import configure
from deepspeed_muon.plan.chunks import build_exchange_plan
from deepspeed_muon.transport.all_to_all import ChunkExchange, ExchangeBuffers, SentCounts
from tests.support import tensor_parallel, training
from tests.support.layouts import MAKERS
from tests.support.models import build
from tests.support.thinning import full

# The matrices of the toy model have 16 to 768 elements, so this makes one or a few matrices of each rank a chunk.
CHUNK = 90


@pytest.mark.parametrize(
    ("stage", "world", "kind", "wire"),
    [
        (0, 2, "toy", "bf16"),
        (1, 3, "mixed", "bf16"),
        full(2, 4, "toy", "bf16"),
        (3, 2, "unused", "bf16"),
        (3, 4, "toy", "bf16"),
        full(3, 3, "mixed", "bf16"),
        full(0, 2, "toy", "fp16"),
        full(3, 3, "toy", "fp32"),
    ],
)
def test_overlap_changes_nothing(ranks: Any, stage: int, world: int, kind: str, wire: str) -> None:
    """The same sums in the same order: equal to the last bit, with the same messages."""
    outcomes = []
    for overlap in (False, True):
        params = {"exchange_chunk_numel": CHUNK, "exchange_overlap": overlap, "wire_dtype": wire}
        idle = {"idle_from": 2} if kind == "unused" else {}
        settings = {"stage": stage, "kind": kind, "steps": 3, "params": params, **idle}
        outcomes.append(ranks(world).run(training.train, **settings))
    for plain, overlapped in zip(*outcomes, strict=True):
        training.assert_same_bits(overlapped, plain, "params", "momentum")
        for counter in ("bytes_sent", "planned_bytes", "orthogonalized", "losses"):
            assert overlapped[counter] == plain[counter]
        assert plain["bytes_sent"] == plain["planned_bytes"]


def buffer_bytes(rank: int, world_size: int, *, overlap: bool) -> dict[str, int]:
    """Train three steps; return the bytes of the exchange's buffers after each, and the largest number of chunks."""
    params = {"exchange_chunk_numel": CHUNK, "exchange_overlap": overlap}
    engine = training.make_engine(training.ds_config(3, params=params))
    reserved = []
    for step in range(3):
        training.run_step(engine, step, rank, world_size, 1)
        reserved.append(deepspeed_muon.muon_optimizer(engine).exchange_buffers.reserved_bytes)
    runners = deepspeed_muon.muon_optimizer(engine).runners
    return {"reserved": reserved, "chunks": max(len(runner.plan.chunks) for runner in runners)}


@pytest.mark.parametrize("overlap", [True, False])
def test_buffers_are_those_of_a_few_chunks(ranks: Any, overlap: bool) -> None:
    """Of three, one without overlap; none is made anew in a later step. test_worked_example has the order of chunks."""
    # The largest matrices have 768 elements, and each rank owns one in the same chunk; fp32 on the wire. A rank sends
    # its halves of both and receives its own, which is orthogonalised where it arrived.
    limit = (3 if overlap else 1) * 2 * 768 * 4
    for result in ranks(2).run(buffer_bytes, overlap=overlap):
        assert result["chunks"] >= 4
        (reserved,) = set(result["reserved"])
        assert 0 < reserved <= limit


def across_calls(
    rank: int, world_size: int, *, stage: int, bf16: bool, overlap: bool, lose: str = ""
) -> dict[str, Any]:
    """Train with several step sets of Muon's; return masters and weights of the forward pass.

    With ``lose`` the last set with matrices, or the one without, gets an infinity in the last step.
    """
    extra = {"bf16": {"enabled": True}} if bf16 else {}
    zero: dict[str, Any] = {"sub_group_size": 400} if stage == 3 else {}
    params = {"exchange_chunk_numel": CHUNK, "exchange_overlap": overlap, "wire_dtype": "bf16"}
    config = training.ds_config(stage, zero=zero, extra=extra, params=params)
    model = build("toy", width=24)
    named = list(model.named_parameters())
    groups = [
        {"params": [param for name, param in named if ("up" in name) == up], "lr": rate}
        for up, rate in ((True, 0.02), (False, 0.01))
    ]
    engine = training.initialize(model, config, model_parameters=groups)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    with_matrices = max(number for number, runner in enumerate(optimizer.runners) if runner.plan.matrices)
    chosen = with_matrices if lose == "matrices" else len(optimizer.runners) - 1
    inner, calls = optimizer.step, []
    gradients: list[StorageWeakRef] = []
    alive = 0

    def step(*args: Any) -> Any:
        nonlocal alive
        alive += sum(not gradient.expired() for gradient in gradients)
        gradients[:] = [
            StorageWeakRef(param.grad.untyped_storage())
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        calls.append(0)
        if lose and len(calls) == 2 * len(optimizer.runners) + chosen + 1:
            # As in an engine that exchanges flags in each call: ZeRO has looked at the gradients before.
            optimizer._bound_steps.gradient_flags.forget()
            if rank == 0:
                first = next(param for group in optimizer.param_groups for param in group["params"])
                first.grad.view(-1)[0] = float("inf")
        return inner(*args)

    optimizer.step = step
    for number in range(3):
        training.run_step(engine, number, rank, world_size, 1)
    weights = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            weights[name] = param.detach().clone()
    return {
        "masters": training.full_masters(engine),
        "weights": weights,
        "kept gradients": alive,
        "muon sets": sum(bool(runner.plan.matrices) for runner in optimizer.runners),
    }


@pytest.mark.parametrize(
    ("stage", "world", "bf16"),
    [(1, 4, False), full(2, 3, True), full(2, 2, False), (3, 2, True), full(3, 3, False)],
)
def test_overlap_with_several_calls_of_the_inner_step(ranks: Any, stage: int, world: int, bf16: bool) -> None:
    """Masters are the same to the last bit, and every weight of the forward pass is its master, rounded."""
    plain, late = (
        ranks(world).run(across_calls, stage=stage, bf16=bf16, overlap=overlap) for overlap in (False, True)
    )
    for one, overlapped in zip(plain, late, strict=True):
        assert overlapped["muon sets"] >= 2
        # Some are kept by DeepSpeed.
        assert overlapped["kept gradients"] == one["kept gradients"]
        for name, master in overlapped["masters"].items():
            assert torch.equal(master, one["masters"][name]), name
            weight = overlapped["weights"][name]
            assert torch.equal(weight.double(), master.to(weight.dtype).double()), name


@pytest.mark.parametrize(("stage", "lose"), [(1, "others"), full(2, "matrices"), (3, "matrices")])
def test_a_set_is_updated_when_the_next_one_is_skipped(ranks: Any, stage: int, lose: str) -> None:
    """The set before a non-finite gradient keeps its update, in the masters and in the weights."""
    plain, late = (
        ranks(2).run(across_calls, stage=stage, bf16=False, overlap=overlap, lose=lose)
        for overlap in (False, True)
    )
    for one, overlapped in zip(plain, late, strict=True):
        for name, master in overlapped["masters"].items():
            assert torch.equal(master, one["masters"][name]) and torch.isfinite(master).all(), name
            assert torch.equal(overlapped["weights"][name].double(), master), name


TRAIN = {"data": training.train, "tensor": tensor_parallel.train}


def train_connected(rank: int, world_size: int, *, parallel: str, **settings: Any) -> dict[str, Any]:
    """Train with ranks that connect when the engine is made, as on GPUs."""
    bind = configure._bind

    def bind_and_connect(engine: Any, optimizer: deepspeed_muon.Muon) -> None:
        bind(engine, optimizer)
        optimizer._bound_steps.connect()
        assert optimizer.stats.exchanges == optimizer.stats.bytes_sent == 0

    with mock.patch.object(configure, "_bind", bind_and_connect):
        return TRAIN[parallel](rank, world_size, **settings)


@pytest.mark.parametrize(
    ("parallel", "world", "settings"),
    [
        ("data", 2, {"stage": 0}),
        ("data", 3, {"stage": 3, "kind": "mixed"}),
        ("tensor", 4, {"stage": 1, "tensor_size": 2}),
    ],
)
def test_connecting_ranks_at_start_changes_nothing(
    ranks: Any, parallel: str, world: int, settings: dict[str, Any]
) -> None:
    """Over NCCL the first all-to-all took GPU memory within step 1."""
    plain = ranks(world).run(TRAIN[parallel], **settings)
    for rank, connected in enumerate(ranks(world).run(train_connected, parallel=parallel, **settings)):
        training.assert_same_bits(connected, plain[rank], "params", "momentum")


def make_engine_without_memory(rank: int, world_size: int) -> str:
    """Make an engine whose exchange buffers rank 1 cannot allocate, and return the error of this rank."""

    def refuse(buffers: ExchangeBuffers) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    failing = mock.patch.object(ExchangeBuffers, "allocate", refuse) if rank == 1 else nullcontext()
    with failing, pytest.raises((torch.OutOfMemoryError, deepspeed_muon.RankDisagreementError)) as caught:
        training.train(rank, world_size, stage=2)
    return f"{caught.type.__name__}: {caught.value}"


def test_all_ranks_raise_if_buffers_do_not_fit_on_one(ranks: Any) -> None:
    """They were allocated in the first exchange, in which the other ranks waited until it timed out."""
    first, second = ranks(2).run(make_engine_without_memory, timeout=60)
    assert first.startswith("RankDisagreementError: another rank failed") and "out of memory" in first, first
    assert second.startswith("OutOfMemoryError: CUDA out of memory"), second


def works_of_scatter(rank: int, world_size: int) -> dict[str, list[int]]:
    """Return how many messages a chunk of replicated matrices waits for, over gloo and over a backend like NCCL."""
    layouts = MAKERS["replicated"]([(16, 16)] * 6, world_size)
    plan = build_exchange_plan(layouts, [0, 1, 2] * 2, rank=rank, world_size=world_size, chunk_numel=1 << 20)
    works = {}
    for backend in ("gloo", "fake"):  # torch's own backend that sends nothing, and joins messages
        group, buffers = dist.new_group(backend=backend), ExchangeBuffers(torch.device("cpu"))
        options = {"dtype": torch.bfloat16, "number": 0, "overlap": True}
        exchange = ChunkExchange(plan, buffers, SentCounts(), group, **options)
        flights = [exchange.open(number, number) for number in range(len(plan.chunks))]
        for flight in flights:
            exchange.start("scatter", flight)
        works[backend] = [len(flight.works) for flight in flights]
        for flight in flights:
            exchange.wait("scatter", flight)
    return works


def test_broadcasts_of_a_chunk_are_one_message_where_a_backend_can(ranks: Any) -> None:
    for works in ranks(3).run(works_of_scatter):
        assert works["gloo"] == [3] and works["fake"] == [1]
