"""How a weight divides into blocks: parts of fused projections, attention heads.

The output of a layer is the first dimension of its weight, or the last if the weight is stored as input x output
(Hugging Face's ``Conv1D``, the stacked experts of gpt-oss and Llama 4). ``split`` cuts the output into the parts of
a fused projection, ``heads`` cut each part again, and every block has its own scale. The input is never cut: an
output projection, whose heads lie on its input, stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from deepspeed_muon.errors import RoutingError
from deepspeed_muon.plan.layout import TensorShards

SplitRule = str | Sequence[int] | Sequence[float]
"""Sizes of the parts, fractions of the output, or the word ``qkv`` or ``gate_up``."""


# Modules whose output is a run of heads, by the last component of their name. q_b_proj and kv_b_proj are the
# up-projections of multi-head latent attention.
_QUERY_NAMES = frozenset({"q_proj", "query", "wq", "q", "q_b_proj"})
_KEY_NAMES = frozenset({"k_proj", "key", "wk", "k"})
_VALUE_NAMES = frozenset({"v_proj", "value", "wv", "v"})
_LATENT_NAMES = frozenset({"kv_b_proj"})
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


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of an attention module, from a Hugging Face style configuration or the module itself.

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Outputs of a head.
        linear_values: Heads of the values of linear attention, and outputs of each, which may differ from the keys'.
        latent_query: Outputs of a query head of multi-head latent attention.
        latent_kv: Outputs of a head of its joint key and value projection.
        model_type: The configuration's ``model_type``.
    """

    heads: int
    kv_heads: int
    head_dim: int | None = None
    latent_query: int | None = None
    latent_kv: int | None = None
    model_type: str = ""
    linear_values: tuple[int, int] | None = None

    @classmethod
    def from_linear_attention(cls, module: nn.Module) -> AttentionShape | None:
        """Read a layer of linear attention (gated delta rule), whose heads are not those of the configuration.

        ``None`` for any other module.
        """
        keys, width = (_first(module, (name,)) for name in ("num_k_heads", "head_k_dim"))
        if keys is None or width is None:
            return None
        values = _first(module, ("num_v_heads", "num_k_heads")), _first(module, ("head_v_dim", "head_k_dim"))
        return cls(keys, keys, width, linear_values=(values[0] or keys, values[1] or width))

    @classmethod
    def from_config(cls, config: Any) -> AttentionShape | None:
        """Read a configuration object; ``None`` if it names no number of attention heads."""
        heads = _first(config, _HEADS)
        if heads is None:
            return None
        width = _first(config, _WIDTHS)
        head_dim = _first(config, ("head_dim", "d_kv"))
        if head_dim is None and width is not None and width % heads == 0:
            head_dim = width // heads
        nope = _first(config, ("qk_nope_head_dim",))
        rope = _first(config, ("qk_rope_head_dim",))
        value = _first(config, ("v_head_dim",))
        return cls(
            heads,
            _first(config, _KEY_VALUE_HEADS) or heads,
            head_dim,
            None if nope is None or rope is None else nope + rope,
            None if nope is None or value is None else nope + value,
            str(getattr(config, "model_type", "") or ""),
        )

    def qkv_sizes(self) -> tuple[int, int, int] | None:
        """Return the sizes of query, key and value in a fused projection."""
        if self.head_dim is None:
            return None
        heads, width = self.values
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, heads * (width or 0)

    @property
    def values(self) -> tuple[int, int | None]:
        """The heads of the values, and the outputs of each."""
        return self.linear_values or (self.kv_heads, self.head_dim)

    def heads_of(self, leaf: str, output: int) -> int | None:
        """Return into how many heads the projection ``leaf`` divides; ``None`` if its outputs do not fit its name."""
        return next((count for count, width in self._claims(leaf) if count * width == output), None)

    def heads_of_parts(self, leaf: str, parts: Sequence[int]) -> Sequence[int]:
        """Return the number of heads in each part of the output of the projection ``leaf``, 1 where that is unknown."""
        if len(parts) == 1:
            return (self.heads_of(leaf, parts[0]) or 1,)
        if leaf in _FUSED_NAMES and tuple(parts) == self.qkv_sizes():
            return self.heads, self.kv_heads, self.values[0]
        return (1,) * len(parts)

    def doubt(self, leaf: str, output: int) -> str | None:
        """Return why a projection stays whole although its name claims heads; ``None`` for any other projection."""
        claims = self._claims(leaf)
        if not claims or self.heads_of(leaf, output):
            return None
        count, width = claims[-1]
        return f"whole: {count} heads of {width} are not its {output} outputs"

    def _claims(self, leaf: str) -> list[tuple[int, int]]:
        """Return the head counts and widths that a projection of this name can have."""
        claims: list[tuple[int, int | None]] = []
        if leaf in _QUERY_NAMES:
            claims = [(self.heads, self.latent_query), (self.heads, self.head_dim)]
        elif leaf in _KEY_NAMES:
            claims = [(self.kv_heads, self.head_dim)]
        elif leaf in _VALUE_NAMES:
            claims = [self.values]
        elif leaf in _LATENT_NAMES:
            claims = [(self.heads, self.latent_kv)]
        return [(count, width) for count, width in claims if width]


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


def attention_shapes(model: nn.Module) -> dict[str, AttentionShape]:
    """Return the attention heads that each module's own ``config`` names, by the module's name.

    Layers of linear attention name their own. A vision tower has another configuration than the language model beside
    it: see :func:`nearest_attention`.
    """
    found: dict[str, AttentionShape] = {}
    known: dict[int, AttentionShape | None] = {}
    for name, module in model.named_modules():
        linear = AttentionShape.from_linear_attention(module)
        if linear is not None:
            found[name] = linear
            continue
        config = getattr(module, "config", None)
        if config is None or isinstance(config, (str, int, float)):
            continue
        if id(config) not in known:
            inner = getattr(config, "text_config", None)
            known[id(config)] = AttentionShape.from_config(config) or AttentionShape.from_config(inner)
        shape = known[id(config)]
        if shape is not None:
            found[name] = shape
    return found


def nearest_attention(shapes: Mapping[str, AttentionShape], name: str) -> AttentionShape | None:
    """Return the entry of the closest module above the parameter ``name``."""
    if not shapes:
        return None
    path = name.split(".")[:-1]
    for length in range(len(path), -1, -1):
        shape = shapes.get(".".join(path[:length]))
        if shape is not None:
            return shape
    return None


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
    sizes = attention.qkv_sizes() if attention is not None else None
    if sizes is None:
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
    elif fused and not shards.parts:
        raise RoutingError(
            f"{where} ranks, and nothing says which rows a rank has: whether each of its parts is cut or all rows "
            f"together. Set partition_stride on the parameter as Megatron does (1: rows one after the other; the "
            f"number of parts if they are equal and each is cut), or partition_sizes: the size of each part that is "
            f"cut; or {remedy}"
        )
    else:
        share = shards.share_of(blocks)
    if share is None:
        raise RoutingError(
            f"{where} ranks in parts of {_shown(shards.parts or (sum(shards.sizes),))}, so that the ranks hold "
            f"different blocks. Use a number of ranks that divides the heads of each part; or {remedy}"
        )
    own, whole = share
    if transposed and not all(whole):
        raise RoutingError(
            f"{where} ranks inside a block; a weight stored as input x output is only cut between blocks. You can "
            f"{remedy}"
        )
    return own, replace(shards, whole=whole)


def _shown(sizes: Sequence[int]) -> str:
    return (
        " + ".join(map(str, sizes)) if len(sizes) < 9 else f"{len(sizes)} sizes ({sizes[0]}, {sizes[1]}, ...)"
    )
