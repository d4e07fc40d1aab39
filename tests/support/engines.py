"""Settings of engines by name: the places where DeepSpeed keeps gradients and masters, and the ways to reduce them."""

from __future__ import annotations

from typing import Any

from tests.support.training import FP32_SUMS, OFFLOAD

BF16_MASTERS = {"bf16": {"bf16_master_weights_and_grads": True}}
BF16_STATES = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
CPU = {"device": "cpu"}
PINNED = {**CPU, "pin_memory": True}

ENGINES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "0-bf16": {"stage": 0, "precision": "bf16"},
    "0-fp16": {"stage": 0, "precision": "fp16"},
    "1": {"stage": 1},
    "1-overlap-round-robin": {"stage": 1, "zero": {"overlap_comm": True, "round_robin_gradients": True}},
    "1-offload": {"stage": 1, "zero": OFFLOAD},
    # BF16_Optimizer
    "1-bf16-fp32-sums": {"stage": 1, "precision": "bf16", "extra": FP32_SUMS},
    "1-bf16": {"stage": 1, "precision": "bf16", "extra": {"data_types": {"grad_accum_dtype": "bf16"}}},
    "1-fp16": {"stage": 1, "precision": "fp16"},
    "1-fp16-offload": {"stage": 1, "precision": "fp16", "zero": OFFLOAD},
    "2": {"stage": 2},
    "2-overlap": {"stage": 2, "zero": {"overlap_comm": True, "reduce_bucket_size": 300}},
    "2-not-contiguous": {"stage": 2, "zero": {"contiguous_gradients": False}},
    "2-all-reduce": {"stage": 2, "zero": {"reduce_scatter": False}},
    "2-offload": {"stage": 2, "zero": OFFLOAD},
    "2-offload-overlap-pinned": {"stage": 2, "zero": {"offload_optimizer": PINNED, "overlap_comm": True}},
    "2-bf16": {"stage": 2, "precision": "bf16"},
    "2-bf16-fp32-sums": {"stage": 2, "precision": "bf16", "extra": FP32_SUMS},
    "2-bf16-fp32-sums-offload": {"stage": 2, "precision": "bf16", "zero": OFFLOAD, "extra": FP32_SUMS},
    "2-bf16-masters-offload": {"stage": 2, "precision": "bf16", "zero": OFFLOAD, "extra": BF16_MASTERS},
    "2-fp16": {"stage": 2, "precision": "fp16"},
    "2-fp16-offload": {"stage": 2, "precision": "fp16", "zero": OFFLOAD},
    "3": {"stage": 3},
    "3-sub-groups": {"stage": 3, "zero": {"sub_group_size": 100}},
    "3-overlap": {"stage": 3, "zero": {"overlap_comm": True, "reduce_bucket_size": 300}},
    "3-not-contiguous": {"stage": 3, "zero": {"contiguous_gradients": False}},
    "3-all-reduce": {"stage": 3, "zero": {"reduce_scatter": False}},
    "3-persistent": {"stage": 3, "zero": {"stage3_param_persistence_threshold": 500}},
    "3-zero-init": {"stage": 3, "zero_init": True},
    "3-hpz": {"stage": 3, "zero": {"zero_hpz_partition_size": 2}},
    "3-offload": {"stage": 3, "zero": {**OFFLOAD, "sub_group_size": 150}},
    "3-offload-param": {"stage": 3, "zero": {"offload_param": CPU}},
    "3-offload-both-pinned": {
        "stage": 3,
        "zero_init": True,
        "zero": {"offload_optimizer": PINNED, "offload_param": PINNED, "sub_group_size": 150},
    },
    "3-twin-flow": {"stage": 3, "zero": {"sub_group_size": 150, "offload_optimizer": {**CPU, "ratio": 0.5}}},
    "3-bf16": {"stage": 3, "precision": "bf16"},
    "3-bf16-offload": {"stage": 3, "precision": "bf16", "zero": OFFLOAD},
    "3-fp16": {"stage": 3, "precision": "fp16"},
    "3-fp16-offload": {"stage": 3, "precision": "fp16", "zero": {**OFFLOAD, "sub_group_size": 150}},
}
"""Arguments of :func:`tests.support.training.ds_config`, and ``zero_init``."""
