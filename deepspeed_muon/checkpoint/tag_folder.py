"""The files of one tag of ``engine.save_checkpoint``: which there are, what they hold, whether one save wrote them.

Every rank writes a file of its own, so somebody can mix the files of several saves in one folder. The reader compares
what the files of one save have in common: the optimizer's steps, the settings of the param groups, the loss scale,
the layout, and the counters in the model's files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed_muon.checkpoint.index import COUNTERS, SCALE_KEYS, Progress
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY, common_part
from deepspeed_muon.checkpoint.sealed import is_json, json_settings, load_pickle, read_regular, refusing
from deepspeed_muon.errors import CheckpointError

__all__ = ["MODEL_FILES", "TagFolder", "model_file_in"]

MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""What the file with the model of the first rank may be called: at stages 0 to 2, and at stage 3."""

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# At stage 0 each rank of an expert-parallel group has a file for the optimizer.
_EXPERTS_OPTIMIZER_FILE = "expp_rank_*_mp_rank_*_optim_states.pt"
_PROGRESS_KEYS = (*COUNTERS, "dp_world_size")


class TagFolder:
    """The folder of one tag, its files mapped into memory.

    Attributes:
        folder: The tag's folder.
        model_file: The file that holds the model of the first rank.
        world_size: Files with the state of the optimizer: one for each rank, or fewer at stage 0.
        stage: The ZeRO stage.
        progress: Where the run stood.
    """

    def __init__(self, folder: str | os.PathLike[str], *, trust: bool) -> None:
        """Find the files and map them; see :class:`~deepspeed_muon.checkpoint.deepspeed_files.DeepSpeedFiles`."""
        self._trust = trust
        with refusing(f"{str(folder)!r}"):
            self.folder = _tag_folder(Path(folder))
        with refusing(f"{self.folder}: not as DeepSpeed writes it"):
            self._refuse_unsupported()
            model_file = model_file_in(self.folder)
            if model_file is None:
                raise CheckpointError(
                    f"{self.folder}: no model_states file: not the folder of a tag of DeepSpeed"
                )
            self.model_file = model_file
            self._model = load_pickle(self.model_file, trust=trust)
            if not isinstance(self._model, dict):
                raise CheckpointError(f"{self.model_file}: not a checkpoint of DeepSpeed")
            self._ranks = self._read_ranks()
            self.stage = self._read_stage()
            if not self._ranks:
                self._files, self._whole = self._read_whole()
            self.world_size = len(self._files)
            self._inner = [self._inner_state(number) for number in range(self.world_size)]
            self._refuse_mixed_saves()
            self.progress = self._read_progress()

    def _refuse_unsupported(self) -> None:
        if (self.folder / "offloaded_tensors").exists():
            raise CheckpointError(
                f"{self.folder}: checkpoints with NVMe offload cannot be read without an engine"
            )

    def _read_ranks(self) -> list[dict[str, Any]]:
        """Return what ZeRO saved on each rank: those of one model-parallel rank after the other."""
        files: dict[tuple[int, int], Path] = {}
        for path in self.folder.iterdir():
            match = _OPTIMIZER_FILE.fullmatch(path.name)
            place = (int(match.group(2)), int(match.group(1))) if match else (0, 0)
            if match and (other := files.setdefault(place, path)) != path:
                raise CheckpointError(
                    f"{path} and {other.name}: both are of rank {place[1]}: the folder holds two checkpoints"
                )
        if not files:
            return []
        data, model = (int(self._model.get(f"{kind}_world_size") or 1) for kind in ("dp", "mp"))
        data = max(data, 1 + max(rank for _, rank in files))
        model = max(model, 1 + max(rank for rank, _ in files))
        places = [(part, rank) for part in range(model) for rank in range(data)]
        missing = next((place for place in places if place not in files), None)
        expected = int(self._model.get("dp_world_size", 0)) * int(self._model.get("mp_world_size") or 1)
        if missing is not None:
            name = re.sub(r"pp_rank_\d+", f"pp_rank_{missing[1]}", next(iter(files.values())).name)
            name = re.sub(r"mp_rank_\d+", f"mp_rank_{missing[0]:02d}", name)
            raise CheckpointError(
                f"{self.folder / name}: missing; the checkpoint was saved by {expected} ranks"
            )
        if 0 < expected < len(files):
            own = int(self._model["dp_world_size"]), int(self._model.get("mp_world_size") or 1)
            left = next(place for place in places if place[1] >= own[0] or place[0] >= own[1])
            raise CheckpointError(
                f"{files[left]}: left of another checkpoint; this one was saved by {expected} ranks "
                f"({self.model_file.name})"
            )
        states = []
        self._files = [files[place] for place in places]
        for path in self._files:
            content = load_pickle(path, trust=self._trust)
            if not isinstance(content, dict) or not isinstance(content.get("optimizer_state_dict"), dict):
                raise CheckpointError(f"{path}: not an optimizer state of DeepSpeed")
            states.append(content["optimizer_state_dict"])
        return states

    def _read_whole(self) -> tuple[list[Path], list[dict[str, Any]]]:
        """Return the files of stage 0 that hold the state of the optimizer, and the state of its wrapper in each."""
        files = sorted(self.folder.glob(_EXPERTS_OPTIMIZER_FILE)) or _model_files(self.folder)
        contents = [self._model if path == self.model_file else self._load(path) for path in files]
        return files, [content.get("optimizer") or {} for content in contents]

    def _load(self, path: Path) -> dict[str, Any]:
        content = load_pickle(path, trust=self._trust)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: not a checkpoint of DeepSpeed")
        return content

    def _read_stage(self) -> int:
        if not self._ranks:
            return 0
        if "fp32_flat_groups" in self._ranks[0]:
            return 3
        return int(self._ranks[0].get("zero_stage", 1))

    def _inner_state(self, number: int) -> dict[str, Any]:
        """Return the ``state_dict()`` of the optimizer inside ZeRO's wrapper."""
        if self.stage == 0:
            inner: Any = self._whole[number]
            if isinstance(inner, dict) and "optimizer_state_dict" in inner:
                inner = inner["optimizer_state_dict"]
        else:
            saved = self._ranks[number]
            inner = saved.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
        if not isinstance(inner, dict) or "state" not in inner or "param_groups" not in inner:
            raise CheckpointError(
                f"{self._files[number]}: holds no optimizer state (elastic checkpoints are not read)"
            )
        return inner

    def _refuse_mixed_saves(self) -> None:
        """Raise if the files were saved at different moments."""
        _refuse_mixed_ranks(self._files, self._inner, self._ranks)
        others = [path for path in _model_files(self.folder) if path != self.model_file]
        models = {self.model_file: self._model, **{path: self._load(path) for path in others}}
        _refuse_mixed_models(models, self._files[0], self._inner[0])

    def model_files(self) -> dict[str, Path]:
        """Return the file with the model of the first data-parallel rank of each model-parallel one."""
        found = {}
        for path in _model_files(self.folder):
            if path.name.startswith(("mp_rank_", "zero_pp_rank_0_")):
                found[path.name[path.name.index("mp_rank_") :].removesuffix("_model_states.pt")] = path
        return found

    def _state(self, partition: int, rank: int = 0) -> Mapping[str, Any]:
        """Return what the optimizer of a rank keeps for a partition; nothing before the first step."""
        found: Mapping[str, Any] = self._inner[rank]["state"].get(partition, {})
        return found

    def _step(self, partition: int, rank: int = 0) -> int:
        """Return the optimizer steps that a partition has taken."""
        state = self._state(partition, rank)
        if state and "step" not in state:
            return int(self._model.get("global_steps", 0)) - int(self._model.get("skipped_steps", 0))
        return int(state.get("step", 0))

    def _masters(self, rank: int) -> Sequence[Tensor]:
        """Return the master partitions of a rank."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return list(self._ranks[rank][key])

    def _aliases(self) -> dict[str, list[str]]:
        """Return the further names of parameters that several modules share."""
        found: dict[str, list[str]] = {}
        if self.stage == 0:
            first: dict[tuple[int, tuple[int, ...]], str] = {}
            for name, tensor in self._model["module"].items():
                if isinstance(tensor, Tensor) and tensor.numel():
                    kept = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
                    if kept != name:
                        found.setdefault(kept, []).append(name)
        else:
            for name, kept in dict(self._model.get("shared_params") or {}).items():
                found.setdefault(str(kept), []).append(str(name))
        return found

    def _read_progress(self) -> Progress:
        schedule = self._model.get("lr_scheduler")
        wrapper = self._ranks[0] if self._ranks else self._whole[0]
        scale = None
        if wrapper.get("dynamic_loss_scale"):
            # At stage 0 the wrapper keeps the values itself, at the others in an object.
            saved = vars(wrapper["loss_scaler"]) if wrapper.get("loss_scaler") else wrapper
            scale = {key: saved[key] for key in SCALE_KEYS if key in saved}
        return Progress(
            **{key: int(self._model.get(key, 0)) for key in COUNTERS},
            lr_scheduler=schedule if isinstance(schedule, dict) and is_json(schedule) else None,
            lr_scheduler_class=None,
            loss_scale=scale,
        )


def model_file_in(folder: Path) -> Path | None:
    """Return the file that holds the model of the first rank."""
    return next((folder / name for name in MODEL_FILES if (folder / name).is_file()), None)


def _model_files(folder: Path) -> list[Path]:
    """Return the files with the counters and the model of each model-parallel rank; at stage 3 of each rank."""
    pattern = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def _tag_folder(folder: Path) -> Path:
    latest = folder / "latest"
    if os.path.lexists(latest):
        tag = read_regular(latest, 4096).decode().strip()
        if not tag or Path(tag).name != tag or tag == "..":
            raise CheckpointError(f"{latest}: names {tag!r}, which is not a folder beside it")
        folder = folder / tag
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    return folder


def _refuse_mixed_ranks(
    files: Sequence[Path], inner: Sequence[Mapping[str, Any]], wrappers: Sequence[Mapping[str, Any]]
) -> None:
    """Raise if the optimizer files of the ranks are not of one save; ``wrappers`` is empty at stage 0."""
    first: dict[str, tuple[Path, dict[str, Any]]] = {}
    for number, path in enumerate(files):
        with refusing(f"{path}: not the state of an optimizer"):
            facts = _facts(inner[number], wrappers[number] if wrappers else {})
        # The stages of a pipeline have other param groups. Their records of the layout tell the save.
        model_rank = path.name.rpartition("mp_rank_")[2]
        for kind, told in ((model_rank, facts), ("all", {"layout": facts["layout"]})):
            other, expected = first.setdefault(kind, (path, told))
            _compare(other, expected, path, told)


def _refuse_mixed_models(models: Mapping[Path, Any], file: Path, inner: Mapping[str, Any]) -> None:
    """Raise if the model's files are of different saves, or an optimizer file with our record is of another one."""
    progress = {
        path: {key: model.get(key) for key in _PROGRESS_KEYS if isinstance(model, Mapping)}
        for path, model in models.items()
    }
    first = next(iter(models))
    for path, facts in progress.items():
        _compare(first, progress[first], path, facts)
    record = inner.get(RECORD_KEY)
    if isinstance(record, Mapping) and "global_steps" in record:
        facts = {**progress[first], "global_steps": record["global_steps"]}
        _compare(first, progress[first], file, facts)


def _facts(inner: Mapping[str, Any], wrapper: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the optimizer files of all ranks of one save have in common, the steps first."""
    facts: dict[str, Any] = {
        f"step of partition {index}": int(state["step"])
        for index, state in sorted(inner["state"].items())
        if "step" in state
    }
    for index, group in enumerate(inner["param_groups"]):
        comparable = {**json_settings(group), "params": group["params"]}
        facts |= {f"{key} of param group {index}": value for key, value in comparable.items()}
    scaler = wrapper.get("loss_scaler")
    facts |= {f"{key} of the loss scale": getattr(scaler, key, None) for key in SCALE_KEYS}
    facts |= {key: wrapper.get(key) for key in ("zero_stage", "partition_count", "ds_version")}
    return {**facts, "layout": common_part(inner.get(RECORD_KEY))}


def _compare(first: Path, expected: Mapping[str, Any], other: Path, found: Mapping[str, Any]) -> None:
    """Raise if two files of one checkpoint differ in a fact that they share."""
    for key in (*expected, *(key for key in found if key not in expected)):
        mine, theirs = expected.get(key), found.get(key)
        if mine != theirs:
            said = "another one" if key == "layout" else f"{mine} in the first, {theirs} in the second"
            raise CheckpointError(
                f"{first} and {other} are of different checkpoints: {key} is {said}. Copy all files of one save into "
                f"the folder"
            )
