"""What a module's type, its source and its initial values say about the parameters that it holds itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from deepspeed_muon.routing.evidence import Claim, Layer, LayerKind
from deepspeed_muon.routing.names import known, parameter_name
from deepspeed_muon.routing.shapes import true_shape
from deepspeed_muon.routing.uses import Use, uses_of

_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
# Class names of norms: LlamaRMSNorm, LayerNorm2d, MambaRMSNormGated, NemotronLayerNorm1P, and no LayerNormLinear.
_NORM_CLASS = re.compile(r".*norm(\d*[dp]|gated|layer|perhead)?", re.IGNORECASE)
# Attributes with the number of experts of a module that stacks them in two dimensions: DBRX, megablocks.
_EXPERT_COUNTS = ("moe_num_experts", "num_experts", "num_local_experts", "n_routed_experts")
# Of such a stack the projection back to the model's width has the experts on its inputs.
_STACKED_DOWN = frozenset({"w2", "down_proj"})
# Modules of stacked experts that store (experts, in, out) without the attribute is_transposed: transformers' Llama 4.
_TRANSPOSED_EXPERTS = frozenset({"Llama4TextExperts"})


class Layers:
    """Reads the modules of one model; each class's source is read once."""

    def __init__(self) -> None:
        self._uses: dict[type, dict[str, set[Use]]] = {}

    def read(self, path: str, module: nn.Module) -> Iterator[tuple[nn.Parameter, Layer, tuple[Claim, ...]]]:
        """Yield the parameters that a module holds itself, what it says about each, and the rules that follow.

        Args:
            path: The module's dotted name.
            module: The module.
        """
        parameters = list(own_parameters(module))
        vectors = {name: shape[0] for name, param in parameters if len(shape := true_shape(param)) == 1}
        for name, param in parameters:
            kind = _kind(module, name)
            shape = true_shape(param)
            transposed = _transposed(module, kind)
            interleaved = getattr(module, "is_concatenated", True) is False
            stack, product = 0, ""
            claims: list[Claim] = []
            if len(shape) > 1 and kind in ("weight", "bare", "experts"):
                use = self._use(module, name) if kind != "experts" else None
                transposed = (
                    use == "input x output" if use in ("input x output", "output x input") else transposed
                )
                if len(shape) == 2 and _in_experts(path):
                    stack = _stack(module, shape)
                    transposed = name in _STACKED_DOWN if stack else transposed
                    product = f"{stack} experts in one matrix" if stack else ""
                elif use is not None and use != "no product" and use != "unknown":
                    product = f"{type(module).__name__} multiplies by it"
                elif (side := _side_of_bias(name, shape, vectors)) is not None:
                    transposed = side == 1
                    product = f"beside a bias of its {shape[side]} outputs"
                if kind != "experts":
                    claims += self._claims(module, name, param, kind, use, product)
            elif len(shape) > 1 and kind in ("embedding", "norm"):
                article = "an embedding" if kind == "embedding" else "a norm"
                reason = "weight of an embedding module" if kind == "embedding" else f"gain of {article}"
                claims.append(Claim(kind, reason))
            yield param, Layer(kind, transposed, interleaved, stack, product), tuple(claims)

    def _use(self, module: nn.Module, name: str) -> Use | None:
        kind = type(module)
        if kind not in self._uses:
            self._uses[kind] = uses_of(kind)
        uses = self._uses[kind].get(name, set())
        products = uses & {"input x output", "output x input", "product"}
        if products:
            return products.pop() if len(products) == 1 else "product"
        return "no product" if uses == {"no product"} else None

    def _claims(
        self,
        module: nn.Module,
        name: str,
        param: nn.Parameter,
        kind: LayerKind,
        use: Use | None,
        product: str,
    ) -> Iterator[Claim]:
        """Yield what speaks against a weight where the type of the module says nothing."""
        if product or known(name, "bias"):
            return
        if use == "no product":
            yield Claim("no_product", f"{type(module).__name__} does not multiply by it")
        elif getattr(param, "_no_weight_decay", False):
            yield Claim("no_product", "marked as no weight to decay")
        elif not (kind == "bare" and known(name, "weight")) and (value := _constant(param)) is not None:
            yield Claim("no_product", f"a gain or bias by its initial values, all {value:g}", certain=False)


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that a module holds itself, by the names that it uses.

    A parametrization (``torch.nn.utils.parametrizations``) and the older weight norm keep them under other names.
    """
    if isinstance(module, ParametrizationList):
        return  # belongs to the module around it
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        yield parameter_name(name), param
    for name, originals in getattr(module, "parametrizations", {}).items():
        if isinstance(originals, ParametrizationList):
            for param in originals.parameters(recurse=False):
                yield name, param


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, of torch or of a library that names it so."""
    kind = type(module).__name__
    return (
        isinstance(module, nn.Linear)
        or (hasattr(module, "in_features") and hasattr(module, "out_features"))
        or (kind == "Conv1D" and hasattr(module, "nf"))
        or "Linear" in kind
    )


def _kind(module: nn.Module, name: str) -> LayerKind:
    kind = type(module).__name__
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if isinstance(module, _NORMS):
        return "norm"
    # A transposed convolution has its input first, a grouped one has several matrices: neither is one matrix.
    if isinstance(module, _TRANSPOSED_CONVOLUTIONS) and name == "weight":
        return "transposed convolution"
    if isinstance(module, _CONVOLUTIONS) and name == "weight":
        return "convolution" if module.groups == 1 else "grouped convolution"
    if isinstance(module, _RECURRENT) and "weight" in name:
        return "linear"
    if is_linear(module) and name in ("weight", "bias"):
        return "linear"
    if "Experts" in kind:
        return "experts"
    if "embed" in kind.lower():
        return "embedding"
    if _NORM_CLASS.fullmatch(kind):
        return "norm"
    return "weight" if name == "weight" else "bare"


def _transposed(module: nn.Module, kind: LayerKind) -> bool | None:
    """Return whether the type of a module says that its weight is stored as input x output."""
    name = type(module).__name__
    if name == "Conv1D" and hasattr(module, "nf"):
        return True
    if kind == "experts" and (getattr(module, "is_transposed", False) or name in _TRANSPOSED_EXPERTS):
        return True
    return None


def _in_experts(path: str) -> bool:
    """Return whether a module lies below ``experts``, in none of its numbered children."""
    parts = path.split(".")
    return "experts" in parts and not any(part.isdigit() for part in parts[parts.index("experts") :])


def _stack(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Return how many experts a 2-dimensional weight of a module stacks, 0 if that is unknown."""
    for holder in (module, getattr(module, "args", None), getattr(module, "config", None)):
        for attribute in _EXPERT_COUNTS:
            count = getattr(holder, attribute, None)
            if isinstance(count, int) and count > 1 and shape[0] % count == 0 and shape[0] > count:
                return count
    return 0


def _side_of_bias(name: str, shape: tuple[int, ...], vectors: dict[str, int]) -> int | None:
    """Return the side of a matrix that has as many elements as the bias beside it; ``None`` without such a bias."""
    beside = {
        name.replace("weight", "bias"),
        name.replace("kernel", "bias"),
        re.sub(r"^w", "b", re.sub(r"^W", "b", name)),
    }
    sizes = {vectors[other] for other in beside - {name} if other in vectors}
    if len(sizes) != 1 or len(shape) != 2 or shape[0] == shape[1]:
        return None
    size = sizes.pop()
    return shape.index(size) if size in shape else None


def _constant(param: Tensor) -> float | None:
    """Return the value of which all elements are, or ``None``.

    Values are read on no rank if they are absent on some: on the meta device and where ZeRO 3 partitions them.
    """
    absent = param.is_meta or any(hasattr(param, mark) for mark in ("ds_id", "ds_shape", "ds_tensor"))
    if (
        absent
        or type(param.data) is not torch.Tensor
        or not param.numel()
        or not param.dtype.is_floating_point
    ):
        return None
    if param.element_size() < 2:
        return None
    first = param.detach().flatten()[0]
    return float(first) if bool((param.detach() == first).all()) else None


def call_quietly(module: nn.Module, accessor: str) -> Any:
    """Call an accessor of a model if it has one; models without a head raise, others want arguments."""
    function: Callable[[], Any] | None = getattr(module, accessor, None)
    if not callable(function):
        return None
    try:
        return function()
    except (NotImplementedError, AttributeError, TypeError, KeyError, IndexError):
        return None
