// Stands for ops/csrc/cuda/ptx.cuh: the same functions, by the machine instead of PTX.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace muon {

inline uint32_t shared_address(const void* pointer) { return bench::shared_address(pointer); }

inline void cp_async_16(uint32_t target, const void* source, bool valid) { bench::copy_async(target, source, valid); }
inline void cp_async_commit() { bench::copy_commit(); }
template <int pending>
inline void cp_async_wait() {
  bench::copy_wait(pending);
}

inline void ldmatrix_x4_trans(uint32_t (&value)[4], uint32_t address) { bench::load_matrices(value, address); }
inline void store_global_16(void* target, uint4 value) {
  bench::touch(target, 16, true);
  std::memcpy(target, &value, sizeof(value));
}
template <typename T>
void store_global(T* target, T value) {
  bench::touch(target, sizeof(T), true);
  *target = value;
}
inline void store_global_8(void* target, uint2 value) {
  bench::touch(target, 8, true);
  std::memcpy(target, &value, sizeof(value));
}

inline uint4 load_shared_16(uint32_t address) {
  uint4 value;
  bench::load_shared(address, &value, 16);
  return value;
}
inline uint32_t load_shared_4(uint32_t address) {
  uint32_t value;
  bench::load_shared(address, &value, 4);
  return value;
}
inline void store_shared_4(uint32_t address, uint32_t value) { bench::store_shared(address, &value, 4); }

template <int threads>
inline void named_barrier(int id) {
  bench::barrier_sync(id, threads);
}

template <typename T>
struct Half2;

template <>
struct Half2<__nv_bfloat16> {
  static uint32_t pack(float low, float high) {
    return __float2bfloat16_rn(low).bits | static_cast<uint32_t>(__float2bfloat16_rn(high).bits) << 16;
  }
  static float2 unpack(uint32_t bits) {
    return {__bfloat162float({static_cast<uint16_t>(bits)}), __bfloat162float({static_cast<uint16_t>(bits >> 16)})};
  }
};

template <>
struct Half2<__half> {
  static uint32_t pack(float low, float high) {
    const __half pair[2] = {__float2half_rn(low), __float2half_rn(high)};
    uint32_t bits;
    std::memcpy(&bits, pair, sizeof bits);
    return bits;
  }
  static float2 unpack(uint32_t bits) {
    __half pair[2];
    std::memcpy(pair, &bits, sizeof bits);
    return {__half2float(pair[0]), __half2float(pair[1])};
  }
};

}  // namespace muon
