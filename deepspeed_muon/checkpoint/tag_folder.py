"""The files of one tag of ``engine.save_checkpoint``: which there are, what they hold, whether one save wrote them.

Every rank writes files of its own, so somebody can mix those of several saves in one folder. Ours have the id of their
save. Of other optimizers' the reader compares the steps.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed_muon.checkpoint.files import is_name, latest_tag, load_pickle, refusing
from deepspeed_muon.checkpoint.index import COUNTERS, INDEX_NAME, OURS, SCALE_KEYS, Progress, saved_schedule
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY, save_of
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import counted, logger

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# At stage 0 each rank of an expert-parallel group has a file for the optimizer.
_EXPERTS_OPTIMIZER_FILE = "expp_rank_*_mp_rank_*_optim_states.pt"

CONSOLIDATED_FOLDER = "muon_consolidated"
"""Where ``consolidate_on_save`` writes, inside the folder of DeepSpeed's tag."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What one file of a tag tells about the whole save.

    Attributes:
        folder: The tag's folder.
        kind: Whose optimizer saved it.
        stage: The ZeRO stage.
        ranks: Data-parallel ranks.
        record: Our layout record, where that file has one.
    """

    folder: Path
    kind: str
    stage: int
    ranks: int
    record: Mapping[str, Any]

    def __str__(self) -> str:
        ranks = counted(range(self.ranks), "data-parallel rank")
        return f"{self.folder}: saved by {self.kind} at ZeRO stage {self.stage} on {ranks}"

    def refuse_universal(self) -> None:
        """Raise a CheckpointError if it is a universal checkpoint, which has another loader."""
        if (self.folder / "zero").is_dir():
            raise CheckpointError(
                f'{self.folder}: a universal checkpoint: set "checkpoint": {{"load_universal": true}} in the DeepSpeed '
                f"configuration, and call engine.load_checkpoint"
            )

    def way(self, arguments: str = "") -> str:
        """Return the remedy: a command and a key, or a call of ``restore`` with ``arguments``."""
        out, run = str(self.folder), ""
        if not os.path.lexists(self.folder / CONSOLIDATED_FOLDER / INDEX_NAME):
            out = f"{self.folder}_consolidated"
            paths = shlex.join((str(self.folder), out))
            run = f"run 'python -m deepspeed_muon checkpoint consolidate {paths}' and "
        if arguments:
            return f"{run}call deepspeed_muon.restore(engine, {json.dumps(out)}, {arguments})"
        return f'{run}set "restore_from": {json.dumps(out)} in optimizer.params'


def glance(
    folder: Path, file: Path | None = None, *, load: Callable[[Path], Any] = load_pickle
) -> Glance | None:
    """Read who saved a tag, where and how, from one file; ``None`` if it is no folder that DeepSpeed saved.

    Args:
        folder: The tag's folder.
        file: The file of the optimizer to read, if it is there; by default the first one.
        load: Reads a file.
    """
    models = _model_files(folder) if folder.is_dir() else []
    if not models:
        return None
    with refusing(f"{folder}: not as DeepSpeed writes it"):
        model = load(models[0])
        files = [path for path in folder.iterdir() if _OPTIMIZER_FILE.fullmatch(path.name)]
        files = sorted(files) or sorted(folder.glob(_EXPERTS_OPTIMIZER_FILE)) or models
        own = file if file is not None and file in files else files[0]
        stage, inner = unwrapped(model.get("optimizer") or _optimizer_in(load(own)))
        inner = inner if isinstance(inner, Mapping) else {}
        ranks = int(model.get("dp_world_size", 1))
        return Glance(folder, optimizer_kind(inner), stage, ranks, inner.get(RECORD_KEY, {}))


def _optimizer_in(content: Mapping[str, Any]) -> Any:
    """Return what the wrapper of the optimizer saved in a file: of ZeRO, of experts or with the model."""
    return content.get("optimizer_state_dict") or content.get("optimizer") or {}


def unwrapped(saved: Mapping[str, Any]) -> tuple[int, Any]:
    """Return the ZeRO stage of a wrapper's state dict, and the ``state_dict()`` of the optimizer inside it."""
    if "fp32_flat_groups" in saved:
        return 3, saved.get("optimizer_state_dict")
    if "base_optimizer_state" in saved:
        return int(saved.get("zero_stage", 1)), saved["base_optimizer_state"]
    return 0, saved.get("optimizer_state_dict", saved)


def optimizer_kind(inner: Mapping[str, Any]) -> str:
    """Return whose state dict it is."""
    if RECORD_KEY in inner:
        return OURS
    groups, state = inner.get("param_groups", ()), inner.get("state", {})
    muon = any(group.get("use_muon") for group in groups) or any(
        "momentum_buffer" in s for s in state.values()
    )
    return "DeepSpeed's Muon" if muon else "AdamW"


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Return whether the files of a tag carry our layout record, as far as it can be told; nothing is unpickled."""
    place = Path(folder)
    if (place / "latest").is_file():
        place /= (place / "latest").read_text(errors="replace").strip()
    # At stage 0 the optimizer's state is in the model's file.
    for path in sorted(place.glob("*_optim_states.pt")) or sorted(place.glob("*_model_states.pt")):
        try:
            with zipfile.ZipFile(path) as archive:
                pickles = [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
        except Exception as error:  # of a damaged file the reader can raise anything; the next one may tell
            logger.debug("deepspeed_muon: %s cannot be read: %s", path, error)
            continue
        return any(RECORD_KEY.encode() in content for content in pickles)
    return False


class TagFolder:
    """The folder of one tag, its files mapped into memory.

    Attributes:
        folder: The tag's folder.
        model_file: The file that holds the model of the first rank.
        model: Its content.
        files: The files with the state of the optimizer: one for each rank, or fewer at stage 0.
        world_size: How many they are.
        wrappers: What the wrapper of the optimizer saved in each.
        inner: The ``state_dict()`` of the optimizer in each.
        kind: Whose optimizer saved them.
        stage: The ZeRO stage.
        progress: Where the run stood.
    """

    def __init__(self, folder: str | os.PathLike[str], *, trust: bool, verify: bool) -> None:
        """Find the files and map them; see :class:`~deepspeed_muon.checkpoint.deepspeed_files.DeepSpeedFiles`."""
        self._trust = trust
        with refusing(f"{str(folder)!r}"):
            self.folder = tag_folder(Path(folder))
            if verify:
                self._verify()
        with refusing(f"{self.folder}: not as DeepSpeed writes it"):
            if (self.folder / "zero").is_dir():
                raise CheckpointError(
                    f"{self.folder}: a universal checkpoint: give the folder that it was made from, or its set "
                    f"{self.folder / 'zero'}"
                )
            if (self.folder / "offloaded_tensors").exists():
                raise CheckpointError(
                    f"{self.folder}: checkpoints with NVMe offload cannot be read without an engine"
                )
            model_file = model_files(self.folder).get("mp_rank_00")
            if model_file is None:
                is_set = (self.folder / INDEX_NAME).is_file()
                raise CheckpointError(
                    f"{self.folder}: no model_states file: "
                    + (
                        "a consolidated set already"
                        if is_set
                        else "give a tag's folder, or one with a file 'latest'"
                    )
                )
            self.model_file = model_file
            self.model = self.load(model_file)
            experts = sorted(self.folder.glob(_EXPERTS_OPTIMIZER_FILE))
            self.files = self._partition_files() or experts or _model_files(self.folder)
            contents = [self.model if path == model_file else self.load(path) for path in self.files]
            self.wrappers: list[dict[str, Any]] = [_optimizer_in(content) for content in contents]
            self.world_size = len(self.files)
            found = [unwrapped(wrapper) for wrapper in self.wrappers]
            self.stage = found[0][0]
            for path, (stage, inner) in zip(self.files, found, strict=True):
                is_state = isinstance(inner, dict) and {"state", "param_groups"} <= inner.keys()
                if stage != self.stage or not is_state:
                    raise CheckpointError(
                        f"{path}: holds no optimizer state (elastic checkpoints are not read)"
                    )
            self.inner: list[dict[str, Any]] = [inner for _, inner in found]
            self.kind = optimizer_kind(self.inner[0])
            self._refuse_mixed_saves()
            self.progress = self._read_progress()

    def _partition_files(self) -> list[Path]:
        """Return the files of ZeRO, those of one model-parallel rank after the other; none at stage 0."""
        files: dict[tuple[int, int], Path] = {}
        for path in self.folder.iterdir():
            if (match := _OPTIMIZER_FILE.fullmatch(path.name)) is None:
                continue
            place = int(match.group(2)), int(match.group(1))
            if (other := files.setdefault(place, path)) != path:
                raise CheckpointError(
                    f"{path} and {other.name}: both are of rank {place[1]}: the folder holds two checkpoints"
                )
        if not files:
            return []
        model, data = (
            range(int(self.model.get(key) or 1 + max(place[number] for place in files)))
            for number, key in enumerate(("mp_world_size", "dp_world_size"))
        )
        saved = f"saved by {len(model) * len(data)} ranks"
        missing = next((place for place in product(model, data) if place not in files), None)
        if missing is not None:
            name = re.sub(r"pp_rank_\d+", f"pp_rank_{missing[1]}", next(iter(files.values())).name)
            name = re.sub(r"mp_rank_\d+", f"mp_rank_{missing[0]:02d}", name)
            raise CheckpointError(f"{self.folder / name}: missing; the checkpoint was {saved}")
        if len(files) > len(model) * len(data):
            left = next(place for place in sorted(files) if place[0] not in model or place[1] not in data)
            raise CheckpointError(
                f"{files[left]}: left of another checkpoint; this one was {saved} ({self.model_file.name})"
            )
        return [files[place] for place in sorted(files)]

    def load(self, path: Path) -> dict[str, Any]:
        """Return the content of a file."""
        content = load_pickle(path, trust=self._trust)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: not a checkpoint of DeepSpeed")
        return content

    def _verify(self) -> None:
        """Compare the content of every file with the CRC-32 that ``torch.save`` kept in it, reading each file once.

        Raises:
            CheckpointError: Naming the damaged file.
        """
        for path in sorted(self.folder.glob("*_states.pt")):
            with refusing(str(path)), zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise CheckpointError(
                    f"{path}: damaged: {damaged} in it does not have its CRC-32. Copy the file again, or take another "
                    f"checkpoint"
                )

    def _refuse_mixed_saves(self) -> None:
        """Raise if the files are of different saves."""
        others = [path for path in _model_files(self.folder) if path != self.model_file]
        contents: list[tuple[Path, Any, Mapping[Any, Any]]] = [(self.model_file, self.model, {})]
        contents += [(path, self.load(path), {}) for path in others]
        contents += [
            (path, inner, inner["state"]) for path, inner in zip(self.files, self.inner, strict=True)
        ]
        first: dict[str, tuple[Path, Any]] = {}
        for path, content, states in contents:
            facts: dict[str, Any] = {"save": save_of(content)}
            if facts["save"] is None:
                facts |= {key: content[key] for key in COUNTERS if key in content}
                facts |= {
                    f"step of partition {number}": int(state["step"])
                    for number, state in sorted(states.items())
                    if "step" in state
                }
            for key, value in facts.items():
                other, expected = first.setdefault(key, (path, value))
                if value != expected:
                    raise CheckpointError(
                        f"{other} and {path} are of different saves: {key} is {expected} in the first, {value} in the "
                        f"second. A save was killed, or files were mixed: copy all files of one save into the folder"
                    )

    def state_of(self, partition: int, rank: int = 0) -> Mapping[str, Any]:
        """Return what the optimizer of a rank keeps for a partition; nothing before the first step."""
        found: Mapping[str, Any] = self.inner[rank]["state"].get(partition, {})
        return found

    def step_of(self, partition: int, rank: int = 0) -> int:
        """Return the optimizer steps that a partition has taken."""
        state = self.state_of(partition, rank)
        if state and "step" not in state:
            return int(self.model.get("global_steps", 0)) - int(self.model.get("skipped_steps", 0))
        return int(state.get("step", 0))

    def masters(self, rank: int) -> Sequence[Tensor]:
        """Return the master partitions of a rank; not at stage 0."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return list(self.wrappers[rank][key])

    def master(self, rank: int, partition: int, key: str) -> Any:
        """Return the master partition of a rank; at stage 0 the weights with that key."""
        if self.stage:
            return self.masters(rank)[partition]
        wrapper = self.wrappers[rank]
        if "fp32_groups" in wrapper:
            return [tensor for group in wrapper["fp32_groups"] for tensor in group][partition]
        return self._weights(rank)[key]

    @functools.cache  # noqa: B019 - lives as long as the files
    def _weights(self, number: int) -> Mapping[str, Tensor]:
        """Return the weights of stage 0 in fp32 beside an optimizer's file: experts have files of their own."""
        part = re.search(r"mp_rank_(\d+)", self.files[number].name)
        mark = "mp_rank_00" if part is None else part.group()
        found = dict(self.load(self.folder / f"{mark}_model_states.pt").get("module") or {})
        if not found:
            raise CheckpointError(
                f"{self.folder}: a pipeline without ZeRO keeps its weights by layers, which are not read; consolidate "
                f"with the engine, or save at stage 1"
            )
        for path in sorted(self.folder.glob(f"layer_*_expert_*_{mark}_model_states.pt")):
            found.update(self.load(path))
        return found

    def aliases(self) -> dict[str, list[str]]:
        """Return the further names of parameters that several modules share."""
        found: dict[str, list[str]] = {}
        if self.stage == 0:
            first: dict[tuple[int, tuple[int, ...]], str] = {}
            for name, tensor in self.model["module"].items():
                if isinstance(tensor, Tensor) and tensor.numel():
                    kept = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
                    if kept != name:
                        found.setdefault(kept, []).append(name)
        else:
            for name, kept in dict(self.model.get("shared_params") or {}).items():
                found.setdefault(str(kept), []).append(str(name))
        return found

    def _read_progress(self) -> Progress:
        wrapper, scale = self.wrappers[0], None
        if wrapper.get("dynamic_loss_scale"):
            # At stage 0 the wrapper keeps the values itself, at the others in an object.
            saved = vars(wrapper["loss_scaler"]) if wrapper.get("loss_scaler") else wrapper
            scale = {key: saved[key] for key in SCALE_KEYS if key in saved}
        schedule = saved_schedule(self.model.get("lr_scheduler"))
        counters = {key: int(self.model.get(key, 0)) for key in COUNTERS}
        return Progress.model_validate({**counters, "lr_scheduler": schedule, "loss_scale": scale})


def _model_files(folder: Path) -> list[Path]:
    """Return the files with the counters and the model of each model-parallel rank; at stage 3 of each rank."""
    pattern = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def model_files(folder: Path) -> dict[str, Path]:
    """Return the file with the model of the first data-parallel rank of each model-parallel one, by ``mp_rank_..``."""
    found = {}
    for path in reversed(_model_files(folder)):
        if path.name.startswith(("mp_rank_", "zero_pp_rank_0_")):
            found[path.name[path.name.index("mp_rank_") :].removesuffix("_model_states.pt")] = path
    return found


def tag_folder(folder: Path) -> Path:
    """Return the folder of a tag: ``folder`` itself, or the one that ``latest`` in it names."""
    tag = latest_tag(folder)
    if tag is not None:
        if not is_name(tag):
            raise CheckpointError(
                f"{folder / 'latest'}: names {tag!r}, which is not a folder beside it: give the tag's folder"
            )
        folder = folder / tag
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    return folder
