"""The native operators as ``torch.ops.deepspeed_muon``: loading them, and their shape functions.

Nothing is built or loaded by importing this module: :func:`load` does that, once.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.errors import OpsUnavailableError

__all__ = ["NAMES", "load", "loaded", "try_load"]

NAMES = ("sym_gemm", "orthogonalize", "frobenius_norms", "momentum_pack_", "unpack_apply_")

_guard = threading.Lock()
_operators: Any = None
_failure: OpsUnavailableError | None = None


def load(*, verbose: bool = False) -> Any:
    """Return ``torch.ops.deepspeed_muon`` with all operators, building the library on the first call.

    Args:
        verbose: Print the compiler's commands.

    Raises:
        OpsUnavailableError: If the library can be neither loaded nor built; the message says why.
    """
    global _operators, _failure
    with _guard:
        if _operators is None:
            if _failure is not None:
                raise _failure
            from .builder import MuonBuilder

            try:
                _operators = MuonBuilder().load(verbose)
            except OpsUnavailableError as error:
                _failure = error
                raise
            _register_fakes()
        return _operators


def try_load() -> Any | None:
    """Return the operators, or ``None`` with one warning in this process where there are none."""
    known = _failure
    try:
        return load()
    except OpsUnavailableError as error:
        if known is None:
            warnings.warn(
                f"deepspeed_muon runs its torch code, which is slower: {error}\n"
                f"`python -m deepspeed_muon report` lists what is missing; ns_backend 'torch' silences this.",
                stacklevel=2,
            )
        return None


def loaded() -> bool:
    """Return whether the operators are loaded in this process."""
    return _operators is not None


def stored_transposed(x: Tensor) -> bool:
    """Return whether a batch of matrices is stored column by column; ``orthogonalize`` keeps the storage order."""
    return not x.is_contiguous() and x.mT.is_contiguous()


def _register_fakes() -> None:
    @torch.library.register_fake("deepspeed_muon::sym_gemm")
    def _(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, diag: float) -> Tensor:
        return a.new_empty((*a.shape[:-1], a.shape[-2]))

    @torch.library.register_fake("deepspeed_muon::orthogonalize")
    def _(
        x: Tensor,
        coefficients: Sequence[float],
        method: str,
        restarts: Sequence[int],
        dtype: torch.dtype,
        eps: float,
    ) -> Tensor:
        if stored_transposed(x):
            return x.new_empty(x.mT.shape, dtype=dtype).mT
        return x.new_empty(x.shape, dtype=dtype)

    @torch.library.register_fake("deepspeed_muon::frobenius_norms")
    def _(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[:-2], dtype=torch.float32)

    @torch.library.register_fake("deepspeed_muon::momentum_pack_")
    def _(buf: Tensor, grad: Tensor, out: Tensor, momentum: float, nesterov: bool) -> None:
        return None

    @torch.library.register_fake("deepspeed_muon::unpack_apply_")
    def _(param: Tensor, update: Tensor, lr_scale: float, decay: float) -> None:
        return None
