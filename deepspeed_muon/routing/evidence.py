"""The evidence about one parameter before its route is decided: its names, its layer and the claims of the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from deepspeed_muon.plan.layout import TensorShards
from deepspeed_muon.routing.route import Rule
from deepspeed_muon.routing.shapes import AttentionShape, true_shape

LayerKind = Literal[
    "linear",
    "convolution",
    "grouped convolution",
    "transposed convolution",
    "embedding",
    "norm",
    "experts",
    "LoRA of experts",  # peft's target_parameters: the matrices of all experts alternate in one tensor
    "weight",  # the parameter "weight" of a module whose type says nothing
    "bare",  # any other parameter of such a module
]


@dataclass(frozen=True, slots=True)
class Layer:
    """What the module of a parameter implies about it.

    Attributes:
        kind: The kind of layer, by the type of the module.
        transposed: Whether the weight is stored as input x output; ``None`` if unknown.
        interleaved: Whether the outputs of a fused projection alternate (gate 0, up 0, gate 1, ...).
        stack: The number of experts whose matrices are concatenated along the rows of a 2-dimensional weight; 0 for
            any other weight.
        product: Evidence, in words, that a weight of the kind ``weight`` or ``bare`` multiplies activations; empty if
            there is none.
        is_biased: Whether a bias stands beside it; a layer before a norm has none.
    """

    kind: LayerKind
    transposed: bool | None = None
    interleaved: bool = False
    stack: int = 0
    product: str = ""
    is_biased: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A rule that applies to a parameter.

    Attributes:
        rule: The rule. ``hidden`` claims the parameter for Muon, every other rule for AdamW.
        reason: The evidence for it, in words.
        certain: Whether the evidence is more than a guess; see :class:`~deepspeed_muon.routing.route.Route`.
    """

    rule: Rule
    reason: str
    certain: bool = True


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """One parameter with its names, its layer and the claims on it.

    Attributes:
        names: Every dotted name that it has in the model; empty if unknown.
        param: The parameter itself.
        layer: What its module implies; ``None`` if the module is unknown.
        claims: The rules that apply by its module and its position in the model; meaningful with ``layer`` only.
        attention: The heads of the attention module around it, if a configuration gives them.
        shards: How tensor parallelism cuts it; ``None`` if it does not, or if that is unknown.
        awaits_shards: Whether it is marked as a shard, and no engine has said yet how it is cut.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    layer: Layer | None = None
    claims: tuple[Claim, ...] = ()
    attention: AttentionShape | None = None
    shards: TensorShards | None = None
    awaits_shards: bool = False

    @property
    def name(self) -> str:
        """The first name, or the shape if the parameter has no name."""
        return self.names[0] if self.names else f"<unnamed {'x'.join(map(str, true_shape(self.param)))}>"

    @property
    def key(self) -> int:
        """``id`` of the parameter."""
        return id(self.param)

    @property
    def is_layer(self) -> bool:
        """Whether its module multiplies activations by it, for a matrix; by attributes or a bias for a bare one."""
        is_bare = self.layer is not None and self.layer.kind == "bare" and not self.layer.product
        return self.kind not in ("embedding", "norm") and not is_bare

    @property
    def kind(self) -> LayerKind | None:
        """The kind of its layer; ``None`` if the module is unknown."""
        return None if self.layer is None else self.layer.kind

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the unsharded weight, also if this rank has a tensor-parallel shard of it."""
        shape = list(true_shape(self.param))
        if self.shards is not None and self.shards.dim is not None:
            shape[self.shards.dim] = sum(self.shards.sizes)
        return tuple(shape)

    @property
    def sides(self) -> tuple[int, int]:
        """Outputs and inputs of the layer, for a weight with two or more dimensions."""
        rows, cols, *_ = self.full_shape
        transposed = self.layer is not None and (
            self.layer.transposed or self.kind == "transposed convolution"
        )
        return (cols, rows) if transposed else (rows, cols)
