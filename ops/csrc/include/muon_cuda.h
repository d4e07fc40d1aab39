// C interface of the CUDA kernels: raw device pointers and a stream, no torch headers, so that nvcc stays fast.
//
// Every launcher only enqueues work on `stream`; none allocates, synchronises or changes the current device (the
// pointers must live on it), so that all of them can be captured into a CUDA graph.
//
// Return value: MUON_OK, a positive cudaError_t, or one of the negative MUON_* codes. A negative code means that
// nothing was launched and another implementation can be chosen; muon_status_name() puts either into words.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Stands for cudaStream_t where cuda_runtime.h is not at hand; the two are the same pointer.
typedef struct CUstream_st* muon_stream_t;

enum MuonStatus {
  MUON_OK = 0,
  MUON_BAD_ARGUMENT = -1,       // a null pointer, a negative size: the caller's mistake
  MUON_SHAPE_UNSUPPORTED = -2,  // m or k not a positive multiple of 8, a stride not a multiple of 8, or too large
  MUON_MISALIGNED = -3,         // a pointer is not on a 16-byte boundary (flat passes: not on its element's)
  MUON_DTYPE_UNSUPPORTED = -4,
  MUON_DEVICE_UNSUPPORTED = -5,  // the current device cannot run this kernel
  MUON_NOT_COMPILED = -6,        // the device could, but this build holds no code for it
  MUON_DRIVER_ERROR = -7,        // the driver refused a TMA descriptor
};

enum MuonDtype { MUON_FLOAT32 = 0, MUON_FLOAT16 = 1, MUON_BFLOAT16 = 2, MUON_INT8 = 3 };

// d = alpha a b^T + beta c + diag I for `batch` products known to be symmetric.
//
// a and b are (batch, m, k), c and d are (batch, m, m), all row-major with unit stride along a row; ld* is the distance
// between rows and stride_* between matrices, in elements. Only tiles on and below the diagonal are computed, and c is
// read only there: d is the lower triangle of the formula, mirrored, bit for bit. c may be null (beta is ignored then)
// and may be d itself; d must not overlap a or b. dtype is MUON_FLOAT16 or MUON_BFLOAT16 for all four; the sum, the
// scaling and the addition of c run in float32 and are rounded once. Blocks take their tiles from `counter`, which is 0
// before the first product and again after each one; products that run at the same time need one each.
typedef struct MuonSymGemm {
  const void* a;
  const void* b;
  const void* c;
  void* d;
  uint32_t* counter;
  int64_t batch, m, k;
  int64_t lda, ldb, ldc, ldd;
  int64_t stride_a, stride_b, stride_c, stride_d;
  float alpha, beta, diag;
  int32_t dtype;
} MuonSymGemm;

// With wgmma and TMA, for compute capability 9.0 alone.
int muon_sym_gemm(const MuonSymGemm* problem, muon_stream_t stream);

// What muon_sym_gemm would answer, without launching: MUON_OK or a negative code or a cudaError_t.
int muon_sym_gemm_available(void);

// A fragment of momentum_pack: `n` elements each of three arrays, none of which overlaps another. What follows `nesterov` is
// of momentum in 8 bits alone: the fields of CodeBlocks in code_blocks.h.
typedef struct MuonPackRow {
  void* momentum;
  const void* grad;
  void* out;
  int64_t n;
  double decay;
  int32_t nesterov;
  int32_t before;
  float* scales;
} MuonPackRow;

// momentum <- lerp(momentum, grad, 1 - decay); out <- nesterov ? lerp(grad, momentum, decay) : momentum, for all `count`
// fragments, which lie on the host and may go once this returns. Arithmetic in float32: each array has one MuonDtype for
// all fragments, and is rounded when it is written (out from the unrounded momentum); momentum alone may be MUON_INT8. One
// pass, one launch for as many fragments as fit into the 4 KiB of a kernel's arguments: 72, in 8 bits 56.
int muon_momentum_pack(const MuonPackRow* rows, int64_t count, int32_t momentum_dtype, int32_t grad_dtype,
                       int32_t out_dtype, muon_stream_t stream);

// A fragment of unpack_apply: `n` elements each of two arrays.
typedef struct MuonApplyRow {
  void* param;
  const void* update;
  int64_t n;
  double lr_scale;
  double decay;
} MuonApplyRow;

// param <- decay * param - lr_scale * update, otherwise like muon_momentum_pack.
int muon_unpack_apply(const MuonApplyRow* rows, int64_t count, int32_t param_dtype, int32_t update_dtype,
                      muon_stream_t stream);

// out <- x^T / norm, cast, for each of `batch` matrices. x is (batch, rows, cols) with any strides, in elements; out is
// (batch, cols, rows), contiguous, and overlaps neither of the others. The quotient is a float32's, rounded once more when
// it is written; dtypes are those of the flat passes.
typedef struct MuonDivideTransposed {
  const void* x;
  const float* norms;  // one for each matrix
  void* out;
  int64_t batch, rows, cols;
  int64_t stride_matrix, stride_row, stride_col;
  int32_t x_dtype, out_dtype;
} MuonDivideTransposed;

int muon_divide_transposed(const MuonDivideTransposed* problem, muon_stream_t stream);

// sums <- of each matrix the sum of the squares of its elements, and of the elements times 2^80: where a norm is small, the
// squares themselves underflow. x is (batch, numel), contiguous, and sums (batch, parts, 2): the sums over parts of a matrix,
// which the caller adds up. Arithmetic in float32; the same input gives the same bits.
typedef struct MuonSquares {
  const void* x;
  float* sums;
  int64_t batch, numel, parts;
  int32_t dtype;
} MuonSquares;

int muon_squares(const MuonSquares* problem, muon_stream_t stream);

const char* muon_status_name(int status);

#ifdef __cplusplus
}
#endif
