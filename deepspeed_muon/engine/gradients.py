"""Gradients between a backward pass and the step of ZeRO 1, 2 and 3: all of this step, none of an earlier one.

**Parameters that get no gradient in a step.** ZeRO 3, and ZeRO 1 and 2 with an offloaded optimizer, keep reduced
gradients in buffers that outlive the step, and write only those that a backward pass reduces. So DeepSpeed goes wrong
in two ways:

- A parameter without a gradient is updated with its last one in every step. That gradient is also part of the norm, and
  if it is infinite, all later steps overflow.
- In an accumulation DeepSpeed copies gradients in the first micro-step and adds them in the later ones. If the first
  gradient of a parameter comes later, it is added to that of the step before. With offload, if its last gradient comes
  before the last micro-step, the sum never reaches the optimizer.

Here the first gradient *of a parameter* in a step is copied and the later ones are added. A parameter that the last
backward pass did not reduce gets a gradient of zero, through the same functions as DeepSpeed's own gradients, so that
all readers of the buffers (overflow check, norm, clipping, ``safe_get_full_grad``) find the right numbers. Nothing is
communicated: the ranks that reduce a parameter together all know whether they did.

**Several backward passes in the last micro-step**, such as one for each of two losses. ZeRO 1 and 2 replace the
gradients of the earlier ones. Here they are added up, as at stages 0 and 3 and in torch.

**MoE layers whose ranks run different experts in the same micro-batch.** ZeRO 3 gathers the weights of a module when it
runs, and compares the order of modules between the ranks. ZeRO 1, 2 and 3 reduce gradients in the order in which a
backward pass gives them. Ranks that run different experts gather and reduce different tensors: they abort, hang, or add
up gradients of different experts without an error.

At stage 3 DeepSpeed's remedy is to mark the layer around router and experts as a *leaf module*: its weights are
gathered at once, and all its gradients are reduced together, with zeros for experts that did not run. DeepSpeed marks
the layers of some models of Hugging Face itself; here every layer with a child called ``experts`` is marked. At stages
1 and 2 DeepSpeed ignores the mark: gradients of leaf modules wait until the backward pass has ended, and then all ranks
reduce them in the order of the param groups, with zeros for experts that did not run.

**Flags.** ZeRO calls the inner step once for each param group (stages 1, 2) or sub-group (stage 3), and looks for
gradients that are not finite before that: it reads all gradients twice and sends a message. All gradients of the step
are in the wrapper's buffers already when its ``step`` begins. So the ranks tell each other the flags of all groups
there, in one message, which also answers ZeRO's question. The norm is computed there too and read together with the
flags, so that the host waits for the device once before a step: where ZeRO looks at the norm, it is on the CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.utils import get_z3_leaf_modules
from torch import Tensor, nn

from deepspeed_muon.engine.zero.stages import Zero3View, Zero12View, ZeroView, view_of
from deepspeed_muon.engine.zero.views import Original, View
from deepspeed_muon.logs import listed, logger, warn
from deepspeed_muon.optimizer import Muon

_MARK = "_z3_leaf"


def reduce_independent_gradient(
    original: Original, view: Zero12View, param: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Note that ZeRO 1 reduces the gradient of ``param`` by itself."""
    view.memory.queued.add(id(param))
    return original(param, *args, **kwargs)


def reduce_gradients(
    original: Original, view: Zero12View, pipeline_parallel: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """Reduce what the last micro-step of an accumulation did not add to, then finish the reduction."""
    known = view.memory.queued | view.memory.waiting
    # A pipeline fills its buckets in the call below, with each layer's gradient over all micro-batches.
    for number, params in enumerate(() if pipeline_parallel else view.params):
        for param in params:
            if id(param) not in known and view.has_gradient(param):
                view.reduce(param, number)
    view.memory.queued.clear()
    return original(pipeline_parallel, *args, **kwargs)


def gradient_partition_epilogue(original: Original, view: ZeroView, *args: Any, **kwargs: Any) -> Any:
    """End a backward pass, then give parameters that it did not reduce a gradient of zero."""
    result = original(*args, **kwargs)
    view.fill_up()
    return result


def only_gradients_of_the_step(original: Original, view: ZeroView, *args: Any, **kwargs: Any) -> Any:
    """Fill in zeros once more, for programs that end an accumulation in ``step()``; forget all after the step."""
    view.fill_up()
    try:
        return original(*args, **kwargs)
    finally:
        view.forget_gradients()


def begin_backward(original: Original, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass, which is another one than the last also where no forward pass came between them."""
    view = view_of(engine.optimizer)
    assert isinstance(view, Zero12View)
    view.begin_backward()
    return original(*args, **kwargs)


def add_to_earlier_backward(original: Original, view: Zero12View, *args: Any, **kwargs: Any) -> Any:
    """End a backward pass, then add to its gradients those of earlier backward passes of the same step."""
    memory = view.memory
    if memory.restart:
        memory.earlier = {}
    elif not view.is_later_phase:
        memory.earlier = view.finished_gradients()
    result = original(*args, **kwargs)
    memory.restart = False
    view.add_gradients(memory.earlier)
    return result


def zero_grad(original: Original, view: ZeroView, *args: Any, **kwargs: Any) -> Any:
    """Let the next backward pass forget earlier gradients, as in DeepSpeed; a step before it still uses them."""
    view.memory.restart = True
    if view.holds_sums() and not view.memory.warned:
        view.memory.warned = True
        warn(
            "deepspeed_muon: zero_grad between the micro-steps of an accumulation discards nothing at ZeRO 2, which "
            "reduces gradients in every micro-step, but the earlier micro-steps at ZeRO 0, 1 and 3. DeepSpeed clears "
            "gradients after each step: remove the call"
        )
    return original(*args, **kwargs)


def partition_grads(
    original: Original,
    view: ZeroView,
    params_to_release: Sequence[Tensor],
    grad_partitions: Sequence[Tensor],
    *args: Any,
    **kwargs: Any,
) -> list[Tensor]:
    """Copy first gradients of the step into ZeRO 3's buffer, and add later ones."""
    if view.memory.restart:
        view.memory.restart = False
        view.forget_gradients()
    parts: dict[bool, tuple[list[Tensor], list[Tensor]]] = {}
    for param, partition in zip(params_to_release, grad_partitions, strict=True):
        chosen = parts.setdefault(_is_new(view, param), ([], []))
        chosen[0].append(param)
        chosen[1].append(partition)
    buffers: list[Tensor] = []
    for is_new, part in parts.items():
        with view.in_micro_step(first=is_new):
            buffers += original(*part, *args, **kwargs)
    return buffers


def copy_grads_in_partition(
    original: Original, view: Zero12View, param: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Copy the first gradient of ``param`` in the step, and add later ones (ZeRO 1 and 2 with offload).

    Also to the sum that an earlier backward pass has already written to the master's gradient.
    """
    delivered = view.delivered(param)
    is_new = _is_new(view, param)
    if delivered is None:
        with view.in_micro_step(first=is_new):
            return original(param, *args, **kwargs)
    earlier = delivered.clone()
    with view.in_micro_step(first=True):
        result = original(param, *args, **kwargs)
    if not view.memory.restart:
        view.add_delivered(param, delivered, earlier)
    return result


def _is_new(view: View, param: Tensor) -> bool:
    """Return whether this is the first gradient of ``param`` in the step, and remember that there was one."""
    reduced = view.memory.reduced
    new = id(param) not in reduced
    reduced.add(id(param))
    return new


def warn_of_unfrozen(original: Original, view: View, *args: Any, **kwargs: Any) -> Any:
    """Warn once of each parameter that was frozen when the wrapper was made and has a gradient now."""
    unfrozen = [name for name, param in view.memory.frozen if param.requires_grad and param.grad is not None]
    if unfrozen:
        view.memory.frozen = [(name, param) for name, param in view.memory.frozen if name not in unfrozen]
        warn(
            "deepspeed_muon: parameters were unfrozen after deepspeed.initialize and do not train: %s. The wrapper "
            "that DeepSpeed made there (%s) has copies of what was trained then. Unfreeze them before "
            "deepspeed.initialize, or make a new engine; at ZeRO 0 in fp32 they would train",
            listed(unfrozen, 5),
            type(view.wrapper).__name__,
        )
    return original(*args, **kwargs)


def exchange_flags_first(original: Original, view: ZeroView, *args: Any, **kwargs: Any) -> Any:
    """Exchange the flags of all groups and read them and the norm before a step; forget them after it.

    Must be called by all ranks.
    """
    bound = view.optimizer.bound_steps
    # Gradients that a step leaves because it raises are not added to those of the next one.
    view.memory.restart, view.memory.earlier = True, {}
    view.memory.norms = bound.exchange_flags(view.gradients(), view.norms())
    try:
        if view.optimizer.config.nonfinite_grad == "error":
            _refuse_failed(view.optimizer)
        return original(*args, **kwargs)
    finally:
        bound.forget_flags()
        view.memory.norms = []


def look_for_overflow_first(original: Original, view: Zero3View, *args: Any, **kwargs: Any) -> Any:
    """Set ``overflow`` of the wrapper before a step that looks for it in fp16 only. Must be called by all ranks."""
    view.look_for_overflow()
    return original(*args, **kwargs)


def norm_groups(original: Original, view: Zero3View, *args: Any, **kwargs: Any) -> Any:
    """Return the norms of ZeRO 3's sub-groups, on the CPU where they were read with the flags."""
    return view.memory.norms or original(*args, **kwargs)


def global_norm(original: Original, view: Zero12View, *args: Any, **kwargs: Any) -> Any:
    """Return the norm of ZeRO 1 and 2, on the CPU where it was read with the flags."""
    return view.memory.norms[0] if view.memory.norms else original(*args, **kwargs)


def _refuse_failed(optimizer: Muon) -> None:
    """Raise on all ranks for matrices that got no update in the last step, before a param group of this one changes."""
    failed = optimizer.bound_steps.take_failed()
    (on_some_rank,) = optimizer.ranks.reduce([bool(failed)], "max", what="report of failed updates")
    if on_some_rank:
        optimizer.report_failed(failed or ["a matrix of other ranks"], "in the step before")


def has_overflow(original: Original, view: ZeroView, *args: Any, **kwargs: Any) -> bool:
    """Answer from the flags whether a gradient is not finite on any rank, where all groups have the same ranks."""
    found = view.optimizer.bound_steps.found_nonfinite(view.data_parallel_group)
    return bool(original(*args, **kwargs)) if found is None else view.is_true_of_any(found)


def mark_moe_layers(model: nn.Module, *, called_only: bool = False) -> list[str]:
    """Mark the MoE layers of a model as leaf modules, except those that a mark is on already, true or false.

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
    """Let leaf modules have a positional input with a gradient, whoever calls them and whatever is frozen before them.

    At stage 3 DeepSpeed ends the backward pass of a leaf module when its positional inputs have their gradients. If
    none of them gets one, it ends before it has begun, and the weights are gone when they are needed.

    Args:
        model: The whole model, before DeepSpeed makes its ZeRO 3 wrapper. Mutated.
    """
    for leaf in get_z3_leaf_modules(model):
        # Before DeepSpeed's own hook, which looks at the input too.
        leaf.register_forward_pre_hook(_with_gradient, prepend=True, with_kwargs=True)


def _with_gradient(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the inputs of a call, by position where that is possible; one of them at least requires a gradient."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    inputs = bound.args
    if torch.is_grad_enabled() and not any(
        isinstance(each, Tensor) and each.requires_grad for each in inputs
    ):
        inputs = tuple(
            each.detach().requires_grad_() if isinstance(each, Tensor) and each.is_floating_point() else each
            for each in inputs
        )
    return inputs, bound.kwargs


def waiting_parameters(view: View, model: nn.Module) -> frozenset[int]:
    """Return ``id(param)`` of every parameter whose gradient waits for the end of the backward pass.

    They are those of leaf modules at stages 1 and 2. Stacked experts need not wait: every rank has a gradient of the
    whole stack.
    """
    if not isinstance(view, Zero12View):
        return frozenset()
    chosen = [leaf for leaf in get_z3_leaf_modules(model) if not _are_stacked(getattr(leaf, "experts", None))]
    return frozenset(id(param) for leaf in chosen for param in leaf.parameters() if param.requires_grad)


def reduce_ready_partitions(
    original: Original, view: Zero12View, param: Tensor, *args: Any, **kwargs: Any
) -> None:
    """Let the gradient of a leaf module wait; reduce any other."""
    if id(param) not in view.memory.waiting:
        original(param, *args, **kwargs)


def reduce_waiting_gradients(original: Original, view: Zero12View, *args: Any, **kwargs: Any) -> Any:
    """Reduce the gradients of leaf modules in one order on all ranks, then end the backward pass."""
    waiting = view.memory.waiting
    if view.reduces_every_backward or view.at_boundary:
        for number, group in enumerate(view.params):
            for param in group:
                if id(param) in waiting:
                    if not view.has_gradient(param):
                        view.zero_gradient(param)
                    view.reduce(param, number)
    return original(*args, **kwargs)


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
