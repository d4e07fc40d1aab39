// Hopper's own instructions: mbarriers, the tensor copy engine (TMA), wgmma, register reallocation.
//
// Everything but wgmma and setmaxnreg also exists on later chips; those two need the target sm_90a, in which
// __CUDA_ARCH_FEAT_SM90_ALL is defined. Include this only where it is.
#pragma once

#include <cuda.h>

#include "ptx.cuh"

namespace muon {

// ---- mbarriers --------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes fresh barriers known to the copy engine; a barrier of the block must follow for the other threads.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives and makes the phase wait for `bytes` more from the copy engine.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of the given parity has completed. Only the current phase and the one before can be told apart:
// the caller must not fall two phases behind or run two ahead.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, complete;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

// ---- tensor copies ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box at (x, y, z), x fastest, to shared memory and reports its bytes to `barrier`. What lies outside of the
// tensor arrives as zeros and counts as bytes too.
__device__ __forceinline__ void tensor_copy_3d(uint32_t target, const CUtensorMap* map, uint32_t barrier, int x, int y,
                                               int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(target), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// ---- clusters ---------------------------------------------------------------------------------------------------

// The number of this block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster meet here, and see what the others wrote before.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at the barrier with the same address in another block of the cluster.
__device__ __forceinline__ void barrier_arrive_in(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// tensor_copy_3d into all blocks of the cluster whose bit is set, at the same place in each; each one's barrier at the
// address of `barrier` hears of it.
__device__ __forceinline__ void tensor_copy_3d_to_cluster(uint32_t target, const CUtensorMap* map, uint32_t barrier, int x,
                                                          int y, int z, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// ---- wgmma ------------------------------------------------------------------------------------------------------

template <int registers>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Orders accesses to the accumulators before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` groups are incomplete.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving uses of an accumulator across this point.
__device__ __forceinline__ void pin(float (&block)[16][4]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(block[j][e])::"memory");
  }
}

#define MUON_D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define MUON_D64                                                                                                    \
  MUON_D4(0), MUON_D4(1), MUON_D4(2), MUON_D4(3), MUON_D4(4), MUON_D4(5), MUON_D4(6), MUON_D4(7), MUON_D4(8),       \
      MUON_D4(9), MUON_D4(10), MUON_D4(11), MUON_D4(12), MUON_D4(13), MUON_D4(14), MUON_D4(15)
// d += a b^T for 64 rows, 128 columns, 16 elements of k; a and b are K-major in shared memory. The trailing immediates
// are: keep d, do not negate a or b, no transposition of a or b.
#define MUON_WGMMA(type)                                                                                            \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                         \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                           \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                   \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                   \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                  \
               "%64, %65, 1, 1, 1, 0, 0;"                                                                           \
               : MUON_D64                                                                                           \
               : "l"(a), "l"(b))

template <typename T>
__device__ __forceinline__ void wgmma_64x128x16(float (&d)[16][4], uint64_t a, uint64_t b);

template <>
__device__ __forceinline__ void wgmma_64x128x16<__nv_bfloat16>(float (&d)[16][4], uint64_t a, uint64_t b) {
  MUON_WGMMA("bf16");
}

template <>
__device__ __forceinline__ void wgmma_64x128x16<__half>(float (&d)[16][4], uint64_t a, uint64_t b) {
  MUON_WGMMA("f16");
}

#undef MUON_WGMMA
#undef MUON_D64
#undef MUON_D4

#define MUON_D4(h, j) "+f"(d[h][0][j][0]), "+f"(d[h][0][j][1]), "+f"(d[h][0][j][2]), "+f"(d[h][0][j][3])
#define MUON_D64(h)                                                                                                 \
  MUON_D4(h, 0), MUON_D4(h, 1), MUON_D4(h, 2), MUON_D4(h, 3), MUON_D4(h, 4), MUON_D4(h, 5), MUON_D4(h, 6),          \
      MUON_D4(h, 7), MUON_D4(h, 8), MUON_D4(h, 9), MUON_D4(h, 10), MUON_D4(h, 11), MUON_D4(h, 12), MUON_D4(h, 13),  \
      MUON_D4(h, 14), MUON_D4(h, 15)
// The same for 256 columns; d[0] are the left 128.
#define MUON_WGMMA(type)                                                                                            \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                         \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                           \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                   \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                   \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                   \
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                   \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                   \
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "       \
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "  \
               "%128, %129, 1, 1, 1, 0, 0;"                                                                         \
               : MUON_D64(0), MUON_D64(1)                                                                           \
               : "l"(a), "l"(b))

template <typename T>
__device__ __forceinline__ void wgmma_64x256x16(float (&d)[2][1][16][4], uint64_t a, uint64_t b);

template <>
__device__ __forceinline__ void wgmma_64x256x16<__nv_bfloat16>(float (&d)[2][1][16][4], uint64_t a, uint64_t b) {
  MUON_WGMMA("bf16");
}

template <>
__device__ __forceinline__ void wgmma_64x256x16<__half>(float (&d)[2][1][16][4], uint64_t a, uint64_t b) {
  MUON_WGMMA("f16");
}

#undef MUON_WGMMA
#undef MUON_D64
#undef MUON_D4

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace muon
