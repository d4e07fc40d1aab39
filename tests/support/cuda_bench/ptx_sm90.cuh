// Stands for ops/csrc/cuda/ptx_sm90.cuh: the same functions, by the machine instead of PTX.
#pragma once

#include <cuda.h>

#include "ptx.cuh"

namespace muon {

inline void barrier_init(uint32_t barrier, uint32_t arrivals) { bench::phase_init(barrier, arrivals); }
inline void barrier_init_fence() { bench::phase_init_fence(); }
inline void barrier_arrive(uint32_t barrier) { bench::phase_arrive(barrier, 0); }
inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) { bench::phase_arrive(barrier, bytes); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) { bench::phase_wait(barrier, parity); }

inline void prefetch_tensor_map(const CUtensorMap*) {}
inline void tensor_copy_3d(uint32_t target, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  bench::copy_box(target, map, barrier, x, y, z);
}

template <int registers>
inline void more_registers() {}
template <int registers>
inline void fewer_registers() {}

inline void wgmma_fence() { bench::group_fence(); }
inline void wgmma_commit() { bench::group_commit(); }
template <int pending>
inline void wgmma_wait() {
  bench::group_wait(pending);
}
inline void pin(float (&)[16][4]) {}

template <typename T>
inline void wgmma_64x128x16(float (&d)[16][4], uint64_t a, uint64_t b);
template <>
inline void wgmma_64x128x16<__nv_bfloat16>(float (&d)[16][4], uint64_t a, uint64_t b) {
  bench::group_multiply(&d[0][0], a, b, false);
}
template <>
inline void wgmma_64x128x16<__half>(float (&d)[16][4], uint64_t a, uint64_t b) {
  bench::group_multiply(&d[0][0], a, b, true);
}

}  // namespace muon
