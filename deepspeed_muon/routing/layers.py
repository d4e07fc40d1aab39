"""Reads from a module's type, and from the bias beside them, what its direct parameters are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from deepspeed_muon.routing.evidence import Claim, Layer, LayerKind
from deepspeed_muon.routing.names import parameter_name
from deepspeed_muon.routing.shapes import true_shape

_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
# Class names of norms: LlamaRMSNorm, LayerNorm2d, MambaRMSNormGated, NemotronLayerNorm1P, and no LayerNormLinear.
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
    # Sizes of the biases, for the weights beside them; some are stored as (1, outputs).
    vectors = {
        name: shape[-1]
        for name, param in parameters
        if len(shape := true_shape(param)) == 1 or shape[:-1] == (1,)
    }
    for name, param in parameters:
        kind = _kind(module, name)
        shape = true_shape(param)
        is_transposed = type(module).__name__ in _TRANSPOSED_EXPERTS or getattr(
            module, "is_transposed", False
        )
        # by type, True or unknown
        transposed = True if _is_conv1d(module) or (kind == "experts" and is_transposed) else None
        # transformers' experts with interleaved gate and up projections (gpt-oss)
        interleaved = getattr(module, "is_concatenated", True) is False
        stack, product = 0, ""
        claims: tuple[Claim, ...] = ()
        if len(shape) == 2 and kind in ("weight", "bare", "experts") and _in_experts(path):
            stack = _stack(module, shape)  # (experts * rows, cols)
            transposed = name in _STACKED_DOWN if stack else transposed
            product = f"{stack} experts in one matrix" if stack else ""
        elif len(shape) == 2 and kind in ("linear", "weight", "bare") and transposed is None:
            # Outputs and inputs by the attributes of the module, else by the bias, else as torch stores them.
            side = _side_of_bias(name, shape, vectors)
            product = "" if side is None else f"has a bias for its {shape[side]} outputs"
            # in_features and out_features, or a pair like them: in_channels (PyG), _in_feats (DGL), input_dim, d_in
            attributes = (
                (name, getattr(module, name, None)) for name in ("in_features", "out_features", *vars(module))
            )
            sizes = {name: value for name, value in attributes if isinstance(value, int)}
            for inputs, size in sizes.items():
                outputs = re.sub(r"in(?=put|_|$)", "out", inputs, count=1)
                sides = sizes.get(outputs), size
                if shape[0] != shape[1] and shape in (sides, sides[::-1]):
                    side, product = int(shape != sides), f"has the size of {outputs} x {inputs}"
                    break
            transposed = None if side is None else side == 1
        if len(shape) > 1 and kind == "embedding":
            claims = (Claim("embedding", "weight of an embedding module"),)
        elif len(shape) > 1 and kind == "norm":
            claims = (Claim("norm", "gain of a norm"),)
        yield param, Layer(kind, transposed, interleaved, stack, product, bool(vectors)), claims


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


def _kind(module: nn.Module, name: str) -> LayerKind:
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
    """Return whether a path leads through ``experts``, but not through one of its numbered children."""
    components = path.split(".")
    return "experts" in components and not any(
        component.isdigit() for component in components[components.index("experts") :]
    )


def _stack(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Return how many experts are concatenated along the rows of a 2-dimensional weight; 0 if that is unknown."""
    for holder in (module, getattr(module, "args", None), getattr(module, "config", None)):
        for attribute in _EXPERT_COUNTS:
            count = getattr(holder, attribute, None)
            if isinstance(count, int) and count > 1 and shape[0] % count == 0 and shape[0] > count:
                return count
    return 0


def _side_of_bias(name: str, shape: tuple[int, ...], vectors: dict[str, int]) -> int | None:
    """Return the dimension of a matrix whose size is that of the bias beside it; ``None`` without such a bias."""
    # weight and bias, attn_weight and attn_bias, kernel and bias, w1 and b1, W_in and b_in
    bias_names = {re.sub("weight|kernel", "bias", name), re.sub(r"^[wW]", "b", name)}
    sizes = {vectors[bias] for bias in bias_names - {name} if bias in vectors}
    # The bias of a square matrix does not show which side are the outputs.
    if len(sizes) != 1 or len(shape) != 2 or shape[0] == shape[1]:
        return None
    size = sizes.pop()
    return shape.index(size) if size in shape else None


def call_quietly(module: nn.Module, accessor: str) -> object:
    """Return the result of an accessor, ``None`` if the model has none, it raises (no head) or it needs arguments."""
    function: Callable[[], object] | None = getattr(module, accessor, None)
    if not callable(function):
        return None
    try:
        return function()
    except (NotImplementedError, AttributeError, TypeError, KeyError, IndexError):
        return None
