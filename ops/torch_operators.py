"""The operators in plain torch calls: they run without a compiler, and the tests compare every kernel with them.

Arguments and mutations are those of the native operators of the same name (``csrc/binding.cpp``).

Momentum in 8 bits has linear codes by blocks, whose values give the same codes again. A block of :data:`BLOCK` elements
shares one fp32 scale: its largest magnitude divided by 127, cut to 17 significant bits. A code has 7 bits, so
``code * scale`` is exact in fp32. The largest code of a block is 127, from which the scale follows again: values that
were read from codes have the same codes, wherever and however often they are coded. Blocks are counted from a
parameter's first element and end where a fragment ends: no scale is shared by two ranks, and at another number of ranks
only the blocks at a cut are quantised again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepspeed_muon.math.updates import cautious_decay_


def sym_gemm(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, diag: float) -> Tensor:
    """Return ``alpha a b^T + beta c + diag I`` if that is symmetric; the result is symmetric to the last bit.

    ``a`` and ``b`` are ``(m, k)`` or ``(batch, m, k)``; ``c`` is symmetric, or ``None``.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    result = (a.to(wide) @ b.to(wide).mT).mul_(alpha)
    if c is not None:
        result += beta * c.to(wide)
    result.diagonal(dim1=-2, dim2=-1).add_(diag)
    lower = result.to(a.dtype).tril()
    return lower + lower.tril(-1).mT


def frobenius_norms(x: Tensor) -> Tensor:
    """Return the Frobenius norm of every matrix of ``(..., rows, cols)``, fp32, without synchronisation.

    It reads ``x`` once, and copies it only if neither ``x`` nor its transpose is contiguous.
    """
    flat = (x if x.is_contiguous() else x.mT).flatten(-2)
    # torch sums in fp32. A GPU returns that from the same kernel; on a CPU it would take four times as long.
    half = flat.dtype.itemsize == 2 and flat.device.type != "cpu"
    norms: Tensor = torch.linalg.vector_norm(flat, dim=-1, dtype=torch.float32 if half else None)
    return norms.float()


_TOGETHER = 1 << 24
"""Elements of the fragments that one call of a pass works on, which bounds its temporary memory."""


def momentum_pack_(
    bufs: Sequence[Tensor], grads: Sequence[Tensor], outs: Sequence[Tensor], table: Tensor, rates: Tensor
) -> None:
    """Write ``buf <- lerp(buf, grad, 1 - momentum)`` and the direction to be exchanged, for a table of fragments.

    The arithmetic is fp32 (float64 for float64 tensors); half precision is rounded to nearest when it is written, the
    direction from the unrounded momentum.

    Args:
        bufs: Flat momentum. Mutated.
        grads: The flat gradient of each of ``bufs``. Not mutated.
        outs: Flat; receive ``lerp(grad, buf, momentum)`` with Nesterov, else ``buf``. Mutated.
        table: ``(fragments, 6)``, int64 on the CPU: number of ``buf`` and offset there, number of ``out`` and offset
            there, elements, row of ``rates``.
        rates: ``(matrices, 2)``, float64 on the CPU: decay in [0, 1), and 1 to blend the gradient in once more, else 0.
    """
    for (momentum, nesterov), rows in _with_equal_rates(table, rates):
        own = [bufs[row[0]].narrow(0, row[1], row[4]) for row in rows]
        gradients = _widened([grads[row[0]].narrow(0, row[1], row[4]) for row in rows])
        wide = _widened(own, gradients[0].dtype)
        torch._foreach_lerp_(wide, gradients, 1.0 - momentum)
        directions = torch._foreach_lerp(gradients, wide, momentum) if nesterov else wide
        torch._foreach_copy_([outs[row[2]].narrow(0, row[3], row[4]) for row in rows], directions)
        if wide is not own:
            torch._foreach_copy_(own, wide)


BLOCK = 256
_LOW_BITS = 7
_SMALLEST = torch.finfo(torch.float32).tiny


def block_scales(largest: Tensor) -> Tensor:
    """Return the scale of each block for its largest magnitude.

    Blocks below ``127 * 2^-126`` count as zero: their scale has no 17 bits.

    Args:
        largest: fp32, not negative; infinity or NaN of a block that is not finite, whose scale is neither.
    """
    # A division by a Python number is a product with its reciprocal on a GPU.
    scales = largest / torch.full_like(largest, 127.0)
    cut = scales.view(torch.int32).bitwise_and(-(1 << _LOW_BITS)).view(torch.float32)
    return torch.where(cut < _SMALLEST, 0.0, cut)


def to_codes(values: Tensor, scales: Tensor) -> Tensor:
    """Return int8 codes, rounded to nearest even; 0 where the scale is 0 or not finite.

    A product with the reciprocal takes half the time of a quotient, and gives the values of codes the same codes.
    With a scale that is not finite such a code stands for NaN: a block with one bad element is bad.

    Args:
        values: fp32 or float64.
        scales: Broadcasts to ``values``.
    """
    return (values * scales.reciprocal()).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)


def from_codes(codes: Tensor, scales: Tensor, phase: int) -> Tensor:
    """Return what codes stand for, fp32.

    Args:
        codes: Flat.
        scales: Of the blocks in which they lie.
        phase: Elements of the first of these blocks before the first code.
    """
    return codes.float().mul_(scales.repeat_interleave(BLOCK)[phase : phase + codes.numel()])


def quantize(values: Tensor, phase: int) -> tuple[Tensor, Tensor]:
    """Return the int8 codes of flat values and the scales of their blocks; ``phase`` as for :func:`from_codes`."""
    blocks = torch.nn.functional.pad(values, (phase, -(phase + values.numel()) % BLOCK)).view(-1, BLOCK)
    scales = block_scales(blocks.abs().amax(1).float())
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
    """Do what :func:`momentum_pack_` does for momentum in 8 bits, in codes of :func:`to_codes`.

    The direction is made from the momentum before it is coded.

    Args:
        codes: Flat, int8. Mutated.
        scales: Flat, fp32: of the blocks of each of ``codes``. Mutated.
        grads: As for :func:`momentum_pack_`.
        outs: As for :func:`momentum_pack_`.
        table: As for :func:`momentum_pack_`.
        rates: As for :func:`momentum_pack_`.
        blocks: ``(fragments, 2)``, int64 on the CPU: elements of the parameter that precede the fragment in its first
            block, and the number of that block's scale.
    """
    values = rates.tolist()
    for row, (phase, first_scale) in zip(table.tolist(), blocks.tolist(), strict=True):
        partition, offset, out, out_offset, numel, matrix = row
        momentum, nesterov = values[matrix]
        count = -(-(phase + numel) // BLOCK)
        for begin in range(0, count, _TOGETHER // BLOCK):
            end = min(begin + _TOGETHER // BLOCK, count)
            start, stop = max(0, begin * BLOCK - phase), min(numel, end * BLOCK - phase)
            before = phase if begin == 0 else 0
            old_codes = codes[partition].narrow(0, offset + start, stop - start)
            old_scales = scales[partition].narrow(0, first_scale + begin, end - begin)
            grad = grads[partition].narrow(0, offset + start, stop - start)
            grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
            buf = from_codes(old_codes, old_scales, before).to(grad.dtype).lerp_(grad, 1.0 - momentum)
            direction = torch.lerp(grad, buf, momentum) if nesterov else buf
            outs[out].narrow(0, out_offset + start, stop - start).copy_(direction)
            new_codes, new_scales = quantize(buf, before)
            old_codes.copy_(new_codes)
            old_scales.copy_(new_scales)


def unpack_apply_(params: Sequence[Tensor], updates: Sequence[Tensor], table: Tensor, rates: Tensor) -> None:
    """Write ``param <- decay * param - lr_scale * update`` for a table of fragments; the arithmetic is fp32.

    Args:
        params: Flat. Mutated.
        updates: Flat.
        table: As for :func:`momentum_pack_`: of ``params``, and of ``updates``.
        rates: ``(matrices, 2)``, float64 on the CPU: learning rate times the scale of the matrix, and one minus
            learning rate times weight decay.
    """
    for (lr_scale, decay), rows in _with_equal_rates(table, rates):
        own = [params[row[0]].narrow(0, row[1], row[4]) for row in rows]
        wide = _widened(own)
        if decay != 1.0:
            torch._foreach_mul_(wide, decay)
        # Of half precision a weight in fp32 takes the update as it is, one in half precision takes it in fp32: torch
        # rounds alike.
        torch._foreach_add_(
            wide, [updates[row[2]].narrow(0, row[3], row[4]) for row in rows], alpha=-lr_scale
        )
        if wide is not own:
            torch._foreach_copy_(own, wide)


def cautious_apply_(
    params: Sequence[Tensor], updates: Sequence[Tensor], table: Tensor, rates: Tensor
) -> None:
    """Write ``param <- param - decay * param * [update * param >= 0] - lr_scale * update`` for a table of fragments.

    It has no native counterpart. All fragments of equal rates are copied together, so that the number of launches does
    not grow with that of the fragments; the arithmetic is fp32, and half precision is rounded when it is written back.

    Args:
        params: Flat. Mutated.
        updates: Flat.
        table: As for :func:`unpack_apply_`.
        rates: ``(matrices, 2)``, float64 on the CPU: learning rate times the scale of the matrix, and learning rate
            times weight decay.
    """
    for (lr_scale, decay), rows in _with_equal_rates(table, rates):
        own = [params[row[0]].narrow(0, row[1], row[4]) for row in rows]
        (whole,) = _widened([torch.cat(own)])
        update = torch.cat([updates[row[2]].narrow(0, row[3], row[4]) for row in rows])
        cautious_decay_(whole, update, decay=decay)
        whole.add_(update, alpha=-lr_scale)
        torch._foreach_copy_(own, list(whole.split([row[4] for row in rows])))


def largest_magnitudes(tensors: Sequence[Tensor], table: Tensor) -> Tensor:
    """Return the largest magnitude of each fragment, fp32 on the device of the tensors; NaN if there is one.

    Args:
        tensors: Flat, on one device.
        table: As for :func:`momentum_pack_`; the columns of the other tensor are those of the first.
    """
    parts = [tensors[row[0]].narrow(0, row[1], row[4]) for row in table.tolist()]
    if not parts:
        return torch.empty(0)
    # A GPU has a multi-tensor kernel for it; on a CPU that takes twenty times as long as minimum and maximum.
    if parts[0].device.type == "cpu":
        ends = [torch.stack([end(part) for part in parts]) for end in (torch.amin, torch.amax)]
        return torch.maximum(*(each.abs() for each in ends)).float()
    return torch.stack(torch._foreach_norm(parts, float("inf"))).float()


def _with_equal_rates(table: Tensor, rates: Tensor) -> Iterator[tuple[tuple[float, float], list[list[int]]]]:
    """Yield two rates and rows of a table that have them, of a bounded number of elements if there are several."""
    values = rates.tolist()
    found: dict[tuple[float, float], list[list[int]]] = {}
    for row in table.tolist():
        alike = found.setdefault((values[row[5]][0], values[row[5]][1]), [])
        if alike and sum(each[4] for each in alike) + row[4] > _TOGETHER:
            yield (values[row[5]][0], values[row[5]][1]), alike[:]
            alike.clear()
        alike.append(row)
    yield from found.items()


def _widened(parts: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return ``parts``, or where one is narrower than ``dtype`` their values in it, in one tensor by one copy."""
    if all(part.dtype.itemsize >= dtype.itemsize for part in parts):
        return parts
    sizes = [part.numel() for part in parts]
    wide = list(parts[0].new_empty(sum(sizes), dtype=dtype).split(sizes))
    torch._foreach_copy_(wide, parts)
    return wide
