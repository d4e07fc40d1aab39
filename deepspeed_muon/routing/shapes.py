"""Divides a weight into blocks: the projections inside a fused one, and attention heads.

The output of a layer is the first dimension of its weight, or the last if the weight is stored as input x output
(Hugging Face's ``Conv1D``, the stacked experts of gpt-oss and Llama 4). ``split`` divides the output into the parts of
a fused projection (query, key and value), ``heads`` divides each part again, and every block is orthogonalised and
scaled separately. The input is never divided: an output projection, whose heads are along its input, is one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor, nn

from deepspeed_muon.errors import RoutingError
from deepspeed_muon.plan.layout import TensorShards

SplitRule = str | Sequence[int]
"""Sizes of the parts, or the word ``qkv`` or ``gate_up``."""

# By the last component of a projection's name, the attribute of AttentionShape with its heads. q_b_proj and kv_b_proj
# are the up-projections of multi-head latent attention.
_PROJECTIONS = {
    **dict.fromkeys(("q_proj", "query", "wq", "q", "q_b_proj"), "query"),
    **dict.fromkeys(("k_proj", "key", "wk", "k"), "key"),
    **dict.fromkeys(("v_proj", "value", "wv", "v"), "value"),
    "kv_b_proj": "latent",
}
_FUSED_NAMES = frozenset(
    {"qkv_proj", "qkv", "wqkv", "c_attn", "query_key_value", "in_proj_weight", "in_proj_qkv"}
)

# Projections that are stored head by head: query, key and value of the first head, then of the second, so that the rows
# of the query are not contiguous.
_INTERLEAVED_NAMES = frozenset({"query_key_value", "in_proj_qkvz"})
_INTERLEAVED_MODELS = frozenset({"gpt_bigcode"})

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
_WIDTHS = ("hidden_size", "n_embd", "d_model")


Heads = tuple[tuple[int, int], ...]
"""Possible ``(number of heads, outputs of a head)`` of a projection; the size of its output decides between them."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of an attention module, from a Hugging Face style configuration or the module itself.

    Attributes:
        query: Query heads: those of multi-head latent attention, then those of ordinary attention.
        key: Key heads; fewer than query heads with grouped queries.
        value: Value heads; only in linear attention other ones than key heads.
        latent: Heads of the joint key and value projection of multi-head latent attention.
        model_type: The configuration's ``model_type``.
    """

    query: Heads
    key: Heads
    value: Heads
    latent: Heads = ()
    model_type: str = ""

    @classmethod
    def from_linear_attention(cls, module: nn.Module) -> AttentionShape | None:
        """Read the heads of a linear attention layer (gated delta rule); ``None`` for any other module.

        The heads of such a layer are not those of the configuration.
        """
        keys, width = (_first(module, (name,)) for name in ("num_k_heads", "head_k_dim"))
        if keys is None or width is None:
            return None
        values = _first(module, ("num_v_heads",)) or keys, _first(module, ("head_v_dim",)) or width
        return cls(((keys, width),), ((keys, width),), (values,))

    @classmethod
    def from_config(cls, config: object) -> AttentionShape | None:
        """Read a configuration; ``None`` if it gives no number of attention heads."""
        heads = _first(config, _HEADS)
        if heads is None:
            return None
        key_value_heads = _first(config, _KEY_VALUE_HEADS) or heads  # fewer with grouped queries
        width, head_dim = _first(config, _WIDTHS), _first(config, ("head_dim", "d_kv"))
        if head_dim is None and width is not None and width % heads == 0:
            head_dim = width // heads
        # Multi-head latent attention (DeepSeek-V3: nope 128, rope 64, value 128): a head of q_b_proj has nope + rope
        # outputs, one of kv_b_proj nope + value, since the rotary dimensions of the key are shared by all heads.
        nope, rope, value = (_first(config, (f"{name}_head_dim",)) for name in ("qk_nope", "qk_rope", "v"))
        ordinary = ((heads, head_dim),) if head_dim else ()
        grouped = ((key_value_heads, head_dim),) if head_dim else ()
        return cls(
            (((heads, nope + rope),) if nope and rope else ()) + ordinary,
            grouped,
            grouped,
            ((heads, nope + value),) if nope and value else (),
            str(getattr(config, "model_type", "") or ""),
        )

    @property
    def _fused(self) -> Heads:
        """The heads of query, key and value in a fused projection; empty if their size is unknown."""
        # The last entry is ordinary attention: latent attention, which comes first, has no fused projection.
        return self.query[-1:] + self.key[-1:] + self.value[-1:] if self.key else ()

    def qkv_sizes(self) -> tuple[int, ...]:
        """Return the sizes of query, key and value in a fused projection; empty if they are unknown."""
        return tuple(count * width for count, width in self._fused)

    def heads_of(self, leaf: str, output: int) -> int | None:
        """Return the number of heads of the projection ``leaf``; ``None`` if its name or its output fits no heads."""
        return next((count for count, width in self._possible_heads(leaf) if count * width == output), None)

    def heads_by_projection(self, leaf: str, sizes: Sequence[int]) -> Sequence[int]:
        """Return the number of heads of each part of the projection ``leaf``, given their sizes; 1 where unknown."""
        if len(sizes) == 1:
            return (self.heads_of(leaf, sizes[0]) or 1,)
        # In a split into other sizes than those of query, key and value, the parts have no known meaning.
        if leaf in _FUSED_NAMES and tuple(sizes) == self.qkv_sizes():
            return [count for count, _ in self._fused]
        return (1,) * len(sizes)

    def why_undivided(self, leaf: str, output: int) -> str | None:
        """Return why a projection that is named like one with heads is one block; ``None`` for any other projection."""
        possible = self._possible_heads(leaf)
        if not possible or self.heads_of(leaf, output):
            return None
        count, width = possible[-1]
        return f"whole: {count} heads of {width} are not its {output} outputs"

    def _possible_heads(self, leaf: str) -> Heads:
        heads: Heads = getattr(self, _PROJECTIONS[leaf]) if leaf in _PROJECTIONS else ()
        return heads


def _first(config: object, names: Sequence[str]) -> int | None:
    """Return the first of the named entries that is a positive integer."""
    values = (_read(config, name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _read(config: object, name: str) -> object:
    """Return an entry of a configuration; ``None`` if it has none, or one that differs between layers (Gemma 4)."""
    try:
        return getattr(config, name, None)
    except Exception:  # a property of the configuration may raise anything
        return None


def leaf_name(name: str) -> str:
    """Return the component before ``weight`` or ``bias`` in lower case: ``q_proj`` for ``layers.0.q_proj.weight``."""
    path, _, last = name.lower().rpartition(".")
    return path.rpartition(".")[2] if path and last in ("weight", "bias") else last


def true_shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter before ZeRO 3 partitioned it, if it did."""
    return tuple(getattr(param, "ds_shape", param.shape))


def attention_shape(module: nn.Module) -> AttentionShape | None:
    """Return the attention heads that the attributes of a linear attention layer or the ``config`` of a module give."""
    shape = AttentionShape.from_linear_attention(module)
    config = getattr(module, "config", None)
    if shape is None and config is not None and not isinstance(config, (str, int, float)):
        # A multimodal configuration has the heads of its language model one level below.
        text_config = getattr(config, "text_config", None)
        shape = AttentionShape.from_config(config) or AttentionShape.from_config(text_config)
    return shape


def split_output(
    rule: SplitRule, *, name: str, output: int, attention: AttentionShape | None, interleaved: bool
) -> tuple[int, ...]:
    """Return the sizes of the parts of a fused projection.

    Args:
        rule: The value of ``split`` in ``optimizer.params.matrices`` for this parameter.
        name: The parameter's name.
        output: Outputs of the layer.
        attention: The heads of the attention module around it, for ``qkv``.
        interleaved: Whether the outputs of the parts alternate (gate 0, up 0, gate 1, ...).

    Raises:
        RoutingError: If the outputs of a part are not contiguous, or the parts do not add up to the output.
    """
    where = f"optimizer.params.matrices: {name} has {output} outputs"
    if interleaved:
        raise RoutingError(
            f"{where} in which its parts are interleaved, so that no part is contiguous; leave it whole"
        )
    sizes = _named_sizes(rule, where, name, output, attention) if isinstance(rule, str) else tuple(rule)
    if sum(sizes) != output or min(sizes, default=0) < 1:
        raise RoutingError(f"{where}, which split {rule!r} does not divide (it gives {list(sizes)})")
    return sizes


def _named_sizes(
    word: str, where: str, name: str, output: int, attention: AttentionShape | None
) -> tuple[int, ...]:
    if word == "gate_up":
        return (output // 2, output - output // 2) if output % 2 == 0 else ()
    leaf = leaf_name(name)
    if leaf in _INTERLEAVED_NAMES or (attention and attention.model_type in _INTERLEAVED_MODELS):
        raise RoutingError(
            f"{where} and a layer of that name is often stored head by head, where query, key and value are not "
            f"contiguous; if they are contiguous in this model, write their sizes instead of 'qkv'"
        )
    sizes = attention.qkv_sizes() if attention is not None else ()
    if not sizes:
        raise RoutingError(
            f"{where} and 'qkv' needs a model whose config has num_attention_heads and head_dim or hidden_size; write "
            f"the sizes of query, key and value instead"
        )
    return sizes


def check_heads(sizes: Sequence[int], heads: int | Sequence[int], *, name: str) -> tuple[int, ...]:
    """Return the number of heads of each part, 1 for a part that is one block.

    Args:
        sizes: Sizes of the parts of the output; one for a layer that is not split.
        heads: The number of heads of each part, or of the only part.
        name: The parameter's name.

    Raises:
        RoutingError: If the size of a part is not divisible by its number of heads.
    """
    counts = (heads,) if isinstance(heads, int) else tuple(heads)
    if len(counts) != len(sizes):
        raise RoutingError(
            f"optimizer.params.matrices: {name} has {len(sizes)} parts and heads {list(counts)} has {len(counts)} "
            f"numbers; write one for each part, 1 for a part that stays whole"
        )
    for size, count in zip(sizes, counts, strict=True):
        if size % count:
            raise RoutingError(
                f"optimizer.params.matrices: {name} has {size} outputs, not divisible by {count} heads"
            )
    return counts


def shard_blocks(
    blocks: Sequence[int], shards: TensorShards, *, name: str, fused: bool, transposed: bool
) -> tuple[tuple[int, ...], TensorShards]:
    """Return the blocks in one rank's tensor-parallel shard of a layer, and the shards with which blocks are complete.

    A head that is entirely on a rank is a block of that rank. A block of which every rank has a slice remains sharded.

    Args:
        blocks: Sizes of the blocks along the output of the unsharded layer; one for a layer that is not divided.
        shards: How tensor parallelism cuts the layer.
        name: The parameter's name.
        fused: Whether the blocks belong to several parts of a fused projection.
        transposed: Whether the weight is stored as input x output.

    Raises:
        RoutingError: If it is unknown which rows of a fused projection a rank has, or the ranks have different blocks.
    """
    # The output is dimension 0, or 1 of a weight that is stored as input x output: int(transposed).
    if len(blocks) == 1:
        # Sharded along the output, this rank has some rows of the block.
        if shards.dim == int(transposed):
            return shards.sizes[:1], shards
        return tuple(blocks), shards
    where = (
        f"{name} has blocks of {_shown(blocks)} outputs and is cut over {len(shards.sizes)} tensor-parallel"
    )
    remedy = "leave it whole (without 'split' and 'heads' it is one matrix), or exclude it"
    if shards.dim != int(transposed):
        # Sharded along the input: every rank has some inputs of every block.
        local: tuple[tuple[int, ...], tuple[bool, ...]] | None = tuple(blocks), (False,) * len(blocks)
    elif fused and not shards.fused:
        raise RoutingError(
            f"{where} ranks, and nothing says which rows a rank has: whether each of its parts is cut or all rows "
            f"together. Set partition_stride on the parameter as Megatron does (1: rows one after the other; the "
            f"number of parts if they are equal and each is cut), or partition_sizes: the size of each part that is "
            f"cut; or {remedy}"
        )
    else:
        # Sharded along the output. Of 8 query heads, 4 ranks have 2 complete ones each. Of the single key head of
        # multi-query attention each has a quarter: that block remains sharded, and one of the ranks gathers it.
        local = blocks_of_shard(blocks, shards)
    if local is None:
        raise RoutingError(
            f"{where} ranks in parts of {_shown(shards.fused or (sum(shards.sizes),))}, so that the ranks hold "
            f"different blocks. Use a number of ranks that divides the heads of each part; or {remedy}"
        )
    local_blocks, complete = local
    if transposed and not all(complete):
        raise RoutingError(
            f"{where} ranks inside a block; a weight stored as input x output is only cut between blocks. You can "
            f"{remedy}"
        )
    return local_blocks, replace(shards, complete=complete)


def blocks_of_shard(
    blocks: Sequence[int], shards: TensorShards
) -> tuple[tuple[int, ...], tuple[bool, ...]] | None:
    """Return the lengths of a shard's blocks, and whether each of them is complete.

    ``blocks`` are the lengths of the full matrix's blocks along its sharded dimension. ``None`` if the ranks' shards do
    not have equal blocks, so that they cannot be orthogonalised in the same way.
    """
    fused, ranks = shards.fused or (sum(shards.sizes),), len(shards.sizes)
    # 1. each fused matrix must be sharded evenly
    if any(length % ranks for length in fused):
        return None
    # 2. the blocks on each rank, and whether those at one position are complete on all ranks
    blocks_of = [_blocks_on(rank, ranks, fused, blocks) for rank in range(ranks)]
    lengths = tuple(length for _, length in blocks_of[0])
    complete = []
    for same_position in zip(*blocks_of, strict=False):
        numbers = {number for number, _ in same_position}
        complete.append(all(length == blocks[number] for number, length in same_position))
        if not complete[-1] and len(numbers) > 1:  # shards of different blocks: no iteration has both
            return None
    # 3. equal lengths everywhere, and no block of which a rank has two shards (one in each of two fused matrices)
    cut = [number for (number, _), full in zip(blocks_of[0], complete, strict=False) if not full]
    are_equal = all(tuple(length for _, length in pairs) == lengths for pairs in blocks_of)
    return (lengths, tuple(complete)) if are_equal and len(set(cut)) == len(cut) else None


def _blocks_on(rank: int, ranks: int, fused: Sequence[int], blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Return number and length of the blocks, or shards of blocks, of one rank if all of ``fused`` are sharded."""
    # Example: query, key and value of 8, 4 and 4 rows on two ranks, in blocks of 4 (two query heads, one key head, one
    # value head). Rank 1 has rows 4 to 7, 10 and 11, 14 and 15: block 1 complete, 2 rows of block 2 and 2 rows of block
    # 3.
    local: list[tuple[int, int]] = []
    ends = list(accumulate(blocks))
    for first, length in zip(accumulate(fused, initial=0), fused, strict=False):
        shard = length // ranks
        start, stop = first + rank * shard, first + (rank + 1) * shard
        for number, end in enumerate(ends):
            # rows that the shard [start, stop) has of the block [end - blocks[number], end)
            overlap = min(stop, end) - max(start, end - blocks[number])
            # A block that reaches over two fused matrices is one block of the shard.
            if overlap > 0 and local and local[-1][0] == number:
                local[-1] = number, local[-1][1] + overlap
            elif overlap > 0:
                local.append((number, overlap))
    return local


def _shown(sizes: Sequence[int]) -> str:
    return (
        " + ".join(map(str, sizes)) if len(sizes) < 9 else f"{len(sizes)} sizes ({sizes[0]}, {sizes[1]}, ...)"
    )
