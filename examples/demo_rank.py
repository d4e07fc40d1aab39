"""One rank of ``demo.py``: runs ``train_gpt.py`` unchanged and notes what the training sent and held.

All arguments but its own two go to ``train_gpt.py``. With ``--peer deepspeed``, type Muon is DeepSpeed's own
optimizer. Rank 0 writes ``--measured FILE``: the bytes that it sent, and the peak of its memory in bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import deepspeed_muon  # noqa: E402  # the path is set above
from benchmarks.sent_bytes import SentBytes  # noqa: E402


def peak_memory() -> int:
    """Bytes: the allocator's peak on a GPU, the peak of resident memory, libraries included, on a CPU."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Trains, counting."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--measured", type=Path, required=True)
    parser.add_argument("--peer", choices=["ours", "deepspeed"], required=True)
    own, arguments = parser.parse_known_args()
    if own.peer == "deepspeed":
        deepspeed_muon.unregister()
    sent = SentBytes()
    sent.install()
    sys.argv = [str(HERE / "train_gpt.py"), *arguments]
    sys.path.insert(0, str(HERE))  # where train_gpt.py finds its model and its text
    runpy.run_path(sys.argv[0], run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        own.measured.write_text(json.dumps({"sent_bytes": sent.total, "peak_bytes": peak_memory()}))


if __name__ == "__main__":
    main()
