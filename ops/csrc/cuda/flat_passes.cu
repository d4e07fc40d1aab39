// The two elementwise passes over a flat fp32 partition, each reading and writing every array once.
//
// momentum_pack moves 14 bytes an element with a 2-byte send buffer, unpack_apply 10: the memory is the limit, so a
// thread takes eight elements at once with 16-byte accesses, all loads before the first use.
#include "../include/flat_split.h"
#include "launch.cuh"

namespace muon {
namespace {

constexpr int kThreads = 256;

struct Vector {
  float value[kFlatVector];
};

__device__ __forceinline__ Vector load_vector(const float* source) {
  const float4 low = reinterpret_cast<const float4*>(source)[0];
  const float4 high = reinterpret_cast<const float4*>(source)[1];
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

__device__ __forceinline__ void store_vector(float* target, const Vector& v) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* const four = v.value + 4 * half;
    store_global_16(target + 4 * half, make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]),
                                                  __float_as_uint(four[2]), __float_as_uint(four[3])));
  }
}

template <typename T>
__device__ __forceinline__ Vector load_vector(const T* source) {
  const uint4 bits = *reinterpret_cast<const uint4*>(source);
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  Vector v;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const float2 pair = Half2<T>::unpack(words[word]);
    v.value[2 * word] = pair.x;
    v.value[2 * word + 1] = pair.y;
  }
  return v;
}

template <typename T>
__device__ __forceinline__ void store_vector(T* target, const Vector& v) {
  store_global_16(target,
                  make_uint4(Half2<T>::pack(v.value[0], v.value[1]), Half2<T>::pack(v.value[2], v.value[3]),
                             Half2<T>::pack(v.value[4], v.value[5]), Half2<T>::pack(v.value[6], v.value[7])));
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// torch.lerp's two branches: each is exact at the end that it is nearer to.
__device__ __forceinline__ float lerp(float start, float end, float weight) {
  const float distance = end - start;
  return weight < 0.5f ? fmaf(weight, distance, start) : fmaf(weight - 1.0f, distance, end);
}

struct MomentumWeights {
  float gradient;  // 1 - decay
  float blend;     // decay
};

template <bool nesterov>
__device__ __forceinline__ float momentum_step(float& momentum, float grad, MomentumWeights weights) {
  momentum = lerp(momentum, grad, weights.gradient);
  return nesterov ? lerp(grad, momentum, weights.blend) : momentum;
}

template <typename T, bool nesterov>
__global__ void __launch_bounds__(kThreads)
    momentum_pack_kernel(float* __restrict__ momentum, const float* __restrict__ grad, T* __restrict__ out, int64_t n,
                         FlatSplit split, MomentumWeights weights) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t vector = first; vector < split.vectors; vector += step) {
    const int64_t at = split.head + vector * kFlatVector;
    Vector m = load_vector(momentum + at);
    const Vector g = load_vector(grad + at);
    Vector direction;
#pragma unroll
    for (int i = 0; i < kFlatVector; ++i) {
      direction.value[i] = momentum_step<nesterov>(m.value[i], g.value[i], weights);
    }
    store_vector(momentum + at, m);
    store_vector(out + at, direction);
  }
  const int64_t singles = split.singles(n);
  for (int64_t single = first; single < singles; single += step) {
    const int64_t at = split.single(single);
    float m = momentum[at];
    const float direction = momentum_step<nesterov>(m, grad[at], weights);
    momentum[at] = m;
    out[at] = from_float<T>(direction);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    unpack_apply_kernel(float* __restrict__ param, const T* __restrict__ update, int64_t n, FlatSplit split,
                        float lr_scale, float decay) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t vector = first; vector < split.vectors; vector += step) {
    const int64_t at = split.head + vector * kFlatVector;
    Vector p = load_vector(param + at);
    const Vector u = load_vector(update + at);
#pragma unroll
    for (int i = 0; i < kFlatVector; ++i) p.value[i] = fmaf(-lr_scale, u.value[i], decay * p.value[i]);
    store_vector(param + at, p);
  }
  const int64_t singles = split.singles(n);
  for (int64_t single = first; single < singles; single += step) {
    const int64_t at = split.single(single);
    param[at] = fmaf(-lr_scale, to_float(update[at]), decay * param[at]);
  }
}

// Blocks for a pass over n > 0 elements: no more than the device holds at once, since more would only repeat the
// prologue, and less than a second wave of them would leave most of the device idle.
int flat_grid(const FlatSplit& split, int64_t n, int resident) {
  const int64_t items = split.vectors > split.singles(n) ? split.vectors : split.singles(n);
  const int64_t wanted = (items + kThreads - 1) / kThreads;
  return static_cast<int>(wanted < resident ? wanted : resident);
}

template <typename T>
int launch_momentum_pack(float* momentum, const float* grad, void* out, int64_t n, MomentumWeights weights,
                         bool nesterov, cudaStream_t stream) {
  const FlatSplit split = flat_split(reinterpret_cast<uintptr_t>(momentum), reinterpret_cast<uintptr_t>(grad),
                                     reinterpret_cast<uintptr_t>(out), sizeof(T), n);
  const auto kernel = nesterov ? momentum_pack_kernel<T, true> : momentum_pack_kernel<T, false>;
  const Prepared ready = prepare(kernel, kThreads, 0);
  if (ready.status != MUON_OK) return ready.status;
  const int grid = flat_grid(split, n, ready.blocks);
  kernel<<<grid, kThreads, 0, stream>>>(momentum, grad, static_cast<T*>(out), n, split, weights);
  return cudaGetLastError();
}

template <typename T>
int launch_unpack_apply(float* param, const void* update, int64_t n, float lr_scale, float decay, cudaStream_t stream) {
  const uintptr_t wide = reinterpret_cast<uintptr_t>(param);
  const FlatSplit split = flat_split(wide, wide, reinterpret_cast<uintptr_t>(update), sizeof(T), n);
  const Prepared ready = prepare(unpack_apply_kernel<T>, kThreads, 0);
  if (ready.status != MUON_OK) return ready.status;
  const int grid = flat_grid(split, n, ready.blocks);
  unpack_apply_kernel<T><<<grid, kThreads, 0, stream>>>(param, static_cast<const T*>(update), n, split, lr_scale,
                                                        decay);
  return cudaGetLastError();
}

bool aligned_to(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

int check_flat(const float* wide, const void* narrow, int32_t dtype, int64_t n) {
  if (n < 0) return MUON_BAD_ARGUMENT;
  if (dtype != MUON_FLOAT32 && dtype != MUON_FLOAT16 && dtype != MUON_BFLOAT16) return MUON_DTYPE_UNSUPPORTED;
  if (n == 0) return MUON_OK;
  if (wide == nullptr || narrow == nullptr) return MUON_BAD_ARGUMENT;
  if (!aligned_to(wide, 4) || !aligned_to(narrow, dtype == MUON_FLOAT32 ? 4 : 2)) return MUON_MISALIGNED;
  return MUON_OK;
}

}  // namespace
}  // namespace muon

extern "C" int muon_flat_passes_available(void) {
  return muon::prepare(muon::unpack_apply_kernel<float>, muon::kThreads, 0).status;
}

extern "C" int muon_momentum_pack(float* momentum, const float* grad, void* out, int32_t out_dtype, int64_t n,
                                  double decay, int32_t nesterov, muon_stream_t stream) {
  const int status = muon::check_flat(momentum, out, out_dtype, n);
  if (status != MUON_OK || n == 0) return status;
  if (grad == nullptr) return MUON_BAD_ARGUMENT;
  if (!muon::aligned_to(grad, 4)) return MUON_MISALIGNED;
  const muon::MomentumWeights weights{static_cast<float>(1.0 - decay), static_cast<float>(decay)};
  switch (out_dtype) {
    case MUON_FLOAT16:
      return muon::launch_momentum_pack<__half>(momentum, grad, out, n, weights, nesterov != 0, stream);
    case MUON_BFLOAT16:
      return muon::launch_momentum_pack<__nv_bfloat16>(momentum, grad, out, n, weights, nesterov != 0, stream);
    default:
      return muon::launch_momentum_pack<float>(momentum, grad, out, n, weights, nesterov != 0, stream);
  }
}

extern "C" int muon_unpack_apply(float* param, const void* update, int32_t update_dtype, int64_t n, double lr_scale,
                                 double decay, muon_stream_t stream) {
  const int status = muon::check_flat(param, update, update_dtype, n);
  if (status != MUON_OK || n == 0) return status;
  const float scale = static_cast<float>(lr_scale);
  const float factor = static_cast<float>(decay);
  switch (update_dtype) {
    case MUON_FLOAT16:
      return muon::launch_unpack_apply<__half>(param, update, n, scale, factor, stream);
    case MUON_BFLOAT16:
      return muon::launch_unpack_apply<__nv_bfloat16>(param, update, n, scale, factor, stream);
    default:
      return muon::launch_unpack_apply<float>(param, update, n, scale, factor, stream);
  }
}
