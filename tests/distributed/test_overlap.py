"""Exchanging one chunk while another is orthogonalised changes neither a bit nor a byte, and uses bounded memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import deepspeed_muon
from deepspeed_muon.step.runner import StepRunner
from deepspeed_muon.transport.all_to_all import ChunkExchange
from tests.support import training
from tests.support.models import build
from tests.support.thinning import full

# The matrices of the toy model have 16 to 768 elements, so this makes one or a few matrices of each rank a chunk.
CHUNK = 90

# The parts of a step's turn, and what does them.
METHODS = {
    "pack": (StepRunner, "_pack"),
    "orthogonalize": (StepRunner, "_orthogonalize"),
    "scatter": (ChunkExchange, "scatter"),
    "apply": (StepRunner, "_apply"),
}


@pytest.mark.parametrize(
    ("stage", "world", "kind", "wire"),
    [
        (0, 2, "toy", "bf16"),
        (1, 3, "mixed", "bf16"),
        full(2, 4, "toy", "bf16"),
        (3, 2, "unused", "bf16"),
        (3, 4, "toy", "bf16"),
        full(3, 3, "mixed", "bf16"),
        full(0, 2, "toy", "int8"),
        (3, 3, "toy", "int8"),
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


@contextlib.contextmanager
def noting(note: Callable[[str, Any, Any, Any], None], *names: str) -> Iterator[None]:
    """Call ``note`` with the name, the object, the first argument and the result of each method."""
    originals = {name: getattr(*METHODS[name]) for name in names}

    def noted(name: str) -> Any:
        def call(runner: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
            result = originals[name](runner, first, *args, **kwargs)
            note(name, runner, first, result)
            return result

        return call

    for name in names:
        setattr(*METHODS[name], noted(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(*METHODS[name], original)


def follow(rank: int, world_size: int, *, overlap: bool) -> dict[str, Any]:
    """Train at stage 3 and write down in which order the parts of the last step came, and where its buffers lay."""
    params = {"exchange_chunk_numel": CHUNK, "exchange_overlap": overlap}
    engine = training.make_engine(training.ds_config(3, params=params))
    optimizer = deepspeed_muon.muon_optimizer(engine)
    order: list[str] = []
    places: set[int] = set()

    chunks_of = max((runner.plan.chunks for runner in optimizer.runners), key=len)

    def note(name: str, runner: Any, first: Any, result: Any) -> None:
        order.append(f"{name} {chunks_of.index(getattr(first, 'chunk', first))}")
        if name in ("pack", "apply"):
            places.update((first.send_buffer.data_ptr(), first.receive_buffer.data_ptr()))

    with noting(note, *METHODS):
        for step in range(3):
            order.clear()
            training.run_step(engine, step, rank, world_size, 1)
    chunks = max(len(runner.plan.chunks) for runner in optimizer.runners)
    return {
        "order": list(order),
        "places": len(places - {0}),
        "chunks": chunks,
        "reserved": deepspeed_muon.plan_report(engine)["exchange_buffer_bytes"],
    }


@pytest.mark.parametrize("overlap", [True, False])
def test_the_order_of_the_chunks_and_their_buffers(ranks: Any, overlap: bool) -> None:
    """Chunks travel while others are computed; without overlap one goes through all parts before the next begins.

    There are three places for a chunk, one without overlap, each of two buffers; none is made anew in a later step.
    """
    slots = 3 if overlap else 1
    # The largest matrices have 768 elements, and each rank owns one in the same chunk; fp32 on the wire. A rank sends
    # its halves of both and receives its own, which is orthogonalised where it arrived.
    numel = slots * 2 * 768
    for result in ranks(2).run(follow, overlap=overlap):
        last = result["chunks"] - 1
        assert last >= 3
        expected = ["pack 0"]
        for number in range(last + 1):
            expected += [f"pack {number + 1}"] if number < last else []
            expected += [f"orthogonalize {number}", f"scatter {number}"]
            expected += [f"apply {number - 1}"] if number else []
        expected.append(f"apply {last}")
        if not overlap:
            expected = [f"{part} {number}" for number in range(last + 1) for part in METHODS]
        assert result["order"] == expected
        assert 0 < result["places"] <= 2 * slots
        assert 0 < result["reserved"] <= numel * 4


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
    kept = 0

    def step(*args: Any) -> Any:
        nonlocal kept
        kept += sum(not gradient.expired() for gradient in gradients)
        gradients[:] = [
            StorageWeakRef(param.grad.untyped_storage())
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        calls.append(0)
        if lose and len(calls) == 2 * len(optimizer.runners) + chosen + 1:
            # As in an engine that exchanges flags in each call: ZeRO has looked at the gradients before.
            optimizer.bound_steps.forget_flags()
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
        "kept gradients": kept,
        "muon sets": sum(bool(runner.plan.matrices) for runner in optimizer.runners),
    }


@pytest.mark.parametrize(
    ("stage", "world", "bf16"),
    [(1, 4, False), (2, 3, True), full(2, 2, False), (3, 2, True), full(3, 3, False)],
)
def test_overlap_with_several_calls_of_the_inner_step(ranks: Any, stage: int, world: int, bf16: bool) -> None:
    """Masters are the same to the last bit, and every weight of the forward pass is its master, rounded."""
    plain, late = (
        ranks(world).run(across_calls, stage=stage, bf16=bf16, overlap=overlap) for overlap in (False, True)
    )
    for one, other in zip(plain, late, strict=True):
        assert other["muon sets"] >= 2
        # Some are kept by DeepSpeed.
        assert other["kept gradients"] == one["kept gradients"]
        for name, master in other["masters"].items():
            assert torch.equal(master, one["masters"][name]), name
            weight = other["weights"][name]
            assert torch.equal(weight.double(), master.to(weight.dtype).double()), name


@pytest.mark.parametrize(("stage", "lose"), [(1, "others"), full(2, "matrices"), (3, "matrices")])
def test_a_set_is_updated_when_the_next_one_is_skipped(ranks: Any, stage: int, lose: str) -> None:
    """The set before a non-finite gradient keeps its update, in the masters and in the weights."""
    plain, late = (
        ranks(2).run(across_calls, stage=stage, bf16=False, overlap=overlap, lose=lose)
        for overlap in (False, True)
    )
    for one, other in zip(plain, late, strict=True):
        for name, master in other["masters"].items():
            assert torch.equal(master, one["masters"][name]) and torch.isfinite(master).all(), name
            assert torch.equal(other["weights"][name].double(), master), name
