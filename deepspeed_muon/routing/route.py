"""The route of one parameter: its algorithm, the reason, its blocks; and the table of all routes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deepspeed_muon.plan.layout import MatrixLayout, PartitionIndex, TensorShards
from deepspeed_muon.plan.owners import grid_blocks
from deepspeed_muon.plan.placement import Placement

Algorithm = Literal["muon", "adamw", "frozen"]
MatrixKind = Literal["matrix", "convolution", "experts"]
Rule = Literal[
    "frozen",  # requires_grad is False
    "group",  # the caller's param group
    "exclude",
    "include",
    "shape",  # not a matrix
    "no_product",  # a matrix that multiplies nothing
    "norm",
    "embedding",
    "input",  # the first layer behind images, latents or audio
    "head",
    "tied",  # between the stages of a pipeline
    "bias",  # of stacked experts
    "router",
    "adapter",  # of peft, except the matrices of LoRA that Muon updates
    "hidden",  # a matrix that no other rule claims: Muon's
    "unsure",  # the files of a checkpoint do not identify it
]


@dataclass(frozen=True, slots=True)
class Route:
    """Which algorithm updates one parameter, why, and how the parameter divides into matrices.

    Attributes:
        name: First dotted name.
        shape: Shape of the weight; under ZeRO 3 that of the full weight.
        algorithm: ``muon``, ``adamw`` or ``frozen``.
        reason: The rule that decided, in words.
        output_blocks: Sizes of the blocks along the layer's output (attention heads; query, key and value of a fused
            projection); empty for one block.
        kind: How a Muon parameter is read as a matrix; see :attr:`matrix_shape`.
        transposed: Whether the weight is stored as input x output, so that the output is its last dimension.
        per_head: Whether attention heads are among :attr:`output_blocks`.
        rule: The rule that decided, for the code.
        shards: How tensor parallelism cuts the layer; :attr:`shape` and :attr:`output_blocks` are then those of this
            rank's shard. ``None`` if it does not, or if that is unknown.
        certain: Whether a setting, the type or the shape of the weight, an accessor of the model or a documented name
            decides. ``False`` where the route rests on a guess; :attr:`reason` says on which.
        stack: The number of matrices that are concatenated along the rows of a 2-dimensional weight of the kind
            ``experts``; 0 for any other weight.
    """

    name: str
    shape: tuple[int, ...]
    algorithm: Algorithm
    reason: str
    output_blocks: tuple[int, ...] = ()
    kind: MatrixKind = "matrix"
    transposed: bool = False
    per_head: bool = False
    rule: Rule = "hidden"
    shards: TensorShards | None = None
    certain: bool = True
    stack: int = 0

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def experts(self) -> int:
        """The number of matrices that a weight of the kind ``experts`` stacks."""
        return self.stack or math.prod(self.shape[:-2])

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """Rows of each block of the stored matrix; empty for one block with all rows."""
        # A transposed weight has its outputs along the columns.
        blocks = () if self.transposed else self.output_blocks
        if self.kind == "experts":
            # The blocks of the first expert, then those of the second: (2, 8, 4) with outputs split into 6 and 2 is a
            # 16 x 4 matrix of the row blocks 6, 2, 6, 2.
            return (blocks or (self.matrix_shape[0] // self.experts,)) * self.experts
        return blocks

    @property
    def col_blocks(self) -> tuple[int, ...]:
        """Columns of each block of the stored matrix; empty for one block with all columns."""
        return self.output_blocks if self.transposed else ()

    def kinds_of_blocks(self) -> tuple[tuple[int, int, int], ...]:
        """Return ``(count, rows, columns)`` of the blocks of each shape."""
        rows, cols = self.matrix_shape
        return grid_blocks(self.row_blocks or (rows,), self.col_blocks or (cols,))

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the row-major matrix: ``out x (in * kernel)``, for stacks ``(experts * rows) x cols``."""
        if self.kind == "experts":
            return math.prod(self.shape[:-1]), self.shape[-1]
        return self.shape[0], math.prod(self.shape[1:])

    def layout(self, partition: PartitionIndex, placement: Placement) -> MatrixLayout:
        """Return the layout of a Muon parameter whose fragments in the flat partitions are those of ``placement``."""
        rows, cols = self.matrix_shape
        return MatrixLayout(
            self.name,
            rows,
            cols,
            partition,
            placement,
            row_blocks=self.row_blocks,
            col_blocks=self.col_blocks,
            transposed=self.transposed,
            tp_shards=self.shards,
        )


def format_routes(routes: Sequence[Route]) -> str:
    """Return the routing table as text, one line per parameter; guesses are marked."""
    width = max((len(route.name) for route in routes), default=0)
    return "\n".join(
        f"{route.algorithm:<6} {route.name:<{width}} {'x'.join(map(str, route.shape)) or 'scalar':<14} "
        f"{route.reason}{'' if route.certain else ' (guess)'}"
        for route in routes
    )


def summarize_routes(routes: Sequence[Route]) -> str:
    """Return in one line how many tensors and elements went to each algorithm, and how many routes are guesses."""
    totals = totals_of(routes)
    counts = [
        f"{name} {totals[algorithm]['tensors']} tensors ({totals[algorithm]['elements']:,} elements)"
        for algorithm, name in (("muon", "Muon for"), ("adamw", "AdamW for"), ("frozen", "frozen:"))
        if algorithm in totals
    ]
    guesses = sum(not route.certain for route in routes)
    return ", ".join(counts) + (
        f"; {guesses} of these routes {'rests' if guesses == 1 else 'rest'} on a guess" if guesses else ""
    )


def totals_of(routes: Sequence[Route]) -> dict[str, dict[str, int]]:
    """Return ``tensors`` and ``elements`` of each algorithm that updates at least one tensor."""
    totals: dict[str, dict[str, int]] = {}
    for route in routes:
        entry = totals.setdefault(route.algorithm, {"tensors": 0, "elements": 0})
        entry["tensors"] += 1
        entry["elements"] += route.numel
    return totals


def rows_of(routes: Sequence[Route], *, per_parameter: bool = False) -> list[dict[str, Any]]:
    """Return the rows of the routing table: one for equal parameters of all layers, or one ``per_parameter``.

    In the name of a row for several parameters the numbers of the layers are stars.
    """
    alike: dict[tuple[Any, ...], list[Route]] = {}
    for route in routes:
        # Layers that differ in their numbers alone share a row.
        starred = ".".join("*" if text.isdigit() else text for text in route.name.split("."))
        name = route.name if per_parameter else starred
        alike.setdefault((name, route.shape, route.algorithm, route.reason, route.certain), []).append(route)
    return [
        {
            "name": name if len(members) > 1 else members[0].name,  # a single parameter shows its number
            "shape": list(shape),
            "algorithm": algorithm,
            "reason": reason,
            "certain": certain,
            "tensors": len(members),
            "elements": sum(route.numel for route in members),
        }
        for (name, shape, algorithm, reason, certain), members in alike.items()
    ]
