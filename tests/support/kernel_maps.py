"""The index arithmetic of the CUDA kernels as tables: which element goes where, from the headers they include.

Every index comes from the headers that the kernels themselves include, compiled by g++. What the hardware adds to them
(``ldmatrix``, the accumulator's layout) is written here once more from the PTX ISA manual.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
    library.flat_plan.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    library.code_blocks.argtypes = [
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    library.code_blocks.restype = ctypes.c_int64
    library.scale_of_codes.argtypes, library.scale_of_codes.restype = [ctypes.c_uint32], ctypes.c_float
    library.code_of_quotient.argtypes = [ctypes.c_float]
    library.fragment_of_tile.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
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
