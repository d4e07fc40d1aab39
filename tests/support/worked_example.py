"""The worked example of ``docs/architecture.md``: one ZeRO 3 step with three matrices on two ranks, followed.

    python -m tests.support.worked_example    # write the figure into the page

Nothing is taken from the plan. Two ranks train one step while their all-to-alls are recorded, and what a buffer carries
is recognised by its values: those of the gradients when matrices are gathered, those of the change of the weights when
updates are scattered.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed_muon
from tests.support.harness import run_ranks
from tests.support.native_ops import REPOSITORY

PAGE = REPOSITORY / "docs" / "architecture.md"
FIGURE = re.compile(r"(?<=<!-- python -m tests.support.worked_example -->\n).*?(?=<!-- end -->)", re.DOTALL)
SHAPES = {"q": (4, 4), "k": (3, 3), "v": (5, 4)}
CHUNK_NUMEL = 20
LR, MOMENTUM = 0.02, 0.95


class Fragment(NamedTuple):
    """Elements ``[start, stop)`` of the row-major matrix ``name``."""

    name: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"


class ThreeMatrices(nn.Module):
    """A model whose loss has the given gradients."""

    def __init__(self, gradients: dict[str, Tensor]) -> None:
        super().__init__()
        self.gradients = gradients
        for name, (rows, cols) in SHAPES.items():
            linear = nn.Linear(cols, rows, bias=False)
            nn.init.zeros_(linear.weight)
            self.add_module(name, linear)

    def forward(self) -> Tensor:
        """Return the sum of the products of weights and gradients."""
        losses = [
            (self.get_submodule(name)(torch.eye(gradient.shape[1])) * gradient.T).sum()
            for name, gradient in self.gradients.items()
        ]
        return torch.stack(losses).sum()


def gradients() -> dict[str, Tensor]:
    """Return random gradients, the same on every rank: float32, of the shapes of the matrices."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def train(rank: int, world_size: int) -> dict[str, Any]:
    """Train one step; return what this rank stores, what it sends, and the weights after the step."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {
            "type": "Muon",
            "params": {
                "muon_lr": LR,
                "momentum": MOMENTUM,
                "include": ["*"],
                "ns_dtype": "fp32",
                "exchange_chunk_numel": CHUNK_NUMEL,
            },
        },
    }
    engine = deepspeed.initialize(model=ThreeMatrices(gradients()), config=config)[0]
    weights = {name: engine.module.get_submodule(name).weight for name in SHAPES}
    all_to_alls, all_reduced = [], []
    all_to_all_single, all_reduce = dist.all_to_all_single, dist.all_reduce

    def recorded(
        out: Tensor, send: Tensor, out_splits: list[int], send_splits: list[int], **options: Any
    ) -> Any:
        sent = send.view(torch.float32).clone()
        all_to_alls.append(
            [message.clone() for message in sent.split([nbytes // 4 for nbytes in send_splits])]
        )
        return all_to_all_single(out, send, out_splits, send_splits, **options)

    def recorded_reduction(tensor: Tensor, **options: Any) -> Any:
        # DeepSpeed reduces the squared norm of the gradients, this package two flags of each parameter.
        all_reduced.append(
            f"{'flags' if tensor.shape == (2, len(SHAPES)) else 'norm'}, {tensor.nbytes} bytes"
        )
        return all_reduce(tensor, **options)

    engine.backward(engine())
    with (
        mock.patch.object(dist, "all_to_all_single", recorded),
        mock.patch.object(dist, "all_reduce", recorded_reduction),
    ):
        engine.step()
    partition = engine.optimizer.fp32_partitioned_groups_flat[0]
    with deepspeed.zero.GatheredParameters(list(weights.values())):
        after = {name: weight.detach().clone() for name, weight in weights.items()}
    report = deepspeed_muon.plan_report(engine)
    (step_set,) = report["step_sets"]
    return {
        "partition": partition.detach().clone(),
        "shard_numel": {name: weight.ds_tensor.numel() for name, weight in weights.items()},
        "all_to_alls": all_to_alls,
        "all_reduced": all_reduced,
        "weights": after,
        "owners": {entry["name"].removesuffix(".weight"): entry["owner"] for entry in step_set["matrices"]},
        "sent_bytes": report["own_bytes_per_step"],
        "chunks": step_set["chunks"],
    }


def fragments_of(rank: int, results: list[dict[str, Any]]) -> dict[str, Fragment]:
    """Return the fragment of each matrix in the partition of a rank, checked against the values of the partition."""
    result, position, fragments = results[rank], 0, {}
    for name, (rows, cols) in SHAPES.items():
        shard = result["shard_numel"][name]
        fragment = Fragment(name, rank * shard, min((rank + 1) * shard, rows * cols))
        stored = result["partition"][position : position + fragment.stop - fragment.start]
        assert torch.equal(stored, result["weights"][name].flatten()[fragment.start : fragment.stop]), (
            fragment
        )
        fragments[name] = fragment
        position += shard
    return fragments


def carried(values: Tensor, matrices: dict[str, Tensor], candidates: dict[str, Fragment]) -> list[Fragment]:
    """Return which of the candidates a buffer carries, one after the other, up to a positive factor each."""
    fragments, position = [], 0
    while position < len(values):
        for fragment in candidates.values():
            expected = matrices[fragment.name].flatten()[fragment.start : fragment.stop]
            elements = values[position : position + len(expected)]
            if len(elements) == len(expected) and torch.cosine_similarity(elements, expected, dim=0) > 0.9999:
                fragments.append(fragment)
                position += len(expected)
                break
        else:
            raise AssertionError(f"nothing known is at element {position} of {values}")
    return fragments


def messages(results: list[dict[str, Any]]) -> list[list[list[list[Fragment]]]]:
    """Return the fragments that each all-to-all sends: by all-to-all, sender and receiver."""
    stored = [fragments_of(rank, results) for rank in range(len(results))]
    changes = {name: -weight for name, weight in results[0]["weights"].items()}
    sent = []
    for number, by_sender in enumerate(zip(*(result["all_to_alls"] for result in results), strict=True)):
        gathers = is_gather(number, results[0]["chunks"])
        sent.append(
            [
                [
                    carried(
                        message, gradients() if gathers else changes, stored[sender if gathers else receiver]
                    )
                    for receiver, message in enumerate(by_receiver_of)
                ]
                for sender, by_receiver_of in enumerate(by_sender)
            ]
        )
    return sent


def order_of_all_to_alls(chunks: int) -> list[tuple[str, int]]:
    """Return the all-to-alls of a step in their order: gather 0, gather 1, scatter 0, gather 2, scatter 1, ..."""
    order = [("gather", 0)]
    for chunk in range(chunks):
        order += [("gather", chunk + 1)] if chunk + 1 < chunks else []
        order += [("scatter", chunk)]
    return order


def is_gather(number: int, chunks: int) -> bool:
    """Return whether the all-to-all of this number gathers."""
    return order_of_all_to_alls(chunks)[number][0] == "gather"


def figure(results: list[dict[str, Any]]) -> str:
    """Return the figure of the page, in Markdown."""
    stored = [fragments_of(rank, results) for rank in range(2)]
    owners, sent = results[0]["owners"], messages(results)
    sizes = []
    for result, fragments in zip(results, stored, strict=True):
        numel = len(result["partition"])
        padding = numel - sum(fragment.stop - fragment.start for fragment in fragments.values())
        sizes.append(f"{numel} elements" + (f", {padding} of padding" if padding else ""))
    owned = [", ".join(name for name in SHAPES if owners[name] == rank) for rank in range(2)]
    rows = [("", ["rank 0", "rank 1"])]
    rows += [("stores", [" ".join(map(str, fragments.values())) for fragments in stored])]
    rows += [("", sizes), ("owns", owned)]
    rows += [("all-reduce", ["; ".join(result["all_reduced"]) for result in results])]
    for (kind, chunk), by_sender in zip(order_of_all_to_alls(results[0]["chunks"]), sent, strict=True):
        for receiver in range(2):
            label = f"{kind} chunk {chunk}" if not receiver else ""
            texts = [" ".join(map(str, by_sender[sender][receiver])) or "nothing" for sender in range(2)]
            rows.append((label, [f"to rank {receiver}: {text}" for text in texts]))
    rows.append(("sent", [f"{result['sent_bytes']} bytes to the other rank" for result in results]))
    lines = [f"{label:18}{left:34}{right}".rstrip() for label, (left, right) in rows]
    return "```text\n" + "\n".join(lines) + "\n```\n"


if __name__ == "__main__":
    PAGE.write_text(
        FIGURE.sub(lambda _: figure(run_ranks("tests.support.worked_example:train", 2)), PAGE.read_text())
    )
