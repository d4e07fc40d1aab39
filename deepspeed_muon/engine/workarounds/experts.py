"""MoE layers whose ranks run different experts in the same micro-batch.

ZeRO 3 gathers the weights of a module when it runs, and compares the order of modules between the ranks. ZeRO 1, 2 and
3 reduce gradients in the order in which a backward pass gives them. Ranks that run different experts gather and reduce
different tensors: they abort, hang, or add up gradients of different experts without an error.

At stage 3 DeepSpeed's remedy is to mark the layer around router and experts as a *leaf module*: its weights are
gathered at once, and all its gradients are reduced together, with zeros for experts that did not run. DeepSpeed marks
the layers of some Hugging Face models itself; :func:`mark_moe_layers` marks every layer with a child called
``experts``. At stages 1 and 2 DeepSpeed ignores the mark. With the workaround, gradients of leaf modules wait until the
backward pass has ended; then all ranks reduce them in the order of the param groups, with zeros for experts that did
not run.
"""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import get_z3_leaf_modules
from torch import Tensor, nn

from deepspeed_muon.engine.patching import Hook, Original, Workaround
from deepspeed_muon.engine.views import View, Zero12View
from deepspeed_muon.logs import logger

_MARK = "_z3_leaf"
_WAIT = attrgetter("memory.waiting")


def mark_moe_layers(model: nn.Module, *, called_only: bool = False) -> list[str]:
    """Mark the MoE layers of a model as leaf modules, except those that have a mark already, true or false.

    Must come before DeepSpeed makes its ZeRO 3 wrapper. Layers of ``deepspeed.moe`` and AutoEP are left out: their
    ranks run all of their experts. So is the model itself.

    Args:
        model: The whole model. Mutated.
        called_only: Whether to leave out what has no ``forward``, such as a ``ModuleDict``. ZeRO 3 gathers and reduces
            a leaf module when it is called, and never its children by themselves.

    Returns:
        The names of all leaf modules.
    """
    # Not the model itself: it would be gathered whole, and its inputs have no gradient.
    inside = {id(model)} | {id(child) for leaf in get_z3_leaf_modules(model) for child in leaf.modules()}
    kinds: dict[str, int] = {}
    for module in model.modules():
        if id(module) in inside or hasattr(module, _MARK) or not _is_moe_layer(module):
            continue
        if called_only and getattr(module.forward, "__func__", None) is nn.Module.forward:
            continue
        setattr(module, _MARK, True)
        inside |= {id(child) for child in module.modules()}
        kinds[type(module).__name__] = kinds.get(type(module).__name__, 0) + 1
    if kinds:
        logger.info(
            "deepspeed_muon: %s marked as leaf modules of ZeRO, since ranks can run different experts; "
            "deepspeed.utils.unset_z3_leaf_modules(model, [...]) before initialize prevents that",
            ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        )
    return [name for name, module in model.named_modules() if getattr(module, _MARK, False)]


def prepare_inputs(model: nn.Module) -> None:
    """Give every leaf module a positional input that requires a gradient, whoever calls it and whatever is frozen.

    At stage 3 DeepSpeed ends the backward pass of a leaf module when its positional inputs have their gradients. If
    none of them gets one, it ends before it has begun, and the weights are gone when they are needed.

    Args:
        model: The whole model, before DeepSpeed makes its ZeRO 3 wrapper. Mutated.
    """
    for leaf in get_z3_leaf_modules(model):
        # Before DeepSpeed's own hook, which looks at the input too.
        leaf.register_forward_pre_hook(_with_gradient, prepend=True, with_kwargs=True)


def prepare_leaves(engine: DeepSpeedEngine) -> None:
    """Prepare the inputs of leaf modules at stage 3."""
    if engine.zero_optimization_stage() == 3:
        prepare_inputs(engine.module)


def _with_gradient(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the inputs of a call, by position where that is possible; one of them at least requires a gradient."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    inputs = bound.args
    if torch.is_grad_enabled() and not any(
        isinstance(value, Tensor) and value.requires_grad for value in inputs
    ):
        inputs = tuple(
            value.detach().requires_grad_()
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for value in inputs
        )
    return inputs, bound.kwargs


def find_waiting(engine: DeepSpeedEngine, view: View) -> None:
    """Find the parameters whose gradients wait for the end of the backward pass: those of leaf modules.

    Stacked experts need not wait, since every rank has a gradient of the whole stack.
    """
    leaves = get_z3_leaf_modules(engine.module) if isinstance(view, Zero12View) else ()
    for leaf in leaves:
        if not _are_stacked(getattr(leaf, "experts", None)):
            view.memory.waiting |= {id(param) for param in leaf.parameters() if param.requires_grad}


def end_backward(original: Original, view: Zero12View, *args: object, **kwargs: object) -> object:
    """Reduce the gradients of leaf modules in one order on all ranks, if the backward pass that ends reduces any."""
    waiting = view.memory.waiting
    is_reduced = view.reduces_every_backward or view.in_last_micro_step
    for group_number, params in enumerate(view.params if is_reduced else ()):
        for param in params:
            if id(param) in waiting:
                if not view.has_gradient(param):
                    view.zero_gradient(param)
                view.reduce(param, group_number)
    return original(*args, **kwargs)


def reduce_ready_partitions(
    original: Original, view: Zero12View, param: Tensor, *args: object, **kwargs: object
) -> None:
    """Reduce a gradient, unless it is that of a leaf module, which waits for the end of the backward pass."""
    if id(param) not in view.memory.waiting:
        original(param, *args, **kwargs)


def _is_moe_layer(module: nn.Module) -> bool:
    """Return whether a module holds experts, trained or frozen, that every rank has."""
    experts = getattr(module, "experts", None)
    weights = list(experts.parameters()) if isinstance(experts, nn.Module) else []
    return bool(weights) and all(getattr(weight, "allreduce", True) for weight in weights)


def _are_stacked(experts: Any) -> bool:
    """Return whether the experts of a layer are stacked weights, not modules of their own."""
    if not isinstance(experts, nn.Module):
        return False
    return all(next(child.parameters(), None) is None for child in experts.children())


DIFFERENT_EXPERTS = Workaround(
    defect="where ranks run different experts, ZeRO 1 and 2 reduce gradients of different ones with each other, and "
    "ZeRO 3 waits for weights that other ranks do not gather",
    test="tests/distributed/test_idle_parameters.py::test_ranks_that_use_different_branches[1-leaf-]",
    before_wrapping=lambda engine: mark_moe_layers(
        engine.module, called_only=engine.zero_optimization_stage() == 3
    ),
    prepare=find_waiting,
    hooks=(
        Hook((Zero12View,), "reduce_ready_partitions_and_remove_grads", reduce_ready_partitions, _WAIT),
        Hook((Zero12View,), "independent_gradient_partition_epilogue", end_backward, _WAIT),
    ),
)

LEAF_INPUTS = Workaround(
    defect="ZeRO 3 ends the backward pass of a leaf module before it has begun if no input of it has a gradient",
    test="tests/distributed/test_hugging_face_moe.py::test_variants[3-last-layer-False]",
    before_wrapping=prepare_leaves,
)
