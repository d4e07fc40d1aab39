"""C++ and CUDA operators, built when they are first used; installed as ``deepspeed_muon.ops``.

``builder.py`` compiles what lies in ``csrc/`` and caches it; every operator has a PyTorch counterpart in
``deepspeed_muon.math`` that it is tested against.
"""
