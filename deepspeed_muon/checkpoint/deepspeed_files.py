"""Read without an engine what DeepSpeed saved of our optimizer, its own Muon or AdamW, at stages 0 to 3.

The files are pickles. torch's restricted unpickler (``weights_only``) reads them, with a short list of DeepSpeed's own
classes allowed. They are mapped into memory, so that the disk reads only what is copied.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.foreign import foreign_state
from deepspeed_muon.checkpoint.index import OURS, ParameterRecord
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY, read_records
from deepspeed_muon.checkpoint.parts import HeldParameter, Transfer, put_together, transfers_of
from deepspeed_muon.checkpoint.sealed import check_tensor, drop_pages, json_settings, refusing
from deepspeed_muon.checkpoint.sources import WINDOW
from deepspeed_muon.checkpoint.tag_folder import TagFolder, optimizer_kind
from deepspeed_muon.errors import CheckpointError


class DeepSpeedFiles(TagFolder):
    """The parameters that one tag of ``engine.save_checkpoint`` holds, by name.

    Attributes:
        kind: Whose optimizer saved it.
        optimizer: The settings of our optimizer; empty for others.
        parameters: Name of every whole tensor to the parts of it that groups of ranks hold.
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
        self.optimizer: dict[str, Any] = {}
        self.lossy: list[str] = []
        self._whole_from: Mapping[tuple[str, int], int] = {}
        with refusing(f"{self.folder}: not as DeepSpeed writes it"):
            self.groups = [json_settings(group) for group in self.inner[0]["param_groups"]]
            self.kind = optimizer_kind(self.inner[0])
            if self.kind == OURS:
                held = self._from_record()
            else:
                held, self._whole_from, self.lossy = foreign_state(self, self.kind, include, exclude)
            self.parameters = put_together(held, self.files)
            for parts in self.parameters.values():
                for each in parts:
                    self._check_lengths(each)

    @property
    def records(self) -> dict[str, ParameterRecord]:
        """The record of every parameter."""
        return {name: first.record for name, (first, *_) in self.parameters.items()}

    def about(self) -> dict[str, Any]:
        """Return what the index of a conversion says of the run."""
        return {
            "source": {
                "writer": "offline",
                "optimizer": self.kind,
                "zero_stage": self.stage,
                "world_size": self.world_size,
            },
            "lossy": self.lossy,
            "optimizer": self.optimizer,
            "groups": self.groups,
            "progress": self.progress,
        }

    def _from_record(self) -> list[HeldParameter]:
        found: list[HeldParameter] = []
        names: dict[tuple[int, ...], set[str]] = {}
        for record, files in read_records(
            [inner.get(RECORD_KEY) for inner in self.inner], str(self.files[0])
        ):
            if self.stage and record.world_size != len(files):
                raise CheckpointError(
                    f"{self.files[0]}: its layout record is of {record.world_size} ranks, there are {len(files)}"
                )
            self.optimizer = dict(record.optimizer)
            known = names.setdefault(tuple(files), set())
            for held in record.held(files):
                if held.name in known:
                    raise CheckpointError(f"{self.model_file}: two parameters are called {held.name}")
                known.add(held.name)
                found.append(self._with_state(held))
        return found

    def _with_state(self, held: HeldParameter) -> HeldParameter:
        """Return a parameter of a record with what the files of its ranks say of it."""
        first = held.holders[0]
        where = f"{self.files[first]}: parameter {held.name}"
        groups = self.inner[first]["param_groups"]
        if held.record.group >= len(self.groups):
            raise CheckpointError(f"{where}: there is no param group {held.record.group}")
        if self.stage == 0 and not any(held.partition in group["params"] for group in groups):
            raise CheckpointError(f"{where}: there is no parameter number {held.partition}")
        return held.with_state(self.state_of(held.partition, first), self.step_of(held.partition, first))

    def _check_lengths(self, held: HeldParameter) -> None:
        """Make sure that every file holds all that its parameters need."""
        for key in held.record.tensor_keys:
            places = held.places_of(key)
            for rank in places.ranks[:1] if places.replicated else places.ranks:
                fragment = places.on(rank)
                if fragment is None:
                    continue
                path = self.files[held.holders[rank]]
                try:
                    size = self._flat(held, key, rank).numel()
                except (KeyError, IndexError) as error:
                    remedy = "consolidate it with the engine, or save at ZeRO stage 1"
                    raise CheckpointError(
                        f"{path}: no {key} of parameter {held.name}{'' if self.stage else ': ' + remedy}"
                    ) from error
                if size < self._offset(held, key, rank, fragment.matrix_offset) + fragment.numel:
                    raise CheckpointError(
                        f"{path}: {key} of parameter {held.name} is cut off: the partition has {size} elements"
                    )

    def _flat(self, held: HeldParameter, key: str, rank: int) -> Tensor:
        """Return the partition of a rank of a group, flat, as its file has it."""
        number = held.holders[rank]
        saved = self._saved(held, key, number)
        check_tensor(saved, f"{self.files[number]}: {key} of parameter {held.name}")
        flat: Tensor = saved.detach().reshape(-1)
        return flat

    def _saved(self, held: HeldParameter, key: str, number: int) -> Any:
        """Return what the file of a number holds under a key."""
        if key != "fp32":
            state = self.inner[number]["state"][held.partition]
            from_adam = self.kind != OURS and key == "momentum_buffer" and key not in state
            return state["exp_avg" if from_adam else key]
        if self.stage:
            return self.masters(number)[held.partition]
        wrapper = self.wrappers[number]
        if "fp32_groups" in wrapper:
            return [tensor for group in wrapper["fp32_groups"] for tensor in group][held.partition]
        return self._weights(number)[held.name]

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

    def _offset(self, held: HeldParameter, key: str, rank: int, element: int) -> int:
        """Return where an element of a part lies in a rank's partition."""
        whole_from = self._whole_from.get((held.name, rank)) if key == "momentum_buffer" else None
        return held.offset(key, rank, element) if whole_from is None else whole_from + element

    def bring(self, transfers: Iterable[Transfer], piece: Tensor) -> None:
        """Copy the elements of transfers to their places in a piece."""
        read = []
        for each in transfers:
            start = self._offset(each.held, each.key, each.rank, each.start)
            read.append(self._flat(each.held, each.key, each.rank).narrow(0, start, each.numel))
            each.put(read[-1], piece)
        drop_pages(read)

    def pieces(self, name: str, key: str) -> Iterator[Tensor]:
        """Yield a tensor in row-major order, fp32, flat, some megabytes at a time; a piece lasts until the next one.

        Args:
            name: The parameter.
            key: ``fp32`` or an entry of its state.
        """
        parts = self.parameters[name]
        numel = math.prod(parts[0].record.shape_of(key))
        buffer = torch.empty(min(numel, WINDOW), dtype=torch.float32)
        for start in range(0, numel, WINDOW):
            piece = buffer.narrow(0, 0, min(WINDOW, numel - start))
            self.bring(transfers_of(parts, key, start, start + piece.numel(), piece_start=start), piece)
            yield piece
