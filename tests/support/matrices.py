"""Matrices that are hard to orthogonalise, and how far a result may lie from the float64 polynomial."""

from __future__ import annotations

import torch

# Relative to the same polynomial in float64. fp32: every product rounds by 2^-24 and five steps multiply the rounding
# of small singular values by up to 480, of which the norm sees a few percent. Half formats: the worst measured cases.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 3e-1}


def matrix(kind: str, rows: int, cols: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    x = torch.randn(rows, cols, generator=generator)
    if kind == "low-rank":
        rank = max(1, min(rows, cols) // 4)
        x = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, cols, generator=generator)
    if kind == "ill-conditioned":
        u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
        x = ((u * torch.logspace(0, -6, min(rows, cols), dtype=torch.float64)) @ v).float()
    return x * {"tiny": 1e-12, "huge": 1e12}.get(kind, 1.0)
