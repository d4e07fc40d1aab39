"""What a running engine holds: the master and optimizer state of every parameter, and which rank has which fragment."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from deepspeed_muon.checkpoint.index import COUNTERS, SCALE_KEYS, Progress, saved_schedule
from deepspeed_muon.checkpoint.parameters import HeldParameter, ParameterRecord
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import warn
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.layout import MatrixLayout, ParameterLayout
from deepspeed_muon.plan.placement import Fragment, TensorSlice, whole_slice
from deepspeed_muon.routing.route import Route
from deepspeed_muon.step.quantized import SCALE_KEY, MomentumBlocks
from deepspeed_muon.step.step_set import BoundPartition

SOME_RANKS = (
    "the ranks of a save agree over the default process group, whose other ranks would not come, as in DeepSpeed's own "
    "save_checkpoint; save module.state_dict() and optimizer.state_dict() of each rank instead"
)

ON_NVME = (
    "masters and momentum are on the disk, where consolidated sets and universal checkpoints are neither read from nor "
    "written to. engine.save_checkpoint and load_checkpoint resume the run on the same ranks; offload to device cpu to "
    "change them"
)


class Host:
    """The engine around an optimizer. The engine sets it as ``Muon.host`` when it binds the optimizer.

    Attributes:
        described: See :func:`described`.
        step_thread: The thread that took the last step; ``None`` before the first one.
        is_swapped: Whether masters and momentum are on NVMe between two steps.
        save_id: Random id of the save that ``engine.save_checkpoint`` is writing, equal on all ranks; else ``None``.
    """

    def __init__(
        self, engine: Any, parts: Mapping[str, TensorSlice | str], view_of: Callable[[Any], Any]
    ) -> None:
        """Refer to the engine weakly, because its optimizer refers to this and must not keep the engine alive.

        Args:
            engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound.
            parts: See :func:`described`.
            view_of: Returns the view of what the engine has as its ``optimizer``.
        """
        self._reference = weakref.ref(engine)
        self._view_of = view_of
        self.describe(engine.basic_optimizer.routes, parts)
        self.is_swapped = view_of(engine.optimizer).swap_folder is not None
        self.save_id: str | None = None
        self.step_thread: int | None = None
        self._restoring: str | None = None
        self._guards: list[RemovableHandle] = []

    def describe(self, routes: Iterable[Route], parts: Mapping[str, TensorSlice | str]) -> None:
        """Describe the trained parameters, also once more when there are others; see :func:`described`."""
        self.described = described(routes, parts)

    @property
    def engine(self) -> Any:
        """The engine."""
        engine = self._reference()
        if engine is None:
            raise CheckpointError("the engine of this optimizer is gone")
        return engine

    @property
    def view(self) -> Any:
        """The view of what the engine has as its ``optimizer``."""
        return self._view_of(self.engine.optimizer)

    def counters(self) -> dict[str, int]:
        """Return ``global_steps``, ``global_samples`` and ``skipped_steps``."""
        return {key: int(getattr(self.engine, key)) for key in COUNTERS}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set the counters that :meth:`counters` returns."""
        for key, value in counters.items():
            setattr(self.engine, key, value)

    def set_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Let a dynamic loss scale continue from a saved one; others are left alone."""
        scaler = self.view.dynamic_scaler()
        for key in SCALE_KEYS:
            if scaler is not None and key in state and hasattr(scaler, key):
                setattr(scaler, key, state[key])

    def progress(self) -> Progress:
        """Return the engine's counters, schedule and loss scale."""
        scheduler = self.engine.lr_scheduler
        named = None if scheduler is None else type(scheduler).__name__
        state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
        schedule = saved_schedule(state)
        if schedule is None and state is not None:
            warn(
                "deepspeed_muon: the state of the scheduler %s is not JSON and is left out of the consolidated "
                "checkpoint; save scheduler.state_dict() yourself, and load it after restoring",
                named,
            )
        scaler = self.view.dynamic_scaler()
        values = {key: getattr(scaler, key, None) for key in SCALE_KEYS}
        scale = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        found = {"lr_scheduler": schedule, "lr_scheduler_class": named, "loss_scale": scale or None}
        return Progress.model_validate({**self.counters(), **found})

    def begin_restore(self, where: str) -> None:
        """Let steps, saves and forward passes raise from now on, until :meth:`end_restore`; may be called again."""
        self._restoring = where
        # A pipeline engine calls its module without calling itself; programs that evaluate may call the module too.
        for module in (self.engine, self.engine.module) if not self._guards else ():
            guard = module.register_forward_pre_hook(lambda *_: self.require_restored(), prepend=True)
            self._guards.append(guard)

    def end_restore(self) -> None:
        """Let the engine train again."""
        self._restoring = None
        while self._guards:
            self._guards.pop().remove()

    def require_restored(self) -> None:
        """Raise ``CheckpointError`` if a restore began and did not end."""
        if self._restoring is not None:
            raise CheckpointError(
                f"a restore from {self._restoring} was interrupted: weights and optimizer state mix two states. "
                f"Restore again, or create a new engine"
            )


def described(
    routes: Iterable[Route], parts: Mapping[str, TensorSlice | str]
) -> dict[str, tuple[ParameterRecord, TensorSlice, str] | str]:
    """Return each trained parameter's record before any step, the part of it on this rank, and the reason of its route.

    Args:
        routes: Of the parameters.
        parts: Name of each that is a part of a whole tensor, or has another name there, to that part; or to the reason
            why it is not known, which is returned.
    """
    found: dict[str, tuple[ParameterRecord, TensorSlice, str] | str] = {}
    for route in routes:
        part = parts.get(route.name) or whole_slice(route.name, route.shape)
        if isinstance(part, str):
            found[route.name] = part
        elif route.algorithm != "frozen":
            whole = replace(route, name=part.name, shape=part.shape)
            found[route.name] = ParameterRecord.of(whole, group=0), part, route.reason
    return found


def optimizer_of(engine: Any) -> Muon:
    """Return our optimizer inside an engine.

    Raises:
        CheckpointError: If the engine runs another optimizer, or is not made yet.
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


def require_all_ranks(engine: Any) -> None:
    """Raise on every rank, without waiting for others, where the ranks cannot save or restore together.

    Raises:
        CheckpointError: If the engine does not have all ranks of the program, or another thread takes its steps: its
            collectives and those of the save would meet in another order on each rank. Or if they offload to NVMe.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    ranks = getattr(optimizer, "ranks", None)
    if ranks is not None and not ranks.are_all:
        raise CheckpointError(f"this engine has some of the program's ranks only: {SOME_RANKS}")
    host = getattr(optimizer, "host", None)
    if getattr(host, "is_swapped", False):
        raise CheckpointError(f"consolidated sets and universal checkpoints with NVMe offload: {ON_NVME}")
    thread = getattr(host, "step_thread", None)
    if thread not in (None, threading.get_ident()):
        raise CheckpointError(
            "another thread takes the steps of this engine: save and restore in the thread that calls engine.step"
        )


@dataclass(frozen=True, slots=True)
class LiveParameter(HeldParameter):
    """One parameter of a running engine, with this rank's partition.

    Attributes:
        own_name: Its name on this rank.
        reason: Why it has its algorithm.
        bound: The partition that holds this rank's fragments.
        rank: This rank inside the group.
        coded: The blocks of a momentum in 8 bits and the number of the matrix among them; ``None`` of any other.
    """

    own_name: str
    reason: str
    bound: BoundPartition
    rank: int
    coded: tuple[MomentumBlocks, int] | None = None

    def local_fragments(self, key: str) -> list[Fragment]:
        """Return this rank's fragments of the master or of an entry of the state."""
        return self.fragments(key, self.rank)

    def without_tensors(self) -> HeldParameter:
        """Return what is sent to the other ranks."""
        return HeldParameter(
            self.record, self.part, self.placement, self.row_fragments, self.holders, self.partition
        )


@dataclass(frozen=True, slots=True)
class LiveState:
    """Everything of an engine that a checkpoint holds.

    Attributes:
        optimizer: Our optimizer inside the engine.
        host: The engine around it.
        parameters: By the names of the whole tensors, in an order that all ranks with the same parameters share.
        device: Where the backend of the ranks can send from.
    """

    optimizer: Muon
    host: Host
    parameters: dict[str, LiveParameter]
    device: torch.device

    @property
    def groups(self) -> list[list[LiveParameter]]:
        """The parameters of each data-parallel group that this rank is in."""
        found: dict[int, list[LiveParameter]] = {}
        for parameter in self.parameters.values():
            found.setdefault(id(parameter.holders), []).append(parameter)
        return list(found.values())

    def tensor(self, partition: BoundPartition, key: str) -> Tensor:
        """Return the master (``fp32``) or an entry of the state of this rank's partition, flat in row-major order.

        It shares memory, but for whole parameters of stage 0 with other strides (``channels_last``): those are copied.
        """
        return self._own(partition, key).reshape(-1)

    def elements(self, parameter: LiveParameter, key: str, start: int, numel: int) -> Tensor:
        """Return elements of :meth:`tensor` that are a parameter's; those of a momentum in 8 bits in fp32."""
        if key == "momentum_buffer" and parameter.coded is not None:
            blocks, number = parameter.coded
            return blocks.elements(number, self.optimizer.state[parameter.bound.tensor], start, numel)
        return self.tensor(parameter.bound, key).narrow(0, start, numel)

    def keep(self, partition: BoundPartition, key: str, flat: Tensor) -> None:
        """Take over what was written into :meth:`tensor`, where that is a copy."""
        own = self._own(partition, key)
        if not own.is_contiguous():
            own.copy_(flat.view(own.shape))

    def _own(self, partition: BoundPartition, key: str) -> Tensor:
        own: Tensor = partition.tensor if key == "fp32" else self.optimizer.state[partition.tensor][key]
        return own.detach()


def collect(engine: Any) -> LiveState:
    """Describe what this rank holds of the engine's state, without copying or sending anything.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours.

    Raises:
        CheckpointError: If the engine runs another optimizer, two parameters have one name, or it is not known
            which part of a whole tensor one of them is.
    """
    optimizer = optimizer_of(engine)
    host: Host = optimizer.host
    groups = host.view.group_numbers()
    members: dict[tuple[int, ...], tuple[int, ...]] = {}
    parameters: dict[str, LiveParameter] = {}
    for runner in optimizer.runners:
        step_set = runner.step_set
        rows: dict[int, list[Fragment]] = {}
        for origin, fragment in zip(runner.assignment.origin, runner.row_fragments, strict=False):
            rows.setdefault(origin, []).append(fragment)
        ranks = (0,) if step_set.group is None else tuple(dist.get_process_group_ranks(step_set.group))
        ranks = members.setdefault(ranks, ranks)
        partitions = {partition.index: partition for partition in step_set.partitions}
        layouts: tuple[MatrixLayout | ParameterLayout, ...] = (*step_set.matrices, *step_set.others)
        for number, layout in enumerate(layouts):
            bound = partitions[layout.partition]
            known = host.described[layout.name]
            if isinstance(known, str):
                raise CheckpointError(
                    f"parameter {layout.name}: {known}. engine.save_checkpoint and load_checkpoint resume it at the "
                    f"same ranks"
                )
            record, part, reason = known
            state = optimizer.state.get(bound.tensor, {})
            record = record.model_copy(update={"group": groups[bound.index]})
            place = layout.placement, tuple(rows.get(number, ())), ranks, bound.index
            coded = (runner.blocks, number) if SCALE_KEY in state else None
            found = LiveParameter(
                record, part, *place, layout.name, reason, bound, step_set.rank, coded
            ).with_state(state, int(state.get("step", 0)))
            if (other := parameters.setdefault(found.name, found)) is not found:
                if other.own_name == found.own_name:
                    raise CheckpointError(
                        f"two parameters are called {found.own_name}: pass model.named_parameters()"
                    )
                raise CheckpointError(f"{other.own_name} and {found.own_name} are both {found.name}")
    if not parameters:
        raise CheckpointError("the engine's optimizer holds no parameters")
    return LiveState(optimizer, host, parameters, optimizer.runners[0].context.device)
