"""C++ and CUDA operators, built when they are first used; installed as ``deepspeed_muon.ops``.

Importing this package neither compiles nor loads anything. The first use of
:class:`~deepspeed_muon.ops.dispatch.Orthogonalizer`, :func:`~deepspeed_muon.ops.dispatch.flat_passes` or
:func:`~deepspeed_muon.ops.builder.load` does, once per process. Every operator is tested against a readable
counterpart, most of them in :mod:`deepspeed_muon.ops.torch_operators`.
"""
