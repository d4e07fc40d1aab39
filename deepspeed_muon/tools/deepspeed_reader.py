"""Read without an engine what ``engine.save_checkpoint`` wrote: our optimizer, DeepSpeed's own Muon or AdamW.

Stages 0 to 3 are read. The files are pickles; torch's restricted unpickler (``weights_only``) loads them, with a short
list of DeepSpeed's own classes allowed. They are memory-mapped, so that memory holds only what is being copied.

Every rank writes files of its own, so the files of several saves can be mixed in one folder. Ours carry a random id of
their save, which is compared; for other optimizers the counts of steps are. Our files also have a record of the layout
(:mod:`~deepspeed_muon.checkpoint.layout_record`). For those of AdamW and of DeepSpeed's Muon the layout is derived as
ZeRO makes it. An AdamW's set has both moments of every parameter: a restore, which knows the routes of the run, makes
the momentum of them.
"""

from __future__ import annotations

import functools
import math
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from deepspeed_muon.checkpoint.deepspeed_files import (
    EXPERT_OPTIMIZER_FILES,
    OPTIMIZER_FILE,
    all_model_files,
    find_tag_folder,
    model_files,
    optimizer_kind,
    unwrap,
    wrapper_state,
)
from deepspeed_muon.checkpoint.files import check_tensor, drop_pages, is_archive, load_pickle, refusing
from deepspeed_muon.checkpoint.index import (
    COUNTERS,
    INDEX_NAME,
    OURS,
    SCALE_KEYS,
    ParameterRecord,
    Progress,
    json_settings,
    refuse_float64,
    saved_schedule,
)
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY, read_records, save_of
from deepspeed_muon.checkpoint.parameters import PartitionedParameter, Transfer, full_slice, slices_by_name
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.placement import Placement, flat_placement, sharded_placement
from deepspeed_muon.step.int8 import SCALE_KEY, Int8Blocks


class DeepSpeedFiles:
    """The full parameters and optimizer state in one tag of ``engine.save_checkpoint``, by name.

    The files are memory-mapped.

    Attributes:
        folder: The tag's folder.
        model_file: The file with the model of the first rank.
        model: Its content.
        files: The files with the state of the optimizer: one for each rank, or fewer at stage 0.
        wrappers: The state dict of the wrapper around the optimizer in each.
        optimizers: The ``state_dict()`` of the optimizer in each.
        kind: Which optimizer saved them.
        stage: The ZeRO stage.
        progress: How far the run had advanced.
        slices: Name of each full tensor to the slices of it that data-parallel groups hold.
        parameters: Name of each full tensor to its record.
        index_fields: What the index of a conversion says besides files and parameters.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        trust: bool = False,
        verify: bool = True,
    ) -> None:
        """Find the files, map them into memory and work out where every parameter is.

        Args:
            folder: The tag's folder, or the folder with ``latest``.
            trust: See :func:`~deepspeed_muon.checkpoint.files.load_pickle`.
            verify: Compare every file with the CRC-32 in it, before anything of it is used.

        Raises:
            CheckpointError: Naming the file and, if one is to blame, the parameter.
        """
        self._trust = trust
        with refusing(f"{str(folder)!r}"):
            self.folder = find_tag_folder(Path(folder))
            if verify:
                _verify_crc(self.folder)
        with refusing(f"{self.folder}: not as DeepSpeed writes it"):
            # 1. Map the files, and refuse those of different saves.
            self._open_files()
            self._refuse_mixed_saves()
            self.progress = self._progress()
            # 2. Where each parameter is: from our record, or as ZeRO lays parameters out.
            self._full_momentum_offsets: Mapping[tuple[str, int], int] = {}
            self._weight_keys: Mapping[str, str] = {}
            settings: Mapping[str, Any] = {}
            lossy: list[str] = []
            if self.kind == OURS:
                contents = [optimizer.get(RECORD_KEY) for optimizer in self.optimizers]
                settings, parameters, self._weight_keys = read_records(contents, str(self.files[0]))
                if self.stage and any(p.placement.replicated for p in parameters):
                    raise CheckpointError(
                        f"{self.files[0]}: its layout record is not one of ZeRO stage {self.stage}"
                    )
            else:
                parameters, lossy = derive_layout(self)
                self._full_momentum_offsets = _full_momentum_offsets(self, parameters)
            # 3. Group the slices by full tensor, with the step count and the state that the files have.
            self.slices = slices_by_name(map(self._with_state, parameters), self.files)
            self.parameters = {name: first.record for name, (first, *_) in self.slices.items()}
            # At stage 0 not every rank writes a file.
            stage_0_ranks = math.prod(
                int(self.model.get(key) or 1) for key in ("mp_world_size", "dp_world_size")
            )
            self.index_fields: dict[str, Any] = {
                "source": {
                    "writer": "offline",
                    "optimizer": self.kind,
                    "zero_stage": self.stage,
                    "world_size": len(self.files) if self.stage else stage_0_ranks,
                },
                "lossy": lossy,
                "optimizer": settings,
                "groups": [json_settings(group) for group in self.optimizers[0]["param_groups"]],
                "progress": self.progress,
            }

    def _open_files(self) -> None:
        """Find and map the files of the model and of the optimizer."""
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
            hint = (
                "a consolidated set already" if is_set else "give a tag's folder, or one with a file 'latest'"
            )
            raise CheckpointError(f"{self.folder}: no model_states file: {hint}")
        self.model_file = model_file
        self.model = self._load(model_file)
        # One file for each rank with ZeRO, for each expert-parallel rank at stage 0, else the model's files.
        self.files = (
            self._partition_files()
            or sorted(self.folder.glob(EXPERT_OPTIMIZER_FILES))
            or all_model_files(self.folder)
        )
        contents = [self.model if path == model_file else self._load(path) for path in self.files]
        self.wrappers: list[dict[str, Any]] = [wrapper_state(content) for content in contents]
        unwrapped = [unwrap(wrapper) for wrapper in self.wrappers]
        self.stage = unwrapped[0][0]
        for path, (stage, optimizer) in zip(self.files, unwrapped, strict=True):
            is_state = isinstance(optimizer, dict) and {"state", "param_groups"} <= optimizer.keys()
            if stage != self.stage or not is_state:
                raise CheckpointError(f"{path}: holds no optimizer state (elastic checkpoints are not read)")
        self.optimizers: list[dict[str, Any]] = [optimizer for _, optimizer in unwrapped]
        self.kind = optimizer_kind(self.optimizers[0])
        # Without ZeRO, in fp32, the model's own weights are the masters.
        weights_are_masters = self.stage == 0 and "fp32_groups" not in self.wrappers[0]
        self._weights = [self._load_weights(path) for path in self.files] if weights_are_masters else []

    def _load(self, path: Path) -> dict[str, Any]:
        content = load_pickle(path, trust=self._trust)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: not a checkpoint of DeepSpeed")
        return content

    def _partition_files(self) -> list[Path]:
        """Return ZeRO's files, ordered by model-parallel and then by data-parallel rank; none at stage 0."""
        files: dict[tuple[int, int], Path] = {}  # by model-parallel and data-parallel rank
        for path in self.folder.iterdir():
            if (match := OPTIMIZER_FILE.fullmatch(path.name)) is None:
                continue
            ranks = int(match.group(2)), int(match.group(1))
            if (first := files.setdefault(ranks, path)) != path:
                raise CheckpointError(
                    f"{path} and {first.name}: both are of rank {ranks[1]}: the folder holds two checkpoints"
                )
        if not files:
            return []
        model_ranks, data_ranks = (
            range(int(self.model.get(key) or 1 + max(ranks[axis] for ranks in files)))
            for axis, key in enumerate(("mp_world_size", "dp_world_size"))
        )
        saved = f"saved by {len(model_ranks) * len(data_ranks)} ranks"
        # Every rank that saved must have its file.
        missing = next((ranks for ranks in product(model_ranks, data_ranks) if ranks not in files), None)
        if missing is not None:
            # The name that the missing file would have, made from that of another one.
            name = re.sub(r"pp_rank_\d+", f"pp_rank_{missing[1]}", next(iter(files.values())).name)
            name = re.sub(r"mp_rank_\d+", f"mp_rank_{missing[0]:02d}", name)
            raise CheckpointError(f"{self.folder / name}: missing; the checkpoint was {saved}")
        # A save on more ranks into the same tag leaves the files of the ranks that this one did not have.
        for ranks in sorted(files):
            if ranks[0] not in model_ranks or ranks[1] not in data_ranks:
                raise CheckpointError(
                    f"{files[ranks]}: left of another checkpoint; this one was {saved} ({self.model_file.name})"
                )
        return [files[ranks] for ranks in sorted(files)]

    def _load_weights(self, optimizer_file: Path) -> dict[str, Any]:
        """Return the model's weights of stage 0 beside an optimizer's file; experts have files of their own."""
        match = re.search(r"mp_rank_\d+", optimizer_file.name)
        model_rank = "mp_rank_00" if match is None else match.group()
        weights = dict(self._load(self.folder / f"{model_rank}_model_states.pt").get("module") or {})
        for path in sorted(self.folder.glob(f"layer_*_expert_*_{model_rank}_model_states.pt")):
            weights.update(self._load(path))
        return weights

    def _refuse_mixed_saves(self) -> None:
        """Raise if the files are of different saves: by the id of the save, or by counters and step counts."""
        models = [path for path in all_model_files(self.folder) if path != self.model_file]
        contents: list[tuple[Path, Any, Mapping[Any, Any]]] = [(self.model_file, self.model, {})]
        contents += [(path, self._load(path), {}) for path in models]
        contents += [(path, o, o["state"]) for path, o in zip(self.files, self.optimizers, strict=True)]
        first: dict[str, tuple[Path, Any]] = {}
        for path, content, states in contents:
            facts: dict[str, Any] = {"save": save_of(content)}
            # Saved by another optimizer, which gives no id to its saves.
            if facts["save"] is None:
                facts |= {key: content[key] for key in COUNTERS if key in content}
                facts |= {
                    f"step of partition {number}": int(state["step"])
                    for number, state in sorted(states.items())
                    if "step" in state
                }
            for key, value in facts.items():
                first_path, expected = first.setdefault(key, (path, value))
                if value != expected:
                    raise CheckpointError(
                        f"{first_path} and {path} are of different saves: {key} is {expected} in the first, {value} in "
                        f"the second. A save was killed, or files were mixed: copy all files of one save into the "
                        f"folder"
                    )

    def _progress(self) -> Progress:
        wrapper, loss_scale = self.wrappers[0], None
        if wrapper.get("dynamic_loss_scale"):
            # At stage 0 the wrapper has the values itself, at other stages in an object.
            values = vars(wrapper["loss_scaler"]) if wrapper.get("loss_scaler") else wrapper
            loss_scale = {key: values[key] for key in SCALE_KEYS if key in values}
        schedule = saved_schedule(self.model.get("lr_scheduler"))
        counters = {key: int(self.model.get(key, 0)) for key in COUNTERS}
        return Progress.model_validate({**counters, "lr_scheduler": schedule, "loss_scale": loss_scale})

    def _with_state(self, parameter: PartitionedParameter) -> PartitionedParameter:
        """Return a parameter with the step count and the state that the files of its group have."""
        first = parameter.members[0]
        where = f"{self.files[first]}: parameter {parameter.name}"
        groups = self.optimizers[first]["param_groups"]
        if parameter.record.group >= len(self.optimizers[0]["param_groups"]):
            raise CheckpointError(f"{where}: there is no param group {parameter.record.group}")
        if self.stage == 0 and not any(parameter.partition in group["params"] for group in groups):
            raise CheckpointError(f"{where}: there is no parameter number {parameter.partition}")
        state, step = self.state_of(parameter.partition, first), self.step_of(parameter.partition, first)
        return parameter.with_state(state, step)

    def state_of(self, partition: int, file: int = 0) -> Mapping[str, Any]:
        """Return the optimizer state of a partition in a file; empty before the first step."""
        state: Mapping[str, Any] = self.optimizers[file]["state"].get(partition, {})
        return state

    def step_of(self, partition: int, file: int = 0) -> int:
        """Return the optimizer steps that a partition has taken."""
        state = self.state_of(partition, file)
        if state and "step" not in state:  # DeepSpeed's Muon
            return int(self.model.get("global_steps", 0)) - int(self.model.get("skipped_steps", 0))
        return int(state.get("step", 0))

    def masters(self, file: int) -> Sequence[Tensor]:
        """Return the master partitions in a file; not at stage 0."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return list(self.wrappers[file][key])

    def _master(self, file: int, partition: int, name: str) -> Any:
        """Return a master partition in a file; at stage 0 the master of a parameter, by number or name."""
        if self.stage:
            return self.masters(file)[partition]
        if not self._weights:
            masters = [tensor for group in self.wrappers[file]["fp32_groups"] for tensor in group]
            return masters[partition]
        if not self._weights[file]:
            raise CheckpointError(
                f"{self.folder}: a pipeline without ZeRO keeps its weights by layers, which are not read; consolidate "
                f"with the engine, or save at stage 1"
            )
        return self._weights[file][self._weight_keys.get(name, name)]

    def _flat(self, parameter: PartitionedParameter, key: str, member: int) -> Tensor:
        """Return the flat partition of a group's member that holds the parameter, as its file has it.

        Raises:
            CheckpointError: If the file has none, or something else.
        """
        file = parameter.members[member]
        state = self.state_of(parameter.partition, file)
        try:
            saved = self._master(file, parameter.partition, parameter.name) if key == "fp32" else state[key]
        except (KeyError, IndexError) as error:
            remedy = "" if self.stage else ": consolidate it with the engine, or save at ZeRO stage 1"
            raise CheckpointError(
                f"{self.files[file]}: no {key} of parameter {parameter.name}{remedy}"
            ) from error
        is_int8 = key == "momentum_buffer" and getattr(saved, "dtype", None) == torch.int8
        where = f"{self.files[file]}: {key} of parameter {parameter.name}"
        check_tensor(saved, where, allow_int8=is_int8)
        refuse_float64(saved.dtype, where)
        flat: Tensor = saved.detach().reshape(-1)  # (partition_numel,) in the file's dtype, memory-mapped
        return flat

    def copy(self, transfers: Iterable[Transfer], piece: Tensor) -> None:
        """Carry out the transfers that make up a piece of a full tensor, which is mutated."""
        read = []
        for transfer in transfers:
            parameter, key, member = transfer.parameter, transfer.key, transfer.fragment.rank
            flat, offset = self._flat(parameter, key, member), transfer.fragment.partition_offset
            # DeepSpeed's Muon may have stored the momentum of the full matrix in place of the fragment's.
            if key == "momentum_buffer" and (parameter.name, member) in self._full_momentum_offsets:
                offset = self._full_momentum_offsets[parameter.name, member] + transfer.fragment.matrix_offset
            if offset + transfer.numel > flat.numel():
                raise CheckpointError(
                    f"{self.files[transfer.source]}: {key} of parameter {parameter.name} is cut off: the partition has "
                    f"{flat.numel()} elements"
                )
            values = flat.narrow(0, offset, transfer.numel)  # (numel,), a view of the file
            read.append(values)
            if flat.dtype == torch.int8:
                values = self._dequantized(parameter, member, flat, offset, transfer.numel)
            transfer.write(values, piece)
        drop_pages(read)

    def _dequantized(
        self, parameter: PartitionedParameter, member: int, flat: Tensor, offset: int, numel: int
    ) -> Tensor:
        """Return elements of an int8 momentum, ``(numel,)`` fp32, from an offset in the partition on."""
        blocks = self._int8_blocks(parameter.members, parameter.partition, member)
        file = parameter.members[member]
        scales: Any = self.state_of(parameter.partition, file).get(SCALE_KEY)
        if scales is None and not flat.narrow(0, offset, numel).any():
            return torch.zeros(
                numel, dtype=torch.float32, device="cpu"
            )  # nothing in the partition has had a gradient yet
        where = f"{self.files[file]}: {SCALE_KEY} of parameter {parameter.name}"
        check_tensor(scales, where)
        if scales.shape != (blocks.count,):
            raise CheckpointError(f"{where} has the shape {list(scales.shape)}, expected {blocks.count}")
        return blocks.decode(flat, scales.float(), offset, numel)

    @functools.cache  # noqa: B019 - lives as long as the files
    def _int8_blocks(self, members: tuple[int, ...], partition: int, member: int) -> Int8Blocks:
        """Return the blocks of the int8 momentum in a partition."""
        return Int8Blocks(
            fragment
            for slices in self.slices.values()
            for parameter in slices
            if parameter.members == members and parameter.partition == partition
            if (fragment := parameter.placement.fragment_on(member)) is not None
        )


def _verify_crc(folder: Path) -> None:
    """Compare every file with the CRC-32 that ``torch.save`` stores in it.

    Raises:
        CheckpointError: Naming the damaged file.
    """
    files = sorted(folder.glob("*_states.pt"))
    for path in tqdm(files, desc="checksums", unit="file", delay=2, disable=None, leave=False):
        with refusing(str(path)):
            if not is_archive(path):  # of a save with checkpoint_serialization false, which has no checksums
                continue
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(
                f"{path}: damaged: {damaged} in it does not have its CRC-32. Copy it again, or load another tag"
            )


def derive_layout(saved: DeepSpeedFiles) -> tuple[list[PartitionedParameter], list[str]]:
    """Work out where the parameters of another optimizer are, as ZeRO lays them out.

    Returns:
        The parameters before any step, and sentences about what a conversion loses.

    Raises:
        CheckpointError: Naming the file, if they cannot be read without an engine.
    """
    # 1. Refuse layouts that the files do not describe.
    for pattern, kind in (
        ("*expert_*_model_states.pt", "mixture-of-experts"),
        ("*mp_rank_01*", "model-parallel"),
    ):
        if files := sorted(saved.folder.glob(pattern)):
            raise CheckpointError(f"{files[0]}: {kind} checkpoints of {saved.kind} cannot be read")
    # 2. Lay the parameters out. Names identify them from here on, so each must be unique.
    layout = list(_layout_of_partitions(saved) if saved.stage else _layout_of_stage_0(saved))
    for name, count in Counter(name for _, name, *_ in layout).items():
        if count > 1:
            raise CheckpointError(f"{saved.model_file}: two parameters are called {name}")
    # 3. Make their records. Step counts and state are added by the caller.
    groups = saved.optimizers[0]["param_groups"]
    group_of = {index: number for number, group in enumerate(groups) for index in group["params"]}
    members = tuple(range(len(saved.files)))
    parameters = []
    for partition, name, shape, placement in layout:
        # The state of DeepSpeed's Muon shows which are its matrices.
        algorithm: Any = "muon" if "momentum_buffer" in saved.state_of(partition) else "adamw"
        record = ParameterRecord(shape=shape, algorithm=algorithm, group=group_of.get(partition, 0))
        parameters.append(
            PartitionedParameter(record, full_slice(name, shape), placement, (), members, partition)
        )
    return parameters, list(_losses(saved, parameters))


def _layout_of_partitions(
    saved: DeepSpeedFiles,
) -> Iterator[tuple[int, str, tuple[int, ...], Placement]]:
    """Yield partition, name, shape and placement of every parameter at stages 1 to 3, as ZeRO lays them out."""
    shapes = saved.model.get("param_shapes")
    if not isinstance(shapes, (list, tuple)):
        raise CheckpointError(f"{saved.model_file}: no param_shapes")
    world_size = len(saved.files)
    paddings = saved.wrappers[0].get("param_alignment_paddings")
    for partition, group in enumerate(shapes):
        # Stage 3 shards every parameter over the ranks; stages 1 and 2 divide the flat buffer of all parameters.
        partition_numel = saved.masters(0)[partition].numel()
        available = partition_numel if saved.stage == 3 else partition_numel * world_size
        offset = 0
        for position, (name, shape) in enumerate(group.items()):
            shape = tuple(int(n) for n in shape)
            numel = math.prod(shape)
            # Stage 3 pads each parameter, so that every rank has the same number of its elements.
            taken = -(-numel // world_size) if saved.stage == 3 else numel
            if min(shape, default=0) < 0 or taken > available - offset:
                raise CheckpointError(
                    f"{saved.model_file}: parameter {name} of shape {list(shape)} is larger than what is left of its "
                    f"partition"
                )
            if numel and saved.stage == 3:
                yield partition, name, shape, sharded_placement(offset, numel, taken)
            elif numel:
                yield partition, name, shape, flat_placement(offset, numel, partition_numel)
            offset += taken
            if saved.stage != 3 and paddings:
                offset += int(paddings[partition][position])


def _layout_of_stage_0(
    saved: DeepSpeedFiles,
) -> Iterator[tuple[int, str, tuple[int, ...], Placement]]:
    """Match the state of stage 0 to names by order, which is right for ``model.parameters()`` and checked by shape."""
    # The module's state dict has buffers and every name of a shared parameter; the optimizer has neither.
    left_out = set(saved.model.get("buffer_names") or ())
    # Shared parameters share their storage in the file, and so their address in its mapping.
    names: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in saved.model["module"].items():
        is_filled = isinstance(tensor, Tensor) and tensor.numel()
        if is_filled and names.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name) != name:
            left_out.add(name)
    shapes = [(n, tuple(t.shape)) for n, t in saved.model["module"].items() if n not in left_out]
    groups, states = saved.optimizers[0]["param_groups"], saved.optimizers[0]["state"]
    order = [index for group in groups for index in group["params"]]  # the model's order, with one group
    fits = len(order) == len(shapes) and all(
        tuple(states[i]["exp_avg"].shape) == shapes[i][1] for i in order if "exp_avg" in states.get(i, {})
    )
    if len(groups) != 1 or not fits:
        raise CheckpointError(
            f"{saved.model_file}: a checkpoint of stage 0 without names, whose parameters cannot be matched to the "
            f"model's by order; load it into an engine and save it at stage 1"
        )
    for number, (name, shape) in enumerate(shapes):
        yield number, name, shape, sharded_placement(0, math.prod(shape), math.prod(shape))


def _full_momentum_offsets(
    saved: DeepSpeedFiles, parameters: Sequence[PartitionedParameter]
) -> dict[tuple[str, int], int]:
    """Return the offset of a matrix's full momentum in a rank's state, by name and rank.

    At stages 1 and 2 DeepSpeed's Muon stores, on every rank, the full momentum of all matrices that touch its
    partition. Partitions that store only their own elements have no entries.
    """
    offsets: dict[tuple[str, int], int] = {}
    for partition, members in groupby(parameters, key=lambda parameter: parameter.partition):
        # Example: on a rank whose partition ends inside of b, after a (8 elements) and b (12): a at 0 and b at 8, and
        # 20 elements in all, however few of b the partition has.
        partition_offsets: dict[tuple[str, int], int] = {}
        numel_on: Counter[int] = Counter()
        for parameter in members if saved.stage in (1, 2) else ():
            for rank in parameter.placement.ranks:
                partition_offsets[parameter.name, rank] = numel_on[rank]
                numel_on[rank] += parameter.record.numel
        buffers = {rank: saved.state_of(partition, rank).get("momentum_buffer") for rank in numel_on}
        if all(buffer is not None and buffer.numel() == numel_on[rank] for rank, buffer in buffers.items()):
            offsets |= partition_offsets
    return offsets


def _losses(saved: DeepSpeedFiles, parameters: Sequence[PartitionedParameter]) -> Iterator[str]:
    """Yield sentences about what the conversion of another optimizer's state loses."""
    stepped = [p for p in parameters if saved.step_of(p.partition)]
    if not stepped:
        return
    yield "rates, decay, betas, eps and adjust_lr_fn are not carried over: those of the run's optimizer.params hold"
    if saved.kind == "AdamW":
        betas = saved.optimizers[0]["param_groups"][stepped[0].record.group].get("betas", ["?"])
        yield (
            f"AdamW's exp_avg becomes the momentum of the run's matrices: the same moving average of the gradient, "
            f"with its decay {betas[0]}; exp_avg_sq of these matrices is dropped"
        )
        return
    yield "DeepSpeed's Muon counts no steps; global_steps - skipped_steps was taken"
    buffers = (
        saved.state_of(p.partition)["momentum_buffer"] for p in stepped if p.record.algorithm == "muon"
    )
    dtype = next((buffer.dtype for buffer in buffers), torch.float32)
    if dtype != torch.float32:
        yield f"the momentum had been stored in {dtype} and is exactly that, converted to fp32"
