"""The engine as checkpoints see it, and DeepSpeed's universal checkpoints where the optimizer is ours."""

from __future__ import annotations

import json
import os
import weakref
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from deepspeed_muon.checkpoint.host import optimizer_of, require_all_ranks
from deepspeed_muon.checkpoint.index import COUNTERS, INDEX_NAME, OURS, SCALE_KEYS
from deepspeed_muon.checkpoint.layout_record import SAVE_KEY, save_of
from deepspeed_muon.checkpoint.live import collect
from deepspeed_muon.checkpoint.restore import first_lines, restore_from_source
from deepspeed_muon.checkpoint.sealed import load_pickle, refusing
from deepspeed_muon.checkpoint.settings import Before
from deepspeed_muon.checkpoint.tag_folder import Glance, glance
from deepspeed_muon.checkpoint.universal import UniversalSource, convert_to_universal, is_ours
from deepspeed_muon.engine.layouts import half_pairs
from deepspeed_muon.engine.memory import memory_of
from deepspeed_muon.engine.ordering import same_order
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.slices import TensorSlice
from deepspeed_muon.transport.agreement import RankFacts, agree

_ONE_SAVE = (
    "a save was killed, or files were mixed: load another tag, or copy all files of one save into the folder"
)


# Elements of the weights that the ranks gather at once after a restore.
_GATHERED = 1 << 18


class DeepSpeedHost:
    """Implements :class:`deepspeed_muon.checkpoint.host.Host` with a ``DeepSpeedEngine``."""

    def __init__(self, engine: Any, parts: Mapping[str, TensorSlice | str]) -> None:
        """Refer to the engine weakly, because its optimizer refers to this and must not keep the engine alive.

        Args:
            engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound.
            parts: See :func:`deepspeed_muon.engine.parts.parts_of`.
        """
        self._reference = weakref.ref(engine)
        self.parts = parts
        self.save_id: str | None = None
        self.step_thread: int | None = None
        self._restoring: str | None = None
        self._guards: list[RemovableHandle] = []

    @property
    def _engine(self) -> Any:
        engine = self._reference()
        if engine is None:
            raise CheckpointError("the engine of this optimizer is gone")
        return engine

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage."""
        return int(self._engine.zero_optimization_stage())

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler, or ``None``."""
        return getattr(self._engine, "lr_scheduler", None)

    def counters(self) -> dict[str, int]:
        """Return what the engine counts."""
        return {key: int(getattr(self._engine, key)) for key in COUNTERS}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set what the engine counts."""
        for key, value in counters.items():
            setattr(self._engine, key, value)

    def param_group_numbers(self) -> list[int]:
        """Return the number of the param group that every partition belongs to, in the order of the partitions."""
        wrapper, groups = self._engine.optimizer, self._engine.basic_optimizer.param_groups
        if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
            return [int(wrapper.sub_group_to_group_id[index]) for index in range(len(wrapper.fp16_groups))]
        if isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
            return list(range(len(groups)))
        return [number for number, group in enumerate(groups) for _ in group["params"]]

    def loss_scale(self) -> dict[str, float] | None:
        """Return what the dynamic loss scale needs to continue, or ``None`` where there is none."""
        scaler = _scaler(self._engine.optimizer)
        if scaler is None:
            return None
        values = {key: getattr(scaler, key, None) for key in SCALE_KEYS}
        return {key: value for key, value in values.items() if isinstance(value, (int, float))}

    def set_loss_scale(self, state: Mapping[str, float]) -> None:
        """Let a dynamic loss scale continue from :meth:`loss_scale`; others are left alone."""
        scaler = _scaler(self._engine.optimizer)
        for key in SCALE_KEYS:
            if scaler is not None and key in state and hasattr(scaler, key):
                setattr(scaler, key, state[key])

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Round the fp32 masters into the weights of the forward pass. Must be called by all ranks."""
        wrapper = self._engine.optimizer
        if isinstance(wrapper, DeepSpeedZeroOptimizer):
            _refresh_flat(
                wrapper, wrapper.parallel_partitioned_bit16_groups, wrapper.single_partition_of_fp32_groups
            )
        elif isinstance(wrapper, BF16_Optimizer):
            _refresh_flat(wrapper, wrapper.bf16_partitioned_groups, wrapper.fp32_groups_flat_partition)
        elif isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
            _refresh_stage3(wrapper)
        elif isinstance(wrapper, FP16_UnfusedOptimizer):
            for model, master in half_pairs(wrapper):
                model.data.copy_(master.data)

    def begin_restore(self, where: str) -> None:
        """Let steps, saves and forward passes raise from now on, until :meth:`end_restore`; may be called again."""
        self._restoring = where
        # A pipeline engine calls its module without calling itself; programs that evaluate may call the module too.
        for module in (self._engine, self._engine.module) if not self._guards else ():
            guard = module.register_forward_pre_hook(lambda *_: self.require_restored(), prepend=True)
            self._guards.append(guard)

    def end_restore(self) -> None:
        """Let the engine train again."""
        self._restoring = None
        while self._guards:
            self._guards.pop().remove()

    def require_restored(self) -> None:
        """Raise if a restore began and did not end."""
        if self._restoring is not None:
            raise CheckpointError(
                f"a restore from {self._restoring} did not end: weights and optimizer state are of two states. "
                f"Restore again, or make the engine anew"
            )


def _refresh_flat(wrapper: Any, weights: Sequence[Sequence[Tensor]], masters: Sequence[Tensor]) -> None:
    """Round each group's master partition and gather those of all ranks: gloo copies all that it gathers at once.

    DeepSpeed's ``update_lp_params`` gathers the whole group.
    """
    for group, partitions, master in zip(wrapper.real_dp_process_group, weights, masters, strict=True):
        rank = dist.get_rank(group)
        partitions[rank].copy_(master)
        step = max(1, _GATHERED // len(partitions))
        for start in range(0, master.numel(), step) if len(partitions) > 1 else ():
            pieces = [each.narrow(0, start, min(step, master.numel() - start)) for each in partitions]
            dist.all_gather(pieces, pieces[rank], group=group)


def _refresh_stage3(wrapper: Any) -> None:
    """Copy every sub-group's partition; persistent parameters are divided meanwhile, and gathered again afterwards."""
    wrapper.checkpoint_event_prologue()
    for index, master in enumerate(wrapper.fp32_partitioned_groups_flat):
        flat = wrapper.fp16_partitioned_groups_flat[index]
        if master.numel() == 0 or flat is None:
            continue
        flat.data.copy_(master.data)
        wrapper._unflatten_partitioned_parameters(index)
    wrapper.checkpoint_event_epilogue()


def _scaler(wrapper: Any) -> Any:
    """Return the object that holds a dynamic loss scale, or ``None``."""
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        config = wrapper.loss_scale_config
        return config if config.dynamic_loss_scale else None
    return getattr(wrapper, "loss_scaler", None) if getattr(wrapper, "dynamic_loss_scale", False) else None


def convert(original: Callable[..., Any], args: Any) -> None:
    """Convert a checkpoint of ours. DeepSpeed gets all others, also those that cannot be read: it says why."""
    if is_ours(args.input_folder):
        convert_to_universal(args.input_folder, args.output_folder)
    else:
        original(args)


def loads_universal(engine: Any) -> bool:
    """Return whether the wrapper of ``engine`` can load universal checkpoints."""
    return hasattr(engine.optimizer, "_load_universal_checkpoint")


def load_universal_checkpoint(
    original: Callable[..., Any],
    wrapper: Any,
    checkpoint_folder: str,
    load_optimizer_states: bool = True,
    *_: Any,
    **__: Any,
) -> None:
    """Load a universal checkpoint through our layouts. Must be called by all ranks."""
    engine = memory_of(wrapper).engine()
    require_all_ranks(engine)
    source: UniversalSource | None = None
    error: Exception | None = None
    try:
        with refusing(str(checkpoint_folder)):
            routes = {parameter.name: parameter.whole for parameter in collect(engine).parameters}
            source = UniversalSource(checkpoint_folder, routes)
    except Exception as caught:
        error = caught
    restore_from_source(engine, source, progress=False, state_too=load_optimizer_states, error=error)
    if source is not None and source.loss_scale:
        optimizer_of(engine).host.set_loss_scale(source.loss_scale)


def load_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Load, unless all ranks agree that it is no save of this run; say which settings it replaced.

    DeepSpeed sets counters and schedule first: they are put back if a universal checkpoint is refused.
    """
    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    with_state = given.get("load_optimizer_states", True) and not given.get("load_module_only", False)
    universal = bool(engine.load_universal_checkpoint())
    saved: Glance | None = None
    if not universal:
        place = given.get("load_dir"), given.get("tag")
        saved = _native(engine, *place, with_state=with_state)
        _refuse_mixed_saves(engine, *place, with_state=with_state)
    before = Before(engine)
    try:
        path, client_state = original(*args, **kwargs)
    except Exception as error:
        if universal:
            before.put_back()
            if isinstance(error, CheckpointError) and hasattr(engine.optimizer, "checkpoint_event_epilogue"):
                engine.optimizer.checkpoint_event_epilogue()  # all ranks are here: they agreed to refuse
        raise
    if client_state is not None:
        client_state.pop(SAVE_KEY, None)
    way = "restore a consolidated set with hyperparameters=False"
    if saved is not None:
        way = f"{saved.way('hyperparameters=False')} instead of loading this"
    before.warn_of_replaced("engine.load_checkpoint", way)
    return path, client_state


def _refuse_mixed_saves(engine: Any, load_dir: Any, tag: Any, *, with_state: bool) -> None:
    """Raise on every rank if the files that the ranks will read are not of one save. Must be called by all ranks."""
    facts, error = {}, None
    try:
        with refusing(f"{load_dir!r}"):
            if tag is None and (latest := Path(load_dir, "latest")).is_file():
                tag = latest.read_text().strip()
            if tag is not None:
                files = [engine._get_ckpt_name(load_dir, str(tag))]
                if with_state:
                    if engine.zero_optimization():
                        files.append(engine._get_zero_ckpt_name(load_dir, str(tag)))
                    else:  # of experts; else the state is in the file with the model
                        files += map(str, Path(load_dir, str(tag)).glob("expp_rank_*_optim_states.pt"))
                found = {file: _save_of(file) for file in files if os.path.isfile(file)}
                if len(set(found.values())) > 1:
                    raise CheckpointError(f"{' and '.join(found)} are of different saves: {_ONE_SAVE}")
                facts[f"save of the rank's files ({_ONE_SAVE})"] = str(next(iter(found.values()), None))
    except Exception as caught:
        error = caught
    agree(RankFacts(facts), error=error, kind=CheckpointError, members=engine.basic_optimizer.members)


def _save_of(file: str) -> str | None:
    """Return the id of the save that a file is of; ``None`` for formats that DeepSpeed's other writers have."""
    return save_of(load_pickle(Path(file), trust=True)) if zipfile.is_zipfile(file) else None


_ARGUMENTS = (
    "load_dir",
    "tag",
    "load_module_strict",
    "load_optimizer_states",
    "load_lr_scheduler_states",
    "load_module_only",
)


def _native(engine: Any, load_dir: Any, tag: Any, *, with_state: bool) -> Glance | None:
    """Return what DeepSpeed's loader is about to read; raise on every rank if one finds that it does not fit."""
    members = optimizer_of(engine).members
    saved: Glance | None = None
    rerouted: list[str] = []
    names: list[set[str]] = [set(), set()]
    moved = False
    error: Exception | None = None
    try:
        folder = Path(load_dir)
        if (folder / INDEX_NAME).is_file():
            raise CheckpointError(
                f"{folder}: a consolidated set, which engine.load_checkpoint does not read: call restore(engine, ...), "
                f'or set "restore_from": {json.dumps(str(folder))} in optimizer.params'
            )
        if tag is None and (folder / "latest").is_file():
            tag = (folder / "latest").read_text().strip()
        # Files of other checkpoint engines have forms of their own.
        if tag is not None and isinstance(engine.checkpoint_engine, TorchCheckpointEngine):
            own = Path(engine._get_zero_ckpt_name(load_dir, tag)) if engine.zero_optimization() else None
            # DeepSpeed's loader will unpickle the same files.
            saved = glance(folder / str(tag), own, trust=True)
        if saved is not None and with_state:
            _require_own(engine, saved)
            rerouted, names, moved = _differences(engine, saved)
    except Exception as caught:
        error = caught
    seen = (
        "none"
        if saved is None
        else f"{saved.folder.name} of {saved.kind}, stage {saved.stage}, {saved.ranks} ranks"
    )
    agree(RankFacts({"checkpoint": seen}), error=error, kind=CheckpointError, members=members)
    if saved is None:
        return None
    # A rank's file describes a share of the parameters, or at stage 0 all.
    then, now = names
    known = set().union(*members.gather(then, what="check of a checkpoint").values()) if saved.stage else then
    told = [
        *(f"parameter {name} is in the checkpoint, but not in the optimizer" for name in then - now),
        *(f"parameter {name} is not in the checkpoint" for name in now - known),
    ]
    if any(members.sum([len(told), len(rerouted), int(moved)], what="check of a checkpoint")):
        gathered = members.gather((told, rerouted), what="check of a checkpoint").values()
        told, rerouted = (
            sorted({line for lines in each for line in lines}) for each in zip(*gathered, strict=True)
        )
        if told:
            raise CheckpointError(
                f"{saved.folder} is not a checkpoint of this model:\n{first_lines(told)}\n"
                f"Make the model as the saved run did (with the same parameters frozen), or take its weights alone "
                f"with engine.load_checkpoint(..., load_optimizer_states=False)"
            )
        raise CheckpointError(_rerouted(saved, rerouted) if rerouted else _moved(engine, saved))
    return saved


def _require_own(engine: Any, saved: Glance) -> None:
    """Raise unless our optimizer saved a checkpoint at a stage and on ranks with which DeepSpeed can load it here."""
    saved.refuse_universal()
    stage, ranks = int(engine.zero_optimization_stage()), int(engine.seq_dp_world_size)
    same_files = stage == saved.stage or {stage, saved.stage} == {1, 2}
    if saved.kind != OURS or not same_files or (stage and ranks != saved.ranks):
        raise CheckpointError(
            f"{saved}. engine.load_checkpoint continues what deepspeed_muon saved at the engine's own stage and number "
            f"of ranks ({stage} and {ranks}): {saved.way()} instead of loading this"
        )


def _differences(engine: Any, saved: Glance) -> tuple[list[str], list[set[str]], bool]:
    """Compare this rank's file with its engine.

    Returns:
        Which parameters had another route; the names in the file and in the engine; whether any lay at another place.
    """
    optimizer = optimizer_of(engine)
    try:
        live = collect(engine).by_name
    except CheckpointError:  # nobody knows what a parameter is a part of; the digest of the order is left
        live = {}
    rerouted, moved = [], not same_order(saved.inner, optimizer)
    names = (
        [{entry["name"] for entry in saved.entries}, set(live)] if live and saved.entries else [set(), set()]
    )
    for entry in saved.entries:
        if (own := live.get(entry["name"])) is None:
            continue
        if entry["algorithm"] != own.route.algorithm:
            rerouted.append(
                f"{own.name} went to {entry['algorithm']}, and goes to {own.route.algorithm} now ({own.route.reason})"
            )
        # Where every rank holds everything, the last number, that of the ranks, does not matter.
        places = entry["partition"], *entry["spread"][:-1]
        moved = moved or places != (own.partition.index, *own.spread.numbers()[:-1])
    return rerouted, names, moved


def _rerouted(saved: Glance, lines: Sequence[str]) -> str:
    patterns = ", ".join(f'"{key}": {json.dumps(saved.settings[key])}' for key in ("include", "exclude"))
    return (
        f"{saved.folder}: {len(lines)} parameters had another route in the run that saved it:\n"
        + f"{first_lines(lines)}\nSet {patterns} in optimizer.params, as that run had, or take its weights alone with "
        f"engine.load_checkpoint(..., load_optimizer_states=False)"
    )


def _moved(engine: Any, saved: Glance) -> str:
    return (
        f"{saved.folder}: its flat partitions hold the parameters at other places than this engine's: param groups, "
        f"sub_group_size, round_robin_gradients, the kind of device or the version of deepspeed_muon may differ; or "
        f"{saved.way()} instead of loading this"
    )
