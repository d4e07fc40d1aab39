"""What DeepSpeed's files say about themselves: which optimizer saved a tag, at which stage and on how many ranks.

:mod:`deepspeed_muon.tools.deepspeed_reader` reads their contents.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed_muon.checkpoint.files import is_inside, latest_tag, load_pickle, refusing, require_folder
from deepspeed_muon.checkpoint.index import CONSOLIDATED_FOLDER, INDEX_NAME, OURS
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY, save_of
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import counted

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# At stage 0 each rank of an expert-parallel group writes a file for the optimizer.
EXPERT_OPTIMIZER_FILES = "expp_rank_*_mp_rank_*_optim_states.pt"


def find_tag_folder(folder: Path) -> Path:
    """Return the folder of a tag: ``folder`` itself, or the one that ``latest`` in it names."""
    tag = latest_tag(folder)
    if tag is not None:
        if not is_inside(tag):
            raise CheckpointError(
                f"{folder / 'latest'}: names {tag!r}, which is not a folder beside it: give the tag's folder"
            )
        folder = folder / tag
    require_folder(folder)
    return folder


def all_model_files(folder: Path) -> list[Path]:
    """Return the files with counters and model of each model-parallel rank; at stage 3 of every rank."""
    return sorted(path for path in folder.iterdir() if _MODEL_FILE.fullmatch(path.name))


def model_files(folder: Path) -> dict[str, Path]:
    """Return the model files of data-parallel rank 0, by model-parallel rank (``mp_rank_00``)."""
    files = {}
    # Where there are files of both names, mp_rank_* wins: it sorts first and is seen last.
    for path in reversed(all_model_files(folder)):
        if path.name.startswith(("mp_rank_", "zero_pp_rank_0_")):
            files[path.name[path.name.index("mp_rank_") :].removesuffix("_model_states.pt")] = path
    return files


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Return whether our optimizer saved a tag; its files are unpickled, as DeepSpeed's converter does it."""
    for path in Path(folder).glob("*_states.pt"):
        with contextlib.suppress(CheckpointError):  # a damaged file; the next one may be intact
            if save_of(load_pickle(path, trust=True)) is not None:
                return True
    return False


def wrapper_state(content: Mapping[str, Any]) -> Any:
    """Return the state dict of the wrapper around the optimizer (ZeRO's, FP16_Optimizer's) in a file."""
    # DeepSpeed uses the first key in the files of ZeRO, the second at stage 0.
    return content.get("optimizer_state_dict") or content.get("optimizer") or {}


def unwrap(wrapper: Mapping[str, Any]) -> tuple[int, Any]:
    """Return the ZeRO stage of a wrapper's state dict, and the ``state_dict()`` of the optimizer inside it."""
    if "fp32_flat_groups" in wrapper:
        return 3, wrapper.get("optimizer_state_dict")  # ZeRO stage 3
    if "base_optimizer_state" in wrapper:
        # ZeRO stages 1 and 2
        return int(wrapper.get("zero_stage", 1)), wrapper["base_optimizer_state"]
    # FP16_Optimizer has the optimizer's state dict under a key; without a wrapper there is only the optimizer's.
    return 0, wrapper.get("optimizer_state_dict", wrapper)


def refuse_nonfinite(content: Mapping[str, Any], file: str) -> None:
    """Raise a CheckpointError if the optimizer state in a file holds an infinity or NaN."""
    _, optimizer = unwrap(wrapper_state(content))
    for state in optimizer.get("state", {}).values():
        for key, value in state.items():
            if isinstance(value, Tensor) and not value.isfinite().all():
                raise CheckpointError(
                    f"{file}: {key} holds an infinity or NaN: the run had diverged when it was saved. Load an earlier "
                    f"tag, or the weights alone with engine.load_checkpoint(..., load_optimizer_states=False)"
                )


def optimizer_kind(optimizer: Mapping[str, Any]) -> str:
    """Return which optimizer a ``state_dict()`` is of: :data:`OURS`, ``DeepSpeed's Muon`` or ``AdamW``."""
    if RECORD_KEY in optimizer:
        return OURS
    groups, states = optimizer.get("param_groups", ()), optimizer.get("state", {}).values()
    is_muon = any(group.get("use_muon") for group in groups)
    return "DeepSpeed's Muon" if is_muon or any("momentum_buffer" in state for state in states) else "AdamW"


@dataclass(frozen=True, slots=True)
class SavedTag:
    """Which optimizer saved a tag, at which stage and on how many data-parallel ranks; read from one file.

    Attributes:
        folder: The tag's folder.
        kind: The optimizer.
        stage: The ZeRO stage.
        ranks: The number of data-parallel ranks, those of sequence parallelism included.
        record: Our layout record, if that file has one.
        groups: The param groups in that file.
    """

    folder: Path
    kind: str
    stage: int
    ranks: int
    record: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]

    def __str__(self) -> str:
        ranks = counted(range(self.ranks), "data-parallel rank")
        precision = f" in {self.record['precision']}" if "precision" in self.record else ""
        return f"{self.folder}: saved by {self.kind} at ZeRO stage {self.stage} on {ranks}{precision}"

    def refuse_universal(self) -> None:
        """Raise a CheckpointError if it is a universal checkpoint, which has another loader."""
        if (self.folder / "zero").is_dir():
            raise CheckpointError(
                f'{self.folder}: a universal checkpoint: set "checkpoint": {{"load_universal": true}} in the DeepSpeed '
                f"configuration, and call engine.load_checkpoint"
            )

    def remedy(self, restore_arguments: str = "") -> str:
        """Return how to continue from it: by the key ``restore_from``, or by ``restore`` with some arguments."""
        set_folder, convert = str(self.folder), ""
        if not os.path.lexists(self.folder / CONSOLIDATED_FOLDER / INDEX_NAME):
            set_folder = f"{self.folder}_consolidated"
            paths = shlex.join((str(self.folder), set_folder))
            convert = f"run 'python -m deepspeed_muon checkpoint consolidate {paths}' and "
        if restore_arguments:
            call = f"deepspeed_muon.restore(engine, {json.dumps(set_folder)}, {restore_arguments})"
            return f"{convert}call {call}"
        return f'{convert}set "restore_from": {json.dumps(set_folder)} in optimizer.params'


def identify_tag(
    folder: Path, file: Path | None = None, *, load: Callable[[Path], Any] = load_pickle
) -> SavedTag | None:
    """Read from one file which optimizer saved a tag, and how; ``None`` if DeepSpeed did not save the folder.

    Args:
        folder: The tag's folder.
        file: The file with the optimizer's state to read, if it exists; by default the first one.
        load: Loads a file.
    """
    models = all_model_files(folder) if folder.is_dir() else []
    if not models:
        return None
    with refusing(f"{folder}: not as DeepSpeed writes it"):
        model = load(models[0])
        files = [path for path in folder.iterdir() if OPTIMIZER_FILE.fullmatch(path.name)]
        files = sorted(files) or sorted(folder.glob(EXPERT_OPTIMIZER_FILES)) or models
        chosen = file if file is not None and file in files else files[0]
        # At stage 0 the model's file has the optimizer's state as well.
        stage, optimizer = unwrap(model.get("optimizer") or wrapper_state(load(chosen)))
        optimizer = optimizer if isinstance(optimizer, Mapping) else {}
        ranks = int(model.get("dp_world_size", 1))
        groups = optimizer.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
            groups = []  # damaged: the load itself reports it
        record = optimizer.get(RECORD_KEY, {})
        return SavedTag(folder, optimizer_kind(optimizer), stage, ranks, record, groups)
