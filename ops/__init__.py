"""C++ and CUDA operators, built when they are first used; installed as ``deepspeed_muon.ops``.

Importing this package neither compiles nor loads anything: :func:`~deepspeed_muon.ops.dispatch.Orthogonalizer`,
:func:`~deepspeed_muon.ops.dispatch.flat_passes` and :func:`~deepspeed_muon.ops.library.load` do, once. Every operator
has a readable torch counterpart in :mod:`deepspeed_muon.ops.torch_operators` that it is tested against.
"""
