"""Decides between Muon and AdamW where no setting does: the rule, in five points.

1. A module says what its weights are. AdamW updates embeddings, norms, convolutions that read the channels of data, and
   the layers that ``get_input_embeddings()``, ``get_output_embeddings()`` and ``get_classifier()`` return.
2. AdamW updates output heads: the last layer of the model and those in parallel with it, and layers with an output for
   each row of a vocabulary.
3. Names of one table (:mod:`deepspeed_muon.routing.names`) decide where 1 and 2 say nothing.
4. Muon updates every other matrix of a layer.
5. AdamW updates a bare two-dimensional parameter that nothing identifies.

What rests on 3 or 5 is a guess, unless the name has only one meaning. So is the route of a layer outside of blocks that
reads what no hidden layer makes (perhaps a first layer), or makes what no later one reads (perhaps a head).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from deepspeed_muon.routing.evidence import (
    Claim,
    NamedParameter,
    call_quietly,
    direct_parameters,
    numbers_of_experts,
    router,
)
from deepspeed_muon.routing.names import (
    NameEntry,
    bare_name,
    holder_path,
    in_block,
    match_name,
    named_below,
    plain_name,
)
from deepspeed_muon.routing.route import Algorithm, MatrixKind, Rule
from deepspeed_muon.routing.shapes import true_shape

# Images, latents and audio have at most this many channels; hidden layers have more.
_MAX_DATA_CHANNELS = 4
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Tables of positions and of token types: no layer has an output for each of their rows.
_NO_VOCABULARY = re.compile(r".*(pos|type|segment).*|wpe", re.IGNORECASE)
# The precedence of claims on a parameter that are equally certain.
_ORDER: tuple[Rule, ...] = (
    *("norm", "embedding", "head", "tied", "bias", "no_product", "router", "input", "adapter", "hidden"),
)
PERHAPS_HEAD = "hidden matrix, perhaps an output head"
PERHAPS_FIRST = "hidden matrix, perhaps of a first layer"
_REASONS = {
    "matrix": "hidden matrix",
    "convolution": "filters of a convolution",
    "experts": "hidden matrices",
}


@dataclass(slots=True)
class Structure:
    """What the modules of a model say about it as a whole; parameters are given by ``id``.

    Attributes:
        embeddings: Weights of ``get_input_embeddings()``.
        heads: Weights of ``get_output_embeddings()`` and ``get_classifier()``.
        lists: Paths of ``nn.Sequential``, ``nn.ModuleList`` and ``nn.ModuleDict``.
        is_ordered: Whether the parameters are those of a complete model in its order, so that the last one is its end;
            not those of a pipeline stage, and not names without modules.
    """

    embeddings: set[int] = field(default_factory=set)
    heads: set[int] = field(default_factory=set)
    lists: set[str] = field(default_factory=set)
    is_ordered: bool = False

    def add(self, path: str, module: nn.Module) -> None:
        """Read the accessors of a module at a path, and whether it is a container."""
        if isinstance(module, _LISTS):
            self.lists.add(holder_path(path + ".weight"))
        for accessor in ("get_output_embeddings", "get_classifier"):
            for head in _modules_in(call_quietly(module, accessor)):
                # of a container (norm or dropout, then the projection) the last one
                self.heads.update(_matrices_of(head)[-1:])
        embedding = call_quietly(module, "get_input_embeddings")
        # A patch embedding contains a single projection; what has more is an encoder.
        if isinstance(embedding, nn.Module) and len(matrices := _matrices_of(embedding)) == 1:
            self.embeddings.update(matrices)


def _modules_in(result: object) -> Iterator[nn.Module]:
    """Yield the layers that an accessor returned: one, or several in a container."""
    if isinstance(result, dict):
        result = tuple(result.values())
    if isinstance(result, (tuple, list, nn.ModuleList, nn.ModuleDict)):
        for output in result.children() if isinstance(result, nn.Module) else result:
            yield from _modules_in(output)
    elif isinstance(result, nn.Module):
        yield result


def _matrices_of(module: nn.Module) -> list[int]:
    """Return ``id`` of the matrices that are a module's own; if it has none, of all matrices below it."""
    direct = [id(param) for _, param in direct_parameters(module) if len(true_shape(param)) > 1]
    return direct or [id(param) for param in module.parameters() if len(true_shape(param)) > 1]


def claims_of_model(members: Sequence[NamedParameter], structure: Structure) -> dict[int, list[Claim]]:
    """Return ``id(parameter)`` to the claims that need all parameters together.

    Args:
        members: All parameters of the model, in its order.
        structure: What the modules say; empty if only names are known.
    """
    matrices = [member for member in members if _is_matrix(member)]
    claims: dict[int, list[Claim]] = {
        member.key: [*_embedding(member, structure), *_name_claims(member)] for member in members
    }
    experts, stacks = numbers_of_experts(members)
    for member in matrices:
        if (claim := router(member, experts, stacks)) is not None:
            claims[member.key].append(claim)
    outside = _outside_blocks(matrices, structure) if structure.is_ordered else set()
    heads = dict(_heads(matrices, structure, outside))
    first = (*_first_layers(matrices, structure, outside, heads), *_first_layers_by_name(matrices))
    for key, claim in (*heads.items(), *first):
        claims[key].append(claim)
    return claims


def _is_matrix(member: NamedParameter) -> bool:
    """Return whether a weight reads several inputs; the magnitudes of weight norm and empty weights do not."""
    return len(member.full_shape) > 1 and math.prod(member.full_shape) > member.full_shape[0]


def _inputs(member: NamedParameter) -> int:
    """Return how many features or channels a layer reads."""
    return member.sides[0] if member.kind == "grouped convolution" else member.sides[1]


def _components(member: NamedParameter) -> list[str]:
    """Return the components of the path of a layer."""
    return holder_path(member.name).split(".") if member.names else []


def _parent(member: NamedParameter) -> str:
    """Return the path of the module around a layer, whose weight may have any name."""
    return plain_name(member.name).rpartition(".")[0].rpartition(".")[0]


def _beside(member: NamedParameter) -> tuple[str, str]:
    """Return the path around a layer's module, and the layer's name: the same for "actor.2" and "critic.2"."""
    around, _, _ = _parent(member).rpartition(".")
    return around, _components(member)[-1]


def _in_attention(components: Sequence[str]) -> bool:
    return any(re.search("attention|attn|location", component.lower()) for component in components)


# 1. What a module is


def _embedding(member: NamedParameter, structure: Structure) -> Iterator[Claim]:
    if len(member.full_shape) < 2:
        return
    if member.key in structure.embeddings:
        yield Claim("embedding", "weight of an embedding module")
    # by name (point 3)
    for components in (holder_path(name).split(".") for name in member.names):
        for position, component in enumerate(components):
            entry = match_name(component, "embedding", "input")
            # "image_embed" may contain an entire encoder, so at most one named module may be below.
            if entry and member.kind in (None, "weight", "bare") and named_below(components, position) <= 1:
                yield Claim("embedding", f"embedding by name ({component.lower()})", entry.certain)


def _first_layers(
    matrices: Sequence[NamedParameter], structure: Structure, outside: set[int], heads: Mapping[int, Claim]
) -> Iterator[tuple[int, Claim]]:
    """Yield ``id`` and claim of the layers that read images, latents, audio or patches of them."""
    outputs: set[int] = set()  # of the layers before
    # Numbers of features that embeddings and hidden layers make. What only heads, or layers that may be heads, make is
    # data.
    hidden = [member for member in matrices if member.key not in heads]
    made = {member.full_shape[1] if member.kind == "embedding" else member.sides[0] for member in hidden}
    data = {member.sides[0] for member in matrices if member.key in heads} - made
    # A later layer may read a multiple of these: channels at all positions, both directions of a recurrent layer.
    repeated = {member.sides[0] for member in matrices if "convolution" in (member.kind or "")}
    repeated |= {member.sides[1] for member in matrices if bare_name(member.name).startswith("weight_hh")}
    # Before any embedding a recurrent layer may read data.
    before = itertools.takewhile(lambda member: structure.is_ordered and member.kind != "embedding", matrices)
    readers = (member for member in before if bare_name(member.name).startswith("weight_ih"))
    outside = outside | {member.key for member in readers if member.kind == "linear"}
    for member in matrices:
        shape, inputs = member.full_shape, _inputs(member)
        is_convolution = member.kind == "convolution"
        # A convolution of one pixel may read what a layer before it squeezed into a few channels; 3 are an image.
        is_data = math.prod(shape[2:]) > 1 or inputs == 3 or inputs not in outputs
        is_data |= math.prod(shape) == inputs**2  # the square one beside a codebook
        # Tacotron's location layer reads the channels of attention weights.
        is_data &= inputs <= _MAX_DATA_CHANNELS and not _in_attention(_components(member))
        if is_convolution and is_data:
            yield member.key, Claim("input", f"first convolution: reads {inputs} channel{'s' * (inputs > 1)}")
        elif is_convolution and shape[0] == 3:
            yield member.key, Claim("head", "output head: makes 3 channels", certain=False)
        elif is_convolution and structure.is_ordered and member is matrices[0]:
            yield member.key, Claim("input", "first convolution, in the order of the modules", certain=False)
        # A linear layer may also read the features of several others together, or all positions of a convolution.
        elif member.key in outside and (
            inputs in data
            or not (is_convolution or inputs in made or any(inputs % width == 0 for width in repeated))
        ):
            yield member.key, Claim("hidden", PERHAPS_FIRST, certain=False)
        outputs.add(member.sides[0])


# 2. Output heads


def _heads(
    matrices: Sequence[NamedParameter], structure: Structure, outside: set[int]
) -> Iterator[tuple[int, Claim]]:
    """Yield ``id`` and claim of the output heads."""
    heads = {key: Claim("head", "output head of the model") for key in structure.heads}
    named = _heads_by_name(matrices)
    heads = {**_vocabulary_heads(matrices, outside), **heads}
    # The last layer counts only if no other head is certain; a tied embedding is one.
    certain = {key for key, claim in (*heads.items(), *named.items()) if claim.certain}
    certain |= {member.key for member in matrices if member.kind == "embedding" and len(member.names) > 1}
    heads = {**_last_layers(matrices, outside, certain), **heads}
    for key, claim in named.items():
        if key not in heads or heads[key].rule == "hidden" or claim.certain:
            heads[key] = claim
    # An adapter of a head makes outputs as well: "lm_head.lora_B.default.weight".
    paths = {holder_path(member.name): heads[member.key] for member in matrices if member.key in heads}
    for member in matrices:
        if head := heads.get(member.key) or paths.get(holder_path(member.name)):
            yield member.key, head


def _outside_blocks(matrices: Sequence[NamedParameter], structure: Structure) -> set[int]:
    """Return ``id`` of the layers that may be output heads: outside of blocks, neither adapters nor recurrent weights.

    A block is a module in a list, of several layers, that makes as many features as it reads, so that another one may
    follow; a layer that is itself an entry of the list is in none.
    """
    layers_of: dict[str, list[NamedParameter]] = defaultdict(list)  # by path of a module in a list
    for member in matrices:
        if member.is_layer and member.kind != "grouped convolution":
            for path in _modules_in_lists(member, structure):
                layers_of[path].append(member)
    blocks = {
        path
        for path, layers in layers_of.items()
        if len(layers) > 1 and _inputs(layers[0]) == layers[-1].sides[0]
    }
    outside: set[int] = set()
    for member in matrices:
        components = _components(member)
        is_weight = member.kind in ("linear", "convolution", "weight") and bare_name(member.name) == "weight"
        is_bare_layer = member.kind == "bare" and member.is_layer and len(member.full_shape) == 2
        is_adapter = _is_lora_b(member) or any(claim.rule == "adapter" for claim in _name_claims(member))
        if (is_weight or is_bare_layer) and not (
            blocks.intersection(_modules_in_lists(member, structure))
            or is_adapter
            or "experts" in components
            or _in_attention(components)
        ):
            outside.add(member.key)
    return outside


def _modules_in_lists(member: NamedParameter, structure: Structure) -> list[str]:
    """Return the paths of the modules around a parameter that are in a list and not lists themselves."""
    components = _components(member)
    paths = itertools.pairwise(".".join(components[:length]) for length in range(len(components) + 1))
    return [path for parent, path in paths if parent in structure.lists and path not in structure.lists]


def _vocabulary_heads(matrices: Sequence[NamedParameter], outside: set[int]) -> dict[int, Claim]:
    """Return the layers with an output for each row of an embedding, unless that is a table of positions."""
    rows = {
        member.full_shape[0]
        for member in matrices
        if member.kind == "embedding"
        and member.name.endswith("weight")
        and not any(map(_NO_VOCABULARY.fullmatch, _components(member)))
    }
    # A number of features that layers read is a width of hidden layers.
    widths = {_inputs(member) for member in matrices if member.kind != "embedding"}
    reason = "output head: an output for each row of an embedding"
    # The very last layer of the model is a head even if the vocabulary is as large as a hidden layer.
    return {
        member.key: Claim("head", reason, member.sides[0] not in widths)
        for member in matrices
        if member.key in outside and member.sides[0] in rows
        if member.sides[0] not in widths or member is matrices[-1]
    }


def _last_layers(matrices: Sequence[NamedParameter], outside: set[int], heads: set[int]) -> dict[int, Claim]:
    """Return the last layer, those in parallel with it or with ``heads``, and guesses for the other ends."""
    layers = [member for member in matrices if member.is_layer]
    ends = _ends(matrices, layers, outside)
    # 1. The last end with fewer outputs than inputs; one with more only if it is the very last layer.
    claims: dict[int, Claim] = {}
    last = [member for member in matrices if member.key in heads]
    is_certain = True
    if not last and len(layers) > 1:
        narrow = [member for member in ends.values() if member.sides[0] < member.sides[1]]
        last = narrow[:1] or [member for member in ends.values() if member is layers[-1]]
        for member in last:
            # What other layers make and read is a width of hidden layers.
            others = [layer.sides for layer in layers if layer is not member]
            is_hidden = all(member.sides[0] in sizes for sizes in zip(*others, strict=True))
            is_certain = member is layers[-1] and not is_hidden
            claims[member.key] = Claim("head", "output head: the last layer", is_certain)
    # 2. Those in parallel: with as many outputs, beside it, or at its position in a module beside its own ("actor.2",
    # "critic.2"). Any other end may be a head, and so may the final layer if no head makes several outputs.
    final = next((layer for layer in reversed(layers) if layer.sides[0] > 1), None)
    may_be_head = final is not None and (
        not is_certain or all(head.sides[0] == 1 and _parent(head) != _parent(final) for head in last)
    )
    last_below = {_parent(member): member.key for member in layers}
    readers: dict[int, set[str]] = defaultdict(set)  # number of features to the modules that read that many
    for member in layers:
        readers[_inputs(member)].add(_parent(member))
    hidden_inputs = {_inputs(member) for member in layers if member.key not in ends}  # by hidden layers
    # Paths of heads and of what may be heads, without numbers; the square ones among the latter.
    head_paths, square_paths = set(map(_starred, last)), set[str]()
    for member in (layer for layer in reversed(layers) if layer.key in outside - heads - claims.keys()):
        outputs, inputs = member.sides
        siblings = [head for head in last if outputs < inputs == _inputs(head) and head.kind == member.kind]
        is_parallel = _parent(member) in map(_parent, siblings) or outputs in (head.sides[0] for head in last)
        if member.key in ends and (is_parallel or _beside(member) in map(_beside, siblings)):
            reason = "output head: in parallel with the last layer"
            claims[member.key] = Claim("head", reason, is_certain and is_parallel)
            continue
        # The outputs of a generator are read by a discriminator alone, those of an encoder by the decoder.
        is_generated = member.kind == "linear" and outputs in hidden_inputs
        is_generated &= len(readers[outputs]) == 1 and _parent(member) not in readers[outputs]
        is_unread = member.key in ends or is_generated
        # Layers whose outputs are divided (gates, modulation) make a multiple of what they read, and a layer before a
        # norm has no bias. A head beside another one may have none either.
        is_beside = any(inputs == _inputs(head) and _parent(member) == _parent(head) for head in last)
        is_unread &= outputs % inputs != 0 and (is_beside or bool(member.layer and member.layer.is_biased))
        # In parallel towers a square layer is a twin of a head: the last one of a tower, or any in a list of such.
        twins = head_paths if last_below[_parent(member)] == member.key else square_paths
        is_twin = outputs == inputs and _starred(member) in twins
        if is_unread or is_twin or (member is final and may_be_head and (ends or len(layers) > 1)):
            claims[member.key] = Claim("hidden", PERHAPS_HEAD, certain=False)
            head_paths.add(_starred(member))
            square_paths |= {_starred(member)} if outputs == inputs else set()
    return claims


def _ends(
    matrices: Sequence[NamedParameter], layers: Sequence[NamedParameter], outside: set[int]
) -> dict[int, NamedParameter]:
    """Return the layers whose outputs no later layer and none inside a block reads, by ``id``, the last one first."""
    read = {_inputs(member) for member in layers if member.key not in outside}
    read |= {member.full_shape[1] for member in matrices if member.kind == "embedding"}
    for member in matrices:
        # A bare matrix (prototypes) may be a factor of a product; what has one row is added.
        if member.kind == "bare" and not member.is_layer and len(member.full_shape) == 2:
            read |= set(member.full_shape) if 1 not in member.full_shape else set()
    ends: dict[int, NamedParameter] = {}
    for member in reversed(layers):
        outputs, inputs = member.sides
        if member.key in outside and outputs != inputs and outputs not in read:
            ends[member.key] = member
        # Nothing says which side of a class's weight the inputs are: perhaps it is stored as input x output.
        is_unknown = member.layer is not None and member.layer.transposed is None
        read |= {inputs, outputs} if is_unknown and len(member.full_shape) == 2 else {inputs}
    return ends


def _starred(member: NamedParameter) -> str:
    """Return the path of a layer without its numbers: those of parallel towers are equal ("cv2.0.2", "cv3.1.2")."""
    return re.sub(r"\d+", "*", holder_path(member.name))


# 3. Names


def _first_layers_by_name(matrices: Sequence[NamedParameter]) -> Iterator[tuple[int, Claim]]:
    """Yield ``id`` and claim of the layers that are named like a first layer, or are first in a module that is."""
    first_below: dict[str, int] = {}  # path of such a module to the first weight in it
    for member in matrices:
        components = _components(member) if member.kind in ("convolution", "linear") else []
        for position, component in enumerate(components):
            entry = match_name(component, "input")
            if entry and named_below(components, position) <= 1 and not in_block(components[:position]):
                # A patch embedding may have several layers ("patch_embed.conv.3"); all but the first are hidden.
                path = ".".join(components[: position + 1])
                if first_below.setdefault(path, member.key) == member.key:
                    reason = f"first layer by name ({component.lower()})"
                    yield member.key, Claim("input", reason, entry.certain)


def _heads_by_name(matrices: Sequence[NamedParameter]) -> dict[int, Claim]:
    """Return the layers that are named like output heads, or are last in a module that is."""
    claims: dict[int, Claim] = {}
    # A model ends with its tied embedding, which reads as many features as it has columns.
    later = {member.sides[1] for member in matrices if len(member.names) > 1}
    layers = [member for member in matrices if member.is_layer]
    for member in reversed(matrices):
        outputs, inputs = member.sides
        for name in member.names if member.kind in (None, "linear", "convolution", "weight", "bare") else ():
            components = holder_path(name).split(".")
            for position in range(len(components)):
                entry, end = _head_entry(components, position)
                if entry is None or named_below(components, end) > 1:
                    continue
                is_direct = named_below(components, end) == 0
                if entry.meaning == "layer" and not is_direct:
                    continue  # a decoder of several modules is not a projection
                # A layer whose outputs a later one reads is hidden. So is a square one ("lm_head.dense"), unless it is
                # the last one of the model or its full name is certain.
                is_last = is_direct and len(layers) > 1 and member is layers[-1]
                is_named = entry.certain and end == len(components) - 1
                is_output = is_last or is_named if outputs == inputs else outputs not in later
                if is_output:
                    claim = Claim("head", f"output head by name ({components[end]})", entry.certain)
                    claims.setdefault(member.key, claim)
                elif (entry.meaning == "layer" or member.kind == "linear") and end == len(components) - 1:
                    # Such a layer may make outputs that a later layer refines (a postnet).
                    claims.setdefault(member.key, Claim("hidden", PERHAPS_HEAD, certain=False))
        later.add(_inputs(member))
    return claims


def _head_entry(components: Sequence[str], position: int) -> tuple[NameEntry | None, int]:
    """Return the entry of a head that matches at a position of a path, and the position of its last component."""
    # Some patterns span several components ("final_layer.linear"): the longest first.
    for end in range(min(position + 3, len(components)) - 1, position - 1, -1):
        if entry := match_name(".".join(components[position : end + 1]), "head"):
            return entry, end
    is_top_level = not in_block(components[:position])
    return match_name(components[position], "top-level head", "layer") if is_top_level else None, position


def _name_claims(member: NamedParameter) -> Iterator[Claim]:
    """Yield the claims on tables, biases and adapters, which only their names identify."""
    if len(member.full_shape) < 2:
        return
    for name in member.names:
        plain, last = plain_name(name), bare_name(name)
        holder = holder_path(name).rpartition(".")[2]
        if member.kind in (None, "bare", "experts") and last != "weight" and match_name(last, "no product"):
            yield Claim("no_product", f"not the weight of a product ({last.lower()})")
        # LayoutLM and T5 have tables of relative positions in linear layers and embeddings.
        if table := next((text for text in (last, holder) if match_name(text, "relative positions")), None):
            yield Claim("no_product", f"not the weight of a product ({table.lower()})")
        if len(member.full_shape) == 2 and match_name(plain.rpartition(".")[2], "bias"):
            yield Claim("bias", "biases")
        components = [text for text in name.lower().split(".") if text not in ("weight", "bias", "default")]
        # Some patterns span two components ("lora.down").
        spans = [*components, *(".".join(components[i : i + 2]) for i in range(len(components) - 1))]
        if any(match_name(span, "LoRA A") for span in spans):
            yield Claim("adapter", "matrix A of a LoRA adapter")
        elif any(match_name(span, "adapter") for span in spans):
            yield Claim("adapter", "an adapter other than LoRA")


def _is_lora_b(member: NamedParameter) -> bool:
    return any(match_name(text, "LoRA B") for name in member.names for text in name.lower().split("."))


# 4. and 5. Every other matrix, and the order of the claims


def decide(member: NamedParameter, kind: MatrixKind | None) -> tuple[Algorithm, Claim]:
    """Return the algorithm of a parameter that no setting names, and the claim that decides it.

    Args:
        member: The parameter with all claims on it.
        kind: How it can be read as a matrix; ``None`` if it cannot.
    """
    shape = member.full_shape
    claims = sorted(member.claims, key=lambda claim: (not claim.certain, _ORDER.index(claim.rule)))
    if kind is None:
        return "adamw", _not_a_matrix(member, claims)
    if 1 in (shape[-2:] if kind == "experts" else (shape[0], math.prod(shape[1:]))):
        return "adamw", Claim("shape", "a matrix with a side of 1, which is a vector")
    if not claims and len(shape) == 2 and member.names and member.kind in (None, "bare", "experts"):
        claims = [_bare_matrix(member)]
    if claims:
        return ("muon" if claims[0].rule == "hidden" else "adamw"), claims[0]
    if member.layer is None:
        reason = _REASONS[kind] + (" by name" if member.names else " by shape")
        return "muon", Claim("hidden", reason, certain=False)
    if kind == "matrix" and member.kind == "weight" and not member.layer.product:
        return "muon", Claim("hidden", "hidden matrix, by the name weight alone", certain=False)
    return "muon", Claim("hidden", _REASONS[kind])


def _not_a_matrix(member: NamedParameter, claims: Sequence[Claim]) -> Claim:
    """Return the claim on a parameter that cannot be read as a matrix; ``claims`` begin with the strongest."""
    shape = member.full_shape
    if member.kind == "LoRA of experts":
        return claims[0]
    if member.kind in ("grouped convolution", "transposed convolution"):
        return Claim("shape", f"filters of a {member.kind}")
    reasons = {0: "a scalar", 1: "a vector", 2: "an empty matrix"}
    if len(shape) < 3 or min(shape) == 0:
        return Claim("shape", reasons.get(len(shape), "an empty tensor"))
    reason = f"{len(shape)}-dimensional, not a matrix"
    # A table that is broadcast over the batch has a first dimension of 1.
    is_no_stack = 1 in shape or any(match_name(bare_name(name), "bias") for name in member.names)
    if claims and claims[0].rule != "hidden" and (claims[0].certain or not is_no_stack):
        return claims[0]
    if is_no_stack:
        return Claim("shape", reason)
    return Claim("shape", f"{reason} unless 'include' or 'matrices' says so", certain=False)


def _bare_matrix(member: NamedParameter) -> Claim:
    """Return the claim on a 2-dimensional parameter that is not a layer's ``weight``."""
    if member.layer is not None and member.layer.product:
        return Claim("hidden", f"hidden matrix: {member.layer.product}")
    # Without modules, "weight" is in the name that nearly all layers give to their matrix ("in_proj_weight").
    if member.layer is None and any("weight" in name.rpartition(".")[2] for name in member.names):
        return Claim("hidden", "hidden matrix by name", certain=False)
    if _is_lora_b(member):
        return Claim("hidden", "matrix B of a LoRA adapter")
    if any("experts" in plain_name(name).split(".") for name in member.names):
        reason = "perhaps several experts in one matrix; their number is unknown"
        return Claim("no_product", reason, certain=False)
    return Claim("no_product", "a bare parameter: 'include' makes it Muon's", certain=False)
