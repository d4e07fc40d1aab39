"""Offload: where the state lies, which AdamW runs there, twin-flow and NVMe; and what is refused."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.utils import safe_get_full_optimizer_state

import deepspeed_muon
from deepspeed_muon.engine import offload
from tests.support import training
from tests.support.contract import STEPS, compare
from tests.support.models import build
from tests.support.thinning import full
from tests.support.training import try_to_start

CPU = training.OFFLOAD


def offloaded(
    rank: int,
    world_size: int,
    *,
    stage: int,
    zero: dict[str, Any],
    device_sub_groups: int = 0,
    client: bool = False,
) -> dict[str, Any]:
    """Train, with or without offload, and report what ran and where the state lies."""
    config = training.ds_config(stage, clipping=0.5, zero=zero)
    model = build("toy")
    optimizer = None
    if client:
        optimizer = deepspeed_muon.Muon(model, **config.pop("optimizer")["params"])
    engine = training.initialize(model, config, optimizer=optimizer)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    for number in range(device_sub_groups):
        # On a CPU "cpu" is also the name of the device; so the way of a GPU's sub-groups is taken by another name.
        engine.optimizer.subgroup_to_device[number] = "device"
    norms = training.train_steps(engine, STEPS, rank, world_size)
    values = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "params": training.full_masters(engine),
        "momentum": training.full_states(engine, "momentum_buffer"),
        "norms": norms,
        "kernels": sorted({entry["kernel"] for entry in optimizer.adam_report() if entry["calls"]}),
        "reasons": sorted({entry["reason"] for entry in optimizer.adam_report()}),
        "devices": sorted({str(value.device) for value in values if torch.is_tensor(value)}),
        "group_keys": sorted({key for group in optimizer.param_groups for key in group}),
        "sub_groups": len(getattr(engine.optimizer, "fp16_groups", [])),
    }


@pytest.mark.parametrize(
    ("stage", "zero", "client", "kernel"),
    [
        *((stage, CPU, False, "deepspeed_cpu_adam") for stage in (1, 2, 3)),
        # Ours brings the native Adam along, so ``zero_force_ds_cpu_optimizer: false`` need not be set.
        *((stage, CPU, True, "deepspeed_cpu_adam") for stage in (2, 3)),
        (3, {}, False, "torch_fused"),
    ],
)
def test_the_native_adam_runs_where_state_is_offloaded(
    ranks: Any, stage: int, zero: dict[str, Any], client: bool, kernel: str
) -> None:
    for result in (results := ranks(2).run(offloaded, stage=stage, zero=zero, client=client)):
        assert result["kernels"] == [kernel], result["reasons"]
        assert result["devices"] == ["cpu"]
    compare(results, "toy", 2, 0.5)


def test_twin_flow_matches_the_reference(ranks: Any) -> None:
    """``ratio`` leaves some sub-groups on the device: ours runs on both kinds, and its groups stay as they were."""
    zero = {"sub_group_size": 150, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    plain = ranks(2).run(offloaded, stage=3, zero={**CPU, "sub_group_size": 150})
    for device_sub_groups in (0, 2):
        results = ranks(2).run(offloaded, stage=3, zero=zero, device_sub_groups=device_sub_groups)
        compare(results, "toy", 2, 0.5)
        assert results[0]["group_keys"] == plain[0]["group_keys"]
        assert results[0]["sub_groups"] > 2


HALF = {"enabled": True, "bf16_master_weights_and_grads": True}


NVME = {"device": "nvme", "nvme_path": "/tmp"}


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (zero(3, offload_optimizer={"device": "cpu", "super_offload": True}), ["super_offload", "remove it"]),
        (zero(2, offload_optimizer={"device": "cpu"}, zenflow={"topk_ratio": 0.1}), ["zenflow", "remove it"]),
        (zero(2, offload_optimizer=NVME), ["nvme", "Use stage 3"]),
        (zero(3, offload_optimizer={**NVME, "ratio": 0.5}), ["ratio", "Remove ratio"]),
        (
            {**zero(1), "bf16": {**HALF, "bf16_optimizer_states": True}, **training.FP32_SUMS},
            ["BF16_Optimizer", "stage 2"],
        ),
    ],
)
def test_refused(ranks: Any, change: dict[str, Any], said: list[str]) -> None:
    for text in ranks(2).run(try_to_start, stage=1, common=change):
        assert text.startswith("ConfigError: ") and all(words in text for words in said), text


# ``engine.offload_states()`` moved masters and momentum away, and the exchange kept its buffers on the device.


def _bytes(buffers: Any) -> int:
    return sum(memory.numel() for memory in buffers._memory.values())


def _copy_state(optimizer: Any, *_: Any, **__: Any) -> None:
    """Replace all tensors of the state, as a move to another device does."""
    for state in optimizer.state.values():
        for key, tensor in state.items():
            state[key] = tensor.clone() if torch.is_tensor(tensor) else tensor


def moved_away(
    rank: int,
    world_size: int,
    *,
    stage: int,
    precision: str,
    momentum: str | None,
    move: bool,
    kind: str = "toy",
) -> Any:
    """Train, offload all states to the host and take them back, train on; say what the exchange holds meanwhile."""
    params = {"momentum_dtype": momentum}
    config = training.ds_config(stage, precision=precision, clipping=0.5, params=params)
    engine = training.make_engine(config, kind)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    buffers = optimizer.exchange_buffers
    sizes = []
    mover = offload if stage == 3 else stage_1_and_2
    for step in range(4):
        training.run_step(engine, step, rank, world_size, 1)
        if move and step % 2 == 0:
            memory = [weakref.ref(tensor) for tensor in buffers._memory.values()]
            before = [
                (state, key, tensor) for state in optimizer.state.values() for key, tensor in state.items()
            ]
            sizes.append([_bytes(buffers), len(memory)])
            with mock.patch.object(mover, "offload_optimizer_states", _copy_state):
                engine.offload_states()
            sizes[-1] += [_bytes(buffers), sum(tensor() is not None for tensor in memory)]
            # Stage 3 moved AdamW's moments alone, and left copies of them in the state.
            assert all(state[key] is not tensor for state, key, tensor in before if torch.is_tensor(tensor))
            engine.reload_states()
            assert sum(map(len, optimizer.state.values())) == len(before)
            # ZeRO 1 and 2 had lost the links to the state, and ranks without elements hung.
            expected = training.full_states(engine, "momentum_buffer") if momentum != "int8" else {}
            for name, param in engine.module.named_parameters():
                if name in expected:
                    read = safe_get_full_optimizer_state(param, "momentum_buffer")
                    assert torch.equal(read.double(), expected[name]), name
    momentum_bytes = training.state_bytes(optimizer.state)["momentum_buffer"]
    return {"held": sizes, "bytes": momentum_bytes, **training.outcome(engine)}


@pytest.mark.parametrize(
    ("stage", "precision", "momentum"),
    [
        *(full(stage, "bf16", None) for stage in (1, 2, 3)),
        *(full(stage, "fp32", None) for stage in (2, 3)),
        full(2, "bf16", "bf16"),
        (3, "bf16", "bf16"),
        full(2, "bf16", "int8"),
    ],
)
def test_offload_states_changes_nothing(ranks: Any, stage: int, precision: str, momentum: str | None) -> None:
    arguments = {"stage": stage, "precision": precision, "momentum": momentum}
    stayed, moved = (ranks(2).run(moved_away, move=move, **arguments)[0] for move in (False, True))
    for before, buffers, after, alive in moved["held"]:
        # At stages 1 and 2 the matrices of this model lie whole on one rank each, and none travels.
        assert stage < 3 or (before > 0 and buffers > 0)
        assert after == alive == 0
    assert moved["bytes"] == stayed["bytes"] > 0
    training.assert_same_bits(moved, stayed, "params", "momentum")


def test_offload_states_with_frozen_weights(ranks: Any) -> None:
    """DeepSpeed looked for them in the buffer of the trained ones, and raised."""
    arguments = {"stage": 3, "precision": "bf16", "momentum": None, "kind": "adapters"}
    stayed, moved = (ranks(2).run(moved_away, move=move, **arguments)[0] for move in (False, True))
    training.assert_same_bits(moved, stayed, "params", "momentum")
