"""Memory of a step: the iteration takes what the plan says, and the buffers stay within their bound."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsMethod, NsSettings, orthogonalize
from deepspeed_muon.routing.route import Route
from deepspeed_muon.tools.plan import PlanSettings, exchange_of, iteration_numel

pytest.importorskip("transformers")


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that live at once, but for those that were there before."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata for tensor in before}
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.living = {key: entry for key, entry in self.living.items() if not entry[0].expired()}
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
def test_the_iteration_takes_the_planned_bytes(shape: tuple[int, int], steps: int, method: NsMethod) -> None:
    x = torch.randn(1, *shape)
    with Peak(x) as peak:
        orthogonalize(x, settings=NsSettings(resolve_schedule("quintic", steps), method, torch.float32))
    planned = 4 * iteration_numel(*shape)
    assert peak.most <= planned + 64  # the norms take a few bytes
    if steps == 5 and shape[0] != shape[1]:
        assert peak.most >= planned / 2


PlanOf = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("model", "ranks", "overlap"),
    [("llama-7b", 8, True), ("llama-7b", 64, False), ("llama-70b", 64, True), ("llama-70b", 128, True)],
)
def test_no_more_than_a_twentieth_above_adamw(plan_of: PlanOf, model: str, ranks: int, overlap: bool) -> None:
    params = json.dumps({"exchange_overlap": overlap})
    plan = plan_of(model, "--world-size", str(ranks), "--stage", "3", "--params", params)
    muon, adamw = (plan["step"][name]["memory"]["total"] for name in ("muon", "adamw"))
    assert muon <= 1.05 * adamw


def test_overlap_is_given_up_above_a_gibibyte(plan_of: PlanOf) -> None:
    """A matrix of 28672 x 8192 would take 2.8 GB in three slots."""
    assert plan_of("llama-7b")["settings"]["overlap"] and not plan_of("llama-70b")["settings"]["overlap"]


@pytest.mark.parametrize(
    ("count", "bound", "largest"),
    [(64, 1 << 26, 16 * 4096), (64, 3 * 4096 + 1, 3 * 4096), (64, 1000, 4096), (0, 1 << 26, 0)],
)
def test_the_largest_chunk(count: int, bound: int, largest: int) -> None:
    """Four ranks own sixteen matrices each; one that is larger than the bound travels alone."""
    matrices = [Route(f"{number}", (64, 64), "muon", "") for number in range(count)]
    exchange = exchange_of(matrices, PlanSettings(4, config=MuonConfig(exchange_chunk_numel=bound)))
    assert exchange.largest_chunk == largest


@pytest.mark.parametrize(
    ("model", "most"), [("llama-7b", 0.171), ("llama-70b", 0.135), ("qwen3-30b-a3b", 0.146)]
)
def test_state_with_momentum_in_8_bits_over_adamws(plan_of: PlanOf, model: str, most: float) -> None:
    """A third at most; embeddings and heads, which AdamW updates, decide how much less."""
    plan = plan_of(model, "--params", json.dumps({"momentum_dtype": "int8"}))
    ours, adamw = (plan["step"][name]["memory"] for name in ("muon", "adamw"))
    assert 0.127 < (ours["momentum"] + ours["moments"]) / adamw["moments"] <= most < 1 / 3


def test_dtypes_of_a_deepspeed_configuration(plan_of: PlanOf, tmp_path: Path) -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    path = tmp_path / "ds_config.json"
    dtypes = {}
    for name, section in (("fp32", {"enabled": True}), ("bf16", bf16)):
        path.write_text(json.dumps({"optimizer": {"type": "Muon", "params": {}}, "bf16": section}))
        for stage in (2, 3):
            plan = plan_of("llama-7b", "--params", str(path), "--stage", str(stage))
            dtypes[name, stage] = plan["step"]["muon"]["memory"]
    for stage in (2, 3):
        fp32, half = dtypes["fp32", stage], dtypes["bf16", stage]
        for field in ("master_weights", "momentum", "moments", "gradient_copy"):
            assert half[field] == 0.5 * fp32[field] > 0
