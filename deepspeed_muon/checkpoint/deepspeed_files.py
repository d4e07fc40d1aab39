"""Read without an engine what DeepSpeed saved of our optimizer, its own Muon or AdamW, at stages 0 to 3.

The files are pickles. torch's restricted unpickler (``weights_only``) reads them, with a short list of DeepSpeed's own
classes allowed. They are mapped into memory, so that the disk reads only what is copied.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.files import check_tensor, drop_pages, refusing
from deepspeed_muon.checkpoint.foreign import foreign_state
from deepspeed_muon.checkpoint.index import OURS, json_settings
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY, read_records
from deepspeed_muon.checkpoint.parameters import HeldParameter, put_together, transfers_of
from deepspeed_muon.checkpoint.tag_folder import TagFolder, optimizer_kind
from deepspeed_muon.errors import CheckpointError


class DeepSpeedFiles(TagFolder):
    """The parameters that one tag of ``engine.save_checkpoint`` holds, by name.

    Attributes:
        parts: Name of every whole tensor to the parts of it that groups of ranks hold.
        parameters: Name of every parameter to its record.
        about: What the index of a conversion says besides files and parameters.
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
            trust: See :func:`~deepspeed_muon.checkpoint.files.load_pickle`.
            verify: Compare every file with the CRC-32 in it, before anything of it is used.
            include: For AdamW checkpoints: patterns of names that go to Muon.
            exclude: For AdamW checkpoints: patterns of names that stay with AdamW.

        Raises:
            CheckpointError: Naming the file and, where one is to blame, the parameter.
        """
        super().__init__(folder, trust=trust, verify=verify)
        with refusing(f"{self.folder}: not as DeepSpeed writes it"):
            self._kind = optimizer_kind(self.inner[0])
            optimizer: Mapping[str, Any] = {}
            lossy: list[str] = []
            if self._kind == OURS:
                held, optimizer = self._from_record()
            else:
                held, lossy = foreign_state(self, self._kind, include, exclude)
            self.parts = put_together(held, self.files)
            self.parameters = {name: first.record for name, (first, *_) in self.parts.items()}
            self.about = {
                "source": {
                    "writer": "offline",
                    "optimizer": self._kind,
                    "zero_stage": self.stage,
                    "world_size": self.world_size,
                },
                "lossy": lossy,
                "optimizer": optimizer,
                "groups": [json_settings(group) for group in self.inner[0]["param_groups"]],
                "progress": self.progress,
            }

    def _from_record(self) -> tuple[list[HeldParameter], Mapping[str, Any]]:
        """Return what our layout record says of the parameters, and the settings of the optimizer."""
        contents = [inner.get(RECORD_KEY) for inner in self.inner]
        optimizer, found = read_records(contents, str(self.files[0]))
        if self.stage and any(held.placement.replicated for held in found):
            raise CheckpointError(f"{self.files[0]}: its layout record is not one of ZeRO stage {self.stage}")
        return [self._with_state(held) for held in found], optimizer

    def _with_state(self, held: HeldParameter) -> HeldParameter:
        """Return a parameter of a record with what the files of its ranks say of it."""
        first = held.holders[0]
        where = f"{self.files[first]}: parameter {held.name}"
        groups = self.inner[first]["param_groups"]
        if held.record.group >= len(self.inner[0]["param_groups"]):
            raise CheckpointError(f"{where}: there is no param group {held.record.group}")
        if self.stage == 0 and not any(held.partition in group["params"] for group in groups):
            raise CheckpointError(f"{where}: there is no parameter number {held.partition}")
        return held.with_state(self.state_of(held.partition, first), self.step_of(held.partition, first))

    def _flat(self, held: HeldParameter, key: str, rank: int) -> Tensor:
        """Return the partition of a rank of a group, flat, as its file has it.

        Raises:
            CheckpointError: If the file has none, or something else.
        """
        number = held.holders[rank]
        try:
            saved = self._saved(held, key, number)
        except (KeyError, IndexError) as error:
            remedy = "" if self.stage else ": consolidate it with the engine, or save at ZeRO stage 1"
            raise CheckpointError(
                f"{self.files[number]}: no {key} of parameter {held.name}{remedy}"
            ) from error
        check_tensor(saved, f"{self.files[number]}: {key} of parameter {held.name}")
        flat: Tensor = saved.detach().reshape(-1)
        return flat

    def _saved(self, held: HeldParameter, key: str, number: int) -> Any:
        """Return what the file of a number holds under a key."""
        if key != "fp32":
            state = self.inner[number]["state"][held.partition]
            from_adam = self._kind != OURS and key == "momentum_buffer" and key not in state
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

    def read(self, parameter: str, key: str, start: int, numel: int) -> Tensor:
        """Return elements ``[start, start + numel)`` of a tensor in row-major order, fp32, one-dimensional.

        The same as :meth:`~deepspeed_muon.checkpoint.sources.StateSource.read`.
        """
        found = torch.empty(numel, dtype=torch.float32)
        read = []
        for each in transfers_of(self.parts[parameter], key, start, start + numel, piece_start=start):
            place, flat = each.held.offset(key, each.rank, each.start), self._flat(each.held, key, each.rank)
            if place + each.numel > flat.numel():
                raise CheckpointError(
                    f"{self.files[each.source]}: {key} of parameter {parameter} is cut off: the partition has "
                    f"{flat.numel()} elements"
                )
            read.append(flat.narrow(0, place, each.numel))
            each.put(read[-1], found)
        drop_pages(read)
        return found
