"""Which matrices travel together: the buffers are bounded, and in each chunk all ranks have about the same work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import Places

# Several chunks can overlap, and small ones need little memory. Chunks below this number of elements a rank (512 KiB in
# bf16, some ten microseconds at 50 GB/s) are bound by latency.
_CHUNKS = 8
_LEAST_NUMEL_PER_RANK = 1 << 18


def moves(places: Places, owner: int) -> bool:
    """Return whether a matrix is not whole on its owner alone."""
    return places.ranks != range(owner, owner + 1)


def cut_into_chunks(
    matrices: Sequence[MatrixLayout],
    owners: Sequence[int],
    bound: int,
    world_size: int,
) -> list[list[int]]:
    """Cut the matrices into chunks, those that never move first.

    Every owner fills its own part of a chunk up to ``bound`` elements, largest matrices first, so that the parts of a
    chunk cost about the same. A bound on whole chunks would let most ranks wait in a large model: a chunk would hold
    few matrices, and few ranks would own any of them.

    Replicated matrices have chunks of their own, because only their updates travel. Every rank receives each whole
    update, so there the bound holds for all owners together.

    Args:
        matrices: All matrices of the plan.
        owners: One rank for each.
        bound: Elements that one rank owns in a chunk at most.
        world_size: Ranks of the group.
    """
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for index, matrix in enumerate(matrices):
        kinds.setdefault((moves(matrix.placement, owners[index]), matrix.replicated), []).append(index)
    chunks: list[list[int]] = []
    for (moving, replicated), members in sorted(kinds.items()):
        together = moving and replicated
        room = np.zeros(world_size, dtype=np.int64)
        for index in members:
            room[0 if together else owners[index]] += matrices[index].numel
        least = _LEAST_NUMEL_PER_RANK * (world_size if together else 1)
        limit = min(bound, max(-(-int(room.max()) // _CHUNKS), least))
        found: list[list[int]] = []
        number, filled = [0] * world_size, np.zeros(world_size, dtype=np.int64)
        for index in sorted(members, key=lambda index: matrices[index].placement.numel, reverse=True):
            part, numel = 0 if together else owners[index], matrices[index].numel
            if filled[part] and filled[part] + numel > limit:
                number[part] += 1
                filled[part] = 0
            if number[part] == len(found):
                found.append([])
            found[number[part]].append(index)
            filled[part] += numel
        chunks += [sorted(chunk) for chunk in found]
    return chunks
