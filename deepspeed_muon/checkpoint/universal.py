"""DeepSpeed's universal checkpoints: written from our files, and loaded through our own layouts.

DeepSpeed's converter and its loader of stage 3 know Adam's keys only, and its stages 1 and 2 read parameters from
places that are wrong under round-robin gradients. So our checkpoints are converted here, into the same folders and
files, and a wrapper around our optimizer loads any universal checkpoint with the layouts that its steps use.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.deepspeed_files import DeepSpeedFiles, load_pickle
from deepspeed_muon.checkpoint.index import STATE_KEYS, ParameterRecord, Progress
from deepspeed_muon.checkpoint.live import collect
from deepspeed_muon.checkpoint.restore import restore_from_source
from deepspeed_muon.checkpoint.shards import fsync_folder, write_aside
from deepspeed_muon.checkpoint.sources import StateSource, file_digest
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.routing import Route
from deepspeed_muon.zero.checkpointing import set_loss_scale_state

__all__ = ["UniversalSource", "convert_to_universal", "hook_converter", "use_universal_loader"]

logger = logging.getLogger("deepspeed_muon")

RECORD_NAME = "muon_universal.json"
FORMAT = "deepspeed_muon.universal"
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def convert_to_universal(
    input_folder: str | os.PathLike[str], output_folder: str | os.PathLike[str], **reading: Any
) -> list[str]:
    """Write a tag's folder of DeepSpeed's as a universal checkpoint.

    It consists of ``zero/<parameter>/<state>.pt``, the model states under the names that every stage looks for, and a
    record with checksums.

    Args:
        input_folder: The tag's folder: ours, DeepSpeed's own Muon's, or AdamW's, of stages 0 to 3.
        output_folder: The folder to write; must not exist yet. ``latest_universal`` beside it will name it.
        **reading: ``trust``, ``include``, ``exclude`` of :class:`DeepSpeedFiles`.

    Returns:
        What was lost or invented, in words.

    Raises:
        CheckpointError: Naming the file and the parameter.
    """
    saved = DeepSpeedFiles(input_folder, **reading)
    out = Path(os.path.abspath(output_folder))
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out}: already holds something; name a new folder")
    partial = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        files = _write_parameters(saved, partial / "zero")
        torch.save({"param_groups": saved.groups}, partial / "zero" / "optimizer_state.pt")
        for name in _MODEL_FILES:
            _link(saved.model_file, partial / name)
        write_aside(partial / RECORD_NAME, json.dumps(_record(saved, files), indent=1).encode())
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
        fsync_folder(out.parent)
        write_aside(out.parent / "latest_universal", out.name.encode())
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{out}: {error}") from error
        raise
    return saved.lossy


def _write_parameters(saved: DeepSpeedFiles, folder: Path) -> dict[str, str]:
    files = {}
    for name, parameter in saved.parameters.items():
        if not _is_plain(name):
            raise CheckpointError(f"parameter {name!r} cannot name a folder")
        place = folder / name
        place.mkdir(parents=True)
        for key in parameter.keys:
            # DeepSpeed's own converter writes this dict at stages 1 and 2; its loaders read "param" from it.
            torch.save({"param": saved.read(name, key), "cat_dim": 0}, place / f"{key}.pt")
            files[f"{name}/{key}"] = file_digest(place / f"{key}.pt")
        torch.save(parameter.step, place / "step.pt")
    return files


def _record(saved: DeepSpeedFiles, files: Mapping[str, str]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": 1,
        "source": {"optimizer": saved.kind, "zero_stage": saved.stage, "world_size": saved.world_size},
        "lossy": saved.lossy,
        "groups": saved.groups,
        "loss_scale": saved.progress.loss_scale,
        "parameters": {
            name: {
                "shape": list(parameter.shape),
                "algorithm": parameter.algorithm,
                "heads": parameter.heads,
                "grid": parameter.grid,
                "transposed": parameter.transposed,
                "rows": parameter.row_count,
                "step": parameter.step,
                "group": parameter.group,
                "sha256": {key: files[f"{name}/{key}"] for key in parameter.keys},
            }
            for name, parameter in saved.parameters.items()
        },
    }


def _is_plain(name: str) -> bool:
    return bool(name) and name not in (".", "..") and os.path.basename(name) == name and "\0" not in name


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


class UniversalSource:
    """A universal checkpoint, from our converter or from DeepSpeed's. Pickles are read with ``weights_only``."""

    def __init__(self, folder: str | os.PathLike[str], routes: Mapping[str, Route]) -> None:
        """Read what there is; our converter's record is used where there is one.

        Args:
            folder: The folder with ``zero``.
            routes: The model's parameters by name, for checkpoints that do not say whose state they hold.

        Raises:
            CheckpointError: Naming the file.
        """
        self._folder = Path(folder)
        self.where = str(folder)
        self.groups: Sequence[Mapping[str, Any]] = []
        self.progress: Progress | None = None
        self.loss_scale: dict[str, float] | None = None
        self._sha: dict[str, dict[str, str]] = {}
        self._from_adam: set[str] = set()
        self._parameters: dict[str, ParameterRecord] = {}
        if not (self._folder / "zero").is_dir():
            raise CheckpointError(f"{self._folder}: no folder 'zero': not a universal checkpoint")
        if (self._folder / RECORD_NAME).is_file():
            self._read_record()
        else:
            self._read_folders(routes)

    @property
    def parameters(self) -> Mapping[str, ParameterRecord]:
        """The records."""
        return self._parameters

    def _read_record(self) -> None:
        path = self._folder / RECORD_NAME
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != FORMAT or content["version"] != 1:
                raise ValueError("another format or version")
            for name, entry in content["parameters"].items():
                if not _is_plain(name):
                    raise ValueError(f"parameter {name!r} cannot name a folder")
                sha = entry.pop("sha256")
                tensors = {key: f"zero/{name}/{key}.pt" for key in sha}
                self._parameters[name] = ParameterRecord(**entry, tensors=tensors)
                self._sha[name] = sha
            self.groups = list(content["groups"])
            self.loss_scale = content["loss_scale"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: refused: {error}") from error

    def _read_folders(self, routes: Mapping[str, Route]) -> None:
        """Describe a checkpoint of DeepSpeed's own converter by its files. It holds buffers and frozen ones as well."""
        for place in sorted((self._folder / "zero").iterdir()):
            name = place.name
            if not place.is_dir() or name not in routes:
                continue
            algorithm = routes[name].algorithm
            found = {path.stem for path in place.glob("*.pt")}
            keys = list(STATE_KEYS[algorithm])
            if algorithm == "muon" and "momentum_buffer" not in found and "exp_avg" in found:
                self._from_adam.add(name)
            elif not set(keys) <= found:
                keys = []
            step = 0
            if keys:
                saved = load_pickle(place / "step.pt") if "step" in found else self._global_step()
                step = int(saved)
            shape = tuple(self._tensor(name, "fp32").shape)
            if torch.Size(shape).numel() == torch.Size(routes[name].shape).numel():
                shape = routes[name].shape  # from stage 3 DeepSpeed writes flat tensors
            self._parameters[name] = ParameterRecord(
                shape=shape,
                algorithm="muon" if algorithm == "muon" else "adamw",
                step=step,
                group=0,
                tensors={key: f"zero/{name}/{key}.pt" for key in ("fp32", *(keys if step else ()))},
            )
        if self._from_adam:
            logger.warning(
                "deepspeed_muon: %s was saved by AdamW: its exp_avg becomes the momentum of %d matrices, their "
                "exp_avg_sq is dropped",
                self._folder,
                len(self._from_adam),
            )

    def _global_step(self) -> int:
        for name in _MODEL_FILES:
            if (self._folder / name).is_file():
                state = load_pickle(self._folder / name)
                return int(state["global_steps"]) - int(state["skipped_steps"])
        raise CheckpointError(f"{self._folder}: says nowhere how many steps were taken")

    def digest(self) -> str:
        """Return a checksum of what was found."""
        records = {name: record.model_dump_json() for name, record in sorted(self._parameters.items())}
        return hashlib.sha256(json.dumps([records, self._sha]).encode()).hexdigest()

    def verify(self, share: int, shares: int) -> None:
        """Check this share of the files; see :class:`StateSource`."""
        for name in sorted(self._parameters)[share::shares]:
            record = self._parameters[name]
            for key in record.tensors:
                path = self._path(name, key)
                expected = self._sha.get(name, {}).get(key)
                try:
                    damaged = expected is not None and file_digest(path) != expected
                except OSError as error:
                    raise CheckpointError(f"{path}: {error.strerror or error}; parameter {name}") from error
                if damaged:
                    raise CheckpointError(f"{path}: its checksum is not that of the record; parameter {name}")
                shape = tuple(self._tensor(name, key).shape)
                expected_shape = record.shape_of(key)
                if (
                    shape != expected_shape
                    and torch.Size(shape).numel() != torch.Size(expected_shape).numel()
                ):
                    raise CheckpointError(
                        f"{path}: shape {list(shape)}, expected {list(expected_shape)}; parameter {name}"
                    )

    def read(self, parameter: str, key: str, start: int, numel: int) -> Tensor:
        """Return a run of a tensor; see :class:`StateSource`."""
        return self._tensor(parameter, key).reshape(-1).narrow(0, start, numel).float()

    def _path(self, name: str, key: str) -> Path:
        file = "exp_avg" if key == "momentum_buffer" and name in self._from_adam else key
        return self._folder / "zero" / name / f"{file}.pt"

    def _tensor(self, name: str, key: str) -> Tensor:
        path = self._path(name, key)
        content = load_pickle(path)
        tensor = content.get("param") if isinstance(content, dict) else content
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path}: holds no tensor; parameter {name}")
        return tensor

    def close(self) -> None:
        """Nothing stays open."""


def use_universal_loader(engine: Any) -> None:
    """Let the wrapper of ``engine`` load universal checkpoints through our layouts.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound.
    """
    wrapper = engine.optimizer
    if not hasattr(wrapper, "_load_universal_checkpoint"):
        return

    def load(checkpoint_folder: str, load_optimizer_states: bool = True, *_: Any, **__: Any) -> None:
        source: StateSource | None = None
        error: Exception | None = None
        scale = None
        try:
            routes = {parameter.route.name: parameter.route for parameter in collect(engine).parameters}
            source = universal = UniversalSource(checkpoint_folder, routes)
            scale = universal.loss_scale
        except Exception as caught:
            error = caught
        restore_from_source(engine, source, progress=False, state_too=load_optimizer_states, error=error)
        if scale:
            set_loss_scale_state(wrapper, dict(scale))

    wrapper._load_universal_checkpoint = load


def hook_converter() -> Callable[[], None]:
    """Let DeepSpeed's ``ds_to_universal.main`` convert Muon checkpoints too, in processes that import this package.

    Everything else goes to the original.

    Returns:
        A function that removes the hook.
    """
    from deepspeed.checkpoint import ds_to_universal

    original = ds_to_universal.main

    @functools.wraps(original)
    def main(args: Any) -> Any:
        try:
            kind = DeepSpeedFiles(args.input_folder).kind
        except CheckpointError:
            kind = "AdamW"
        if kind == "AdamW":
            return original(args)
        convert_to_universal(args.input_folder, args.output_folder)
        return None

    ds_to_universal.main = main

    def unhook() -> None:
        if ds_to_universal.main is main:
            ds_to_universal.main = original

    return unhook
