// How a flat pass over fragments is cut: into tiles for blocks of threads, and a tile into a part with 16-byte accesses
// and single elements around it.
#pragma once

#include <cstdint>

#include "muon_host_device.h"

namespace muon {

// Elements a thread takes at once: one 16-byte access to a 2-byte array, two to a 4-byte one.
constexpr int kFlatVector = 8;

// Elements of a tile: a multiple of kFlatVector, so that all tiles of a fragment begin alike on the 16-byte grid.
constexpr int kFlatTile = 4096;

// Elements [0, head) and [head + kFlatVector * vectors, n) go one by one, the rest in vectors.
struct FlatSplit {
  int64_t head;
  int64_t vectors;

  // How many of `n` elements go one by one, and which the `index`-th of them is.
  MUON_HOST_DEVICE int64_t singles(int64_t n) const { return n - kFlatVector * vectors; }
  MUON_HOST_DEVICE int64_t single(int64_t index) const {
    return index < head ? index : index + kFlatVector * vectors;
  }
};

// Where an array begins, and the bytes of an element: 2 or 4.
struct FlatArray {
  uintptr_t address;
  int bytes;
};

// Elements before the first 16-byte boundary, or -1 if the array is not aligned to its own elements.
MUON_HOST_DEVICE int64_t elements_to_boundary(FlatArray array) {
  const uintptr_t bytes = static_cast<uintptr_t>(array.bytes);
  if (array.address % bytes != 0) return -1;
  return static_cast<int64_t>((16 - array.address % 16) % 16 / bytes);
}

// Vectors are used only where all arrays reach 16-byte boundaries at the same element; a shard that starts elsewhere in
// its buffer than the send buffer does is walked element by element, which still coalesces.
//
// Pass an array twice if there are only two.
MUON_HOST_DEVICE FlatSplit flat_split(FlatArray first, FlatArray second, FlatArray third, int64_t n) {
  // The narrowest array has the coarsest grid in elements (8 for a 2-byte one, 4 for the others): only its boundaries
  // can be everyone's, and moving on by a vector keeps all arrays where they are on their grids, so the first one decides.
  FlatArray narrow = first;
  if (second.bytes < narrow.bytes) narrow = second;
  if (third.bytes < narrow.bytes) narrow = third;
  const int64_t head = elements_to_boundary(narrow);
  if (head < 0 || head >= n) return {n, 0};
  const uintptr_t step = static_cast<uintptr_t>(head);
  const uintptr_t off_grid = (first.address + step * static_cast<uintptr_t>(first.bytes)) % 16 |
                             (second.address + step * static_cast<uintptr_t>(second.bytes)) % 16 |
                             (third.address + step * static_cast<uintptr_t>(third.bytes)) % 16;
  if (off_grid != 0) return {n, 0};
  return {head, (n - head) / kFlatVector};
}

MUON_HOST_DEVICE int64_t flat_tiles(int64_t n) { return (n + kFlatTile - 1) / kFlatTile; }

// The last of `count` fragments whose tiles begin at or before `tile`: firsts[0] is 0, and they ascend. Of fragments
// without elements, which begin where the next one does, it is the one behind them.
MUON_HOST_DEVICE int fragment_of(const int64_t* firsts, int count, int64_t tile) {
  int low = 0;
  int high = count;  // firsts[low] <= tile, and firsts[high] > tile or high is the end
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (firsts[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace muon
