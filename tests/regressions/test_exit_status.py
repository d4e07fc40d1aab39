"""A program ended with status -6 in one of ten runs: a thread of gloo was ended in the middle of a destructor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# So many tensors that gloo's thread still releases them while the interpreter shuts down.
PROGRAM = """
import sys, torch, torch.distributed as dist
import deepspeed_muon
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
group = dist.group.WORLD
tensors = [torch.ones(1) for _ in range(100_000)]
dist.all_reduce_coalesced(tensors)
"""


def test_programs_end_while_gloo_releases_tensors(tmp_path: Path) -> None:
    for repetition in range(3):
        store = str(tmp_path / str(repetition))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, store, str(rank)], stderr=subprocess.PIPE, text=True
            )
            for rank in (0, 1)
        ]
        for rank in ranks:
            _, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors
