"""The evidence about one parameter before its route is decided: its names, its layer and the claims on it.

:func:`read_layers` reads from the type of a module, from its attributes and from the biases beside weights what its
direct parameters are; :func:`router` finds the routers beside mixtures of experts.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from deepspeed_muon.plan.layout import TensorShards
from deepspeed_muon.routing.names import holder_path, match_name, parameter_name, plain_name
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
        is_biased: Whether there is a bias beside it; a layer before a norm has none.
    """

    kind: LayerKind
    transposed: bool | None = None
    interleaved: bool = False
    stack: int = 0
    product: str = ""
    is_biased: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A rule that applies to a parameter, and why.

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
        claims: The rules that apply by its module and its position in the model; without a ``layer`` those that apply
            by its names and shape take their place.
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
        """Whether its module multiplies activations by it; of a bare matrix, attributes or a bias say so."""
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


_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
# Class names of norms: LlamaRMSNorm, LayerNorm2d, MambaRMSNormGated, NemotronLayerNorm1P, but not LayerNormLinear.
_NORM_CLASS = re.compile(r".*norm(\d*[dp]|gated|layer|perhead)?", re.IGNORECASE)
# Attributes with the number of experts of a module that concatenates their matrices in a 2-dimensional weight: DBRX,
# megablocks.
_EXPERT_COUNTS = ("moe_num_experts", "num_experts", "num_local_experts", "n_routed_experts")
# In such modules the projection back to the model's width is stored as input x output.
_STACKED_DOWN = frozenset({"w2", "down_proj"})
# Modules of stacked experts that store (experts, in, out) without the attribute is_transposed: transformers' Llama 4.
_TRANSPOSED_EXPERTS = frozenset({"Llama4TextExperts"})


def read_layers(path: str, module: nn.Module) -> Iterator[tuple[nn.Parameter, Layer, tuple[Claim, ...]]]:
    """Yield the direct parameters of the module at ``path``, each with its layer and the claims on it."""
    parameters = list(direct_parameters(module))
    shapes = {name: true_shape(param) for name, param in parameters}
    for name, param in parameters:
        kind = _layer_kind(module, name)
        shape = true_shape(param)
        is_transposed = getattr(module, "is_transposed", type(module).__name__ in _TRANSPOSED_EXPERTS)
        # by type, True or unknown
        transposed = True if _is_conv1d(module) or (kind == "experts" and is_transposed) else None
        # transformers' experts with interleaved gate and up projections (gpt-oss)
        interleaved = getattr(module, "is_concatenated", True) is False
        stack, product = 0, ""
        claims: tuple[Claim, ...] = ()
        if len(shape) == 2 and kind in ("weight", "bare", "experts") and _in_experts(path):
            stack = _stacked_experts(module, shape)  # (experts * rows, cols)
            transposed = name in _STACKED_DOWN if stack else transposed
            product = f"{stack} experts in one matrix" if stack else ""
        elif len(shape) == 2 and kind in ("linear", "weight", "bare") and transposed is None:
            side, product = _output_side(module, name, shapes)
            transposed = None if side is None else side == 1
        elif len(shape) == 3 and kind in ("weight", "bare", "experts"):
            transposed = transposed or _side_of_bias(name, shapes) == 1
        if len(shape) > 1 and kind == "embedding":
            claims = (Claim("embedding", "weight of an embedding module"),)
        elif len(shape) > 1 and kind == "norm":
            claims = (Claim("norm", "gain of a norm"),)
        # a vector, or (1, outputs)
        is_biased = any(size[-1:] == (math.prod(size),) for size in shapes.values())
        yield param, Layer(kind, transposed, interleaved, stack, product, is_biased), claims


def direct_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the direct parameters of a module with the names that its own code uses.

    A parametrization (``torch.nn.utils.parametrizations``) and the older weight norm register them under new names.
    """
    if isinstance(module, ParametrizationList):
        return  # its parameters are those of the parametrized module
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        yield parameter_name(name), param  # weight_g and weight_v are both called weight
    for name, originals in getattr(module, "parametrizations", {}).items():
        if isinstance(originals, ParametrizationList):
            for param in originals.parameters(recurse=False):
                yield name, param


def _layer_kind(module: nn.Module, name: str) -> LayerKind:
    kind = type(module).__name__
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if isinstance(module, _NORMS):
        return "norm"
    # A transposed convolution is stored (in, out, ...), and a grouped one is several matrices: neither is one matrix.
    if isinstance(module, _TRANSPOSED_CONVOLUTIONS) and name == "weight":
        return "transposed convolution"
    if isinstance(module, _CONVOLUTIONS) and name == "weight":
        return "convolution" if module.groups == 1 else "grouped convolution"
    # weight_ih_l0, weight_hh_l0, in_proj_weight
    if isinstance(module, _RECURRENT) and "weight" in name:
        return "linear"
    is_linear = isinstance(module, nn.Linear) or "Linear" in kind or _is_conv1d(module)
    if name in ("weight", "bias") and (
        is_linear or (hasattr(module, "in_features") and hasattr(module, "out_features"))
    ):
        return "linear"
    # Types that only their names identify.
    if "Experts" in kind:
        return "experts"
    if "embed" in kind.lower():
        return "embedding"
    if _NORM_CLASS.fullmatch(kind):
        return "norm"
    return "weight" if name == "weight" else "bare"


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' linear layer of GPT-2, which stores input x output."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _in_experts(path: str) -> bool:
    """Return whether a path leads through ``experts`` and not on through one of its numbered children."""
    components = path.split(".")
    return "experts" in components and not any(
        component.isdigit() for component in components[components.index("experts") :]
    )


def _stacked_experts(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Return how many experts are concatenated along the rows of a 2-dimensional weight; 0 if that is unknown."""
    for holder in (module, getattr(module, "args", None), getattr(module, "config", None)):
        for attribute in _EXPERT_COUNTS:
            count = getattr(holder, attribute, None)
            if isinstance(count, int) and count > 1 and shape[0] % count == 0 and shape[0] > count:
                return count
    return 0


def _output_side(
    module: nn.Module, name: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int | None, str]:
    """Return which dimension of a matrix has the outputs, by the module's attributes or else by the bias, and why."""
    shape = shapes[name]
    # in_features and out_features, or a pair like them: in_channels (PyG), _in_feats (DGL), input_dim, d_in
    attributes = ("in_features", "out_features", *vars(module))
    sizes = {text: size for text in attributes if isinstance(size := getattr(module, text, None), int)}
    for inputs, size in sizes.items():
        outputs = re.sub(r"in(?=put|_|$)", "out", inputs, count=1)
        sides = sizes.get(outputs), size
        if shape[0] != shape[1] and shape in (sides, sides[::-1]):
            return int(shape != sides), f"has the size of {outputs} x {inputs}"
    side = _side_of_bias(name, shapes)
    return side, "" if side is None else f"has a bias for its {shape[side]} outputs"


def _side_of_bias(name: str, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return which of the last two dimensions of a weight is that of the bias beside it; ``None`` without one."""
    *stack, rows, cols = shapes[name]
    # attn_weight and attn_bias, weights and biases, w1 and b1, W_in and b_in, up_proj and up_proj_bias
    names = {re.sub("weight|kernel", "bias", name).replace("biass", "biases"), re.sub(r"^[wW]", "b", name)}
    names |= {"bias", "b"} if name in ("weight", "kernel", "w", "W") else {f"{name}_bias"}
    # (outputs,) or (1, outputs); of stacked experts (experts, outputs) or (experts, 1, outputs)
    biases = (shapes[bias] for bias in names - {name} if bias in shapes)
    sizes = {bias[-1] for bias in biases if bias and math.prod(bias) == math.prod(stack) * bias[-1]}
    sides = [side for side, size in enumerate((rows, cols)) if sizes == {size}]
    # The bias of a square matrix does not show which side are the outputs.
    return sides[0] if len(sides) == 1 else None


def call_quietly(module: nn.Module, accessor: str) -> object:
    """Return the result of an accessor, ``None`` if the model has none, it raises (no head) or it needs arguments."""
    try:
        return getattr(module, accessor)()
    except (NotImplementedError, AttributeError, TypeError, KeyError, IndexError):
        return None


NumbersOfExperts = Mapping[str, set[int]]
"""Path of a module to the numbers of experts that its parameters imply."""


def numbers_of_experts(members: Sequence[NamedParameter]) -> tuple[NumbersOfExperts, NumbersOfExperts]:
    """Return the numbers of experts of modules with a child ``experts``, and of those with stacks of other names."""
    counts: dict[str, set[int]] = defaultdict(set)
    stacks: dict[str, set[int]] = defaultdict(set)
    largest: dict[str, int] = defaultdict(int)
    for member in members:
        shape = member.full_shape
        for components in (plain_name(name).split(".") for name in member.names):
            if "experts" not in components:
                # "moe.w1" and "moe.w1.weight" are stacks of the module "moe".
                if len(shape) == 3 and member.kind in ("weight", "bare", "experts"):
                    stacks[".".join(components).removesuffix(".weight").rpartition(".")[0]].add(shape[0])
                continue
            position = components.index("experts")
            # DeepSpeed's "moe.deepspeed_moe.experts" has "moe.coefficient" beside it.
            parent = ".".join(components[:position]).removesuffix(".deepspeed_moe")
            if number := next(filter(str.isdigit, components[position + 1 :]), None):
                largest[parent] = max(largest[parent], int(number))  # a module for each expert
            elif len(shape) == 3:
                counts[parent].add(shape[0])  # (experts, rows, cols)
            else:
                counts[parent].add(member.layer.stack if member.layer is not None else 0)  # 0: unknown
    for parent, last in largest.items():
        counts[parent].add(last + 1)  # numbered from 0
    return counts, stacks


def router(member: NamedParameter, experts: NumbersOfExperts, stacks: NumbersOfExperts) -> Claim | None:
    """Return the claim on a router; ``None`` for other parameters. :func:`numbers_of_experts` makes the arguments."""
    shape = member.full_shape
    for name in member.names:
        # 1. by name alone. A router may have several layers: "router.classifier.weight", "router_mlp.fc1.weight".
        for component in plain_name(name).lower().split("."):
            if match_name(component, "router"):
                return Claim("router", f"MoE router by name ({component})")
        components = holder_path(name).split(".")
        # 2. by the experts beside it: up to three levels, because "gate.layer" belongs to the module "gate"
        for depth in range(len(components) - 1, max(-1, len(components) - 4), -1):
            parent, below = ".".join(components[:depth]), components[depth:]
            if len(shape) != 2 or any("expert" in component for component in below):
                continue
            numbers = experts.get(parent, set())
            # (experts, width); a bare parameter may be stored as input x output
            if shape[0] in numbers or (member.kind == "bare" and shape[1] in numbers):
                return Claim("router", "MoE router: an output for each expert beside it")
            named = next((text for text in below if match_name(text, "router beside experts")), None)
            # With expert parallelism a rank has only some of the experts.
            if named and (parent in experts or set(shape) & stacks.get(parent, set())):
                return Claim("router", f"MoE router by name ({named})")
    return None
