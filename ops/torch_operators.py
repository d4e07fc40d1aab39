"""The operators in torch: they run without a compiler, and the tests compare every kernel with them.

Arguments and mutations are those of the native operators of the same name (``csrc/binding.cpp``).

int8 momentum is quantised linearly in blocks. The :data:`BLOCK` elements of a block share one fp32 scale: their largest
magnitude divided by 127, truncated to 17 significant bits. A code has 7 bits, so ``code * scale`` is exact in fp32, and
the largest code of a block is 127. Quantising the dequantised values therefore gives the same scales and codes again,
on any device and any number of times. Blocks are counted from a parameter's first element and end where a fragment
ends: no scale is shared by two ranks, and at another number of ranks only the blocks at a cut are quantised again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from deepspeed_muon.math.updates import cautious_decay_


def sym_gemm(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, diag: float) -> Tensor:
    """Return ``alpha a b^T + beta c + diag I``, which must be symmetric in exact arithmetic.

    Args:
        a: ``(m, k)`` or ``(batch, m, k)``.
        b: Like ``a``.
        c: ``(m, m)`` or ``(batch, m, m)``, symmetric, or ``None`` without that term.
        alpha: Factor of the product.
        beta: Factor of ``c``.
        diag: Added to the diagonal.

    Returns:
        A new ``(m, m)`` or ``(batch, m, m)`` in the dtype of ``a``, symmetric to the last bit.
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    result = (a.to(dtype) @ b.to(dtype).mT).mul_(alpha)  # (..., m, m) fp32 or fp64
    if c is not None:
        result += beta * c.to(dtype)
    result.diagonal(dim1=-2, dim2=-1).add_(diag)
    # Element (i, j) and element (j, i) may be rounded differently, so the lower triangle is copied to the upper one.
    lower = result.to(a.dtype).tril()
    return lower + lower.tril(-1).mT


def frobenius_norms(x: Tensor) -> Tensor:
    """Return the Frobenius norm of every matrix of ``(..., rows, cols)``, fp32, without synchronisation.

    It reads ``x`` once, and copies it only if neither ``x`` nor ``x.mT`` is contiguous.
    """
    flat = (x if x.is_contiguous() else x.mT).flatten(-2)  # (..., rows * cols)
    # torch accumulates in fp32 anyway. On a GPU the same kernel can return fp32; on a CPU that takes 4 times as long.
    half = flat.dtype.itemsize == 2 and flat.device.type != "cpu"
    norms: Tensor = torch.linalg.vector_norm(flat, dim=-1, dtype=torch.float32 if half else None)
    return norms.float()


class Column(IntEnum):
    """The columns of a table, whose rows say where the elements of a fragment are in flat tensors of two lists.

    The members of ``FlatRow`` in ``csrc/binding_checks.h`` are the same, in this order.
    """

    PARTITION = 0  # position in a list of weights, momentum or gradients, by partition
    PARTITION_OFFSET = 1
    BUFFER = 2  # position in a list of tensors with directions or updates
    BUFFER_OFFSET = 3
    NUMEL = 4
    MATRIX = 5  # row of the rates


_MAX_NUMEL = 1 << 24
"""Elements that a pass processes at a time, to bound its temporary memory; without int8 at least a whole fragment."""


def in_partitions(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the elements of each row of a table in the first list of tensors, as views."""
    return [tensors[partition].narrow(0, offset, numel) for partition, offset, _, _, numel, _ in rows]


def in_buffers(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the elements of each row of a table in the second list of tensors, as views."""
    return [tensors[buffer].narrow(0, offset, numel) for _, _, buffer, offset, numel, _ in rows]


def momentum_pack_(
    bufs: Sequence[Tensor], grads: Sequence[Tensor], outs: Sequence[Tensor], table: Tensor, rates: Tensor
) -> None:
    """Update the momentum of a table of fragments and write their directions into flat tensors.

    ``buf <- lerp(buf, grad, 1 - momentum)``, and the direction is ``lerp(grad, buf, momentum)`` with Nesterov momentum,
    else ``buf``. The arithmetic is fp32 (float64 for float64 tensors). Results in half precision are rounded to nearest
    when they are written; the direction is computed from the unrounded momentum.

    Args:
        bufs: Flat momentum of the partitions. Mutated.
        grads: Flat gradients of the same partitions. Not mutated.
        outs: Flat; receive the directions. Mutated.
        table: ``(fragments, 6)``, int64 on the CPU, with the columns of :class:`Column`: partitions are those of
            ``bufs`` and ``grads``, buffers are ``outs``.
        rates: ``(matrices, 2)``, float64 on the CPU: momentum in [0, 1), and 1 with Nesterov momentum, else 0.
    """
    for (momentum, nesterov), rows in _with_equal_rates(table, rates):
        # Views of all fragments with these rates. Each _foreach call processes them in a few kernels.
        stored = in_partitions(bufs, rows)
        gradients = _promoted(in_partitions(grads, rows))
        promoted = _promoted(stored, gradients[0].dtype)
        torch._foreach_lerp_(promoted, gradients, 1.0 - momentum)
        directions = torch._foreach_lerp(gradients, promoted, momentum) if nesterov else promoted
        torch._foreach_copy_(in_buffers(outs, rows), directions)
        if promoted is not stored:
            torch._foreach_copy_(stored, promoted)


BLOCK = 256
"""Elements of a block of int8 momentum."""

_LOW_BITS = 7  # of the 24 significant bits of a scale; they are cleared
_SMALLEST = torch.finfo(torch.float32).tiny


def block_scales(largest: Tensor) -> Tensor:
    """Return the scale of each block from its largest magnitude, fp32 of the same shape.

    Blocks below ``127 * 2^-126`` count as zero: their scale would be subnormal and have fewer than 17 bits.

    Args:
        largest: fp32, not negative. Infinity or NaN gives a scale that is not finite.
    """
    # A tensor, because on a GPU a division by a Python number is a product with its reciprocal.
    scales = largest / torch.full_like(largest, 127.0)
    # A scale of 17 bits times a code of 7 bits is exact in fp32.
    truncated = scales.view(torch.int32).bitwise_and(-(1 << _LOW_BITS)).view(torch.float32)
    return torch.where(truncated < _SMALLEST, 0.0, truncated)


def to_codes(values: Tensor, scales: Tensor) -> Tensor:
    """Return ``values / scales`` as int8 codes, rounded to nearest even; 0 where the scale is 0 or not finite.

    The product with the reciprocal takes half the time of a quotient, and maps dequantised values to the same codes.
    Codes with a scale that is not finite dequantise to NaN, so one inf or NaN makes the whole block NaN.

    Args:
        values: fp32 or float64.
        scales: Broadcasts to ``values``.
    """
    return (values * scales.reciprocal()).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)


def from_codes(codes: Tensor, scales: Tensor, phase: int) -> Tensor:
    """Return the dequantised values of codes, flat fp32.

    Args:
        codes: Flat int8.
        scales: One for each block that the codes cover, fp32.
        phase: How many elements of the first block precede the first code.
    """
    return codes.float().mul_(scales.repeat_interleave(BLOCK)[phase : phase + codes.numel()])


def quantize(values: Tensor, phase: int) -> tuple[Tensor, Tensor]:
    """Return the int8 codes of flat values and the scales of their blocks; ``phase`` as for :func:`from_codes`."""
    # Complete the first and the last block. Zeros do not change the largest magnitude.
    padding = (phase, -(phase + values.numel()) % BLOCK)
    blocks = torch.nn.functional.pad(values, padding).view(-1, BLOCK)  # (blocks, BLOCK)
    scales = block_scales(blocks.abs().amax(1).float())  # (blocks,) fp32
    return to_codes(blocks, scales.unsqueeze(1)).view(-1).narrow(0, phase, values.numel()), scales


def momentum_pack_int8_(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    grads: Sequence[Tensor],
    outs: Sequence[Tensor],
    table: Tensor,
    rates: Tensor,
    blocks: Tensor,
) -> None:
    """Do what :func:`momentum_pack_` does for int8 momentum; the direction is computed before it is quantised.

    Args:
        codes: Flat int8 momentum of the partitions. Mutated.
        scales: Flat fp32 scales of the blocks of the same partitions. Mutated.
        grads: As for :func:`momentum_pack_`.
        outs: As for :func:`momentum_pack_`.
        table: As for :func:`momentum_pack_`.
        rates: As for :func:`momentum_pack_`.
        blocks: ``(fragments, 2)``, int64 on the CPU: elements of the parameter that precede the fragment in its first
            block, and the index of that block's scale.
    """
    values = rates.tolist()
    for row, (phase, first_scale) in zip(table.tolist(), blocks.tolist(), strict=True):
        partition, offset, buffer, buffer_offset, numel, matrix = row
        momentum, nesterov = values[matrix]
        count = -(-(phase + numel) // BLOCK)  # blocks that the fragment touches
        for begin in range(0, count, _MAX_NUMEL // BLOCK):
            end = min(begin + _MAX_NUMEL // BLOCK, count)
            # Blocks [begin, end) have elements [start, stop) of the fragment.
            start, stop = max(0, begin * BLOCK - phase), min(numel, end * BLOCK - phase)
            before = phase if begin == 0 else 0
            old_codes = codes[partition].narrow(0, offset + start, stop - start)
            old_scales = scales[partition].narrow(0, first_scale + begin, end - begin)
            # 1. Momentum and direction, as in momentum_pack_, from the dequantised momentum.
            grad = grads[partition].narrow(0, offset + start, stop - start)
            grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
            buf = from_codes(old_codes, old_scales, before).to(grad.dtype).lerp_(grad, 1.0 - momentum)
            direction = torch.lerp(grad, buf, momentum) if nesterov else buf
            outs[buffer].narrow(0, buffer_offset + start, stop - start).copy_(direction)
            # 2. Quantise the new momentum in place.
            new_codes, new_scales = quantize(buf, before)
            old_codes.copy_(new_codes)
            old_scales.copy_(new_scales)


def unpack_apply_(params: Sequence[Tensor], updates: Sequence[Tensor], table: Tensor, rates: Tensor) -> None:
    """Write ``param <- decay * param - lr_scale * update`` for a table of fragments; the arithmetic is fp32.

    Args:
        params: Flat weights of the partitions. Mutated.
        updates: Flat. Not mutated.
        table: As for :func:`momentum_pack_`, with ``params`` for ``bufs`` and ``updates`` for ``outs``.
        rates: ``(matrices, 2)``, float64 on the CPU: learning rate times the scale of the matrix, and the factor that
            decays the weights.
    """
    for (lr_scale, decay), rows in _with_equal_rates(table, rates):
        stored = in_partitions(params, rows)
        promoted = _promoted(stored)
        if decay != 1.0:
            torch._foreach_mul_(promoted, decay)
        # The updates may be in half precision: torch promotes them to fp32 before the product.
        torch._foreach_add_(promoted, in_buffers(updates, rows), alpha=-lr_scale)
        if promoted is not stored:
            torch._foreach_copy_(stored, promoted)


def cautious_apply_(
    params: Sequence[Tensor], updates: Sequence[Tensor], table: Tensor, rates: Tensor
) -> None:
    """Write ``param <- param - decay * param * [update * param >= 0] - lr_scale * update`` for a table of fragments.

    It has no native counterpart. Fragments with equal rates are concatenated, so that the number of kernel launches
    does not grow with the number of fragments. The arithmetic is fp32; half precision is rounded when it is written
    back.

    Args:
        params: Flat weights of the partitions. Mutated.
        updates: Flat. Not mutated.
        table: As for :func:`unpack_apply_`.
        rates: ``(matrices, 2)``, float64 on the CPU: learning rate times the scale of the matrix, and learning rate
            times weight decay.
    """
    for (lr_scale, decay), rows in _with_equal_rates(table, rates):
        stored = in_partitions(params, rows)
        (weights,) = _promoted([torch.cat(stored)])  # flat, fp32
        update = torch.cat(in_buffers(updates, rows))
        cautious_decay_(weights, update, decay=decay)
        weights.add_(update, alpha=-lr_scale)
        torch._foreach_copy_(stored, list(weights.split([row[Column.NUMEL] for row in rows])))


def largest_magnitudes(tensors: Sequence[Tensor], table: Tensor) -> Tensor:
    """Return the largest magnitude of each fragment, ``(fragments,)`` fp32 on the device of the tensors.

    The largest magnitude of a fragment with a NaN is NaN.

    Args:
        tensors: Flat, on one device.
        table: As for :func:`momentum_pack_`; buffers and matrices are not read.
    """
    fragments = in_partitions(tensors, table.tolist())
    if not fragments:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    # A GPU has a multi-tensor kernel for the norm; on a CPU it takes twenty times as long as minimum and maximum.
    if fragments[0].device.type == "cpu":
        extremes = torch.stack(
            [torch.stack(torch.aminmax(fragment)) for fragment in fragments]
        )  # (fragments, 2)
        return extremes.abs().amax(1).float()
    return torch.stack(torch._foreach_norm(fragments, float("inf"))).float()


def _with_equal_rates(table: Tensor, rates: Tensor) -> Iterator[tuple[tuple[float, float], list[list[int]]]]:
    """Yield pairs of rates, with rows of a table that have them: at most ``_MAX_NUMEL`` elements, or one row."""
    pairs = [(first, second) for first, second in rates.tolist()]
    rows_by_rates: dict[tuple[float, float], list[list[int]]] = {}
    numel_by_rates: dict[tuple[float, float], int] = {}
    for row in table.tolist():
        *_, row_numel, matrix = row
        pair = pairs[matrix]
        rows = rows_by_rates.setdefault(pair, [])
        numel = numel_by_rates.get(pair, 0) + row_numel
        if rows and numel > _MAX_NUMEL:
            yield pair, rows[:]
            rows.clear()
            numel = row_numel
        rows.append(row)
        numel_by_rates[pair] = numel
    yield from rows_by_rates.items()


def _promoted(fragments: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return ``fragments``, or copies in ``dtype`` in one allocation if one of them has a narrower dtype."""
    if all(fragment.dtype.itemsize >= dtype.itemsize for fragment in fragments):
        return fragments
    sizes = [fragment.numel() for fragment in fragments]
    copies = list(fragments[0].new_empty(sum(sizes), dtype=dtype).split(sizes))
    torch._foreach_copy_(copies, fragments)
    return copies
