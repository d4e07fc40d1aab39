"""What the layers of a tensor-parallel model say of how their parameters are cut.

There are two conventions. AutoTP (``tensor_parallel.autotp_size``) replaces linear layers and describes their weights
in an attribute. Megatron-style models set ``tensor_model_parallel``
and ``partition_dim`` on parameters and hand DeepSpeed an ``mpu`` object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Cut", "is_copy", "is_marked", "read_cut"]

_META = "ds_autotp_universal_checkpoint_meta"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut over the tensor-parallel ranks.

    Attributes:
        dim: The dimension that is cut, as the layer says it.
        shape: Of the whole tensor, from AutoTP's record; empty without one.
        widths: For each fused part the shares of all ranks, if the record has them.
        parts: Length along ``dim`` of each part that is cut over all ranks, or their number if they are equal; ``None``
            if the layer does not say. Only without a record.
        is_legible: Whether the record tells which elements a rank has.
    """

    dim: int
    shape: tuple[int, ...] = ()
    widths: tuple[tuple[int, ...], ...] = ()
    parts: int | tuple[int, ...] | None = None
    is_legible: bool = True

    def shares(self, sizes: Sequence[int]) -> list[list[int]]:
        """Return, for each fused part, the lengths of the shares that the ranks have of it.

        Args:
            sizes: The lengths of the ranks' shards along :attr:`dim`.

        Raises:
            ValueError: If nobody says it, or the parts do not divide.
        """
        if not self.is_legible:
            raise ValueError("AutoTP cuts it in a way that is not read here")
        if self.widths:
            return [list(each) for each in self.widths]
        parts = self.parts or 1
        if parts == 1:
            return [list(sizes)]
        if isinstance(parts, int):
            parts = (sum(sizes) // parts,) * parts
        ranks = len(sizes)
        if len(set(sizes)) > 1 or sum(parts) != sum(sizes) or any(part % ranks for part in parts):
            raise ValueError(
                f"its fused parts {list(parts)} are not divided equally over shards of {list(sizes)}"
            )
        return [[part // ranks] * ranks for part in parts]


def is_marked(param: Tensor) -> bool:
    """Return whether a parameter is marked as a shard, as both conventions do."""
    return bool(getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False))


def is_copy(param: Tensor) -> bool:
    """Return whether every rank has the whole parameter, as far as it is marked."""
    meta = getattr(param, _META, None) or {}
    return bool(meta.get("replicated")) or not (meta or is_marked(param))


def read_cut(param: Tensor) -> Cut | str:
    """Return what is said of how a shard was cut, or why that is too little."""
    meta = getattr(param, _META, None)
    if meta:
        return _recorded(meta)
    dim = getattr(param, "partition_dim", None)
    if dim is None:
        return "it is marked as a shard without the dimension that is cut (partition_dim)"
    own = getattr(param, "partition_sizes", getattr(param, "partition_stride", None))
    return Cut(dim, parts=tuple(own) if isinstance(own, (tuple, list)) else own)


def _recorded(meta: Mapping[str, Any]) -> Cut | str:
    """Return what AutoTP has recorded; its dimensions are those of a shape that may have more than two."""
    conversion = meta.get("conversion") or {}
    shape, dim = meta.get("logical_shape"), meta.get("partition_dim")
    if conversion.get("unsupported_reason") or not shape or dim is None:
        return conversion.get("unsupported_reason") or "AutoTP does not say how it was cut"
    widths = tuple(tuple(map(int, each)) for each in meta.get("sub_param_shard_widths") or ())
    legible = bool(widths) or "affine_map" not in conversion or bool(meta.get("partition_sizes"))
    return Cut(dim, tuple(map(int, shape)), widths, is_legible=legible)
