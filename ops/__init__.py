"""C++ and CUDA operators, built when they are first used; installed as ``deepspeed_muon.ops``.

Importing this package neither compiles nor loads anything. :func:`load` does, once; every operator has a readable
torch counterpart in :mod:`deepspeed_muon.ops.reference` that it is tested against.
"""

from .library import load, loaded, try_load

__all__ = ["load", "loaded", "try_load"]
