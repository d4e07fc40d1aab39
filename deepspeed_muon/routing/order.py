"""The order in which ZeRO 1 and 2 shall flatten the matrices of a param group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_muon.math.flops import orthogonalize_flops
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.plan.order import balanced_order
from deepspeed_muon.routing.route import Route

__all__ = ["order_of_matrices"]


def order_of_matrices(routes: Sequence[Route], ranks: int, settings: NsSettings) -> Sequence[int]:
    """Return the positions of matrices in the order that gives all ranks equal work; equal on all ranks.

    Args:
        routes: Of the matrices, in the order of the param group.
        ranks: How many will divide the group.
        settings: The iteration, which decides the cost of a matrix.
    """

    def flops(rows: int, cols: int) -> float:
        return orthogonalize_flops(
            rows, cols, steps=len(settings.coefficients), method=settings.method, dtype=settings.dtype
        )

    kinds = [route.kinds_of_blocks() for route in routes]
    return balanced_order(
        [torch.Size(route.shape).numel() for route in routes],
        [sum(count * flops(rows, cols) for count, rows, cols in kind) for kind in kinds],
        kinds,
        ranks,
    )
