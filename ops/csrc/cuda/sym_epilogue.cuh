// What happens to a finished accumulator tile: scale, add c and the diagonal, round, store the tile and its mirror.
//
// A team of `threads` threads owns the accumulators of one kTile x kTile tile
// and a staging buffer of kStageBytes in shared memory in which the tile is turned.
#pragma once

#include "../include/muon_cuda.h"
#include "../include/sym_layout.h"
#include "../include/sym_schedule.h"
#include "ptx.cuh"

namespace muon {

// The part of MuonSymGemm that the epilogue needs, by value in the kernel's parameters.
struct EpilogueArgs {
  const void* c;  // null: no C
  void* d;
  int64_t ldc, ldd, stride_c, stride_d;
  float alpha, beta, diag;
  int m;
};

// Starts copying the tile of c into the staging buffer; rows and columns outside of the matrix become zeros.
//
// Nobody may still read the staging buffer. The caller commits the group and waits for it before stage_tile.
template <typename T, int threads>
__device__ __forceinline__ void prefetch_c(const EpilogueArgs& args, TileCoord tile, uint32_t staging, int thread) {
  const T* matrix = static_cast<const T*>(args.c) + tile.batch * args.stride_c;
#pragma unroll 4
  for (int index = thread; index < kTile * kTileChunks; index += threads) {
    const ChunkCoord at = straight_chunk(index);
    const int row = tile.row * kTile + at.row;
    const int col = tile.col * kTile + at.chunk * kChunk;
    const bool inside = row < args.m && col < args.m;
    const T* source = inside ? matrix + row * args.ldc + col : matrix;
    cp_async_16(staging + staged_chunk(at.row, at.chunk), source, inside);
  }
}

// Writes the accumulators, rounded, to the staging buffer; `with_c` adds what lies there first.
template <typename T, bool with_c, int blocks_m, int blocks_n>
__device__ __forceinline__ void write_fragments(const float (&accumulator)[blocks_m][blocks_n][4], uint32_t staging,
                                                uint32_t base, int row_step, float beta) {
#pragma unroll
  for (int i = 0; i < blocks_m; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < blocks_n; ++j) {
        float low = accumulator[i][j][2 * half];
        float high = accumulator[i][j][2 * half + 1];
        const uint32_t address = staging + fragment_offset(base, row_step * i + 8 * half, j);
        if (with_c) {
          const float2 c = Half2<T>::unpack(load_shared_4(address));
          low = fmaf(beta, c.x, low);
          high = fmaf(beta, c.y, high);
        }
        store_shared_4(address, Half2<T>::pack(low, high));
      }
    }
  }
}

// Turns accumulators into rounded elements in the staging buffer: alpha accumulator + diag I + beta c.
//
// accumulator[i][j] is the 16 x 8 block at row `row0 + row_step * i`, column `col0 + 8 * j` of the tile. If args.c is
// set, the staging buffer holds the tile of c and all threads have seen it arrive; every thread then overwrites just
// the bytes that it reads. On return its own elements are written, but not yet visible to the others.
template <typename T, int blocks_m, int blocks_n>
__device__ __forceinline__ void stage_tile(const EpilogueArgs& args, bool diagonal,
                                           float (&accumulator)[blocks_m][blocks_n][4], uint32_t staging, int row0,
                                           int row_step, int col0, int lane) {
#pragma unroll
  for (int i = 0; i < blocks_m; ++i) {
#pragma unroll
    for (int j = 0; j < blocks_n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) accumulator[i][j][e] *= args.alpha;
    }
  }
  if (diagonal) {
    const int distance = row0 + fragment_row(lane, 0) - col0 - fragment_col(lane);
#pragma unroll
    for (int i = 0; i < blocks_m; ++i) {
#pragma unroll
      for (int j = 0; j < blocks_n; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (distance == 8 * j + e % 2 - row_step * i - 8 * (e / 2)) accumulator[i][j][e] += args.diag;
        }
      }
    }
  }
  const uint32_t base = fragment_base(row0, col0, lane);
  if (args.c != nullptr) {
    write_fragments<T, true>(accumulator, staging, base, row_step, args.beta);
  } else {
    write_fragments<T, false>(accumulator, staging, base, row_step, 0.0f);
  }
}

// Copies the staged tile to its place and its transpose to the mirrored place. Both write whole 32-byte sectors; rows
// and columns outside of the matrix are left out. m is a multiple of kChunk, so no chunk is cut.
//
// A tile on the diagonal keeps its lower triangle only and mirrors it: with a != b the two halves are different sums,
// and even with a == b the tensor core may add in another order.
template <typename T, int threads>
__device__ __forceinline__ void store_tile(const EpilogueArgs& args, TileCoord tile, uint32_t staging, int thread) {
  T* matrix = static_cast<T*>(args.d) + tile.batch * args.stride_d;
  const bool diagonal = tile.row == tile.col;
#pragma unroll 4
  for (int index = thread; index < kTile * kTileChunks; index += threads) {
    const ChunkCoord at = straight_chunk(index);
    const int row = tile.row * kTile + at.row;
    const int col = tile.col * kTile + at.chunk * kChunk;
    const uint4 value = load_shared_16(staging + staged_chunk(at.row, at.chunk));
    const bool wanted = !diagonal || diagonal_source(at.row, at.chunk) == DiagonalSource::kStraight;
    if (wanted && row < args.m && col < args.m) *reinterpret_cast<uint4*>(matrix + row * args.ldd + col) = value;
  }
  constexpr int steps = kMirrorSteps / (threads / 32);
  const int lane = thread % 32;
#pragma unroll 4
  for (int i = 0; i < steps; ++i) {
    const int step = thread / 32 * steps + i;
    const ChunkCoord from = mirror_source(step, lane);
    const ChunkCoord to = mirror_target(step, lane);
    uint32_t value[4];
    ldmatrix_x4_trans(value, staging + staged_chunk(from.row, from.chunk));
    bool wanted = true;
    if (diagonal) {
      const DiagonalSource source = diagonal_source(to.row, to.chunk);
      wanted = source != DiagonalSource::kStraight;
      if (source == DiagonalSource::kBoth) {
        const uint4 straight = load_shared_16(staging + staged_chunk(to.row, to.chunk));
        const uint32_t words[4] = {straight.x, straight.y, straight.z, straight.w};
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const uint32_t mask = diagonal_mask(to.row, word);
          value[word] = (words[word] & mask) | (value[word] & ~mask);
        }
      }
    }
    const int row = tile.col * kTile + to.row;
    const int col = tile.row * kTile + to.chunk * kChunk;
    if (wanted && row < args.m && col < args.m) {
      *reinterpret_cast<uint4*>(matrix + row * args.ldd + col) = make_uint4(value[0], value[1], value[2], value[3]);
    }
  }
}

}  // namespace muon
