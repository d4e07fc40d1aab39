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

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace muon
