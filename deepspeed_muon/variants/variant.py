"""What a variant of Muon declares: its state, its settings, and the functions that make it another optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BeforeIteration = Callable[[Tensor, "Sums"], Tensor]
"""``(directions, sums)`` to what is orthogonalised instead: a new tensor of that shape.

``directions`` is ``(batch, rows, cols)`` with a row for each output of the layer, in the communication dtype.
"""

Finish = Callable[
    [Tensor, Mapping[str, Tensor], Mapping[str, Tensor], "Sums"], tuple[Tensor, dict[str, Tensor]]
]
"""``(blocks, state, settings, sums)`` to the updates, of the shape of ``blocks``, and the new state; all new tensors.

``blocks`` is ``(batch, rows, cols)``: orthogonalised matrices with a row for each output of the layer. The state has
``(batch, rows)`` for each key, ``settings`` has ``(batch, 1)`` for each name.
"""

Combine = Callable[[tuple[Tensor, Tensor, Tensor], Tensor], tuple[Tensor, Tensor]]
"""``(products, rates)`` to two factors ``(a, b)``, one number for each block, all float64.

With the weights ``W`` of a block and its update ``X``, ``a * W + b * X`` becomes the weights. ``products`` are
``|W|^2``, ``<W, X>`` and ``|X|^2``, sums over whole blocks; ``rates`` are learning rate times scale. Nothing may wait
for the device.
"""

Reference = Callable[[Tensor, Tensor, dict[str, Tensor], "ReferenceRates"], Tensor]
"""``(weights, direction, state, rates)`` to the update of one block, all float64, with a row for each output.

The weights become ``decay(weights) - lr * update``, without the decay if the variant has ``apply``. ``state`` is empty
before the first step and is mutated. Only tests call it: written to be read, without anything of the fast path.
"""


@dataclass(frozen=True, slots=True)
class ReferenceRates:
    """What a :data:`Reference` needs besides.

    Attributes:
        orthogonalize: Returns the orthogonalised ``(rows, cols)`` of a direction.
        lr: Learning rate.
        scale: Factor of the scale rule.
        settings: Values of the variant's settings.
    """

    orthogonalize: Callable[[Tensor], Tensor]
    lr: float
    scale: float
    settings: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RowState:
    """An entry of the optimizer state with one number for each row: each output of a block.

    Attributes:
        key: The name in ``optimizer.state`` and in checkpoints.
        what: What it holds, in the plural, for messages.
        dtype: The dtype in which a rank keeps it; it is computed with in fp32.
        start: The value before the first step.
    """

    key: str
    what: str
    dtype: torch.dtype = torch.float32
    start: float = 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of ``optimizer.params`` that only this variant reads; a param group may have its own value.

    Attributes:
        name: The key.
        default: The default.
        limits: The allowed numbers, as a pydantic ``Field``.
        description: One sentence of Markdown for the docs.
    """

    name: str
    default: float
    limits: Any
    description: str


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of Muon.

    Attributes:
        name: The value of ``optimizer.params.variant``.
        reference: One step of one block, for tests.
        description: What it does, as Markdown for the docs; empty for Muon itself.
        state: What it keeps beside the momentum.
        settings: The keys that only this variant reads.
        before_iteration: Changes the directions that are orthogonalised; ``None`` if they are used as they are.
        finish: Turns orthogonalised blocks into updates; ``None`` if they are the updates.
        apply: Turns sums over the weights and updates of each block into how they are added; ``None`` for the rate, the
            scale rule and weight decay.
        relative_rate: Whether the rate is relative to the weights: neither scale rule nor weight decay counts.
        refuses: Keys that must keep their default, with the reason and what to do instead.
    """

    name: str
    reference: Reference
    description: str = ""
    state: tuple[RowState, ...] = ()
    settings: tuple[Setting, ...] = ()
    before_iteration: BeforeIteration | None = None
    finish: Finish | None = None
    apply: Combine | None = None
    relative_rate: bool = False
    refuses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sums:
    """Adds up over rows and matrices; it alone knows whether the rest of them lies on other ranks.

    Attributes:
        cols: Columns of the whole matrix if other ranks hold some of them, else 0.
        add_columns: Adds up what the ranks with other columns of the same rows have; ``None`` if there are none.
        add_rows: Adds up what the ranks with other rows have; ``None`` if there are none.
    """

    cols: int = 0
    add_columns: Callable[[Tensor], Tensor] | None = None
    add_rows: Callable[[Tensor], Tensor] | None = None

    def of_rows(self, part: Tensor) -> Tensor:
        """Return the sums of whole rows from the sums ``(batch, rows)`` of this rank's columns."""
        return part if self.add_columns is None else self.add_columns(part)

    def over_rows(self, values: Tensor) -> Tensor:
        """Return the sums ``(batch, n)`` over all rows of ``(batch, rows, n)``: numbers of this rank's whole rows."""
        part = values.sum(dim=-2)
        return part if self.add_rows is None else self.add_rows(part)
