"""Executes what the symmetric GEMM kernels do, element by element, on a CPU: schedule, rounding, staging, mirroring.

Every index comes from the headers that the kernels themselves include, compiled by g++. What the hardware adds to them
(``ldmatrix``, the accumulator's layout, the wgmma descriptor, mbarriers) is written here once more from the PTX ISA
manual, so that the two descriptions are compared. What is not emulated: the order in which the tensor core adds, and
timing; swizzles and descriptors are as good here as the manual was understood.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "ops" / "csrc" / "include"


def build(folder: Path) -> ctypes.CDLL:
    """Compile the headers behind their C interface into ``folder``; needs g++."""
    compiler = shutil.which("g++")
    assert compiler is not None
    target = folder / "kernel_headers.so"
    source = Path(__file__).with_name("kernel_headers.cpp")
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command = [compiler, *flags, f"-I{INCLUDE}", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(target))
    library.schedule_total.restype = ctypes.c_int64
    library.triangle_mismatch.restype = ctypes.c_int64
    library.triangle_mismatch.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    library.triangle_row_of.argtypes = [ctypes.c_int64]
    library.diagonal_word_mask.restype = ctypes.c_uint32
    library.descriptor.restype = ctypes.c_uint64
    library.descriptor.argtypes = [ctypes.c_uint32, ctypes.c_int, ctypes.c_int]
    library.flat_plan.argtypes = [ctypes.c_uint64] * 3 + [ctypes.c_int, ctypes.c_int64, ctypes.c_void_p]
    return library


@dataclass(frozen=True)
class Shape:
    """How a kernel divides a tile among its warps: one entry of ``warps`` is a warp's (row0, col0).

    Attributes:
        name: Architecture.
        warps: First row and column of every warp of a team.
        row_step: Rows between the 16 x 8 blocks of a warp, one below the other.
        blocks: 16 x 8 blocks of a warp, down and to the right.
    """

    name: str
    warps: tuple[tuple[int, int], ...]
    row_step: int
    blocks: tuple[int, int]


SM80 = Shape("sm80", tuple((64 * (w // 4), 32 * (w % 4)) for w in range(8)), 16, (4, 4))
SM90 = Shape("sm90", tuple((16 * w, 0) for w in range(4)), 64, (2, 16))


class Maps:
    """The headers' arithmetic as index arrays; offsets are in 2-byte elements of the staging buffer."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.tile = library.constant_tile()
        self.chunks = self.tile // 8
        self.mirror_steps = library.constant_mirror_steps()
        self.straight = self._fill("straight_map", self.tile * self.chunks, 3)
        self.mirror = self._fill("mirror_map", self.mirror_steps, 32, 5)
        self.diagonal = self._fill("diagonal_map", self.tile, self.chunks)
        masks = [[library.diagonal_word_mask(row, word) for word in range(4)] for row in range(self.tile)]
        self.masks = np.array(masks, dtype=np.uint32)

    def _fill(self, name: str, *shape: int, arguments: tuple[int, ...] = ()) -> np.ndarray:
        out = np.empty(shape, dtype=np.int32)
        getattr(self.library, name)(*arguments, out.ctypes.data_as(ctypes.c_void_p))
        return out

    def schedule(self, m: int, batch: int) -> np.ndarray:
        """``(total, 3)``: batch, row and column of every tile in the order of the work counter."""
        return self._fill("schedule_tiles", self.library.schedule_total(m, batch), 3, arguments=(m, batch))

    def fragments(self, shape: Shape) -> np.ndarray:
        """``(warp, lane, i, half, j, 4)``: row, column, the kernel's byte offset, the offset by definition."""
        down, right = shape.blocks
        return np.stack(
            [
                self._fill(
                    "fragment_map",
                    *(32, down, 2, right, 4),
                    arguments=(row0, shape.row_step, col0, down, right),
                )
                for row0, col0 in shape.warps
            ]
        )

    def ldmatrix_trans(self) -> np.ndarray:
        """``(step, lane, 8)``: the staging elements that the four registers of a lane hold, low half first.

        PTX ISA, ldmatrix: row ``j`` of matrix ``i`` is at the address of lane ``8 i + j``; transposed, register ``i``
        of lane ``l`` holds rows ``2 (l % 4)`` and the next of column ``l / 4``.
        """
        rows = self.mirror[:, :, 2] // 2
        lane = np.arange(32)
        out = np.empty((self.mirror_steps, 32, 8), dtype=np.int64)
        for matrix in range(4):
            for part in range(2):
                out[:, :, 2 * matrix + part] = rows[:, 8 * matrix + 2 * (lane % 4) + part] + lane // 4
        return out


class Emulator:
    """One kernel on a machine with a given number of resident blocks."""

    def __init__(self, maps: Maps, shape: Shape, *, blocks: int = 132) -> None:
        self.maps = maps
        self.blocks = blocks
        self.block_k = getattr(maps.library, f"{shape.name}_block_k")()
        fragments = maps.fragments(shape).reshape(-1, 4)
        self._rows, self._cols = fragments[:, 0].astype(np.int64), fragments[:, 1].astype(np.int64)
        self._offsets = fragments[:, 2].astype(np.int64) // 2
        self._turned = maps.ldmatrix_trans()

    def sym_gemm(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        diag: float = 0.0,
    ) -> tuple[Tensor, np.ndarray]:
        """Return ``d`` and how often each of its elements was written; unwritten ones are NaN."""
        batch, m, k = a.shape
        dtype = a.dtype
        tile = self.maps.tile
        with_c = c is not None and beta != 0.0
        out = torch.full((batch, m, m), torch.nan, dtype=dtype)
        bits = out.view(torch.int16).numpy().view(np.uint16)
        writes = np.zeros((batch, m, m), dtype=np.int32)
        padded_m = -(-m // tile) * tile
        padded_k = -(-k // self.block_k) * self.block_k
        wide_a, wide_b = (_padded(x.float(), padded_m, padded_k) for x in (a, b))
        wide_c = _padded(c.float(), padded_m, padded_m) if with_c else None  # type: ignore[union-attr]
        work = self.maps.schedule(m, batch)
        for block in range(min(self.blocks, len(work))):
            for matrix, row, col in work[block :: self.blocks].tolist():
                down, right = slice(row * tile, (row + 1) * tile), slice(col * tile, (col + 1) * tile)
                accumulator = torch.zeros(tile, tile)
                for start in range(0, padded_k, 16):  # one mma step
                    step = slice(start, start + 16)
                    accumulator += wide_a[matrix, down, step] @ wide_b[matrix, right, step].T
                value = accumulator * alpha
                if row == col:
                    value.diagonal().add_(diag)
                if wide_c is not None:
                    value += beta * wide_c[matrix, down, right]
                self._store(value.to(dtype), (row, col), bits[matrix], writes[matrix])
        return out, writes

    def _store(self, value: Tensor, at: tuple[int, int], bits: np.ndarray, writes: np.ndarray) -> None:
        """Stage one rounded tile and copy it to its two places."""
        maps, tile = self.maps, self.maps.tile
        row, col = at
        m = bits.shape[0]
        source = value.view(torch.int16).numpy().view(np.uint16)
        staged = np.zeros(tile * tile, dtype=np.uint16)
        for part in range(2):
            staged[self._offsets + part] = source[self._rows, self._cols + part]
        rows, chunks, offsets = maps.straight.T
        straight = staged[offsets[:, None] // 2 + np.arange(8)]
        mirrored = staged[self._turned.reshape(-1, 8)]
        to_rows, to_chunks = maps.mirror[:, :, 3].reshape(-1), maps.mirror[:, :, 4].reshape(-1)
        if row == col:
            kind = maps.diagonal[rows, chunks]
            turned = maps.diagonal[to_rows, to_chunks]
            words = straight.view(np.uint32).reshape(tile, maps.chunks, 4)[to_rows, to_chunks]
            masks = maps.masks[to_rows]
            merged = (words & masks) | (np.ascontiguousarray(mirrored).view(np.uint32) & ~masks)
            mirrored = np.where((turned == 2)[:, None], merged.view(np.uint16), mirrored)
            rows, chunks, straight = rows[kind == 0], chunks[kind == 0], straight[kind == 0]
            keep = turned != 0
            to_rows, to_chunks, mirrored = to_rows[keep], to_chunks[keep], mirrored[keep]
        for y, x, data in (
            (row * tile + rows, col * tile + 8 * chunks, straight),
            (col * tile + to_rows, row * tile + 8 * to_chunks, mirrored),
        ):
            inside = (y < m) & (x < m)
            y, x = y[inside, None], x[inside, None] + np.arange(8)
            bits[y, x] = data[inside]
            np.add.at(writes, (y, x), 1)


def _padded(x: Tensor, rows: int, cols: int) -> Tensor:
    """Zeros where the copy engine, or cp.async, fills them in."""
    return torch.nn.functional.pad(x, (0, cols - x.shape[2], 0, rows - x.shape[1]))
