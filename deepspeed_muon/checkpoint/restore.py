"""Load full parameters and optimizer state into a running engine, at any ZeRO stage and on any number of ranks.

First all ranks check together everything that can be wrong. Only then do they change anything: the settings, which are
put back if one rank cannot set them, and then the partitions, which each rank fills with its own fragments.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.files import folder_of, refusing
from deepspeed_muon.checkpoint.index import OURS, STATE_KEYS, ParameterRecord, Progress
from deepspeed_muon.checkpoint.parameters import LiveParameter, LiveState, collect, require_all_ranks
from deepspeed_muon.checkpoint.settings import (
    SettingsSnapshot,
    check_schedule,
    group_settings,
    write_progress,
)
from deepspeed_muon.checkpoint.sources import ConsolidatedSource, StateSource, find_consolidated
from deepspeed_muon.errors import CheckpointError, MuonError
from deepspeed_muon.logs import listed, warn
from deepspeed_muon.step.int8 import SCALE_KEY
from deepspeed_muon.transport.agreement import raise_on_all_ranks
from deepspeed_muon.transport.ranks import all_ranks
from deepspeed_muon.variants import ROW_STATE, VARIANTS


def restore(
    engine: Any,
    folder: str | os.PathLike[str],
    *,
    hyperparameters: bool = True,
    progress: bool = True,
    scheduler: bool = True,
    allow_nonfinite: bool = False,
) -> Path:
    """Continue from a consolidated checkpoint, at any ZeRO stage and on any number of ranks.

    Must be called by all ranks, before or between steps. Masters, momentum and moments become exactly what was saved,
    and the weights of the forward pass their rounding. Everything is checked before anything is changed.

    Args:
        engine: A ``DeepSpeedEngine`` with our optimizer. Mutated.
        folder: A consolidated checkpoint, or a DeepSpeed checkpoint (its folder or its tag's folder) that was saved
            with ``consolidate_on_save``.
        hyperparameters: Take rates and other settings of the param groups from the checkpoint, as
            ``engine.load_checkpoint`` does. If unset, those of the configuration are kept, and the schedule continues
            with them from the saved count. They are always kept if the set was converted from another optimizer.
        progress: Restore step counters, scheduler and loss scale too.
        scheduler: With ``progress``, restore the scheduler too. Unset it to continue with another schedule.
        allow_nonfinite: Also restore a state that holds infinities or NaN.

    Returns:
        The folder that was read.

    Raises:
        CheckpointError: On every rank, naming file and parameter, if the checkpoint is damaged, incomplete, refused
            or of another model, or its schedule is of another kind. The engine is unchanged then.
    """
    source, before = restore_from_source(
        engine,
        lambda: ConsolidatedSource(find_consolidated(folder_of("folder", folder))),
        repr(folder),
        hyperparameters=hyperparameters,
        progress=progress,
        scheduler=scheduler,
        allow_nonfinite=allow_nonfinite,
    )
    before.warn_of_replaced(source.where, "call deepspeed_muon.restore with hyperparameters=False")
    return Path(source.where)


def restore_from_source(
    engine: Any,
    open_source: Callable[[], StateSource],
    where: str,
    *,
    hyperparameters: bool = True,
    progress: bool = True,
    scheduler: bool = True,
    with_state: bool = True,
    allow_nonfinite: bool = False,
) -> tuple[StateSource, SettingsSnapshot]:
    """Check a source against the engine on all ranks, then fill the engine from it. Must be called by all ranks.

    Args:
        engine: A ``DeepSpeedEngine`` with our optimizer. Mutated.
        open_source: Opens the source, or raises; every rank opens the same one.
        where: What it opens, for errors.
        hyperparameters: See :func:`restore`.
        progress: See :func:`restore`.
        scheduler: See :func:`restore`.
        with_state: Load momentum and moments, not the masters alone.
        allow_nonfinite: See :func:`restore`.

    Returns:
        The source, closed, and the settings of the engine as they were before.

    Raises:
        CheckpointError: See :func:`restore`.
    """
    require_all_ranks(engine)
    nonfinite: list[str] = []
    with contextlib.ExitStack() as stack:
        # 1. Check, and allocate what is missing. All ranks raise if one does, or if they read different checkpoints.
        with raise_on_all_ranks(CheckpointError) as facts, refusing(where):
            source = open_source()
            stack.callback(source.close)
            before, state = SettingsSnapshot(engine), collect(engine)
            # The settings of another optimizer do not apply to this run.
            take_rates = hyperparameters and source.index.source.get("optimizer") == OURS
            run = source.index.progress if progress else None
            # Raised below, together with the parameters that no rank has.
            problems = _compare_parameters(state, source, with_state)
            if not problems:
                plan = _RestorePlan.of(state, source, hyperparameters=take_rates, with_state=with_state)
                if run is not None and scheduler:
                    check_schedule(engine.lr_scheduler, run, source.where, rates=take_rates)
                nonfinite = source.verify(all_ranks().position, all_ranks().size)
            # A folder on a local disk may hold another checkpoint on each machine.
            digest = hashlib.sha256(source.index.model_dump_json().encode()).hexdigest()
            facts.record("checkpoint", digest)
        _refuse_another_model(state, source, problems)
        _refuse_nonfinite(nonfinite, source, allow_nonfinite)
        # 2. Change the engine: settings, then partitions.
        _write_settings(plan, before, run, source.where, scheduler=scheduler, rates=take_rates)
        _write_state(plan, source)
        state.host.end_restore()
    return source, before


# ---- the checks --------------------------------------------------------------------------------------------


def _compare_parameters(state: LiveState, source: StateSource, with_state: bool) -> list[str]:
    """Return in words how the parameters of this rank differ from the checkpoint's."""
    records = source.parameters
    problems: list[str] = []
    unmatched = [name for name in records if name not in state.parameters]
    for name, parameter in state.parameters.items():
        if name in records:
            problems += _differences(parameter, records[name], with_state)
            continue
        shape = parameter.tensor_slice.shape
        same_shape = next((saved for saved in unmatched if records[saved].shape == shape), None)
        hint = f"renamed? it has {same_shape} of the same shape" if same_shape else None
        problems.append(
            f"parameter {name} is not in the checkpoint ({hint or 'it was frozen, or not in the model'})"
        )
    return problems


def _differences(parameter: LiveParameter, saved: ParameterRecord, with_state: bool) -> Iterator[str]:
    live, name, file = parameter.record, parameter.name, saved.tensors["fp32"]
    if saved.shape != live.shape:
        yield f"parameter {name} has shape {list(live.shape)}, in the checkpoint {list(saved.shape)} ({file})"
    elif with_state and saved.algorithm != live.algorithm:
        yield (
            f"parameter {name} goes to {live.algorithm} ({parameter.route_reason}), in the checkpoint to "
            f"{saved.algorithm} ({file}); set include / exclude in optimizer.params as the saved run did, or "
            f"convert it again with --include / --exclude"
        )
    elif with_state and saved.rows and parameter.row_fragments:
        rows = parameter.slice_of(saved.row_keys[0]).length
        if saved.rows != rows:
            yield (
                f"parameter {name} has {rows} numbers in {saved.row_keys[0]}, in the checkpoint {saved.rows} "
                f"({file}): it was divided into other blocks"
            )


def _refuse_another_model(state: LiveState, source: StateSource, problems: Sequence[str]) -> None:
    """Raise on every rank if one has ``problems``, or if no rank has some parameter of the checkpoint.

    Must be called by all ranks.
    """
    names = sorted(source.parameters)
    # With pipeline or expert parallelism no rank has all parameters, but every parameter must be on some rank.
    is_live = [float(name in state.parameters) for name in names]
    is_live = all_ranks().all_reduce(is_live, "max", purpose="check of a checkpoint")
    reason = "is in the checkpoint, but not in the optimizer (it is frozen, or not in the model)"
    problems = [
        *problems,
        *(f"parameter {name} {reason}" for name, live in zip(names, is_live, strict=True) if not live),
    ]
    with raise_on_all_ranks(CheckpointError):
        if problems:
            raise CheckpointError(
                f"{source.where} is not a checkpoint of this model:\n{first_lines(problems)}\n"
                f"Make the model as the saved run did, or load the weights alone (fp32/NAME in the files of a set) "
                f"into the model before deepspeed.initialize"
            )


def first_lines(lines: Collection[str]) -> str:
    """Return the first lines of an error, sorted, and how many more there are."""
    return "\n".join(sorted(lines)[:20]) + (f"\nand {len(lines) - 20} more" if len(lines) > 20 else "")


def _refuse_nonfinite(nonfinite: Sequence[str], source: StateSource, allow: bool) -> None:
    """Raise on every rank, or warn if it is allowed, if tensors that any rank verified hold infinities or NaN."""
    names_by_rank = all_ranks().all_gather(nonfinite, purpose="check of a checkpoint")
    names = sorted(chain.from_iterable(names_by_rank.values()))
    if not names:
        return
    text = f"{source.where}: {nonfinite_text(names)}"
    # All ranks have the same names, so all of them raise or none does.
    if not allow:
        raise CheckpointError(
            f"{text}. Restore an earlier checkpoint; or, to look into this one, consolidate it and call "
            f"restore(..., allow_nonfinite=True)"
        )
    warn("deepspeed_muon: %s", text)


def nonfinite_text(names: Sequence[str]) -> str:
    """Return the message about tensors that hold an infinity or NaN."""
    return f"{len(names)} tensors hold an infinity or NaN: {listed(names, 10)}: the run had diverged when it was saved"


# ---- the plan ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _RestorePlan:
    """What a restore will write. All that can fail is done: checks, look-ups and allocations.

    Attributes:
        state: Of the engine.
        writes: Parameter, key and the flat tensor of this rank's partition to write to.
        new_tensors: By partition and key: tensors that the optimizer's state does not have yet.
        steps: Step count by partition; empty if only masters are restored.
        settings: New settings by param group.
    """

    state: LiveState
    writes: list[tuple[LiveParameter, str, Tensor]]
    new_tensors: dict[int, dict[str, Tensor]]
    steps: dict[int, int]
    settings: dict[int, dict[str, Any]]

    @classmethod
    def of(
        cls, state: LiveState, source: StateSource, *, hyperparameters: bool, with_state: bool
    ) -> _RestorePlan:
        """Make the plan; the engine is not changed."""
        plan = cls(state, [], {}, _steps_by_partition(state, source) if with_state else {}, {})
        row_keys = _row_keys(state)
        if with_state:
            _warn_of_another_variant(state, source)
        for parameter in state.parameters.values():
            keys: tuple[str, ...] = ("fp32",)
            if plan.steps.get(parameter.partition):
                keys += STATE_KEYS[parameter.record.algorithm]
                keys += row_keys if parameter.row_fragments else ()
            for key in keys:
                flat = plan._flat_tensor(parameter, key)
                ends = (f.partition_offset + f.numel for f in parameter.local_fragments(key))
                if max(ends, default=0) > flat.numel():
                    raise CheckpointError(
                        f"parameter {parameter.name}: this rank's {key} is not in memory (it has {flat.numel()} "
                        f"elements): consolidated sets and universal checkpoints cannot be restored with NVMe offload"
                    )
                plan.writes.append((parameter, key, flat))
        if hyperparameters:
            plan.settings = group_settings(state, source.index, source.where)
        return plan

    def _flat_tensor(self, parameter: LiveParameter, key: str) -> Tensor:
        """Return the flat tensor to write to: the engine's, or a new one that it will get."""
        partition, policy = parameter.local_partition, self.state.optimizer.state_policy
        dtype = policy.dtype(key, partition.tensor.dtype)
        if key == "momentum_buffer" and (parameter.int8_blocks or dtype == torch.int8):
            dtype = torch.float32  # quantized once all of it has been read
        elif key == "fp32" or key in self.state.optimizer.state.get(partition.tensor, {}):
            return self.state.flat_tensor(partition, key)
        new_tensors = self.new_tensors.setdefault(partition.index, {})
        if key not in new_tensors and key in ROW_STATE:
            # One tensor for all matrices of the partition: (rows that this rank stores,).
            parameters = (p for p in self.state.parameters.values() if p.partition == partition.index)
            numel = sum(rows.numel for p in parameters for rows in p.local_fragments(key))
            new_tensors[key] = torch.empty(numel, dtype=ROW_STATE[key].dtype, device=partition.tensor.device)
        elif key not in new_tensors:
            new_tensors[key] = policy.make(key, partition.tensor).to(dtype)
        return new_tensors[key].view(-1)


def _steps_by_partition(state: LiveState, source: StateSource) -> dict[int, int]:
    """Return the step count of every partition. Its parameters share one, which Adam's bias correction uses."""
    saved_steps: dict[int, set[int]] = {}
    for parameter in state.parameters.values():
        saved_steps.setdefault(parameter.partition, set()).add(source.parameters[parameter.name].step)
    for partition, steps in saved_steps.items():
        if len(steps) > 1:
            warn(
                "deepspeed_muon: parameters that share partition %d now had taken %s steps; %d is used for all of them",
                partition,
                sorted(steps),
                max(steps),
            )
    return {partition: max(steps) for partition, steps in saved_steps.items()}


def _row_keys(state: LiveState) -> tuple[str, ...]:
    """Return the keys of the per-row state of this run's variant."""
    return tuple(row_state.key for row_state in VARIANTS[state.optimizer.config.variant].state)


def _warn_of_another_variant(state: LiveState, source: StateSource) -> None:
    """Warn if per-row state is reset or dropped because the saved run had another variant."""
    pairs = [(parameter, source.parameters[parameter.name]) for parameter in state.parameters.values()]
    changes = []
    for key, row_state in ROW_STATE.items():
        is_used = key in _row_keys(state)
        without = [
            parameter.name
            for parameter, saved in pairs
            if is_used and parameter.row_fragments and saved.step and key not in saved.tensor_keys
        ]
        if without:
            changes.append(f"{row_state.label} start anew for {len(without)} matrices ({without[0]}, ...)")
        if not is_used and any(key in saved.row_keys for _, saved in pairs):
            changes.append(f"{row_state.label} are dropped")
    if changes:
        warn(
            "deepspeed_muon: %s was saved with another variant than %r: %s",
            source.where,
            state.optimizer.config.variant,
            "; ".join(changes),
        )


# ---- the writes --------------------------------------------------------------------------------------------


def _write_settings(
    plan: _RestorePlan,
    before: SettingsSnapshot,
    run: Progress | None,
    where: str,
    *,
    scheduler: bool,
    rates: bool,
) -> None:
    """Set progress and param groups, or nothing: all ranks raise if one cannot. Must be called by all ranks.

    ``scheduler`` and ``rates`` are those of :func:`write_progress`.
    """
    try:
        with raise_on_all_ranks(CheckpointError):
            if run is not None:
                write_progress(plan.state.optimizer, run, where, scheduler=scheduler, rates=rates)
            for number, settings in plan.settings.items():
                plan.state.optimizer.param_groups[number].update(settings)
    except MuonError:
        before.put_back()
        raise
    except BaseException:
        plan.state.host.begin_restore(where)  # interrupted: the settings mix two states
        raise


@torch.no_grad()
def _write_state(plan: _RestorePlan, source: StateSource) -> None:
    """Fill this rank's partitions from the source. Must be called by all ranks.

    After the checks only the disk can fail, or an interrupt happen. Every rank raises then, and the engine refuses to
    continue until a restore has ended.
    """
    state = plan.state
    interrupt: BaseException | None = None
    state.host.begin_restore(source.where)
    # 1. Masters and state, into the engine's tensors or new ones.
    try:
        with raise_on_all_ranks(CheckpointError):
            try:
                _write_partitions(plan, source)
            except BaseException as caught:
                interrupt = None if isinstance(caught, Exception) else caught
                raise CheckpointError(
                    f"{source.where} passed all checks, but could not be read to the end: {caught!r}. The engine is "
                    f"partly restored: call restore again, or initialize a new engine"
                ) from caught
    except CheckpointError:
        if interrupt is not None:
            # An interrupt of this rank: the other ranks raise the CheckpointError.
            raise interrupt from None
        raise
    # 2. New tensors and step counts, into the optimizer's state.
    tensors = {p.partition: p.local_partition.tensor for p in state.parameters.values()}
    for partition, steps in plan.steps.items():
        partition_state = state.optimizer.state[tensors[partition]]
        new_tensors = plan.new_tensors.get(partition, {})
        if "momentum_buffer" in new_tensors:
            # The new momentum is fp32 until step 3 quantizes it, so the scales of the old one do not apply.
            partition_state.pop(SCALE_KEY, None)
        partition_state.update(new_tensors, step=steps)
        # As in a new engine, whose optimizer has no state before its first step.
        if not steps:
            partition_state.clear()
    # 3. int8 momentum, and the weights of the forward pass.
    if state.optimizer.state_policy.quantizes_momentum:
        for runner in state.optimizer.runners:
            runner.convert_momentum(state.optimizer.state)
    state.host.view.refresh_weights()


def _write_partitions(plan: _RestorePlan, source: StateSource) -> None:
    for parameter, key, flat in plan.writes:
        for fragment in parameter.local_fragments(key):
            if key in source.parameters[parameter.name].tensor_keys:
                source.read_fragment(parameter.slice_of(key), key, fragment, flat)
            else:
                # State that the saved run did not have, such as that of another variant.
                start = ROW_STATE[key].start if key in ROW_STATE else 0.0
                flat.narrow(0, fragment.partition_offset, fragment.numel).fill_(start)
        if key not in plan.new_tensors.get(parameter.partition, ()):
            plan.state.write_back(parameter.local_partition, key, flat)
