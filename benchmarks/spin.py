"""A kernel that occupies multiprocessors for a time, as NCCL's kernels do while they wait."""

from __future__ import annotations

import triton
from triton.language.extra.cuda import globaltimer


@triton.jit
def spin(nanoseconds):  # type: ignore[no-untyped-def]
    """Wait; a block of sixteen warps leaves a multiprocessor no registers for the product's, which take all."""
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()
