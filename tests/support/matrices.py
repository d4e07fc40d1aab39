"""Matrices that are hard to orthogonalise."""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def matrix(kind: str, rows: int, cols: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    x = torch.randn(rows, cols, generator=generator)
    if kind == "low-rank":
        rank = max(1, min(rows, cols) // 4)
        x = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, cols, generator=generator)
    if kind == "ill-conditioned":
        u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
        x = ((u * torch.logspace(0, -6, min(rows, cols), dtype=torch.float64)) @ v).float()
    return x * {"tiny": 1e-12, "tiniest": 1e-34, "huge": 1e12}.get(kind, 1.0)
