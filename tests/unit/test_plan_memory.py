"""Memory of a step: the iteration takes what the plan says, and overlap never costs much more than AdamW."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed_muon.cli import main
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsMethod, NsSettings, orthogonalize
from deepspeed_muon.plan.memory import SLOTS, StepMemory, largest_chunk


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that live at once, but for those that were there before."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata for tensor in before}
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.living = {key: kept for key, kept in self.living.items() if not kept[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.before:
                    self.living[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(nbytes for _, nbytes in self.living.values()))
        return result


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(96, 96), (64, 200), (300, 48)])
@pytest.mark.parametrize("steps", [1, 5, 8])
def test_the_iteration_takes_what_the_plan_says(shape: tuple[int, int], steps: int, method: NsMethod) -> None:
    x = torch.randn(1, *shape)
    with Peak(x) as peak:
        orthogonalize(x, settings=NsSettings(resolve_schedule("quintic", steps), method, torch.float32))
    # Without exchange and overlap only the iteration is left; the norms take a few bytes.
    planned = StepMemory(0, (shape,), 4, 4, 4).iteration_bytes(overlap=False)
    assert peak.most <= planned + 64
    if steps == 5 and shape[0] != shape[1]:
        assert peak.most >= planned / 2


def plan_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(("model", "ranks"), [("llama-7b", 8), ("llama-7b", 64), ("llama-70b", 64)])
def test_no_more_than_a_twentieth_above_adamw(
    capsys: pytest.CaptureFixture[str], model: str, ranks: int
) -> None:
    plan = plan_of(capsys, model, "--world-size", str(ranks), "--stage", "3")
    muon, adamw = (plan["step"][name]["memory"]["total"] for name in ("muon", "adamw"))
    assert muon <= 1.05 * adamw
    assert plan["settings"]["overlap"] == (model != "llama-7b" or ranks < 64)


def test_overlap_is_given_up_where_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    memory = {
        overlap: plan_of(
            capsys,
            *("llama-7b", "--world-size", "64", "--stage", "3"),
            *("--params", json.dumps({"exchange_overlap": overlap})),
        )["step"]["muon"]["memory"]
        for overlap in ("auto", True, False)
    }
    assert memory["auto"] == memory[False]
    assert memory[True]["exchange_buffers"] == SLOTS * memory[False]["exchange_buffers"]


def test_small_buffers_always_fit() -> None:
    small = StepMemory(1 << 20, ((1024, 1024),), 2, 2, 2)
    large = StepMemory(1 << 26, ((8192, 8192),), 2, 2, 2)
    assert small.overlap_fits(muon=0.0, others=0.0)
    assert not large.overlap_fits(muon=1e8, others=0.0)
    assert large.overlap_fits(muon=1e9, others=0.0)


def test_the_largest_chunk() -> None:
    assert largest_chunk(1 << 30, [1 << 20], 1 << 26) == 1 << 26
    assert largest_chunk(1 << 30, [1 << 27], 1 << 26) == 1 << 27  # a larger matrix travels alone
    assert largest_chunk(1000.0, [100, 200], 1 << 26) == 1000
    assert largest_chunk(0.0, [], 1 << 26) == 0
