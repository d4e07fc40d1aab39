"""One step of ZeRO's wrappers: the methods that are replaced, each by one function.

ZeRO calls the inner step once for each param group (stages 1, 2) or sub-group (stage 3). Before that, ZeRO itself would
read all gradients twice and send a message to find those that are not finite. When the wrapper's ``step`` begins, all
gradients of the step are in its buffers already. So that is where the ranks exchange the status of all gradients, in
one message for each set of process groups, and ZeRO's question is answered from it. The norm is computed there as well,
and read together with the status, so that the host waits for the device once before a step: by the time ZeRO looks at
the norm, it is on the CPU. With ``nonfinite_grad: error`` one more message tells all ranks of the engine about
unrecoverable updates.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor

from deepspeed_muon.engine.patching import Original
from deepspeed_muon.engine.views import View, Zero3View, Zero12View, ZeroView, norms_of
from deepspeed_muon.errors import NumericalError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.transport.ranks import phase


def step(original: Original, view: View, *args: object, **kwargs: object) -> object:
    """Take one step of a wrapper. Must be called by all ranks of the engine.

    Raises:
        NumericalError: On all ranks, with ``nonfinite_grad`` ``error``: if DeepSpeed skipped the step and there is no
            dynamic loss scale, or if a matrix got no update in the step before.
    """
    optimizer, wrapper, memory = view.optimizer, view.wrapper, view.memory
    stops_at_nonfinite = optimizer.config.nonfinite_grad == "error"
    skipped_before = optimizer.skipped_steps
    scale = float(wrapper.loss_scale) if isinstance(view, ZeroView) else 1.0
    memory.norms, memory.partition_norms = [], []
    wrapper.overflow = False
    try:
        if isinstance(view, ZeroView):
            # 1. Exchange the status of the gradients, and read it and the norms on the CPU.
            with phase("norm of the gradients", view.data_parallel_group):
                norms = view.norms()
            memory.norms = optimizer._bound_steps.gradient_flags.exchange(view.gradients(), norms)
            memory.partition_norms = memory.norms[: len(view.masters)]
            if stops_at_nonfinite:
                _raise_for_unrecoverable(optimizer)
        # 2. DeepSpeed asks has_overflow below, then unscales, clips and calls the optimizer, or skips the step.
        result = original(*args, **kwargs)
        if isinstance(view, ZeroView):
            optimizer._record_norms({key: norm / scale for key, norm in view.norms_by_algorithm().items()})
    finally:
        if isinstance(view, ZeroView):
            optimizer._bound_steps.gradient_flags.forget()
            # What is reduced from now on belongs to the next step, even if the program calls the wrapper itself.
            memory.norms, memory.reduced = [], set()
        if optimizer.after_step is not None:
            # ZeRO calls the inner step several times, or never after an overflow.
            optimizer.after_step.end_step()
    # 3. Report to the engine what the optimizer skipped, so that the learning-rate schedule waits.
    if optimizer.skipped_steps > skipped_before:
        wrapper.overflow = True
    if wrapper.overflow and stops_at_nonfinite and not view.dynamic_scaler():
        raise NumericalError(
            "a gradient or the global gradient norm is not finite and optimizer.params.nonfinite_grad is 'error'; "
            "DeepSpeed left weights and optimizer state unchanged"
        )
    return result


def _raise_for_unrecoverable(optimizer: Muon) -> None:
    """Raise on all ranks for unrecoverable updates of the last step, before this one changes any param group."""
    names = optimizer._bound_steps.gradient_flags.take_unrecoverable()
    (on_some_rank,) = optimizer.ranks.all_reduce([bool(names)], "max", purpose="report of failed updates")
    if on_some_rank:
        optimizer._raise_for_unrecoverable(names or ["a matrix of other ranks"], "in the step before")


def has_overflow(original: Original, view: ZeroView, *args: object, **kwargs: object) -> bool:
    """Answer from the exchanged status whether any rank's gradients overflow, if all groups have the same ranks."""
    nonfinite = view.optimizer._bound_steps.gradient_flags.any_nonfinite(view.data_parallel_group)
    return bool(original(*args, **kwargs)) if nonfinite is None else view.is_true_of_any(nonfinite)


def norm_groups(original: Original, view: Zero3View, *args: object, **kwargs: object) -> object:
    """Return the norms of ZeRO 3's sub-groups, on the CPU if they were read with the status."""
    return view.memory.norms or original(*args, **kwargs)


def global_norm(original: Original, view: Zero12View, *args: object, **kwargs: object) -> object:
    """Return the norm of ZeRO 1 and 2, on the CPU if it was read with the status."""
    return view.memory.norms[-1] if view.memory.norms else original(*args, **kwargs)


def partition_norm(original: Original, view: ZeroView, *args: object) -> Tensor:
    """Let DeepSpeed compute the norm of the next partition's gradients, and record it."""
    norm: Tensor = original(*args)
    view.memory.partition_norms.append(norm)
    return norm


def norm_at_once(
    original: Original, view: ZeroView, gradients: Sequence[Tensor], params: Sequence[Tensor]
) -> Tensor:
    """Return the norm of the next partition's gradients, in a few operations and not in three for each gradient.

    DeepSpeed gets one tensor, their norms, in place of all gradients that it counts in the same way.
    """
    alike: dict[tuple[bool, bool], tuple[Tensor, list[Tensor]]] = {}
    # ZeRO 1 and 2 keep the padding of a partition among its gradients.
    unpadded = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
    for gradient, param in zip(unpadded, params, strict=False):
        kind = is_model_parallel_parameter(param), getattr(param, "ds_pipe_replicated", False)
        alike.setdefault(kind, (param, []))[1].append(gradient)
    norms = [norms_of(members) for _, members in alike.values()]
    # DeepSpeed pairs the norms with the first parameters, and reads the process group from all of them.
    return partition_norm(original, view, norms, [*(param for param, _ in alike.values()), *params])
