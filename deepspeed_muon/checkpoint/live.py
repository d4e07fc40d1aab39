"""The state of a running engine as checkpoints see it: :func:`collect` describes which rank has what of each parameter.

Nothing is copied or sent here. :class:`Host` is the engine around an optimizer: counters, schedule and loss scale.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from deepspeed_muon.checkpoint.index import COUNTERS, SCALE_KEYS, Progress, saved_schedule
from deepspeed_muon.checkpoint.parameters import ParameterRecord, PartitionedParameter
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import warn
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.layout import MatrixLayout, ParameterLayout
from deepspeed_muon.plan.placement import Fragment, TensorSlice, full_slice
from deepspeed_muon.routing.route import Route
from deepspeed_muon.step.int8 import SCALE_KEY, Int8Blocks, block_starts
from deepspeed_muon.step.step_set import BoundPartition


class ParameterInfo(NamedTuple):
    """What the engine knows of a trained parameter before any step.

    Attributes:
        record: Of the full tensor.
        tensor_slice: Which slice of the full tensor this rank's parameter is.
        route_reason: Why it goes to its algorithm.
    """

    record: ParameterRecord
    tensor_slice: TensorSlice
    route_reason: str


def describe_parameters(
    routes: Iterable[Route], slices: Mapping[str, TensorSlice | str]
) -> dict[str, ParameterInfo | str]:
    """Describe each trained parameter, by its name on this rank.

    Args:
        routes: Of the parameters.
        slices: By name, for parameters that are slices of a full tensor or have another name in it: the slice, or why
            it is unknown. The reason is returned in place of a description.
    """
    infos: dict[str, ParameterInfo | str] = {}
    for route in routes:
        tensor_slice = slices.get(route.name) or full_slice(route.name, route.shape)
        if isinstance(tensor_slice, str):
            infos[route.name] = tensor_slice
        elif route.algorithm != "frozen":
            # The index of the param group is known once ZeRO has made its groups; collect() sets it.
            full = replace(route, name=tensor_slice.name, shape=tensor_slice.shape)
            infos[route.name] = ParameterInfo(ParameterRecord.of(full, group=0), tensor_slice, route.reason)
    return infos


class Host:
    """The engine around an optimizer, which sets it as ``Muon.host`` when it binds the optimizer.

    Attributes:
        parameters: See :func:`describe_parameters`.
        step_thread: The thread that took the last step; ``None`` before the first one.
        is_swapped: Whether masters and momentum are on NVMe between steps.
        save_id: Random id of the running ``engine.save_checkpoint``, equal on all ranks; else ``None``.
    """

    def __init__(
        self, engine: Any, slices: Mapping[str, TensorSlice | str], view_of: Callable[[Any], Any]
    ) -> None:
        """Keep a weak reference to the engine: its optimizer refers to this object and must not keep it alive.

        Args:
            engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound.
            slices: See :func:`describe_parameters`.
            view_of: Returns the view of the ZeRO optimizer in ``engine.optimizer``.
        """
        self._engine_reference = weakref.ref(engine)
        self._view_of = view_of
        self.describe(engine.basic_optimizer.routes, slices)
        self.is_swapped = view_of(engine.optimizer).swap_folder is not None
        self.save_id: str | None = None
        self.step_thread: int | None = None
        self._interrupted_restore: str | None = None
        self._forward_guards: list[RemovableHandle] = []

    def describe(self, routes: Iterable[Route], slices: Mapping[str, TensorSlice | str]) -> None:
        """Describe the trained parameters; called again when some are unfrozen. See :func:`describe_parameters`."""
        self.parameters = describe_parameters(routes, slices)

    @property
    def engine(self) -> Any:
        """The engine."""
        engine = self._engine_reference()
        if engine is None:
            raise CheckpointError("the engine of this optimizer no longer exists")
        return engine

    @property
    def view(self) -> Any:
        """The view of the ZeRO optimizer in ``engine.optimizer``."""
        return self._view_of(self.engine.optimizer)

    def counters(self) -> dict[str, int]:
        """Return ``global_steps``, ``global_samples`` and ``skipped_steps`` of the engine."""
        return {key: int(getattr(self.engine, key)) for key in COUNTERS}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set the counters that :meth:`counters` returns."""
        for key, value in counters.items():
            setattr(self.engine, key, value)

    def set_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Continue a dynamic loss scale from a saved state; a static scale is left alone."""
        scaler = self.view.dynamic_scaler()
        for key in SCALE_KEYS:
            if scaler is not None and key in state and hasattr(scaler, key):
                setattr(scaler, key, state[key])

    def progress(self) -> Progress:
        """Return the engine's counters, schedule and loss scale."""
        scheduler = self.engine.lr_scheduler
        class_name = None if scheduler is None else type(scheduler).__name__
        state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
        schedule = saved_schedule(state)
        if schedule is None and state is not None:
            warn(
                "deepspeed_muon: the state of the scheduler %s is not JSON and is left out of the consolidated "
                "checkpoint; save scheduler.state_dict() yourself, and load it after restoring",
                class_name,
            )
        scaler = self.view.dynamic_scaler()
        values = {key: getattr(scaler, key, None) for key in SCALE_KEYS}
        loss_scale = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        return Progress.model_validate(
            {
                **self.counters(),
                "lr_scheduler": schedule,
                "lr_scheduler_class": class_name,
                "loss_scale": loss_scale or None,
            }
        )

    def begin_restore(self, source: str) -> None:
        """Make steps, saves and forward passes raise until :meth:`end_restore`; may be called again.

        Args:
            source: The checkpoint that is restored, for the error.
        """
        self._interrupted_restore = source
        # A pipeline engine runs its module without calling itself; evaluation code may call the module directly.
        for module in (self.engine, self.engine.module) if not self._forward_guards else ():
            guard = module.register_forward_pre_hook(lambda *_: self.require_restored(), prepend=True)
            self._forward_guards.append(guard)

    def end_restore(self) -> None:
        """Let the engine train again."""
        self._interrupted_restore = None
        while self._forward_guards:
            self._forward_guards.pop().remove()

    def require_restored(self) -> None:
        """Raise ``CheckpointError`` if a restore began and did not end."""
        if self._interrupted_restore is not None:
            raise CheckpointError(
                f"a restore from {self._interrupted_restore} was interrupted: weights and optimizer state mix two "
                f"states. Restore again, or create a new engine"
            )


def optimizer_of(engine: Any) -> Muon:
    """Return our optimizer inside an engine.

    Raises:
        CheckpointError: If the engine runs another optimizer, or is not initialized yet.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, Muon):
        raise CheckpointError(
            f"this engine's optimizer is {type(optimizer).__name__}, not deepspeed_muon.Muon: use DeepSpeed's own "
            f"checkpoints for it"
        )
    if optimizer.host is None:
        raise CheckpointError("the engine's optimizer holds no parameters")
    return optimizer


def host_of(optimizer: Muon) -> Host:
    """Return the engine around an optimizer that is bound to one."""
    return cast(Host, optimizer.host)


def require_all_ranks(engine: Any) -> None:
    """Raise where the ranks cannot save or restore together; on every rank, without any communication.

    Raises:
        CheckpointError: If the engine spans only some ranks of the program; if it offloads to NVMe; or if another
            thread takes its steps, whose collectives would interleave with those of the save.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    ranks = getattr(optimizer, "ranks", None)
    if ranks is not None and not ranks.are_all:
        raise CheckpointError(
            "this engine has some of the program's ranks only: a save needs all ranks of the default process group, as "
            "DeepSpeed's own save_checkpoint does, and the others would not take part; save module.state_dict() and "
            "optimizer.state_dict() of each rank instead"
        )
    host = getattr(optimizer, "host", None)
    if getattr(host, "is_swapped", False):
        raise CheckpointError(
            "consolidated sets and universal checkpoints with NVMe offload: masters and momentum are on NVMe, where "
            "such checkpoints are neither read from nor written to. engine.save_checkpoint and load_checkpoint resume "
            "the run on the same ranks; offload to device cpu to change them"
        )
    thread = getattr(host, "step_thread", None)
    if thread not in (None, threading.get_ident()):
        raise CheckpointError(
            "another thread takes the steps of this engine: save and restore in the thread that calls engine.step"
        )


@dataclass(frozen=True, slots=True)
class LiveParameter(PartitionedParameter):
    """One parameter of a running engine, with this rank's partition.

    Attributes:
        local_name: Its name on this rank.
        route_reason: Why it goes to its algorithm.
        local_partition: The partition that holds this rank's fragment.
        group_rank: This rank inside the data-parallel group.
        int8_blocks: The blocks of the partition's momentum if it is stored as int8, else ``None``.
    """

    local_name: str
    route_reason: str
    local_partition: BoundPartition
    group_rank: int
    int8_blocks: Int8Blocks | None = None

    def local_fragments(self, key: str) -> list[Fragment]:
        """Return this rank's fragments of the master (``fp32``) or of a state tensor."""
        return self.fragments_on(self.group_rank, key)

    def metadata(self) -> PartitionedParameter:
        """Return what is sent to other ranks: no tensors."""
        return PartitionedParameter(
            self.record,
            self.tensor_slice,
            self.placement,
            self.row_fragments,
            self.members,
            self.partition,
            self.block_starts,
        )


@dataclass(frozen=True, slots=True)
class LiveState:
    """Everything of an engine that a checkpoint holds.

    Attributes:
        optimizer: Our optimizer inside the engine.
        host: The engine around it.
        parameters: By name of the full tensor, in an order that all ranks with the same parameters share.
        device: Where the collectives' tensors must be.
    """

    optimizer: Muon
    host: Host
    parameters: dict[str, LiveParameter]
    device: torch.device

    @property
    def groups(self) -> list[list[LiveParameter]]:
        """The parameters of each data-parallel group that this rank belongs to."""
        groups: dict[int, list[LiveParameter]] = {}
        for parameter in self.parameters.values():
            # collect() shares one tuple among all parameters of a group.
            groups.setdefault(id(parameter.members), []).append(parameter)
        return list(groups.values())

    def flat_tensor(self, partition: BoundPartition, key: str) -> Tensor:
        """Return the master (``fp32``) or a state tensor of this rank's partition, flat in row-major order.

        A view, except for ``channels_last`` parameters of stage 0, of which it is a copy: see :meth:`write_back`.
        """
        return self._tensor(partition, key).reshape(-1)

    def elements(self, parameter: LiveParameter, key: str, offset: int, numel: int) -> Tensor:
        """Return ``numel`` elements of a parameter from an offset in its partition on; int8 momentum as fp32."""
        if key == "momentum_buffer" and parameter.int8_blocks is not None:
            state = self.optimizer.state[parameter.local_partition.tensor]
            return parameter.int8_blocks.decode(state[key].view(-1), state[SCALE_KEY], offset, numel)
        return self.flat_tensor(parameter.local_partition, key).narrow(0, offset, numel)

    def write_back(self, partition: BoundPartition, key: str, flat: Tensor) -> None:
        """Copy what was written into :meth:`flat_tensor` to the partition, if that was a copy."""
        tensor = self._tensor(partition, key)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    def _tensor(self, partition: BoundPartition, key: str) -> Tensor:
        tensor: Tensor = partition.tensor if key == "fp32" else self.optimizer.state[partition.tensor][key]
        return tensor.detach()


def collect(engine: Any) -> LiveState:
    """Describe what this rank holds of the engine's state, without copying or sending anything.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours.

    Raises:
        CheckpointError: If the engine runs another optimizer, two parameters share a name, or it is unknown which
            slice of a full tensor a parameter is.
    """
    optimizer = optimizer_of(engine)
    host = host_of(optimizer)
    group_numbers = host.view.group_numbers()
    shared_members: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object for each data-parallel group
    parameters: dict[str, LiveParameter] = {}
    for runner in optimizer.runners:
        step_set = runner.step_set
        # By index of the matrix; none for variants without row state.
        row_fragments: dict[int, list[Fragment]] = {}
        for origin, fragment in zip(runner.assignment.origin, runner.row_fragments, strict=False):
            row_fragments.setdefault(origin, []).append(fragment)
        # A step set without a process group is that of a single rank.
        members = (0,) if step_set.group is None else tuple(dist.get_process_group_ranks(step_set.group))
        members = shared_members.setdefault(members, members)
        partitions = {partition.index: partition for partition in step_set.partitions}
        layouts: tuple[MatrixLayout | ParameterLayout, ...] = (*step_set.matrices, *step_set.adamw_parameters)
        for index, layout in enumerate(layouts):
            info = host.parameters[layout.name]
            if isinstance(info, str):
                raise CheckpointError(
                    f"parameter {layout.name}: {info}. engine.save_checkpoint and load_checkpoint resume it at the "
                    f"same ranks"
                )
            partition = partitions[layout.partition]
            state = optimizer.state.get(partition.tensor, {})
            has_int8 = SCALE_KEY in state  # only matrices can
            parameter = LiveParameter(
                record=info.record.model_copy(update={"group": group_numbers[partition.index]}),
                tensor_slice=info.tensor_slice,
                placement=layout.placement,
                row_fragments=tuple(row_fragments.get(index, ())),
                members=members,
                partition=partition.index,
                block_starts=block_starts(layout) if has_int8 and isinstance(layout, MatrixLayout) else (),
                local_name=layout.name,
                route_reason=info.route_reason,
                local_partition=partition,
                group_rank=step_set.rank,
                int8_blocks=runner.blocks[partition.index] if has_int8 else None,
            ).with_state(state, int(state.get("step", 0)))
            # Two slices of one full tensor on one rank would have the same name.
            namesake = parameters.setdefault(parameter.name, parameter)
            if namesake is not parameter and namesake.local_name == parameter.local_name:
                raise CheckpointError(
                    f"two parameters are called {parameter.local_name}: pass model.named_parameters()"
                )
            if namesake is not parameter:
                raise CheckpointError(
                    f"{namesake.local_name} and {parameter.local_name} are both {parameter.name}"
                )
    if not parameters:
        raise CheckpointError("the engine's optimizer holds no parameters")
    return LiveState(optimizer, host, parameters, optimizer.runners[0].context.device)
