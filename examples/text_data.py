"""Text for the example: where it comes from, how it becomes tokens, and which tokens make up a batch.

A batch is a pure function of the seed, the step and the slot (rank and micro-step). Nothing is consumed, so a
resumed run needs no more than its step number to see the batches that the uninterrupted run would have seen.
"""

from __future__ import annotations

import dataclasses
import random
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

# Folders of the standard library that are not prose or library code: installed packages and the test data.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, int64 of shape ``[batch, length]``."""


class DataError(ValueError):
    """The text asked for is missing, too short, or needs a package that is not installed."""


def standard_library() -> Iterator[str]:
    """Yields the sources of the running Python's standard library, documentation strings included."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = False
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            found = True
            yield path.read_text(encoding="utf-8", errors="replace")
    if not found:
        raise DataError(f"no Python sources under {root}: give --data PATH instead")


def text_files(source: str) -> Iterator[str]:
    """Yields the text of one file, or of every text file below a folder, in sorted order.

    Raises:
        DataError: the path does not exist, or the folder holds no file.
    """
    root = Path(source)
    paths = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
    if not paths or not paths[0].is_file():
        raise DataError(f"--data {source}: no such file, or a folder without files")
    for path in paths:
        content = path.read_bytes()
        if root.is_dir() and b"\0" in content:
            continue  # a picture or a compiled file among the texts
        yield content.decode("utf-8", errors="replace")


def hugging_face(name: str, column: str) -> Iterator[str]:
    """Yields one text column of a Hugging Face dataset's training split, streamed.

    Args:
        name: ``NAME`` or ``NAME:CONFIGURATION``.
        column: the column with the text.

    Raises:
        DataError: the package ``datasets`` is not installed, or the dataset has no such column.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError("--dataset needs the package 'datasets': pip install datasets") from error
    path, _, configuration = name.partition(":")
    for row in load_dataset(path, configuration or None, split="train", streaming=True):
        if column not in row:
            columns = ", ".join(sorted(row))
            raise DataError(
                f"--dataset {name}: no column {column!r}; give --dataset_column, one of {columns}"
            )
        yield row[column]


@dataclasses.dataclass(frozen=True)
class TokenText:
    """Byte-level tokens (0..255), split into a training and a validation part."""

    train: torch.Tensor
    validation: torch.Tensor

    @property
    def fingerprint(self) -> str:
        """Tells two texts apart: a resumed run must go on with the text that it started with."""
        return f"{len(self.train)}+{len(self.validation)}:{zlib.crc32(self.train.numpy().tobytes()):08x}"


def load_tokens(documents: Iterable[str], *, max_bytes: int, validation_fraction: float = 0.05) -> TokenText:
    """Encodes documents as bytes and splits them.

    The documents are shuffled with a fixed seed before the split, so that the validation text is of the same
    kind as the training text although it comes from other documents.

    Args:
        documents: the texts; reading stops once ``max_bytes`` are in.
        max_bytes: upper bound of the text kept, in bytes.
        validation_fraction: share of the bytes, at the end, that no training batch contains.

    Raises:
        DataError: there is no text at all.
    """
    kept: list[bytes] = []
    room = max_bytes
    for document in documents:
        if room <= 0:
            break
        kept.append(document.encode("utf-8", errors="replace")[:room])
        room -= len(kept[-1])
    random.Random(0).shuffle(kept)
    joined = bytearray(b"\n".join(kept))
    if not joined:
        raise DataError("the data source holds no text")
    tokens = torch.frombuffer(joined, dtype=torch.uint8)
    boundary = len(tokens) - int(len(tokens) * validation_fraction)
    return TokenText(tokens[:boundary], tokens[boundary:])


@dataclasses.dataclass(frozen=True)
class Batches:
    """Cuts ``[batch_size, seq_len]`` batches out of one token stream, for one rank of ``world_size``.

    Raises:
        DataError: the stream is shorter than one sequence.
    """

    tokens: torch.Tensor
    batch_size: int
    seq_len: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if len(self.tokens) < self.seq_len + 2:
            raise DataError(f"{len(self.tokens)} tokens are too few for sequences of {self.seq_len} tokens")

    def draw(self, seed: int, step: int, micro_step: int, micro_steps: int) -> Batch:
        """Inputs and targets of one micro-step.

        The offsets of the whole step are drawn from (seed, step) alone and then dealt to micro-steps and
        ranks, so 2 ranks x 1 micro-step and 1 rank x 2 micro-steps train on the same global batch.
        """
        # Python's generator takes the pair as it is; torch's CPU generator keeps only 32 bits of a seed.
        rng = random.Random(f"{seed}/{step}")
        drawn = [rng.randrange(self._starts) for _ in range(micro_steps * self.world_size * self.batch_size)]
        slot = micro_step * self.world_size + self.rank
        return self._cut(drawn[slot * self.batch_size : (slot + 1) * self.batch_size])

    def spread(self, index: int, count: int) -> Batch:
        """Batch ``index`` of ``count``, whose sequences lie at equal distances: for validation."""
        total = count * self.world_size * self.batch_size
        slot = index * self.world_size + self.rank
        first = slot * self.batch_size
        return self._cut([i * self._starts // total for i in range(first, first + self.batch_size)])

    @property
    def _starts(self) -> int:
        return len(self.tokens) - self.seq_len - 1

    def _cut(self, offsets: list[int]) -> Batch:
        rows = torch.stack([self.tokens[o : o + self.seq_len + 1] for o in offsets]).long()
        return rows[:, :-1], rows[:, 1:]
