"""What is known about one parameter before its route is decided: the layer that holds it, and what speaks for AdamW."""

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
    """What the module that holds a parameter says about it.

    Attributes:
        kind: The kind of layer, by the type of the module.
        transposed: Whether the weight is stored as input x output; ``None`` if nothing says so.
        interleaved: Whether the outputs of the parts of a fused projection alternate.
        stack: The number of experts whose matrices a 2-dimensional weight holds one below the other; 0 for any other.
        product: What says that a weight of the kind ``weight`` or ``bare`` multiplies activations, in words; empty if
            nothing does.
    """

    kind: LayerKind
    transposed: bool | None = None
    interleaved: bool = False
    stack: int = 0
    product: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A rule that applies to a parameter.

    Attributes:
        rule: The rule. ``hidden`` claims the parameter for Muon, every other one for AdamW.
        reason: On what it rests, in words.
        certain: Whether it rests on more than a guess; see :class:`~deepspeed_muon.routing.route.Route`.
    """

    rule: Rule
    reason: str
    certain: bool = True


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """One parameter as the model sees it.

    Attributes:
        names: Every dotted name under which the model reaches it; empty if unknown.
        param: The parameter itself.
        layer: What its module says; ``None`` if the module is not known.
        claims: The rules that its place in the model makes apply; meaningful with ``layer`` only.
        attention: The heads of the attention module around it, if a configuration names them.
        shards: How tensor parallelism cuts it; ``None`` if it does not, or nothing says how.
        as_trained: Whether it is routed as if it were trained, although it is frozen.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    layer: Layer | None = None
    claims: tuple[Claim, ...] = ()
    attention: AttentionShape | None = None
    shards: TensorShards | None = None
    as_trained: bool = False

    @property
    def is_frozen(self) -> bool:
        """Whether it is routed as a frozen parameter."""
        return not (self.param.requires_grad or self.as_trained)

    @property
    def name(self) -> str:
        """The first name, or the shape if the parameter has no name."""
        return self.names[0] if self.names else f"<unnamed {'x'.join(map(str, true_shape(self.param)))}>"

    @property
    def kind(self) -> LayerKind | None:
        """The kind of layer that holds it; ``None`` if the module is not known."""
        return None if self.layer is None else self.layer.kind

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the layer's weight, also if this rank has a shard of it."""
        shape = list(true_shape(self.param))
        if self.shards is not None and self.shards.dim is not None:
            shape[self.shards.dim] = sum(self.shards.sizes)
        return tuple(shape)

    @property
    def sides(self) -> tuple[int, int]:
        """Outputs and inputs of the layer, for a weight with two or more dimensions."""
        rows, cols, *_ = self.whole_shape
        turned = self.layer is not None and (self.layer.transposed or self.kind == "transposed convolution")
        return (cols, rows) if turned else (rows, cols)
