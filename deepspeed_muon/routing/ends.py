"""The first and the last layers of a model, which AdamW updates: what reads its inputs and makes its outputs.

Accessors of the model and shapes decide first, then the place of a layer, then its name. A layer that is named like an
output is none if another output reads what it makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from deepspeed_muon.routing.evidence import Claim, NamedParameter
from deepspeed_muon.routing.layers import call_quietly, is_linear, own_parameters
from deepspeed_muon.routing.names import KnownName, holder_path, in_block, known, named_below
from deepspeed_muon.routing.shapes import true_shape

# A projection is taken for an output if it has so many times fewer outputs than inputs, and nothing comes after it.
_FEW = 8
# Images, latents and audio have at most so many channels; hidden layers have more.
_CHANNELS = 4
# "in_channels" of a configuration is the width of a model, not that of its inputs, from so many on.
_MAX_CHANNELS = 256
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OUTPUT_KINDS = (None, "linear", "convolution", "weight", "bare")


@dataclass(slots=True)
class Places:
    """What the modules of a whole model say about its ends, by ``id(parameter)``.

    Attributes:
        embeddings: ``get_input_embeddings()``.
        inputs: The layers that read as many channels as the configuration says that the inputs have.
        heads: ``get_output_embeddings()``, ``get_classifier()``, layers with as many outputs as the configuration says.
        tasks: Projections to few outputs that a task adds to a base model.
        last: The matrix of the last layer, and whether containers with a known order say that it is the last.
        last_is_task: Whether the last layer lies outside of a base model.
        has_classifier: Whether the model names its classifier, so that nothing else of such a name is one.
        parallel: Paths of the modules whose children do not follow each other.
        whole: Whether the parameters are those of a whole model in its order, whose first and last are its ends.
    """

    embeddings: set[int] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)
    heads: set[int] = field(default_factory=set)
    tasks: set[int] = field(default_factory=set)
    last: tuple[int, bool] | None = None
    last_is_task: bool = False
    has_classifier: bool = False
    parallel: set[str] = field(default_factory=set)
    whole: bool = False

    @classmethod
    def read(cls, model: nn.Module, *, whole: bool) -> Places:
        """Read the accessors and the containers of a model, or of one stage of a pipeline."""
        places = cls(whole=whole)
        outermost: list[str] = []
        for path, module in model.named_modules():
            if isinstance(module, nn.ModuleDict):
                places.parallel.add(holder_path(path + ".weight"))
            places._accessors(module)
            # What lies in a model is no end of it, whatever its own configuration says.
            if not any(path.startswith(above) for above in outermost) and places._channels(module):
                outermost.append(path and path + ".")
        if whole:
            places.last = _last_matrix(model)
        for module in model.modules():
            places._task(module)
        return places

    def _accessors(self, module: nn.Module) -> None:
        for accessor in ("get_output_embeddings", "get_classifier"):
            for output in _modules_in(call_quietly(module, accessor)):
                layers = [layer for layer in output.modules() if _is_layer(layer)]
                params = [id(param) for _, param in own_parameters(output)]
                if not params and layers:  # a norm or dropout and a projection
                    params = [id(param) for _, param in own_parameters(layers[-1])]
                self.heads.update(params)
                self.has_classifier |= accessor == "get_classifier" and bool(params)
        embedding = call_quietly(module, "get_input_embeddings")
        if isinstance(embedding, nn.Module):
            matrices = [p for _, p in own_parameters(embedding) if len(true_shape(p)) > 1]
            if not matrices:  # a patch embedding holds a single projection
                inner = [p for p in embedding.parameters() if len(true_shape(p)) > 1]
                matrices = inner if len(inner) == 1 else []
            self.embeddings.update(map(id, matrices))

    def _channels(self, module: nn.Module) -> bool:
        """Find the first layer that reads the channels of the inputs, the last that makes those of the outputs.

        diffusers' models have both numbers in their configuration, with or without the pixels of a patch. Returns
        whether the module has such a configuration.
        """
        config = getattr(module, "config", None)
        inputs = getattr(config, "in_channels", None)
        if not isinstance(inputs, int) or not 0 < inputs <= _MAX_CHANNELS:
            return False
        outputs = getattr(config, "out_channels", None)
        outputs = outputs if isinstance(outputs, int) else inputs
        sides = getattr(config, "patch_size", None)
        sides = [sides] if isinstance(sides, int) else sides if isinstance(sides, (list, tuple)) else [1]
        area = math.prod(sides) if len(sides) > 1 else sides[0] ** 2
        depth = getattr(config, "patch_size_t", None)
        weights = [
            param
            for path, layer in module.named_modules()
            if _is_layer(layer) and not in_block(path.split(".")[:-1])
            for name, param in own_parameters(layer)
            if name == "weight"
        ]
        for pixels in (1, area, area * depth if isinstance(depth, int) else area):
            if readers := [param for param in weights if true_shape(param)[1] == inputs * pixels]:
                self.inputs.add(id(readers[0]))
                break
        for pixels in (1, area, area * depth if isinstance(depth, int) else area):
            makers = [param for param in weights if true_shape(param)[0] == outputs * pixels]
            if makers and id(makers[-1]) not in self.inputs:
                self.heads.add(id(makers[-1]))
                break
        return True

    def _task(self, module: nn.Module) -> None:
        """Find what a task adds to a base model of transformers and makes few outputs."""
        prefix = getattr(module, "base_model_prefix", None)
        base = getattr(module, prefix, None) if isinstance(prefix, str) and prefix else None
        if not isinstance(base, nn.Module) or base is module:
            return
        inside = {id(part) for part in base.modules()}
        for path, part in module.named_modules():
            if id(part) in inside or not _is_layer(part):
                continue
            for name, param in own_parameters(part):
                if name != "weight":
                    continue
                self.last_is_task |= self.last is not None and self.last[0] == id(param)
                few = is_linear(part) and _has_few_outputs(true_shape(param))
                if few and not in_block(path.split(".")[:-1]):
                    self.tasks.add(id(param))


def _is_layer(module: nn.Module) -> bool:
    return is_linear(module) or isinstance(module, _CONVOLUTIONS)


def _modules_in(result: object) -> Iterator[nn.Module]:
    """Yield the layers that an accessor returned: one, or several in a container."""
    if isinstance(result, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        yield from result.children()
    elif isinstance(result, nn.Module):
        yield result
    elif isinstance(result, (tuple, list)):
        for output in result:
            yield from _modules_in(output)
    elif isinstance(result, dict):
        yield from _modules_in(list(result.values()))


def end_claims(members: Sequence[NamedParameter], places: Places) -> dict[int, list[Claim]]:
    """Return by ``id(parameter)`` the claims of embeddings, first layers and output heads.

    Args:
        members: All parameters of the model, in its order.
        places: What the modules say; empty if only names are known.
    """
    matrices = [member for member in members if len(member.whole_shape) > 1]
    claims: dict[int, list[Claim]] = {}
    first_below: dict[str, int] = {}
    for member in matrices:
        claims_of_member = claims.setdefault(id(member.param), [])
        if id(member.param) in places.embeddings:
            claims_of_member.append(Claim("embedding", "weight of an embedding module"))
        elif (claim := _embedding_by_name(member)) is not None:
            claims_of_member.append(claim)
        claims_of_member += _first_layer(member, matrices, places, first_below)
    for key, claim in _heads(matrices, places).items():
        claims.setdefault(key, []).append(claim)
    return claims


def _embedding_by_name(member: NamedParameter) -> Claim | None:
    """Return the claim of an embedding whose module's type says nothing."""
    if member.kind not in (None, "weight", "bare"):
        return None
    for name in member.names:
        parts = holder_path(name).split(".")
        for position, part in enumerate(parts):
            entry = known(part, "embedding", "input")
            # "image_embed" may hold a whole encoder, "embeddings_project" is a hidden matrix.
            if entry and not known(part, "head") and named_below(parts, position) <= 1:
                return Claim("embedding", f"embedding by name ({part.lower()})", entry.certain)
    return None


def _first_layer(
    member: NamedParameter, matrices: Sequence[NamedParameter], places: Places, first_below: dict[str, int]
) -> Iterator[Claim]:
    """Yield the claims of a layer that reads images, latents, audio or patches of them.

    Args:
        member: The weight.
        matrices: All weights of the model.
        places: What its modules say.
        first_below: Path of a module named like a first layer to the first weight below it; filled here.
    """
    if member.kind not in ("convolution", "linear"):
        return
    shape = member.whole_shape
    if member.kind == "convolution" and shape[1] <= _CHANNELS and math.prod(shape[2:]) > 1:
        yield Claim("input", f"first convolution: reads {shape[1]} channel{'s' * (shape[1] > 1)}")
    elif id(member.param) in places.inputs:
        yield Claim("input", "first layer: reads the channels of the inputs")
    elif places.whole and member.kind == "convolution" and member is matrices[0]:
        yield Claim("input", "first convolution, in the order of the modules", certain=False)
    for name in member.names:
        parts = holder_path(name).split(".")
        for position, part in enumerate(parts):
            entry = known(part, "input")
            if entry and named_below(parts, position) <= 1 and not in_block(parts[:position]):
                # Patches may pass several layers ("patch_embed.conv.3"), of which the first is none of the hidden ones.
                first = first_below.setdefault(".".join(parts[: position + 1]), id(member.param))
                if first == id(member.param):
                    yield Claim("input", f"first layer by name ({part.lower()})", entry.certain)


@dataclass(slots=True)
class _Candidate:
    """A matrix that lies in a module that is named like an output head."""

    member: NamedParameter
    index: int
    path: str
    container: str
    entry: KnownName

    @property
    def is_direct(self) -> bool:
        return self.path == self.container


def _heads(matrices: Sequence[NamedParameter], places: Places) -> dict[int, Claim]:
    claims = {
        id(m.param): Claim("head", "output head of the model")
        for m in matrices
        if id(m.param) in places.heads
    }
    for index, member in enumerate(matrices):
        if id(member.param) in places.tasks:
            # What a later layer reads ("film_mul" of CLIPSeg) is no output.
            readers = [*matrices[index + 1 :], *(tied for tied in matrices if len(tied.names) > 1)]
            if all(reader.sides[1] != member.sides[0] for reader in readers):
                claims[id(member.param)] = Claim("head", "output head of the model")
        parts = holder_path(member.name).split(".") if member.names else []
        outputs, inputs = member.sides
        if (
            member.kind == "convolution"
            and outputs <= _CHANNELS
            and inputs >= _FEW * outputs
            and not any(part.isdigit() for part in parts[:-1])
        ):
            claims.setdefault(id(member.param), Claim("head", f"output head: makes {outputs} channels"))
    embeddings = [m.whole_shape for m in matrices if m.kind == "embedding" and len(m.whole_shape) == 2]
    largest = max(embeddings, default=None) if places.whole else None
    if largest is not None and largest[0] <= largest[1]:
        largest = None  # a small table, whose shape a hidden layer may have, too
    for member in matrices:
        path = holder_path(member.name) if member.names else ""
        is_matrix = member.kind in ("linear", "weight") and len(member.whole_shape) == 2
        if is_matrix and member.sides == largest and not in_block(path.split(".")):
            claims.setdefault(
                id(member.param), Claim("head", "output head: an output for each row of the embedding")
            )
    for candidate, is_output in _candidates(matrices, places, claims):
        entry, key = candidate.entry, id(candidate.member.param)
        named = candidate.path.rpartition(".")[2]
        if is_output:
            at_end = places.last is not None and places.last[0] == key
            claims.setdefault(key, Claim("head", f"output head by name ({named})", entry.certain or at_end))
        elif candidate.is_direct and not places.has_classifier:
            reason = f"hidden matrix: named like an output ({named}), and none by its shape and place"
            claims.setdefault(key, Claim("hidden", reason, certain=False))
    if places.last is not None and places.last[0] not in claims:
        key, in_order = places.last
        last = next((member for member in matrices if id(member.param) == key), None)
        claim = None if last is None else _last_layer(last, claims, places, in_order=in_order)
        if claim is not None:
            claims[key] = claim
    return claims


def _last_layer(
    member: NamedParameter, claims: Mapping[int, Claim], places: Places, *, in_order: bool
) -> Claim | None:
    """Return the claim of the last layer, of which neither an accessor nor a name says that it is an output."""
    rows, cols = member.sides
    if _has_few_outputs(member.sides):
        return Claim("head", "output head: the last layer, with few outputs", certain=in_order)
    if places.last_is_task and not places.heads:
        return Claim("head", "output head: the last layer, outside of the base model", certain=False)
    path = holder_path(member.names[0]).split(".") if member.names else []
    if rows == cols or in_block(path[:-1]) or any(claim.rule == "head" for claim in claims.values()):
        return None
    return Claim("hidden", "hidden matrix, although the last layer and perhaps an output head", certain=False)


def _candidates(
    matrices: Sequence[NamedParameter], places: Places, claims: dict[int, Claim]
) -> list[tuple[_Candidate, bool]]:
    """Return the matrices that are named like outputs, each with whether it is one."""
    candidates: list[_Candidate] = []
    tied: set[str] = set()
    for index, member in enumerate(matrices):
        heads = [_head_around(holder_path(name).split("."), places) for name in member.names]
        for name, around in zip(member.names, heads, strict=True):
            path = holder_path(name)
            if around is not None:
                if None in heads:  # an embedding's, too; layers of a decoder may share a head
                    tied.add(around[0])
                if member.kind in _OUTPUT_KINDS:
                    candidates.append(_Candidate(member, index, path, *around))
                    break
    result = []
    for candidate in candidates:
        rows, cols = candidate.member.sides
        others = [
            other
            for other in candidates
            if other.index > candidate.index and not _are_parallel(candidate.path, other.path, places)
        ]
        same = [other for other in others if other.container == candidate.container]
        is_consumed = any(other.member.sides[1] == rows for other in same)
        if rows != cols:
            is_consumed |= any(
                o.member.sides[1] == rows for o in others if o.container != candidate.container
            )
            is_consumed |= any(
                later.sides[1] == rows and id(later.param) in claims
                for later in matrices[candidate.index + 1 :]
            )
        if candidate.is_direct and candidate.entry.meaning == "head":
            is_output = True
        elif candidate.container in tied:
            # Of a head whose last matrix is the embedding's, the others are hidden.
            is_output = any(
                _head_around(holder_path(name).split("."), places) is None for name in candidate.member.names
            )
        elif places.has_classifier:
            # The model names its own; others of the same outputs stand beside it for training alone.
            is_output = any(m.sides[0] == rows for m in matrices if id(m.param) in places.heads)
        else:
            # As wide as its input: not what makes the outputs ("lm_head.dense" before the decoder).
            is_output = not is_consumed and (
                rows != cols or (candidate.is_direct and candidate.entry.certain)
            )
        result.append((candidate, is_output))
    return result


def _head_around(parts: Sequence[str], places: Places) -> tuple[str, KnownName] | None:
    """Return the path of the output head that a module lies in, with at most one named module between."""
    for position, part in enumerate(parts):
        below = parts[position + 1 :]
        runs = [
            ".".join(parts[position : position + length]) for length in (3, 2) if len(below) >= length - 1
        ]
        run = next((run for run in runs if known(run, "head")), part)
        entry = known(run, "head")
        if entry is None and not in_block(parts[:position]):
            entry = known(part, "top-level head")
            if entry is not None and part.lower() in ("decoder", "generator") and below:
                entry = None  # a whole decoder, not a projection
        # Each of several heads side by side is one: "lm_heads.3.weight" for each codebook, a ModuleDict of tasks.
        ends = [position + 1 + run.count(".")]
        ends += [
            end + 1
            for end in range(position + 1, len(parts))
            if ".".join(parts[:end]) in places.parallel or parts[end - 1].lower() == "lm_heads"
        ]
        if entry is None or named_below(parts, max(ends) - 1) > 1:
            continue
        return ".".join(parts[: max(ends)]), entry
    return None


def _are_parallel(path: str, other: str, places: Places) -> bool:
    """Return whether two modules lie in different children of a module whose children do not follow each other."""
    parts, others = path.split("."), other.split(".")
    common = next((i for i, (a, b) in enumerate(zip(parts, others, strict=False)) if a != b), 0)
    return ".".join(parts[:common]) in places.parallel


def _last_matrix(model: nn.Module) -> tuple[int, bool] | None:
    """Return ``id`` of the weight of the last layer, and whether its containers have a known order.

    ``None`` if the last layers are a block: their order inside it is not known.
    """
    module, in_order = model, True
    while not _is_layer(module):
        children = [c for c in module.children() if any(len(true_shape(p)) > 1 for p in c.parameters())]
        if not children or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return None
        child = children[-1]
        if any(type(other) is type(child) and not is_linear(child) for other in children[:-1]):
            return None  # one of several equal blocks
        in_order &= isinstance(module, nn.Sequential) or len(children) == 1
        module = child
    return next(((id(p), in_order) for n, p in own_parameters(module) if len(true_shape(p)) > 1), None)


def _has_few_outputs(shape: Sequence[int]) -> bool:
    return shape[0] * _FEW <= shape[1]
