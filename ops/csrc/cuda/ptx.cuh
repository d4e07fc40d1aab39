// The PTX instructions that the kernels use, one function each. Facts are from the PTX ISA manual.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace muon {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- asynchronous copies, global to shared, 16 bytes ------------------------------------------------------------

// Copies 16 bytes, or writes 16 zero bytes where `valid` is false; `source` must be a readable address even then.
__device__ __forceinline__ void cp_async_16(uint32_t target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's groups are incomplete.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- shared memory ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&value)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Barrier `id` (0 is __syncthreads) among `threads` threads of the block.
template <int threads>
__device__ __forceinline__ void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(threads) : "memory");
}

// ---- global memory ----------------------------------------------------------------------------------------------

// One 16-byte store, for memory that this kernel does not read again: without a "memory" clobber loads may pass it. The
// compiler makes four stores of an assignment of a uint4 where it cannot tell that they are neighbours.
__device__ __forceinline__ void store_global_16(void* target, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w));
}

__device__ __forceinline__ void store_global_8(void* target, uint2 value) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(value.x), "r"(value.y));
}

// One element.
template <typename T>
__device__ __forceinline__ void store_global(T* target, T value) {
  *target = value;
}

// ---- the two element types --------------------------------------------------------------------------------------

// Two floats rounded to nearest even and packed, the first in the low half; and back.
template <typename T>
struct Half2;

template <>
struct Half2<__nv_bfloat16> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t bits) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits));
  }
};

template <>
struct Half2<__half> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t bits) {
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }
};

}  // namespace muon
