"""Finds the embeddings, first layers and output heads of a model, all of which AdamW updates.

Accessors of the model and shapes decide first, then the position of a layer, then its name. A layer that is named like
an output head is hidden if another output head consumes its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from deepspeed_muon.routing.evidence import Claim, NamedParameter
from deepspeed_muon.routing.layers import call_quietly, direct_parameters, is_linear
from deepspeed_muon.routing.names import NameEntry, holder_path, in_block, match_name, named_below
from deepspeed_muon.routing.shapes import true_shape

# A last projection counts as an output head if it has at least this many times fewer outputs than inputs.
_HEAD_REDUCTION = 8
# Images, latents and audio have at most this many channels; hidden layers have more.
_MAX_DATA_CHANNELS = 4
# A larger "in_channels" in a configuration is the width of the model, not the number of channels of its inputs.
_MAX_CONFIG_CHANNELS = 256
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OUTPUT_KINDS = (None, "linear", "convolution", "weight", "bare")


@dataclass(slots=True)
class ModelEnds:
    """First and last layers of a model, as far as its modules identify them; parameters are given by ``id``.

    Attributes:
        embeddings: Weights of ``get_input_embeddings()``.
        inputs: Weights whose input channels are those that the configuration gives for the model's inputs.
        heads: Weights of ``get_output_embeddings()`` and ``get_classifier()``, and weights whose output channels are
            those that the configuration gives for the model's outputs.
        task_heads: Projections to few outputs that a task-specific class adds to a base model.
        last: The weight of the last layer, and whether its containers guarantee that it is the last.
        last_is_task: Whether the last layer is outside the base model.
        has_classifier: Whether the model names its classifier, so that a layer that is merely named like one is an
            output head only if it has as many outputs.
        parallel: Paths of the modules whose children are alternatives (``nn.ModuleDict``), not a sequence.
        is_complete: Whether the parameters are those of a complete model in its order, not of one pipeline stage, so
            that the first and the last of them are its ends.
    """

    embeddings: set[int] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)
    heads: set[int] = field(default_factory=set)
    task_heads: set[int] = field(default_factory=set)
    last: tuple[int, bool] | None = None
    last_is_task: bool = False
    has_classifier: bool = False
    parallel: set[str] = field(default_factory=set)
    is_complete: bool = False

    @classmethod
    def read(cls, model: nn.Module, *, is_complete: bool) -> ModelEnds:
        """Read the accessors, configurations and containers of a model, or of one stage of a pipeline."""
        ends = cls(is_complete=is_complete)
        outermost: list[str] = []
        for path, module in model.named_modules():
            if isinstance(module, nn.ModuleDict):
                ends.parallel.add(holder_path(path + ".weight"))
            ends._read_accessors(module)
            # The ends of a submodel are inside the model, even if the submodel has a configuration of its own.
            if not any(path.startswith(prefix) for prefix in outermost) and ends._read_channels(module):
                outermost.append(path and path + ".")
        if is_complete:
            ends.last = _last_matrix(model)
        for module in model.modules():
            ends._read_task_heads(module)
        return ends

    def _read_accessors(self, module: nn.Module) -> None:
        for accessor in ("get_output_embeddings", "get_classifier"):
            for output in _modules_in(call_quietly(module, accessor)):
                layers = [layer for layer in output.modules() if _is_layer(layer)]
                params = [id(param) for _, param in direct_parameters(output)]
                if not params and layers:  # a container: norm or dropout, then the projection
                    params = [id(param) for _, param in direct_parameters(layers[-1])]
                self.heads.update(params)
                self.has_classifier |= accessor == "get_classifier" and bool(params)
        embedding = call_quietly(module, "get_input_embeddings")
        if isinstance(embedding, nn.Module):
            matrices = [p for _, p in direct_parameters(embedding) if len(true_shape(p)) > 1]
            if not matrices:  # a patch embedding contains a single projection
                descendants = [p for p in embedding.parameters() if len(true_shape(p)) > 1]
                matrices = descendants if len(descendants) == 1 else []
            self.embeddings.update(map(id, matrices))

    def _read_channels(self, module: nn.Module) -> bool:
        """Record the first layer whose input channels, and the last whose output channels, the configuration gives.

        The configurations of diffusers have both numbers. The layers have them as they are, or times the number of
        pixels in a patch. Returns whether the module has such a configuration.
        """
        # 1. channels and patch size in the configuration
        config = getattr(module, "config", None)
        inputs = getattr(config, "in_channels", None)
        if not isinstance(inputs, int) or not 0 < inputs <= _MAX_CONFIG_CHANNELS:
            return False
        outputs = getattr(config, "out_channels", None)
        outputs = outputs if isinstance(outputs, int) else inputs
        sides = getattr(config, "patch_size", None)
        sides = [sides] if isinstance(sides, int) else sides if isinstance(sides, (list, tuple)) else [1]
        area = math.prod(sides) if len(sides) > 1 else sides[0] ** 2  # pixels of a patch
        depth = getattr(config, "patch_size_t", None)
        # 2. the layers outside blocks with as many channels, or with all channels of a patch (2-D, or with depth):
        # for 4 latent channels and patches of 2 x 2 a layer reads 4 channels, or 16
        pixel_counts = (1, area, area * depth if isinstance(depth, int) else area)
        weights = [
            param
            for path, layer in module.named_modules()
            if _is_layer(layer) and not in_block(path.split(".")[:-1])
            for name, param in direct_parameters(layer)
            if name == "weight"
        ]
        for pixels in pixel_counts:
            # (out, in, ...)
            if readers := [param for param in weights if true_shape(param)[1] == inputs * pixels]:
                self.inputs.add(id(readers[0]))
                break
        for pixels in pixel_counts:
            makers = [param for param in weights if true_shape(param)[0] == outputs * pixels]
            if makers and id(makers[-1]) not in self.inputs:
                self.heads.add(id(makers[-1]))
                break
        return True

    def _read_task_heads(self, module: nn.Module) -> None:
        """Record the projections to few outputs that a task-specific class of transformers adds to its base model."""
        prefix = getattr(module, "base_model_prefix", None)
        base = getattr(module, prefix, None) if isinstance(prefix, str) and prefix else None
        if not isinstance(base, nn.Module) or base is module:
            return
        in_base = {id(layer) for layer in base.modules()}
        for path, layer in module.named_modules():
            if id(layer) in in_base or not _is_layer(layer):
                continue
            for name, param in direct_parameters(layer):
                if name != "weight":
                    continue
                self.last_is_task |= self.last is not None and self.last[0] == id(param)
                few = is_linear(layer) and _has_few_outputs(true_shape(param))
                if few and not in_block(path.split(".")[:-1]):
                    self.task_heads.add(id(param))


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


def end_claims(members: Sequence[NamedParameter], ends: ModelEnds) -> dict[int, list[Claim]]:
    """Return ``id(parameter)`` to its claims to be an embedding, a first layer or an output head.

    Args:
        members: All parameters of the model, in its order.
        ends: The ends that the modules identify; empty if only names are available.
    """
    matrices = [member for member in members if len(member.full_shape) > 1]
    claims: dict[int, list[Claim]] = {}
    first_below: dict[str, int] = {}  # see _first_layer
    for member in matrices:
        claims_of_member = claims.setdefault(id(member.param), [])
        if id(member.param) in ends.embeddings:
            claims_of_member.append(Claim("embedding", "weight of an embedding module"))
        elif (claim := _embedding_by_name(member)) is not None:
            claims_of_member.append(claim)
        claims_of_member += _first_layer(member, matrices, ends, first_below)
    for key, claim in _heads(matrices, ends).items():
        claims.setdefault(key, []).append(claim)
    return claims


def _embedding_by_name(member: NamedParameter) -> Claim | None:
    """Return the claim of an embedding that only its name identifies."""
    if member.kind not in (None, "weight", "bare"):
        return None
    for name in member.names:
        components = holder_path(name).split(".")
        for position, component in enumerate(components):
            entry = match_name(component, "embedding", "input")
            # "image_embed" may contain an entire encoder, so at most one named module may be below.
            if entry and not match_name(component, "head") and named_below(components, position) <= 1:
                return Claim("embedding", f"embedding by name ({component.lower()})", entry.certain)
    return None


def _first_layer(
    member: NamedParameter, matrices: Sequence[NamedParameter], ends: ModelEnds, first_below: dict[str, int]
) -> Iterator[Claim]:
    """Yield the claims of a layer that reads images, latents, audio or patches of them.

    ``first_below`` is updated: path of a module that is named like a first layer to ``id`` of the first weight in it.
    """
    if member.kind not in ("convolution", "linear"):
        return
    shape = member.full_shape
    if member.kind == "convolution" and shape[1] <= _MAX_DATA_CHANNELS and math.prod(shape[2:]) > 1:
        yield Claim("input", f"first convolution: reads {shape[1]} channel{'s' * (shape[1] > 1)}")
    elif id(member.param) in ends.inputs:
        yield Claim("input", "first layer: reads the channels of the inputs")
    elif ends.is_complete and member.kind == "convolution" and member is matrices[0]:
        yield Claim("input", "first convolution, in the order of the modules", certain=False)
    for name in member.names:
        components = holder_path(name).split(".")
        for position, component in enumerate(components):
            entry = match_name(component, "input")
            if entry and named_below(components, position) <= 1 and not in_block(components[:position]):
                # A patch embedding may have several layers ("patch_embed.conv.3"); all but the first are hidden.
                first = first_below.setdefault(".".join(components[: position + 1]), id(member.param))
                if first == id(member.param):
                    yield Claim("input", f"first layer by name ({component.lower()})", entry.certain)


@dataclass(slots=True)
class _Candidate:
    """A matrix below a module that is named like an output head.

    Attributes:
        member: The weight.
        index: Its position among the matrices of the model.
        path: The path of the layer.
        container: The path of the module that is named like a head: the layer itself or an ancestor.
        entry: The table entry that matched the container's name.
    """

    member: NamedParameter
    index: int
    path: str
    container: str
    entry: NameEntry

    @property
    def is_direct(self) -> bool:
        return self.path == self.container


def _heads(matrices: Sequence[NamedParameter], ends: ModelEnds) -> dict[int, Claim]:
    """Return ``id(parameter)`` to its claim to be an output head, or to be hidden although it is named like one."""
    # 1. accessors and configuration
    claims = {
        id(m.param): Claim("head", "output head of the model") for m in matrices if id(m.param) in ends.heads
    }
    # 2. task heads, and convolutions to the channels of an image
    for index, member in enumerate(matrices):
        if id(member.param) in ends.task_heads:
            # A projection that feeds a later layer ("film_mul" of CLIPSeg) is not an output head.
            readers = [*matrices[index + 1 :], *(tied for tied in matrices if len(tied.names) > 1)]
            if all(reader.sides[1] != member.sides[0] for reader in readers):
                claims[id(member.param)] = Claim("head", "output head of the model")
        components = holder_path(member.name).split(".") if member.names else []
        outputs, inputs = member.sides
        # A convolution to the channels of an image, in no list of layers.
        if (
            member.kind == "convolution"
            and outputs <= _MAX_DATA_CHANNELS
            and inputs >= _HEAD_REDUCTION * outputs
            and not any(component.isdigit() for component in components[:-1])
        ):
            claims.setdefault(id(member.param), Claim("head", f"output head: makes {outputs} channels"))
    # 3. the shape of the largest embedding
    embeddings = [m.full_shape for m in matrices if m.kind == "embedding" and len(m.full_shape) == 2]
    # (vocabulary, width), the shape of the projection onto the vocabulary too
    largest = max(embeddings, default=None) if ends.is_complete else None
    if largest is not None and largest[0] <= largest[1]:
        largest = None  # a small table: a hidden layer may have the same shape
    for member in matrices:
        path = holder_path(member.name) if member.names else ""
        is_matrix = member.kind in ("linear", "weight") and len(member.full_shape) == 2
        if is_matrix and member.sides == largest and not in_block(path.split(".")):
            claims.setdefault(
                id(member.param), Claim("head", "output head: an output for each row of the embedding")
            )
    # 4. names
    for candidate, is_output in _candidates(matrices, ends, claims):
        entry, key = candidate.entry, id(candidate.member.param)
        named = candidate.path.rpartition(".")[2]
        if is_output:
            is_last = ends.last is not None and ends.last[0] == key
            claims.setdefault(key, Claim("head", f"output head by name ({named})", entry.certain or is_last))
        elif candidate.is_direct and not ends.has_classifier:
            reason = f"hidden matrix: named like an output ({named}), but not one by its shape and position"
            claims.setdefault(key, Claim("hidden", reason, certain=False))
    # 5. the last layer, if it has no claim yet
    if ends.last is not None and ends.last[0] not in claims:
        key, in_order = ends.last
        last = next((member for member in matrices if id(member.param) == key), None)
        claim = None if last is None else _last_layer(last, claims, ends, in_order=in_order)
        if claim is not None:
            claims[key] = claim
    return claims


def _last_layer(
    member: NamedParameter, claims: Mapping[int, Claim], ends: ModelEnds, *, in_order: bool
) -> Claim | None:
    """Return the claim of a last layer that neither an accessor nor its name identifies as an output head."""
    rows, cols = member.sides
    if _has_few_outputs(member.sides):
        return Claim("head", "output head: the last layer, with few outputs", certain=in_order)
    if ends.last_is_task and not ends.heads:
        return Claim("head", "output head: the last layer, outside of the base model", certain=False)
    path = holder_path(member.names[0]).split(".") if member.names else []
    if rows == cols or in_block(path[:-1]) or any(claim.rule == "head" for claim in claims.values()):
        return None
    return Claim("hidden", "hidden matrix, although the last layer and perhaps an output head", certain=False)


def _candidates(
    matrices: Sequence[NamedParameter], ends: ModelEnds, claims: dict[int, Claim]
) -> list[tuple[_Candidate, bool]]:
    """Return the matrices that are named like output heads, and whether each of them is one."""
    # 1. the matrices below modules that are named like heads, and the paths of those that share an embedding's weight
    candidates: list[_Candidate] = []
    tied: set[str] = set()
    for index, member in enumerate(matrices):
        heads = [_head_around(holder_path(name).split("."), ends) for name in member.names]
        for name, around in zip(member.names, heads, strict=True):
            path = holder_path(name)
            if around is not None:
                # It is also the weight of an embedding, not only that of a head which several decoder layers share.
                if None in heads:
                    tied.add(around[0])
                if member.kind in _OUTPUT_KINDS:
                    candidates.append(_Candidate(member, index, path, *around))
                    break
    # 2. which of them produce the output
    candidates_with_verdicts = []
    for candidate in candidates:
        rows, cols = candidate.member.sides
        # Does a later head read the output of this one?
        components = candidate.path.split(".")
        later_heads = []
        for later in candidates:
            # Children of a ModuleDict are alternatives: "heads.a.0" is not read by "heads.b.0" ("heads" in common).
            pairs = zip(components, later.path.split("."), strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
            are_parallel = ".".join(components[:common]) in ends.parallel
            if later.index > candidate.index and not are_parallel:
                later_heads.append(later)
        # sides are (outputs, inputs)
        readers = [later for later in later_heads if later.member.sides[1] == rows]
        is_consumed = any(reader.container == candidate.container for reader in readers)
        if rows != cols:  # many layers read as many inputs as a square matrix has outputs
            is_consumed |= bool(readers) or any(
                later.sides[1] == rows and id(later.param) in claims
                for later in matrices[candidate.index + 1 :]
            )
        if candidate.is_direct and candidate.entry.meaning == "head":
            is_output = True
        elif candidate.container in tied:
            # The last matrix of this head is the embedding's weight, so the matrices before it are hidden.
            is_output = any(
                _head_around(holder_path(name).split("."), ends) is None for name in candidate.member.names
            )
        elif ends.has_classifier:
            # The model names its classifier; a layer with as many outputs is an auxiliary head, used in training only.
            is_output = any(m.sides[0] == rows for m in matrices if id(m.param) in ends.heads)
        else:
            # A square matrix below a head ("lm_head.dense", before the decoder) transforms the hidden state.
            is_output = not is_consumed and (
                rows != cols or (candidate.is_direct and candidate.entry.certain)
            )
        candidates_with_verdicts.append((candidate, is_output))
    return candidates_with_verdicts


def _head_around(components: Sequence[str], ends: ModelEnds) -> tuple[str, NameEntry] | None:
    """Return the path and table entry of the output head around a layer, with at most one named module between."""
    for position, component in enumerate(components):
        below = components[position + 1 :]
        # Some patterns span several components ("final_layer.linear"): try the longest first.
        spans = [
            ".".join(components[position : position + length])
            for length in (3, 2)
            if len(below) >= length - 1
        ]
        span = next((span for span in spans if match_name(span, "head")), component)
        entry = match_name(span, "head")
        if entry is None and not in_block(components[:position]):
            entry = match_name(component, "top-level head")
            if entry is not None and component.lower() in ("decoder", "generator") and below:
                entry = None  # a decoder of several modules, not a projection
        # In a list of parallel heads every child is a head: "lm_heads.3" for a codebook, a ModuleDict of tasks.
        lengths = [position + 1 + span.count(".")]  # components of the path up to the head
        lengths += [
            end + 1
            for end in range(position + 1, len(components))
            if ".".join(components[:end]) in ends.parallel or components[end - 1].lower() == "lm_heads"
        ]
        if entry is None or named_below(components, max(lengths) - 1) > 1:
            continue
        return ".".join(components[: max(lengths)]), entry
    return None


def _last_matrix(model: nn.Module) -> tuple[int, bool] | None:
    """Return ``id`` of the weight of the last layer, and whether its containers guarantee that it is the last.

    ``None`` if the model ends with a list of blocks: the order of the layers inside a block is unknown.
    """
    module, in_order = model, True
    while not _is_layer(module):
        children = [c for c in module.children() if any(len(true_shape(p)) > 1 for p in c.parameters())]
        if not children or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return None
        child = children[-1]
        if any(type(sibling) is type(child) and not is_linear(child) for sibling in children[:-1]):
            return None  # one of several equal blocks
        in_order &= isinstance(module, nn.Sequential) or len(children) == 1
        module = child
    return next(((id(p), in_order) for n, p in direct_parameters(module) if len(true_shape(p)) > 1), None)


def _has_few_outputs(shape: Sequence[int]) -> bool:
    return shape[0] * _HEAD_REDUCTION <= shape[1]
