// Stands for CUDA's header. _Float16 rounds to nearest even, as the device does.
#pragma once

struct __half {
  _Float16 value;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
