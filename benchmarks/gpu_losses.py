"""Loss and milliseconds of each whole step, and peak memory: this project, FusedAdam, DeepSpeed's Muon.

    python benchmarks/gpu_losses.py --device cuda --model 350M --out OUT       # one GPU
    python benchmarks/gpu_losses.py --model tiny --steps 6 --length 64         # a rehearsal on a CPU

A step is forward, backward and optimizer step at ZeRO 1 on one rank, with one synchronisation at its end. The
optimizers train one after the other, because three engines of the 1.3B model do not fit on one GPU. ``--optimizers``
selects some; the rows of the others in ``--out`` are kept. The text is Python's standard library as bytes.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "examples")]

from text_data import Batches, load_tokens, standard_library  # noqa: E402  # a module beside the example's script

from benchmarks import step_ranks, support  # noqa: E402
from benchmarks.support import Row  # noqa: E402
from deepspeed_muon import muon_optimizer  # noqa: E402

ADAM = "DeepSpeed AdamW"
MUON_RATES = {"muon_lr": 0.02, "adam_lr": 3e-4}
OPTIMIZERS = {
    "ours": MUON_RATES,
    ADAM: {"lr": 3e-4},
    "DeepSpeed Muon, gram": MUON_RATES,  # its default
    "DeepSpeed Muon, standard": MUON_RATES,
}


def train(optimizer: str, batches: list[Tensor], arguments: Namespace) -> Row:
    """Train a new model on all batches."""
    device, rates = arguments.device, OPTIMIZERS[optimizer]
    with torch.device(device):
        model = step_ranks.decoder(arguments.model)
    engine = step_ranks.make_engine(optimizer, model, 1, 1, device, weight_decay=0.0, **rates)
    row: Row = {"optimizer": optimizer, "losses": [], "ms": []}
    for batch in batches:
        step_ranks.wait(device)
        start = time.perf_counter()
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        step_ranks.wait(device)
        row["ms"].append(1e3 * (time.perf_counter() - start))
        row["losses"].append(loss.item())
    if device != "cpu":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    if optimizer == "ours":
        row["kernels"] = muon_optimizer(engine).kernel_report()
    engine.destroy()
    return row


def page(rows: list[Row], arguments: Namespace) -> list[str]:
    """Return a line for each optimizer as Markdown; the JSON has every step."""
    later = {row["optimizer"]: statistics.median(row["ms"][len(row["ms"]) // 2 :]) for row in rows}
    lines = [
        {
            "optimizer": name,
            **{f"loss {n + 1}": losses[n] for n in (0, len(losses) // 2, len(losses) - 1)},
            "first step, ms": ms[0],
            "later step, ms": later[name],
            "x FusedAdam": later[name] / later.get(ADAM, math.nan),
            **({"peak, GiB": peak / 2**30} if peak else {}),
        }
        for name, losses, ms, peak in (
            (row["optimizer"], row["losses"], row["ms"], row.get("peak_bytes")) for row in rows
        )
    ]
    told = f"{arguments.sequences} x {arguments.length} tokens a step; later step: median of the second half."
    return [*support.heading(f"Whole steps of the {arguments.model} model", told), *support.table_of(lines)]


def main() -> None:
    parser = support.options(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=sorted(step_ranks.MODELS), default="350M")
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sequences", type=int, default=4, help="of a batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    arguments = parser.parse_args()
    step_ranks.join(arguments.device)
    text = load_tokens(standard_library(), max_bytes=8 << 20)
    drawn = Batches(text.train, arguments.sequences, arguments.length, 0, 1)
    vocabulary = step_ranks.MODELS[arguments.model].vocabulary
    batches = [drawn.draw(0, n, 0, 1)[0].to(arguments.device) % vocabulary for n in range(arguments.steps)]
    rows: list[Row] = support.read(arguments.out).get("rows", [])
    for optimizer in arguments.optimizers:
        row = train(optimizer, batches, arguments)
        rows = support.merged(rows, [row], lambda each: list(OPTIMIZERS).index(each["optimizer"]))
        support.write(arguments.out, {"rows": rows}, page(rows, arguments))
    print("\n".join(page(rows, arguments)))
    step_ranks.leave()


if __name__ == "__main__":
    main()
