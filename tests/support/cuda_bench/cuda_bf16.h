// Stands for CUDA's header.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof wide);
  if ((wide & 0x7fffffffu) > 0x7f800000u) return {0x7fff};  // NaN
  return {static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16)};
}
