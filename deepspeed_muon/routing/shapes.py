"""How a weight divides into blocks: parts of fused projections, attention heads.

The output of a layer is the first dimension of its weight, or the last if the weight is stored as input x output
(Hugging Face's ``Conv1D``, the stacked experts of gpt-oss and Llama 4). ``split`` cuts the output into the parts of
a fused projection, ``heads`` cut each part again, and every block has its own scale. The input is never cut: an
output projection, whose heads lie on its input, stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from deepspeed_muon.errors import RoutingError
from deepspeed_muon.plan.layout import TensorShards

SplitRule = str | Sequence[int] | Sequence[float]
"""Sizes of the parts, fractions of the output, or the word ``qkv`` or ``gate_up``."""


# Whose heads the output of a projection is a run of, by the last component of its name. q_b_proj and kv_b_proj are the
# up-projections of multi-head latent attention.
_PROJECTIONS = {
    **dict.fromkeys(("q_proj", "query", "wq", "q", "q_b_proj"), "query"),
    **dict.fromkeys(("k_proj", "key", "wk", "k"), "key"),
    **dict.fromkeys(("v_proj", "value", "wv", "v"), "value"),
    "kv_b_proj": "latent",
}
_FUSED_NAMES = frozenset(
    {"qkv_proj", "qkv", "wqkv", "c_attn", "query_key_value", "in_proj_weight", "in_proj_qkv"}
)

# Projections that are stored head by head: q, k, v of the first head, then of the second. The rows of the query do not
# follow each other.
_INTERLEAVED_NAMES = frozenset({"query_key_value", "in_proj_qkvz"})
_INTERLEAVED_MODELS = frozenset({"gpt_bigcode"})

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
_WIDTHS = ("hidden_size", "n_embd", "d_model")


Heads = tuple[tuple[int, int], ...]
"""Numbers of heads that a projection can have, each with the outputs of a head: its size decides between them."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of an attention module, from a Hugging Face style configuration or the module itself.

    Attributes:
        query: Of multi-head latent attention, then of the plain one.
        key: Fewer than query heads with grouped queries.
        value: They differ from the keys' in linear attention only.
        latent: Of the joint key and value projection of multi-head latent attention.
        model_type: The configuration's ``model_type``.
    """

    query: Heads
    key: Heads
    value: Heads
    latent: Heads = ()
    model_type: str = ""

    @classmethod
    def from_linear_attention(cls, module: nn.Module) -> AttentionShape | None:
        """Read a layer of linear attention (gated delta rule), whose heads are not those of the configuration.

        ``None`` for any other module.
        """
        keys, width = (_first(module, (name,)) for name in ("num_k_heads", "head_k_dim"))
        if keys is None or width is None:
            return None
        values = _first(module, ("num_v_heads",)) or keys, _first(module, ("head_v_dim",)) or width
        return cls(((keys, width),), ((keys, width),), (values,))

    @classmethod
    def from_config(cls, config: Any) -> AttentionShape | None:
        """Read a configuration object; ``None`` if it names no number of attention heads."""
        heads = _first(config, _HEADS)
        if heads is None:
            return None
        shared = _first(config, _KEY_VALUE_HEADS) or heads
        width, head_dim = _first(config, _WIDTHS), _first(config, ("head_dim", "d_kv"))
        if head_dim is None and width is not None and width % heads == 0:
            head_dim = width // heads
        nope, rope, value = (_first(config, (f"{name}_head_dim",)) for name in ("qk_nope", "qk_rope", "v"))
        plain = ((heads, head_dim),) if head_dim else ()
        grouped = ((shared, head_dim),) if head_dim else ()
        return cls(
            (((heads, nope + rope),) if nope and rope else ()) + plain,
            grouped,
            grouped,
            ((heads, nope + value),) if nope and value else (),
            str(getattr(config, "model_type", "") or ""),
        )

    @property
    def _fused(self) -> Heads:
        """The heads of query, key and value in a fused projection; empty if their size is not known."""
        return self.query[-1:] + self.key[-1:] + self.value[-1:] if self.key else ()

    def qkv_sizes(self) -> tuple[int, ...]:
        """Return the sizes of query, key and value in a fused projection; empty if they are not known."""
        return tuple(count * width for count, width in self._fused)

    def heads_of(self, leaf: str, output: int) -> int | None:
        """Return into how many heads the projection ``leaf`` divides; ``None`` if its outputs do not fit its name."""
        return next((count for count, width in self._claims(leaf) if count * width == output), None)

    def heads_of_parts(self, leaf: str, parts: Sequence[int]) -> Sequence[int]:
        """Return the number of heads in each part of the output of the projection ``leaf``, 1 where that is unknown."""
        if len(parts) == 1:
            return (self.heads_of(leaf, parts[0]) or 1,)
        if leaf in _FUSED_NAMES and tuple(parts) == self.qkv_sizes():
            return [count for count, _ in self._fused]
        return (1,) * len(parts)

    def doubt(self, leaf: str, output: int) -> str | None:
        """Return why a projection stays whole although its name claims heads; ``None`` for any other projection."""
        claims = self._claims(leaf)
        if not claims or self.heads_of(leaf, output):
            return None
        count, width = claims[-1]
        return f"whole: {count} heads of {width} are not its {output} outputs"

    def _claims(self, leaf: str) -> Heads:
        claims: Heads = getattr(self, _PROJECTIONS[leaf]) if leaf in _PROJECTIONS else ()
        return claims


def _first(config: Any, names: Sequence[str]) -> int | None:
    values = (_read(config, name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _read(config: Any, name: str) -> Any:
    """Return an entry of a configuration, ``None`` if it has none or it differs between the layers (Gemma 4)."""
    try:
        return getattr(config, name, None)
    except Exception:  # the configuration's own property may raise what it likes
        return None


def leaf_name(name: str) -> str:
    """Return the module that holds a parameter, in lower case: ``model.layers.0.q_proj.weight`` gives ``q_proj``."""
    parts = name.lower().split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] in ("weight", "bias") else parts[-1]


def true_shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape of the layer's weight, also if ZeRO 3 has replaced its data by a placeholder."""
    return tuple(getattr(param, "ds_shape", param.shape))


def attention_shapes(model: nn.Module) -> dict[str, AttentionShape | None]:
    """Return the attention heads that hold for each module, by its name: those that it or the closest above it names.

    Layers of linear attention name their own, others have a ``config``. A vision tower has another one than the
    language model beside it.
    """
    found: dict[str, AttentionShape | None] = {}
    for name, module in model.named_modules():  # those above come first
        own = AttentionShape.from_linear_attention(module)
        config = getattr(module, "config", None)
        if own is None and config is not None and not isinstance(config, (str, int, float)):
            text_config = getattr(config, "text_config", None)
            own = AttentionShape.from_config(config) or AttentionShape.from_config(text_config)
        found[name] = own or found.get(name.rpartition(".")[0])
    return found


def split_output(
    rule: SplitRule, *, name: str, output: int, attention: AttentionShape | None, interleaved: bool
) -> tuple[int, ...]:
    """Return the sizes of the parts of a fused projection.

    Args:
        rule: The value of ``split`` in ``optimizer.params.matrices`` for this parameter.
        name: The parameter's name.
        output: Outputs of the layer.
        attention: The heads of its model, for ``qkv``.
        interleaved: Whether the outputs of the parts alternate (gate 0, up 0, gate 1, ...).

    Raises:
        RoutingError: If the outputs of a part do not follow each other, or the parts do not add up to the output.
    """
    where = f"optimizer.params.matrices: {name} has {output} outputs"
    if interleaved:
        raise RoutingError(
            f"{where} in which its parts are interleaved, so that no part is contiguous; leave it whole"
        )
    if isinstance(rule, str):
        sizes = _named_sizes(rule, where, name, output, attention)
    elif all(isinstance(size, int) for size in rule):
        sizes = tuple(int(size) for size in rule)
    else:
        # A fraction is written with a few digits: 0.3333 stands for a third.
        sizes = tuple(round(size * output) for size in rule)
        if any(abs(size * output - whole) >= 0.5 for size, whole in zip(rule, sizes, strict=True)):
            sizes = ()
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


def cut_into_heads(parts: Sequence[int], heads: int | Sequence[int], *, name: str) -> tuple[int, ...]:
    """Return the number of heads in every part, 1 for a part that stays whole.

    Args:
        parts: Sizes of the parts of the output; one for a layer that is not split.
        heads: A number for every part, or one for the only part.
        name: The parameter's name.

    Raises:
        RoutingError: If a part does not divide into its heads.
    """
    counts = (heads,) if isinstance(heads, int) else tuple(heads)
    if len(counts) != len(parts):
        raise RoutingError(
            f"optimizer.params.matrices: {name} has {len(parts)} parts and heads {list(counts)} has {len(counts)} "
            f"numbers; write one for each part, 1 for a part that stays whole"
        )
    for size, count in zip(parts, counts, strict=True):
        if size % count:
            raise RoutingError(
                f"optimizer.params.matrices: {name} has {size} outputs, not divisible by {count} heads"
            )
    return counts


def share_of_blocks(
    blocks: Sequence[int], shards: TensorShards, *, name: str, fused: bool, transposed: bool
) -> tuple[tuple[int, ...], TensorShards]:
    """Return the blocks that one tensor-parallel rank has of a layer, and how they are cut.

    A head that lies whole on a rank is a block of that rank; a part that every rank has a share of stays cut.

    Args:
        blocks: Sizes of the blocks along the output of the whole layer; one for a layer that is not divided.
        shards: How the layer is cut.
        name: The parameter's name.
        fused: Whether the blocks belong to several parts of a fused projection.
        transposed: Whether the weight is stored as input x output.

    Raises:
        RoutingError: If nobody says where the parts of a fused projection lie, or the ranks would hold different
            blocks.
    """
    if len(blocks) == 1:
        if shards.dim == int(transposed):
            return shards.sizes[:1], shards
        return tuple(blocks), shards
    where = (
        f"{name} has blocks of {_shown(blocks)} outputs and is cut over {len(shards.sizes)} tensor-parallel"
    )
    remedy = "leave it whole (without 'split' and 'heads' it is one matrix), or exclude it"
    if shards.dim != int(transposed):
        # Every rank has some inputs of every block.
        share: tuple[tuple[int, ...], tuple[bool, ...]] | None = tuple(blocks), (False,) * len(blocks)
    elif fused and not shards.fused:
        raise RoutingError(
            f"{where} ranks, and nothing says which rows a rank has: whether each of its parts is cut or all rows "
            f"together. Set partition_stride on the parameter as Megatron does (1: rows one after the other; the "
            f"number of parts if they are equal and each is cut), or partition_sizes: the size of each part that is "
            f"cut; or {remedy}"
        )
    else:
        share = shards.blocks_of_shard(blocks)
    if share is None:
        raise RoutingError(
            f"{where} ranks in parts of {_shown(shards.fused or (sum(shards.sizes),))}, so that the ranks hold "
            f"different blocks. Use a number of ranks that divides the heads of each part; or {remedy}"
        )
    own, complete = share
    if transposed and not all(complete):
        raise RoutingError(
            f"{where} ranks inside a block; a weight stored as input x output is only cut between blocks. You can "
            f"{remedy}"
        )
    return own, replace(shards, complete=complete)


def _shown(sizes: Sequence[int]) -> str:
    return (
        " + ".join(map(str, sizes)) if len(sizes) < 9 else f"{len(sizes)} sizes ({sizes[0]}, {sizes[1]}, ...)"
    )
