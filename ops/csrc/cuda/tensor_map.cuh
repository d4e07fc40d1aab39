// What the Hopper kernel needs from the host: descriptions of the operands for the copy engine.
#pragma once

#include <cuda.h>

#include "../include/sym_layout.h"
#include "launch.cuh"

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

}  // namespace muon
