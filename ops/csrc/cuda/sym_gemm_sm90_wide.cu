// Symmetric GEMM for Hopper in squares of 256 x 256: a cluster of two blocks computes one, each its upper or lower half.
//
// With tiles of 128 x 128 a multiprocessor asks 64 bytes a clock of the L2 cache, more than it can give to all of them.
// Here a block computes 128 x 256, and the two blocks of a cluster share the 256 rows of b: each loads half of them and
// sends it to both. That asks 32 bytes a clock.
//
// A persistent block of three warpgroups. One thread of the first keeps the ring full; each of the other two computes 64
// rows of the block's half, both together turn and store its two tiles. Tiles above the diagonal are computed, where a
// square lies on it, and left out.
//
// The ring's barriers: `full` completes when this block's rows of a and both halves of b have arrived, of which one comes
// from the other block. `empty` completes when the consumers of both blocks are done with a stage, because what is loaded
// next goes to both. The blocks meet at the end: nobody may leave while the other one still sends to it.
#include "launch.cuh"
#include "ptx_sm90.cuh"
#include "tensor_map.cuh"

namespace muon {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kTeam = kConsumers * kWarpgroup;
constexpr int kThreads = kWarpgroup + kTeam;
constexpr int kBlocks = 2;  // of a cluster
constexpr int kSquare = kBlocks * kTile;
constexpr int kStages = 3;
constexpr int kRingStageBytes = (1 + kBlocks) * kSm90OperandBytes;  // rows of a, then both halves of b

// Offsets in shared memory from an address on 1024 bytes, where the pattern of the 128-byte swizzle starts.
constexpr int kStagingOffset = kStages * kRingStageBytes;
constexpr int kBarrierOffset = kStagingOffset + kBlocks * kStageBytes;
constexpr int kSharedBytes = kBarrierOffset + 8 * 2 * kStages + 1024;  // 1024: for rounding the start up
static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MUON_SM90_CLUSTER __cluster_dims__(2, 1, 1)
#else
#define MUON_SM90_CLUSTER
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// As in sym_gemm_sm90.cu: the consumers hold 128 accumulators each.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

struct Barriers {
  uint32_t first;
  __device__ __forceinline__ uint32_t full(int stage) const { return first + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return first + 8 * (kStages + stage); }
};

// The tile with the number `half`, from the left, of a block's half of a square.
__device__ __forceinline__ TileCoord tile_of(const TileCoord& square, int rank, int half) {
  return {square.batch, kBlocks * square.row + rank, kBlocks * square.col + half};
}

__device__ __forceinline__ void produce(const CUtensorMap& map_a, const CUtensorMap& map_b,
                                        const TileSchedule& schedule, int blocks_k, uint32_t ring, Barriers barriers,
                                        int rank) {
  prefetch_tensor_map(&map_a);
  prefetch_tensor_map(&map_b);
  PipelineState state;
  for (int64_t work = blockIdx.x / kBlocks; work < schedule.total; work += gridDim.x / kBlocks) {
    const TileCoord square = schedule.tile(work);
    const TileCoord own = tile_of(square, rank, rank);  // its rows of a, and the half of b that it loads
    for (int block = 0; block < blocks_k; ++block) {
      barrier_wait(barriers.empty(state.stage), state.phase ^ 1u);
      const uint32_t full = barriers.full(state.stage);
      const uint32_t target = ring + state.stage * kRingStageBytes;
      barrier_arrive_expect(full, kRingStageBytes);
      tensor_copy_3d(target, &map_a, full, block * kSm90BlockK, own.row * kTile, own.batch);
      tensor_copy_3d_to_cluster(target + (1 + rank) * kSm90OperandBytes, &map_b, full, block * kSm90BlockK,
                                own.col * kTile, own.batch, (1 << kBlocks) - 1);
      state.advance<kStages>();
    }
  }
}

// Tells both blocks that a warp of this one is done with a stage.
__device__ __forceinline__ void give_back(uint32_t empty, int rank, int lane) {
  if (lane == 0) barrier_arrive(empty);
  if (lane == 1) barrier_arrive_in(empty, rank ^ 1);
}

// The products of 64 rows. On return all of them are done and all stages are given back.
template <typename T>
__device__ __forceinline__ void multiply(float (&accumulator)[2][1][16][4], PipelineState& state, int blocks_k,
                                         uint32_t ring, Barriers barriers, int consumer, int rank, int lane) {
  int held = 0;
  for (int block = 0; block < blocks_k; ++block) {
    barrier_wait(barriers.full(state.stage), state.phase);
    const uint32_t stage = ring + state.stage * kRingStageBytes;
    const uint64_t a = sm90_descriptor(stage) + sm90_descriptor_rows(64) * consumer;
    const uint64_t b = sm90_descriptor(stage + kSm90OperandBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSm90BlockK / 16; ++step) {
      wgmma_64x256x16<T>(accumulator, a + sm90_descriptor_k(step), b + sm90_descriptor_k(step));
    }
    wgmma_commit();
    // The newest group keeps the tensor cores busy; the one before is done, in this warp, so its stage is free.
    wgmma_wait<1>();
    if (block > 0) give_back(barriers.empty(held), rank, lane);
    held = state.stage;
    state.advance<kStages>();
  }
  wgmma_wait<0>();
  pin(accumulator[0][0]);
  pin(accumulator[1][0]);
  give_back(barriers.empty(held), rank, lane);
}

template <typename T>
__device__ __forceinline__ void consume(const EpilogueArgs& args, const TileSchedule& schedule, int blocks_k,
                                        uint32_t ring, uint32_t staging, Barriers barriers, int consumer, int rank) {
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
  const int lane = thread % 32;
  const int warp = thread % kWarpgroup / 32;
  PipelineState state;
  for (int64_t work = blockIdx.x / kBlocks; work < schedule.total; work += gridDim.x / kBlocks) {
    const TileCoord square = schedule.tile(work);
    // On the diagonal, the upper block's right tile is above it.
    const int tiles = square.row == square.col && rank == 0 ? 1 : 2;
    if (args.c != nullptr) {
      for (int half = 0; half < tiles; ++half) {
        prefetch_c<T, kTeam>(args, tile_of(square, rank, half), staging + half * kStageBytes, thread);
      }
      cp_async_commit();
    }
    float accumulator[2][1][16][4] = {};
    multiply<T>(accumulator, state, blocks_k, ring, barriers, consumer, rank, lane);

    if (args.c != nullptr) {
      cp_async_wait<0>();
      named_barrier<kTeam>(1);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half >= tiles) continue;
      const TileCoord tile = tile_of(square, rank, half);
      stage_tile<T>(args, tile.row == tile.col, accumulator[half], staging + half * kStageBytes,
                    64 * consumer + 16 * warp, 0, 0, lane);
    }
    named_barrier<kTeam>(1);
    for (int half = 0; half < tiles; ++half) {
      store_tile<T, kTeam>(args, tile_of(square, rank, half), staging + half * kStageBytes, thread);
    }
    named_barrier<kTeam>(1);  // Before the next square's c, or the next square, overwrites it.
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T>
__global__ void MUON_SM90_CLUSTER __launch_bounds__(MUON_SM90_THREADS, 1)
    sym_gemm_sm90_wide_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                              const EpilogueArgs args, const int k, const int batch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  const uint32_t ring = (shared_address(shared) + 1023u) & ~1023u;
  const Barriers barriers{ring + kBarrierOffset};
  const int blocks_k = ceil_div(k, kSm90BlockK);
  const TileSchedule schedule(args.m, batch, kSquare);
  const int rank = static_cast<int>(cluster_rank());

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(barriers.full(stage), 1);
      barrier_init(barriers.empty(stage), kBlocks * kTeam / 32);
    }
    barrier_init_fence();
  }
  cluster_sync();  // The other block sends to this one's barriers.

  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(map_a, map_b, schedule, blocks_k, ring, barriers, rank);
  } else {
    more_registers<kConsumerRegisters>();
    consume<T>(args, schedule, blocks_k, ring, ring + kStagingOffset, barriers, warpgroup - 1, rank);
  }
  cluster_sync();  // Nobody leaves while the other block still sends to it.
#else
  __trap();
#endif
}

template <typename T>
int launch(const MuonSymGemm& p, cudaStream_t stream) {
  const Prepared prepared = prepare(sym_gemm_sm90_wide_kernel<T>, kThreads, kSharedBytes, kBlocks);
  if (prepared.status != MUON_OK || p.batch == 0) return prepared.status;
  CUtensorMap map_a;
  CUtensorMap map_b;
  const int status = describe(p, &map_a, &map_b);
  if (status != MUON_OK) return status;
  const TileSchedule schedule(static_cast<int>(p.m), static_cast<int>(p.batch), kSquare);
  const int64_t blocks = kBlocks * schedule.total;
  const unsigned grid = static_cast<unsigned>(blocks < prepared.blocks ? blocks : prepared.blocks);
  sym_gemm_sm90_wide_kernel<T><<<grid, kThreads, kSharedBytes, stream>>>(
      map_a, map_b, epilogue_args(p), static_cast<int>(p.k), static_cast<int>(p.batch));
  return cudaGetLastError();
}

}  // namespace
}  // namespace muon

static muon::Prepared prepared() {
  const int status = muon::hopper_with_tensor_maps();
  if (status != MUON_OK) return {status, 0};
  return muon::prepare(muon::sym_gemm_sm90_wide_kernel<__half>, muon::kThreads, muon::kSharedBytes, muon::kBlocks);
}

extern "C" int muon_sym_gemm_sm90_wide_available(void) { return prepared().status; }

// A square takes a multiprocessor of its cluster as long as two tiles.
extern "C" int64_t muon_sym_gemm_sm90_wide_waves(int64_t batch, int64_t m) {
  const muon::TileSchedule squares(static_cast<int>(m), static_cast<int>(batch), muon::kSquare);
  return 2 * muon::waves(squares.total, prepared().blocks / muon::kBlocks);
}

extern "C" int muon_sym_gemm_sm90_wide(const MuonSymGemm* problem, muon_stream_t stream) {
  return muon::run_checked(problem, stream, muon_sym_gemm_sm90_wide_available, muon::launch<__half>, muon::launch<__nv_bfloat16>);
}
