"""Which rows of which parameters belong to the heads of an attention layer, and where they lie on a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed_muon.plan.layout import Fragment
from deepspeed_muon.qk_clip.logits import HeadRole

__all__ = ["AttentionHeads", "HeadRows", "HeadRun", "head_runs"]


@dataclass(frozen=True, slots=True)
class HeadRows:
    """A block of rows for each head, at equal distances in one parameter.

    Attributes:
        parameter: Dotted name.
        role: What the rows make.
        heads: Number of blocks: the query heads, or the key heads.
        rows: Rows of a block.
        stride: Rows from the start of one block to the next.
        start: First row of the first block.
        row_numel: Elements of a row; 1 for a bias.
        total: Rows that the parameter has, so that a wrong description is noticed; 0 if it does not matter.
    """

    parameter: str
    role: HeadRole
    heads: int
    rows: int
    stride: int
    start: int = 0
    row_numel: int = 1
    total: int = 0

    @property
    def stop(self) -> int:
        """The first row after the last block."""
        return self.start + (self.heads - 1) * self.stride + self.rows


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """One attention layer.

    Attributes:
        layer: Dotted name of its module.
        heads: Query heads.
        rows: The rows that make its queries and keys.
    """

    layer: str
    heads: int
    rows: tuple[HeadRows, ...]


@dataclass(frozen=True, slots=True)
class HeadRun:
    """A run of one rank's partition that is multiplied by one factor.

    Attributes:
        layer: Number of the layer.
        first: First query head whose largest logit decides.
        stop: First query head after those.
        role: What the rows make.
        partition: Index of the flat partition.
        offset: Where the run starts in it.
        numel: Its length.
    """

    layer: int
    first: int
    stop: int
    role: HeadRole
    partition: int
    offset: int
    numel: int


def head_runs(
    layers: Sequence[AttentionHeads],
    parameters: Mapping[str, tuple[int, Sequence[Fragment]]],
    *,
    rank: int,
) -> tuple[HeadRun, ...]:
    """Return every run of this rank's partitions that belongs to a head.

    Args:
        layers: The attention layers.
        parameters: Name of each parameter to its partition and the fragments of all ranks.
        rank: This rank.
    """
    runs = []
    for number, layer in enumerate(layers):
        for block in layer.rows:
            if block.parameter not in parameters:
                continue
            partition, fragments = parameters[block.parameter]
            group = layer.heads // block.heads
            for head in range(block.heads):
                begin = (block.start + head * block.stride) * block.row_numel
                end = begin + block.rows * block.row_numel
                for fragment in fragments:
                    low = max(begin, fragment.matrix_offset)
                    high = min(end, fragment.matrix_offset + fragment.numel)
                    if fragment.rank == rank and low < high:
                        offset = fragment.partition_offset + low - fragment.matrix_offset
                        heads = (head * group, (head + 1) * group)
                        runs.append(HeadRun(number, *heads, block.role, partition, offset, high - low))
    return tuple(runs)
