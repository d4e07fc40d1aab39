"""QK-clip (MuonClip; Kimi K2, arXiv 2507.20534): bounds attention logits by scaling query and key rows after a step.

For each head ``h`` with the largest scaled logit before the softmax, ``S_h``, over the global batch::

    eta_h = min(1, threshold / S_h)
    queries of head h          W <- eta_h^alpha       * W
    keys of a key head         W <- eta_g^(1 - alpha) * W      eta_g: smallest eta of the query heads that it serves
    MLA: rotated queries       W <- eta_h             * W      (the rotated key, which all heads share, is not scaled)

The logits of a head become at most ``eta_h`` times as large. The float64 counterpart is in
:mod:`tests.support.reference_math`.

Once per step, after the first update, the largest logits are max-reduced over all ranks, and each rank scales its rows
in its flat fp32 partitions, before ZeRO copies these to the low-precision weights: so it works at every stage. Momentum
and moments are not changed. The optimizer knows a :class:`QkClip` as its ``after_step``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.logs import warn
from deepspeed_muon.optimizer import STEP_HOOKS, Muon
from deepspeed_muon.plan.layout import PartitionIndex
from deepspeed_muon.plan.placement import Fragment
from deepspeed_muon.qk_clip import hugging_face
from deepspeed_muon.qk_clip.recorder import AttentionHeads, HeadRole, QkRecorder, find_recorders
from deepspeed_muon.routing.route import Route
from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.transport.ranks import all_gather_tensor, all_reduce_tensor

# If no logit of a layer can have exceeded this fraction of the threshold, the next step bounds its logits instead of
# computing them.
_BOUNDED_BELOW = 0.5


@dataclass(frozen=True, slots=True)
class QkClipReport:
    """The logits of the last step and the number of clipped heads; equal on all ranks.

    Attributes:
        largest: Name of each attention layer to the largest logit of each query head, minus infinity where none was
            recorded.
        bounds: Name of each layer whose logits were not computed, to an upper bound for each query head.
        clipped: Number of query heads above the threshold.
    """

    largest: dict[str, list[float]]
    bounds: dict[str, list[float]]
    clipped: int


class QkClip:
    """Clips the attention heads of one optimizer's model."""

    def __init__(self, optimizer: Muon, model: nn.Module | None) -> None:
        """Find the attention layers, and make those of Hugging Face's models record.

        Args:
            optimizer: The optimizer, with the setting ``qk_clip``. No reference to it remains.
            model: The model. Mutated, see :func:`deepspeed_muon.qk_clip.hugging_face.attach`.

        Raises:
            ConfigError: If there is no attention layer to clip, one cannot be clipped, or nobody compares the ranks.
        """
        if not optimizer.managed and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                "qk_clip: without DeepSpeed the ranks do not compare their attention logits, so that replicas would "
                "scale their heads differently: start the run with deepspeed.initialize, or unset qk_clip"
            )
        if model is None:
            raise ConfigError("qk_clip needs the model: pass model=... to deepspeed_muon.Muon")
        assert optimizer.config.qk_clip is not None
        self.settings = optimizer.config.qk_clip
        # Weak references, because the finalizer below must not keep the models alive.
        recording = [weakref.ref(pretrained) for pretrained in hugging_face.attach(model)]
        # Restores the models when this object is collected, together with its optimizer.
        weakref.finalize(self, hugging_face.detach, recording).atexit = False
        recorder_of_layer = find_recorders(model)
        if not recorder_of_layer:
            raise ConfigError(
                "optimizer.params.qk_clip: no attention layer was found. Models of Hugging Face are recognised by "
                "q_proj and k_proj (or kv_b_proj); give the attention modules of others a deepspeed_muon.QkRecorder"
            )
        names = dict(model.named_parameters(remove_duplicate=False))
        self.layers: tuple[AttentionHeads, ...] = tuple(
            _with_routed_names(layer, names, optimizer.routed.by_id) for layer, _ in recorder_of_layer
        )
        self._recorders: tuple[QkRecorder, ...] = tuple(recorder for _, recorder in recorder_of_layer)
        self._fragments: dict[int, tuple[HeadFragment, ...]] = {}  # by id of the step set
        self._group: dist.ProcessGroup | None = None
        self._tensor_group: dist.ProcessGroup | None = None
        self._divisions: Sequence[Division] = ["none"] * len(self.layers)
        self._device = torch.device("cpu")
        self._largest: list[list[float]] | None = None
        self.report = QkClipReport({}, {}, 0)

    def bind(self, step_sets: Sequence[StepSet], *, device: torch.device) -> None:
        """Find the heads' rows in this rank's partitions.

        Args:
            step_sets: What each call of ``step()`` updates.
            device: Where the logits are max-reduced.

        Raises:
            ConfigError: If query and key weights are divided over different groups of ranks, or tensor parallelism
                leaves their heads on different ranks.
        """
        # 1. How tensor parallelism divides the heads of each layer.
        tensor_groups = (step_set.tensor_group for step_set in step_sets)
        self._tensor_group = next((group for group in tensor_groups if group is not None), None)
        rank, ranks = 0, 1
        if self._tensor_group is not None:
            rank, ranks = dist.get_rank(self._tensor_group), dist.get_world_size(self._tensor_group)
            cut_of = {
                matrix.name: matrix.is_tp_shard for step_set in step_sets for matrix in step_set.matrices
            }
            self._divisions = [_division(layer, cut_of) for layer in self.layers]
        # 2. The rows of the heads in this rank's partitions, and the data-parallel group of the attention weights.
        names = {block.parameter for layer in self.layers for block in layer.rows}
        self._fragments = {}
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for step_set in step_sets:
            parameters = {
                layout.name: (layout.partition, layout.placement.fragment_on(step_set.rank))
                for layout in step_set.layouts
                if layout.name in names
            }
            self._fragments[id(step_set)] = head_fragments(
                self.layers, parameters, self._divisions, rank=rank, ranks=ranks
            )
            if parameters:
                group = step_set.group
                groups[() if group is None else tuple(dist.get_process_group_ranks(group))] = group
        if len(groups) != 1:
            raise ConfigError(
                "optimizer.params.qk_clip: the attention weights belong to different data-parallel groups, which is "
                "not supported; unset it"
            )
        (self._group,) = groups.values()
        self._device = device

    def __str__(self) -> str:
        """Return the layers as text, which the ranks compare."""
        return f"qk_clip of {self.layers}"

    def __call__(self, updated: Sequence[StepSet]) -> None:
        """Scale the rows of heads above the threshold in step sets that were updated."""
        if self._largest is None:
            self._largest = self._reduce()
        for step_set in updated:
            with step_set.flat_partitions() as flat:
                for head in self._fragments[id(step_set)]:
                    factor = clip_factor(
                        max(self._largest[head.layer][head.first : head.stop]),
                        role=head.role,
                        threshold=self.settings.threshold,
                        alpha=self.settings.alpha,
                    )
                    if factor != 1.0:
                        flat[head.partition].narrow(0, head.offset, head.numel).mul_(factor)

    def end_step(self) -> None:
        """Forget the logits of a step, also in the recorders: the next one must not clip by them."""
        self._largest = None
        for recorder in self._recorders:
            recorder.clear()

    def _reduce(self) -> list[list[float]]:
        """Return the largest logits of each layer's heads: one all-reduce and one wait for the device.

        Tensor-parallel ranks then gather those of each other's heads. Must be called by all ranks of both groups.
        """
        # 1. Largest logits and bounds of all layers in one tensor, (values,) fp32.
        local = []  # of each layer the largest logits and the bounds, (heads,) fp32
        for recorder in self._recorders:
            for recorded in (recorder.largest, recorder.bounds):
                if recorded is None:
                    recorded = torch.full(
                        (recorder.heads,), -math.inf, dtype=torch.float32, device=self._device
                    )
                local.append(recorded.to(self._device))
        # A maximum with NaN would differ between ranks.
        flat = torch.cat(local).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        # 2. The maxima over all data-parallel ranks, then those of the heads on other tensor-parallel ranks.
        if self._group is not None and dist.get_world_size(self._group) > 1:
            all_reduce_tensor(flat, self._group, purpose="comparison of attention logits", how="max")
        reduced = self._of_all_heads(flat, [len(values) for values in local])
        largest, bounds = reduced[::2], reduced[1::2]  # of each layer, in turn
        self._make_report(largest, bounds)
        # 3. Which layers compute their logits in the next step: decided by reduced values, so all ranks agree.
        for recorder, bound in zip(self._recorders, bounds, strict=True):
            # A layer without a bound is computed. Modules that record logits of their own have none and need none.
            recorder.exact = not -math.inf < max(bound) <= _BOUNDED_BELOW * self.settings.threshold
        return largest

    def _of_all_heads(self, flat: Tensor, lengths: Sequence[int]) -> list[list[float]]:
        """Return two entries for each layer with the values of all heads, also those on other tensor-parallel ranks."""
        gathered = flat.unsqueeze(0)  # (tensor-parallel ranks, values)
        if self._tensor_group is not None:
            gathered = all_gather_tensor(flat, self._tensor_group, purpose="comparison of attention logits")
        # Ranks that have the same heads computed the same values, perhaps with different rounding.
        return [
            # (ranks, heads) to (heads,): equal heads on all ranks, or those of the ranks one after the other
            (values.amax(dim=0) if self._divisions[number // 2] == "none" else values.flatten()).tolist()
            for number, values in enumerate(gathered.cpu().split(lengths, dim=1))
        ]

    def _make_report(self, largest: list[list[float]], bounds: list[list[float]]) -> None:
        names = [layer.layer for layer in self.layers]
        bounded = {
            name: bound
            for name, bound, recorder in zip(names, bounds, self._recorders, strict=True)
            if not recorder.exact and max(bound) > -math.inf
        }
        threshold = self.settings.threshold
        clipped = sum(threshold < value < math.inf for layer in largest for value in layer)
        self.report = QkClipReport(dict(zip(names, largest, strict=True)), bounded, clipped)
        infinite = [name for name, values in self.report.largest.items() if math.inf in values]
        if infinite:
            warn(
                "deepspeed_muon: attention logits of %s are not finite; they are not clipped",
                infinite,
                group=self._group,
            )
        jumped = [name for name, bound in bounded.items() if max(bound) > threshold]
        if jumped:
            warn(
                "deepspeed_muon: attention logits of %s may have jumped from below half of qk_clip.threshold to above "
                "it in one step; they are computed, and clipped, from the next step on",
                jumped,
                group=self._group,
            )


def _with_routed_names(
    layer: AttentionHeads, names: Mapping[str, nn.Parameter], routes: Mapping[int, Route]
) -> AttentionHeads:
    """Return the layer with the parameters' names in the optimizer."""
    rows = []
    for block in layer.rows:
        route = routes.get(id(names[block.parameter]))
        if route is None or route.algorithm == "frozen":
            raise ConfigError(
                f"optimizer.params.qk_clip: {block.parameter} of attention layer {layer.layer} is not trained by this "
                f"optimizer, so its heads cannot be clipped; train it or unset qk_clip"
            )
        rows.append(replace(block, parameter=route.name))
    return AttentionHeads(layer.layer, layer.heads, tuple(rows))


Division = Literal["none", "heads", "query heads"]
"""What tensor parallelism shards in a layer: nothing, all heads, or query heads of a key head that all ranks have."""


def _division(layer: AttentionHeads, cut_of: Mapping[str, bool]) -> Division:
    """Return how a tensor-parallel group divides a layer; ``cut_of`` says of each of Muon's matrices if it is sharded.

    Raises:
        ConfigError: If that is unknown, or query heads and their key heads are on different ranks.
    """
    # A bias has the rows of its weight.
    weights = [rows for rows in layer.rows if rows.row_numel > 1]
    unknown = [rows.parameter for rows in weights if rows.parameter not in cut_of]
    if unknown:
        raise ConfigError(
            f"optimizer.params.qk_clip: with tensor parallelism the weights of queries and keys must be Muon's "
            f"matrices, and {unknown[0]} is AdamW's; remove it from 'exclude', or unset qk_clip"
        )
    queries = {cut_of[rows.parameter] for rows in weights if rows.role != "key"}
    keys = {cut_of[rows.parameter] for rows in weights if rows.role == "key"}
    if queries == keys:
        return "heads" if True in queries else "none"
    one_key = all(rows.heads == 1 for rows in weights if rows.role == "key")
    if queries == {True} and keys == {False} and one_key:
        return "query heads"
    raise ConfigError(
        f"optimizer.params.qk_clip: tensor parallelism cuts only some of the query and key weights of {layer.layer}, "
        f"so that it is unknown which query heads a key head serves; cut both, or unset qk_clip"
    )


@dataclass(frozen=True, slots=True)
class HeadFragment:
    """The elements of one head's rows in one rank's partition.

    Attributes:
        layer: Number of the attention layer.
        first: First of the query heads whose largest logit decides the factor, among those of all ranks.
        stop: The query head after the last of them.
        role: Whether the rows produce queries or keys.
        partition: Index of the flat partition.
        offset: First element in it.
        numel: Number of elements.
    """

    layer: int
    first: int
    stop: int
    role: HeadRole
    partition: PartitionIndex
    offset: int
    numel: int


def head_fragments(
    layers: Sequence[AttentionHeads],
    parameters: Mapping[str, tuple[PartitionIndex, Fragment | None]],
    divisions: Sequence[Division],
    *,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[HeadFragment, ...]:
    """Return the fragments of all heads in this rank's partitions.

    Args:
        layers: The attention layers.
        parameters: Name of each parameter to its partition and this rank's fragment.
        divisions: How tensor parallelism divides each layer.
        rank: This rank in the tensor-parallel group.
        ranks: The size of the tensor-parallel group.
    """
    fragments = []
    for number, (layer, division) in enumerate(zip(layers, divisions, strict=True)):
        for block in layer.rows:
            partition, fragment = parameters.get(block.parameter, (PartitionIndex(0), None))
            if fragment is None:
                continue
            # Query heads that a head of this block serves. Example: 8 query and 2 key heads on each of two ranks that
            # divide them ("heads"). Key head 1 of rank 1 serves the query heads 8 + 1 * 4 to 8 + 2 * 4 among the 16 of
            # all ranks.
            served = layer.heads // block.heads
            first = rank * layer.heads if division != "none" else 0
            # A single key head on every rank serves the query heads of all ranks.
            if division == "query heads" and block.role == "key":
                first, served = 0, ranks * served
            for head in range(block.heads):
                # The rows of the head are elements [begin, end) of the parameter; this rank has [low, high) of them.
                begin = (block.start + head * block.stride) * block.row_numel
                end = begin + block.rows * block.row_numel
                low = max(begin, fragment.matrix_offset)
                high = min(end, fragment.matrix_offset + fragment.numel)
                if low < high:
                    offset = fragment.partition_offset + low - fragment.matrix_offset
                    heads = (first + head * served, first + (head + 1) * served)
                    fragments.append(HeadFragment(number, *heads, block.role, partition, offset, high - low))
    return tuple(fragments)


def clip_factor(largest: float, *, role: HeadRole, threshold: float, alpha: float) -> float:
    """Return the factor for the rows of one head.

    Args:
        largest: Largest logit of the head, or of all query heads that a key head serves; 1 is returned if it is not
            finite.
        role: Whether the rows produce queries or keys.
        threshold: Logits above it are clipped; positive.
        alpha: Exponent of the factor for queries, in [0, 1].
    """
    if not math.isfinite(largest) or largest <= threshold:
        return 1.0
    exponent = {"query": alpha, "key": 1.0 - alpha, "rotated_query": 1.0}[role]
    return float((threshold / largest) ** exponent)


STEP_HOOKS["qk_clip"] = QkClip
