"""C++ and CUDA operators, built when they are first used; installed as ``deepspeed_muon.ops``.

Importing this package neither compiles nor loads anything: :func:`select`, :func:`flat_passes` and :func:`load` do,
once. Every operator has a readable torch counterpart in :mod:`deepspeed_muon.ops.reference` that it is tested against.
"""

from .candidates import BATCH_NUMEL
from .dispatch import (
    FlatPasses,
    NsBackend,
    Orthogonalizer,
    flat_passes,
    largest_magnitudes,
    matrix_norms,
    select,
)
from .library import load, loaded, try_load
from .reference import cautious_apply_

__all__ = [
    "BATCH_NUMEL",
    "FlatPasses",
    "NsBackend",
    "Orthogonalizer",
    "cautious_apply_",
    "flat_passes",
    "largest_magnitudes",
    "load",
    "loaded",
    "matrix_norms",
    "select",
    "try_load",
]
