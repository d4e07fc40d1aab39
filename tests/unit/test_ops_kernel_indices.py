"""The kernels' index arithmetic, compiled by g++ and checked over whole ranges."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "ops" / "csrc" / "include"


def build(folder: Path) -> ctypes.CDLL:
    """Compile the headers behind their C interface into ``folder``; needs g++."""
    compiler = shutil.which("g++")
    assert compiler is not None
    target = folder / "kernel_headers.so"
    source = ROOT / "tests" / "support" / "kernel_headers.cpp"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command = [compiler, *flags, f"-I{INCLUDE}", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(target))
    library.schedule_total.restype = ctypes.c_int64
    library.triangle_row_of.argtypes = [ctypes.c_int64]
    library.flat_plan.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return library


WARPS, ROW_STEP, DOWN, RIGHT = 4, 64, 2, 16
"""Of a consumer of the symmetric product: its warps, 16 rows apart, and the 16 x 8 blocks of one, down and right."""


class Maps:
    """The headers' arithmetic as index arrays; offsets are in 2-byte elements of the staging buffer."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.tile = library.constant_tile()
        self.chunks = self.tile // 8
        self.mirror_steps = library.constant_mirror_steps()
        self.mirror = self._fill("mirror_map", self.mirror_steps, 32, 5)

    def _fill(self, name: str, *shape: int, arguments: tuple[int, ...] = ()) -> np.ndarray:
        out = np.empty(shape, dtype=np.int32)
        getattr(self.library, name)(*arguments, out.ctypes.data_as(ctypes.c_void_p))
        return out

    def schedule(self, m: int, batch: int) -> np.ndarray:
        """``(total, 3)``: batch, row and column of every tile in the order of the work counter."""
        return self._fill("schedule_tiles", self.library.schedule_total(m, batch), 3, arguments=(m, batch))

    def fragments(self) -> np.ndarray:
        """``(warp, lane, i, half, j, 4)``: row, column, the kernel's byte offset, the offset by definition."""
        shape = (32, DOWN, 2, RIGHT, 4)
        return np.stack(
            [
                self._fill("fragment_map", *shape, arguments=(16 * warp, ROW_STEP, 0, DOWN, RIGHT))
                for warp in range(WARPS)
            ]
        )


pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Maps:
    return Maps(build(tmp_path_factory.mktemp("headers")))


def banks_used(offsets: np.ndarray, width: int) -> np.ndarray:
    """How often each of the 32 banks is touched by accesses of ``width`` bytes at the byte offsets."""
    words = (np.asarray(offsets)[:, None] + np.arange(0, width, 4)) // 4
    return np.bincount(np.unique(words) % 32, minlength=32)


def test_triangle_row_on_every_boundary(maps: Maps) -> None:
    for row in [*range(1, 3000), *range(46_330, 46_350), *range(131_000, 131_072)]:
        first = row * (row + 1) // 2
        rows = [maps.library.triangle_row_of(first + step) for step in (-1, 0, row, row + 1)]
        assert rows == [row - 1, row, row, row + 1]


@pytest.mark.parametrize("blocks", [1, 2, 78, 108, 114, 132, 142, 148, 160, 264])
def test_persistent_blocks_share_the_work_evenly(maps: Maps, blocks: int) -> None:
    for m in (8, 128, 136, 512, 1000, 1024, 2048, 2056):
        for batch in (1, 2, 3, 8):
            work = maps.schedule(m, batch)
            rows = -(-m // maps.tile)
            assert len(work) == batch * rows * (rows + 1) // 2
            dealt = [tuple(tile) for block in range(blocks) for tile in work[block::blocks].tolist()]
            assert len(set(dealt)) == len(dealt) == len(work)
            assert {(z, y, x) for z in range(batch) for y in range(rows) for x in range(y + 1)} == set(dealt)


def test_fragments_cover_the_tile_without_bank_conflicts(maps: Maps) -> None:
    fragments = maps.fragments()
    rows, cols, offsets, definition = (fragments[..., i] for i in range(4))
    assert np.array_equal(offsets, definition)
    assert sorted(zip(rows.ravel(), cols.ravel(), strict=True)) == [
        (row, col) for row in range(maps.tile) for col in range(0, maps.tile, 2)
    ]
    assert len(np.unique(offsets)) == maps.tile * maps.tile // 2
    # One access of a warp: all lanes, one (i, half, j); 4 bytes each in 32 different banks.
    per_access = np.moveaxis(offsets, 1, -1).reshape(-1, 32)
    assert all(banks_used(access, 4).max() == 1 for access in per_access)


def test_mirrored_copy(maps: Maps) -> None:
    """Each chunk is stored once, without bank conflicts; the bench has what is stored (test_ops_kernels_on_bench)."""
    seen = np.zeros((maps.tile, maps.chunks), dtype=int)
    for lanes in maps.mirror:
        np.add.at(seen, (lanes[:, 3], lanes[:, 4]), 1)
        # One 8x8 matrix of ldmatrix, and the stores: whole 32-byte sectors.
        for matrix in range(4):
            assert banks_used(lanes[8 * matrix : 8 * matrix + 8, 2], 16).max() == 1
        stored = lanes[:, 3] * maps.chunks + lanes[:, 4]
        assert set(stored ^ 1) == set(stored)
    assert (seen == 1).all()


def flat_plan(maps: Maps, addresses: Sequence[int], widths: Sequence[int], n: int, out: np.ndarray) -> None:
    """Fill ``out`` with head, vectors and singles of a tile, then the positions of the single elements."""
    maps.library.flat_plan((ctypes.c_uint64 * 3)(*addresses), (ctypes.c_int * 3)(*widths), n, out.ctypes.data)


@pytest.mark.parametrize("widths", [(4, 4, 2), (4, 4, 4), (2, 4, 2), (4, 2, 4), (2, 2, 2)], ids=str)
def test_flat_split_covers_every_element_once(maps: Maps, widths: tuple[int, int, int]) -> None:
    vector = maps.library.constant_flat_vector()
    out = np.empty(4096, dtype=np.int64)
    vectorised = 0
    for n in [*range(24), 100, 1001]:
        for past in product(*(range(0, 16, width) for width in widths)):
            flat_plan(maps, [4096 + offset for offset in past], widths, n, out)
            head, vectors, singles = out[:3].tolist()
            elements = set(out[3 : 3 + singles].tolist())
            assert len(elements) == singles
            elements |= {head + i for i in range(vectors * vector)}
            assert elements == set(range(n)) and singles + vectors * vector == n
            if vectors:
                vectorised += 1
                assert all(
                    (offset + width * head) % 16 == 0 for offset, width in zip(past, widths, strict=True)
                )
    assert vectorised >= 20
