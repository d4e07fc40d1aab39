"""What a variant of Muon declares: its state, its settings, and the functions that make it another optimizer.

A variant is a file of this folder with a :class:`Variant`, an entry in :data:`deepspeed_muon.variants.VARIANTS`, and,
in :mod:`deepspeed_muon.reference`, with which the tests compare it, a branch of ``update_of`` and a field for each
setting. This one keeps one number for each row, and shrinks the rows that have become smaller than it::

    def row_factors(blocks, state, settings):  # blocks: (batch, rows, cols), orthogonalised
        norms = torch.linalg.vector_norm(blocks, dim=-1, dtype=torch.float32)  # (batch, rows)
        size = norms / blocks.shape[-1] ** 0.5
        peak = torch.maximum(settings["peak_decay"] * state, size)
        return size / peak.clamp(min=1e-8), peak

    VARIANT = Variant(
        "peaks",
        description="rows are scaled by their size over the largest that they had, which decays",
        state=RowState("row_peak", "row peaks"),
        settings=(Setting("peak_decay", 0.99, Field(ge=0, le=1), "Decay of the largest size of each row."),),
        row_factors=row_factors,
    )

The norm of an update must stay between that of one singular direction and that of a whole orthogonalised matrix: the
check of every result leaves out what does not (:func:`deepspeed_muon.monitoring.measure.norm_bounds`). Names of
settings and keys of state belong to one variant each. The keys of the configuration and checkpoints for any number of
ranks follow from the declaration; ``scripts/settings_table.py`` writes the settings into the docs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

BeforeIteration = Callable[[Tensor], Tensor]
"""``directions`` to the matrices that are orthogonalised instead, in a new tensor.

Both are ``(batch, rows, cols)`` with a row for each output of the layer, ``directions`` in the wire dtype.
"""

RowFactors = Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor, Tensor]]
"""``(blocks, state, settings)`` to the factor of each row, ``(batch, rows)``, and the new state; all new tensors.

The updates are the rows times their factors. ``blocks`` is ``(batch, rows, cols)``: orthogonalised matrices with a row
for each output of the layer. The state is ``(batch, rows)`` fp32, ``settings`` has ``(batch, 1)`` for each name.
"""


@dataclass(frozen=True, slots=True)
class RowState:
    """An entry of the optimizer state with one fp32 number for each row of each block, that is for each output.

    The numbers are 0 before the first step. ``key`` is the name in ``optimizer.state`` and in checkpoints, ``label``
    that in messages, in the plural.
    """

    key: str
    label: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of ``optimizer.params`` that only this variant reads; a param group may have its own value.

    ``limits`` is the allowed range, as a pydantic ``Field``, ``description`` one sentence of Markdown for the docs.
    """

    name: str
    default: float
    limits: Any
    description: str


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of Muon. With no function set it is Muon.

    Attributes:
        name: The value of ``optimizer.params.variant``.
        description: What it does, as Markdown for the docs; empty for Muon itself.
        state: The entry of the optimizer state beside the momentum.
        settings: The keys that only this variant reads.
        before_iteration: Changes the directions before they are orthogonalised.
        row_factors: Scales the rows of orthogonalised blocks, before scale rule, learning rate and decay apply.
    """

    name: str
    description: str = ""
    state: RowState | None = None
    settings: tuple[Setting, ...] = ()
    before_iteration: BeforeIteration | None = None
    row_factors: RowFactors | None = None

    def __post_init__(self) -> None:
        """Refuse state and settings that nothing would read, and factors without state."""
        if self.row_factors is None and (self.state is not None or self.settings):
            raise ValueError(
                f"variant {self.name}: only row_factors reads state and settings, and it has none"
            )
        if self.row_factors is not None and self.state is None:
            raise ValueError(f"variant {self.name}: row_factors needs state, a number for each row")

    @property
    def transpose_changes_update(self) -> bool:
        """Whether the transpose of a matrix has another update than the transpose of the update."""
        return self.before_iteration is not None or self.row_factors is not None
