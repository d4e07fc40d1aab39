"""What the wrappers of all ZeRO stages have in common; those of ZeRO 0, and ``BF16_Optimizer``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from deepspeed_muon.errors import BindingError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.placement import Placement, flat_placement, replicated_placement
from deepspeed_muon.routing.shapes import true_shape

# Elements of the weights that the ranks gather at once after a restore.
_GATHERED = 1 << 18


@dataclass(slots=True)
class Memory:
    """What the replaced methods of a wrapper remember between calls, in its attribute ``_deepspeed_muon_memory``.

    Attributes:
        engine: The wrapper's engine, referred to weakly.
        reduced: ``id`` of every parameter whose gradient was reduced since the last step.
        queued: The same since the last call of ``reduce_gradients`` (ZeRO 1 with ``overlap_comm``).
        restart: Whether the next gradient is the first of a step (after ``zero_grad``, and after a step).
        waiting: ``id`` of every parameter whose gradient waits for the end of the backward pass (ZeRO 1 and 2).
        norms: What :meth:`.ZeroView.norms` returned for the running step, on the CPU.
        earlier: Gradients of earlier backward passes of the step, by partition, while the last one runs (ZeRO 1 and 2).
        warned: Whether a warning was logged that ``zero_grad`` does not discard what it should.
        frozen: Name and tensor of the parameters that were frozen when the wrapper was made, until one is warned of.
    """

    engine: weakref.ref[Any]
    reduced: set[int] = field(default_factory=set)
    queued: set[int] = field(default_factory=set)
    restart: bool = False
    waiting: frozenset[int] = frozenset()
    norms: list[Tensor] = field(default_factory=list)
    earlier: dict[int, Any] = field(default_factory=dict)
    warned: bool = False
    frozen: list[tuple[str, Tensor]] = field(default_factory=list)


class View:
    """What all wrappers have in common; what is not overridden holds for parameters that are replicated on every rank.

    ``overflow`` and ``loss_scale``, which DeepSpeed's engine reads too, are read from the wrapper itself.

    Attributes:
        wrapper: The wrapper, or our optimizer where there is none.
        optimizer: Our optimizer inside the wrapper.
        memory: What the replaced methods remember, once they are replaced.
        params: The model's parameters in each partition.
        masters: What our optimizer updates of each partition.
        offloads: Whether gradients and masters are kept on the CPU.
        is_one_call: Whether one call of the inner step updates all partitions, and not one each.
        keeps_gradients: Whether gradients outlive the step in buffers.
        swap_folder: This rank's folder with masters and state between two steps; ``None`` without NVMe.
    """

    offloads = False
    is_one_call = True
    keeps_gradients = False
    swap_folder: Path | None = None

    def __init__(
        self, wrapper: DeepSpeedOptimizer, params: Sequence[Sequence[Tensor]], masters: Sequence[Tensor]
    ) -> None:
        self.wrapper, self.params, self.masters = wrapper, params, masters
        self.optimizer: Muon = wrapper if isinstance(wrapper, Muon) else wrapper.optimizer
        self.memory: Memory = getattr(wrapper, "_deepspeed_muon_memory", None)  # type: ignore[assignment]

    def prepare(self) -> None:
        """Change attributes of the wrapper before its methods are replaced."""

    @property
    def loaded_clipping(self) -> float | None:
        """The norm to which gradients are clipped where a load can change it, else ``None``."""
        return None

    def group(self, index: int) -> dist.ProcessGroup | None:
        """Return the ranks that divide a partition among them, ``None`` where each holds it whole."""
        return None

    def placements(self, index: int, ranks: int) -> Iterator[tuple[Tensor, Placement]]:
        """Yield the placement of each parameter of a partition on the ranks that divide it; empty ones are left out."""
        (param,) = self.params[index]
        if param.numel():
            yield param, replicated_placement(0, param.numel(), ranks)

    def is_trained(self, index: int) -> bool:
        """Return whether a partition is updated; at ZeRO 0 in fp32 frozen parameters have one, too."""
        return True

    def group_numbers(self) -> list[int]:
        """Return the number of the param group of every partition."""
        groups = self.optimizer.param_groups
        return [number for number, group in enumerate(groups) for _ in group["params"]]

    def swapped_weights(self) -> dict[int, Tensor]:
        """Return this rank's weights of the forward pass, flat, of the partitions whose masters are on NVMe."""
        return {}

    def refresh_weights(self) -> None:
        """Round the masters into the weights of the forward pass. Must be called by all ranks."""

    def end_of_load(self) -> None:
        """Undo what the wrapper did before it loads a checkpoint, where it raised. Must be called by all ranks."""

    def dynamic_scaler(self) -> Any:
        """Return the object with the attributes of a dynamic loss scale, or ``None``."""

    def grow_scale(self) -> None:
        """Update a dynamic loss scale after a step without overflow, whatever replaces the wrapper's method."""
        type(self.wrapper)._update_scale(self.wrapper, False)


class PlainView(View):
    """ZeRO 0 in fp32."""

    def __init__(self, optimizer: Muon) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        super().__init__(optimizer, [[param] for param in params], params)

    def is_trained(self, index: int) -> bool:
        return self.optimizer.is_trained(self.masters[index])


class HalfView(View):
    """ZeRO 0 in half precision.

    Attributes:
        divides: Whether the wrapper divides gradients by its loss scale.
        max_norm: The norm to which gradients are clipped; 0 for no clipping.
    """

    def __init__(self, wrapper: DeepSpeedOptimizer) -> None:
        models, masters = (list(chain(*groups)) for groups in (wrapper.fp16_groups, wrapper.fp32_groups))
        super().__init__(wrapper, [[model] for model in models], masters)
        self.divides = bool(wrapper.loss_scale_config.use_grad_scaling)
        self.max_norm: float = wrapper.clip_grad

    def refresh_weights(self) -> None:
        for (model,), master in zip(self.params, self.masters, strict=True):
            model.data.copy_(master.data)

    def dynamic_scaler(self) -> Any:
        config = self.wrapper.loss_scale_config
        return config if config.dynamic_loss_scale else None

    def report_norm(self, norm: Any) -> None:
        """Let the engine report a norm."""
        self.wrapper._global_grad_norm = norm


class FlatView(View):
    """A flat buffer for each param group, cut into equal partitions.

    Attributes:
        flats: The buffer of each group, with the weights of the forward pass.
        cut_flats: The buffer of each group as its partitions, of all ranks.
    """

    flats: Sequence[Tensor]
    cut_flats: Sequence[Sequence[Tensor]]

    @property
    def loaded_clipping(self) -> float | None:
        return float(self.wrapper.clip_grad)

    def group(self, index: int) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup = self.wrapper.real_dp_process_group[index]
        return group

    def placements(self, index: int, ranks: int) -> Iterator[tuple[Tensor, Placement]]:
        # Addresses hold under round-robin order, padding and alignment; DeepSpeed's own mapping (_hp_mapping) does not.
        flat = self.flats[index]
        for param in self.params[index]:
            numel = param.numel()
            if numel == 0:
                continue
            offset, remainder = divmod(param.data_ptr() - flat.data_ptr(), flat.element_size())
            if remainder or offset < 0 or offset + numel > flat.numel():
                raise BindingError(
                    f"parameter of shape {true_shape(param)} does not lie in the flat buffer of its param group "
                    f"{index}; its data was replaced after deepspeed.initialize"
                )
            yield param, flat_placement(offset, numel, flat.numel() // ranks)

    def group_numbers(self) -> list[int]:
        return list(range(len(self.params)))

    def refresh_weights(self) -> None:
        # gloo copies all that it gathers at once, and DeepSpeed's update_lp_params gathers the whole group.
        for index, (partitions, master) in enumerate(zip(self.cut_flats, self.masters, strict=True)):
            group = self.group(index)
            rank = dist.get_rank(group)
            partitions[rank].copy_(master)
            step = max(1, _GATHERED // len(partitions))
            for start in range(0, master.numel(), step) if len(partitions) > 1 else ():
                slices = [
                    partition.narrow(0, start, min(step, master.numel() - start)) for partition in partitions
                ]
                dist.all_gather(slices, slices[rank], group=group)

    def link_params(self) -> None:
        """Link the parameters to their masters, by which DeepSpeed's ``safe_get_full_*`` find them."""
        self.wrapper._link_all_hp_params()

    def link_states_again(self) -> None:
        """Link the parameters to their optimizer state, whether they are linked or not."""
        self.wrapper._hp_optimizer_states_linked = False
        self.wrapper._lazy_init_hp_params_optimizer_state()


class Bf16View(FlatView):
    """ZeRO 1 with bf16 weights and fp32 gradients."""

    def __init__(self, wrapper: BF16_Optimizer) -> None:
        super().__init__(wrapper, wrapper.bf16_groups, wrapper.fp32_groups_flat_partition)
        self.flats, self.cut_flats = wrapper.bf16_groups_flat, wrapper.bf16_partitioned_groups

    def begin_backward(self) -> None:
        """Drop the gradients of an earlier backward pass, which are part of the fp32 sums already."""
        self.wrapper.clear_lp_grads(set_to_none=True)

    def count_all_gradients(self) -> None:
        """Let norm and clipping see every reduced gradient; those that no rank has are zero."""
        self.wrapper.fp32_groups_has_gradients = [[True] * len(group) for group in self.params]
