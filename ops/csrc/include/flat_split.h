// How a flat pass over several arrays is cut into a part with 16-byte accesses and single elements around it.
#pragma once

#include <cstdint>

#include "muon_host_device.h"

namespace muon {

// Elements a thread takes at once: one 16-byte access to a 2-byte array, two to a 4-byte one.
constexpr int kFlatVector = 8;

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

// Elements before the first 16-byte boundary, or -1 if the array is not aligned to its own elements.
MUON_HOST_DEVICE int64_t elements_to_boundary(uintptr_t address, int element_bytes) {
  if (address % static_cast<uintptr_t>(element_bytes) != 0) return -1;
  const uintptr_t past = address % 16;
  return past == 0 ? 0 : static_cast<int64_t>((16 - past) / static_cast<uintptr_t>(element_bytes));
}

// Vectors are used only where all arrays reach 16-byte boundaries at the same element; a shard that starts elsewhere in
// its buffer than the send buffer does is walked element by element, which still coalesces.
//
// `wide` and `wide2` are float32 arrays (pass the same twice if there is one), `narrow` has elements of `narrow_bytes`.
MUON_HOST_DEVICE FlatSplit flat_split(uintptr_t wide, uintptr_t wide2, uintptr_t narrow, int narrow_bytes, int64_t n) {
  // The narrow array has the coarsest grid in elements (8 for 2-byte ones, 4 for the others): only its boundaries can be
  // everyone's, and moving on by a vector keeps all arrays where they are on their grids, so the first one decides.
  const int64_t head = elements_to_boundary(narrow, narrow_bytes);
  if (head < 0 || head >= n) return {n, 0};
  const uintptr_t step = static_cast<uintptr_t>(head) * 4;
  if ((wide + step) % 16 != 0 || (wide2 + step) % 16 != 0) return {n, 0};
  return {head, (n - head) / kFlatVector};
}

}  // namespace muon
