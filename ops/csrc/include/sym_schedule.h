// Which tile of which matrix a thread block computes, and which pipeline stage holds which block of k.
//
// Only integer arithmetic, the same on host and device.
#pragma once

#include <cmath>
#include <cstdint>

#include "muon_host_device.h"

namespace muon {

// Edge of an output tile. Tiles are square, so that a tile's mirror image is a tile.
constexpr int kTile = 128;

// Tile rows that are walked together, column by column. The tiles that run at the same time then form a compact patch:
// 132 tiles of a wide triangle need 8 + 17 row panels of the operands instead of up to 132, and those stay in L2.
constexpr int kGroupRows = 8;

struct TileCoord {
  int batch;
  int row;  // in tiles; row >= col
  int col;
};

MUON_HOST_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Tiles in a triangle of `rows` tile rows, diagonal included.
MUON_HOST_DEVICE int64_t triangle_count(int64_t rows) { return rows * (rows + 1) / 2; }

// The row of element `index` in a triangle stored row by row: the largest r with triangle_count(r) <= index.
MUON_HOST_DEVICE int triangle_row(int64_t index) {
  // A float root (also an approximate one, under --use_fast_math) is a row or so off at most; the loops put that right.
  int64_t row = static_cast<int64_t>((sqrtf(8.0f * static_cast<float>(index) + 1.0f) - 1.0f) * 0.5f);
  while (triangle_count(row) > index) --row;
  while (triangle_count(row + 1) <= index) ++row;
  return static_cast<int>(row);
}

// The tile at position `index` of one matrix with `rows` tile rows; batch is left 0.
//
// The triangle is cut into bands of kGroupRows rows. A band starts at a row boundary, so the plain triangular row tells
// the band; inside it the rectangle left of the diagonal block goes first, column by column, then the block itself.
MUON_HOST_DEVICE TileCoord triangle_tile(int64_t index, int rows) {
  const int first = triangle_row(index) / kGroupRows * kGroupRows;
  const int height = rows - first < kGroupRows ? rows - first : kGroupRows;
  int local = static_cast<int>(index - triangle_count(first));
  if (local < first * height) return {0, first + local % height, local / height};
  local -= first * height;
  const int row = triangle_row(local);
  return {0, first + row, first + local - static_cast<int>(triangle_count(row))};
}

// The inverse of triangle_tile.
MUON_HOST_DEVICE int64_t triangle_index(int row, int col, int rows) {
  const int first = row / kGroupRows * kGroupRows;
  const int height = rows - first < kGroupRows ? rows - first : kGroupRows;
  const int64_t start = triangle_count(first);
  if (col < first) return start + static_cast<int64_t>(col) * height + (row - first);
  return start + static_cast<int64_t>(first) * height + triangle_count(row - first) + (col - first);
}

// All tiles of a batch, in the order in which the blocks take them.
struct TileSchedule {
  int rows;        // tile rows of one matrix
  int64_t tiles;   // tiles of one matrix
  int64_t total;   // tiles of the batch

  MUON_HOST_DEVICE TileSchedule(int m, int batch)
      : rows(ceil_div(m, kTile)), tiles(triangle_count(rows)), total(tiles * batch) {}

  MUON_HOST_DEVICE TileCoord tile(int64_t work) const {
    const int64_t matrix = work / tiles;
    TileCoord coord = triangle_tile(work - matrix * tiles, rows);
    coord.batch = static_cast<int>(matrix);
    return coord;
  }
};

// Where a pipeline of `stages` buffers stands. The phase is the parity of how often the ring has been walked: a consumer
// waits for the `phase` of a full barrier, a producer for the opposite one of an empty barrier, which a fresh barrier
// passes at once.
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  template <int stages>
  MUON_HOST_DEVICE void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1u;
    }
  }

  // `count` steps at once: how a consumer passes over the blocks of k that another one consumes.
  template <int stages>
  MUON_HOST_DEVICE void skip(int count) {
    const int position = stage + count;
    phase ^= static_cast<uint32_t>(position / stages) & 1u;
    stage = position % stages;
  }
};

}  // namespace muon
