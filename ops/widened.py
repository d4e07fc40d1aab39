"""Runs elementwise fp32 kernels on tensors in half precision, in parts, through fp32 copies.

State in bf16 only saves memory: the arithmetic stays fp32, and every element is rounded once a step, when it is
written back. The parts are small enough for a core's cache on a CPU, and large enough for a launch on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .dispatch import FlatPasses

__all__ = ["in_fp32", "widened"]

_CPU_BLOCK = 1 << 16
_GPU_BLOCK = 1 << 24


def in_fp32(kernel: Callable[..., None], mutated: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    """Call ``kernel(*mutated, *read)`` on fp32 views or copies of one part after the other.

    Args:
        kernel: Elementwise, takes flat fp32 tensors of one length and writes to the first ``len(mutated)`` of them.
        mutated: Flat tensors of one length, fp32 or half precision; half precision is rounded to nearest when it is
            written back.
        read: Flat tensors of the same length, not written to.
    """
    numel = mutated[0].numel()
    block = _CPU_BLOCK if mutated[0].device.type == "cpu" else _GPU_BLOCK
    for start in range(0, numel, block):
        size = min(block, numel - start)
        parts = [tensor.narrow(0, start, size) for tensor in (*mutated, *read)]
        wide = [part if part.dtype == torch.float32 else part.float() for part in parts]
        kernel(*wide)
        for part, result in zip(parts[: len(mutated)], wide, strict=False):
            if part is not result:
                part.copy_(result)


def widened(passes: FlatPasses) -> FlatPasses:
    """Return fp32 passes that also take momentum, gradients and parameters in half precision."""

    def momentum_pack(buf: Tensor, grad: Tensor, out: Tensor, momentum: float, nesterov: bool) -> None:
        in_fp32(lambda b, o, g: passes.momentum_pack(b, g, o, momentum, nesterov), [buf, out], [grad])

    def unpack_apply(param: Tensor, update: Tensor, lr_scale: float, decay: float) -> None:
        in_fp32(lambda p, u: passes.unpack_apply(p, u, lr_scale, decay), [param], [update])

    return FlatPasses(f"{passes.name} on fp32 blocks", momentum_pack, unpack_apply)
