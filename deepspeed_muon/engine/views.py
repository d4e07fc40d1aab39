"""The only module that reads and writes attributes of the wrappers that DeepSpeed puts around an optimizer.

Every class of wrapper has a view, and views call the same thing by the same name. A view refers to its wrapper
strongly: make one with :func:`view_of` where it is needed, and do not keep it.

| ZeRO | wrapper | view | its partitions |
|---|---|---|---|
| 0, fp32 | none | ``PlainView`` | all parameters, whole on every rank |
| 0, half precision | ``FP16_UnfusedOptimizer`` | ``HalfView`` | whole fp32 copies of all parameters |
| 1 with fp32 gradients of bf16 weights | ``BF16_Optimizer`` | ``Bf16View`` | as at stages 1 and 2 |
| 1, 2 | ``DeepSpeedZeroOptimizer`` | ``Zero12View`` | for each param group, one of equal slices of its flat buffer |
| 3 | ``DeepSpeedZeroOptimizer_Stage3`` | ``Zero3View`` | for each sub-group, the shards of its parameters |

The names of the methods that are replaced are also in :mod:`deepspeed_muon.engine.hooks`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from deepspeed_muon.errors import BindingError, CheckpointError, ConfigError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.layout import PartitionIndex
from deepspeed_muon.plan.placement import Placement, flat_placement, replicated_placement, sharded_placement
from deepspeed_muon.routing.shapes import true_shape

# Elements of the weights that the ranks gather at once after a restore.
_GATHERED_NUMEL = 1 << 18


@dataclass(slots=True)
class Memory:
    """What the replaced methods of a wrapper remember between calls, in its attribute ``_deepspeed_muon_memory``.

    Attributes:
        engine: The wrapper's engine, referred to weakly.
        reduced: ``id`` of every parameter whose gradient was reduced since the last step.
        queued: The same since the last call of ``reduce_gradients`` (ZeRO 1 with ``overlap_comm``).
        restart: Whether the next gradient is the first of a step (after ``zero_grad``, and after a step).
        waiting: ``id`` of every parameter whose gradient waits for the end of the backward pass (ZeRO 1 and 2).
        has_stale_gradients: Whether the weights' gradients are in the fp32 sums already, or left over from a backward
            pass that failed (ZeRO 1 in bf16 with fp32 sums).
        norms: What :meth:`.ZeroView.norms` returned for the running step, on the CPU.
        partition_norms: The norm of every partition's gradients over all ranks in the running step, times the loss
            scale; negative if it is not finite. Empty until DeepSpeed has computed them (ZeRO 1 to 3).
        earlier: Gradients of earlier backward passes of the step, by partition, while the last one runs (ZeRO 1 and 2).
        frozen: Name and tensor of the parameters that were frozen when the engine was made, until one is warned of.
    """

    engine: weakref.ref[Any]
    reduced: set[int] = field(default_factory=set)
    queued: set[int] = field(default_factory=set)
    restart: bool = False
    waiting: frozenset[int] = frozenset()
    has_stale_gradients: bool = False
    norms: list[Tensor] = field(default_factory=list)
    partition_norms: list[Tensor] = field(default_factory=list)
    earlier: dict[int, Any] = field(default_factory=dict)
    frozen: list[tuple[str, Tensor]] = field(default_factory=list)


class View:
    """What all wrappers have in common; the methods here are those for parameters that are replicated on every rank.

    ``overflow`` and ``loss_scale``, which DeepSpeed's engine reads too, are read from the wrapper itself.

    Attributes:
        wrapper: The wrapper, or our optimizer where there is none.
        optimizer: Our optimizer inside the wrapper.
        memory: What the replaced methods remember; ``None`` before they are replaced.
        params: The model's parameters in each partition.
        masters: What our optimizer updates of each partition.
        offloads: Whether gradients and masters are kept on the CPU.
        is_one_call: Whether one call of the inner step updates all partitions; otherwise each call updates one.
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
        """Return the ranks that divide a partition among themselves, ``None`` if each has all of it."""
        return None

    def placements(self, index: int, ranks: int) -> Iterator[tuple[Tensor, Placement]]:
        """Yield the placement of each parameter of a partition on the ranks that divide it; empty ones are left out."""
        (param,) = self.params[index]
        if param.numel():
            yield param, replicated_placement(param.numel(), ranks)

    def group_numbers(self) -> list[int]:
        """Return the number of the param group of every partition."""
        groups = self.optimizer.param_groups
        return [number for number, group in enumerate(groups) for _ in group["params"]]

    def algorithms(self) -> list[str]:
        """Return the algorithm that updates every partition."""
        groups = self.optimizer.param_groups
        return [groups[number]["algorithm"] for number in self.group_numbers()]

    def reduced_gradients(self, index: int) -> Sequence[Tensor | None]:
        """Return the reduced gradient of every parameter in a partition; only where gradients are not divided."""
        return [self.masters[index].grad]

    def gradients_by_algorithm(self) -> dict[str, list[tuple[Tensor, Tensor | None]]]:
        """Return every parameter of the model and its reduced gradient; only where gradients are not divided."""
        pairs: dict[str, list[tuple[Tensor, Tensor | None]]] = {"muon": [], "adamw": []}
        for index, algorithm in enumerate(self.algorithms()):
            pairs[algorithm] += zip(self.params[index], self.reduced_gradients(index), strict=True)
        return pairs

    def refresh_weights(self) -> None:
        """Round the masters into the weights of the forward pass. Must be called by all ranks."""

    def require_reloaded(self) -> None:
        """Raise a CheckpointError while ``engine.offload_states`` has moved tensors away that a load writes."""
        if getattr(self.wrapper, "offloaded_states", None):
            raise CheckpointError(
                "engine.offload_states() moved the state away: call engine.reload_states() before a load"
            )

    def end_of_load(self) -> None:
        """Undo what the wrapper did to prepare for a load. Must be called by all ranks."""

    def dynamic_scaler(self) -> Any:
        """Return the object with the attributes of a dynamic loss scale, or ``None``."""

    def grow_scale(self) -> None:
        """Update a dynamic loss scale after a step without overflow, by the original method."""
        type(self.wrapper)._update_scale(self.wrapper, False)


class PlainView(View):
    """ZeRO 0 in fp32."""

    def __init__(self, optimizer: Muon) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        super().__init__(optimizer, [[param] for param in params], params)


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

    def refresh_masters(self) -> None:
        """Set the masters to loaded weights, as DeepSpeed does from stage 1 on; else its next step discards these."""
        for (model,), master in zip(self.params, self.masters, strict=True):
            master.data.copy_(model.data)

    def dynamic_scaler(self) -> Any:
        config = self.wrapper.loss_scale_config
        return config if config.dynamic_loss_scale else None

    def report_norm(self, norm: Any) -> None:
        """Set the norm that the engine reports."""
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
            # in elements from the start of the buffer
            offset, remainder = divmod(param.data_ptr() - flat.data_ptr(), flat.element_size())
            if remainder or offset < 0 or offset + numel > flat.numel():
                raise BindingError(
                    f"parameter of shape {true_shape(param)} is not in the flat buffer of its param group "
                    f"{index}; its data was replaced after deepspeed.initialize"
                )
            yield param, flat_placement(offset, numel, flat.numel() // ranks)

    def group_numbers(self) -> list[int]:
        return list(range(len(self.params)))

    def refresh_weights(self) -> None:
        # gloo copies all that it gathers at once, and DeepSpeed's update_lp_params gathers the whole group: a restore
        # would need the memory of all weights once more (tests/distributed/test_checkpoint_memory.py).
        for index, (partitions, master) in enumerate(zip(self.cut_flats, self.masters, strict=True)):
            # partitions: (partition_numel,) in half precision for each rank; master: this rank's in fp32
            group = self.group(index)
            rank = dist.get_rank(group)
            partitions[rank].copy_(master)
            step = max(1, _GATHERED_NUMEL // len(partitions))
            for start in range(0, master.numel() if len(partitions) > 1 else 0, step):
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
        """Drop the weights' gradients if they are stale, and no others."""
        if self.memory.has_stale_gradients:
            self.wrapper.clear_lp_grads(set_to_none=True)
            self.memory.has_stale_gradients = False

    def reduced_gradients(self, index: int) -> Sequence[Tensor | None]:
        gradients: Sequence[Tensor] = self.wrapper.fp32_groups_gradients[index]
        return gradients

    def count_all_gradients(self) -> None:
        """Include every reduced gradient in norm and clipping; those that no rank has are zero."""
        self.wrapper.fp32_groups_has_gradients = [[True] * len(group) for group in self.params]


class ZeroView(View):
    """ZeRO 1, 2 or 3: gradients are reduced into partitions."""

    is_one_call = False

    @property
    def in_last_micro_step(self) -> bool:
        """Whether the last micro-step of an accumulation is running."""
        boundary = self.wrapper.is_gradient_accumulation_boundary  # an attribute in DeepSpeed 0.19.2
        return bool(boundary() if callable(boundary) else boundary)

    @property
    def data_parallel_group(self) -> Any:
        """The data-parallel ranks of everything that is not an expert."""
        return self.wrapper.dp_process_group

    def wait_for_copies(self) -> None:
        """Wait for copies of gradients to the CPU."""
        if hasattr(self.wrapper, "_wait_for_offload_copies"):  # DeepSpeed 0.19.2 copies at once
            self.wrapper._wait_for_offload_copies()

    def gradients(self) -> dict[PartitionIndex, list[Tensor]]:
        """Return this rank's gradient of each partition that has one, as flat tensors that follow each other."""
        self.wait_for_copies()
        gradients = {PartitionIndex(index): self.gradient(index) for index in range(len(self.masters))}
        return {index: tensors for index, tensors in gradients.items() if tensors}

    def gradient(self, index: int) -> list[Tensor]:
        """Return this rank's gradient of a partition as in :meth:`gradients`, an empty list if it has none."""
        stored = self.masters[index].grad if self.offloads else self.wrapper.averaged_gradients.get(index)
        tensors = [stored] if isinstance(stored, Tensor) else stored or []
        # For a small parameter, making a view costs as much as everything else.
        return [
            tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().reshape(-1)
            for tensor in tensors
        ]

    def norms(self) -> list[Tensor]:
        """Return the norms that ``step`` computes; with offload they are on the CPU. Must be called by all ranks."""
        if self.offloads or not getattr(self.wrapper, "compute_grad_norm", True):  # 0.19.2 has no choice
            return []
        return self.norms_on_device()

    def norms_on_device(self) -> list[Tensor]:
        """Compute them by DeepSpeed's method: one for each partition, at ZeRO 1 and 2 then that of all gradients."""
        raise NotImplementedError

    def norms_by_algorithm(self) -> dict[str, Tensor]:
        """Return the norms of Muon's and of AdamW's gradients, times the loss scale; inf where they are not finite.

        Empty where DeepSpeed has not computed them.
        """
        norms: dict[str, list[Tensor]] = {}
        for algorithm, norm in zip(self.algorithms(), self.memory.partition_norms, strict=False):
            norms.setdefault(algorithm, []).append(norm)
        return {algorithm: _combined(of_partitions) for algorithm, of_partitions in norms.items()}

    def is_true_of_any(self, flag: bool) -> bool:
        """Return whether a flag is set on any model-parallel rank, all of which must call this.

        With a single rank nothing waits for the device.
        """
        group = self.wrapper.model_parallel_group
        if group is None or dist.get_world_size(group) == 1:
            return flag
        reduced = torch.tensor([flag], dtype=torch.uint8, device=self.optimizer.exchange_buffers.device)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
        return bool(reduced.item())

    @contextlib.contextmanager
    def in_micro_step(self, *, first: bool) -> Iterator[None]:
        """Make DeepSpeed copy gradients as in the first micro-step, or add them as in later ones."""
        number = self.wrapper.micro_step_id
        self.wrapper.micro_step_id = 0 if first else max(1, number)  # DeepSpeed compares it with 0
        try:
            yield
        finally:
            self.wrapper.micro_step_id = number

    def is_undelivered(self, param: Tensor) -> bool:
        """Return whether an offloaded parameter's sum of gradients has not reached its master yet."""
        return self.wrapper.get_param_id(param) not in self.wrapper.norm_for_param_grads

    def fill_up(self) -> None:
        """Give what was not reduced in this step a gradient of zero, also in the gradients of offloaded masters."""
        raise NotImplementedError

    def forget_gradients(self) -> None:
        """Forget what was reduced, and what remains of a step that overflowed or raised."""
        self.memory.reduced.clear()
        if self.offloads:
            # Also the record of what has reached the gradients of the masters.
            self.wrapper.reset_cpu_buffers()

    def dynamic_scaler(self) -> Any:
        return self.wrapper.loss_scaler if self.wrapper.dynamic_loss_scale else None

    def replace_grad_scaler(self, *, autocast: bool) -> None:
        """Replace a ``GradScaler`` by a dynamic loss scale with the same start, growth and backoff.

        Args:
            autocast: Whether the engine uses ``torch_autocast``. Otherwise the scaler is left over from another engine
                of the process, and the loss scale remains the engine's own.
        """
        scaler, self.wrapper.torch_autocast_gradscaler = self.wrapper.torch_autocast_gradscaler, None
        if scaler is None or not autocast:
            return
        self.wrapper.dynamic_loss_scale = True
        self.wrapper.loss_scaler = DynamicLossScaler(
            init_scale=scaler.get_scale(),
            scale_window=scaler.get_growth_interval(),
            min_scale=1.0,
            delayed_shift=1,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=False,
            dtype=torch.float16,
        )


class Zero12View(FlatView, ZeroView):
    """ZeRO 1 and 2."""

    def __init__(self, wrapper: DeepSpeedZeroOptimizer) -> None:
        super().__init__(wrapper, wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups)
        self.flats, self.cut_flats = wrapper.bit16_groups_flat, wrapper.parallel_partitioned_bit16_groups
        self.offloads = self.keeps_gradients = bool(wrapper.cpu_offload)

    def norms_on_device(self) -> list[Tensor]:
        # The method of the class: that of the wrapper is replaced (step.global_norm) and would return what it computes.
        norm = type(self.wrapper).scaled_global_norm(self.wrapper)
        return [*self.memory.partition_norms, norm]

    def forget_gradients(self) -> None:
        super().forget_gradients()
        # fp32 sums of gradients in half precision.
        self.wrapper.averaged_gradients = dict.fromkeys(self.wrapper.averaged_gradients)

    def prepare(self) -> None:
        # In bf16 ZeRO 1 and 2 would not look for infinities and NaN, and update only some of the partitions.
        self.wrapper.check_grad_overflow = True

    def begin_backward(self) -> None:
        """Separate a backward pass from the last one: DeepSpeed does so in forward passes only."""
        if self.is_later_phase:
            self.wrapper.clear_backward_seen_flag()

    @property
    def is_later_phase(self) -> bool:
        """Whether the running backward pass has several phases, and one has ended (reentrant checkpointing).

        The next phase ends with the gradients of the whole pass.
        """
        return bool(self.wrapper._epilogue_ran_this_backward)

    def finished_gradients(self) -> dict[int, Any]:
        """Return the gradients of each partition that earlier backward passes left for the step."""
        return {index: grads for index, grads in self.wrapper.averaged_gradients.items() if grads is not None}

    def add_gradients(self, earlier: Mapping[int, Any]) -> None:
        """Add what :meth:`finished_gradients` returned before the backward pass, or the phase of it, that has ended."""
        for index, earlier_grads in earlier.items():
            grads = self.wrapper.averaged_gradients[index]
            if grads is not earlier_grads:  # else an fp32 buffer, which has the sum already
                for grad, earlier_grad in zip(grads, earlier_grads, strict=True):
                    grad.add_(earlier_grad)

    def delivered(self, param: Tensor) -> Tensor | None:
        """Return the sum of an offloaded parameter's gradients in this rank's gradient of its master.

        ``None`` before a backward pass has written it, and where DeepSpeed's own buffer has the sum.
        """
        wrapper = self.wrapper
        # DeepSpeed has it from 0.19.8 on.
        has_buffer = getattr(wrapper, "_use_compact_grad_partition_buffer", lambda group: False)
        if self.is_undelivered(param):
            return None
        # Number of the param group, offset in the parameter, offset in the partition, elements.
        group, _, offset, numel = wrapper.grad_position[wrapper.get_param_id(param)]
        if has_buffer(group):
            return None
        self.wait_for_copies()
        grad: Tensor = self.masters[group].grad
        return grad.view(-1).narrow(0, int(offset), int(numel))

    def add_delivered(self, param: Tensor, delivered: Tensor, earlier: Tensor) -> None:
        """Add earlier gradients to what :meth:`delivered` returned, and correct the norm that DeepSpeed keeps of it."""
        self.wait_for_copies()
        delivered.add_(earlier)
        norms, number = self.wrapper.norm_for_param_grads, self.wrapper.get_param_id(param)
        norms[number] = delivered.to(norms[number]).norm(2)

    @property
    def reduces_every_backward(self) -> bool:
        """Whether gradients are reduced and divided after every micro-step (stage 2), not after the last one."""
        return bool(self.wrapper.partition_gradients)

    @property
    def reduces_last_only(self) -> bool:
        """Whether only gradients that the last micro-step adds to are reduced (stage 1 with ``overlap_comm``)."""
        return bool(self.wrapper.overlap_comm) and not self.reduces_every_backward

    def has_gradient(self, param: Tensor) -> bool:
        """Return whether a parameter has a gradient that can be reduced."""
        return self.wrapper.get_gradient_for_reduction(param) is not None

    def fill_up(self) -> None:
        # With ignore_unused_parameters false DeepSpeed itself reports parameters that have no gradient.
        reduced, ignores_unused = self.memory.reduced, self.wrapper.ignore_unused_parameters
        if not self.in_last_micro_step:
            return
        for param in chain(*self.wrapper.params_in_partition):
            if (ignores_unused or id(param) in reduced) and self.is_undelivered(param):
                self.zero_gradient(param)
                self.wrapper.copy_grads_in_partition(param)
                setattr(param, "grad_accum" if self.wrapper.use_grad_accum_attribute else "grad", None)

    def zero_gradient(self, param: Any) -> None:
        """Give a parameter a gradient of zero, where DeepSpeed looks for it."""
        if self.wrapper.use_grad_accum_attribute:
            param.grad_accum = torch.zeros_like(param, dtype=self.wrapper.gradient_accumulation_dtype)
        else:
            param.grad = torch.zeros_like(param)

    def reduce(self, param: Tensor, group_number: int) -> None:
        """Reduce a gradient that DeepSpeed does not reduce by itself."""
        self.wrapper.reduce_independent_p_g_buckets_and_remove_grads(param, group_number)


class Zero3View(ZeroView):
    """ZeRO 3: every parameter is divided over the ranks, in partitions of several parameters (sub-groups)."""

    keeps_gradients = True

    def __init__(self, wrapper: DeepSpeedZeroOptimizer_Stage3) -> None:
        super().__init__(wrapper, wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat)
        self.offloads = bool(wrapper.offload_optimizer)
        self.swapper = wrapper.optimizer_swapper
        self.swap_folder = None if self.swapper is None else Path(self.swapper.swap_folder)

    def is_swapped(self, index: int) -> bool:
        """Return whether master and state of a sub-group are on NVMe between steps; small ones are not."""
        return bool(self.wrapper._swappable_optimizer_subgroup(index))

    def gradient(self, index: int) -> list[Tensor]:
        # One tensor, however many parameters there are. Masters of swapped sub-groups have a gradient in a step only.
        if self.is_swapped(index) or (not self.offloads and self.wrapper.averaged_gradients.get(index)):
            return [self.accumulated(index)]
        return super().gradient(index)

    def accumulated(self, index: int) -> Tensor:
        """Return the gradient of a sub-group in the buffer in which ZeRO accumulates those of all sub-groups."""
        numels = self.wrapper.fp16_partitioned_groups_flat_numel
        gradient: Tensor = self.wrapper.grad_partitions_flat_buffer.narrow(
            0, sum(numels[:index]), numels[index]
        )
        return gradient

    def norms_on_device(self) -> list[Tensor]:
        return list(type(self.wrapper)._get_norm_groups(self.wrapper))

    def look_for_overflow(self) -> None:
        """Set ``overflow`` of the wrapper. Must be called by all ranks."""
        self.wrapper.check_overflow()

    def group(self, index: int) -> dist.ProcessGroup | None:
        # Up to 0.19.2 one process group divides all sub-groups.
        of_sub_group = getattr(self.wrapper, "_get_sub_group_process_group", None)
        group: dist.ProcessGroup = of_sub_group(index) if of_sub_group else self.data_parallel_group
        return group

    def placements(self, index: int, ranks: int) -> Iterator[tuple[Tensor, Placement]]:
        offset = 0
        params: Any = self.params[index]  # with the attributes that ZeRO 3 gives them
        for param in params:
            if param.ds_numel:
                yield param, sharded_placement(offset, param.ds_numel, param.partition_numel())
            offset += param.partition_numel()

    def group_numbers(self) -> list[int]:
        return [int(self.wrapper.sub_group_to_group_id[index]) for index in range(len(self.params))]

    def refresh_weights(self) -> None:
        # Persistent parameters are divided before, and gathered again afterwards.
        self.wrapper.checkpoint_event_prologue()
        for index, master in enumerate(self.masters):
            weights = self.wrapper.fp16_partitioned_groups_flat[index]
            if master.numel() and weights is not None:
                weights.data.copy_(master.data)
                self.wrapper._unflatten_partitioned_parameters(index)
        self.end_of_load()

    def end_of_load(self) -> None:
        self.wrapper.checkpoint_event_epilogue()

    @property
    def module(self) -> Any:
        """The model."""
        return self.wrapper.parameter_offload.module

    def fill_up(self) -> None:
        reduced, delivers = self.memory.reduced, self.offloads and self.in_last_micro_step
        params = [
            param
            for param in chain(*self.params)
            if id(param) not in reduced or (delivers and self.is_undelivered(param))
        ]
        if not params:
            return
        accelerator, stream = get_accelerator(), self.wrapper.reduce_and_partition_stream
        device, dtype = accelerator.current_device_name(), self.wrapper.gradient_accumulation_dtype
        with accelerator.stream(stream):  # on which DeepSpeed reduces and looks for infinities
            zeros = [torch.zeros(p.partition_numel(), dtype=dtype, device=device) for p in params]  # type: ignore[attr-defined]
            self.wrapper.partition_grads(params, zeros)
        if not accelerator.resolves_data_dependency():
            stream.synchronize()


def norms_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norms of the gradients that have elements, one-dimensional, in one pass.

    The sums are in float64, as in DeepSpeed: the relative error is below 1e-9 even for 2^23 elements added one after
    another, which no reduction does, and only a norm above 1e154 overflows. DeepSpeed takes three operations for each
    gradient and writes a float64 copy.
    """
    # Of tensors without elements torch returns uninitialised norms on CUDA.
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return gradients[0].new_zeros(len(gradients), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(filled, dtype=torch.float64))


def _combined(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of tensors from their norms; DeepSpeed has replaced those that are not finite by -1."""
    stacked = torch.stack([norm.float() for norm in norms])
    is_finite = (torch.isfinite(stacked) & (stacked >= 0)).all()
    return torch.where(is_finite, torch.linalg.vector_norm(stacked), torch.inf)


WRAPPERS: dict[type, type[HalfView | Bf16View | Zero12View | Zero3View]] = {
    DeepSpeedZeroOptimizer_Stage3: Zero3View,
    DeepSpeedZeroOptimizer: Zero12View,
    BF16_Optimizer: Bf16View,
    FP16_UnfusedOptimizer: HalfView,
}


def read_by(view: type[View]) -> set[str]:
    """Return the names of the attributes that a view reads or calls of its wrapper, from its source."""
    source = "".join(inspect.getsource(kind) for kind in view.__mro__[:-1])
    # A second form has what some releases lack: getattr(self.wrapper, "name").
    return set(re.findall(r"\bwrapper(?:\.|, \")([a-z_]\w*)", source))


def view_of(wrapper: DeepSpeedOptimizer) -> View:
    """Return the view of what an engine has as its ``optimizer``.

    Raises:
        ConfigError: If it is of an unknown class.
    """
    if isinstance(wrapper, Muon):
        return PlainView(wrapper)
    if type(wrapper) not in WRAPPERS:  # a subclass may store everything differently
        names = ", ".join(wrapper_class.__name__ for wrapper_class in WRAPPERS)
        raise ConfigError(
            f"DeepSpeed wrapped the optimizer in {type(wrapper).__name__}, which deepspeed_muon does not know. Known "
            f"are {names}: remove the key of zero_optimization that asks for another one"
        )
    return WRAPPERS[type(wrapper)](wrapper)
