"""Under DeepSpeed's BF16_Optimizer, norm and clipping left out a parameter that only another rank used.

Each rank counted the gradients of its own backward pass, though the reduced ones are the same on all: with clipping,
ranks scaled the partitions of one matrix differently. Where the ranks use different branches of a leaf module, two
masters were 0.22 and 0.19 from the float64 reference, within what bf16 was allowed, and are 0.05 and 0.03 away now.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.idle import lead

# The branches that each rank uses in each of two micro-batches of a step.
APART = [["a|b", "|a"], ["b|", "a|b"], ["ab|a", "|"], ["|b", "b|"]]
BF16_OPTIMIZER = {"stage": 1, "precision": "bf16", "extra": {"data_types": {"grad_accum_dtype": "fp32"}}}


def test_a_parameter_counts_that_only_the_other_rank_used(ranks: Any) -> None:
    """A leaf module's unused parameters have no gradient here, those times 0 have one; the sums are equal."""
    leaf, times_zero = (
        ranks(2).run(lead, schedule=APART, touch=touch, **BF16_OPTIMIZER) for touch in ("leaf", "times 0")
    )
    assert leaf[0]["norms"] == leaf[1]["norms"] == times_zero[0]["norms"]
    for name, expected in times_zero[0]["paths"][-1].items():
        torch.testing.assert_close(leaf[0]["paths"][-1][name], expected, rtol=0, atol=0, msg=name)
