"""Saves and loads of DeepSpeed's checkpoints, universal ones too, where the optimizer is ours."""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import secrets
import shlex
import types
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_muon.checkpoint import CONSOLIDATED_FOLDER, consolidate
from deepspeed_muon.checkpoint.deepspeed_files import SavedTag, identify_tag, is_ours, refuse_nonfinite
from deepspeed_muon.checkpoint.files import load_pickle, make_folder, refusing
from deepspeed_muon.checkpoint.index import INDEX_NAME, OURS, ConsolidatedSource
from deepspeed_muon.checkpoint.layout_record import (
    RECORD_VERSION,
    SAVE_KEY,
    order_of,
    precision_of,
    row_order_of,
    save_of,
)
from deepspeed_muon.checkpoint.parameters import bound_engine_of, collect, optimizer_of
from deepspeed_muon.checkpoint.restore import (
    SettingsSnapshot,
    first_lines,
    restore_from_source,
    universal_set,
)
from deepspeed_muon.config.settings import refuse_unusable
from deepspeed_muon.engine.nvme import check_copy, load_the_rest, prepare_save
from deepspeed_muon.engine.patching import Original
from deepspeed_muon.engine.views import HalfView, View, view_of
from deepspeed_muon.errors import CheckpointError, ConfigError
from deepspeed_muon.plan.placement import Placement
from deepspeed_muon.step.loading import settings_to_load
from deepspeed_muon.transport.agreement import raise_on_all_ranks
from deepspeed_muon.transport.ranks import Ranks

_ONE_SAVE = (
    "a save was killed, or files were mixed: load another tag, or copy all files of one save into the folder"
)


class _Difference(NamedTuple):
    """How a rank's file differs from its engine.

    Attributes:
        saved: Names of the parameters that the file describes.
        live: Names of the engine's parameters; empty if the file describes none.
        rerouted: A line for each parameter that had another route.
        moved: Whether any parameter has another placement.
    """

    saved: Set[str] = frozenset()
    live: Set[str] = frozenset()
    rerouted: Set[str] = frozenset()
    moved: bool = False


def convert(original: Original, args: argparse.Namespace, *more: object, **kwargs: object) -> None:
    """Refuse a checkpoint of ours, which DeepSpeed's converter cannot read; it gets all others, damaged ones too."""
    if is_ours(args.input_folder):
        paths = shlex.join(("--input_folder", args.input_folder, "--output_folder", args.output_folder))
        raise CheckpointError(
            f"{args.input_folder}: saved by this Muon: convert it with 'python -m deepspeed_muon checkpoint universal "
            f"{paths}'"
        )
    original(args, *more, **kwargs)


def load_universal_checkpoint(
    original: Original,
    view: View,
    checkpoint_folder: str,
    load_optimizer_states: bool = True,
    *_: object,
    **__: object,
) -> None:
    """Load a universal checkpoint through our layouts. Must be called by all ranks."""
    engine = view.memory.engine()
    source, _before = restore_from_source(
        engine,
        lambda: ConsolidatedSource(universal_set(Path(checkpoint_folder))),
        str(checkpoint_folder),
        hyperparameters=load_optimizer_states,
        progress=False,
        with_state=load_optimizer_states,
    )
    if load_optimizer_states and source.index.progress.loss_scale:
        bound_engine_of(optimizer_of(engine)).set_loss_scale(source.index.progress.loss_scale)


def save_checkpoint(
    original: Original,
    engine: DeepSpeedEngine,
    save_dir: str | os.PathLike[str],
    tag: object = None,
    client_state: Mapping[str, Any] | None = None,
    *args: object,
    **kwargs: object,
) -> object:
    """Save by DeepSpeed's method, with a random id of this save in the files of every rank.

    The consolidated set, if the configuration asks for one, is written first: DeepSpeed writes ``latest`` last, which
    therefore never names a tag whose set is incomplete.
    """
    # 1. the consolidated set, and the folder of the tag
    optimizer = engine.basic_optimizer
    bound_engine_of(optimizer).require_restored()
    folder = Path(save_dir or "", f"global_step{engine.global_steps}" if tag is None else str(tag))
    if optimizer.config.consolidate_on_save and save_dir:
        consolidate(engine, folder / CONSOLIDATED_FOLDER)
    # 2. the id of this save, from the first rank
    ((_, save_id),) = optimizer.ranks.collect([secrets.token_hex(8)], most=1, purpose="naming of a save")
    client_state = {**(client_state or {}), SAVE_KEY: save_id}
    with raise_on_all_ranks(CheckpointError, ranks=optimizer.ranks):
        refuse_unusable(optimizer.param_groups, optimizer.config, {})
        if save_dir:
            # If it cannot be made, DeepSpeed's first rank raises alone, and the others wait for it.
            make_folder(folder)
        prepare_save(engine, folder, save_id)
    # 3. DeepSpeed's save
    bound_engine_of(optimizer).save_id = save_id
    try:
        with mock.patch.object(type(optimizer), "__reduce_ex__", _settings_alone):
            return original(save_dir, tag, client_state, *args, **kwargs)
    finally:
        bound_engine_of(optimizer).save_id = None


def _settings_alone(optimizer: Any, _: object) -> tuple[object, ...]:
    """Pickle only the settings: a schedule inside the saved one refers to the optimizer for its rates."""
    groups = [{key: group[key] for key in group.keys() - {"params"}} for group in optimizer.param_groups]
    return types.SimpleNamespace, (), {"param_groups": groups, "step": None}


def load_checkpoint(original: Original, engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
    """Load, unless the ranks find that the checkpoint does not fit this run; say which settings it replaced.

    DeepSpeed sets counters and schedule first; they are put back if a universal checkpoint is refused.
    """
    # 1. what is asked for, whether by position or by name
    call = inspect.signature(DeepSpeedEngine.load_checkpoint).bind(engine, *args, **kwargs)
    given = call.arguments
    with_state = given.get("load_optimizer_states", True) and not given.get("load_module_only", False)
    universal = bool(engine.load_universal_checkpoint())
    # 2. all ranks look at their files before DeepSpeed changes anything
    saved: SavedTag | None = None
    if universal:
        with raise_on_all_ranks(CheckpointError, ranks=optimizer_of(engine).ranks) as agreed:
            tag = _tag_to_load(given["load_dir"], given.get("tag"), "latest_universal")
            if tag is not None:
                universal_set(Path(given["load_dir"], tag))
            agreed.record("tag", tag)
    else:
        tag, saved = _checked_tag(engine, given["load_dir"], given.get("tag"), with_state=with_state)
    # DeepSpeed would read `latest` again on every rank, and another save may have replaced it by then.
    given["tag"] = tag
    # 3. DeepSpeed's load
    before, optimizer, view = SettingsSnapshot(engine), optimizer_of(engine), view_of(engine.optimizer)
    load_state_dict = optimizer.load_state_dict

    def load_on_all_ranks(state_dict: dict[str, Any]) -> None:
        # A rank that raises alone would leave the others waiting in DeepSpeed's next collective. Ranks that load in
        # turn cannot wait for each other here.
        ranks = Ranks() if engine._config.zero_config.pipeline_loading_checkpoint else optimizer.ranks
        with raise_on_all_ranks(CheckpointError, ranks=ranks), refusing("the optimizer state"):
            load_state_dict(state_dict)

    try:
        with mock.patch.object(optimizer, "load_state_dict", load_on_all_ranks):
            path, client_state = original(*call.args[1:], **call.kwargs)
            if saved is not None:
                load_the_rest(engine, given["load_dir"], saved.folder.name)
            if path is not None and not with_state and isinstance(view, HalfView):
                view.refresh_masters()
    except Exception as error:
        if universal:
            before.put_back()
            if isinstance(error, CheckpointError):  # all ranks are here: they agreed to refuse
                view.end_of_load()
        raise
    # 4. report the settings that it replaced
    if client_state is not None:
        client_state.pop(SAVE_KEY, None)
    remedy = "restore a consolidated set with hyperparameters=False"
    if saved is not None:
        remedy = f"{saved.remedy('hyperparameters=False')} instead of loading this"
    clipping, configured = view.loaded_clipping, engine.gradient_clipping()
    replaced = clipping not in (None, configured)
    changes = [f"gradient_clipping is {clipping}, configured {configured}"] if replaced else []
    before.warn_of_replaced("engine.load_checkpoint", remedy, changes)
    return path, client_state


def _tag_to_load(load_dir: str | os.PathLike[str], tag: object, latest: str) -> str | None:
    """Return the tag that DeepSpeed's loader is about to read; ``None`` if there is none, which it logs.

    Raises:
        CheckpointError: If it has no folder.
    """
    folder = Path(load_dir)
    if tag is None and (folder / latest).is_file():
        tag = (folder / latest).read_text().strip()
    if tag is not None and not (folder / str(tag)).is_dir():
        raise CheckpointError(
            f"{folder / str(tag)}: no such folder: give the tag of a save, or write one into {folder / latest}"
        )
    if tag is None and (folder / INDEX_NAME).is_file():
        raise CheckpointError(
            f"{folder}: a consolidated set, which engine.load_checkpoint does not read: call restore(engine, ...), "
            f'or set "restore_from": {json.dumps(str(folder))} in optimizer.params'
        )
    return None if tag is None else str(tag)


def _checked_tag(
    engine: DeepSpeedEngine, load_dir: str | os.PathLike[str], given_tag: object, *, with_state: bool
) -> tuple[str | None, SavedTag | None]:
    """Return the tag that DeepSpeed is to load, and what saved it; raise on every rank if it does not fit on one.

    The tag is ``None`` if ``latest`` names none. What saved it is ``None`` if its files are not in DeepSpeed's usual
    format.
    """
    ranks = optimizer_of(engine).ranks
    saved: SavedTag | None = None
    difference = _Difference()
    save_id: str | None = None
    load = functools.cache(functools.partial(load_pickle, trust=True))  # as DeepSpeed's loader will
    with raise_on_all_ranks(CheckpointError, ranks=ranks) as agreed:
        if engine.zero_optimization_stage() == 3:  # the other stages load into the tensors where they are
            view_of(engine.optimizer).require_reloaded()
        folder, tag = Path(load_dir), _tag_to_load(load_dir, given_tag, "latest")
        agreed.record("tag", tag)
        file = None
        # Other checkpoint engines have other formats.
        if tag is not None and isinstance(engine.checkpoint_engine, TorchCheckpointEngine):
            file = Path(engine._get_zero_ckpt_name(load_dir, tag)) if engine.zero_optimization() else None
            saved = identify_tag(folder / str(tag), file, load=load)
        if saved is not None and with_state:
            _require_same_kind(engine, saved)
            if file is not None and not file.is_file():
                raise CheckpointError(
                    f"{file}: no such file, and DeepSpeed would load weights without the optimizer's state: copy "
                    f"all files of the save into the folder, or load another tag"
                )
            difference = _difference(engine, saved)
        # Files of different saves have equal names and shapes: only the id distinguishes them.
        if tag is not None:
            with refusing(f"{load_dir!r}"):
                save_id = _save_id(engine, folder, str(tag), load, with_state=with_state)
            check_copy(engine, folder / str(tag), saved, save_id, with_state)
        agreed.record(f"save of the rank's files ({_ONE_SAVE})", save_id)
        shown = saved and f"{saved.folder.name} of {saved.kind}, stage {saved.stage}, {saved.ranks} ranks"
        agreed.record("checkpoint", shown or "none")
    if saved is not None:
        _refuse_differences(saved, ranks, difference)
        with raise_on_all_ranks(CheckpointError, ranks=ranks):
            if with_state:
                _check_settings(engine, saved)
    return tag, saved


def _check_settings(engine: DeepSpeedEngine, saved: SavedTag) -> None:
    """Raise if this run refuses a setting of the saved param groups, which DeepSpeed loads after the weights."""
    optimizer = optimizer_of(engine)
    for number, (group, live) in enumerate(zip(saved.groups, optimizer.param_groups, strict=False)):
        # At stage 0 the file of another pipeline stage was read, which may number its groups differently.
        if group.get("algorithm") != live["algorithm"]:
            continue
        try:
            settings_to_load(f"param group {number}", group, live, optimizer.config)
        except ConfigError as error:
            raise CheckpointError(
                f"{saved.folder}: its settings cannot be used in this run:\n{error}\nTo keep those of the "
                f"configuration, {saved.remedy('hyperparameters=False')} instead of loading this"
            ) from error


def _refuse_differences(saved: SavedTag, ranks: Ranks, difference: _Difference) -> None:
    """Raise on every rank if the file of one differs from its engine. Must be called by all ``ranks``."""
    of_ranks = ranks.all_gather(difference, purpose="check of a checkpoint").values()
    # The file of a group's first rank describes the group's parameters; at stage 0 every file does.
    saved_names = set[str]().union(*(rank.saved for rank in of_ranks))
    missing = {
        f"parameter {name} is in the checkpoint, but not in the optimizer"
        for rank in of_ranks
        for name in rank.saved - rank.live
    }
    lines = missing | {
        f"parameter {name} is not in the checkpoint" for rank in of_ranks for name in rank.live - saved_names
    }
    if lines:
        remedy = "take its weights alone with engine.load_checkpoint(..., load_optimizer_states=False)"
        # From stage 2 on DeepSpeed looks for a parameter that is frozen now among those that were frozen then.
        if missing and saved.stage >= 2:
            script = saved.folder.parent / "zero_to_fp32.py"
            remedy = f"load the weights that {script} extracts into the model before deepspeed.initialize"
        raise CheckpointError(
            f"{saved.folder} is not a checkpoint of this model:\n{first_lines(lines)}\n"
            f"Make the model as the saved run did (with the same parameters frozen), or {remedy}"
        )
    if rerouted := set[str]().union(*(rank.rerouted for rank in of_ranks)):
        patterns = ", ".join(
            f'"{key}": {json.dumps(saved.record["optimizer"][key])}' for key in ("include", "exclude")
        )
        raise CheckpointError(
            f"{saved.folder}: {len(rerouted)} parameters had another route in the run that saved it:\n"
            f"{first_lines(rerouted)}\nSet {patterns} in optimizer.params, as that run had, or take its weights alone "
            f"with engine.load_checkpoint(..., load_optimizer_states=False)"
        )
    if any(rank.moved for rank in of_ranks):
        raise CheckpointError(
            f"{saved.folder}: the parameters have other offsets in its flat partitions than in this engine's: param "
            f"groups, matrices, sub_group_size, round_robin_gradients, the kind of device or (with row state) ns_steps "
            f"and ns_method may differ; or {saved.remedy()} instead of loading this"
        )


def _save_id(
    engine: DeepSpeedEngine, folder: Path, tag: str, load: Callable[[Path], Any], *, with_state: bool
) -> str | None:
    """Return the id of the save that this rank's files belong to; ``None`` if another optimizer saved them.

    Raises:
        CheckpointError: If they are of different saves, or their optimizer state is not finite.
    """
    files = [engine._get_ckpt_name(str(folder), tag)]
    if with_state and engine.zero_optimization():
        files.append(engine._get_zero_ckpt_name(str(folder), tag))
    elif with_state:  # that of experts; the rest is in the model's file
        files += map(str, (folder / tag).glob("expp_rank_*_optim_states.pt"))
    # DeepSpeed's other writers have other formats.
    is_readable = isinstance(engine.checkpoint_engine, TorchCheckpointEngine)
    readable = [file for file in files if is_readable and Path(file).is_file()]
    ids = {file: save_of(load(Path(file))) for file in readable}
    if len(set(ids.values())) > 1:
        raise CheckpointError(f"{' and '.join(ids)} are of different saves: {_ONE_SAVE}")
    for file in readable if with_state else ():
        # load_state_dict refuses it as well, but DeepSpeed calls that after it has replaced the weights.
        refuse_nonfinite(load(Path(file)), file)
    return next(iter(ids.values()), None)


def _require_same_kind(engine: DeepSpeedEngine, saved: SavedTag) -> None:
    """Raise unless our optimizer saved a checkpoint of the engine's stage, ranks and precision."""
    saved.refuse_universal()
    if saved.kind == OURS and saved.record.get("version") != RECORD_VERSION:
        raise CheckpointError(
            f"{saved.folder}: saved by a version of deepspeed_muon that stores its state otherwise (layout record "
            f"{saved.record.get('version')}, this version has {RECORD_VERSION}): with that version "
            f"{saved.remedy()} here"
        )
    stage, ranks = int(engine.zero_optimization_stage()), int(engine.seq_dp_world_size)
    precision = precision_of(optimizer_of(engine))
    fits = stage == saved.stage or {stage, saved.stage} == {1, 2}
    fits = fits and (not stage or ranks == saved.ranks) and saved.record.get("precision") == precision
    if saved.kind != OURS or not fits:
        raise CheckpointError(
            f"{saved}. engine.load_checkpoint continues what deepspeed_muon saved at the engine's own stage, number of "
            f"ranks and precision ({stage}, {ranks} and {precision}): {saved.remedy()} instead of loading this"
        )


def _difference(engine: DeepSpeedEngine, saved: SavedTag) -> _Difference:
    """Compare this rank's file with its engine."""
    # At stage 0 every rank looks at the first rank's file, which may have other layers.
    moved = bool(saved.stage) and saved.record.get("order") != order_of(optimizer_of(engine))
    rows_then, rows_now = saved.record.get("row_order"), row_order_of(optimizer_of(engine))
    # Another variant starts its row state anew.
    moved = moved or bool(saved.stage and rows_then and rows_now and rows_then != rows_now)
    try:
        live = collect(engine).parameters
    except CheckpointError:  # it is unknown which slice some parameter is: only the order is compared
        return _Difference(moved=moved)
    groups = saved.record.get("groups", ())
    entries = {entry["tensor_slice"]["name"]: entry for group in groups for entry in group["parameters"]}
    rerouted = set()
    for name in entries.keys() & live.keys():
        entry, parameter = entries[name], live[name]
        if (algorithm := entry["record"]["algorithm"]) != parameter.record.algorithm:
            rerouted.add(
                f"{name} went to {algorithm}, and goes to {parameter.record.algorithm} now "
                f"({parameter.route_reason})"
            )
        # Where a parameter is replicated, the number of ranks does not matter.
        then = Placement(**{**entry["placement"], "replicas": 0})
        now = replace(parameter.placement, replicas=0)
        moved = moved or (entry["partition"], then) != (parameter.partition, now)
    return _Difference(set(entries), set(live) if entries else set(), rerouted, moved)
