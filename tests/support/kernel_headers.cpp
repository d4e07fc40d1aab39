// The index arithmetic of the CUDA kernels behind a C interface, for tests/unit/test_ops_kernel_indices.py.
//
// Functions fill arrays that the caller has allocated; an element is what one call of the header's function gives.
#include "flat_split.h"
#include "sym_layout.h"
#include "sym_schedule.h"

using namespace muon;

extern "C" {

int constant_tile() { return kTile; }
int constant_mirror_steps() { return kMirrorSteps; }
int constant_flat_vector() { return kFlatVector; }

int64_t schedule_total(int m, int batch) { return TileSchedule(m, batch).total; }

// out[work] = (batch, row, col), in the order in which work is dealt out.
void schedule_tiles(int m, int batch, int32_t* out) {
  const TileSchedule schedule(m, batch);
  for (int64_t work = 0; work < schedule.total; ++work) {
    const TileCoord tile = schedule.tile(work);
    *out++ = tile.batch;
    *out++ = tile.row;
    *out++ = tile.col;
  }
}

int triangle_row_of(int64_t index) { return triangle_row(index); }

// out[step][lane] = (source row, source chunk, source byte offset, target row, target chunk).
void mirror_map(int32_t* out) {
  for (int step = 0; step < kMirrorSteps; ++step) {
    for (int lane = 0; lane < 32; ++lane) {
      const ChunkCoord from = mirror_source(step, lane);
      const ChunkCoord to = mirror_target(step, lane);
      *out++ = from.row;
      *out++ = from.chunk;
      *out++ = staged_chunk(from.row, from.chunk);
      *out++ = to.row;
      *out++ = to.chunk;
    }
  }
}

// out[lane][i][half][j] = (row, col, byte offset as the kernel computes it, byte offset by definition).
void fragment_map(int row0, int row_step, int col0, int blocks_m, int blocks_n, int32_t* out) {
  for (int lane = 0; lane < 32; ++lane) {
    const uint32_t base = fragment_base(row0, col0, lane);
    for (int i = 0; i < blocks_m; ++i) {
      for (int half = 0; half < 2; ++half) {
        for (int j = 0; j < blocks_n; ++j) {
          const int row = row0 + row_step * i + fragment_row(lane, half);
          const int col = col0 + 8 * j + fragment_col(lane);
          *out++ = row;
          *out++ = col;
          *out++ = static_cast<int32_t>(fragment_offset(base, row_step * i + 8 * half, j));
          *out++ = staged_element(row, col);
        }
      }
    }
  }
}

// (head, vectors, singles), then the positions of the single elements.
void flat_plan(const uint64_t* addresses, const int* bytes, int64_t n, int64_t* out) {
  const FlatSplit split =
      flat_split({addresses[0], bytes[0]}, {addresses[1], bytes[1]}, {addresses[2], bytes[2]}, n);
  *out++ = split.head;
  *out++ = split.vectors;
  *out++ = split.singles(n);
  for (int64_t index = 0; index < split.singles(n); ++index) *out++ = split.single(index);
}

}  // extern "C"
