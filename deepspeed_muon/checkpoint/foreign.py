"""Checkpoints of AdamW and of DeepSpeed's own Muon: where their parameters lie, which go to Muon, what is lost.

Their files have no record of the layout, so it is worked out as ZeRO lays parameters out. Training routes parameters by
names, shapes and types of modules. Files know no modules, so shapes and biases must tell which parameters are filters
of convolutions. Every guess is reported in words.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from deepspeed_muon.checkpoint.parameters import HeldParameter, ParameterRecord
from deepspeed_muon.checkpoint.tag_folder import TagFolder
from deepspeed_muon.config import MuonConfig
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.placement import Placement, flat_placement, sharded_placement, whole_slice
from deepspeed_muon.routing.parameters import NamedParameter
from deepspeed_muon.routing.route import Route, Rule
from deepspeed_muon.routing.rules import route_parameters

# The longest kernel. A longer last dimension is more likely the input width of stacked matrices.
_MAX_KERNEL = 64

Member: TypeAlias = tuple[str, tuple[int, ...], Placement]
"""Name, shape and place of a parameter."""


def convolution_kind(name: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Guess the kind of convolution whose filters a parameter is; ``None`` if it seems to be no filters.

    Args:
        name: Dotted name.
        shape: Its shape.
        shapes: Shapes of all parameters, among them the bias beside it.

    Returns:
        A kind of :class:`~deepspeed_muon.routing.parameters.NamedParameter`. Plain filters may be those of a grouped
        convolution with wide groups, and one input may be that of a plain one: shapes do not tell.
    """
    parts = name.split(".")
    if len(shape) not in (3, 4, 5) or parts[-1] != "weight" or "experts" in parts or shape[-1] > _MAX_KERNEL:
        return None
    bias = shapes.get(".".join((*parts[:-1], "bias")))
    if bias is not None and tuple(bias) == (shape[1],) != (shape[0],):
        return "transposed convolution"
    return "grouped convolution" if shape[1] == 1 < shape[0] else "convolution"


def route_saved(
    shapes: Mapping[str, Sequence[int]],
    aliases: Mapping[str, Iterable[str]],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> dict[str, Route]:
    """Route the parameters of a checkpoint as training would, as far as its files tell.

    Args:
        shapes: Name of every trained parameter to its shape, in order.
        aliases: Name to further names of the same parameter.
        include: Patterns of names that go to Muon: filters among them are taken for plain ones, stacks for experts.
        exclude: Patterns of names that stay with AdamW.

    Raises:
        RoutingError: If a pattern matches nothing, or Muon is asked for something that is no matrix.
    """
    kinds = {name: convolution_kind(name, shape, shapes) for name, shape in shapes.items()}
    members = [
        NamedParameter(
            (name, *aliases.get(name, ())),
            torch.nn.Parameter(torch.empty(tuple(shape), device="meta")),
            frozenset(("convolution",) if kinds[name] else ("experts",) if len(shape) == 3 else ()),
        )
        for name, shape in shapes.items()
    ]
    found = {}
    for route in route_parameters(members, MuonConfig(include=tuple(include), exclude=tuple(exclude))):
        kind = kinds[route.name]
        # Where the caller's patterns name a parameter, they decide.
        if route.rule == "hidden" and route.kind == "convolution" and kind != "convolution":
            # A plain convolution can have a single input channel, too.
            rule: Rule = "unsure" if kind == "grouped convolution" else "shape"
            route = Route(route.name, route.shape, "adamw", f"filters of a {kind}", rule=rule)
        elif route.rule == "hidden" and route.kind == "experts" and "experts" not in route.name.split("."):
            reason = "3-dimensional, no experts by name"
            route = Route(route.name, route.shape, "adamw", reason, rule="unsure")
        found[route.name] = route
    return found


def repeat_in_run(
    algorithms: Mapping[str, str],
    shapes: Mapping[str, Sequence[int]],
    aliases: Mapping[str, Iterable[str]],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> list[str]:
    """Say what ``optimizer.params`` of the run that continues must hold, so that its routes are the checkpoint's.

    Args:
        algorithms: Name of every parameter to the algorithm in the checkpoint.
        shapes: As for :func:`route_saved`.
        aliases: As there.
        include: The patterns that were used.
        exclude: The patterns that were used.

    Returns:
        Sentences; none where there is nothing to say.
    """
    routes = route_saved(shapes, aliases, include=include, exclude=exclude)
    wanted = [name for name, kind in algorithms.items() if kind == "muon" != routes[name].algorithm]
    # The files leave these open; training, which sees the modules, may route them to Muon.
    doubtful = {name for name, route in routes.items() if route.rule == "unsure"}
    unwanted = [
        name
        for name, kind in algorithms.items()
        if kind == "adamw" and (routes[name].algorithm == "muon" or name in doubtful)
    ]
    said = []
    settings = {"include": [*include, *wanted], "exclude": [*exclude, *unwanted]}
    if any(settings.values()):
        text = ", ".join(
            f"{json.dumps(key)}: {json.dumps(names)}" for key, names in settings.items() if names
        )
        said.append(f"the run that goes on from here needs in optimizer.params: {text}")
    plain = [name for name, each in routes.items() if each.rule == "hidden" and each.kind == "convolution"]
    plain = [name for name in plain if name not in unwanted]
    if plain:
        said.append(
            f"taken for filters of plain convolutions, by their shapes: {', '.join(plain)}; if the run finds a grouped "
            f"or transposed one among them, convert again with --exclude and its name"
        )
    return said


def foreign_state(
    saved: TagFolder, kind: str, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[list[HeldParameter], list[str]]:
    """Work out where the parameters lie, as ZeRO lays them out, and route those of AdamW.

    Args:
        saved: The files.
        kind: Whose optimizer saved them.
        include: For AdamW: patterns of names that go to Muon.
        exclude: For AdamW: patterns of names that stay with AdamW.

    Returns:
        What the files hold of each, and what is lost or invented when it becomes our state, in words.

    Raises:
        CheckpointError: Naming the file, if they cannot be read without an engine.
    """
    _refuse_parallel_models(saved, kind)
    holders = tuple(range(saved.world_size))
    group_of = {
        index: number
        for number, group in enumerate(saved.inner[0]["param_groups"])
        for index in group["params"]
    }
    partitions = _members(saved) if saved.stage else _whole_members(saved)
    patterns = {"include": include, "exclude": exclude} if kind == "AdamW" else {}
    to_muon: set[str] = set()  # DeepSpeed's Muon says it itself: its matrices have a momentum_buffer
    if kind == "AdamW":
        shapes = {name: shape for members in partitions for name, shape, _ in members}
        routes = route_saved(shapes, saved.aliases(), **patterns)
        to_muon = {name for name, route in routes.items() if route.algorithm == "muon"}
    found: dict[str, HeldParameter] = {}
    for partition, members in enumerate(partitions):
        momentum = "momentum_buffer" in saved.state_of(partition)
        keeps_whole = momentum and _keeps_whole_matrices(saved, partition, members)
        wholes: Counter[int] = Counter()
        for name, shape, placement in members:
            if name in found:
                raise CheckpointError(f"{saved.model_file}: two parameters are called {name}")
            record = ParameterRecord(
                shape=shape,
                algorithm="muon" if momentum or name in to_muon else "adamw",
                group=group_of.get(partition, 0),
                step=saved.step_of(partition),
            )
            starts = {rank: wholes[rank] for rank in placement.ranks} if keeps_whole else {}
            wholes.update(dict.fromkeys(starts, math.prod(shape)))
            part = whole_slice(name, shape)
            found[name] = HeldParameter(
                record, part, placement, None, holders, partition, whole_momentum=starts
            )
    lossy = repeat_in_run(
        {name: each.record.algorithm for name, each in found.items()},
        {name: each.record.shape for name, each in found.items()},
        saved.aliases(),
        **patterns,
    )
    held = list(found.values())
    return held, [*lossy, *_lossy(saved, kind, held)]


def _refuse_parallel_models(saved: TagFolder, kind: str) -> None:
    if any(saved.folder.glob("*expert_*_model_states.pt")):
        raise CheckpointError(f"{saved.folder}: mixture-of-experts checkpoints of {kind} cannot be read")
    parallel = next(iter(sorted(saved.folder.glob("*mp_rank_01*"))), None)
    if parallel is not None:
        raise CheckpointError(f"{parallel}: model-parallel checkpoints of {kind} cannot be read")


def _members(saved: TagFolder) -> list[list[Member]]:
    """Return name, shape and place of the parameters of every partition."""
    shapes = saved.model.get("param_shapes")
    if not isinstance(shapes, (list, tuple)):
        raise CheckpointError(f"{saved.model_file}: no param_shapes")
    paddings = saved.wrappers[0].get("param_alignment_paddings")
    partitions = []
    for number, group in enumerate(shapes):
        members: list[Member] = []
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
            if numel and saved.stage == 3:
                members.append((name, shape, sharded_placement(offset, numel, taken)))
            elif numel:
                members.append((name, shape, flat_placement(offset, numel, size)))
            offset += taken
            if saved.stage != 3 and paddings:
                offset += int(paddings[number][position])
        partitions.append(members)
    return partitions


def _whole_members(saved: TagFolder) -> list[list[Member]]:
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
    return [
        [(name, shape, sharded_placement(0, math.prod(shape), math.prod(shape)))] for name, shape in named
    ]


def _keeps_whole_matrices(saved: TagFolder, partition: int, members: Sequence[Member]) -> bool:
    """Return whether every rank's momentum covers all of the matrices that touch its partition."""
    if saved.stage not in (1, 2):
        return False
    for rank in range(saved.world_size):
        touching = sum(math.prod(shape) for _, shape, placement in members if rank in placement.ranks)
        buffer = saved.state_of(partition, rank).get("momentum_buffer")
        if touching and (buffer is None or buffer.numel() != touching):
            return False
    return True


def _lossy(saved: TagFolder, kind: str, held: Sequence[HeldParameter]) -> Iterator[str]:
    """Say what becomes of another optimizer's state of the matrices."""
    muon = [each for each in held if each.record.algorithm == "muon" and each.record.step]
    if not muon:
        return
    yield "rates, decay, betas, eps and adjust_lr_fn are not carried over: those of the run's optimizer.params hold"
    if kind == "AdamW":
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
