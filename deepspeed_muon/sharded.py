"""Newton-Schulz on matrices that are sharded over a process group.

``X <- p(X X^T) X`` needs only the m x m Gram matrix ``X X^T`` from the other ranks, and that is a sum over columns. So
a matrix that is sharded along its *long* side is orthogonalised in place: the ranks all-reduce the Gram matrix at the
start and at each restart of the iteration, whatever the length of the long side.

A matrix that is sharded along its *short* side is resharded along the long side first: the sum over its own shards
would be the Gram matrix of the long side, which is larger than the matrix. One all-to-all reshards it, in which a rank
sends no more than its shard, and a second one sends the result back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.newton_schulz import NsSettings, divisors, iterate_columns, orthogonalize
from deepspeed_muon.transport.agreement import raise_on_all_ranks
from deepspeed_muon.transport.all_to_all import exchange_tensors
from deepspeed_muon.transport.ranks import Ranks, all_gather_tensor, all_reduce_tensor


def orthogonalize_sharded(
    x: Tensor,
    *,
    group: dist.ProcessGroup,
    shard_dim: int,
    settings: NsSettings,
) -> Tensor:
    """Return this rank's shard of the approximate polar factor of every matrix in a batch of sharded matrices.

    The result is that of :func:`deepspeed_muon.orthogonalize` for the full matrices, up to rounding; no rank ever
    holds a full matrix. Must be called by all ranks of ``group`` with equal settings; they compare shapes and settings,
    in two small collectives that wait for the device. The shards follow each other in the order of the group's ranks;
    they may be uneven, and empty on some ranks.

    For one ``m x n`` matrix with ``m <= n`` the ranks all-reduce ``m x m`` elements in float32 at least: with ``gram``
    at the start and at each restart (two or three times in five steps), with ``standard`` in every step. Every rank
    computes all ``m x m`` products.

    Args:
        x: This rank's shard of ``(..., rows, cols)``, any floating dtype. Not mutated.
        group: The process group over which the matrices are sharded. It has no default, because a wrong group gives a
            wrong update and no error.
        shard_dim: The sharded dimension of the matrix: -2 (rows) or -1 (columns); for a single matrix also 0 or 1.
        settings: Polynomial, method and dtype. ``gram`` runs for square matrices too.

    Returns:
        A new tensor of the shape of ``x``, in ``settings.dtype``.

    Raises:
        ConfigError: If ``shard_dim`` is not a dimension of the matrix, or this rank is not in ``group``.
        RankDisagreementError: If the shards do not fit together, or another rank raised ``ConfigError``.
    """
    dim, shard_sizes = _compared(x, group, shard_dim, settings)
    world_size = len(shard_sizes)
    if world_size == 1:
        return orthogonalize(x, settings=settings)
    # 1. transpose, so that the columns are sharded
    columns = x.mT if dim == -2 else x
    rows, cols, batch = columns.shape[-2], sum(shard_sizes), x.shape[:-2].numel()
    if batch * rows * cols == 0:
        return x.to(settings.dtype, copy=True)
    flat = columns.reshape(batch, rows, columns.shape[-1])  # (batch, rows, local cols)
    # 2. iterate on the shards of the long side; "rows" is the side that every rank has in full
    flat = _normalized(flat, settings, group)
    if rows <= cols:
        result = _iterate(flat, settings, group)
    else:
        # (batch, rows, local cols) -> (batch, cols, local rows): the first ranks have a row more
        length, longer = divmod(rows, world_size)
        row_sizes = tuple(length + (rank < longer) for rank in range(world_size))
        # The resharded matrices, (batch, cols, local rows), have no name, so that the iteration frees them.
        result = _iterate(_reshard(flat, row_sizes, shard_sizes, group), settings, group)
        result = _reshard(result, shard_sizes, row_sizes, group)
    # 3. transpose back
    result = result.reshape(columns.shape)
    return result.mT.contiguous() if dim == -2 else result


def _compared(
    x: Tensor, group: dist.ProcessGroup, shard_dim: int, settings: NsSettings
) -> tuple[int, list[int]]:
    """Return the sharded dimension, counted from the end, and every rank's length along it; all may raise."""
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"orthogonalize_sharded needs the process group that shards the matrices, got {group!r}: there is no "
            f"default group, and this rank must be a member of the one that is given"
        )
    ranks = Ranks.of([group])
    with raise_on_all_ranks(ranks=ranks, purpose="comparison of shards") as facts:
        dim = _matrix_dim(x, shard_dim)
        facts.record("shard_dim", dim)
        facts.record("matrices", x.shape[:-2].numel())
        facts.record("length of the other side", x.shape[-3 - dim])
        facts.record("settings", settings)
    lengths = ranks.all_gather(x.shape[dim], purpose="comparison of shards")
    return dim, [lengths[rank] for rank in dist.get_process_group_ranks(group)]


def _matrix_dim(x: Tensor, shard_dim: int) -> int:
    """Return ``shard_dim`` counted from the end: -2 or -1."""
    if x.ndim < 2 or not x.is_floating_point():
        raise ConfigError(
            f"orthogonalize_sharded needs floating (..., rows, cols), got {x.dtype} of shape {tuple(x.shape)}"
        )
    dim = shard_dim - x.ndim if shard_dim >= 0 else shard_dim
    if dim not in (-2, -1):
        raise ConfigError(
            f"shard_dim {shard_dim} of a tensor of shape {tuple(x.shape)} is not a dimension of its matrices: "
            f"use -2 for rows, -1 for columns"
        )
    return dim


def _normalized(x: Tensor, settings: NsSettings, group: dist.ProcessGroup) -> Tensor:
    """Divide the shards by the Frobenius norm of the full matrices, in at least float32, then cast.

    The ranks gather their norms and each computes the sum, so that all get the same norm, bit for bit.
    """
    norms = divisors(x, (-2, -1)).view(-1)  # (batch,)
    gathered = all_gather_tensor(norms, group, purpose="norms of sharded matrices")  # (ranks, batch)
    return (x.to(norms.dtype) / divisors(gathered, 0).view(-1, 1, 1)).to(settings.dtype)


def _iterate(x: Tensor, settings: NsSettings, group: dist.ProcessGroup) -> Tensor:
    """Run the iteration on this rank's columns ``(batch, m, columns)`` of normalised matrices."""
    sum_dtype = torch.promote_types(settings.dtype, torch.float32)

    def gram_of(columns: Tensor) -> Tensor:
        # The product is rounded once to the iteration's dtype, as without shards. The sum over ranks runs in fp32 at
        # least, because it would round once more for every rank.
        gram = (columns @ columns.mT).to(sum_dtype)  # (batch, m, m)
        gram = all_reduce_tensor(gram, group, purpose="sum of Gram matrices")
        return gram.to(settings.dtype)

    return iterate_columns(x, settings=settings, gram_of=gram_of)


def _reshard(
    x: Tensor, row_sizes: Sequence[int], col_sizes: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Reshard ``(batch, rows, local columns)`` to ``(batch, columns, local rows)``.

    The sizes are the rows that each rank will hold and the columns that it holds. With the sizes exchanged it undoes
    it.
    """
    batch, rows = x.shape[0], row_sizes[dist.get_rank(group)]
    received = exchange_tensors(
        [[shard.mT] for shard in x.split(list(row_sizes), dim=-2)],
        [[batch * cols * rows] for cols in col_sizes],
        like=x,
        group=group,
        purpose="resharding of sharded matrices",
    )
    blocks = [shard.view(batch, cols, rows) for (shard,), cols in zip(received, col_sizes, strict=True)]
    return torch.cat(blocks, dim=-2)
