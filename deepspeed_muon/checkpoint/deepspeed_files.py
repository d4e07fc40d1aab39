"""Read without an engine what DeepSpeed saved of our optimizer, its own Muon or AdamW, at stages 0 to 3.

The files are pickles. torch's restricted unpickler (``weights_only``) reads them, with a short list of DeepSpeed's own
classes allowed. They are mapped into memory, so that the disk reads only what is copied.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.conversion import repeat_in_run, route_saved
from deepspeed_muon.checkpoint.index import OURS, STATE_KEYS
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY, RecordedParameter, read_records
from deepspeed_muon.checkpoint.saved import SavedParameter, SavedTensor
from deepspeed_muon.checkpoint.sealed import check_tensor, drop_pages, json_settings, refusing
from deepspeed_muon.checkpoint.sources import WINDOW, views
from deepspeed_muon.checkpoint.tag_folder import TagFolder, optimizer_kind
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.rows import ROW_STATE_KEY
from deepspeed_muon.plan.slices import TensorSlice, add_up
from deepspeed_muon.plan.spread import (
    Fragment,
    Spread,
    flat_spread,
    fragments_of,
    runs_within,
    sharded_spread,
)


class DeepSpeedFiles(TagFolder):
    """The parameters that one tag of ``engine.save_checkpoint`` holds, by name.

    Attributes:
        kind: Whose optimizer saved it.
        optimizer: The settings of our optimizer; empty for others.
        parameters: The parameters by name.
        groups: The settings of the param groups.
        lossy: What is lost or invented when another optimizer's state becomes ours, in words.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        trust: bool = False,
        verify: bool = True,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        """Find the files, map them into memory and work out where every parameter lies.

        Args:
            folder: The tag's folder, or the folder with ``latest``.
            trust: See :func:`~deepspeed_muon.checkpoint.sealed.load_pickle`.
            verify: Compare every file with the CRC-32 in it, before anything of it is used.
            include: For AdamW checkpoints: patterns of names that go to Muon.
            exclude: For AdamW checkpoints: patterns of names that stay with AdamW.

        Raises:
            CheckpointError: Naming the file and, where one is to blame, the parameter.
        """
        super().__init__(folder, trust=trust, verify=verify)
        self._include, self._exclude = tuple(include), tuple(exclude)
        self.lossy: list[str] = []
        with refusing(f"{self.folder}: not as DeepSpeed writes it"):
            self._describe()

    def _describe(self) -> None:
        self.groups = [json_settings(group) for group in self._inner[0]["param_groups"]]
        self.optimizer: dict[str, Any] = {}
        self.kind = optimizer_kind(self._inner[0])
        found = self._from_record() if self.kind == OURS else self._without_record()
        parts: dict[str, dict[TensorSlice, SavedParameter]] = {}
        for each in found:
            other = parts.setdefault(each.name, {}).setdefault(each.part, each)
            if other is not each and each.files == other.files:
                raise CheckpointError(f"{self.model_file}: two parameters are called {each.name}")
        self.parameters = {name: SavedTensor(tuple(each.values())) for name, each in parts.items()}
        for tensor in self.parameters.values():
            self._check_parts(tensor)
            for parameter in tensor.held:
                self._check_lengths(parameter)

    def _from_record(self) -> list[SavedParameter]:
        records = read_records([inner.get(RECORD_KEY) for inner in self._inner], str(self._files[0]))
        found = []
        for record, files in records:
            if self.stage and record.world_size != len(files):
                raise CheckpointError(
                    f"{self._files[0]}: its layout record is of {record.world_size} ranks, there are {len(files)}"
                )
            self.optimizer = dict(record.optimizer)
            found += [self._recorded(entry, tuple(files)) for entry in record.parameters]
        return found

    def _recorded(self, entry: RecordedParameter, files: tuple[int, ...]) -> SavedParameter:
        """Return a parameter of a record, with what the files of its ranks say of it."""
        first = files[0]
        where = f"{self._files[first]}: parameter {entry.name}"
        groups = self._inner[first]["param_groups"]
        if entry.group >= len(self.groups):
            raise CheckpointError(f"{where}: there is no param group {entry.group}")
        if self.stage == 0 and not any(entry.partition in group["params"] for group in groups):
            raise CheckpointError(f"{where}: there is no parameter number {entry.partition}")
        step = self._step(entry.partition, first)
        rows = ROW_STATE_KEY in self._state(entry.partition, first) and step and entry.rows
        keys = (*STATE_KEYS[entry.algorithm], *((ROW_STATE_KEY,) if rows else ())) if step else ()
        own = {"files": files, "rows": rows or 0, "step": step, "saved_as": {key: key for key in keys}}
        saved = SavedParameter.model_validate({**dict(entry), **own})
        saved._row_places = entry.row_places if rows else None
        return saved

    def _without_record(self) -> list[SavedParameter]:
        """Work out the layout of another optimizer's checkpoint as ZeRO lays parameters out."""
        if any(self.folder.glob("*expert_*_model_states.pt")):
            raise CheckpointError(
                f"{self.folder}: mixture-of-experts checkpoints of {self.kind} cannot be read"
            )
        parallel = next(iter(sorted(self.folder.glob("*mp_rank_01*"))), None)
        if parallel is not None:
            raise CheckpointError(f"{parallel}: model-parallel checkpoints of {self.kind} cannot be read")
        group_of = {
            index: number
            for number, group in enumerate(self._inner[0]["param_groups"])
            for index in group["params"]
        }
        found = []
        partitions = self._members()
        to_muon = self._muon_names(partitions)
        for partition, members in enumerate(partitions):
            wholes: dict[int, int] = {}
            for name, shape, spread in members:
                state = self._state(partition)
                momentum = "momentum_buffer" in state
                muon = momentum or name in to_muon
                keys = STATE_KEYS["muon" if muon else "adamw"] if state else ()
                whole_from = {}
                if momentum and self._keeps_whole_matrices(partition, members):
                    for rank in spread.ranks:
                        whole_from[rank] = wholes.get(rank, 0)
                        wholes[rank] = whole_from[rank] + math.prod(shape)
                saved_as = {k: "exp_avg" if k == "momentum_buffer" and not momentum else k for k in keys}
                saved = SavedParameter(
                    files=tuple(range(self.world_size)),
                    name=name,
                    shape=shape,
                    algorithm="muon" if muon else "adamw",
                    step=self._step(partition),
                    group=group_of.get(partition, 0),
                    partition=partition,
                    spread=spread,
                    saved_as=saved_as,
                    whole_from=whole_from,
                )
                found.append(saved)
        self._say_what_is_lossy(found)
        return found

    def _members(self) -> list[list[tuple[str, tuple[int, ...], Spread]]]:
        """Return name, shape and place of the parameters of every partition."""
        if self.stage == 0:
            return self._members_of_stage0()
        shapes = self._model.get("param_shapes")
        if not isinstance(shapes, (list, tuple)):
            raise CheckpointError(f"{self.model_file}: no param_shapes")
        paddings = self._ranks[0].get("param_alignment_paddings")
        partitions = []
        for number, group in enumerate(shapes):
            members, offset = [], 0
            size = self._masters(0)[number].numel()
            for position, (name, shape) in enumerate(group.items()):
                shape = tuple(int(n) for n in shape)
                numel = math.prod(shape)
                # What the parameter takes: at stage 3 of every rank's partition, below of all partitions together.
                taken = -(-numel // self.world_size) if self.stage == 3 else numel
                room = size if self.stage == 3 else size * self.world_size
                if min(shape, default=0) < 0 or taken > room - offset:
                    raise CheckpointError(
                        f"{self.model_file}: parameter {name} of shape {list(shape)} is larger than "
                        f"what is left of its partition"
                    )
                if numel and self.stage == 3:
                    members.append((name, shape, sharded_spread(offset, numel, taken)))
                elif numel:
                    members.append((name, shape, flat_spread(offset, numel, size)))
                offset += taken
                if self.stage != 3 and paddings:
                    offset += int(paddings[number][position])
            partitions.append(members)
        return partitions

    def _members_of_stage0(self) -> list[list[tuple[str, tuple[int, ...], Spread]]]:
        """Match parameters by order, which is right for ``model.parameters()`` and checked by shape."""
        left_out = set(self._model.get("buffer_names") or ())
        left_out.update(name for names in self._aliases().values() for name in names)
        named = [(n, tuple(t.shape)) for n, t in self._model["module"].items() if n not in left_out]
        groups = self._inner[0]["param_groups"]
        order = [index for group in groups for index in group["params"]]
        states = self._inner[0]["state"]
        fits = len(order) == len(named) and all(
            tuple(states[i]["exp_avg"].shape) == named[i][1] for i in order if "exp_avg" in states.get(i, {})
        )
        if len(groups) != 1 or not fits:
            raise CheckpointError(
                f"{self.model_file}: a checkpoint of stage 0 without names, whose parameters cannot be matched to the "
                f"model's by order; load it into an engine and save it at stage 1"
            )
        return [
            [(name, shape, sharded_spread(0, math.prod(shape), math.prod(shape)))] for name, shape in named
        ]

    def _muon_names(self, partitions: Sequence[Sequence[Any]]) -> set[str]:
        """Route an AdamW checkpoint by names and shapes, as a run with our optimizer would."""
        if self.kind != "AdamW":
            return set()  # DeepSpeed's Muon: its matrices have a momentum_buffer, and all else is AdamW's
        shapes = {name: shape for members in partitions for name, shape, _ in members}
        routes = route_saved(shapes, self._aliases(), include=self._include, exclude=self._exclude)
        return {name for name, route in routes.items() if route.algorithm == "muon"}

    def _keeps_whole_matrices(self, partition: int, members: Sequence[Any]) -> bool:
        """Return whether every rank's momentum covers all of the matrices that touch its partition."""
        if self.stage not in (1, 2):
            return False
        for rank in range(self.world_size):
            touching = sum(math.prod(shape) for _, shape, spread in members if rank in spread.ranks)
            buffer = self._state(partition, rank).get("momentum_buffer")
            if touching and (buffer is None or buffer.numel() != touching):
                return False
        return True

    def _say_what_is_lossy(self, found: Sequence[SavedParameter]) -> None:
        patterns = {"include": self._include, "exclude": self._exclude} if self.kind == "AdamW" else {}
        self.lossy += repeat_in_run(
            {parameter.name: parameter.algorithm for parameter in found},
            {parameter.name: parameter.shape for parameter in found},
            self._aliases(),
            **patterns,
        )
        muon = [parameter for parameter in found if parameter.algorithm == "muon" and parameter.step]
        if not muon:
            return
        self.lossy.append(
            "rates, decay, betas, eps and adjust_lr_fn are not carried over: those of the run's optimizer.params hold"
        )
        if self.kind == "AdamW":
            betas = self.groups[muon[0].group].get("betas", ["?"])
            self.lossy.append(
                f"AdamW's exp_avg became the momentum of {len(muon)} matrices: the same moving average of the "
                f"gradient, with its decay {betas[0]}; exp_avg_sq of these matrices was dropped"
            )
            return
        self.lossy.append("DeepSpeed's Muon counts no steps; global_steps - skipped_steps was taken")
        buffer = self._inner[0]["state"][muon[0].partition]["momentum_buffer"]
        if buffer.dtype != torch.float32:
            self.lossy.append(
                f"the momentum had been kept in {buffer.dtype} and is exactly that, widened to fp32"
            )

    def _partition(self, parameter: SavedParameter, key: str, rank: int) -> Tensor:
        number = parameter.files[rank if rank < len(parameter.files) else 0]
        saved = self._saved(parameter, key, number)
        check_tensor(saved, f"{self._files[number]}: {key} of parameter {parameter.name}")
        flat: Tensor = saved.detach().reshape(-1)
        return flat

    def _saved(self, parameter: SavedParameter, key: str, number: int) -> Any:
        """Return what the file of a number holds under a key."""
        if key != "fp32":
            return self._inner[number]["state"][parameter.partition][parameter.saved_as[key]]
        if self.stage:
            return self._masters(number)[parameter.partition]
        wrapper = self._whole[number]
        if "fp32_groups" in wrapper:
            return [tensor for group in wrapper["fp32_groups"] for tensor in group][parameter.partition]
        return self._weights(number)[parameter.name]

    @functools.cache  # noqa: B019 - lives as long as the files
    def _weights(self, number: int) -> Mapping[str, Tensor]:
        """Return the weights of stage 0 in fp32 beside an optimizer's file: experts have files of their own."""
        part = re.search(r"mp_rank_(\d+)", self._files[number].name)
        mark = "mp_rank_00" if part is None else part.group()
        found = dict(self._load(self.folder / f"{mark}_model_states.pt").get("module") or {})
        if not found:
            raise CheckpointError(
                f"{self.folder}: a pipeline without ZeRO keeps its weights by layers, which are not read; consolidate "
                f"with the engine, or save at stage 1"
            )
        for path in sorted(self.folder.glob(f"layer_*_expert_*_{mark}_model_states.pt")):
            found.update(self._load(path))
        return found

    def _check_parts(self, tensor: SavedTensor) -> None:
        """Make sure that the parts of a tensor belong together and are all of it."""
        first, *others = tensor.held
        kinds = {(e.algorithm, e.step, e.keys, e.transposed, e.whole and e.whole.heads) for e in tensor.held}
        complete = all(add_up(each.part_of(key) for each in tensor.held) for key in first.keys)
        if (others and len(kinds) > 1) or not complete:
            raise CheckpointError(
                f"{self._files[first.files[0]]}: parameter {first.name}: the files of the ranks hold parts of it that "
                f"do not make up the whole"
            )

    def _check_lengths(self, parameter: SavedParameter) -> None:
        """Make sure that every file holds all that its parameters need."""
        for key in parameter.keys:
            numel, held = math.prod(parameter.part_of(key).own_shape), 0
            for fragment in self._fragments(parameter, key):
                held += fragment.numel
                path = self._files[parameter.files[min(fragment.rank, len(parameter.files) - 1)]]
                try:
                    size = self._partition(parameter, key, fragment.rank).numel()
                except (KeyError, IndexError) as error:
                    raise CheckpointError(f"{path}: no {key} of parameter {parameter.name}") from error
                if size < self._start(parameter, key, fragment) + fragment.numel:
                    raise CheckpointError(
                        f"{path}: {key} of parameter {parameter.name} is cut off: the partition has {size} elements"
                    )
            if held != numel:
                raise CheckpointError(
                    f"{self.folder}: the files hold {held} of {numel} elements of {key} of parameter {parameter.name}"
                )

    def _fragments(self, parameter: SavedParameter, key: str) -> Iterator[Fragment]:
        """Yield fragments that hold each element of a tensor once."""
        places = parameter.places_of(key)
        one_copy = places.replicated or self.stage == 0
        return itertools.islice(fragments_of(places), 1 if one_copy else None)

    @staticmethod
    def _start(parameter: SavedParameter, key: str, fragment: Fragment) -> int:
        if key == "momentum_buffer" and parameter.whole_from:
            return parameter.whole_from[fragment.rank] + fragment.matrix_offset
        return fragment.partition_offset

    def pieces(self, name: str, key: str) -> Iterator[Tensor]:
        """Yield a tensor in row-major order, fp32, flat, some megabytes at a time; a piece lasts until the next one.

        Args:
            name: The parameter.
            key: ``fp32`` or a state key of its algorithm.
        """
        tensor = self.parameters[name]
        numel = math.prod(tensor.shape_of(key))
        buffer = torch.empty(min(numel, WINDOW), dtype=torch.float32)
        for start in range(0, numel, WINDOW):
            piece = buffer.narrow(0, 0, min(WINDOW, numel - start))
            read: list[Tensor] = []
            for parameter in tensor.held:
                part = parameter.part_of(key)
                begin, end = part.before(start), part.before(start + piece.numel())
                for fragment, first, last in self._runs(parameter, key, begin, end):
                    place = self._start(parameter, key, fragment) + first - fragment.matrix_offset
                    held = self._partition(parameter, key, fragment.rank).narrow(0, place, last - first)
                    for own, whole in views(part, first, last, held, first, piece, start):
                        whole.copy_(own)
                    read.append(held)
            drop_pages(read)
            yield piece

    def _runs(
        self, parameter: SavedParameter, key: str, start: int, stop: int
    ) -> Iterator[tuple[Fragment, int, int]]:
        """Yield the fragments that hold elements ``[start, stop)`` of a part, each element once, and which ones."""
        places = parameter.places_of(key)
        if places.replicated or self.stage == 0:
            yield next(iter(fragments_of(places))), start, stop
            return
        for rank, first, last in runs_within(places, start, stop):
            fragment = places.on(rank)
            assert fragment is not None
            yield fragment, first, last
