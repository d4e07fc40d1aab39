"""Load full parameters and state into a running engine, whatever its ZeRO stage and number of ranks.

All ranks first check together everything that can be wrong. Only then do they change anything: first the settings,
which are put back if one rank cannot set them, then the partitions.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.files import folder_of, refusing
from deepspeed_muon.checkpoint.index import OURS, Progress
from deepspeed_muon.checkpoint.live import LiveParameter, LiveState, collect, require_all_ranks
from deepspeed_muon.checkpoint.parameters import STATE_KEYS, ParameterRecord
from deepspeed_muon.checkpoint.settings import Before, check_schedule, group_settings, write_progress
from deepspeed_muon.checkpoint.sources import ConsolidatedSource, StateSource, find_consolidated
from deepspeed_muon.errors import CheckpointError, MuonError
from deepspeed_muon.logs import listed, warn
from deepspeed_muon.step.quantized import SCALE_KEY
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
        engine: A ``DeepSpeedEngine`` with our optimizer.
        folder: A consolidated checkpoint, or a DeepSpeed checkpoint (its folder or its tag's folder) that was saved
            with ``consolidate_on_save``.
        hyperparameters: Take rates and other settings of the param groups from the checkpoint, as
            ``engine.load_checkpoint`` does; otherwise those of the configuration are kept, and the schedule goes on
            with them from the saved count. They are always kept if the set was converted from another optimizer.
        progress: Restore step counters, scheduler and loss scale too.
        scheduler: With ``progress``, restore the scheduler too. Unset it to go on with another schedule.
        allow_nonfinite: Restore a state that holds infinities or NaN, too.

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
    state_too: bool = True,
    allow_nonfinite: bool = False,
) -> tuple[StateSource, Before]:
    """Check a source against the engine on all ranks, then fill the engine from it. Must be called by all ranks.

    Args:
        engine: A ``DeepSpeedEngine`` with our optimizer.
        open_source: Returns where to read from, or raises; on every rank the same.
        where: What it opens, for errors.
        hyperparameters: See :func:`restore`.
        progress: See :func:`restore`.
        scheduler: See :func:`restore`.
        state_too: Load momentum and moments, not the masters alone.
        allow_nonfinite: See :func:`restore`.

    Returns:
        The source, closed, and the settings of the engine as they were.

    Raises:
        CheckpointError: See :func:`restore`.
    """
    require_all_ranks(engine)
    nonfinite: list[str] = []
    with contextlib.ExitStack() as opened:
        with raise_on_all_ranks(CheckpointError) as agreed, refusing(where):
            source = open_source()
            opened.callback(source.close)
            before, state = Before(engine), collect(engine)
            # Those of another optimizer are no concern of the run.
            rates = hyperparameters and source.index.source.get("optimizer") == OURS
            run = source.index.progress if progress else None
            problems = _compare(state, source, state_too)
            if not problems:
                plan = _Plan.of(state, source, hyperparameters=rates, state_too=state_too)
                if run is not None and scheduler:
                    check_schedule(engine.lr_scheduler, run, source.where, rates=rates)
                nonfinite = source.verify(all_ranks().position, all_ranks().size)
            agreed.tell("checkpoint", hashlib.sha256(source.index.model_dump_json().encode()).hexdigest())
        _refuse_another_model(state, source, problems)
        _judge(nonfinite, source, allow_nonfinite)
        _write_settings(plan, before, run, source.where, scheduler=scheduler, rates=rates)
        _fill(plan, source)
        state.host.end_restore()
    return source, before


def _judge(nonfinite: list[str], source: StateSource, allowed: bool) -> None:
    """Raise on every rank, or warn if it is ``allowed``, if tensors that any rank looked at hold infinities or NaN."""
    found = all_ranks().gather(nonfinite, what="check of a checkpoint").values()
    nonfinite = sorted(name for names in found for name in names)
    if not nonfinite:
        return
    text = f"{source.where}: {nonfinite_text(nonfinite)}"
    if not allowed:
        raise CheckpointError(
            f"{text}. Restore an earlier checkpoint; or, to look into this one, consolidate it and call "
            f"restore(..., allow_nonfinite=True)"
        )
    warn("deepspeed_muon: %s", text)


def nonfinite_text(names: Sequence[str]) -> str:
    """Return the message about tensors that hold an infinity or NaN."""
    return f"{len(names)} tensors hold an infinity or NaN: {listed(names, 10)}: the run had diverged when it was saved"


def _compare(state: LiveState, source: StateSource, state_too: bool) -> list[str]:
    """Return how the parameters of this rank differ from the checkpoint's, in words."""
    saved = source.parameters
    problems: list[str] = []
    extra = [name for name in saved if name not in state.parameters]
    for name, parameter in state.parameters.items():
        if name in saved:
            problems += _differences(parameter, saved[name], state_too)
            continue
        twin = next((other for other in extra if saved[other].shape == parameter.part.shape), None)
        hint = f"renamed? it has {twin} of the same shape" if twin else "it was frozen, or not in the model"
        problems.append(f"parameter {name} is not in the checkpoint ({hint})")
    return problems


def first_lines(lines: Collection[str]) -> str:
    """Return some of the lines of an error, and how many more there are."""
    return "\n".join(sorted(lines)[:20]) + (f"\nand {len(lines) - 20} more" if len(lines) > 20 else "")


def _refuse_another_model(state: LiveState, source: StateSource, problems: Sequence[str]) -> None:
    """Raise on every rank if one has ``problems``, or if the checkpoint has parameters that no rank has.

    Must be called by all ranks.
    """
    live, names = state.parameters, sorted(source.parameters)
    held = all_ranks().reduce([float(name in live) for name in names], "max", what="check of a checkpoint")
    left = [name for name, somewhere in zip(names, held, strict=True) if not somewhere]
    unused = "is in the checkpoint, but not in the optimizer (it is frozen, or not in the model)"
    problems = [*problems, *(f"parameter {name} {unused}" for name in left)]
    with raise_on_all_ranks(CheckpointError):
        if problems:
            raise CheckpointError(
                f"{source.where} is not a checkpoint of this model:\n{first_lines(problems)}\n"
                f"Make the model as the saved run did, or load the weights alone (fp32/NAME in the files of a set) "
                f"into the model before deepspeed.initialize"
            )


def _differences(parameter: LiveParameter, record: ParameterRecord, state_too: bool) -> Iterator[str]:
    own, name, file = parameter.record, parameter.name, record.tensors["fp32"]
    if record.shape != own.shape:
        yield f"parameter {name} has shape {list(own.shape)}, in the checkpoint {list(record.shape)} ({file})"
    elif state_too and record.algorithm != own.algorithm:
        yield (
            f"parameter {name} goes to {own.algorithm} ({parameter.reason}), in the checkpoint to "
            f"{record.algorithm} ({file}); set include / exclude in optimizer.params as the saved run did, or "
            f"convert it again with --include / --exclude"
        )
    elif state_too and record.rows and parameter.row_fragments:
        rows = parameter.part_of(record.row_keys[0]).length
        if record.rows != rows:
            yield (
                f"parameter {name} has {rows} numbers in {record.row_keys[0]}, in the checkpoint {record.rows} "
                f"({file}): it was divided into other blocks"
            )


@dataclass(slots=True)
class _Plan:
    """What a restore will write. Everything that can fail is done: checked, looked up, allocated.

    Attributes:
        state: What the engine holds.
        writes: Parameter, key and this rank's flat tensor.
        made: The tensors that the optimizer's state lacks, by key, for each partition.
        steps: Steps of every partition; empty where only masters are restored.
        settings: New settings by param group.
    """

    state: LiveState
    writes: list[tuple[LiveParameter, str, Tensor]]
    made: dict[int, dict[str, Tensor]]
    steps: dict[int, int]
    settings: dict[int, dict[str, Any]]

    @classmethod
    def of(cls, state: LiveState, source: StateSource, *, hyperparameters: bool, state_too: bool) -> _Plan:
        """Plan what goes where; the engine is not changed."""
        plan = cls(state, [], {}, _steps(state, source) if state_too else {}, {})
        if state_too:
            _say_what_happens_to_rows(state, source)
        for parameter in state.parameters.values():
            keys: tuple[str, ...] = ("fp32",)
            if plan.steps.get(parameter.partition):
                keys += STATE_KEYS[parameter.record.algorithm]
                keys += _row_keys(state) if parameter.row_fragments else ()
            for key in keys:
                target = plan._target(parameter, key)
                ends = [each.partition_offset + each.numel for each in parameter.local_fragments(key)]
                if max(ends, default=0) > target.numel():
                    raise CheckpointError(
                        f"parameter {parameter.name}: this rank's {key} is not in memory (it has "
                        f"{target.numel()} elements): checkpoints do not know NVMe offload"
                    )
                plan.writes.append((parameter, key, target))
        if hyperparameters:
            plan.settings = group_settings(state, source.index, source.where)
        return plan

    def _target(self, parameter: LiveParameter, key: str) -> Tensor:
        """Return the flat tensor to write to: the engine's own, or one that it will get."""
        bound, policy = parameter.bound, self.state.optimizer.state_policy
        dtype = policy.dtype(key, bound.tensor.dtype)
        if key == "momentum_buffer" and (parameter.coded or dtype == torch.int8):
            dtype = torch.float32  # it is coded when all of it is there
        elif key == "fp32" or key in self.state.optimizer.state.get(bound.tensor, {}):
            return self.state.tensor(bound, key)
        made = self.made.setdefault(bound.index, {})
        if key in ROW_STATE and key not in made:
            every = (p for p in self.state.parameters.values() if p.partition == bound.index)
            numel = sum(fragment.numel for p in every for fragment in p.local_fragments(key))
            made[key] = torch.empty(numel, dtype=ROW_STATE[key].dtype, device=bound.tensor.device)
        elif key not in made:
            made[key] = policy.make(key, bound.tensor).to(dtype)
        return made[key].view(-1)


def _write_settings(plan: _Plan, before: Before, run: Progress | None, where: str, **how: bool) -> None:
    """Set the progress and the settings of the param groups, or nothing: all ranks raise if one of them cannot.

    Must be called by all ranks. ``how`` are arguments of ``write_progress``.
    """
    try:
        with raise_on_all_ranks(CheckpointError):
            if run is not None:
                write_progress(plan.state.optimizer, run, where, **how)
            for number, settings in plan.settings.items():
                plan.state.optimizer.param_groups[number].update(settings)
    except MuonError:
        before.put_back()
        raise
    except BaseException:
        plan.state.host.begin_restore(where)  # an interrupt left settings of two states
        raise


@torch.no_grad()
def _fill(plan: _Plan, source: StateSource) -> None:
    """Write the source into this rank's partitions. Must be called by all ranks.

    All checks are done, so that only the disk can fail, or an interrupt come; every rank raises then, and the engine
    refuses to go on until a restore has ended.
    """
    state = plan.state
    interrupt: BaseException | None = None
    state.host.begin_restore(source.where)
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
            raise interrupt from None
        raise
    tensors = {parameter.partition: parameter.bound.tensor for parameter in state.parameters.values()}
    for partition, steps in plan.steps.items():
        own, made = state.optimizer.state[tensors[partition]], plan.made.get(partition, {})
        if "momentum_buffer" in made:
            own.pop(SCALE_KEY, None)
        own.update(made, step=steps)
        if not steps:
            own.clear()
    if state.optimizer.state_policy.quantizes_momentum:
        for runner in state.optimizer.runners:
            runner.convert_momentum(state.optimizer.state)
    state.host.view.refresh_weights()


def _write_partitions(plan: _Plan, source: StateSource) -> None:
    for parameter, key, target in plan.writes:
        for fragment in parameter.local_fragments(key):
            if key in source.parameters[parameter.name].tensor_keys:
                source.fill(parameter.part_of(key), key, fragment, target)
            else:
                start = ROW_STATE[key].start if key in ROW_STATE else 0.0
                target.narrow(0, fragment.partition_offset, fragment.numel).fill_(start)
        if key not in plan.made.get(parameter.partition, ()):
            plan.state.keep(parameter.bound, key, target)


def _steps(state: LiveState, source: StateSource) -> dict[int, int]:
    """Return the steps of every partition. Its parameters share one count, which Adam's bias correction uses."""
    found: dict[int, set[int]] = {}
    for parameter in state.parameters.values():
        found.setdefault(parameter.partition, set()).add(source.parameters[parameter.name].step)
    for index, steps in found.items():
        if len(steps) > 1:
            warn(
                "deepspeed_muon: parameters that share partition %d now had taken %s steps; %d is used for all of them",
                index,
                sorted(steps),
                max(steps),
            )
    return {index: max(steps) for index, steps in found.items()}


def _row_keys(state: LiveState) -> tuple[str, ...]:
    """Return what the variant of this run keeps for each row."""
    return tuple(each.key for each in VARIANTS[state.optimizer.config.variant].state)


def _say_what_happens_to_rows(state: LiveState, source: StateSource) -> None:
    """Warn where the variant's state is reset or dropped, because the saved run had another variant."""
    pairs = [(parameter, source.parameters[parameter.name]) for parameter in state.parameters.values()]
    told = []
    for key, kind in ROW_STATE.items():
        kept = key in _row_keys(state)
        without = [
            m.name for m, r in pairs if kept and m.row_fragments and r.step and key not in r.tensor_keys
        ]
        if without:
            told.append(f"{kind.what} start anew for {len(without)} matrices ({without[0]}, ...)")
        if not kept and any(key in saved.row_keys for _, saved in pairs):
            told.append(f"{kind.what} are dropped")
    if told:
        warn(
            "deepspeed_muon: %s was saved with another variant than %r: %s",
            source.where,
            state.optimizer.config.variant,
            "; ".join(told),
        )
