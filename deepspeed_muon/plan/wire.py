"""How much room the elements of a fragment take in a communication buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from deepspeed_muon.plan.placement import Ints

_Numel = TypeVar("_Numel", int, Ints)
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class WireFormat:
    """Elements as they are, or in one byte each with a scale for every block of elements.

    Attributes:
        block: Elements of a fragment that share an fp32 scale; 0 for elements as they are.
    """

    block: int = 0

    def units(self, numel: _Numel) -> _Numel:
        """Return the room for a fragment of ``numel`` elements: elements of the buffer, which are bytes if coded.

        Scales follow the elements, at a multiple of four bytes.
        """
        if not self.block:
            return numel
        return -(-numel // _SCALE_BYTES) * _SCALE_BYTES + -(-numel // self.block) * _SCALE_BYTES

    def bytes_per_element(self, itemsize: int) -> float:
        """Return the bytes that an element takes in a long fragment; ``itemsize`` is that of elements as they are."""
        return 1 + _SCALE_BYTES / self.block if self.block else itemsize


PLAIN = WireFormat()
"""Elements as they are."""

CODED = WireFormat(256)
"""One byte an element, and a scale for each 256."""
