// What both Hopper kernels ask of the host: descriptions of the operands for the copy engine, and whether they can run.
#pragma once

#include <cuda.h>

#include "../include/sym_layout.h"
#include "launch.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MUON_SM90_THREADS kThreads
#else
// Code for another chip has no body. Its launch bounds say so to kernel_available(): the host would not launch it.
#define MUON_SM90_THREADS 32
#endif

namespace muon {

// cuTensorMapEncodeTiled, found at run time so that nothing links against the driver. Null if there is none.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

// Describes an operand to the copy engine: a (batch, m, k) tensor cut into boxes of kTile rows by 64 elements of k.
//
// Three dimensions, not two, so that rows past the last of one matrix are zeros and not the next matrix.
inline int describe(CUtensorMap* map, const void* base, int64_t batch, int64_t m, int64_t k, int64_t ld, int64_t stride,
             int32_t dtype) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return MUON_DRIVER_ERROR;
  const CUtensorMapDataType type =
      dtype == MUON_FLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(m), static_cast<cuuint64_t>(batch)};
  // Distances in bytes of rows and matrices. That of a single matrix is never used, but must be valid.
  const int64_t matrix = batch > 1 ? stride : m * ld;
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(2 * ld), static_cast<cuuint64_t>(2 * matrix)};
  const cuuint32_t box[3] = {kSm90BlockK, kTile, 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, type, 3, const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? MUON_OK : MUON_DRIVER_ERROR;
}

inline int describe(const MuonSymGemm& p, CUtensorMap* map_a, CUtensorMap* map_b) {
  const int status = describe(map_a, p.a, p.batch, p.m, p.k, p.lda, p.stride_a, p.dtype);
  return status != MUON_OK ? status : describe(map_b, p.b, p.batch, p.m, p.k, p.ldb, p.stride_b, p.dtype);
}

inline int hopper_with_tensor_maps() {
  int major = 0;
  int minor = 0;
  int status = device_attribute(cudaDevAttrComputeCapabilityMajor, &major);
  if (status == cudaSuccess) status = device_attribute(cudaDevAttrComputeCapabilityMinor, &minor);
  if (status != cudaSuccess) return status;
  // sm_90a code runs on 9.0 and nowhere else, later chips included.
  if (major != 9 || minor != 0) return MUON_DEVICE_UNSUPPORTED;
  return tensor_map_encoder() != nullptr ? MUON_OK : MUON_DRIVER_ERROR;
}

// What both launchers do: checks the problem, asks for the kernel, and runs it for the problem's dtype.
inline int run_checked(const MuonSymGemm* problem, cudaStream_t stream, int (*available)(),
                       int (*half)(const MuonSymGemm&, cudaStream_t), int (*bfloat16)(const MuonSymGemm&, cudaStream_t)) {
  if (problem == nullptr) return MUON_BAD_ARGUMENT;
  int status = check_sym_gemm(*problem);
  if (status == MUON_OK) status = available();
  if (status != MUON_OK) return status;
  return problem->dtype == MUON_FLOAT16 ? half(*problem, stream) : bfloat16(*problem, stream);
}

}  // namespace muon
