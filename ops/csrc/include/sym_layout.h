// Shared-memory layouts and the element that every lane holds, for the symmetric GEMM kernel.
//
// Everything is in 16-byte chunks of eight 2-byte elements, the unit of cp.async, ldmatrix and the wide stores, and is
// swizzled so that each such access of a warp touches every bank equally often. Integer arithmetic only.
#pragma once

#include <cstdint>

#include "muon_host_device.h"
#include "sym_schedule.h"

namespace muon {

constexpr int kChunk = 8;                       // elements of 2 bytes in 16 bytes
constexpr int kTileChunks = kTile / kChunk;     // chunks in a row of the staged output tile
constexpr int kStageBytes = kTile * kTile * 2;  // the staged output tile

// ---- the staged output tile: kTile x kTile, 256 bytes a row -----------------------------------------------------

// A row is exactly two times 32 banks, so unswizzled columns would all meet in the same banks. Two access patterns
// need eight different chunks: rows r..r+7 of one column (fragments), and rows {0, 1, 8, 9, 16, 17, 24, 25} + 2i of
// one column (the transposing read). This function of the row takes eight values on both sets.
MUON_HOST_DEVICE int staged_swizzle(int row) { return (row & 7) ^ (((row >> 3) & 3) << 1); }

// Byte offset of a chunk.
MUON_HOST_DEVICE int staged_chunk(int row, int chunk) {
  return row * (kTile * 2) + ((chunk ^ staged_swizzle(row)) << 4);
}

// Byte offset of an element.
MUON_HOST_DEVICE int staged_element(int row, int col) {
  return staged_chunk(row, col / kChunk) + (col % kChunk) * 2;
}

// The accumulator of one warp: 16 x 8 blocks, of which a lane holds rows `lane / 4` and 8 more, columns 2 (lane % 4) and
// the next (PTX ISA, "wgmma D fragment").
MUON_HOST_DEVICE int fragment_row(int lane, int half) { return lane / 4 + 8 * half; }
MUON_HOST_DEVICE int fragment_col(int lane) { return 2 * (lane % 4); }

// Byte offset of what a lane holds of the first 16 x 8 block at (row0, col0), two elements in four bytes; and, from it,
// of its share of the block `block` to the right, `rows` further down, in two instructions. Neither addition may carry
// into what the swizzle uses: row0 / 8 and rows / 8 have no bit in common below 4, nor have col0 / 8 and `block`.
MUON_HOST_DEVICE uint32_t fragment_base(int row0, int col0, int lane) {
  return static_cast<uint32_t>(staged_element(row0 + fragment_row(lane, 0), col0 + fragment_col(lane)));
}
MUON_HOST_DEVICE uint32_t fragment_offset(uint32_t base, int rows, int block) {
  return (base ^ static_cast<uint32_t>((block ^ staged_swizzle(rows)) << 4)) + static_cast<uint32_t>(rows) * (kTile * 2);
}

struct ChunkCoord {
  int row;
  int chunk;
};

// Straight copy of the tile: chunk number `index` in row-major order. A warp covers two whole rows of 256 bytes.
MUON_HOST_DEVICE ChunkCoord straight_chunk(int index) { return {index / kTileChunks, index % kTileChunks}; }

// Transposed copy. One step of a warp is an ldmatrix.x4.trans and a 16-byte store a lane: 8 columns of the tile by 32
// of its rows. The four 8x8 matrices hold *interleaved* source rows, so that the four registers of a lane are eight
// consecutive elements of the transposed row, in order. kMirrorSteps of them are the tile; four in a row complete 8
// destination rows of 256 bytes.
constexpr int kMirrorSteps = kTileChunks * (kTile / 32);

// The chunk whose address lane `lane` hands to ldmatrix in step `step`: row lane % 8 of matrix lane / 8.
MUON_HOST_DEVICE ChunkCoord mirror_source(int step, int lane) {
  const int matrix = lane / 8;
  const int line = lane % 8;
  return {32 * (step % 4) + 8 * (line / 2) + 2 * matrix + line % 2, step / 4};
}

// Where the 16 bytes that lane `lane` then holds belong in the transposed tile.
MUON_HOST_DEVICE ChunkCoord mirror_target(int step, int lane) {
  return {kChunk * (step / 4) + lane / 4, 4 * (step % 4) + lane % 4};
}

// Who writes a chunk of a tile on the diagonal, where the straight and the transposed copy meet: chunks left of the
// diagonal are straight, right of it transposed, and one on it takes from the straight chunk the elements up to the
// diagonal, from the transposed one the rest.
enum class DiagonalSource { kStraight, kTransposed, kBoth };

MUON_HOST_DEVICE DiagonalSource diagonal_source(int row, int chunk) {
  if (chunk < row / kChunk) return DiagonalSource::kStraight;
  return chunk > row / kChunk ? DiagonalSource::kTransposed : DiagonalSource::kBoth;
}

// Bits that come from the straight chunk in its `word`-th four bytes (two elements, the first in the low half).
MUON_HOST_DEVICE uint32_t diagonal_mask(int row, int word) {
  const int last = row % kChunk - 2 * word;  // of the two elements, how far the diagonal is from the first
  return last >= 1 ? 0xFFFFFFFFu : last == 0 ? 0x0000FFFFu : 0u;
}

// ---- operands of the wgmma kernel: kTile rows of 64 elements in TMA's 128-byte swizzle --------------------------

constexpr int kSm90BlockK = 64;
constexpr int kSm90OperandBytes = kTile * kSm90BlockK * 2;

// Where TMA puts a chunk: a row is one 128-byte line, and the chunk is exchanged with the line number modulo 8. Only the
// tests call this; the hardware does the same on both sides, as long as the buffer starts on 1024 bytes.
MUON_HOST_DEVICE int sm90_operand_chunk(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// The shared-memory matrix descriptor of wgmma (PTX ISA, "Matrix Descriptor Format") for a K-major operand in the
// 128-byte swizzle: bits 0-13 the start address / 16, bits 16-29 the leading byte offset / 16 (unused by this layout, 1 by
// convention), bits 32-45 the stride / 16 between groups of eight rows (1024 bytes), bits 49-51 the base offset (0: the
// pattern starts on 1024 bytes), bits 62-63 the swizzle (1: 128 bytes).
MUON_HOST_DEVICE uint64_t sm90_descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFFu) >> 4) | (uint64_t{1} << 16) | (uint64_t{1024 >> 4} << 32) |
         (uint64_t{1} << 62);
}

// What to add to a descriptor for the `step`-th 16 elements of k. They lie 32 bytes on in the unswizzled line; the
// hardware applies the exchange to the sum of the bits, so the plain distance is right inside a 128-byte line.
MUON_HOST_DEVICE uint64_t sm90_descriptor_k(int step) { return static_cast<uint64_t>((step * 32) >> 4); }

// What to add for `rows` rows further down, a multiple of 8.
MUON_HOST_DEVICE uint64_t sm90_descriptor_rows(int rows) { return static_cast<uint64_t>((rows * 128) >> 4); }

}  // namespace muon
