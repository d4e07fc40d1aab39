// Symmetric GEMM with mma.sync, for compute capability 8.0 and newer.
//
// A block of 8 warps computes a 128 x 128 tile, each warp 64 x 32 of it. Operands come through a ring of cp.async
// stages; two blocks share a multiprocessor where its shared memory allows, so that one's epilogue overlaps the other's
// products.
#include "launch.cuh"

namespace muon {
namespace {

constexpr int kThreads = 256;
constexpr int kStages = 4;
constexpr int kRingBytes = kStages * 2 * kSm80OperandBytes;
// The staged output tile lies over the ring, which is drained by then.
constexpr int kSharedBytes = kRingBytes > kStageBytes ? kRingBytes : kStageBytes;

constexpr int kWarpRows = 64;
constexpr int kWarpCols = 32;
constexpr int kBlocksM = kWarpRows / 16;
constexpr int kBlocksN = kWarpCols / 8;

struct Operands {
  const void* a;
  const void* b;
  int64_t lda, ldb, stride_a, stride_b;
  int k;
  int batch;
};

template <typename T>
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_16816<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16816<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The rows of one operand that a block reads: kTile of them from `first` on, of which those below m exist.
template <typename T>
struct Panel {
  const T* matrix;
  int64_t ld;
  int first;
  int m;
  int k;

  // Starts copying block `block` of k. Outside of the matrix zeros are written, which add nothing to the product.
  __device__ __forceinline__ void load(uint32_t target, int block, int thread) const {
#pragma unroll
    for (int i = 0; i < kTile * kSm80RowChunks / kThreads; ++i) {
      const int index = thread + i * kThreads;
      const int row = index / kSm80RowChunks;
      const int chunk = index % kSm80RowChunks;
      const int col = block * kSm80BlockK + chunk * kChunk;
      const bool inside = first + row < m && col < k;
      const T* source = inside ? matrix + (first + row) * ld + col : matrix;
      cp_async_16(target + sm80_operand_chunk(row, chunk), source, inside);
    }
  }
};

// One stage's products: two mma steps of 16 elements of k.
template <typename T>
__device__ __forceinline__ void multiply_stage(float (&accumulator)[kBlocksM][kBlocksN][4], uint32_t a, uint32_t b,
                                               int row0, int col0, int lane) {
#pragma unroll
  for (int step = 0; step < kSm80BlockK / 16; ++step) {
    uint32_t fragment_a[kBlocksM][4];
    uint32_t fragment_b[kBlocksN / 2][4];
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
      const ChunkCoord at = sm80_a_source(row0 + 16 * i, step, lane);
      ldmatrix_x4(fragment_a[i], a + sm80_operand_chunk(at.row, at.chunk));
    }
#pragma unroll
    for (int j = 0; j < kBlocksN / 2; ++j) {
      const ChunkCoord at = sm80_b_source(col0 + 16 * j, step, lane);
      ldmatrix_x4(fragment_b[j], b + sm80_operand_chunk(at.row, at.chunk));
    }
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        mma_16816<T>(accumulator[i][j], fragment_a[i], fragment_b[j / 2][2 * (j % 2)],
                     fragment_b[j / 2][2 * (j % 2) + 1]);
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) sym_gemm_sm80_kernel(const Operands operands, const EpilogueArgs args) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t ring = shared_address(shared);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int row0 = thread / 32 / (kTile / kWarpCols) * kWarpRows;
  const int col0 = thread / 32 % (kTile / kWarpCols) * kWarpCols;
  const int blocks_k = ceil_div(operands.k, kSm80BlockK);
  const TileSchedule schedule(args.m, operands.batch);

  for (int64_t work = blockIdx.x; work < schedule.total; work += gridDim.x) {
    const TileCoord tile = schedule.tile(work);
    const Panel<T> a{static_cast<const T*>(operands.a) + tile.batch * operands.stride_a, operands.lda,
                     tile.row * kTile, args.m, operands.k};
    const Panel<T> b{static_cast<const T*>(operands.b) + tile.batch * operands.stride_b, operands.ldb,
                     tile.col * kTile, args.m, operands.k};
    const auto load = [&](int block) {
      const uint32_t stage = ring + block % kStages * (2 * kSm80OperandBytes);
      a.load(stage, block, thread);
      b.load(stage + kSm80OperandBytes, block, thread);
    };

    // A group is committed in every step, empty ones too, so that "all but the newest kStages - 2" is block `block`.
#pragma unroll
    for (int block = 0; block < kStages - 1; ++block) {
      if (block < blocks_k) load(block);
      cp_async_commit();
    }
    float accumulator[kBlocksM][kBlocksN][4] = {};
    for (int block = 0; block < blocks_k; ++block) {
      cp_async_wait<kStages - 2>();
      // Everyone's copies of this block have arrived, and everyone is done with the stage that is filled next.
      __syncthreads();
      if (block + kStages - 1 < blocks_k) load(block + kStages - 1);
      cp_async_commit();
      const uint32_t stage = ring + block % kStages * (2 * kSm80OperandBytes);
      multiply_stage<T>(accumulator, stage, stage + kSm80OperandBytes, row0, col0, lane);
    }
    cp_async_wait<0>();
    __syncthreads();  // The ring is free: the staged tile takes its place.

    if (args.c != nullptr) {
      prefetch_c<T, kThreads>(args, tile, ring, thread);
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
    }
    stage_tile<T>(args, tile.row == tile.col, accumulator, ring, row0, 16, col0, lane);
    __syncthreads();
    store_tile<T, kThreads>(args, tile, ring, thread);
    __syncthreads();  // Before the next tile's copies overwrite it.
  }
}

template <typename T>
int launch(const MuonSymGemm& p, cudaStream_t stream) {
  const Prepared prepared = prepare(sym_gemm_sm80_kernel<T>, kThreads, kSharedBytes);
  if (prepared.status != MUON_OK || p.batch == 0) return prepared.status;
  const TileSchedule schedule(static_cast<int>(p.m), static_cast<int>(p.batch));
  const unsigned grid = static_cast<unsigned>(schedule.total < prepared.blocks ? schedule.total : prepared.blocks);
  const Operands operands{p.a,        p.b,        p.lda,  p.ldb, p.stride_a, p.stride_b, static_cast<int>(p.k),
                          static_cast<int>(p.batch)};
  sym_gemm_sm80_kernel<T><<<grid, kThreads, kSharedBytes, stream>>>(operands, epilogue_args(p));
  return cudaGetLastError();
}

}  // namespace
}  // namespace muon

extern "C" int muon_sym_gemm_sm80_available(void) {
  int major = 0;
  const int status = muon::device_attribute(cudaDevAttrComputeCapabilityMajor, &major);
  if (status != cudaSuccess) return status;
  if (major < 8) return MUON_DEVICE_UNSUPPORTED;
  return muon::prepare(muon::sym_gemm_sm80_kernel<__half>, muon::kThreads, muon::kSharedBytes).status;
}

extern "C" int muon_sym_gemm_sm80(const MuonSymGemm* problem, muon_stream_t stream) {
  if (problem == nullptr) return MUON_BAD_ARGUMENT;
  const int status = muon::check_sym_gemm(*problem);
  if (status != MUON_OK) return status;
  return problem->dtype == MUON_FLOAT16 ? muon::launch<__half>(*problem, stream)
                                        : muon::launch<__nv_bfloat16>(*problem, stream);
}
