"""Loads the native operators as ``torch.ops.deepspeed_muon``, and registers their shape functions.

An import of this module builds and loads nothing: the first :func:`load` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.errors import OpsUnavailableError
from deepspeed_muon.logs import warn_on_each_machine

from . import toolchain

_guard = threading.Lock()
_operators: Any = None
_failure: OpsUnavailableError | None = None


def load(*, verbose: bool = False) -> Any:
    """Return ``torch.ops.deepspeed_muon`` with all operators; the first call builds the library if necessary.

    Args:
        verbose: Whether to print the compiler's commands.

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
            for name, fake in _FAKES.items():
                torch.library.register_fake(f"deepspeed_muon::{name}", fake)
            if torch.cuda.is_available() and (reason := toolchain.cuda_reason(torch)):
                warn_on_each_machine(
                    "deepspeed_muon: there is a GPU, but its own CUDA kernels are not built (%s); torch's run instead",
                    reason,
                )
        return _operators


def try_load() -> Any | None:
    """Return the operators, or ``None`` if there are none; the first such call of a process warns."""
    known = _failure
    try:
        return load()
    except OpsUnavailableError as error:
        if known is None:
            warn_on_each_machine(
                "deepspeed_muon runs its torch code, which is slower: %s\n"
                "`python -m deepspeed_muon report` lists what is missing; ns_backend 'torch' silences this.",
                error,
            )
        return None


def loaded() -> bool:
    """Return whether the operators are loaded in this process."""
    return _operators is not None


def stored_transposed(x: Tensor) -> bool:
    """Return whether a batch of matrices is stored column by column; ``orthogonalize`` keeps the storage order."""
    return not x.is_contiguous() and x.mT.is_contiguous()


def _sym_gemm(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, diag: float) -> Tensor:
    return a.new_empty((*a.shape[:-1], a.shape[-2]))


def _orthogonalize(
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


def _frobenius_norms(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-2], dtype=torch.float32)


def _in_place(*arguments: Tensor | Sequence[Tensor]) -> None:
    return None


def _largest_magnitudes(tensors: Sequence[Tensor], table: Tensor) -> Tensor:
    return table.new_empty(table.shape[0], dtype=torch.float32)


# The operators on tensors without data, for torch.compile.
_FAKES: dict[str, Callable[..., Tensor | None]] = {
    "sym_gemm": _sym_gemm,
    "orthogonalize": _orthogonalize,
    "frobenius_norms": _frobenius_norms,
    "momentum_pack_": _in_place,
    "unpack_apply_": _in_place,
    "largest_magnitudes": _largest_magnitudes,
}
NAMES = tuple(_FAKES)
