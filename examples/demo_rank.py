"""One rank of ``demo.py``: runs ``train_gpt.py`` unchanged and notes what the training sent and held.

All arguments but its own three go to ``train_gpt.py``. With ``--peer deepspeed``, type Muon is DeepSpeed's own
optimizer. Rank 0 writes ``--measured FILE``: the bytes that it sent, and the peak of its memory in bytes. With
``--restore DIR`` it does not train: it restores a consolidated checkpoint and notes the validation loss.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import sys
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import deepspeed_muon  # noqa: E402  # the path is set above
from benchmarks.sent_bytes import counting  # noqa: E402


def peak_memory() -> int:
    """Bytes: the allocator's peak on a GPU, the peak of resident memory, libraries included, on a CPU."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def restored_loss(arguments: list[str], checkpoint: Path) -> float:
    """Restores the engine that ``train_gpt.py`` would train, on any number of ranks and at any stage."""
    import train_gpt

    args = train_gpt.parse_args(arguments)
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    engine = train_gpt.build_engine(args, train_gpt.make_ds_config(args))
    deepspeed_muon.restore(engine, checkpoint)
    tokens = train_gpt.load_text(args).validation
    place = (dist.get_rank(), dist.get_world_size())
    batches = train_gpt.Batches(tokens, engine.train_micro_batch_size_per_gpu(), args.seq_len, *place)
    return train_gpt.evaluate(engine, batches, args.eval_batches)


def main() -> None:
    """Trains, counting, or restores."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--measured", type=Path, required=True)
    parser.add_argument("--peer", choices=["ours", "deepspeed"], required=True)
    parser.add_argument("--restore", type=Path, metavar="DIR")
    own, arguments = parser.parse_known_args()
    sys.path.insert(0, str(HERE))  # where train_gpt.py finds its model and its text
    first = os.environ.get("RANK", "0") == "0"
    if own.restore:
        loss = restored_loss(arguments, own.restore)
        if first:
            own.measured.write_text(json.dumps({"validation_loss": loss}))
        dist.destroy_process_group()
        return
    if own.peer == "deepspeed":
        deepspeed_muon.unregister()
    sys.argv = [str(HERE / "train_gpt.py"), *arguments]
    with counting() as sent:
        runpy.run_path(sys.argv[0], run_name="__main__")
    if first:
        own.measured.write_text(json.dumps({"sent_bytes": sent.total, "peak_bytes": peak_memory()}))


if __name__ == "__main__":
    main()
