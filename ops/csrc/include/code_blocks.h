// Momentum in 8 bits: the elements of a block share a scale (ops/torch_operators.py).
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "muon_host_device.h"

namespace muon {

constexpr int kCodeBlock = 256;

// The blocks of a fragment of `n` elements. Blocks are multiples of 256 elements of a parameter and end where a fragment
// ends, so the first and the last one may be shorter. `before`: elements of the parameter in the first block that precede
// the fragment. `scales`: one for each block.
struct CodeBlocks {
  float* scales;
  int64_t before;

  MUON_HOST_DEVICE int64_t count(int64_t n) const { return (before + n + kCodeBlock - 1) / kCodeBlock; }

  // The elements of the fragment in a block: from begin to end.
  MUON_HOST_DEVICE int64_t begin(int64_t block) const { return block == 0 ? 0 : block * kCodeBlock - before; }
  MUON_HOST_DEVICE int64_t end(int64_t block, int64_t n) const {
    const int64_t end = (block + 1) * kCodeBlock - before;
    return end < n ? end : n;
  }
};

// A 127th of the largest magnitude, whose bits are given, cut to 17 significant bits.
MUON_HOST_DEVICE float code_scale(uint32_t largest) {
  float scale;
  memcpy(&scale, &largest, sizeof scale);
  scale /= 127.0f;
  uint32_t bits;
  memcpy(&bits, &scale, sizeof bits);
  bits &= ~0x7fu;
  memcpy(&scale, &bits, sizeof scale);
  return scale < FLT_MIN ? 0.0f : scale;
}

// Whether codes stand for numbers; else the scale is 0 or not finite, and all codes are 0.
MUON_HOST_DEVICE bool has_codes(float scale) { return scale > 0.0f && scale <= FLT_MAX; }

// The nearest integer from -128 to 127, of two the even one: the sum with 1.5 * 2^23 has it in its lowest byte. The product
// with the reciprocal scale must have been rounded: fused with the sum it would be rounded once, not twice as torch does.
MUON_HOST_DEVICE int8_t code_of(float quotient) {
  const float sum = quotient + 0x1.8p23f;
  uint32_t bits;
  memcpy(&bits, &sum, sizeof bits);
  return static_cast<int8_t>(bits);
}

}  // namespace muon
