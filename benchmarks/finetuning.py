"""Fine-tuning of what AdamW pretrained: loss on the new text against loss on the old one, by optimizer and rate.

    python benchmarks/finetuning.py                     # trains what FOLDER/results.jsonl does not have
    python benchmarks/finetuning.py --table             # writes results/finetuning.md from results/finetuning.jsonl

A GPT (``SIZES``) of bytes is pretrained on code, Python's standard library, or on prose, the machine's manual pages and
Perl documentation without their markup. AdamW (rate 2e-3, decay 0.1, 512 tokens a step) runs at a constant rate until
2,000 further steps lower the held-out loss by less than 0.02 nats (means of eight measurements), at most ``LONGEST``
steps, and then 2,000 steps more with the rate falling to zero. The line of the pretraining has the curve.

It is then fine-tuned on the other text for 100 steps of 1,024 tokens: 5 steps of warm-up, linear decay to zero,
gradients clipped to 1, no weight decay. ``much`` data are never repeated, ``little`` are 16 kB seen six times. ``LoRA``
trains adapters of rank 8 on every projection, B by Muon and A by AdamW as is the default, ``full`` everything. The
column ``rate`` is AdamW's; "match" takes it for all parameters; "original" has it for matrices times
``0.2 sqrt(width)``, which gives square matrices the same size of update, and a constant ``adam_lr`` (``REST``). Both
losses are means over 16 blocks of 8 held-out windows of 128 bytes, the same for all runs. A seed decides about the
order of the data and the adapters.

The runs come in the order of ``STAGES``, so that every finished stage is of use. One core of an EPYC (AVX512-BF16)
takes 10 to 18 minutes for a pretraining at 1M and 45 at 5M, 13 s for a run at 1M and 65 s at 5M: about 20 core hours
for all 1,712 runs. On a GPU, ``--device cuda --side-by-side 14`` trains fourteen at once. Every line has the processor
seconds of its run and the machine.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import math
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "examples")]

from gpt import GPT, GPTConfig  # noqa: E402  # a script of the examples, not a package
from text_data import Batches, TokenText, load_tokens, standard_library  # noqa: E402

from benchmarks import support  # noqa: E402
from benchmarks.lora import ALPHA, Adapter, with_adapters  # noqa: E402
from benchmarks.support import Row  # noqa: E402
from benchmarks.training_runs import (  # noqa: E402
    ADAMW,
    BETAS,
    REPOSITORY,
    Estimate,
    agrees,
    capture,
    estimate,
    moved,
    optimizer_of,
    read_rows,
    train_missing,
)

RAW = REPOSITORY / "benchmarks" / "results" / "finetuning.jsonl"
SIZES = {"1M": GPTConfig(dim=128, layers=4), "5M": GPTConfig(dim=256, layers=6)}
TEXTS = ("code", "prose")
OPTIMIZERS = (ADAMW, "Muon, match", "Muon, original", "NorMuon, match")
RATES = {
    "full": (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "LoRA": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
}
REST = {"full": 5e-4, "LoRA": 4e-3}
"""The rate of what AdamW updates, with "original"."""
LORA_RANK = 8
LENGTH, WINDOWS, BLOCKS = 128, 8, 16
"""Bytes of a sequence, held-out sequences of a block, blocks."""
LITTLE = 16_384
STEPS = 100

PRETRAINING_RATE, MEASURED_EVERY, FLAT, DECAY_STEPS = 2e-3, 250, 0.02, 2000
LONGEST = {"1M": 16_000, "5M": 10_000}


@dataclass(frozen=True)
class Pretraining:
    """A pretraining by AdamW."""

    size: str
    text: str


@dataclass(frozen=True)
class Cell:
    """What is compared: the optimizers, rates and seeds of one kind of fine-tuning."""

    size: str
    old: str
    """The text of the pretraining; the new one is the other."""
    data: str
    weights: str

    @property
    def new(self) -> str:
        """The text of the fine-tuning."""
        return TEXTS[1 - TEXTS.index(self.old)]

    def __str__(self) -> str:
        return f"{self.size}, {self.old} to {self.new}, {self.data} data, {self.weights}"


@dataclass(frozen=True)
class FineTuning:
    """One fine-tuning."""

    size: str
    old: str
    data: str
    weights: str
    optimizer: str
    rate: float
    seed: int

    @property
    def cell(self) -> Cell:
        """The runs that this one is compared with."""
        return Cell(self.size, self.old, self.data, self.weights)


FIRST, OTHERS = (0, 1), (2, 3, 4)
CELLS = tuple(
    Cell(*settings) for settings in itertools.product(SIZES, TEXTS, ("much", "little"), ("full", "LoRA"))
)
WITH_ORIGINAL = (Cell("1M", "code", "much", "full"), Cell("1M", "code", "little", "full"))
"""The cells whose first seeds train "original" too: at a constant ``adam_lr`` it asks another question."""
STAGES: tuple[tuple[Cell, Sequence[int]], ...] = tuple(itertools.product(CELLS, (FIRST,))) + tuple(
    itertools.product(CELLS, (OTHERS,))
)


def runs() -> Iterator[Pretraining | FineTuning]:
    """Yield all runs in the order in which they are trained; the middle rates first."""
    pretrained: set[Pretraining] = set()
    for cell, seeds in STAGES:
        base = Pretraining(cell.size, cell.old)
        if base not in pretrained:
            pretrained.add(base)
            yield base
        with_original = cell in WITH_ORIGINAL and seeds == FIRST
        optimizers = [name for name in OPTIMIZERS if with_original or name != "Muon, original"]
        rates = RATES[cell.weights]
        middle_first = sorted(rates, key=lambda rate: abs(math.log(rate / rates[3])))
        for seed, rate, optimizer in itertools.product(seeds, middle_first, optimizers):
            yield FineTuning(cell.size, cell.old, cell.data, cell.weights, optimizer, rate, seed)


# Texts


def paragraphs_of_prose(document: str) -> Iterator[str]:
    """Yield the paragraphs of a manual page or of Perl documentation that are sentences, without markup."""
    document = re.sub(r"^[.'].*$", "", document, flags=re.M)  # requests of roff
    document = re.sub(r"\\f(?:\[\w*\]|\(?\w)|\\[&|^/,%]|\\s[-+]?\d", "", document)
    document = re.sub(r"\\\*?\((?:``|''|[lr]q|[CDOT][qu]|dq)", '"', document)  # quotation marks
    document = document.replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\")
    document = re.sub(r"\b[A-Z]<+\s?([^<>]*?)\s?>+", r"\1", document)  # codes of Perl's format
    for paragraph in re.split(r"\n\s*\n", document):
        text = paragraph.strip("\n")
        letters = sum(char.islower() or char == " " for char in text)
        is_indented = text.startswith((" ", "\t", "="))
        if len(text) > 120 and not is_indented and letters > 0.85 * len(text) and re.search(r"[.:!?]$", text):
            yield text


def prose() -> Iterator[str]:
    """Yield a text for each document of the machine that has prose, without paragraphs that came before."""
    roots = [Path("/usr/share") / name for name in ("perl", "man", "common-licenses")]
    paths = sorted(path for root in roots for path in root.resolve().rglob("*") if path.is_file())
    english = [path for path in paths if "/man/" not in str(path) or path.parent.parent.name == "man"]
    seen: set[str] = set()
    for path in english:
        if (
            path.is_symlink()
            or path.suffix not in {".gz", ".pod", ".pm", ""}
            or path.name.startswith("gcloud")
        ):
            continue  # gcloud's 10,000 pages repeat each other
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        document = content.decode("utf-8", errors="replace")
        if path.suffix == ".pm":  # documentation stands between =head1 and =cut
            document = "\n\n".join(re.findall(r"^=(?:head|pod).*?(?=^=cut|\Z)", document, flags=re.M | re.S))
        new = [text for text in paragraphs_of_prose(document) if text not in seen]
        seen.update(new)
        if len(new) > 2:
            yield "\n\n".join(new) + "\n"


@cache
def tokens(folder: Path, name: str) -> TokenText:
    """Return the bytes of a text, which the first call stores in ``folder``.

    Raises:
        SystemExit: There is less than a megabyte of it on this machine.
    """
    path = folder / f"{name}.txt"
    if not path.exists():
        documents = list(standard_library() if name == "code" else prose())
        random.Random(0).shuffle(documents)
        data = "\n".join(documents).encode()
        if len(data) < 1 << 20:
            raise SystemExit(f"only {len(data)} bytes of {name} on this machine: put a text into {path}")
        partial = path.with_suffix(".partial")
        partial.write_bytes(data[: 7 << 20])
        partial.rename(path)
    return load_tokens([path.read_text(errors="replace")], max_bytes=7 << 20)


def losses_of(model: GPT, text: TokenText) -> list[float]:
    """Return the held-out loss of every block of windows, in nats a byte."""
    batches = Batches(text.validation, WINDOWS, LENGTH, 0, 1)
    device = model.lm_head.weight.device
    model.eval()
    with torch.no_grad():
        losses = [model(*moved(batches.spread(block, BLOCKS), device)) for block in range(BLOCKS)]
    model.train()
    return [round(loss, 5) for loss in torch.stack(losses).tolist()]


# Training


def pretrain(folder: Path, device: str, run: Pretraining) -> Row:
    """Pretrain once; a process that was killed before goes on where it last measured."""
    text = tokens(folder, run.text)
    torch.manual_seed(0)
    model = GPT(SIZES[run.size]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), PRETRAINING_RATE, BETAS, weight_decay=0.1, fused=True)
    checkpoint = folder / f"{run.size}-{run.text}.partial"
    curve, step, decay_from, earlier_seconds = [], 0, None, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        curve, step, decay_from, earlier_seconds = (
            state[key] for key in ("curve", "step", "decay_from", "seconds")
        )
    batches = Batches(text.train, 4, LENGTH, 0, 1)
    capture(model, moved(batches.draw(0, 0, 0, 1), device))
    while decay_from is None or step < decay_from + DECAY_STEPS:
        left = 1.0 if decay_from is None else 1 - (step - decay_from) / DECAY_STEPS
        optimizer.param_groups[0]["lr"] = PRETRAINING_RATE * min((step + 1) / 200, left)
        model.zero_grad()
        model(*moved(batches.draw(0, step, 0, 1), device)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % MEASURED_EVERY == 0:
            curve.append([step, round(statistics.fmean(losses_of(model, text)), 4)])
            if decay_from is None and (gain_of(curve) < FLAT or step == LONGEST[run.size]):
                decay_from = step
            seconds = earlier_seconds + time.process_time()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "curve": curve}
            save({**state, "step": step, "decay_from": decay_from, "seconds": seconds}, checkpoint)
    save(model.state_dict(), folder / f"{run.size}-{run.text}.pt")
    flat = gain_of([point for point in curve if point[0] <= decay_from])
    blocks = {name: losses_of(model, tokens(folder, name)) for name in TEXTS}
    return {
        "curve": curve,
        "decay_from": decay_from,
        "gain": round(flat, 4),
        "blocks": blocks,
        "seconds": round(earlier_seconds + time.process_time(), 1),
        "texts": {name: tokens(folder, name).fingerprint for name in TEXTS},
    }


def gain_of(curve: Sequence[Sequence[float]]) -> float:
    """Return by how much the mean of the last eight measurements is below that of the eight before."""
    losses = [loss for _, loss in curve]
    if len(losses) < 16:
        return math.inf
    return statistics.fmean(losses[-16:-8]) - statistics.fmean(losses[-8:])


def save(state: object, path: Path) -> None:
    """Write a file that is complete or not there."""
    torch.save(state, path.with_suffix(".writing"))
    os.replace(path.with_suffix(".writing"), path)


def finetune(folder: Path, device: str, run: FineTuning) -> Row:
    """Fine-tune once."""
    old, new = tokens(folder, run.old), tokens(folder, run.cell.new)
    config = SIZES[run.size]
    model = GPT(config)
    model.load_state_dict(torch.load(folder / f"{run.size}-{run.old}.pt", map_location="cpu"))
    if run.weights == "LoRA":
        with_adapters(model, LORA_RANK, run.seed)
    model.to(device)
    before = matrices_of(model)
    original = run.optimizer == "Muon, original"
    rate = run.rate * 0.2 * math.sqrt(config.dim) if original else run.rate
    optimizer = optimizer_of(run.optimizer, model, rate=rate, rest=REST[run.weights] if original else None)

    def factor(step: int) -> float:
        return min((step + 1) / 5, 1 - step / STEPS)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    source = new.train[:LITTLE] if run.data == "little" else new.train
    batches = Batches(source, 8, LENGTH, 0, 1)
    capture(model, moved(batches.draw(run.seed, 0, 0, 1), device))
    trained = [param for param in model.parameters() if param.requires_grad]
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*moved(batches.draw(run.seed, step, 0, 1), device)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
    change = [after - weight for after, weight in zip(matrices_of(model), before, strict=True)]
    return {
        "new_losses": losses_of(model, new),
        "old_losses": losses_of(model, old),
        "moved": float(f"{norm_of(change) / norm_of(before):.4g}"),
    }


def matrices_of(model: GPT) -> list[Tensor]:
    """Return copies of the matrices of the layers, with what adapters add to them."""
    layers = [layer for block in model.layers for layer in (*block.attn.children(), *block.mlp.children())]
    with torch.no_grad():
        return [
            layer.base.weight + ALPHA * layer.lora_b.weight @ layer.lora_a.weight
            if isinstance(layer, Adapter)
            else layer.weight.clone()
            for layer in layers
        ]


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Return the norm of all elements."""
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


# Table

Frontier = list[tuple[float, float, float]]
"""Rate, loss on the new text, loss on the old one, of the runs of one optimizer and seed, by rate."""


class CellResults:
    """The runs of a cell."""

    def __init__(self, cell: Cell, rows: Sequence[Row]) -> None:
        self.cell = cell
        self.start = next((row for row in rows if agrees(row, Pretraining(cell.size, cell.old))), None)
        self.rows = [row for row in rows if row["run"] == FineTuning.__name__ and agrees(row, cell)]
        count = len(RATES[cell.weights])
        pairs = [(row["optimizer"], row["seed"]) for row in self.rows]
        self.seeds = {
            name: [seed for seed in range(5) if pairs.count((name, seed)) == count] for name in OPTIMIZERS
        }
        """Of each optimizer the seeds that have all rates."""

    def frontier(self, optimizer: str, seed: int, blocks: Sequence[int]) -> Frontier:
        """Return the losses over some of the blocks of held-out windows."""
        rows = [row for row in self.rows if (row["optimizer"], row["seed"]) == (optimizer, seed)]

        def mean(losses: Sequence[float]) -> float:
            return statistics.fmean(losses[block] for block in blocks)

        return sorted((row["rate"], mean(row["new_losses"]), mean(row["old_losses"])) for row in rows)

    def difference(self, optimizer: str, value: Callable[[Frontier], float | None]) -> Estimate | None:
        """Return ``value`` of the optimizer's frontier minus that of AdamW's, of the seeds where both have one.

        The error is that over seeds and that over blocks of windows (jackknife), in quadrature.
        """
        seeds = [seed for seed in self.seeds[optimizer] if seed in self.seeds[ADAMW]]

        def differences(blocks: Sequence[int]) -> dict[int, float]:
            values: dict[int, float] = {}
            for seed in seeds:
                pair = [value(self.frontier(name, seed, blocks)) for name in (optimizer, ADAMW)]
                if pair[0] is not None and pair[1] is not None:
                    values[seed] = pair[0] - pair[1]
            return values

        every_block = range(BLOCKS)
        values = differences(every_block)
        if not values:
            return None
        left_out = [
            differences([block for block in every_block if block != skipped]) for skipped in every_block
        ]
        means = [statistics.fmean(some.values()) for some in left_out if some]
        center = statistics.fmean(means)
        jackknife = (len(means) - 1) / len(means) * sum((mean - center) ** 2 for mean in means)
        return estimate(list(values.values()), other_error=math.sqrt(jackknife))


def old_loss_at(new_loss: float) -> Callable[[Frontier], float | None]:
    """Return a function that gives the old text's loss where the new one's is ``new_loss``, on straight lines.

    Only rates up to the first one that does not lower the new text's loss belong to the frontier.
    """

    def value(frontier: Frontier) -> float | None:
        for (_, new, old), (_, next_new, next_old) in itertools.pairwise(frontier):
            if next_new > new:
                return None
            if new >= new_loss >= next_new:
                return old + (new - new_loss) / (new - next_new) * (next_old - old)
        return None

    return value


def least_new(frontier: Frontier) -> float:
    """Return the least loss on the new text."""
    return min(new for _, new, _ in frontier)


def old_at_least_new(frontier: Frontier) -> float:
    """Return the old text's loss at the rate that has the least loss on the new one."""
    return min((new, old) for _, new, old in frontier)[1]


def cell_page(results: CellResults) -> list[str]:
    """Return the tables of a cell."""
    cell, everything = results.cell, range(BLOCKS)
    count = {name: len(seeds) for name, seeds in results.seeds.items()}
    lines = ["", f"## {cell}", ""]
    start = results.start
    if start:
        new, old = (statistics.fmean(start["blocks"][name]) for name in (cell.new, cell.old))
        lines += [f"Before: {cell.new} {new:.4f}, {cell.old} {old:.4f}.", ""]
    by_run: dict[tuple[str, float], list[Row]] = {}
    for row in results.rows:
        by_run.setdefault((row["optimizer"], row["rate"]), []).append(row)

    def losses(name: str, rate: float) -> str:
        rows = by_run.get((name, rate), [])
        if not rows:
            return ""
        new, old = (
            statistics.fmean(statistics.fmean(row[key]) for row in rows)
            for key in ("new_losses", "old_losses")
        )
        moved = statistics.fmean(row["moved"] for row in rows)
        return f"{new:.3f} / {old:.3f} / {moved:.2g} ({len(rows)})"

    names = [name for name in OPTIMIZERS if any(row["optimizer"] == name for row in results.rows)]
    table = [[f"{rate:g}", *(losses(name, rate) for name in names)] for rate in RATES[cell.weights]]
    lines += [f"Loss on {cell.new} / on {cell.old} / change of the weights over their norm (seeds):", ""]
    lines += support.table(["rate", *names], table)
    if not start or not count[ADAMW]:
        return lines
    fronts = [results.frontier(ADAMW, seed, everything) for seed in results.seeds[ADAMW]]
    best = statistics.fmean(map(least_new, fronts))
    targets = [best + share * (new - best) for share in (0.5, 0.25, 0.1, 0.02)]
    values: list[tuple[str, Callable[[Frontier], float | None]]] = [
        *((f"{cell.old} where {cell.new} is {target:.3f}", old_loss_at(target)) for target in targets),
        (f"least {cell.new}", least_new),
        (f"{cell.old} there", old_at_least_new),
    ]

    def difference(name: str, value: Callable[[Frontier], float | None]) -> str:
        result = results.difference(name, value)
        return (
            "" if result is None else f"{result.mean:+.4f} {str(result).split(' ', 1)[1]}: {result.verdict()}"
        )

    compared = [name for name in names if name != ADAMW and count[name]]
    rows = [[title, *(difference(name, value) for name in compared)] for title, value in values]
    lines += ["", f"Minus AdamW ({count[ADAMW]} seeds, least {cell.new} {best:.4f}):", ""]
    return [*lines, *support.table(["", *compared], rows)]


def page(rows: Sequence[Row]) -> list[str]:
    """Return the page of all cells that have runs."""
    hardware = sorted({f"{row['hardware']}, torch {row['torch']}" for row in rows})
    lines = [
        "# Fine-tuning of models that AdamW pretrained",
        "",
        f"`python benchmarks/finetuning.py`, then `--table`: {len(rows)} runs in [{RAW.name}]({RAW.name}); "
        f"{'; '.join(hardware)}, one thread. Losses in nats a byte. ± is one standard error, over seeds and over "
        "blocks of held-out windows; within two of them, or with fewer than three seeds, nothing is called better.",
        "",
        "## Pretraining by AdamW",
        "",
    ]
    pretrained = [row for row in rows if row["run"] == Pretraining.__name__]
    table = [
        [
            f"{row['size']} on {row['text']}",
            row["decay_from"],
            f"{row['gain']:.4f}" + ("" if row["decay_from"] < LONGEST[row["size"]] else " (not flat)"),
            *(f"{statistics.fmean(row['blocks'][name]):.4f}" for name in TEXTS),
        ]
        for row in pretrained
    ]
    heads = [
        "model",
        "steps until flat",
        "gain of the last 2,000",
        *(f"{name}, at the end" for name in TEXTS),
    ]
    lines += support.table(heads, table)
    for cell in CELLS:
        results = CellResults(cell, rows)
        if results.rows:
            lines += cell_page(results)
    return lines


def main() -> None:
    """Train what is missing, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=REPOSITORY / ".cache" / "finetuning")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--side-by-side", type=int, default=1, metavar="RUNS", help="how many are trained at once"
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--raw", type=Path, default=RAW, help="what --table reads, and where it writes the page"
    )
    args = parser.parse_args()
    if args.table:
        args.raw.with_suffix(".md").write_text("\n".join(page(read_rows(args.raw))) + "\n")
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    for text in TEXTS:
        tokens(args.folder, text)

    # side by side, no fine-tuning begins before the pretrainings have ended
    for kinds in [(Pretraining, FineTuning)] if args.side_by_side == 1 else [(Pretraining,), (FineTuning,)]:
        train_missing(
            (run for run in runs() if isinstance(run, kinds)),
            partial(trained, args.folder, args.device),
            args.folder / "results.jsonl",
            side_by_side=args.side_by_side,
        )


def trained(folder: Path, device: str, run: Pretraining | FineTuning) -> Row:
    """Train one run."""
    return pretrain(folder, device, run) if isinstance(run, Pretraining) else finetune(folder, device, run)


if __name__ == "__main__":
    main()
