// Symmetric GEMM for Hopper: TMA into a ring of swizzled stages, wgmma out of it.
//
// A persistent block of three warpgroups. One thread of the first takes the block's tiles and keeps the ring full; the
// other two take turns with whole 128 x 128 tiles, so that one's epilogue (read c, scale, turn, write twice) runs
// behind the other's products. Each consumer has a staging buffer of its own, into which it prefetches its tile of c
// before its products start.
//
// The first tile of a block is that of its index; it takes the others from a counter in global memory, one at a time. So
// a block that starts late, because a kernel of NCCL has its multiprocessor, has one tile to compute, not its share.
//
// The ring's barriers: `full` completes when both operands of a stage have arrived, `empty` when the four warps of the
// consumer that used it are done. `issued` of a consumer completes when it has seen every copy of its tile arrive; the
// other one starts the next tile only then. That is not only fair, where the ring holds a tile or more it is needed: a
// full barrier tells the current phase from the one before and no more, and a consumer that ran ahead would take the one
// for the other. `tile_full` of a consumer completes when the number of its next tile is in shared memory, `tile_empty`
// when all of its threads have read it.
#include "launch.cuh"
#include "ptx_sm90.cuh"
#include "tensor_map.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MUON_SM90_THREADS kThreads
#else
// Code for another chip has no body. Its launch bounds say so to prepare(): the host would not launch it.
#define MUON_SM90_THREADS 32
#endif

namespace muon {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = kWarpgroup * (1 + kConsumers);
constexpr int kStages = 5;
constexpr int kRingStageBytes = 2 * kSm90OperandBytes;

// Offsets in shared memory from an address on 1024 bytes, where the pattern of the 128-byte swizzle starts.
constexpr int kStagingOffset = kStages * kRingStageBytes;
constexpr int kBarrierOffset = kStagingOffset + kConsumers * kStageBytes;
constexpr int kBarriers = 2 * kStages + 3 * kConsumers;
constexpr int kTileOffset = 8 * kBarriers;  // behind the barriers
constexpr int kSharedBytes = kBarrierOffset + kTileOffset + 4 * kConsumers + 1024;  // 1024: for rounding the start up
static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// 168 registers a thread are what 384 threads can have at launch. The consumers hold 128 accumulators; the producer needs
// next to nothing. 40 x 128 + 232 x 256 = 64512 of 65536.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

// And, behind them, the number of the next tile of each consumer.
struct Barriers {
  uint32_t first;
  __device__ __forceinline__ uint32_t full(int stage) const { return first + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return first + 8 * (kStages + stage); }
  __device__ __forceinline__ uint32_t issued(int consumer) const { return first + 8 * (2 * kStages + consumer); }
  __device__ __forceinline__ uint32_t tile_full(int consumer) const { return issued(kConsumers + consumer); }
  __device__ __forceinline__ uint32_t tile_empty(int consumer) const { return issued(2 * kConsumers + consumer); }
  __device__ __forceinline__ uint32_t tile(int consumer) const { return first + kTileOffset + 4 * consumer; }
};

__device__ __forceinline__ void produce(const CUtensorMap& map_a, const CUtensorMap& map_b,
                                        const TileSchedule& schedule, unsigned* counter, int blocks_k, uint32_t ring,
                                        Barriers barriers) {
  prefetch_tensor_map(&map_a);
  prefetch_tensor_map(&map_b);
  const uint32_t total = static_cast<uint32_t>(schedule.total);
  // The next tile is taken when as many loads as the ring has stages are left, which hide the time that it takes.
  const int ahead = blocks_k > kStages ? blocks_k - kStages : 0;
  PipelineState state;
  PipelineState turn;  // its stage is the consumer
  uint32_t work = blockIdx.x;
  for (int ended = 0; ended < kConsumers; turn.advance<kConsumers>()) {
    barrier_wait(barriers.tile_empty(turn.stage), turn.phase ^ 1u);
    store_shared_4(barriers.tile(turn.stage), work);
    barrier_arrive(barriers.tile_full(turn.stage));
    if (work == total) {
      ++ended;
      continue;
    }
    const TileCoord tile = schedule.tile(work);
    const auto load = [&](int block) {
      barrier_wait(barriers.empty(state.stage), state.phase ^ 1u);
      const uint32_t full = barriers.full(state.stage);
      const uint32_t target = ring + state.stage * kRingStageBytes;
      barrier_arrive_expect(full, kRingStageBytes);
      tensor_copy_3d(target, &map_a, full, block * kSm90BlockK, tile.row * kTile, tile.batch);
      tensor_copy_3d(target + kSm90OperandBytes, &map_b, full, block * kSm90BlockK, tile.col * kTile, tile.batch);
      state.advance<kStages>();
    };
    int block = 0;
    for (; block < ahead; ++block) load(block);
    // Every block takes until it gets one too many, `total` times together: then the counter is 0 again.
    const uint32_t taken = atomicInc(counter, total - 1);
    for (; block < blocks_k; ++block) load(block);
    work = taken < total - gridDim.x ? gridDim.x + taken : total;
  }
}

// The products of one tile. On return all of them are done and all stages are given back.
template <typename T>
__device__ __forceinline__ void multiply(float (&accumulator)[2][16][4], PipelineState& state, int blocks_k,
                                         uint32_t ring, Barriers barriers, int consumer, int lane) {
  int held = 0;
  for (int block = 0; block < blocks_k; ++block) {
    barrier_wait(barriers.full(state.stage), state.phase);
    const uint32_t stage = ring + state.stage * kRingStageBytes;
    const uint64_t a = sm90_descriptor(stage);
    const uint64_t b = sm90_descriptor(stage + kSm90OperandBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSm90BlockK / 16; ++step) {
      wgmma_64x128x16<T>(accumulator[0], a + sm90_descriptor_k(step), b + sm90_descriptor_k(step));
      wgmma_64x128x16<T>(accumulator[1], a + sm90_descriptor_rows(64) + sm90_descriptor_k(step),
                         b + sm90_descriptor_k(step));
    }
    wgmma_commit();
    // The newest group keeps the tensor cores busy; the one before is done, in this warp, so its stage is free.
    wgmma_wait<1>();
    if (block > 0 && lane == 0) barrier_arrive(barriers.empty(held));
    held = state.stage;
    state.advance<kStages>();
  }
  if (lane == 0) barrier_arrive(barriers.issued(consumer));
  wgmma_wait<0>();
  pin(accumulator[0]);
  pin(accumulator[1]);
  if (lane == 0) barrier_arrive(barriers.empty(held));
}

template <typename T>
__device__ __forceinline__ void consume(const EpilogueArgs& args, const TileSchedule& schedule, int blocks_k,
                                        uint32_t ring, uint32_t staging, Barriers barriers, int consumer) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int named = 1 + consumer;
  PipelineState state;
  if (consumer == 1) state.skip<kStages>(blocks_k);
  for (uint32_t phase = 0;; phase ^= 1u) {
    barrier_wait(barriers.tile_full(consumer), phase);
    const uint32_t work = load_shared_4(barriers.tile(consumer));
    barrier_arrive(barriers.tile_empty(consumer));
    if (work >= schedule.total) return;
    const TileCoord tile = schedule.tile(work);
    if (args.c != nullptr) {
      prefetch_c<T, kWarpgroup>(args, tile, staging, thread);
      cp_async_commit();
    }
    // The tile before is the other consumer's, for consumer 1 in the same phase. There is none before the block's first
    // one, for which consumer 0 waits with the parity that a fresh barrier passes at once.
    barrier_wait(barriers.issued(1 - consumer), phase ^ static_cast<uint32_t>(1 - consumer));
    float accumulator[2][16][4] = {};
    multiply<T>(accumulator, state, blocks_k, ring, barriers, consumer, lane);
    state.skip<kStages>(blocks_k);  // The next tile's blocks of k are the other consumer's.

    if (args.c != nullptr) {
      cp_async_wait<0>();
      named_barrier<kWarpgroup>(named);
    }
    stage_tile<T>(args, tile.row == tile.col, accumulator, staging, 16 * warp, 64, 0, lane);
    named_barrier<kWarpgroup>(named);
    store_tile<T, kWarpgroup>(args, tile, staging, thread);
    named_barrier<kWarpgroup>(named);  // Before the next tile's c, or the next tile, overwrites it.
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T>
__global__ void __launch_bounds__(MUON_SM90_THREADS, 1)
    sym_gemm_sm90_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                         const EpilogueArgs args, unsigned* const counter, const int k, const int batch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  const uint32_t ring = (shared_address(shared) + 1023u) & ~1023u;
  const Barriers barriers{ring + kBarrierOffset};
  const int blocks_k = ceil_div(k, kSm90BlockK);
  const TileSchedule schedule(args.m, batch);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(barriers.full(stage), 1);
      barrier_init(barriers.empty(stage), kWarpgroup / 32);
    }
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      barrier_init(barriers.issued(consumer), kWarpgroup / 32);
      barrier_init(barriers.tile_full(consumer), 1);
      barrier_init(barriers.tile_empty(consumer), kWarpgroup);
    }
    barrier_init_fence();
  }
  __syncthreads();

  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(map_a, map_b, schedule, counter, blocks_k, ring, barriers);
  } else {
    more_registers<kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    consume<T>(args, schedule, blocks_k, ring, ring + kStagingOffset + consumer * kStageBytes, barriers, consumer);
  }
#else
  __trap();
#endif
}

template <typename T>
int launch(const MuonSymGemm& p, cudaStream_t stream) {
  const Prepared prepared = prepare(sym_gemm_sm90_kernel<T>, kThreads, kSharedBytes);
  if (prepared.status != MUON_OK || p.batch == 0) return prepared.status;
  CUtensorMap map_a;
  CUtensorMap map_b;
  const int status = describe(p, &map_a, &map_b);
  if (status != MUON_OK) return status;
  const TileSchedule schedule(static_cast<int>(p.m), static_cast<int>(p.batch));
  const unsigned grid = static_cast<unsigned>(schedule.total < prepared.blocks ? schedule.total : prepared.blocks);
  sym_gemm_sm90_kernel<T><<<grid, kThreads, kSharedBytes, stream>>>(
      map_a, map_b, epilogue_args(p), p.counter, static_cast<int>(p.k), static_cast<int>(p.batch));
  return cudaGetLastError();
}

}  // namespace
}  // namespace muon

extern "C" int muon_sym_gemm_available(void) {
  int major = 0;
  int minor = 0;
  int status = muon::device_attribute(cudaDevAttrComputeCapabilityMajor, &major);
  if (status == cudaSuccess) status = muon::device_attribute(cudaDevAttrComputeCapabilityMinor, &minor);
  if (status != cudaSuccess) return status;
  // sm_90a code runs on 9.0 and nowhere else, later chips included.
  if (major != 9 || minor != 0) return MUON_DEVICE_UNSUPPORTED;
  if (muon::tensor_map_encoder() == nullptr) return MUON_DRIVER_ERROR;
  return muon::prepare(muon::sym_gemm_sm90_kernel<__half>, muon::kThreads, muon::kSharedBytes).status;
}

extern "C" int muon_sym_gemm(const MuonSymGemm* problem, muon_stream_t stream) {
  if (problem == nullptr) return MUON_BAD_ARGUMENT;
  int status = muon::check_sym_gemm(*problem);
  if (status == MUON_OK) status = muon_sym_gemm_available();
  if (status != MUON_OK) return status;
  return problem->dtype == MUON_FLOAT16 ? muon::launch<__half>(*problem, stream)
                                        : muon::launch<__nv_bfloat16>(*problem, stream);
}
