// Stands for CUDA's header: the words of the language, and those calls of the runtime that the launchers make.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "machine.h"

#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes)
#define CUDART_VERSION 13000

inline bench::Dim& threadIdx = bench::thread_index;
inline bench::Dim& blockIdx = bench::block_index;
inline bench::Dim& gridDim = bench::grid_size;

namespace bench {
// One access, which checks both addresses.
inline void copy(void* to, const void* from, int bytes) {
  asm("" : "+r"(to), "+r"(from));  // else the compiler trusts both to be aligned
  touch(from, bytes, false);
  touch(to, bytes, true);
  std::memcpy(to, from, static_cast<size_t>(bytes));
}
template <typename T>
struct alignas(8) Two {
  T x, y;
  Two() = default;
  Two(T x, T y) : x(x), y(y) {}
  Two(const Two& other) { *this = other; }
  Two& operator=(const Two& other) {
    copy(this, &other, 8);
    return *this;
  }
};
template <typename T>
struct alignas(16) Four {
  T x, y, z, w;
  Four() = default;
  Four(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
  Four(const Four& other) { *this = other; }
  Four& operator=(const Four& other) {
    copy(this, &other, 16);
    return *this;
  }
};
}  // namespace bench
using uint2 = bench::Two<uint32_t>;
using uint4 = bench::Four<uint32_t>;
using float4 = bench::Four<float>;
struct float2 {
  float x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

template <typename T>
T __ldg(const T* address) {
  bench::touch(address, sizeof(T), false);
  return *address;
}

inline float __fmul_rn(float a, float b) {
  const uint32_t nan = 0x7fffffff;  // the device has no other
  float product = a * b;
  if (product != product) std::memcpy(&product, &nan, sizeof nan);
  return product;
}
inline uint32_t __shfl_xor_sync(uint32_t lanes, uint32_t value, int distance) {
  if (lanes != 0xffffffffu) bench::fail("a shuffle of some lanes");
  return bench::exchange(value, distance);
}

inline void __syncthreads() { bench::barrier_sync(0, 0); }
[[noreturn]] inline void __trap() { bench::fail("trap"); }
inline unsigned atomicInc(unsigned* counter, unsigned most) { return bench::count(counter, most); }

typedef struct CUstream_st* cudaStream_t;
typedef int cudaError_t;
enum { cudaSuccess = 0, cudaErrorInvalidDeviceFunction = 98, cudaErrorNoKernelImageForDevice = 209 };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMultiProcessorCount,
};
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes {
  int maxThreadsPerBlock;
};

extern "C" int bench_attribute(int attribute);
extern "C" int bench_device();

inline const char* cudaGetErrorString(cudaError_t) { return "an error of the bench"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = bench_device();
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = bench_attribute(attribute);
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, int, int bytes) {
  bench::allow_shared(kernel, static_cast<size_t>(bytes));
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
enum { cudaEnableDefault };
void* bench_tensor_map_encoder();
inline cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, int, cudaDriverEntryPointQueryResult* result) {
  *function = bench_tensor_map_encoder();
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
