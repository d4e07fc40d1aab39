// The elements of a pass that computes in float32: from and to each MuonDtype, one or eight, and the checks of its launcher.
#pragma once

#include <type_traits>

#include "../include/flat_split.h"
#include "../include/muon_cuda.h"
#include "ptx.cuh"

namespace muon {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

struct Vector {
  float value[kFlatVector];
};

__device__ __forceinline__ Vector load_vector(const float* source) {
  const float4 low = reinterpret_cast<const float4*>(source)[0];
  const float4 high = reinterpret_cast<const float4*>(source)[1];
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

template <typename T>
__device__ __forceinline__ Vector load_vector(const T* source) {
  const uint4 bits = *reinterpret_cast<const uint4*>(source);
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  Vector v;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const float2 pair = Half2<T>::unpack(words[word]);
    v.value[2 * word] = pair.x;
    v.value[2 * word + 1] = pair.y;
  }
  return v;
}

__device__ __forceinline__ Vector load_vector(const int8_t* source) {
  const uint2 bits = *reinterpret_cast<const uint2*>(source);
  Vector v;
#pragma unroll
  for (int i = 0; i < kFlatVector; ++i) {
    v.value[i] = static_cast<float>(static_cast<int8_t>((i < 4 ? bits.x : bits.y) >> 8 * (i % 4)));
  }
  return v;
}

// A MuonDtype as a type. Kernels are templates of the number, which scripts/sass_check.py reads in their names.
template <int dtype>
struct Stored {
  using type = float;
};
template <>
struct Stored<MUON_FLOAT16> {
  using type = __half;
};
template <>
struct Stored<MUON_BFLOAT16> {
  using type = __nv_bfloat16;
};

// Calls run with a MuonDtype as a constant.
template <typename Run>
int with_dtype(int32_t dtype, const Run& run) {
  switch (dtype) {
    case MUON_FLOAT16:
      return run(std::integral_constant<int, MUON_FLOAT16>{});
    case MUON_BFLOAT16:
      return run(std::integral_constant<int, MUON_BFLOAT16>{});
    default:
      return run(std::integral_constant<int, MUON_FLOAT32>{});
  }
}

inline bool known_dtype(int32_t dtype) { return dtype == MUON_FLOAT32 || dtype == MUON_FLOAT16 || dtype == MUON_BFLOAT16; }

inline int check_array(const void* pointer, int32_t dtype) {
  if (pointer == nullptr) return MUON_BAD_ARGUMENT;
  const uintptr_t bytes = dtype == MUON_FLOAT32 ? 4 : dtype == MUON_INT8 ? 1 : 2;
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0 ? MUON_OK : MUON_MISALIGNED;
}

}  // namespace muon
