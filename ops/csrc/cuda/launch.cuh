// Checks that the launchers share.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

#include "../include/muon_cuda.h"
#include "../include/sym_schedule.h"
#include "sym_epilogue.cuh"

namespace muon {

MUON_HOST_DEVICE bool on_16_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Of the symmetric GEMM kernel: pointers, sizes and the 16-byte grid that every access relies on.
inline int check_sym_gemm(const MuonSymGemm& p) {
  if (p.batch < 0 || p.m < 0 || p.k < 0) return MUON_BAD_ARGUMENT;
  if (p.dtype != MUON_FLOAT16 && p.dtype != MUON_BFLOAT16) return MUON_DTYPE_UNSUPPORTED;
  if (p.m == 0 || p.k == 0 || p.m % 8 != 0 || p.k % 8 != 0) return MUON_SHAPE_UNSUPPORTED;
  // 2^24 keeps tile arithmetic, and the coordinates of a TMA copy, far inside 32 bits.
  if (p.m > (1 << 24) || p.k > (1 << 24) || p.batch > (1 << 24)) return MUON_SHAPE_UNSUPPORTED;
  // The counter of tiles has 32 bits.
  const int64_t tiles = TileSchedule(static_cast<int>(p.m), static_cast<int>(p.batch)).total;
  if (tiles > UINT32_MAX) return MUON_SHAPE_UNSUPPORTED;
  const int64_t c = p.c != nullptr ? 1 : 0;
  const int64_t many = p.batch > 1 ? 1 : 0;  // the stride of a single matrix is not used
  for (int64_t step : {p.lda, p.ldb, p.ldd, c * p.ldc, many * p.stride_a, many * p.stride_b, many * p.stride_d,
                       many * c * p.stride_c}) {
    if (step < 0 || step % 8 != 0) return MUON_SHAPE_UNSUPPORTED;
  }
  if (p.lda < p.k || p.ldb < p.k || p.ldd < p.m || (p.c && p.ldc < p.m)) return MUON_BAD_ARGUMENT;
  if (p.batch == 0) return MUON_OK;
  if (!p.a || !p.b || !p.d || !p.counter) return MUON_BAD_ARGUMENT;
  if (!on_16_bytes(p.a) || !on_16_bytes(p.b) || !on_16_bytes(p.c) || !on_16_bytes(p.d)) return MUON_MISALIGNED;
  return MUON_OK;
}

inline EpilogueArgs epilogue_args(const MuonSymGemm& p) {
  // beta 0 means that c is not read at all, so that NaN in it does not spread, as in BLAS.
  return {p.beta == 0.0f ? nullptr : p.c, p.d, p.ldc, p.ldd, p.stride_c, p.stride_d, p.alpha, p.beta, p.diag,
          static_cast<int>(p.m)};
}

inline int device_attribute(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(value, attribute, device);
}

// A kernel on one device: whether it can run, and how many of its blocks are resident at once.
struct Prepared {
  int status = MUON_NOT_COMPILED;
  int blocks = 0;
};

// A build without code for the device reports no kernel image. A build whose code for the device is the empty body of
// another architecture has launch bounds of one warp, which is how it is told apart: such a kernel would only trap.
inline Prepared prepare_now(const void* kernel, int threads, int shared_bytes) {
  cudaFuncAttributes attributes;
  int error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();  // Not sticky; without this the next launch check of the caller would report it.
    return {MUON_NOT_COMPILED, 0};
  }
  if (error != cudaSuccess) return {error, 0};
  if (attributes.maxThreadsPerBlock < threads) return {MUON_NOT_COMPILED, 0};
  int limit = 0;
  error = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &limit);
  if (error != cudaSuccess) return {error, 0};
  if (shared_bytes > limit) return {MUON_DEVICE_UNSUPPORTED, 0};
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return {error, 0};
  int blocks = 0;
  int processors = 0;
  error = device_attribute(cudaDevAttrMultiProcessorCount, &processors);
  if (error != cudaSuccess) return {error, 0};
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes);
  if (error != cudaSuccess) return {error, 0};
  return {blocks > 0 ? MUON_OK : MUON_DEVICE_UNSUPPORTED, blocks * processors};
}

// prepare_now, remembered per kernel and device: the queries cost more than a small launch. CUDA errors are not
// remembered, they may pass.
template <typename... Parameters>
inline Prepared prepare(void (*kernel)(Parameters...), int threads, int shared_bytes) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return {error, 0};
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Prepared> known;
  const void* handle = reinterpret_cast<const void*>(kernel);
  const std::lock_guard<std::mutex> guard(mutex);
  const auto found = known.find({handle, device});
  if (found != known.end()) return found->second;
  const Prepared prepared = prepare_now(handle, threads, shared_bytes);
  if (prepared.status <= 0) known[{handle, device}] = prepared;
  return prepared;
}

}  // namespace muon
