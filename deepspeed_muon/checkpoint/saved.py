"""A tensor of a DeepSpeed checkpoint: which files hold which part of it, and under which keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from deepspeed_muon.checkpoint.index import Steps
from deepspeed_muon.checkpoint.layout_record import RecordedParameter
from deepspeed_muon.plan.rows import ROW_STATE_KEY

__all__ = ["SavedParameter", "SavedTensor"]


class SavedParameter(RecordedParameter):
    """One part of a tensor in a DeepSpeed checkpoint, each of its elements in one fragment only.

    Attributes:
        files: Numbers of the files of the ranks that hold it, in the order of their data-parallel group.
        step: Optimizer steps taken.
        saved_as: Key of our state to the key under which the file has it.
        whole_from: With DeepSpeed's Muon, by rank: where the momentum of the whole matrix starts in its buffer.
    """

    files: tuple[int, ...]
    step: Steps
    saved_as: dict[str, str]
    whole_from: dict[int, int] = Field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """Tensors of the parameter: ``fp32`` and its state."""
        return ("fp32", *self.saved_as)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A whole tensor of a DeepSpeed checkpoint, with the attributes of a parameter's record.

    Attributes:
        held: The parts of it that groups of ranks hold, each once.
    """

    held: tuple[SavedParameter, ...]

    def __getattr__(self, name: str) -> Any:
        """Return what all parts have in common: algorithm, keys, step, group, transposed."""
        return getattr(self.held[0], name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.held[0].part.shape

    @property
    def heads(self) -> int:
        """Blocks that were orthogonalised separately."""
        return (self.held[0].whole or self.held[0]).heads

    @property
    def grid(self) -> Any:
        """Their rows and columns where they are not equal blocks of rows."""
        return (self.held[0].whole or self.held[0]).grid

    @property
    def row_count(self) -> int:
        """How many row moments there are."""
        return self.shape_of(ROW_STATE_KEY)[0] if self.held[0].row_places else 0

    def shape_of(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole master or of an entry of the state."""
        return self.held[0].part_of(key).shape
