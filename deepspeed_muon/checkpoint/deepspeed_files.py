"""Read without an engine what DeepSpeed saved of our optimizer, its own Muon or AdamW, at stages 0 to 3.

The files are pickles. torch's restricted unpickler (``weights_only``) reads them, with a short list of DeepSpeed's own
classes allowed. They are mapped into memory, so that the disk reads only what is copied.

Files of ours have a record of the layout. For those of AdamW and of DeepSpeed's own Muon it is worked out as ZeRO lays
parameters out, and :func:`~deepspeed_muon.routing.saved.route_saved` guesses their routes. Every guess is reported in
words.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.files import check_tensor, drop_pages, refusing
from deepspeed_muon.checkpoint.index import OURS, json_settings
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY, read_records
from deepspeed_muon.checkpoint.parameters import HeldParameter, ParameterRecord, Transfer, put_together
from deepspeed_muon.checkpoint.tag_folder import TagFolder
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.placement import Placement, flat_placement, sharded_placement, whole_slice
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.saved import route_saved
from deepspeed_muon.step.quantized import SCALE_KEY, first_scales, read_codes


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
            self._whole_momentum: Mapping[tuple[str, int], int] = {}
            self._weight_keys: Mapping[str, str] = {}
            optimizer: Mapping[str, Any] = {}
            lossy: list[str] = []
            if self.kind != "AdamW" and (include or exclude):
                raise CheckpointError(
                    f"{self.folder}: saved by {self.kind}, with its routes: leave out --include and --exclude, "
                    f"which are for AdamW's"
                )
            if self.kind == OURS:
                contents = [inner.get(RECORD_KEY) for inner in self.inner]
                optimizer, held, self._weight_keys = read_records(contents, str(self.files[0]))
                if self.stage and any(each.placement.replicated for each in held):
                    raise CheckpointError(
                        f"{self.files[0]}: its layout record is not one of ZeRO stage {self.stage}"
                    )
            else:
                held, lossy = foreign_state(self, include, exclude)
                self._whole_momentum = _whole_momentum(self, held)
            self.parts = put_together(map(self._with_state, held), self.files)
            self.parameters = {name: first.record for name, (first, *_) in self.parts.items()}
            self.about: dict[str, Any] = {
                "source": {
                    "writer": "offline",
                    "optimizer": self.kind,
                    "zero_stage": self.stage,
                    "world_size": self.world_size,
                },
                "lossy": lossy,
                "optimizer": optimizer,
                "groups": [json_settings(group) for group in self.inner[0]["param_groups"]],
                "progress": self.progress,
            }

    def _with_state(self, held: HeldParameter) -> HeldParameter:
        """Return a parameter with what the files of its ranks say of its state."""
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
        state = self.state_of(held.partition, number)
        from_adam = self.kind != OURS and key == "momentum_buffer" and key not in state
        try:
            if key == "fp32":
                key_of_weights = self._weight_keys.get(held.name, held.name)
                saved = self.master(number, held.partition, key_of_weights)
            else:
                saved = state["exp_avg" if from_adam else key]
        except (KeyError, IndexError) as error:
            remedy = "" if self.stage else ": consolidate it with the engine, or save at ZeRO stage 1"
            raise CheckpointError(
                f"{self.files[number]}: no {key} of parameter {held.name}{remedy}"
            ) from error
        coded = key == "momentum_buffer" and getattr(saved, "dtype", None) == torch.int8
        check_tensor(saved, f"{self.files[number]}: {key} of parameter {held.name}", coded=coded)
        flat: Tensor = saved.detach().reshape(-1)
        return flat

    def copy(self, transfers: Iterable[Transfer], piece: Tensor) -> None:
        """Copy what a piece of a tensor consists of to its places in the piece."""
        read = []
        for each in transfers:
            held, key = each.held, each.key
            place, flat = held.offset(key, each.rank, each.start), self._flat(held, key, each.rank)
            if key == "momentum_buffer" and (held.name, each.rank) in self._whole_momentum:
                place = self._whole_momentum[held.name, each.rank] + each.start
            if place + each.numel > flat.numel():
                raise CheckpointError(
                    f"{self.files[each.source]}: {key} of parameter {held.name} is cut off: the partition has "
                    f"{flat.numel()} elements"
                )
            read.append(flat.narrow(0, place, each.numel))
            values = read[-1]
            if flat.dtype == torch.int8:
                values = self._decoded(held, each.rank, flat, place, each.numel)
            each.put(values, piece)
        drop_pages(read)

    def _decoded(self, held: HeldParameter, rank: int, codes: Tensor, start: int, numel: int) -> Tensor:
        """Return elements of a momentum in 8 bits, fp32; ``start`` is the first of them in the partition."""
        fragment = held.placement.on(rank)
        assert fragment is not None
        first, total = self._first_scales(held.holders, held.partition, rank)
        number = held.holders[rank]
        scales = self.inner[number]["state"][held.partition].get(SCALE_KEY)
        if scales is None and not codes.narrow(0, start, numel).any():
            return torch.zeros(numel)  # nothing in the partition ever had a gradient
        where = f"{self.files[number]}: {SCALE_KEY} of parameter {held.name}"
        check_tensor(scales, where)
        if scales.shape != (total,):
            raise CheckpointError(f"{where} has the shape {list(scales.shape)}, expected {total}")
        return read_codes(codes, scales.float(), fragment, first[held.name], start, numel)

    @functools.cache  # noqa: B019 - lives as long as the files
    def _first_scales(
        self, holders: tuple[int, ...], partition: int, rank: int
    ) -> tuple[dict[str, int], int]:
        """Return the number of each parameter's first scale in a partition of a rank, and that of all scales."""
        every = (held for parts in self.parts.values() for held in parts)
        sharing = (held for held in every if held.holders == holders and held.partition == partition)
        found = {held.name: held.placement.on(rank) for held in sharing}
        own = {name: fragment for name, fragment in found.items() if fragment is not None}
        starts, total = first_scales([*own.values()])
        return dict(zip(own, starts, strict=True)), total


def repeat_in_run(
    algorithms: Mapping[str, str],
    routes: Mapping[str, Route],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> list[str]:
    """Say what ``optimizer.params`` of the run that continues must hold, so that its routes are the checkpoint's.

    Args:
        algorithms: Name of every parameter to the algorithm in the checkpoint.
        routes: Of :func:`~deepspeed_muon.routing.saved.route_saved`, with the same patterns.
        include: The patterns that were used.
        exclude: The patterns that were used.

    Returns:
        Sentences; none where there is nothing to say.
    """
    wanted = [name for name, kind in algorithms.items() if kind == "muon" != routes[name].algorithm]
    # The files leave some open ("unsure"); training, which sees the modules, may route them to Muon.
    for_muon = {name for name, route in routes.items() if route.algorithm == "muon" or route.rule == "unsure"}
    unwanted = [name for name, kind in algorithms.items() if kind == "adamw" and name in for_muon]
    said = []
    settings = {"include": [*include, *wanted], "exclude": [*exclude, *unwanted]}
    if any(settings.values()):
        text = ", ".join(
            f"{json.dumps(key)}: {json.dumps(names)}" for key, names in settings.items() if names
        )
        said.append(f"the run that goes on from here needs in optimizer.params: {text}")
    filters = [name for name, each in routes.items() if each.rule == "hidden" and each.kind == "convolution"]
    if plain := [name for name in filters if name not in unwanted]:
        said.append(
            f"taken for filters of plain convolutions, by their shapes: {', '.join(plain)}; if the run finds a grouped "
            f"or transposed one among them, convert again with --exclude and its name"
        )
    return said


def foreign_state(
    saved: TagFolder, include: Sequence[str], exclude: Sequence[str]
) -> tuple[list[HeldParameter], list[str]]:
    """Work out where the parameters lie, as ZeRO lays them out, and route those of AdamW.

    Args:
        saved: The files.
        include: For AdamW: patterns of names that go to Muon.
        exclude: For AdamW: patterns of names that stay with AdamW.

    Returns:
        What the files hold of each before any step, and what is lost or invented when it becomes our state, in words.

    Raises:
        CheckpointError: Naming the file, if they cannot be read without an engine.
    """
    for files, what in (
        ("*expert_*_model_states.pt", "mixture-of-experts"),
        ("*mp_rank_01*", "model-parallel"),
    ):
        if found := sorted(saved.folder.glob(files)):
            raise CheckpointError(f"{found[0]}: {what} checkpoints of {saved.kind} cannot be read")
    members = list(_members(saved) if saved.stage else _whole_members(saved))
    shapes = {name: shape for _, name, shape, _ in members}
    if len(shapes) < len(members):
        ((twice, _),) = Counter(name for _, name, *_ in members).most_common(1)
        raise CheckpointError(f"{saved.model_file}: two parameters are called {twice}")
    patterns = {"include": include, "exclude": exclude} if saved.kind == "AdamW" else {}
    routes = route_saved(shapes, saved.aliases(), **patterns)
    groups = enumerate(saved.inner[0]["param_groups"])
    group_of = {index: number for number, group in groups for index in group["params"]}
    holders = tuple(range(saved.world_size))
    held = []
    for partition, name, shape, placement in members:
        algorithm: Any = routes[name].algorithm
        if saved.kind != "AdamW":  # DeepSpeed's Muon says it itself: its matrices have a momentum_buffer
            algorithm = "muon" if "momentum_buffer" in saved.state_of(partition) else "adamw"
        record = ParameterRecord(shape=shape, algorithm=algorithm, group=group_of.get(partition, 0))
        held.append(HeldParameter(record, whole_slice(name, shape), placement, (), holders, partition))
    algorithms = {each.name: each.record.algorithm for each in held}
    return held, [*repeat_in_run(algorithms, routes, **patterns), *_lossy(saved, held)]


def _members(saved: TagFolder) -> Iterator[tuple[int, str, tuple[int, ...], Placement]]:
    """Yield partition, name, shape and place of every parameter, as ZeRO lays them out."""
    shapes = saved.model.get("param_shapes")
    if not isinstance(shapes, (list, tuple)):
        raise CheckpointError(f"{saved.model_file}: no param_shapes")
    paddings = saved.wrappers[0].get("param_alignment_paddings")
    for number, group in enumerate(shapes):
        offset, size = 0, saved.masters(0)[number].numel()
        for position, (name, shape) in enumerate(group.items()):
            shape = tuple(int(n) for n in shape)
            numel = math.prod(shape)
            # What the parameter takes: at stage 3 of every rank's partition, below of all partitions together.
            taken = -(-numel // saved.world_size) if saved.stage == 3 else numel
            room = size if saved.stage == 3 else size * saved.world_size
            if min(shape, default=0) < 0 or taken > room - offset:
                raise CheckpointError(
                    f"{saved.model_file}: parameter {name} of shape {list(shape)} is larger than what is left of its "
                    f"partition"
                )
            if numel:
                rule, length = (sharded_placement, taken) if saved.stage == 3 else (flat_placement, size)
                yield number, name, shape, rule(offset, numel, length)
            offset += taken
            if saved.stage != 3 and paddings:
                offset += int(paddings[number][position])


def _whole_members(saved: TagFolder) -> Iterator[tuple[int, str, tuple[int, ...], Placement]]:
    """Match the parameters of stage 0 by order, which is right for ``model.parameters()`` and checked by shape."""
    left_out = set(saved.model.get("buffer_names") or ())
    left_out.update(name for names in saved.aliases().values() for name in names)
    named = [(n, tuple(t.shape)) for n, t in saved.model["module"].items() if n not in left_out]
    groups, states = saved.inner[0]["param_groups"], saved.inner[0]["state"]
    order = [index for group in groups for index in group["params"]]
    fits = len(order) == len(named) and all(
        tuple(states[i]["exp_avg"].shape) == named[i][1] for i in order if "exp_avg" in states.get(i, {})
    )
    if len(groups) != 1 or not fits:
        raise CheckpointError(
            f"{saved.model_file}: a checkpoint of stage 0 without names, whose parameters cannot be matched to the "
            f"model's by order; load it into an engine and save it at stage 1"
        )
    for number, (name, shape) in enumerate(named):
        yield number, name, shape, sharded_placement(0, math.prod(shape), math.prod(shape))


def _whole_momentum(saved: TagFolder, held: Sequence[HeldParameter]) -> dict[tuple[str, int], int]:
    """Return where the momentum of a whole matrix starts in the state of each rank that holds some of the matrix.

    So DeepSpeed's Muon keeps it at stages 1 and 2: a rank's momentum covers all matrices that touch its partition. Of
    partitions whose momentum is cut as they are there are no entries.
    """
    found: dict[tuple[str, int], int] = {}
    for partition, members in groupby(held, key=lambda each: each.partition):
        starts: dict[tuple[str, int], int] = {}
        wholes: Counter[int] = Counter()
        for each in members if saved.stage in (1, 2) else ():
            for rank in each.placement.ranks:
                starts[each.name, rank] = wholes[rank]
                wholes[rank] += each.record.numel
        buffers = {rank: saved.state_of(partition, rank).get("momentum_buffer") for rank in wholes}
        if all(buffer is not None and buffer.numel() == wholes[rank] for rank, buffer in buffers.items()):
            found |= starts
    return found


def _lossy(saved: TagFolder, held: Sequence[HeldParameter]) -> Iterator[str]:
    """Say what becomes of another optimizer's state of the matrices."""
    muon = [each for each in held if each.record.algorithm == "muon" and saved.step_of(each.partition)]
    if not muon:
        return
    yield "rates, decay, betas, eps and adjust_lr_fn are not carried over: those of the run's optimizer.params hold"
    if saved.kind == "AdamW":
        betas = saved.inner[0]["param_groups"][muon[0].record.group].get("betas", ["?"])
        yield (
            f"AdamW's exp_avg became the momentum of {len(muon)} matrices: the same moving average of the gradient, "
            f"with its decay {betas[0]}; exp_avg_sq of these matrices was dropped"
        )
        return
    yield "DeepSpeed's Muon counts no steps; global_steps - skipped_steps was taken"
    buffer = saved.inner[0]["state"][muon[0].partition]["momentum_buffer"]
    if buffer.dtype != torch.float32:
        yield f"the momentum had been kept in {buffer.dtype} and is exactly that, widened to fp32"
