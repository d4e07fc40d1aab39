"""QK-clip (MuonClip; Kimi K2, arXiv 2507.20534) in the optimizer step: what keeps attention logits below a threshold.

For each head ``h`` with the largest scaled logit before the softmax, ``S_h``, over the global batch::

    eta_h = min(1, threshold / S_h)
    queries of head h          W <- eta_h^alpha       * W
    keys of a key head         W <- eta_g^(1 - alpha) * W      eta_g: smallest eta of the query heads that it serves
    MLA: rotated queries       W <- eta_h             * W      (the rotated key is shared by all heads and stays)

So the logits of a head become at most ``eta_h`` times what they were. The float64 counterpart is in
:mod:`tests.support.reference_math`.

Once per step all ranks compare their largest logits, and each scales its own rows: in the flat fp32 partitions, before
ZeRO copies these to the low-precision weights, so it works at every stage. Momentum and moments stay as they are.
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

from deepspeed_muon.config.values import QkClipConfig
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.logs import warn
from deepspeed_muon.plan.placement import Fragment
from deepspeed_muon.qk_clip import hugging_face
from deepspeed_muon.qk_clip.recorder import AttentionHeads, HeadRole, QkRecorder, find_recorders
from deepspeed_muon.routing.route import Route
from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.transport.ranks import gather_tensors, reduce_tensor

# If no logit of a layer can have exceeded this share of the threshold, the next step bounds its logits instead of
# computing them.
_WATCHED_BELOW = 0.5


@dataclass(frozen=True, slots=True)
class QkClipReport:
    """What the last step saw and did; equal on all ranks.

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
    """The clip of one optimizer."""

    def __init__(self, settings: QkClipConfig, model: nn.Module, routes: Mapping[int, Route]) -> None:
        """Find the attention layers, and make those of Hugging Face's models record.

        Args:
            settings: Threshold and alpha.
            model: The model. Mutated, see :func:`deepspeed_muon.qk_clip.hugging_face.attach`.
            routes: ``id(parameter)`` to its route.

        Raises:
            ConfigError: If there is no attention layer to clip, or one cannot be clipped.
        """
        self.settings = settings
        recording = [weakref.ref(each) for each in hugging_face.attach(model)]
        # When this clip goes, with its optimizer, the models are as before.
        weakref.finalize(self, hugging_face.detach, recording).atexit = False
        found = find_recorders(model)
        if not found:
            raise ConfigError(
                "optimizer.params.qk_clip: no attention layer was found. Models of Hugging Face are recognised by "
                "q_proj and k_proj (or kv_b_proj); give the attention modules of others a deepspeed_muon.QkRecorder"
            )
        names = dict(model.named_parameters(remove_duplicate=False))
        self.layers: tuple[AttentionHeads, ...] = tuple(
            _with_routed_names(layer, names, routes) for layer, _ in found
        )
        self._recorders: tuple[QkRecorder, ...] = tuple(recorder for _, recorder in found)
        self._runs: dict[int, tuple[HeadRun, ...]] = {}
        self._group: dist.ProcessGroup | None = None
        self._tensor_group: dist.ProcessGroup | None = None
        self._divisions: Sequence[Division] = ["none"] * len(self.layers)
        self._device = torch.device("cpu")
        self._largest: list[list[float]] | None = None
        self.report = QkClipReport({}, {}, 0)

    def bind(self, step_sets: Sequence[StepSet], *, device: torch.device) -> None:
        """Find the rows in this rank's partitions.

        Args:
            step_sets: What each call of ``step()`` updates.
            device: Where the ranks' maxima are compared.

        Raises:
            ConfigError: If query and key weights are divided over different groups of ranks, or tensor parallelism
                leaves their heads on different ranks.
        """
        self._tensor_group = next((each.tensor_group for each in step_sets if each.tensor_group), None)
        rank, ranks = 0, 1
        if self._tensor_group is not None:
            rank, ranks = dist.get_rank(self._tensor_group), dist.get_world_size(self._tensor_group)
            cut_of = {matrix.name: matrix.is_sharded for each in step_sets for matrix in each.matrices}
            self._divisions = [_division(layer, cut_of) for layer in self.layers]
        wanted = {block.parameter for layer in self.layers for block in layer.rows}
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for number, step_set in enumerate(step_sets):
            layouts = [each for each in step_set.layouts if each.name in wanted]
            parameters = {
                each.name: (each.partition, each.placement.fragment_on(step_set.rank)) for each in layouts
            }
            self._runs[number] = head_runs(self.layers, parameters, self._divisions, rank=rank, ranks=ranks)
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

    def description(self) -> str:
        """Return a text that must be equal on all ranks."""
        return repr(self.layers)

    def reduce(self) -> None:
        """Find the largest logits over all ranks, once a step: one all-reduce and one wait for the device.

        Tensor-parallel ranks then tell each other those of their heads. Must be called by all ranks of both groups.
        """
        if self._largest is not None:
            return
        parts = []
        for recorder in self._recorders:
            for recorded in (recorder.largest, recorder.bounds):
                known = torch.full((recorder.heads,), -math.inf) if recorded is None else recorded
                parts.append(known.to(self._device))
        # A NaN would be lost on some ranks by the comparison below.
        together = torch.cat(parts).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        if self._group is not None and dist.get_world_size(self._group) > 1:
            reduce_tensor(together, self._group, purpose="comparison of attention logits", how="max")
        numbers = self._of_all_heads(together, [len(part) for part in parts])
        self._largest, bounds = numbers[::2], numbers[1::2]
        self._make_report(self._largest, bounds)
        for recorder, bound in zip(self._recorders, bounds, strict=True):
            # A layer without a bound is computed. Modules that hand over their own logits have none and need none.
            recorder.exact = not -math.inf < max(bound) <= _WATCHED_BELOW * self.settings.threshold

    def _of_all_heads(self, together: Tensor, lengths: Sequence[int]) -> list[list[float]]:
        """Return the numbers of all heads of each layer: those of this rank, or of all tensor-parallel ranks."""
        told = together.unsqueeze(0)
        if self._tensor_group is not None:
            told = gather_tensors(together, self._tensor_group, purpose="comparison of attention logits")
        rows = told.cpu().split(lengths, dim=1)
        # Two entries a layer. Ranks that have the same heads computed the same numbers, perhaps with other rounding.
        return [
            (part.amax(dim=0) if self._divisions[number // 2] == "none" else part.flatten()).tolist()
            for number, part in enumerate(rows)
        ]

    def _make_report(self, largest: list[list[float]], bounds: list[list[float]]) -> None:
        names = [layer.layer for layer in self.layers]
        watched = {
            name: bound
            for name, bound, recorder in zip(names, bounds, self._recorders, strict=True)
            if not recorder.exact and max(bound) > -math.inf
        }
        threshold = self.settings.threshold
        clipped = sum(threshold < value < math.inf for layer in largest for value in layer)
        self.report = QkClipReport(dict(zip(names, largest, strict=True)), watched, clipped)
        infinite = [name for name, values in self.report.largest.items() if math.inf in values]
        if infinite:
            warn(
                "deepspeed_muon: attention logits of %s are not finite; they are not clipped",
                infinite,
                group=self._group,
            )
        jumped = [name for name, bound in watched.items() if max(bound) > threshold]
        if jumped:
            warn(
                "deepspeed_muon: attention logits of %s may have jumped from below half of qk_clip.threshold to above "
                "it in one step; they are computed, and clipped, from the next step on",
                jumped,
                group=self._group,
            )

    def apply(self, number: int, partitions: Mapping[int, Tensor]) -> None:
        """Scale the rows of heads above the threshold.

        Args:
            number: Number of the step set.
            partitions: Partition index to this rank's flat tensor. Mutated.
        """
        assert self._largest is not None
        for run in self._runs[number]:
            largest = max(self._largest[run.layer][run.first : run.stop])
            factor = clip_factor(
                largest, role=run.role, threshold=self.settings.threshold, alpha=self.settings.alpha
            )
            if factor != 1.0:
                partitions[run.partition].narrow(0, run.offset, run.numel).mul_(factor)

    def clear(self) -> None:
        """Forget the logits of a step, here and in the recorders. Called after skipped steps too."""
        self._largest = None
        for recorder in self._recorders:
            recorder.clear()


def _with_routed_names(
    layer: AttentionHeads, names: Mapping[str, nn.Parameter], routes: Mapping[int, Route]
) -> AttentionHeads:
    """Return the layer with the names under which the optimizer has the parameters."""
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
"""What tensor parallelism divides of a layer: nothing, its heads, or query heads beside a key head that all have."""


def _division(layer: AttentionHeads, cut_of: Mapping[str, bool]) -> Division:
    """Return how a tensor-parallel group divides a layer; ``cut_of`` tells of each matrix of Muon's whether it is cut.

    Raises:
        ConfigError: If that is not known, or query heads are elsewhere than their key heads.
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
        f"so that nobody knows which query heads a key head serves; cut both, or unset qk_clip"
    )


@dataclass(frozen=True, slots=True)
class HeadRun:
    """A run of one rank's partition that belongs to one head.

    Attributes:
        layer: Number of the attention layer.
        first: First of the query heads whose largest logit decides the factor, among those of all ranks.
        stop: The query head after the last of them.
        role: What the rows make.
        partition: Index of the flat partition.
        offset: Where the run starts in it.
        numel: Its length.
    """

    layer: int
    first: int
    stop: int
    role: HeadRole
    partition: int
    offset: int
    numel: int


def head_runs(
    layers: Sequence[AttentionHeads],
    parameters: Mapping[str, tuple[int, Fragment | None]],
    divisions: Sequence[Division],
    *,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[HeadRun, ...]:
    """Return every run of this rank's partitions that belongs to a head.

    Args:
        layers: The attention layers.
        parameters: Name of each parameter to its partition and this rank's fragment.
        divisions: How tensor parallelism divides each layer.
        rank: This rank in the tensor-parallel group.
        ranks: Its size.
    """
    runs = []
    for number, (layer, division) in enumerate(zip(layers, divisions, strict=True)):
        for block in layer.rows:
            partition, fragment = parameters.get(block.parameter, (0, None))
            if fragment is None:
                continue
            # Query heads that a head of this block serves.
            served = layer.heads // block.heads
            first = rank * layer.heads if division != "none" else 0
            if division == "query heads" and block.role == "key":
                first, served = 0, ranks * served
            for head in range(block.heads):
                begin = (block.start + head * block.stride) * block.row_numel
                end = begin + block.rows * block.row_numel
                low = max(begin, fragment.matrix_offset)
                high = min(end, fragment.matrix_offset + fragment.numel)
                if low < high:
                    offset = fragment.partition_offset + low - fragment.matrix_offset
                    heads = (first + head * served, first + (head + 1) * served)
                    runs.append(HeadRun(number, *heads, block.role, partition, offset, high - low))
    return tuple(runs)


def clip_factor(largest: float, *, role: HeadRole, threshold: float, alpha: float) -> float:
    """Return what the rows of one head are multiplied by.

    Args:
        largest: Largest logit of the head, or of all query heads that a key head serves. One that is not finite says
            nothing and gives 1.
        role: What the rows make.
        threshold: Logits above it are clipped; positive.
        alpha: Share of the queries, in [0, 1].
    """
    if not math.isfinite(largest) or largest <= threshold:
        return 1.0
    exponent = {"query": alpha, "key": 1.0 - alpha, "rotated_query": 1.0}[role]
    return float((threshold / largest) ** exponent)
